"""Schema of the settings of a run: frozen pydantic dataclasses, shared by the command line, TOML files and records.

A run is identified by the hash of its settings; seeds, devices and folders are not part of it. Types, limits and
descriptions are stated here once: `from_dict` checks values against them, and `json_schema` lists them.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cache, cached_property
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass, rebuild_dataclass

from contnorm.bench.escape import shorten
from contnorm.errors import UserError, unknown

__all__ = [
    "PRECISIONS",
    "ComponentConfig",
    "EvaluateConfig",
    "MemoryConfig",
    "ModelConfig",
    "NormConfig",
    "Options",
    "RunConfig",
    "Scalar",
    "StrategyConfig",
    "StreamConfig",
    "TrainConfig",
    "check_own_setting",
    "describe_allowed",
    "flatten_settings",
    "from_dict",
    "json_schema",
    "merge_settings",
    "show_value",
    "unknown_key",
]

_MAX_INT = 10**9  # larger than any feasible number of samples, slots or steps
_MAX_FLOAT = 3.4e38  # maximum of float32, which networks are computed in
_MAX_SHOWN = 100  # characters of a value in a message
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udbff]")  # lone low surrogates are bytes of a path that is not UTF-8


def _check_printable(text: str) -> str:
    if not text.isprintable() and _UNPRINTABLE.search(text):
        raise ValueError("has control characters")
    return text


Text = Annotated[str, AfterValidator(_check_printable), Field(json_schema_extra={"pattern": r"^[^\x00-\x1f\x7f]*$"})]
Number = Annotated[float, Field(ge=-_MAX_FLOAT, le=_MAX_FLOAT)]
PositiveNumber = Annotated[float, Field(gt=0, le=_MAX_FLOAT)]
Count = Annotated[int, Field(ge=1, le=_MAX_INT)]
Precision = Literal["fp32", "tf32", "bf16"]
Scalar = bool | int | float | str | None  # value of a component's own setting
Options = tuple[tuple[str, Scalar], ...]  # a tuple, so that settings are hashable
PRECISIONS: tuple[Precision, ...] = get_args(Precision)  # most precise first

# Strict: true is not a number, and "3" is not one either; an int is converted where a float is expected. Validators are
# built on first use, because commands such as `contnorm --help` never need them.
_CONFIG = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)


@dataclass(frozen=True, config=_CONFIG)
class SettingsGroup:
    """Base class of groups of settings: invalid values raise a one-line `UserError`."""

    @model_validator(mode="wrap")
    @classmethod
    def _report_first_error(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return validate(values)
        except ValidationError as error:
            raise _user_error(error, cls) from None  # pydantic's text adds nothing


@dataclass(frozen=True, config=_CONFIG)
class ComponentConfig(SettingsGroup):
    """Base class of groups whose component, such as a strategy, may have own settings.

    Attributes:
        options: The component's own settings by name, in alphabetical order. In nested values and records they are
            keys of the group, in addition to its fields. `contnorm.bench.config.own_settings` checks them.
    """

    options: Options = Field(default=(), kw_only=True)


@dataclass(frozen=True, config=_CONFIG)
class StreamConfig(SettingsGroup):
    """The data stream: data set, tasks and their order."""

    name: Text = Field(default="permuted-mnist", description="Stream; `contnorm ls streams` lists them.")
    source: Text | None = Field(
        default=None, description="Data set; none for the first of the stream's that is on disk."
    )
    tasks: Count | None = Field(default=None, description="Number of tasks; none for all.")
    train_per_task: Count | None = Field(default=None, description="Training samples per task; none for all.")
    test_per_task: Count | None = Field(default=None, description="Test samples per task; none for all.")
    class_order: Literal["fixed", "seed"] = Field(
        default="fixed",
        description="Assignment of classes (or permutations) to tasks: the same for all seeds, or by seed.",
    )
    scenario: Literal["task", "class", "domain", "free"] | None = Field(
        default=None,
        description="Task-, class- or domain-incremental learning, or task-free; none for the stream's default.",
    )
    part: Literal["all", "learn", "validate"] | None = Field(
        default=None,
        description="Tasks to use where the stream reserves some for model selection; none for its default.",
    )
    augment: bool | None = Field(
        default=None, description="Random crops and flips of training images; none for the stream's default."
    )
    holdout: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Fraction of the training samples of each class that replaces the test samples, for model "
        "selection; none for the test samples.",
    )


@dataclass(frozen=True, config=_CONFIG)
class StrategyConfig(ComponentConfig):
    """The learning method: how the loss is computed from stream and memory samples."""

    name: Text = Field(
        default="single", description="Strategy, or path/to/file.py:Class; `contnorm ls strategies` lists them."
    )
    forward: Literal["joint", "separate"] = Field(
        default="joint",
        description="One forward pass over stream and memory samples, or two; changes batch moments.",
    )
    loss: Literal["mean", "sum"] = Field(
        default="mean", description="Mean over all samples, or sum of the means of stream and memory samples."
    )
    replay_from: Literal["past", "all"] = Field(
        default="past", description="Replay samples of earlier tasks, or of all tasks so far."
    )
    alpha: Number = Field(default=0.2, description="Weight of the stored logits in DER++.")
    beta: Number = Field(default=0.5, description="Weight of the stored labels in DER++.")
    code: Text | None = Field(default=None, description="Hash of a user's strategy; filled in, do not set.")
    distance: Literal["task", "all"] = Field(
        default="task",
        kw_only=True,
        description="Outputs that DER++ compares with the stored logits: those that compete for the sample, or all.",
    )


@dataclass(frozen=True, config=_CONFIG)
class MemoryConfig(ComponentConfig):
    """The replay memory."""

    kind: Text = Field(
        default="ring", description="Memory, or path/to/file.py:Class; `contnorm ls memories` lists them."
    )
    size: Count = Field(default=50, description="Slots: per task (or class) for ring, in total for the others.")
    per: Literal["task", "class"] = Field(default="task", description="For ring: one ring per task, or per class.")
    rho: Annotated[float, Field(ge=-10, le=10)] = Field(  # larger exponents of sample counts can overflow
        default=0.0, description="For prs: a label's share is its frequency to this power; 0 gives equal shares."
    )
    quirk: bool = Field(default=False, description="For prs: evict as the published code does.")
    code: Text | None = Field(default=None, description="Hash of a user's memory; filled in, do not set.")


@dataclass(frozen=True, config=_CONFIG)
class ModelConfig(SettingsGroup):
    """The network."""

    name: Text = Field(
        default="mlp", description="Network, or path/to/file.py:function; `contnorm ls models` lists them."
    )
    width: Count = Field(default=100, description="Units of hidden layers; for a ResNet, filters of its stem.")
    stem: Literal["pool", "plain"] = Field(default="pool", description="ResNet stem with or without max-pool.")
    weights: Text | None = Field(
        default=None, description="Initial weights: a file, or torchvision:NAME; none for random initialization."
    )
    weights_hash: Text | None = Field(default=None, description="Hash of the weights file; filled in, do not set.")
    code: Text | None = Field(default=None, description="Hash of a user's network; filled in, do not set.")


@dataclass(frozen=True, config=_CONFIG)
class NormConfig(ComponentConfig):
    """The normalization layers of the network."""

    name: Text = Field(default="bn", description="Norm, or path/to/file.py:Class; `contnorm ls norms` lists them.")
    groups: Count | Literal["auto"] = Field(
        default=32, description="Channel groups of norms that have them; auto fits them to the channels of each layer."
    )
    auto_channels: Annotated[int, Field(ge=1, le=2)] = Field(
        default=1, description="Minimum channels per group for groups=auto: 2 in new runs, 1 in records of 0.1."
    )
    momentum: Number | Literal["cumulative"] | None = Field(
        default=None, description="Momentum of running moments; none for the norm's default."
    )
    schedule: Literal["published", "scaled"] = Field(
        default="published", description="Limits of batch renormalization."
    )
    layers: Literal["ours", "stock"] = Field(
        default="ours", description="Implementation; stock uses torch's unfused layers, for speed comparisons."
    )
    code: Text | None = Field(default=None, description="Hash of a user's norm; filled in, do not set.")
    freeze_after: Count | None = Field(
        default=None,
        kw_only=True,
        description="Number of tasks after which running moments are frozen and also used in training; none for never.",
    )


@dataclass(frozen=True, config=_CONFIG)
class TrainConfig(SettingsGroup):
    """Optimization."""

    lr: PositiveNumber = Field(default=0.03, description="Learning rate.")
    optimizer: Literal["sgd", "adam"] = Field(default="sgd", description="Optimizer.")
    clip_value: PositiveNumber | None = Field(
        default=None, description="Clip each gradient element to [-clip_value, clip_value]; none for no clipping."
    )
    batch: Count = Field(default=10, description="Stream samples per step.")
    replay: Annotated[int, Field(ge=0, le=_MAX_INT)] = Field(default=10, description="Memory samples per step.")
    partial: Literal["keep", "drop"] = Field(
        default="keep", description="Keep or drop the incomplete last batch of each task."
    )
    passes: Count = Field(default=1, description="Epochs per task; online learning uses 1.")
    precision: Precision = Field(default="fp32", description="Floating-point precision of training.")
    deterministic: bool = Field(default=True, description="Use deterministic algorithms only.")
    graph: Literal["on", "off"] = Field(
        default="on", description="Capture training steps as CUDA graphs on a GPU; off runs every step in Python."
    )
    max_steps: Count | None = Field(
        default=None, description="Stop after this many steps (smoke test); none for all steps."
    )
    convolutions: Literal["auto", "cudnn"] = Field(
        default="auto",
        kw_only=True,
        description="Compute convolutions by Triton where a table of measurements on this GPU says that it is faster, "
        "or all of them by cuDNN.",
    )
    updates: Count = Field(
        default=1,
        kw_only=True,
        description="Steps per stream batch, each with its own augmentation and replay samples; the batch is offered "
        "to the memory at the last one.",
    )


@dataclass(frozen=True, config=_CONFIG)
class EvaluateConfig(SettingsGroup):
    """Evaluation."""

    moments: Literal["running", "oracle", "memory", "task"] = Field(
        default="running",
        description="Moments in evaluation: running ones, exact ones of all data seen so far (oracle) or of the replay "
        "memory's samples (memory), or for each task the running ones at its end (task).",
    )
    ahead: bool = Field(
        default=False, description="Also evaluate tasks that are not learned yet, and all tasks before training."
    )
    drift: bool = Field(
        default=True, description="After each task, measure the distance between running and oracle moments."
    )
    weights: Literal["plain", "task", "batch"] = Field(
        default="plain",
        kw_only=True,
        description="For moments=memory: the same weight for each stored sample (plain) or each task (task), or the "
        "shares of a training batch (batch).",
    )


@dataclass(frozen=True, config=_CONFIG)
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
        return {group: _group_values(getattr(self, group)) for group in _GROUPS}

    @cached_property
    def hash(self) -> str:
        """Hash of the settings that differ from the defaults, so that adding a setting does not change old hashes.

        Weights are identified by the hash of their content; the path of the file does not count.
        """
        defaults = _defaults()
        changed = {
            group: {key: v for key, v in values.items() if key not in defaults[group] or v != defaults[group][key]}
            for group, values in self.as_dict().items()
        }
        if self.model.weights_hash is not None:
            del changed["model"]["weights"]
        canonical = json.dumps(changed, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]


_GROUPS: dict[str, type[SettingsGroup]] = {
    "stream": StreamConfig,
    "strategy": StrategyConfig,
    "memory": MemoryConfig,
    "model": ModelConfig,
    "norm": NormConfig,
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
}


def _group_values(group: SettingsGroup) -> dict[str, Any]:
    """Settings of a group by name: its fields, then the component's own settings."""
    values = dict(vars(group))
    options: Options = values.pop("options", ())
    return {**values, **dict(options)}


