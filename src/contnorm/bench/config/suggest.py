"""Where a misplaced key belongs: it may be a flag's name, stand in the wrong group, or be almost one of ours."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from contnorm.errors import UserError, unknown

__all__ = ["unknown_key"]

# What people type for a setting: the flags' names, the groups', and those other code bases use.
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
FLAGS = ("seeds", "seed", "device", "lanes", "data_root", "runs", "config")  # not settings: no part of a run's identity


def unknown_key(given: str, beside: Sequence[str], every: Sequence[str]) -> UserError:
    """An error for a key that isn't there: where it belongs, then what there is in its place.

    Args:
        given: The key, dotted.
        beside: What there is in its group, dotted.
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
    return unknown("key", given, beside, _meant(given, leaf, beside, every))


def _meant(given: str, leaf: str, beside: Sequence[str], every: Sequence[str]) -> list[str]:
    """Another group's key of that name; else what is spelled almost alike, here or anywhere."""
    if leaf in MEANT:
        return [MEANT[leaf]]
    named = {key: key.rpartition(".")[2] for key in every}
    return (
        [key for key, name in named.items() if name == leaf]
        or difflib.get_close_matches(given, dict.fromkeys([*beside, *every]), n=2, cutoff=0.7)
        or [key for key, name in named.items() if difflib.SequenceMatcher(None, leaf, name).ratio() >= 0.7][:3]
    )
