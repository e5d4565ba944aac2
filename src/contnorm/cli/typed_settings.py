"""Merges settings from the command line and from a file; rejects contradictory ones. Needs no torch.

Precedence: flags and ``--set``, then the settings file, then the defaults of flags.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contnorm.bench.config.schema import merge_settings, parse_assignment, read_toml, show_value, with_setting
from contnorm.errors import UserError
from contnorm.registry import find_norm

__all__ = [
    "MAX_SEEDS",
    "Setting",
    "check_seed",
    "check_seeds",
    "collect_settings",
    "nest_settings",
    "parse_assignments",
    "parse_int_or_text",
]

LONGEST_NUMBER = 18  # digits; longer numbers exceed the limit of every setting
MAX_SEEDS = 10_000
MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class Setting:
    """One setting from the command line.

    Attributes:
        origin: The option it was typed with, such as ``"--lr"`` or ``"--set train.lr"``.
        key: Dotted key.
        value: Value of the setting.
    """

    origin: str
    key: str
    value: Any

    def __str__(self) -> str:
        joined = "=" if self.origin.startswith("--set ") else " "
        return f"{self.origin}{joined}{self.value if isinstance(self.value, str) else show_value(self.value)}"


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


def nest_settings(settings: Iterable[Setting]) -> dict[str, Any]:
    """Nest typed settings by group. A setting may be repeated only with the same value.

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


def parse_assignments(assignments: Iterable[str]) -> Iterable[Setting]:
    """Parse ``key=value`` strings into settings."""
    for text in assignments:
        key, value = parse_assignment(text)
        if isinstance(value, Mapping) and "." not in key:  # a whole group, such as train={lr=0.1}
            for name, inner in value.items():
                yield Setting(f"--set {key}.{name}", f"{key}.{name}", inner)
        else:
            yield Setting(f"--set {key}", key, value)


def _same(a: Any, b: Any) -> bool:
    return a is b or (bool(a == b) and isinstance(a, bool) == isinstance(b, bool))


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


def parse_int_or_text(text: str) -> int | str:
    """Convert a text to an integer if it is one; otherwise return the text.

    Example:
        >>> parse_int_or_text("8"), parse_int_or_text("auto")
        (8, 'auto')
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= LONGEST_NUMBER else text


def check_seeds(count: int) -> None:
    """Raise a `UserError` if a number of seeds is out of range."""
    if not 1 <= count <= MAX_SEEDS:
        raise UserError(f"--seeds {show_value(count)}: use 1 or more, up to {MAX_SEEDS:,}; they count from 0.")


def check_seed(seed: int) -> None:
    """Raise a `UserError` if a seed is out of range."""
    if not 0 <= seed <= MAX_SEED:
        raise UserError(f"--seed {show_value(seed)}: use 0 or more, up to {MAX_SEED:,}.")
