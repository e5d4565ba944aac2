"""The settings of a run: one frozen tree, the same behind the command line, a TOML file and a record.

A run's identity is the hash of its settings; seeds, devices and folders are not part of it. Where a value comes from:
command line, else file, else what the stream says, else the defaults here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import tomllib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from contnorm.bench.config.suggest import unknown_key
from contnorm.bench.escape import shorten
from contnorm.errors import UserError

__all__ = [
    "PRECISIONS",
    "EvaluateConfig",
    "MemoryConfig",
    "ModelConfig",
    "NormConfig",
    "RunConfig",
    "StrategyConfig",
    "StreamConfig",
    "TrainConfig",
    "assigned",
    "dotted",
    "from_dict",
    "laid_over",
    "parse_assignment",
    "parse_toml",
    "read_toml",
    "read_toml_text",
    "show_value",
]


@dataclass(frozen=True)
class StreamConfig:
    """What is learned, in which order."""

    name: str = "permuted-mnist"
    source: str | None = None  # the data set; None for the first of the stream's that is found
    tasks: int | None = None  # how many of its tasks; None for all
    train_per_task: int | None = None  # samples; None for all
    test_per_task: int | None = None
    class_order: Literal["fixed", "seed"] = "fixed"
    scenario: Literal["task", "class", "domain", "free"] | None = None  # None for the stream's own; free: task-free
    part: Literal["all", "learn", "validate"] | None = None  # of a stream that sets tasks apart for selection
    augment: bool | None = None


@dataclass(frozen=True)
class StrategyConfig:
    """How samples of the stream and of the memory become a loss."""

    name: str = "single"
    forward: Literal["joint", "separate"] = "joint"  # whether they share a forward pass: norm layers see it
    loss: Literal["mean", "sum"] = "mean"  # of all samples, or of the means of stream and memory
    replay_from: Literal["past", "all"] = "past"  # tasks
    alpha: float = 0.2  # weight of stored logits, DER++
    beta: float = 0.5  # weight of stored labels, DER++
    code: str | None = None  # the hash of a strategy of one's own; filled in


@dataclass(frozen=True)
class MemoryConfig:
    """What is kept of the stream."""

    kind: Literal["ring", "reservoir", "prs"] = "ring"
    size: int = 50  # slots of a ring, or of the reservoir
    per: Literal["task", "class"] = "task"  # what has a ring
    rho: float = 0.0  # PRS: the power of a label's frequency that its share follows; 0 gives all labels the same
    quirk: bool = False  # PRS: displace as the published code does


@dataclass(frozen=True)
class ModelConfig:
    name: str = "mlp"
    width: int = 100  # of hidden layers; of a ResNet, the filters of its stem
    stem: Literal["pool", "plain"] = "pool"  # of a ResNet: with or without max-pool
    weights: str | None = None  # to begin with: a file, or torchvision:NAME; None for fresh ones
    weights_hash: str | None = None  # of that file; filled in
    code: str | None = None  # the hash of a network of one's own; filled in


@dataclass(frozen=True)
class NormConfig:
    name: str = "bn"
    groups: int | Literal["auto"] = 32
    auto_channels: Literal[1, 2] = 1  # least channels in a group for groups="auto"; 2 is filled in, 0.1 had 1
    momentum: float | Literal["cumulative"] | None = None  # None for the norm's own
    schedule: Literal["published", "scaled"] = "published"  # of batch renormalization's limits
    layers: Literal["ours", "stock"] = "ours"  # or torch's own, not fused; for what they cost


Precision = Literal["fp32", "tf32", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)  # the more exact first


@dataclass(frozen=True)
class TrainConfig:
    lr: float = 0.03
    optimizer: Literal["sgd", "adam"] = "sgd"
    clip_value: float | None = None  # no value of a gradient goes beyond; None for no limit
    batch: int = 10
    replay: int = 10
    partial: Literal["keep", "drop"] = "keep"  # drop: each task is cut by itself, what fills no batch is left out
    passes: int = 1  # over each task; more than one is no online learning any more
    precision: Precision = "fp32"
    deterministic: bool = True
    max_steps: int | None = None  # stop early, for a try


@dataclass(frozen=True)
class EvaluateConfig:
    moments: Literal["running", "oracle"] = "running"
    ahead: bool = False  # also measure tasks not learned yet, and everything before the first
    drift: bool = True  # measure how far running moments are from the oracle's, at each task's end


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run.

    Example:
        >>> RunConfig().hash == RunConfig().hash, len(RunConfig().hash)
        (True, 12)
        >>> RunConfig(norm=NormConfig("cn")).hash == RunConfig().hash
        False
    """

    stream: StreamConfig = field(default_factory=StreamConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    norm: NormConfig = field(default_factory=NormConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)

    def as_dict(self) -> dict[str, Any]:
        """All settings by group and name, in the order of the fields."""
        return {group.name: dict(vars(getattr(self, group.name))) for group in dataclasses.fields(self)}

    @cached_property
    def hash(self) -> str:
        """Of what differs from the defaults, so that a setting added later leaves old runs what they are.

        Weights are known by what is in them: where their file lies makes no other run.
        """
        usual = RunConfig().as_dict()
        changed = {
            group: {key: value for key, value in values.items() if value != usual[group][key]}
            for group, values in self.as_dict().items()
        }
        if self.model.weights_hash is not None:
            del changed["model"]["weights"]
        canonical = json.dumps(changed, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]


# The least value of each number that has one; what lies below is a slip, and would fail late or silently.
_LEAST = {
    "stream.tasks": 1,
    "stream.train_per_task": 1,
    "stream.test_per_task": 1,
    "memory.size": 1,
    "model.width": 1,
    "norm.groups": 1,
    "train.batch": 1,
    "train.replay": 0,
    "train.passes": 1,
    "train.max_steps": 1,
}
_LARGEST_WHOLE = 10**9  # more samples, slots or steps than any machine has room for
_LARGEST = 3.4e38  # of single precision, which networks are computed in
_DEEPEST = 16  # levels of tables and lists in a TOML file
_LARGEST_FILE = 2**20  # bytes of a TOML file; a file of all settings has about a thousand
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udbff]")  # lone low surrogates are bytes of a path that is not UTF-8
_LONGEST_VALUE = 100  # characters of a value in a message
_LARGEST_RHO = 10  # the power of a count of samples: with larger ones it can come to be no finite number


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by their dotted keys.

    Example:
        >>> dotted({"train": {"lr": 0.1, "batch": 10}, "norm": {"name": "cn"}})
        {'train.lr': 0.1, 'train.batch': 10, 'norm.name': 'cn'}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values, those above in place of those below.

    Example:
        >>> laid_over({"train": {"lr": 0.1, "batch": 10}}, {"train": {"lr": 0.3}})
        {'train': {'lr': 0.3, 'batch': 10}}
    """
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = laid_over(merged[key], value) if both else value
    return merged


def from_dict(values: Mapping[str, Any], where: str = "config") -> RunConfig:
    """Settings from nested values, each checked against its field.

    Example:
        >>> from_dict({"train": {"lr": 0.1}}).train.lr
        0.1
    """
    made: RunConfig = _built(RunConfig, values, where, "")
    return made


def read_toml(path: Path) -> dict[str, Any]:
    """The nested values of a settings file; a mistake in them is reported with the file's name."""
    values = parse_toml(read_toml_text(path, "--config takes a TOML file."), str(path))
    from_dict(values, str(path))
    return values


