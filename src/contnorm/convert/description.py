"""Description of norm layers by plain values: all that decides their output and is not in the state dict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from contnorm.convert.detect import detect_norm, holds_moments
from contnorm.convert.detected import DetectedNorm, UnsupportedNorm
from contnorm.convert.selection import floating_tensors
from contnorm.moments.freeze import is_frozen
from contnorm.norm_entry import Dim, layer_parameters
from contnorm.norms.activation import AbsorbedActivation, ActivationNorm
from contnorm.norms.base import NormLayer
from contnorm.norms.continual import ContinualNormBase
from contnorm.norms.weight_standardization import WSGroupNorm, is_standardized
from contnorm.registry import NORMS

__all__ = ["ModelTree", "NormInModel", "class_name", "describe_layer", "describe_model", "describe_with_neighbours"]


@dataclass(frozen=True, eq=False)
class NormInModel:
    """A norm layer of a model: all its paths, what it was detected as, and a tensor near it in the model."""

    module: nn.Module
    paths: list[str]
    detected: DetectedNorm | UnsupportedNorm | None  # None for a layer that `convert_norm` made of an unknown class
    near: Tensor | None

    @property
    def path(self) -> str:
        return self.paths[0]

    @property
    def also_at(self) -> list[str]:
        return self.paths[1:]


@dataclass(frozen=True)
class ModelTree:
    """The modules of a model that a spec is about, and the paths of all modules."""

    model: nn.Module
    paths: dict[nn.Module, list[str]]
    modules: dict[str, nn.Module]
    norms: dict[nn.Module, NormInModel]
    wrappers: list[AbsorbedActivation]
    standardized: list[nn.Module]

    @staticmethod
    def of(model: nn.Module, caller: str) -> ModelTree:
        paths: dict[nn.Module, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            paths.setdefault(module, []).append(path)
        norms: dict[nn.Module, NormInModel] = {}
        parts: set[nn.Module] = set()  # modules inside of norm layers
        near = next(floating_tensors(model.modules()), None)
        for module in paths:
            near = next(floating_tensors([module]), near)
            detected = None if module in parts else detect_norm(module)
            is_made_here = "_contnorm_dim" in vars(module)  # from a class or factory that is not registered
            if module in parts or (detected is None and not is_made_here):
                continue
            if isinstance(module, LazyModuleMixin):
                raise ValueError(
                    f"{caller}: layer {paths[module][0]!r} ({type(module).__name__}) is lazy and has no channels yet. "
                    f"Run a batch through the model first."
                )
            norms[module] = NormInModel(module, paths[module], detected, near)
            if is_made_here or isinstance(detected, DetectedNorm):
                parts |= set(module.modules()) - {module}
        outside = [module for module in paths if module not in parts]
        return ModelTree(
            model,
            paths,
            {path: module for module, names in paths.items() for path in names},
            norms,
            [module for module in outside if isinstance(module, AbsorbedActivation)],
            [module for module in outside if is_standardized(module)],
        )

    def first_paths(self, modules: Iterable[nn.Module]) -> list[str]:
        """Return the first path of each module; one that is no longer in the model is left out."""
        return [self.paths[module][0] for module in modules if module in self.paths]


def describe_model(model: nn.Module, caller: str = "norm_spec") -> dict[str, dict[str, Any]]:
    """Describe the norm layers of a model, by their first path."""
    tree = ModelTree.of(model, caller)
    return {norm.path: describe_with_neighbours(norm, tree) for norm in tree.norms.values()}


def describe_with_neighbours(norm: NormInModel, tree: ModelTree) -> dict[str, Any]:
    """Describe a layer, with its other paths and the activations and convolutions that depend on it."""
    entry = {**describe_layer(norm), "also_at": norm.also_at}
    if isinstance(norm.module, ActivationNorm):
        entry["absorbed"] = tree.first_paths(norm.module.absorbed)
    if isinstance(norm.module, WSGroupNorm):
        entry["standardized"] = tree.first_paths(norm.module.standardized)
    return entry


def describe_layer(norm: NormInModel) -> dict[str, Any]:
    """Describe a layer by itself."""
    module, detected = norm.module, norm.detected
    if not isinstance(detected, DetectedNorm):
        return {"norm": None, "class": class_name(module), "frozen": is_frozen(module)}
    constant = detected.constant or bool(getattr(module, "use_running", False))
    tensors = {**module._parameters, **module._buffers} if detected.constant else module._parameters
    entry: dict[str, Any] = {
        "norm": detected.norm,
        "dim": detected.dim,
        "num_features": detected.channels,
        "options": _options(module, detected),
        "parameters": [name for name in ("weight", "bias") if tensors.get(name) is not None],
        "running_moments": holds_moments(module),
        "constant": constant,
        "frozen": constant or _is_frozen(module),
        "synced": detected.synced,
        "has_act": detected.acts,
    }
    if unknown := _other_options(module, detected):
        entry["other_options"] = unknown
    return entry


def class_name(module: nn.Module) -> str:
    """Return the name of a layer's class, without its module, which is ``__main__`` in the script that defines it."""
    return str(module.original_name) if isinstance(module, torch.jit.ScriptModule) else type(module).__name__


def _is_frozen(module: nn.Module) -> bool:
    """Whether all running moments of a layer are frozen; those of a user's norm may be in modules inside of it."""
    holders = [part for part in module.modules() if holds_moments(part)]
    return bool(holders) and all(is_frozen(part) for part in holders)


def _options(module: nn.Module, detected: DetectedNorm) -> dict[str, Any]:
    """Return the constructor arguments of a layer that are plain values, without the kernel, which is not its norm."""
    options = dict(detected.options)
    if detected.constant:  # its class has neither, and these are those of its conversion
        options = {"momentum": 0.1, "affine": True, "track_running_stats": True, **options}
    if isinstance(module, NormLayer):
        options.pop("kernel", None)
    if isinstance(module, ContinualNormBase):
        options |= {"order": module.order, "tied": module.tied}
    for name in _unlisted(detected, module):
        if _is_plain(value := getattr(module, name)):
            options[name] = value
    return {name: _plain(value) for name, value in options.items()}


def _other_options(module: nn.Module, detected: DetectedNorm) -> list[str]:
    """Return the names of a user's options that JSON can't represent, such as functions."""
    return sorted(name for name in _unlisted(detected, module) if not _is_plain(getattr(module, name)))


def _unlisted(detected: DetectedNorm, module: nn.Module) -> list[str]:
    """Return the constructor arguments of a registered norm that detection does not list: those that are no scalars."""
    layers = NORMS[detected.norm].layers
    if not layers:
        return []
    factory = layers.get(cast(Dim, detected.dim), layers[min(layers)])
    names = set(layer_parameters(factory)) - {"device", "dtype", *detected.options}
    return sorted(name for name in names if hasattr(module, name))


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | Real)


def _plain(value: object) -> Any:
    """Return a value as JSON has it, so that a spec equals itself after it was stored."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool):
        return value
    return int(value) if isinstance(value, Integral) else float(cast(Real, value))
