"""Settings of a run: their schema, which the command line, TOML files, records and the docs share, hash and text.

A run is identified by the hash of its settings; seeds, devices and folders are not part of it. Types, limits and
descriptions are stated here once: `from_dict` checks values against them, and `json_schema` lists them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import pydantic
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from contnorm.errors import UserError, shorten, unknown, usable

RUN_ARGUMENTS = {
    "norm": "norm.name",
    "strategy": "strategy.name",
    "model": "model.name",
    "memory": "memory.kind",
    "lr": "train.lr",
    "batch_size": "train.batch",
    "replay": "train.replay",
}  # arguments of `bench.run` that are settings, with their keys
SHORT_KEYS = {
    "norm": "norm.name",
    "strategy": "strategy.name",
    "stream": "stream.name",
    "model": "model.name",
    "memory": "memory.kind",
    "buffer": "memory.size",
    "weights": "model.weights",
}  # other short keys are names of settings without their group
_MEANT = {
    **dict.fromkeys(("dataset", "data", "benchmark"), "stream.name"),
    **dict.fromkeys(("mem_size", "buffer_size", "memory_size"), "memory.size"),
    "method": "strategy.name",
    "network": "model.name",
    "learning_rate": "train.lr",
    "epochs": "train.passes",
    "batch_size": "train.batch",
}  # settings by names that other programs use
_MAX_INT = 10**9  # larger than any feasible number of samples, slots or steps
_MAX_FLOAT = 3.4e38  # maximum of float32, which networks are computed in

Text = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$")]  # no control characters
Whole = Annotated[int, Field(ge=-int(_MAX_FLOAT), le=int(_MAX_FLOAT))]
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


def setting(default: Any, description: str, *, kw_only: bool = False) -> Any:
    """Field of a setting, with its default and what it is."""
    return Field(default=default, description=description, kw_only=kw_only)


@dataclass(frozen=True, config=_CONFIG)
class ComponentConfig:
    """Base class of groups whose component, such as a strategy, may have own settings.

    Attributes:
        options: The component's own settings by name, in alphabetical order. In nested values and records they are
            keys of the group, in addition to its fields.
    """

    options: tuple[tuple[str, bool | Whole | Number | Text | None], ...] = Field(default=(), kw_only=True)


@dataclass(frozen=True, config=_CONFIG)
class StreamConfig:
    """The data stream: data set, tasks and their order."""

    name: Text = setting("permuted-mnist", "Stream; `contnorm ls streams` lists them.")
    source: Text | None = setting(None, "Data set; none for the first of the stream's that is on disk.")
    tasks: Count | None = setting(None, "Number of tasks; none for all.")
    train_per_task: Count | None = setting(None, "Training samples per task; none for all.")
    test_per_task: Count | None = setting(None, "Test samples per task; none for all.")
    class_order: Literal["fixed", "seed"] = setting(
        "fixed", "Assignment of classes (or permutations) to tasks: the same for all seeds, or by seed."
    )
    scenario: Literal["task", "class", "domain", "free"] | None = setting(
        None, "Task-, class- or domain-incremental learning, or task-free; none for the stream's default."
    )
    part: Literal["all", "learn", "validate"] | None = setting(
        None, "Tasks to use where the stream reserves some for model selection; none for its default."
    )
    augment: bool | None = setting(None, "Random crops and flips of training images; none for the stream's default.")
    holdout: Annotated[float, Field(gt=0, lt=1)] | None = setting(
        None,
        "Fraction of the training samples of each class that replaces the test samples, for model "
        "selection; none for the test samples.",
    )
    blur: Annotated[float, Field(ge=0, le=1)] = setting(
        0.0,
        "For task-free streams: fraction of the samples of a task that are mixed with those of its neighbours, half of "
        "them at either boundary; 0 for sharp boundaries.",
        kw_only=True,
    )


@dataclass(frozen=True, config=_CONFIG)
class StrategyConfig(ComponentConfig):
    """The learning method: how the loss is computed from stream and memory samples."""

    name: Text = setting("single", "Strategy, or path/to/file.py:Class; `contnorm ls strategies` lists them.")
    forward: Literal["joint", "separate"] = setting(
        "joint", "One forward pass over stream and memory samples, or two; changes batch moments."
    )
    loss: Literal["mean", "sum"] = setting(
        "mean", "For er, prs and crs: mean over all samples, or sum of the means of stream and memory samples."
    )
    replay_from: Literal["past", "all"] = setting("past", "Replay samples of earlier tasks, or of all tasks so far.")
    alpha: Number = setting(0.2, "For derpp: weight of the stored logits.")
    beta: Number = setting(0.5, "For derpp: weight of the stored labels.")
    code: Text | None = setting(None, "Hash of a user's strategy; filled in, do not set.")
    distance: Literal["task", "all"] = setting(
        "task",
        "For derpp: outputs compared with the stored logits: those that compete for the sample, or all.",
        kw_only=True,
    )


@dataclass(frozen=True, config=_CONFIG)
class MemoryConfig(ComponentConfig):
    """The replay memory."""

    kind: Text = setting("ring", "Memory, or path/to/file.py:Class; `contnorm ls memories` lists them.")
    size: Count = setting(50, "Slots: per task (or class) for ring, in total for the others.")
    per: Literal["task", "class"] = setting("task", "For ring: one ring per task, or per class.")
    # Larger exponents of sample counts can overflow.
    rho: Annotated[float, Field(ge=-10, le=10)] = setting(
        0.0, "For prs: a label's share is its frequency to this power; 0 gives equal shares."
    )
    quirk: bool = setting(False, "For prs: evict as the published code does.")
    code: Text | None = setting(None, "Hash of a user's memory; filled in, do not set.")


@dataclass(frozen=True, config=_CONFIG)
class ModelConfig:
    """The network."""

    name: Text = setting("mlp", "Network, or path/to/file.py:function; `contnorm ls models` lists them.")
    width: Count = setting(100, "Units of hidden layers; for a ResNet, filters of its stem.")
    stem: Literal["pool", "plain"] = setting("pool", "ResNet stem with or without max-pool.")
    weights: Text | None = setting(
        None, "Initial weights: a file, or torchvision:NAME; none for random initialization."
    )
    weights_hash: Text | None = setting(None, "Hash of the weights file; filled in, do not set.")
    code: Text | None = setting(None, "Hash of a user's network; filled in, do not set.")


@dataclass(frozen=True, config=_CONFIG)
class NormConfig(ComponentConfig):
    """The normalization layers of the network."""

    name: Text = setting("bn", "Norm, or path/to/file.py:Class; `contnorm ls norms` lists them.")
    groups: Count | Literal["auto"] = setting(
        32, "Channel groups of norms that have them; auto fits them to the channels of each layer."
    )
    auto_channels: Annotated[int, Field(ge=1, le=2)] = setting(
        1, "Minimum channels per group for groups=auto: 2 in new runs, 1 in records of 0.1."
    )
    momentum: Number | Literal["cumulative"] | None = setting(
        None, "Momentum of running moments; none for the norm's default."
    )
    schedule: Literal["published", "scaled"] = setting("published", "Limits of batch renormalization.")
    layers: Literal["ours", "stock"] = setting(
        "ours", "Implementation; stock uses torch's unfused layers, for speed comparisons."
    )
    code: Text | None = setting(None, "Hash of a user's norm; filled in, do not set.")
    freeze_after: Count | None = setting(
        None,
        "Number of tasks after which running moments are frozen and also used in training; none for never.",
        kw_only=True,
    )


@dataclass(frozen=True, config=_CONFIG)
class TrainConfig:
    """Optimization."""

    lr: PositiveNumber = setting(0.03, "Learning rate.")
    optimizer: Literal["sgd", "adam"] = setting("sgd", "Optimizer.")
    clip_value: PositiveNumber | None = setting(
        None, "Clip each gradient element to [-clip_value, clip_value]; none for no clipping."
    )
    batch: Count = setting(10, "Stream samples per step.")
    replay: Annotated[int, Field(ge=0, le=_MAX_INT)] = setting(10, "Memory samples per step.")
    partial: Literal["keep", "drop"] = setting("keep", "Keep or drop the incomplete last batch of each task.")
    passes: Count = setting(1, "Epochs per task; online learning uses 1.")
    precision: Precision = setting("fp32", "Floating-point precision of training.")
    deterministic: bool = setting(True, "Use deterministic algorithms only.")
    graph: Literal["on", "off"] = setting(
        "on", "Capture training steps as CUDA graphs on a GPU; off runs every step in Python."
    )
    max_steps: Count | None = setting(None, "Stop after this many steps (smoke test); none for all steps.")
    convolutions: Literal["auto", "cudnn"] = setting(
        "auto",
        "Compute convolutions by Triton where a table of measurements on this GPU says that it is faster, "
        "or all of them by cuDNN.",
        kw_only=True,
    )
    updates: Count = setting(
        1,
        "Steps per stream batch, each with its own augmentation and replay samples; the batch is offered "
        "to the memory at the last one.",
        kw_only=True,
    )


@dataclass(frozen=True, config=_CONFIG)
class EvaluateConfig:
    """Evaluation."""

    moments: Literal["running", "oracle", "memory", "task"] = setting(
        "running",
        "Moments in evaluation: running ones, exact ones of all data seen so far (oracle) or of the replay "
        "memory's samples (memory), or for each task the running ones at its end (task).",
    )
    ahead: bool = setting(False, "Also evaluate tasks that are not learned yet, and all tasks before training.")
    drift: bool = setting(True, "After each task, measure the distance between running and oracle moments.")
    weights: Literal["plain", "task", "batch"] = setting(
        "plain",
        "For moments=memory: the same weight for each stored sample (plain) or each task (task), or the "
        "shares of a training batch (batch).",
        kw_only=True,
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

    stream: StreamConfig = dataclasses.field(default_factory=StreamConfig)
    strategy: StrategyConfig = dataclasses.field(default_factory=StrategyConfig)
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    norm: NormConfig = dataclasses.field(default_factory=NormConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = dataclasses.field(default_factory=EvaluateConfig)

    def as_dict(self) -> dict[str, Any]:
        """All settings by group and name, in field order; a component's own settings come last."""
        groups = {group: dict(vars(getattr(self, group))) for group in _GROUPS}
        own = {group: dict(values.pop("options", ())) for group, values in groups.items()}
        return {group: {**values, **own[group]} for group, values in groups.items()}

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