@cache
def _build_validators() -> None:
    """Build the validators of all groups at once, without pydantic's search for its plugins.

    That search reads the metadata of all installed packages, which takes longer than reading some records.
    """
    before = os.environ.get(_WITHOUT_PLUGINS)
    os.environ[_WITHOUT_PLUGINS] = "1"
    try:
        for group in (*_GROUPS.values(), RunConfig):
            rebuild_dataclass(group)
    finally:
        del os.environ[_WITHOUT_PLUGINS]
        if before is not None:
            os.environ[_WITHOUT_PLUGINS] = before


_WITHOUT_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


@cache
def _defaults() -> dict[str, Any]:
    _build_validators()
    return RunConfig().as_dict()


def from_dict(values: Mapping[str, Any], where: str = "config") -> RunConfig:
    """Build settings from nested values and check each against its field.

    Args:
        values: Settings by group and name; absent ones take their defaults.
        where: The origin of the values, such as a file; error messages begin with it.

    Raises:
        UserError: For the first unknown key or invalid value.

    Example:
        >>> from_dict({"train": {"lr": 0.1}}).train.lr
        0.1
        >>> from_dict({"train": {"batch": 0}})
        Traceback (most recent call last):
        contnorm.errors.UserError: config: train.batch=0 must be a whole number from 1 to 1,000,000,000.
    """
    _build_validators()
    groups = {}
    for name, settings in values.items():
        group = _GROUPS.get(name)
        if group is None:
            raise UserError(f"{where}: {_unknown_key(str(name), list(_GROUPS))}")
        if not isinstance(settings, Mapping):
            example = f"{name}.{next(iter(_defaults()[name]))}"
            raise UserError(f"{where}: {name}={show_value(settings)} must be a group of keys, such as {example}.")
        try:
            groups[name] = group(**_split_options(group, {str(key): value for key, value in settings.items()}))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    return RunConfig(**groups)  # type: ignore[arg-type]


