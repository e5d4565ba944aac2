"""Sources of settings: flags, ``key=value`` assignments, TOML files and Python mappings, merged into nested settings.

Precedence: flags and ``--set``, then the settings file, then the defaults of flags. Contradictions within the command
line are rejected. `contnorm.bench.config.defaults` adds the defaults of streams and strategies afterwards.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contnorm.bench.config.schema import from_dict, merge_settings, show_value
from contnorm.errors import UserError
from contnorm.registry import find_norm

__all__ = [
    "MAX_SEEDS",
    "RUN_ARGUMENTS",
    "Setting",
    "check_seed",
    "check_seeds",
    "collect_settings",
    "expand_keys",
    "format_settings",
    "format_value",
    "nest_settings",
    "parse_assignment",
    "parse_assignments",
    "parse_int_or_text",
    "parse_toml",
    "read_toml",
    "read_toml_text",
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
_MAX_DIGITS = 18  # longer numbers exceed the limit of every setting
_MAX_DEPTH = 16  # nesting levels of tables and lists in a TOML file
_MAX_FILE = 2**20  # bytes of a TOML file; a file of all settings has about a thousand


@dataclass(frozen=True)
class Setting:
    """One setting and where it was given.

    Attributes:
        origin: The option it was typed with, such as ``"--lr"`` or ``"--set train.lr"``; the key in Python.
        key: Dotted key.
        value: Value of the setting.
    """

    origin: str
    key: str
    value: Any

    def __str__(self) -> str:
        is_flag = self.origin.startswith("--") and " " not in self.origin
        value = self.value if isinstance(self.value, str) else show_value(self.value)
        return f"{self.origin}{' ' if is_flag else '='}{value}"


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
        UserError: If a setting is typed twice with different values.
    """
    values: dict[str, Any] = {}
    for key, value in defaults.items():
        values = with_setting(values, key, value)
    if config is not None:
        in_file = read_toml(config)
        _check_groups(in_file, {}, str(config))
        values = merge_settings(values, in_file)
    typed = nest_settings([*flags, *parse_assignments(assignments)])
    _check_groups(typed, values, "command line")
    return merge_settings(values, typed)


def expand_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nest settings of the Python API, which have dotted keys, are nested by group, or both.

    Raises:
        UserError: If a setting occurs twice with different values, or contradicts the number in a norm's name.

    Example:
        >>> expand_keys({"train.lr": 0.1, "train": {"batch": 32}, "norm.name": "cn"})
        {'train': {'lr': 0.1, 'batch': 32}, 'norm': {'name': 'cn'}}
        >>> expand_keys({"train.lr": 0.1, "train": {"lr": 0.2}})
        Traceback (most recent call last):
        contnorm.errors.UserError: train.lr=0.1 and train.lr=0.2 contradict each other. Give train.lr once.
    """
    nested = nest_settings(setting for key, value in settings.items() for setting in _split_group(str(key), value, ""))
    _check_groups(nested, {}, "settings")
    return nested


def nest_settings(settings: Iterable[Setting]) -> dict[str, Any]:
    """Nest settings by group. A setting may be repeated only with the same value.

    Example:
        >>> nest_settings([Setting("--lr", "train.lr", 0.1), Setting("--set train.lr", "train.lr", 0.1)])
        {'train': {'lr': 0.1}}
        >>> nest_settings([Setting("--lr", "train.lr", 0.2), Setting("--set train.lr", "train.lr", 0.1)])
        Traceback (most recent call last):
        contnorm.errors.UserError: --lr 0.2 and --set train.lr=0.1 contradict each other. Give train.lr once.
    """
    first: dict[str, Setting] = {}
    values: dict[str, Any] = {}
    for setting in settings:
        other = first.setdefault(setting.key, setting)
        if not _same(other.value, setting.value):
            raise UserError(f"{other} and {setting} contradict each other. Give {setting.key} once.")
        values = with_setting(values, setting.key, setting.value)
    return values


def _same(a: Any, b: Any) -> bool:
    return a is b or (bool(a == b) and isinstance(a, bool) == isinstance(b, bool))


def with_setting(values: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Copy of nested values with one dotted key set.

    Example:
        >>> with_setting({"train": {"lr": 0.1}}, "train.batch", 32)
        {'train': {'lr': 0.1, 'batch': 32}}
    """
    head, _, rest = key.partition(".")
    inner = values.get(head, {})
    if rest and not isinstance(inner, Mapping):
        raise UserError(f"config key {key!r}: {head}={show_value(inner)} must be a group of keys, such as {key}.")
    return {**values, head: with_setting(inner, rest, value) if rest else value}


