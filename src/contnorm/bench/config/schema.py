"""Schema of the settings of a run: nested frozen dataclasses, shared by the command line, TOML files and records.

A run is identified by the hash of its settings; seeds, devices and folders are not part of it. Precedence of values:
command line, then file, then the defaults of the stream, then the defaults here.
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
    "flatten_settings",
    "from_dict",
    "merge_settings",
    "parse_assignment",
    "parse_toml",
    "read_toml",
    "read_toml_text",
    "show_value",
    "with_setting",
]


@dataclass(frozen=True)
class StreamConfig:
    """The data stream: data set, tasks and their order."""

    name: str = "permuted-mnist"
    source: str | None = None  # data set; None for the first of the stream's data sets that is on disk
    tasks: int | None = None  # number of tasks; None for all
    train_per_task: int | None = None  # samples; None for all
    test_per_task: int | None = None
    class_order: Literal["fixed", "seed"] = "fixed"
    scenario: Literal["task", "class", "domain", "free"] | None = None  # None for the stream's default; free: task-free
    part: Literal["all", "learn", "validate"] | None = None  # for streams that reserve tasks for model selection
    augment: bool | None = None


@dataclass(frozen=True)
class StrategyConfig:
    """The learning method: how the loss is computed from stream and memory samples."""

    name: str = "single"
    forward: Literal["joint", "separate"] = "joint"  # one forward pass or two; this changes batch statistics
    loss: Literal["mean", "sum"] = "mean"  # mean over all samples, or sum of the means of stream and memory
    replay_from: Literal["past", "all"] = "past"  # tasks that are replayed
    alpha: float = 0.2  # weight of stored logits, DER++
    beta: float = 0.5  # weight of stored labels, DER++
    code: str | None = None  # hash of a user's strategy; filled in by `resolve`


@dataclass(frozen=True)
class MemoryConfig:
    """The replay memory."""

    kind: Literal["ring", "reservoir", "prs"] = "ring"
    size: int = 50  # slots per ring for "ring", in total for the others
    per: Literal["task", "class"] = "task"  # "ring": one ring per task or per class
    rho: float = 0.0  # PRS: a label's share is its frequency to this power; 0 gives all labels equal shares
    quirk: bool = False  # PRS: evict as the published code does


@dataclass(frozen=True)
class ModelConfig:
    name: str = "mlp"
    width: int = 100  # units of hidden layers; for a ResNet, filters of its stem
    stem: Literal["pool", "plain"] = "pool"  # ResNet: with or without max-pool
    weights: str | None = None  # initial weights: a file, or torchvision:NAME; None for random initialization
    weights_hash: str | None = None  # hash of that file; filled in by `resolve`
    code: str | None = None  # hash of a user's network; filled in by `resolve`


@dataclass(frozen=True)
class NormConfig:
    name: str = "bn"
    groups: int | Literal["auto"] = 32
    auto_channels: Literal[1, 2] = 1  # minimum channels per group for groups="auto"; 0.1 used 1, now 2 is filled in
    momentum: float | Literal["cumulative"] | None = None  # None for the norm's default
    schedule: Literal["published", "scaled"] = "published"  # limits of batch renormalization
    layers: Literal["ours", "stock"] = "ours"  # stock: torch's unfused layers, for speed comparisons


Precision = Literal["fp32", "tf32", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)  # most precise first


@dataclass(frozen=True)
class TrainConfig:
    lr: float = 0.03
    optimizer: Literal["sgd", "adam"] = "sgd"
    clip_value: float | None = None  # clips each gradient element to [-clip_value, clip_value]; None for no limit
    batch: int = 10
    replay: int = 10
    partial: Literal["keep", "drop"] = "keep"  # drop: omit the incomplete last batch of each task
    passes: int = 1  # epochs per task; online learning uses 1
    precision: Precision = "fp32"
    deterministic: bool = True
    max_steps: int | None = None  # stop after this many steps (smoke test)


@dataclass(frozen=True)
class EvaluateConfig:
    moments: Literal["running", "oracle"] = "running"
    ahead: bool = False  # also evaluate tasks not learned yet, and all tasks before training
    drift: bool = True  # at the end of each task, measure the distance between running and oracle moments


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
        """All settings by group and name, in field order."""
        return {group.name: dict(vars(getattr(self, group.name))) for group in dataclasses.fields(self)}

    @cached_property
    def hash(self) -> str:
        """Hash of the settings that differ from the defaults, so that adding a setting does not change old hashes.

        Weights are identified by the hash of their content; the path of the file does not count.
        """
        defaults = RunConfig().as_dict()
        changed = {
            group: {key: value for key, value in values.items() if value != defaults[group][key]}
            for group, values in self.as_dict().items()
        }
        if self.model.weights_hash is not None:
            del changed["model"]["weights"]
        canonical = json.dumps(changed, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]


# Minimum values. A smaller value is a mistake that would otherwise fail late or silently.
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
_LARGEST_WHOLE = 10**9  # larger than any feasible number of samples, slots or steps
_LARGEST = 3.4e38  # maximum of float32, which networks are computed in
_DEEPEST = 16  # nesting levels of tables and lists in a TOML file
_LARGEST_FILE = 2**20  # bytes of a TOML file; a file of all settings has about a thousand
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udbff]")  # lone low surrogates are bytes of a path that is not UTF-8
_LONGEST_VALUE = 100  # characters of a value in a message
_LARGEST_RHO = 10  # an exponent of sample counts; larger ones can overflow


def flatten_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested values to dotted keys.

    Example:
        >>> flatten_settings({"train": {"lr": 0.1, "batch": 10}, "norm": {"name": "cn"}})
        {'train.lr': 0.1, 'train.batch': 10, 'norm.name': 'cn'}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten_settings(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def merge_settings(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested values; those of ``above`` override those of ``below``.

    Example:
        >>> merge_settings({"train": {"lr": 0.1, "batch": 10}}, {"train": {"lr": 0.3}})
        {'train': {'lr': 0.3, 'batch': 10}}
    """
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge_settings(merged[key], value) if both else value
    return merged