def _split_options(group: type[SettingsGroup], settings: dict[str, Any]) -> dict[str, Any]:
    """Move the keys that are no fields of a component's group into its ``options``."""
    if not issubclass(group, ComponentConfig):
        return settings
    name = _group_name(group)
    own = {key: value for key, value in settings.items() if key not in _defaults()[name]}
    for key, value in own.items():
        if not key.isidentifier() or key == "options":
            raise unknown_key(f"{name}.{key}")
        check_own_setting(f"{name}.{key}", value)
    fields = {key: value for key, value in settings.items() if key not in own}
    return {**fields, "options": tuple(sorted(own.items()))} if own else fields


def check_own_setting(key: str, value: object) -> None:
    """Raise `UserError` if a value can't be that of a component's own setting, whatever its type is.

    Example:
        >>> check_own_setting("strategy.temperature", float("nan"))
        Traceback (most recent call last):
        contnorm.errors.UserError: strategy.temperature=nan must be a finite number, text without control characters...
    """
    if not _is_scalar(value):
        raise UserError(
            f"{key}={show_value(value)} must be a finite number, text without control characters, true, false or none."
        )


def _is_scalar(value: object) -> bool:
    if isinstance(value, str):
        return value.isprintable() or not _UNPRINTABLE.search(value)
    if isinstance(value, int | float):
        return abs(value) <= _MAX_FLOAT  # False for NaN
    return value is None


