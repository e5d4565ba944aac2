"""Select runs by their settings: ``norm=cn``, ``lr<=0.03``, ``strategy=er,derpp``. Needs no torch.

A selection consists of conditions, all of which must hold. In text, a condition is a key, an operator and one or more
values, separated by commas; further conditions follow after a comma: ``norm=bn,cn,lr<0.1``. Keys are dotted settings,
their names without the group where those are unique, short names such as ``norm``, or ``seed``, ``hash`` and
``status``. Values are compared with resolved settings, as `bench.Runs.to_frame` shows them. A stream of the user's data
is also selected by the name of the data, which tables show.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from contnorm.bench.config.defaults import canonical_strategy, resolved_settings, stream_name
from contnorm.bench.config.schema import RunConfig, flatten_settings
from contnorm.bench.config.sources import format_value, parse_assignment
from contnorm.bench.memories import MEMORIES
from contnorm.bench.metrics.accuracy_matrix import SCORES
from contnorm.bench.metrics.multilabel import LABEL_SCORES
from contnorm.bench.models import NETWORKS
from contnorm.bench.strategies.registry import STRATEGIES
from contnorm.bench.streams.tasks import STREAMS, find_stream
from contnorm.errors import UserError, unknown
from contnorm.registry import NORMS, find_norm

__all__ = [
    "IDENTITY",
    "SHORT_KEYS",
    "Condition",
    "RunLike",
    "check_conditions",
    "conditions_of",
    "has_operator",
    "nearest",
    "no_match",
    "parse_selection",
    "resolve_key",
    "select",
    "setting_keys",
    "value_of",
]

IDENTITY = ("hash", "seed", "status")  # keys that are not settings
SHORT_KEYS = {
    "norm": "norm.name",
    "strategy": "strategy.name",
    "stream": "stream.name",
    "model": "model.name",
    "memory": "memory.kind",
    "buffer": "memory.size",
    "weights": "model.weights",
}  # other short keys are names of settings without their group
_NAMES: dict[str, Collection[str]] = {
    "norm.name": NORMS,
    "strategy.name": STRATEGIES,
    "stream.name": STREAMS,
    "model.name": NETWORKS,
    "memory.kind": MEMORIES,
}
_ORDERINGS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_CONDITION = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(!=|<=|>=|==|=|<|>)(.*)", re.DOTALL)
_SHOWN = 8  # values that a message lists


class RunLike(Protocol):
    """A run with one seed: a record, a diverged run or an unfinished one; without settings if they are unknown."""

    @property
    def config(self) -> RunConfig | None: ...
    @property
    def hash(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def status(self) -> str: ...


Item = TypeVar("Item", bound=RunLike)


@dataclass(frozen=True)
class Condition:
    """One condition of a selection.

    Attributes:
        key: Dotted setting, or one of `IDENTITY`.
        operator: ``=``, ``!=``, ``<``, ``<=``, ``>`` or ``>=``; or ``is`` for a function.
        values: The values to compare with, or one function that returns whether a value is selected.
        typed: The key as the user gave it.
    """

    key: str
    operator: str
    values: tuple[Any, ...]
    typed: str = ""

    def __str__(self) -> str:
        return f"{self.typed or self.key}{self.operator}{','.join(map(format_value, self.values))}"

    def holds(self, item: RunLike) -> bool:
        """Whether the condition holds; never if the settings of the run are unknown."""
        if self.key not in IDENTITY and item.config is None:
            return False
        value = value_of(item, self.key)
        if self.operator == "is":
            return bool(self.values[0](value))
        if self.operator in _ORDERINGS:
            return _is_number(value) and _ORDERINGS[self.operator](value, self.values[0])
        equal = any(_equals(item, self.key, value, wanted) for wanted in self.values)
        return equal == (self.operator == "=")

    @classmethod
    def of(cls, typed: str, value: Any, keys: Collection[str] = ()) -> Condition:
        """Condition of a Python argument: a value, a collection of values, or a function.

        Args:
            typed: The key.
            value: What is selected.
            keys: Settings of user code, in addition to those of the schema.
        """
        key = resolve_key(typed, keys)
        if callable(value):
            return cls(key, "is", (value,), typed)
        if isinstance(value, list | tuple | set | frozenset | range):
            return cls(key, "=", tuple(value), typed)
        return cls(key, "=", (value,), typed)


def has_operator(text: str) -> bool:
    """Whether a text is a selection rather than a path or a hash.

    Example:
        >>> has_operator("norm=bn"), has_operator("runs/75cc28cb778a")
        (True, False)
    """
    return _CONDITION.match(text) is not None


def parse_selection(text: str, keys: Collection[str] = ()) -> list[Condition]:
    """Parse the conditions of a text.

    Args:
        text: Conditions, such as ``norm=bn,cn,lr<0.1``.
        keys: Settings of user code, in addition to those of the schema.

    Raises:
        UserError: If there is no operator, a key is unknown, or a value is missing or not a number where one is needed.

    Example:
        >>> [str(condition) for condition in parse_selection("norm=bn,cn,lr<=0.1")]
        ['norm=bn,cn', 'lr<=0.1']
        >>> parse_selection("cn")
        Traceback (most recent call last):
        contnorm.errors.UserError: selection 'cn': expected a condition, such as norm=cn or lr<0.1.
    """
    conditions: list[Condition] = []
    for part in text.split(","):
        match = _CONDITION.match(part)
        if match is not None:
            typed, sign, value = match.groups()
            key, sign = resolve_key(typed, keys), "=" if sign == "==" else sign
            conditions.append(Condition(key, sign, (_parse_value(key, value, text),), typed))
        elif conditions:
            last = conditions[-1]
            values = (*last.values, _parse_value(last.key, part, text))
            conditions[-1] = Condition(last.key, last.operator, values, last.typed)
        else:
            raise UserError(f"selection {text!r}: expected a condition, such as norm=cn or lr<0.1.")
    for condition in conditions:
        _check_ordering(condition, text)
    return conditions


def _parse_value(key: str, text: str, selection: str) -> Any:
    value = text.strip()
    if not value:
        raise UserError(f"selection {selection!r}: a value is missing. Use none for a setting without a value.")
    # A hash can look like a number, such as 123456789012 or 1e1234567890.
    return value if key in ("hash", "status") else parse_assignment(f"{key}={value}")[1]


def _check_ordering(condition: Condition, text: str) -> None:
    if condition.operator not in _ORDERINGS:
        return
    if len(condition.values) > 1 or not _is_number(condition.values[0]):
        raise UserError(f"selection {text!r}: {condition.operator} needs one number. Use = or != for other values.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def setting_keys(items: Iterable[RunLike] = ()) -> list[str]:
    """Dotted keys of all settings, with those of user code that occur in some runs.

    Example:
        >>> setting_keys()[:2]
        ['stream.name', 'stream.source']
    """
    configs = {id(item.config): item.config for item in items if item.config is not None}
    keys = dict.fromkeys(flatten_settings(RunConfig().as_dict()))
    for config in configs.values():
        keys |= dict.fromkeys(resolved_settings(config))
    return list(keys)


def resolve_key(key: str, more: Collection[str] = ()) -> str:
    """Dotted setting or identity key of a full or short key.

    Args:
        key: The key as the user gave it.
        more: Settings of user code, in addition to those of the schema.

    Example:
        >>> [resolve_key(key) for key in ("norm", "lr", "train.batch", "seed")]
        ['norm.name', 'train.lr', 'train.batch', 'seed']
        >>> resolve_key("code")
        Traceback (most recent call last):
        contnorm.errors.UserError: 'code' is ambiguous. Use one of strategy.code, memory.code, model.code, ...
    """
    settings = list(dict.fromkeys([*setting_keys(), *more]))
    if key in IDENTITY or key in settings:
        return key
    if key in SHORT_KEYS:
        return SHORT_KEYS[key]
    matches = [setting for setting in settings if setting.rpartition(".")[2] == key]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UserError(f"{key!r} is ambiguous. Use one of {', '.join(matches)}.")
    if key in SCORES or key in LABEL_SCORES:
        raise UserError(f"{key!r} is a score, and runs are selected by settings, seed, hash or status.")
    short = [setting.rpartition(".")[2] for setting in settings]
    raise unknown("key", key, [*IDENTITY, *settings], nearest(key, [*settings, *SHORT_KEYS, *short, *IDENTITY]))


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The known name with the most similar spelling, if there is one.

    Example:
        >>> nearest("strateg", ["stream", "strategy"]), nearest("xyz", ["stream"])
        (['strategy'], [])
    """
    return difflib.get_close_matches(name, dict.fromkeys(known), n=1, cutoff=0.6)