def read_toml_text(path: Path, hint: str) -> str:
    """The text of a TOML file; ``hint`` ends the message where it can't be read."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: can't be read ({reason}). {hint}") from error
    if len(content) > _LARGEST_FILE:
        raise UserError(f"{path}: is larger than {_LARGEST_FILE:,} bytes. {hint}")
    try:
        return content.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8, as TOML is ({error.reason} at byte {error.start}).") from error


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The nested values of a TOML text; ``where`` begins the message where it is not TOML.

    Numbers are of at most 64 bits, as TOML asks for, and tables and lists are nested a few levels deep.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{where}: is not TOML ({error}).") from error
    except RecursionError as error:
        raise UserError(f"{where}: is nested too deeply. Use {_DEEPEST} levels at most.") from error
    except ValueError as error:  # Python reads no number of thousands of digits
        raise UserError(f"{where}: has a number with too many digits. Numbers have 64 bits.") from error
    _check_limits(values, where)
    return values


def _check_limits(values: Any, where: str) -> None:
    """Level by level rather than by recursion, which would be what fails."""
    level = [values]
    for _ in range(_DEEPEST):
        if any(isinstance(value, int) and value.bit_length() > 64 for value in level):
            raise UserError(f"{where}: has a number with too many digits. Numbers have 64 bits.")
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise UserError(f"{where}: is nested too deeply. Use {_DEEPEST} levels at most.")


def parse_assignment(text: str) -> tuple[str, Any]:
    """A ``key=value`` of the command line; the value in TOML, or else as it stands.

    Example:
        >>> parse_assignment("train.lr=0.1"), parse_assignment("norm.name=cn")
        (('train.lr', 0.1), ('norm.name', 'cn'))
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"--set {show_value(text)}: expected key=value, such as train.lr=0.1.")
    if key.count(".") > 1:
        raise UserError(f"--set {show_value(text)}: a key is a group and a name, such as train.lr.")
    if value == "none":
        return key, None
    try:
        read = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return key, value
    except (RecursionError, ValueError):
        read = parse_toml(f"value = {value}", f"--set {show_value(text)}")  # which says what is wrong
    _check_limits(read, f"--set {show_value(text)}")
    return key, read["value"] if len(read) == 1 else value  # a second line would set a key of its own