_GROUPS: dict[str, Any] = {
    "stream": StreamConfig,
    "strategy": StrategyConfig,
    "memory": MemoryConfig,
    "model": ModelConfig,
    "norm": NormConfig,
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
}


def field_of(key: str) -> Any:
    """Return the field of a setting by dotted key, with its ``default`` and ``description``.

    Example:
        >>> field_of("train.lr").description
        'Learning rate.'
    """
    group, _, name = key.partition(".")
    return _GROUPS[group].__dataclass_fields__[name].default


@cache
def _defaults() -> dict[str, Any]:
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
        contnorm.errors.UserError: config: train.batch=0: input should be greater than or equal to 1.
    """
    groups = {}
    for name, settings in values.items():
        if name not in _GROUPS:
            raise UserError(f"{where}: {unknown_key(str(name))}")
        if not isinstance(settings, Mapping):
            raise UserError(f"{where}: {name}={show_value(settings)}: is a group of keys, such as {name}.KEY.")
        fields = {key: value for key, value in settings.items() if key in _defaults()[name]}
        own = {str(key): value for key, value in settings.items() if key not in fields}
        if own and not issubclass(_GROUPS[name], ComponentConfig):
            raise UserError(f"{where}: {unknown_key(f'{name}.{next(iter(own))}')}")
        options = {"options": tuple(sorted(own.items()))} if own else {}
        groups[name] = _checked(_GROUPS[name], {**fields, **options}, name, f"{where}: ", sorted(own))
    return RunConfig(**groups)


def _checked(cls: Any, values: Mapping[str, Any], group: str, where: str = "", own: Sequence[str] = ()) -> Any:
    """Make an object of a group of settings; ``own`` are names of its options, messages begin with ``where``."""
    try:
        return cls(**values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = first["loc"]
        key = ".".join([group, *([own[int(place[1])]] if place[:1] == ("options",) else map(str, place[:1]))])
        if first["type"] == "missing":
            raise UserError(f"{where}{key}: must be set, such as --set {key}=VALUE.") from None
        message = first["msg"].removeprefix("Value error, ").rstrip(".")
        shown = f"={show_value(first['input'])}" if place else ""
        raise UserError(f"{where}{key}{shown}: {message[:1].lower()}{message[1:]}.") from None


def unknown_key(key: str, own: Sequence[str] = ()) -> UserError:
    """Return the error for an unknown setting or group.

    Args:
        key: The dotted key.
        own: Names of the component's own settings.

    Example:
        >>> print(unknown_key("strategy.bta"))
        unknown key 'strategy.bta'. Did you mean 'strategy.beta' or 'strategy.name'? There are: strategy.name, ...
    """
    group = key.partition(".")[0]
    settable = [name for name in _defaults().get(group, ()) if name not in ("code", "weights_hash")]
    names = [f"{group}.{name}" for name in (*settable, *own)] if group in _GROUPS else _GROUPS
    return unknown("key", key, names, meant_keys(key) or None)


def meant_keys(key: str) -> list[str]:
    """Settings that a key without a group, with another group or of another program means.

    Example:
        >>> meant_keys("lr"), meant_keys("train.epochs"), meant_keys("colour")
        (['train.lr'], ['train.passes'], [])
    """
    name = key.rpartition(".")[2]
    if name in SHORT_KEYS or name in _MEANT:
        return [{**SHORT_KEYS, **_MEANT}[name]]
    return [f"{group}.{name}" for group, names in _defaults().items() if name in names]


def resolve_options(group: str, config: ComponentConfig, component: object) -> Options:
    """Check a component's own settings and add the defaults of those that are not set.

    Args:
        group: The group of the settings, such as ``"strategy"``.
        config: The settings of the group; its ``options`` are checked.
        component: The class (or object) of the component, with a dataclass ``Settings`` if it has own settings.

    Raises:
        UserError: For an unknown setting, a value of another type, or an unusable ``Settings``.

    Example:
        >>> class Component:
        ...     @dataclasses.dataclass(frozen=True)
        ...     class Settings:
        ...         temperature: float = 2.0
        ...         strength: float = 1.0
        >>> resolve_options("strategy", StrategyConfig("mine.py:Component", options=(("strength", 3),)), Component)
        (('strength', 3.0), ('temperature', 2.0))
        >>> resolve_options("strategy", StrategyConfig("mine.py:Component", options=(("strenth", 3),)), Component)
        Traceback (most recent call last):
        contnorm.errors.UserError: unknown key 'strategy.strenth'. Did you mean 'strategy.strength' or ...
    """
    given, declared = dict(config.options), getattr(component, "Settings", None)
    if declared is not None and not dataclasses.is_dataclass(declared):
        label = getattr(component, "__name__", type(component).__name__)
        raise UserError(f"{group} {label}: Settings must be a dataclass. Decorate it with @dataclass(frozen=True).")
    names = [] if declared is None else [field.name for field in dataclasses.fields(declared) if field.init]
    for name in names:
        if name in vars(config):
            raise UserError(f"{group}.{name}: is a setting of every {group}. Use another name in Settings.")
    for name in given:
        if name not in names:
            raise unknown_key(f"{group}.{name}", names)
    if declared is None:
        return ()
    settings = _checked(_checker(declared), given, group)  # type: ignore[arg-type]
    # A setting that was added to a component is left out at its default, so that hashes of older runs stay.
    added = {f.name: f.default for f in dataclasses.fields(declared) if "added" in f.metadata}
    values = ((name, getattr(settings, name)) for name in sorted(names))
    return tuple((name, value) for name, value in values if name not in added or value != added[name])


@cache
def _checker(declared: Any) -> Any:
    """Return a dataclass that checks the types of another one."""
    types = get_type_hints(declared, include_extras=True)  # annotations may be text
    for field in dataclasses.fields(declared):
        field.type = types[field.name]
        for part in ("default", "default_factory"):  # cloudpickle copies the marker of no default
            if type(getattr(field, part)) is type(dataclasses.MISSING):
                setattr(field, part, dataclasses.MISSING)
    strict = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, validate_default=True)
    return pydantic.dataclasses.dataclass(declared, frozen=declared.__dataclass_params__.frozen, config=strict)


def json_schema() -> dict[str, Any]:
    """JSON schema of the settings of a run, with types, limits, defaults and descriptions.

    Example:
        >>> json_schema()["$defs"]["TrainConfig"]["properties"]["batch"]["minimum"]
        1
    """
    schema = {**TypeAdapter(RunConfig).json_schema(), "description": "All settings of a run."}  # without the example
    for group in ("StrategyConfig", "MemoryConfig", "NormConfig"):  # their options are further keys of the group
        del schema["$defs"][group]["properties"]["options"]
        schema["$defs"][group]["additionalProperties"] = {"type": ["boolean", "integer", "number", "string", "null"]}
    return schema


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
    """Text of a value for an error message: its repr, shortened if it is long.

    Example:
        >>> show_value("cn"), len(show_value("a" * 10**6))
        ("'cn'", 99)
    """
    return shorten(repr(value), 100)


# --- Settings as text ------------------------------------------------------------------------------------------------


def with_setting(values: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Copy of nested values with one dotted key set.

    Example:
        >>> with_setting({"train": {"lr": 0.1}}, "train.batch", 32)
        {'train': {'lr': 0.1, 'batch': 32}}
    """
    group, _, name = key.partition(".")
    if not name:
        return {**values, group: value}
    return {**values, group: {**values.get(group, {}), name: value}}


