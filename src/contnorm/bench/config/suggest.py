"""Suggestions for unknown setting keys: names of flags, keys of another group, and similar spellings."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from contnorm.errors import UserError, unknown

__all__ = ["unknown_key"]

# Common other names of settings: names of flags and groups, and names in other code bases.
MEANT = {
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


def unknown_key(given: str, beside: Sequence[str], every: Sequence[str]) -> UserError:
    """Error for an unknown key, with suggestions and the valid keys of its group.

    Args:
        given: The unknown key, dotted.
        beside: Valid keys of its group, dotted.
        every: All settings, dotted.

    Example:
        >>> print(unknown_key("lr", ["train", "norm"], ["train.lr", "norm.name"]))
        unknown key 'lr'. Did you mean 'train.lr'? There are: train, norm.
        >>> print(unknown_key("seeds", ["train"], ["train.lr"]))
        unknown key 'seeds'. It is no setting of a run, but a flag: --seeds.
    """
    group, _, name = given.rpartition(".")
    if given in every:  # such as "train.lr" = 0.1 in a file
        return UserError(f"unknown key {given!r}. It is {name!r} of the group {group!r}: write it without quotes.")
    leaf = name.replace("-", "_")
    if leaf in FLAGS:
        return UserError(f"unknown key {given!r}. It is no setting of a run, but a flag: --{leaf.replace('_', '-')}.")
    return unknown("key", given, beside, _suggestions(given, leaf, beside, every))


def _suggestions(key: str, leaf: str, group_keys: Sequence[str], every: Sequence[str]) -> list[str]:
    """Keys of that name in other groups; otherwise keys with a similar spelling."""
    if leaf in MEANT:
        return [MEANT[leaf]]
    names = {setting: setting.rpartition(".")[2] for setting in every}
    return (
        [setting for setting, name in names.items() if name == leaf]
        or difflib.get_close_matches(key, dict.fromkeys([*group_keys, *every]), n=2, cutoff=0.7)
        or [setting for setting, name in names.items() if difflib.SequenceMatcher(None, leaf, name).ratio() >= 0.7][:3]
    )