def from_dict(values: Mapping[str, Any], where: str = "config") -> RunConfig:
    """Build settings from nested values and check each against its field.

    Example:
        >>> from_dict({"train": {"lr": 0.1}}).train.lr
        0.1
    """
    config: RunConfig = _build(RunConfig, values, where, "")
    return config


def read_toml(path: Path) -> dict[str, Any]:
    """Read and check a settings file; errors name the file."""
    values = parse_toml(read_toml_text(path, "--config takes a TOML file."), str(path))
    from_dict(values, str(path))
    return values


def read_toml_text(path: Path, hint: str) -> str:
    """Read the text of a TOML file; ``hint`` is appended to the error message if it can't be read."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: can't be read ({reason}). {hint}") from error
    if len(content) > _LARGEST_FILE:
        raise UserError(f"{path}: is larger than {_LARGEST_FILE:,} bytes. {hint}")
    try:
        return content.decode("utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8, as TOML is ({error.reason} at byte {error.start}).") from error


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse TOML text; error messages begin with ``where``.

    Numbers have at most 64 bits, as TOML requires, and the nesting of tables and lists is limited.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{where}: is not TOML ({error}).") from error
    except RecursionError as error:
        raise UserError(f"{where}: is nested too deeply. Use {_DEEPEST} levels at most.") from error
    except ValueError as error:  # Python refuses to parse integers with thousands of digits
        raise UserError(f"{where}: has a number with too many digits. Numbers have 64 bits.") from error
    _check_limits(values, where)
    return values


def _check_limits(values: Any, where: str) -> None:
    """Check nesting and size of numbers, level by level: recursion would fail on deeply nested values."""
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
    """Parse ``key=value`` from the command line; the value is TOML, or plain text if it is not valid TOML.

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
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return key, value
    except (RecursionError, ValueError):
        parsed = parse_toml(f"value = {value}", f"--set {show_value(text)}")  # raises a UserError with the reason
    _check_limits(parsed, f"--set {show_value(text)}")
    return key, parsed["value"] if len(parsed) == 1 else value  # a line break in the value could define further keys


def show_value(value: Any) -> str:
    """Text of a value for an error message: its repr, shortened if it is very long.

    Example:
        >>> show_value("cn"), show_value(16**5000), len(show_value("a" * 10**6))
        ("'cn'", 'a number of 20001 bits', 99)
    """
    try:
        return shorten(repr(value), _LONGEST_VALUE)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    except ValueError:  # Python refuses to format integers with thousands of digits
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"


def with_setting(values: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Copy of nested values with one dotted key set.

    Example:
        >>> with_setting({"train": {"lr": 0.1}}, "train.batch", 32)
        {'train': {'lr': 0.1, 'batch': 32}}
    """
    head, _, rest = key.partition(".")
    inner = values.get(head, {})
    if rest and not isinstance(inner, Mapping):
        raise UserError(
            f"config key {key!r}: {head} = {show_value(inner)} stands where a group is expected. Write [{head}] and "
            f"{rest} = ...."
        )
    return {**values, head: with_setting(inner, rest, value) if rest else value}


def _build(cls: type, values: Mapping[str, Any], where: str, prefix: str) -> Any:
    hints = _hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    fields = {}
    for key, value in values.items():
        full_key = f"{prefix}{key}"
        if key not in names:
            group_keys = [prefix + name for name in names]
            raise UserError(
                f"{where}: {unknown_key(full_key, group_keys, list(flatten_settings(RunConfig().as_dict())))}"
            )
        kind = hints[key]
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, Mapping):
                first = dataclasses.fields(kind)[0].name
                raise UserError(
                    f"{where}: {full_key}={show_value(value)} must be a group of keys, such as {full_key}.{first}."
                )
            fields[key] = _build(kind, value, where, f"{full_key}.")  # type: ignore[arg-type]
        else:
            fields[key] = _in_range(_checked(kind, value, where, full_key), where, full_key)
    return cls(**fields)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _checked(kind: Any, value: Any, where: str, full: str) -> Any:
    """Return the value if its type is allowed; an int is converted to float where a float is expected."""
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
    raise UserError(f"{where}: {full}={show_value(value)} must be {_describe_type(kind)}.")


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond the range of floats
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


def _describe_type(kind: Any) -> str:
    named = {int: "a whole number", float: "a number", str: "a word", bool: "true or false", types.NoneType: "none"}
    words: list[str] = []
    for choice in _choices(kind):
        words += map(repr, get_args(choice)) if get_origin(choice) is Literal else [named[choice]]
    return " or ".join(words)
