"""Select runs by their settings: ``norm=cn``, ``lr<=0.03``, ``strategy=er,derpp``. Needs no torch.

A selection consists of conditions, all of which must hold. In text, a condition is a key, an operator and one or more
values, separated by commas; further conditions follow after a comma: ``norm=bn,cn,lr<0.1``. Keys are dotted settings,
their names without the group where those are unique, short names such as ``norm``, or ``seed``, ``hash`` and
``status``. Values are compared with the settings that a run used, as `bench.Runs.to_frame` shows them. A stream of the
user's data is also selected by the name of the data, which tables show.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contnorm.bench.config.defaults import canonical_strategy, known_norm, resolved_settings, stream_name
from contnorm.bench.config.schema import SHORT_KEYS, RunConfig, format_value, meant_keys, parse_assignment
from contnorm.bench.streams.tasks import ALIASES
from contnorm.errors import UserError, unknown

IDENTITY = ("hash", "seed", "status")  # keys that are not settings
_ORDERINGS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_CONDITION = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(!=|<=|>=|==|=|<|>)(.*)", re.DOTALL)
_SEPARATOR = re.compile(r"\s*,\s*|\s+(?=[A-Za-z_][\w.]*\s*(?:[<>=]|!=))")  # a space separates conditions, too
_SHOWN = 8  # values that a message lists


@dataclass(frozen=True)
class Condition:
    """One condition of a selection.

    Attributes:
        key: Dotted setting, or one of `IDENTITY`.
        operator: ``=``, ``!=``, ``<``, ``<=``, ``>`` or ``>=``; or ``is`` for a function.
        values: The values to compare with, or one function that returns whether a value is selected.
    """

    key: str
    operator: str
    values: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.key}{self.operator}{','.join(map(format_value, self.values))}"

    def holds(self, run: Any) -> bool:
        """Whether the condition holds for a record."""
        value = value_of(run, self.key)
        if self.operator == "is":
            return bool(self.values[0](value))
        if self.operator in _ORDERINGS:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            return number and bool(_ORDERINGS[self.operator](value, self.values[0]))
        return any(_equals(run, self.key, value, wanted) for wanted in self.values) == (self.operator == "=")


def has_operator(text: str) -> bool:
    """Whether a text is a selection rather than a path or a hash.

    Example:
        >>> has_operator("norm=bn"), has_operator("runs/75cc28cb778a")
        (True, False)
    """
    return _CONDITION.match(text) is not None


def parse_selection(text: str, keys: Collection[str] = ()) -> list[Condition]:
    """Parse the conditions of a text; ``keys`` are settings of user code, in addition to those of the schema.

    Raises:
        UserError: If there is no operator, a key is unknown, or an ordering has no number.

    Example:
        >>> [str(condition) for condition in parse_selection("norm=bn,cn lr<=0.1")]
        ['norm.name=bn,cn', 'train.lr<=0.1']
        >>> parse_selection("cn")
        Traceback (most recent call last):
        contnorm.errors.UserError: selection 'cn': expected a condition, such as norm=cn or lr<0.1.
    """
    conditions: list[Condition] = []
    for part in _SEPARATOR.split(text.strip()):
        match = _CONDITION.match(part)
        if match is None and not conditions:
            raise UserError(f"selection {text!r}: expected a condition, such as norm=cn or lr<0.1.")
        key, sign, value = match.groups() if match else (conditions[-1].key, conditions[-1].operator, part)
        key, sign, value = resolve_key(key, keys), "=" if sign == "==" else sign, value.strip()
        # A hash can look like a number, such as 1e1234567890.
        parsed = value if key in ("hash", "status") else parse_assignment(f"{key}={value}")[1]
        if sign in _ORDERINGS and not (match and isinstance(parsed, int | float)):
            raise UserError(f"selection {text!r}: {sign} needs one number. Use = or != for other values.")
        earlier = () if match else conditions.pop().values
        conditions.append(Condition(key, sign, (*earlier, parsed)))
    return conditions


def conditions_of(texts: Sequence[str], arguments: Mapping[str, Any], keys: Collection[str] = ()) -> list[Condition]:
    """Conditions of `bench.Runs.where`: of texts, and of keyword arguments."""
    conditions = [condition for text in texts for condition in parse_selection(text, keys)]
    for name, value in arguments.items():
        values = tuple(value) if isinstance(value, list | tuple | set | frozenset | range) else (value,)
        conditions.append(Condition(resolve_key(name, keys), "is" if callable(value) else "=", values))
    return conditions


def setting_keys(runs: Iterable[Any] = ()) -> list[str]:
    """Dotted keys of all settings, with those of user code that occur in some runs.

    Example:
        >>> setting_keys()[:2]
        ['stream.name', 'stream.source']
    """
    configs = {id(run.config): run.config for run in runs}.values()
    return list(dict.fromkeys(key for config in (RunConfig(), *configs) for key in resolved_settings(config)))


def resolve_key(key: str, more: Collection[str] = ()) -> str:
    """Dotted setting or identity key of a full or short key; ``more`` are settings of user code.

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
    matches = [SHORT_KEYS[key]] if key in SHORT_KEYS else [one for one in settings if one.rpartition(".")[2] == key]
    if len(matches) > 1:
        raise UserError(f"{key!r} is ambiguous. Use one of {', '.join(matches)}.")
    if not matches:
        raise unknown("key", key, [*IDENTITY, *SHORT_KEYS, *settings], meant_keys(key) or None)
    return matches[0]


def value_of(run: Any, key: str) -> Any:
    """Value of a setting that a run used, or a part of its identity; None if it has no such setting."""
    return getattr(run, key) if key in IDENTITY else resolved_settings(run.config).get(key)


def no_match(runs: Sequence[Any], texts: Sequence[str]) -> str:
    """Why no run meets conditions: the first condition that holds for none, with the values that occur."""
    conditions = conditions_of(texts, {}, setting_keys(runs))
    for condition in conditions:
        if not any(map(condition.holds, runs)):
            values = sorted({format_value(value_of(run, condition.key)) for run in runs})
            more = f" and {len(values) - _SHOWN} more values" if len(values) > _SHOWN else ""
            return f"No run has {condition}; {condition.key} is {', '.join(values[:_SHOWN])}{more}."
    return f"No run has all of {' '.join(map(str, conditions))}."


def _equals(run: Any, key: str, value: object, wanted: object) -> bool:
    """Whether the value of a run is the wanted one; names are compared as `bench.run` understands them."""
    if key == "hash":
        return str(value).startswith(str(wanted))
    if isinstance(value, bool) != isinstance(wanted, bool):
        return False
    if value == wanted or value == format_value(wanted):
        return True
    if key == "norm.name":
        norm = known_norm(str(wanted))
        groups = value_of(run, "norm.groups")
        return norm is not None and (norm[0].name, norm[1] or groups) == (value, groups)
    if key == "stream.name":
        lowered = str(wanted).lower()
        return value == ALIASES.get(lowered, lowered) or wanted == str(stream_name(run.config.stream))
    return key == "strategy.name" and canonical_strategy(str(wanted)) == value