def _group_name(group: type[SettingsGroup]) -> str:
    return next(name for name, other in _GROUPS.items() if other is group)


def unknown_key(key: str, own: Sequence[str] = ()) -> UserError:
    """Error for an unknown setting of a group.

    Args:
        key: The dotted key.
        own: Names of the component's own settings.

    Example:
        >>> print(unknown_key("strategy.bta"))
        unknown key 'strategy.bta'. Did you mean 'strategy.beta'? There are: strategy.name, strategy.forward, ...
    """
    group = key.partition(".")[0]
    return _unknown_key(key, [f"{group}.{name}" for name in (*_defaults()[group], *own)])


def _user_error(error: ValidationError, cls: type[SettingsGroup]) -> UserError:
    """One-line error for the first problem that pydantic reports in a group of settings."""
    first = error.errors(include_url=False, include_context=False)[0]
    group = _group_name(cls)
    name = str(first["loc"][0])
    if first["type"] == "unexpected_keyword_argument":
        return unknown_key(f"{group}.{name}")
    if first["type"] in ("unexpected_positional_argument", "multiple_argument_values"):
        return UserError(f"{cls.__name__}: argument {name}: {first['msg']}. Use keywords.")
    if isinstance(first["loc"][0], int):  # a positional argument
        name = list(_defaults()[group])[first["loc"][0]]
    allowed = describe_allowed(_properties(group)[name])
    return UserError(f"{group}.{name}={show_value(first['input'])} must be {allowed}.")


def json_schema() -> dict[str, Any]:
    """JSON schema of the settings of a run, with types, limits, defaults and descriptions.

    Example:
        >>> json_schema()["$defs"]["TrainConfig"]["properties"]["batch"]["minimum"]
        1
    """
    schema = {**TypeAdapter(RunConfig).json_schema(), "description": "All settings of a run."}  # without the example
    for cls in _GROUPS.values():
        if issubclass(cls, ComponentConfig):  # its options are further keys of the group
            group = schema["$defs"][cls.__name__]
            del group["properties"]["options"]
            group["additionalProperties"] = {"type": ["boolean", "integer", "number", "string", "null"]}
    return schema


@cache
def _properties(group: str) -> dict[str, Any]:
    """JSON schemas of the settings of a group, by name."""
    properties: dict[str, Any] = json_schema()["$defs"][_GROUPS[group].__name__]["properties"]
    return properties


