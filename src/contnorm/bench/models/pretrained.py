"""Load pretrained weights into a network.

Every tensor must match by name and shape, with two exceptions. The classifier keeps its initialization if the file has
a different number of outputs or no classifier. A norm loads only the tensors it has itself: continual norm uses the
parameters and moments of batch norm, group norm ignores the moments, and tensors that the file lacks keep their initial
values.
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
from contnorm.convert.detect import detect_norm
from contnorm.errors import UserError

__all__ = ["load_pretrained"]

PREFIXES = ("module.", "model.", "backbone.", "_orig_mod.")  # put in front by wrappers and by training code
SHOWN = 2  # names of each kind in a message


def load_pretrained(network: nn.Module, config: ModelConfig) -> None:
    """Load the weights of a run's settings into a network.

    Args:
        network: Newly built network; modified only if all weights match.
        config: Settings of the network.

    Raises:
        UserError: If the file can't be used, or if it is not the file that the run started with.
    """
    assert config.weights is not None
    reason = replaced_weights(config)
    if reason:
        raise UserError(reason)
    path = bring_weights(config.weights, config.name)
    state = network.state_dict()
    loaded = _without_prefixes(read_weights(path), state, path)
    parts = _Parts.of(network)
    reinitialized = _reinitialized_names(state, loaded, parts.classifier)
    matching = _matching_tensors(
        state, {name: t for name, t in loaded.items() if name not in reinitialized}, reinitialized, parts, path, config
    )
    network.load_state_dict(matching, strict=False)
    if reinitialized:
        _warn_once(
            f"{path}: its classifier is left out; {parts.classifier} starts afresh, "
            f"{_outputs(state, loaded, reinitialized)}."
        )


@dataclass(frozen=True)
class _Parts:
    """Module names of a network's norms and of its classifier."""

    norms: frozenset[str]
    classifier: str

    @classmethod
    def of(cls, network: nn.Module) -> _Parts:
        modules = dict(network.named_modules())
        linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
        return cls(
            frozenset(name for name, module in modules.items() if detect_norm(module) is not None),
            linear[-1] if linear else "",
        )

    def in_norm(self, name: str) -> bool:
        return name.rpartition(".")[0] in self.norms

    def needed(self, name: str) -> bool:
        """Whether the file must contain the tensor: of a norm only weight and bias."""
        return not self.in_norm(name) or name.endswith((".weight", ".bias"))


def _without_prefixes(loaded: Mapping[str, Tensor], names: Iterable[str], path: Path) -> dict[str, Tensor]:
    """Tensors by the names of the network, with prefixes of wrappers removed."""
    known = set(names)
    renamed: dict[str, Tensor] = {}
    for name, tensor in loaded.items():
        short = name
        while short not in known and (prefix := next((p for p in PREFIXES if short.startswith(p)), None)):
            short = short.removeprefix(prefix)
        if short in renamed:
            raise UserError(f"{path}: holds {short} twice, with and without a prefix. Save one network alone.")
        renamed[short] = tensor
    return renamed


def _reinitialized_names(state: Mapping[str, Tensor], loaded: Mapping[str, Tensor], classifier: str) -> set[str]:
    """Tensor names of the classifier if the file has none, or one with a different number of outputs; else empty."""
    names = {name for name in state if classifier and name.startswith(f"{classifier}.")}
    present = [name for name in names if name in loaded]
    resized = present and all(loaded[n].shape[1:] == state[n].shape[1:] and loaded[n].dim() for n in present)
    differs = any(loaded[name].shape != state[name].shape for name in present)
    return names if not present or (resized and differs) else set()


def _outputs(state: Mapping[str, Tensor], loaded: Mapping[str, Tensor], reinitialized: set[str]) -> str:
    example = min(reinitialized)
    have = f"has {len(loaded[example])} outputs" if example in loaded else "has none"
    return f"since the file {have} and the run {len(state[example])}"


def _matching_tensors(
    state: Mapping[str, Tensor],
    loaded: Mapping[str, Tensor],
    reinitialized: set[str],
    parts: _Parts,
    path: Path,
    config: ModelConfig,
) -> dict[str, Tensor]:
    """Tensors to load.

    Raises:
        UserError: If the file is of another network (the message lists the differences) or has invalid values.
    """
    missing = [name for name in state if name not in loaded and name not in reinitialized and parts.needed(name)]
    unexpected = [name for name in loaded if name not in state and not parts.in_norm(name)]
    common = [name for name in state if name in loaded]
    shapes = [
        f"{n} {tuple(loaded[n].shape)} for {tuple(state[n].shape)}" for n in common if loaded[n].shape != state[n].shape
    ]
    kinds = [f"{n} {loaded[n].dtype} for {state[n].dtype}" for n in common if _kind(loaded[n]) != _kind(state[n])]
    if missing or unexpected or shapes or kinds:
        differences = {
            "missing": missing,
            "unexpected": unexpected,
            "of another shape": shapes,
            "of another kind": kinds,
        }
        wrong = ", ".join(f"{len(names)} {what} ({_some(names)})" for what, names in differences.items() if names)
        like = named_by_blocks(loaded)
        hint = f" They look like {like}'s." if like and like != config.name else ""
        raise UserError(
            f"{path}: its weights don't fit model {config.name!r} of width {config.width}: {wrong}.{hint} Say with "
            f"model.name and model.width which network they are of; published ones have width 64."
        )
    broken = [n for n in common if loaded[n].is_floating_point() and not torch.isfinite(loaded[n]).all()]
    if broken:
        raise UserError(
            f"{path}: not all of its numbers are finite ({_some(broken)}). Take weights of another training."
        )
    negative = [n for n in common if n.endswith("running_var") and (loaded[n] < 0).any()]
    if negative:
        raise UserError(f"{path}: has variances below 0 ({_some(negative)}). Take weights of another training.")
    return {name: loaded[name] for name in common}


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


@cache  # warn once, even if many seeds load the same weights
def _warn_once(text: str) -> None:
    logging.getLogger("contnorm").warning(text)