def value_of(item: RunLike, key: str) -> Any:
    """Resolved value of a setting, or a part of the identity of a run; None if it has no such setting."""
    if key in IDENTITY:
        return getattr(item, key)
    return None if item.config is None else resolved_settings(item.config).get(key)


def select(items: Sequence[Item], conditions: Sequence[Condition]) -> list[Item]:
    """The runs for which all conditions hold."""
    return [item for item in items if all(condition.holds(item) for condition in conditions)]


def check_conditions(items: Sequence[RunLike], conditions: Sequence[Condition]) -> None:
    """Reject conditions that hide a mistake behind an empty selection.

    Raises:
        UserError: If a norm, strategy, stream, model or memory neither is a known name nor occurs in a run; or if a
            setting that has no numbers is compared by size.
    """
    for condition in conditions:
        if condition.operator in ("=", "!="):
            _check_names(items, condition)
        elif condition.operator in _ORDERINGS:
            values = [value for value in _values(items, condition.key) if value is not None]
            if values and not any(map(_is_number, values)):
                raise UserError(
                    f"{condition}: {condition.key} has no numbers, but {_listed(values)}. Use = or != for it."
                )


def _check_names(items: Sequence[RunLike], condition: Condition) -> None:
    key = condition.key
    if key not in _NAMES:
        return
    recorded = _values(items, key)
    if key == "stream.name":
        recorded = list(dict.fromkeys([*map(_data_name, items), *recorded]))
    for value in condition.values:
        if value not in recorded and _canonical(key, value)[0] not in _NAMES[key]:
            names = sorted(str(name) for name in recorded if name is not None) or list(_NAMES[key])
            near = nearest(value, [*names, *_NAMES[key]]) if isinstance(value, str) else []
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{condition.typed or key}: no record has {value!r}.{hint} There are {', '.join(names)}.")


