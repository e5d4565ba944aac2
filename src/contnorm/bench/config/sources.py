"""Sources of settings: options, ``key=value`` assignments and TOML files, merged into nested settings.

Precedence: options and ``--set``, then the settings file, then the defaults of options. The defaults of streams and
strategies are added afterwards (`contnorm.bench.config.defaults`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from contnorm.bench.components import is_file_code
from contnorm.bench.config.schema import flatten_settings, from_dict, merge_settings, show_value
from contnorm.errors import UserError, usable

__all__ = [
    "MAX_SEEDS",
    "RUN_ARGUMENTS",
    "Setting",
    "check_seed",
    "check_seeds",
    "collect_settings",
    "format_settings",
    "format_value",
    "nest_settings",
    "parse_assignment",
    "parse_assignments",
    "parse_int_or_text",
    "parse_toml",
    "read_toml",
    "read_toml_text",
    "refuse_code",
    "with_setting",
]

RUN_ARGUMENTS = {
    "norm": "norm.name",
    "strategy": "strategy.name",
    "model": "model.name",
    "memory": "memory.kind",
    "lr": "train.lr",
    "batch_size": "train.batch",
    "replay": "train.replay",
}  # arguments of `bench.run` that are settings, with their keys
MAX_SEEDS = 10_000
MAX_SEED = 2**32 - 1


class Setting(NamedTuple):
    """One setting and where it was given.

    Attributes:
        origin: The option it was typed with, such as ``"--lr"`` or ``"--set train.lr"``; the key in Python.
        key: Dotted key.
        value: Value of the setting.
    """

    origin: str
    key: str
    value: Any


def collect_settings(
    defaults: Mapping[str, Any], config: Path | None, flags: Sequence[Setting], assignments: Sequence[str]
) -> dict[str, Any]:
    """Merge defaults, a settings file, flags and ``--set`` assignments into the nested settings of a run.

    Args:
        defaults: Default values of flags by dotted key; everything else overrides them.
        config: TOML file of settings.
        flags: Settings from flags that were typed.
        assignments: ``key=value`` strings of ``--set``.

    Raises:
        UserError: If a setting is typed twice with different values, or if the file names code.
    """
    values = nest_settings(Setting(key, key, value) for key, value in defaults.items())
    typed = nest_settings([*flags, *parse_assignments(assignments)])
    if config is not None:
        in_file = read_toml(config)
        refuse_code(merge_settings(in_file, typed), typed, str(config))
        values = merge_settings(values, in_file)
    return merge_settings(values, typed)


def refuse_code(values: Mapping[str, Any], typed: Mapping[str, Any], where: str) -> None:
    """Raise a `UserError` if a file names code that the call does not: it may come from somebody else.

    Args:
        values: Nested settings.
        typed: Nested settings of the call.
        where: The file, for messages.
    """
    of_call = flatten_settings(typed)
    for key, value in flatten_settings(values).items():
        names = value if isinstance(value, list) else [value]
        if key not in of_call and any(isinstance(name, str) and is_file_code(name) for name in names):
            raise UserError(
                f"{where}: {key}={value} is code, which is not executed because a file names it. Name it in the call: "
                f"--set {key}={value}."
            )


def nest_settings(settings: Iterable[Setting]) -> dict[str, Any]:
    """Nest settings by group. A setting may be repeated only with the same value.

    Example:
        >>> nest_settings([Setting("--lr", "train.lr", 0.1), Setting("--set train.lr", "train.lr", 0.1)])
        {'train': {'lr': 0.1}}
        >>> nest_settings([Setting("--lr", "train.lr", 0.2), Setting("--set train.lr", "train.lr", 0.1)])
        Traceback (most recent call last):
        contnorm.errors.UserError: --lr 0.2 and --set train.lr 0.1 contradict each other. Give train.lr once.
    """
    first: dict[str, Setting] = {}
    values: dict[str, Any] = {}
    for setting in settings:
        earlier = first.setdefault(setting.key, setting)
        if earlier.value != setting.value:
            raise UserError(
                f"{earlier.origin} {earlier.value} and {setting.origin} {setting.value} contradict each other. Give "
                f"{setting.key} once."
            )
        values = with_setting(values, setting.key, setting.value)
    return values


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


def parse_assignments(assignments: Iterable[str]) -> Iterator[Setting]:
    """Parse the ``key=value`` strings of ``--set`` into settings; a value may be a whole group, as train={lr=0.1}."""
    for text in assignments:
        key, value = parse_assignment(text)
        group = {f"{key}.{name}": inner for name, inner in value.items()} if isinstance(value, dict) else {key: value}
        yield from (Setting(f"--set {name}", name, inner) for name, inner in group.items())


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


def parse_int_or_text(text: str) -> int | str:
    """Convert a text to an integer if it is one; otherwise return the text.

    Example:
        >>> parse_int_or_text("8"), parse_int_or_text("auto")
        (8, 'auto')
    """
    return int(text) if text.isascii() and text.isdigit() else text


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
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise UserError(f"{where}: is not TOML ({error}).") from error


def check_seeds(count: int) -> None:
    """Raise a `UserError` if a number of seeds is out of range."""
    if not 1 <= count <= MAX_SEEDS:
        raise UserError(f"--seeds {count}: use 1 or more, up to {MAX_SEEDS:,}; they count from 0.")


def check_seed(seed: int) -> None:
    """Raise a `UserError` if a seed is out of range."""
    if not 0 <= seed <= MAX_SEED:
        raise UserError(f"--seed {seed}: use 0 or more, up to {MAX_SEED:,}.")