def nest_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nest settings by dotted key in their groups.

    Example:
        >>> nest_settings({"train.lr": 0.1, "norm.name": "cn"})
        {'train': {'lr': 0.1}, 'norm': {'name': 'cn'}}
    """
    values: dict[str, Any] = {}
    for key, value in settings.items():
        values = with_setting(values, key, value)
    return values


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Parse ``key=value`` strings, of which the last one of a key counts; a value may be a group, as train={lr=0.1}.

    Example:
        >>> parse_assignments(["train.lr=0.1", "norm={name='cn', groups=8}"])
        {'train.lr': 0.1, 'norm.name': 'cn', 'norm.groups': 8}
    """
    settings: dict[str, Any] = {}
    for key, value in map(parse_assignment, assignments):
        settings |= flatten_settings({key: value})
    return settings


def parse_assignment(text: str) -> tuple[str, Any]:
    """Parse ``key=value`` from the command line; the value is TOML, or plain text if it is not valid TOML.

    Example:
        >>> parse_assignment("train.lr=0.1"), parse_assignment("norm.name=cn")
        (('train.lr', 0.1), ('norm.name', 'cn'))
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key or key.count(".") > 1:
        raise UserError(f"--set {show_value(text)}: expected key=value, such as train.lr=0.1.")
    if value == "none":
        return key, None
    try:
        parsed = tomllib.loads(f"value = {value}")
    except ValueError:
        return key, value
    return key, parsed["value"] if len(parsed) == 1 else value  # a line break in the value could define further keys


def format_value(value: Any) -> str:
    """Format a value as it is typed for ``--set``.

    Example:
        >>> format_value(None), format_value(True), format_value(0.1), format_value("cn")
        ('none', 'true', '0.1', 'cn')
    """
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def format_settings(settings: Mapping[str, Any], keys: Collection[str]) -> str:
    """Format the settings whose key is among the keys as they are typed for ``--set``.

    Example:
        >>> format_settings({"train.lr": 0.1, "norm.name": "cn"}, ["train.lr"])
        'train.lr=0.1'
    """
    return " ".join(f"{key}={format_value(value)}" for key, value in settings.items() if key in keys)


def read_toml(path: Path) -> dict[str, Any]:
    """Read and check a settings file; errors name the file."""
    values = parse_toml(read_toml_text(path, "--config takes a TOML file."), str(path))
    from_dict(values, str(path))
    return values


def read_toml_text(path: Path, hint: str) -> str:
    """Read the text of a TOML file; ``hint`` is appended to the error message if it can't be read."""
    with usable(path, "can't be read", hint):
        content = path.read_bytes()
    return content.decode("utf-8-sig", "surrogateescape")  # some editors write a byte order mark


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse TOML text; error messages begin with ``where``."""
    with usable(where, "is not TOML", "Correct its syntax.", ValueError):
        return tomllib.loads(text)