def show_value(value: Any) -> str:
    """A value for a message: its repr, or a shorter form of one that is very long or has none.

    Example:
        >>> show_value("cn"), show_value(16**5000), len(show_value("a" * 10**6))
        ("'cn'", 'a number of 20001 bits', 99)
    """
    try:
        return shorten(repr(value), _LONGEST_VALUE)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    except ValueError:  # Python writes no whole number of thousands of digits
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"


def assigned(values: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Nested values with one dotted key set.

    Example:
        >>> assigned({"train": {"lr": 0.1}}, "train.batch", 32)
        {'train': {'lr': 0.1, 'batch': 32}}
    """
    head, _, rest = key.partition(".")
    inner = values.get(head, {})
    if rest and not isinstance(inner, Mapping):
        raise UserError(
            f"config key {key!r}: {head} = {show_value(inner)} stands where a group is expected. Write [{head}] and "
            f"{rest} = ...."
        )
    return {**values, head: assigned(inner, rest, value) if rest else value}


def _built(cls: type, values: Mapping[str, Any], where: str, prefix: str) -> Any:
    hints = _hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    made = {}
    for key, value in values.items():
        full = f"{prefix}{key}"
        if key not in names:
            beside = [prefix + name for name in names]
            raise UserError(f"{where}: {unknown_key(full, beside, list(dotted(RunConfig().as_dict())))}")
        kind = hints[key]
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, Mapping):
                first = dataclasses.fields(kind)[0].name
                raise UserError(f"{where}: {full}={show_value(value)} must be a group of keys, such as {full}.{first}.")
            made[key] = _built(kind, value, where, f"{full}.")  # type: ignore[arg-type]
        else:
            made[key] = _in_range(_checked(kind, value, where, full), where, full)
    return cls(**made)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _checked(kind: Any, value: Any, where: str, full: str) -> Any:
    """The value, where its type allows it; an int may stand for a float."""
    for choice in _choices(kind):
        if get_origin(choice) is Literal:
            if value in get_args(choice) and type(value) in {type(a) for a in get_args(choice)}:
                return value
        elif choice is types.NoneType:
            if value is None:
                return None
        elif choice is float and isinstance(value, int | float) and not isinstance(value, bool):
            return _float(value)
        elif isinstance(value, choice) and not (choice is int and isinstance(value, bool)):
            return value
    raise UserError(f"{where}: {full}={show_value(value)} must be {_words(kind)}.")


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number beyond floats
        return math.inf if value > 0 else -math.inf


def _in_range(value: Any, where: str, full: str) -> Any:
    if isinstance(value, str) and not value.isprintable() and _UNPRINTABLE.search(value):
        raise UserError(f"{where}: {full}={show_value(value)} must not have control characters.")
    if isinstance(value, float) and not (math.isfinite(value) and abs(value) <= _LARGEST):
        raise UserError(f"{where}: {full}={value} must be a finite number, no larger than {_LARGEST}.")
    if isinstance(value, int) and value < _LEAST.get(full, value):
        raise UserError(f"{where}: {full}={show_value(value)} must be {_LEAST[full]} or more.")
    if isinstance(value, int) and value > _LARGEST_WHOLE:
        raise UserError(f"{where}: {full}={show_value(value)} must be no more than {_LARGEST_WHOLE:,}.")
    if full == "memory.rho" and abs(value) > _LARGEST_RHO:
        raise UserError(f"{where}: {full}={value} must be -{_LARGEST_RHO} to {_LARGEST_RHO}.")
    if full in ("train.lr", "train.clip_value") and value is not None and value <= 0:
        raise UserError(f"{where}: {full}={value} must be above 0.")
    return value


def _choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _words(kind: Any) -> str:
    named = {int: "a whole number", float: "a number", str: "a word", bool: "true or false", types.NoneType: "none"}
    words: list[str] = []
    for choice in _choices(kind):
        words += map(repr, get_args(choice)) if get_origin(choice) is Literal else [named[choice]]
    return " or ".join(words)