def _check_groups(values: Mapping[str, Any], below: Mapping[str, Any], where: str) -> None:
    """Reject ``norm.groups`` that contradicts the number in a norm's name, such as cn8.

    ``below`` are the values that ``values`` override; they supply the norm's name if ``values`` have none.
    """
    norm = values.get("norm", {})
    groups = norm.get("groups") if isinstance(norm, Mapping) else None
    name = norm.get("name", below.get("norm", {}).get("name")) if isinstance(norm, Mapping) else None
    if groups is None or not isinstance(name, str):
        return
    try:
        groups_in_name = find_norm(name)[1]
    except ValueError:  # an unknown norm is rejected later
        return
    if groups_in_name is not None and groups_in_name != groups:
        raise UserError(
            f"{where}: norm.name={name} and norm.groups={show_value(groups)} contradict each other. Give the number of "
            f"groups once."
        )


def parse_assignments(assignments: Iterable[str]) -> Iterator[Setting]:
    """Parse the ``key=value`` strings of ``--set`` into settings; a value may be a whole group, as train={lr=0.1}."""
    for text in assignments:
        yield from _split_group(*parse_assignment(text), "--set ")


def _split_group(key: str, value: Any, origin: str) -> Iterator[Setting]:
    """Settings of a group, or the one setting that a key and a value are."""
    if isinstance(value, Mapping) and "." not in key:
        for name, inner in value.items():
            yield Setting(f"{origin}{key}.{name}", f"{key}.{name}", inner)
    else:
        yield Setting(f"{origin}{key}", key, value)


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
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else text


def read_toml(path: Path) -> dict[str, Any]:
    """Read and check a settings file; errors name the file."""
    values = parse_toml(read_toml_text(path, "--config takes a TOML file."), str(path))
    from_dict(values, str(path))
    return values


def read_toml_text(path: Path, hint: str) -> str:
    """Read the text of a TOML file; ``hint`` is appended to the error message if it can't be read."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE + 1)
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: can't be read ({reason}). {hint}") from error
    if len(content) > _MAX_FILE:
        raise UserError(f"{path}: is larger than {_MAX_FILE:,} bytes. {hint}")
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
        raise UserError(f"{where}: is nested too deeply. Use {_MAX_DEPTH} levels at most.") from error
    except ValueError as error:  # Python refuses to parse integers with thousands of digits
        raise UserError(f"{where}: has a number with too many digits. Numbers have 64 bits.") from error
    _check_limits(values, where)
    return values


def _check_limits(values: Any, where: str) -> None:
    """Check nesting and size of numbers, level by level: recursion would fail on deeply nested values."""
    level = [values]
    for _ in range(_MAX_DEPTH):
        if any(isinstance(value, int) and value.bit_length() > 64 for value in level):
            raise UserError(f"{where}: has a number with too many digits. Numbers have 64 bits.")
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise UserError(f"{where}: is nested too deeply. Use {_MAX_DEPTH} levels at most.")


def check_seeds(count: int) -> None:
    """Raise a `UserError` if a number of seeds is out of range."""
    if not 1 <= count <= MAX_SEEDS:
        raise UserError(f"--seeds {show_value(count)}: use 1 or more, up to {MAX_SEEDS:,}; they count from 0.")


def check_seed(seed: int) -> None:
    """Raise a `UserError` if a seed is out of range."""
    if not 0 <= seed <= MAX_SEED:
        raise UserError(f"--seed {show_value(seed)}: use 0 or more, up to {MAX_SEED:,}.")