def describe_allowed(schema: Mapping[str, Any]) -> str:
    """Describe the allowed values of a setting by its JSON schema.

    Example:
        >>> describe_allowed({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9000}, {"const": "auto"}]})
        "a whole number from 1 to 9,000 or 'auto'"
        >>> describe_allowed({"type": "number", "exclusiveMinimum": 0, "maximum": 3.4e38})
        'a finite number above 0, up to 3.4e+38'
    """
    if "anyOf" in schema:
        return " or ".join(describe_allowed(choice) for choice in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " or ".join(map(repr, schema.get("enum", [schema.get("const")])))
    if "exclusiveMaximum" in schema:
        return f"a number above {schema['exclusiveMinimum']:g} and below {schema['exclusiveMaximum']:g}"
    if "maximum" not in schema:
        return {"string": "text without control characters", "boolean": "true or false", "null": "none"}[schema["type"]]
    noun = "a whole number" if schema["type"] == "integer" else "a finite number"
    maximum = _format_limit(schema["maximum"])
    if "exclusiveMinimum" in schema:
        return f"{noun} above {_format_limit(schema['exclusiveMinimum'])}, up to {maximum}"
    return f"{noun} from {_format_limit(schema['minimum'])} to {maximum}"


def _format_limit(limit: float) -> str:
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"


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


def show_value(value: Any) -> str:
    """Text of a value for an error message: its repr, shortened if it is very long.

    Example:
        >>> show_value("cn"), show_value(16**5000), len(show_value("a" * 10**6))
        ("'cn'", 'a number of 20001 bits', 99)
    """
    try:
        return shorten(repr(value), _MAX_SHOWN)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    except ValueError:  # Python refuses to format integers with thousands of digits
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"


# Common other names of settings: names of flags and groups, and names in other code bases.
SYNONYMS = {
    "stream": "stream.name",
    "strategy": "strategy.name",
    "norm": "norm.name",
    "model": "model.name",
    "memory": "memory.kind",
    "buffer": "memory.size",
    "buffer_size": "memory.size",
    "eval_moments": "evaluate.moments",
    "learning_rate": "train.lr",
    "batch_size": "train.batch",
    "replay_batch": "train.replay",
    "num_groups": "norm.groups",
    "steps": "train.max_steps",
}
FLAGS = ("seeds", "seed", "device", "lanes", "data_root", "runs", "config")  # not settings: they don't identify a run


def _unknown_key(key: str, siblings: Sequence[str]) -> UserError:
    """Error for an unknown key, with suggestions and the valid keys of its group.

    Args:
        key: The unknown key, dotted.
        siblings: Valid keys of its group, dotted.

    Example:
        >>> print(_unknown_key("lr", ["train", "norm"]))
        unknown key 'lr'. Did you mean 'train.lr'? There are: train, norm.
        >>> print(_unknown_key("seeds", ["train"]))
        unknown key 'seeds'. It is not a setting of a run; use the flag --seeds.
    """
    settings = list(flatten_settings(_defaults()))
    group, _, name = key.rpartition(".")
    if key in settings:  # such as "train.lr" = 0.1 in a file
        return UserError(f"unknown key {key!r}. It is {name!r} of the group {group!r}: write it without quotes.")
    leaf = name.replace("-", "_")
    if leaf in FLAGS:
        return UserError(f"unknown key {key!r}. It is not a setting of a run; use the flag --{leaf.replace('_', '-')}.")
    return unknown("key", key, siblings, _suggest_keys(key, leaf, siblings, settings))


def _suggest_keys(key: str, leaf: str, siblings: Sequence[str], settings: Sequence[str]) -> list[str]:
    """Keys of that name in other groups; otherwise keys with a similar spelling."""
    if leaf in SYNONYMS:
        return [SYNONYMS[leaf]]
    names = {setting: setting.rpartition(".")[2] for setting in settings}
    similar = difflib.get_close_matches(leaf, [sibling.rpartition(".")[2] for sibling in siblings], n=2, cutoff=0.75)
    if similar and "." in key:
        return [f"{key.rpartition('.')[0]}.{name}" for name in similar]
    return (
        [setting for setting, name in names.items() if name == leaf]
        or difflib.get_close_matches(key, dict.fromkeys([*siblings, *settings]), n=2, cutoff=0.7)
        or [setting for setting, name in names.items() if difflib.SequenceMatcher(None, leaf, name).ratio() >= 0.7][:3]
    )