def no_match(items: Sequence[RunLike], texts: Sequence[str]) -> str:
    """Why no run meets conditions: the first condition that holds for none, with the values that occur.

    Example:
        >>> no_match([], ["norm=cn"])
        'There are no runs.'
    """
    if not items:
        return "There are no runs."
    conditions = conditions_of(texts, {}, setting_keys(items))
    for condition in conditions:
        if not select(items, [condition]):
            values = _values(items, condition.key)
            return f"No run has {condition}; {condition.key} is {_listed(values)}."
    return f"No run has all of {' '.join(map(str, conditions))}."


def _values(items: Iterable[RunLike], key: str) -> list[Any]:
    """Different values of a key, in order of occurrence."""
    known = [item for item in items if key in IDENTITY or item.config is not None]
    return list(dict.fromkeys(value_of(item, key) for item in known))


def _listed(values: Sequence[Any]) -> str:
    sortable = all(map(_is_number, values)) or all(isinstance(value, str) for value in values)
    texts = [format_value(value) for value in (sorted(values) if sortable else values)]
    rest = f" or one of {len(texts) - _SHOWN} more values" if len(texts) > _SHOWN else ""
    if not rest and len(texts) > 1:
        return f"{', '.join(texts[:-1])} or {texts[-1]}"
    return f"{', '.join(texts[:_SHOWN])}{rest}"


def _equals(item: RunLike, key: str, value: Any, wanted: Any) -> bool:
    """Whether the value of a run is the wanted one; names are compared as `bench.run` understands them."""
    if key in _NAMES:
        return _is_named(item, key, _canonical(key, wanted))
    if key == "hash" and isinstance(wanted, str):
        return bool(wanted) and str(value).startswith(wanted)
    if isinstance(value, bool) != isinstance(wanted, bool):
        return False
    return bool(value == wanted) or (isinstance(value, str) and value == format_value(wanted))


def _canonical(key: str, name: Any) -> tuple[Any, int | None]:
    """Name as records have it, and the number of groups that ends the name of a norm.

    Example:
        >>> _canonical("norm.name", "CN8"), _canonical("strategy.name", "DER++"), _canonical("model.name", "my.py:Net")
        (('cn', 8), ('derpp', None), ('my.py:Net', None))
    """
    if not isinstance(name, str):
        return name, None
    if key == "strategy.name":
        return canonical_strategy(name), None
    with suppress(ValueError, UserError):  # not a name of the registry
        if key == "norm.name":
            spec, groups = find_norm(name)
            return spec.name, groups
        if key == "stream.name":
            return find_stream(name).name, None
    return name, None


def _is_named(item: RunLike, key: str, wanted: tuple[Any, int | None]) -> bool:
    name, groups = _canonical(key, value_of(item, key))
    if key == "stream.name" and wanted[0] == _data_name(item):
        return True
    if name != wanted[0]:
        return False
    return wanted[1] is None or wanted[1] == (groups or value_of(item, "norm.groups"))


def _data_name(item: RunLike) -> str | None:
    """Name of the stream in tables; None if the settings of the run are unknown."""
    return None if item.config is None else stream_name(item.config.stream)


def conditions_of(texts: Sequence[str], arguments: Mapping[str, Any], keys: Collection[str] = ()) -> list[Condition]:
    """Conditions of `bench.Runs.where`: of texts, and of keyword arguments."""
    parsed = [condition for text in texts for condition in parse_selection(text, keys)]
    return [*parsed, *(Condition.of(key, value, keys) for key, value in arguments.items())]
