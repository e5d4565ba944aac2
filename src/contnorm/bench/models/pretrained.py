"""A network that begins with weights of another training: what has to fit, and what may start afresh.

Every tensor has to fit by name and shape, but for two things. The classifier starts afresh where the file has another
number of outputs, or none. And a norm takes of the file what it has itself: batch norm's parameters and moments serve
continual norm as they are, group norm drops the moments, and what only the norm at hand has stays as it was made.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from contnorm.bench.config.schema import ModelConfig
from contnorm.bench.models.deep_resnet import named_by_blocks
from contnorm.bench.models.weights_files import bring_weights, read_weights, replaced_weights
from contnorm.convert.detect import recognize
from contnorm.errors import UserError

__all__ = ["load_pretrained"]

PREFIXES = ("module.", "model.", "backbone.", "_orig_mod.")  # put in front by wrappers and by training code
SHOWN = 2  # names of each kind in a message


def load_pretrained(network: nn.Module, config: ModelConfig) -> None:
    """Give a network the weights that a run's settings name.

    Args:
        network: Freshly made; changed only if all fits.
        config: The settings it was made by.

    Raises:
        UserError: Where the file can't be used, or is not the one the run was begun with.
    """
    assert config.weights is not None
    why = replaced_weights(config)
    if why:
        raise UserError(why)
    path = bring_weights(config.weights, config.name)
    own = network.state_dict()
    found = _without_prefixes(read_weights(path), own, path)
    parts = _Parts.of(network)
    afresh = _afresh(own, found, parts.classifier)
    fits = _fitting(own, {name: t for name, t in found.items() if name not in afresh}, afresh, parts, path, config)
    network.load_state_dict(fits, strict=False)
    if afresh:
        _say(f"{path}: its classifier is left out; {parts.classifier} starts afresh, {_outputs(own, found, afresh)}.")


@dataclass(frozen=True)
class _Parts:
    """Which names of a network are its norms' and its classifier's."""

    norms: frozenset[str]
    classifier: str

    @classmethod
    def of(cls, network: nn.Module) -> _Parts:
        modules = dict(network.named_modules())
        linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
        return cls(
            frozenset(name for name, module in modules.items() if recognize(module) is not None),
            linear[-1] if linear else "",
        )

    def in_norm(self, name: str) -> bool:
        return name.rpartition(".")[0] in self.norms

    def needed(self, name: str) -> bool:
        """Whether a file has to have it: of a norm its affine alone."""
        return not self.in_norm(name) or name.endswith((".weight", ".bias"))


def _without_prefixes(found: Mapping[str, Tensor], own: Iterable[str], path: Path) -> dict[str, Tensor]:
    """Tensors by the network's own names, where a prefix was put before them."""
    known = set(own)
    renamed: dict[str, Tensor] = {}
    for name, tensor in found.items():
        short = name
        while short not in known and (prefix := next((p for p in PREFIXES if short.startswith(p)), None)):
            short = short.removeprefix(prefix)
        if short in renamed:
            raise UserError(f"{path}: holds {short} twice, with and without a prefix. Save one network alone.")
        renamed[short] = tensor
    return renamed


def _afresh(own: Mapping[str, Tensor], found: Mapping[str, Tensor], classifier: str) -> set[str]:
    """The names of the classifier, where the file has none, or one of another number of outputs."""
    names = {name for name in own if classifier and name.startswith(f"{classifier}.")}
    there = [name for name in names if name in found]
    resized = there and all(found[n].shape[1:] == own[n].shape[1:] and found[n].dim() for n in there)
    differs = any(found[name].shape != own[name].shape for name in there)
    return names if not there or (resized and differs) else set()


def _outputs(own: Mapping[str, Tensor], found: Mapping[str, Tensor], afresh: set[str]) -> str:
    some = min(afresh)
    have = f"has {len(found[some])} outputs" if some in found else "has none"
    return f"since the file {have} and the run {len(own[some])}"


def _fitting(
    own: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    afresh: set[str],
    parts: _Parts,
    path: Path,
    config: ModelConfig,
) -> dict[str, Tensor]:
    """The tensors to load; refuses a file that is of another network, with what does not fit."""
    missing = [name for name in own if name not in found and name not in afresh and parts.needed(name)]
    unexpected = [name for name in found if name not in own and not parts.in_norm(name)]
    both = [name for name in own if name in found]
    shapes = [f"{n} {tuple(found[n].shape)} for {tuple(own[n].shape)}" for n in both if found[n].shape != own[n].shape]
    kinds = [f"{n} {found[n].dtype} for {own[n].dtype}" for n in both if _kind(found[n]) != _kind(own[n])]
    if missing or unexpected or shapes or kinds:
        told = {"missing": missing, "unexpected": unexpected, "of another shape": shapes, "of another kind": kinds}
        wrong = ", ".join(f"{len(names)} {what} ({_some(names)})" for what, names in told.items() if names)
        like = named_by_blocks(found)
        hint = f" They look like {like}'s." if like and like != config.name else ""
        raise UserError(
            f"{path}: its weights don't fit model {config.name!r} of width {config.width}: {wrong}.{hint} Say with "
            f"model.name and model.width which network they are of; published ones have width 64."
        )
    broken = [n for n in both if found[n].is_floating_point() and not torch.isfinite(found[n]).all()]
    if broken:
        raise UserError(
            f"{path}: not all of its numbers are finite ({_some(broken)}). Take weights of another training."
        )
    below = [n for n in both if n.endswith("running_var") and (found[n] < 0).any()]
    if below:
        raise UserError(f"{path}: has variances below 0 ({_some(below)}). Take weights of another training.")
    return {name: found[name] for name in both}


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


@cache  # once, however many seeds begin with the same weights
def _say(text: str) -> None:
    logging.getLogger("contnorm").warning(text)
