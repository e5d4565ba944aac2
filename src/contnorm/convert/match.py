"""The changes that make a model match a norm spec. All are prepared, and checked, before the first is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from contnorm.convert.description import ModelTree, NormInModel, class_name, describe_layer, describe_model
from contnorm.convert.detect import detect_norm
from contnorm.convert.detected import DetectedNorm
from contnorm.convert.neighbours import ACTIVATIONS
from contnorm.convert.replacement import build_layer, placement, swap_modules, transfer_state
from contnorm.convert.selection import NormToReplace, hook_refusal, unreplaceable_modules
from contnorm.convert.sync import build_synced, has_synced_form
from contnorm.moments.freeze import freeze_stats
from contnorm.norm_entry import Dim, NormEntry, accepted_options, norm_class
from contnorm.norms.activation import AbsorbedActivation, ActivationNorm
from contnorm.norms.base import MomentNorm, NormLayer
from contnorm.norms.stock import StockGroupNorm
from contnorm.norms.weight_standardization import WSGroupNorm, check_standardizable, standardize, unstandardize
from contnorm.plugins import load_plugins
from contnorm.registry import NORMS

__all__ = ["MatchPlan", "Problem", "format_problems", "other_norms"]

# Parts of a description that do not decide whether a layer has to be replaced.
_AROUND = ("also_at", "absorbed", "standardized", "frozen")
Problem = tuple[str, str]  # a path and the reason


@dataclass
class MatchPlan:
    """The changes of a model, all prepared before the first is made."""

    tree: ModelTree
    spec: dict[str, dict[str, Any]]
    problems: list[Problem] = field(default_factory=list)
    norms: dict[str, nn.Module] = field(default_factory=dict)  # by path in the spec, the layer to be there
    wrappers: dict[str, AbsorbedActivation] = field(default_factory=dict)
    convolutions: dict[str, nn.Module] = field(default_factory=dict)
    replace: dict[nn.Module, nn.Module] = field(default_factory=dict)
    constant: set[nn.Module] = field(default_factory=set)  # layers of other libraries that need no freeze

    def prepare(self) -> None:
        if any(entry["norm"] not in NORMS for entry in self.spec["norms"].values() if entry["norm"] is not None):
            load_plugins()  # one of them may have it
        fixed = unreplaceable_modules(self.tree.model)
        matched = set()
        for path, entry in self.spec["norms"].items():
            module = self._module_at(path, entry)
            if module is None:
                continue
            if module not in self.tree.norms:
                self._reject(path, f"a norm layer in the spec, and a {type(module).__name__} in the model")
                continue
            matched.add(module)
            self._plan_norm(path, entry, self.tree.norms[module], fixed.get(module, ""))
        for module, norm in self.tree.norms.items():
            if module not in matched and norm.path not in self.spec["norms"]:
                self._reject(norm.path, "a norm layer in the model, and not in the spec")
        self._plan_activations()
        self._plan_convolutions()
        self._check_neighbours()

    def _reject(self, path: str, reason: str) -> None:
        self.problems.append((path, reason))

    def _module_at(self, path: str, entry: Mapping[str, Any]) -> nn.Module | None:
        """Return the module that has the paths of an entry, all of them and no others."""
        modules = self.tree.modules
        paths = [path, *entry["also_at"]]
        missing = [name for name in paths if name not in modules]
        for name in missing:
            self._reject(str(name), "not in the model")
        if missing:
            return None
        module = modules[path]
        if {modules[name] for name in paths} != {module} or set(self.tree.paths[module]) != set(paths):
            here = [name for name in self.tree.paths[module] if name != path]
            self._reject(
                path, f"shared with {_quoted(entry['also_at'])} in the spec, and with {_quoted(here)} in the model"
            )
            return None
        return module

    def _plan_norm(self, path: str, entry: Mapping[str, Any], norm: NormInModel, reference: str) -> None:
        now = describe_layer(norm)
        self.norms[path] = norm.module
        if isinstance(norm.module, torch.jit.ScriptModule) and now["frozen"] != entry["frozen"]:
            self._reject(path, "scripted or traced, so that it can't be frozen or released")
        if _core(now) == _core(entry):
            if isinstance(norm.detected, DetectedNorm) and norm.detected.constant:
                self.constant.add(norm.module)
            return
        reason = _misfit(entry, norm) or reference or hook_refusal(norm.module)
        if reason:
            self._reject(path, reason)
            return
        try:
            new = _build(norm, entry)
        except ValueError as error:
            self._reject(path, f"can't be built: {error}")
            return
        built = describe_layer(NormInModel(new, norm.paths, detect_norm(new), norm.near))
        if _core(built) != _core(entry):
            self._reject(
                path, f"the spec contradicts itself: {_first_difference(_core(entry), _core(built), 'if it is built')}"
            )
            return
        self.norms[path] = self.replace[norm.module] = new

    def _plan_activations(self) -> None:
        for path, entry in self.spec["activations"].items():
            module = self._module_at(path, entry)
            if isinstance(module, AbsorbedActivation):
                self.wrappers[path] = module
            elif isinstance(module, ACTIVATIONS):
                self.wrappers[path] = AbsorbedActivation(module).train(module.training)
                self.replace[module] = self.wrappers[path]
            elif module is not None:
                self._reject(path, f"an activation in the spec, and a {type(module).__name__} in the model")
        remaining = set(self.wrappers.values())
        self.replace |= {wrapper: wrapper.act for wrapper in self.tree.wrappers if wrapper not in remaining}

    def _plan_convolutions(self) -> None:
        for path, entry in self.spec["convolutions"].items():
            module = self._module_at(path, entry)
            if module is None:
                continue
            try:
                check_standardizable(module)
                self.convolutions[path] = module
            except ValueError as error:
                self._reject(path, str(error))

    def _check_neighbours(self) -> None:
        """Check that activations and convolutions of norms are in the tables of the spec."""
        for path, entry in self.spec["norms"].items():
            for key, table in (("absorbed", "activations"), ("standardized", "convolutions")):
                for other in entry.get(key, ()):
                    if other not in self.spec[table]:
                        self._reject(path, f"the spec contradicts itself: {key} has {other!r}, and {table} does not")

    def execute(self) -> nn.Module:
        """Change the model."""
        for path, entry in self.spec["norms"].items():
            norm = self.norms[path]
            if norm not in self.constant:
                freeze_stats(norm, entry["frozen"])
            if isinstance(norm, ActivationNorm):
                norm.absorbed = tuple(self.wrappers[other] for other in entry.get("absorbed", ()))
            if isinstance(norm, WSGroupNorm):
                norm.standardized = tuple(self.convolutions[other] for other in entry.get("standardized", ()))
        for path, wrapper in self.wrappers.items():
            wrapper.shared = self.spec["activations"][path]["shared"]
        for path, convolution in self.convolutions.items():
            standardize(convolution, self.spec["convolutions"][path]["weight_eps"])
        for convolution in set(self.tree.standardized) - set(self.convolutions.values()):
            unstandardize(convolution)
        return swap_modules(self.tree.model, self.replace)

    def swap_back(self, model: nn.Module) -> nn.Module:
        """Put the replaced modules back; what was changed in place stays changed."""
        return swap_modules(model, {new: old for old, new in self.replace.items()})


def _core(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a description that a layer is built from."""
    return {key: value for key, value in entry.items() if key not in _AROUND}


def other_norms(model: nn.Module, spec: Mapping[str, Any]) -> list[Problem]:
    """Return the norm layers of a model that a spec describes otherwise; whether they are frozen does not matter.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm2d(8), nn.BatchNorm2d(8))
        >>> spec = {"norms": {"0": {**describe_model(model)["0"], "norm": "cn"}}}
        >>> other_norms(model, spec)
        [('0', "norm is 'cn', and 'bn' here"), ('1', 'missing')]
    """
    norms = describe_model(model)
    problems = []
    for path in {**spec["norms"], **norms}:
        if path not in norms or path not in spec["norms"]:
            problems.append((path, "missing"))
        elif _core(spec["norms"][path]) != _core(norms[path]):
            problems.append((path, _first_difference(_core(spec["norms"][path]), _core(norms[path]), "here")))
    return problems


def _misfit(entry: Mapping[str, Any], norm: NormInModel) -> str:
    """Return why the layer of a model can't become the one of the spec; empty if it may."""
    detected = norm.detected
    if entry["norm"] is None:
        return (
            f"a layer of the class {entry['class']}, which was not registered when the spec was made; build the model "
            f"with it, or register it with contnorm.register_norm before calling norm_spec"
        )
    if entry["norm"] not in NORMS:
        return f"the norm {entry['norm']!r} is unknown; register it with contnorm.register_norm first"
    if not isinstance(detected, DetectedNorm):
        reason = detected.reason if detected else f"its class {class_name(norm.module)} is not registered"
        return f"the layer of the model can't be replaced: {reason}"
    if entry["num_features"] != detected.channels:
        return f"{entry['num_features']} channels in the spec, and {detected.channels} in the model"
    if None not in (entry["dim"], detected.dim) and entry["dim"] != detected.dim:
        return f"for {entry['dim']}d input in the spec, and for {detected.dim}d input in the model"
    if entry["has_act"] != detected.acts:
        has, lacks = ("spec", "model") if entry["has_act"] else ("model", "spec")
        return f"with an activation of its own in the {has}, and without one in the {lacks}"
    if others := entry.get("other_options"):
        return f"its options {_quoted(others)} are not in the spec; build the model with this norm"
    if entry["synced"] and not has_synced_form(NORMS[entry["norm"]]):
        return f"the norm {entry['norm']!r} has no synchronised form"
    return ""


def _build(norm: NormInModel, entry: Mapping[str, Any]) -> nn.Module:
    """Build the layer of a description, with the tensors of a layer of the model."""
    layer = NormToReplace(norm.path, norm.module, cast(DetectedNorm, norm.detected), norm.near)
    new = _build_initial(layer, NORMS[entry["norm"]], entry)
    parameters = dict(new._parameters)
    transfer_state(layer, new)
    for name in ("weight", "bias"):  # the old layer may have only one of them
        if name not in entry["parameters"] and isinstance(new, NormLayer | nn.SyncBatchNorm | nn.GroupNorm):
            new._parameters[name] = None
        elif new._parameters.get(name) is None and parameters.get(name) is not None:
            new._parameters[name] = parameters[name]
    if "track_running_stats" in entry["options"]:
        cast(Any, new).track_running_stats = entry["options"]["track_running_stats"]
    if isinstance(new, MomentNorm):
        new.use_running = entry["constant"]
    return freeze_stats(new, entry["frozen"])


def _build_initial(layer: NormToReplace, registered: NormEntry, entry: Mapping[str, Any]) -> nn.Module:
    options = dict(entry["options"])
    if "track_running_stats" in options:  # the attribute may have been changed after the buffers were made
        options["track_running_stats"] = entry["running_moments"]
    if entry["synced"]:
        new = build_synced(layer, registered, options, getattr(layer.module, "process_group", None))
        vars(new)["_contnorm_dim"] = entry["dim"]
        return new
    if entry["dim"] is None and not registered.layers:
        return _build_torch_group_norm(layer, options)
    dim = cast(Dim, entry["dim"] or layer.detected.dim or min(registered.layers))
    if not registered.layers and "kernel" in accepted_options(norm_class(registered, dim)):
        options |= {name: value for name, value in layer.detected.options.items() if name == "kernel"}
    new = build_layer(layer, registered, dim, options)
    if entry["dim"] is None:
        vars(new).pop("_contnorm_dim", None)
    return new


def _build_torch_group_norm(layer: NormToReplace, options: dict[str, Any]) -> nn.Module:
    """Build the only norm that is of no dimension without being synchronized."""
    groups = options.pop("num_groups", None)
    unknown = sorted(set(options) - {"eps", "affine"})
    if groups is None or unknown:
        raise ValueError("the spec has no dimension for it, which only torch's group norm may lack.")
    options |= placement(layer, ("device",))
    return StockGroupNorm(groups, layer.detected.channels, **options)


def _first_difference(expected: Mapping[str, Any], actual: Mapping[str, Any], where: str) -> str:
    for key, value in expected.items():
        if value != actual.get(key):
            if isinstance(value, dict) and isinstance(actual.get(key), dict):
                return _first_difference(value, actual[key], where)
            return f"{key} is {value!r}, and {actual.get(key)!r} {where}"
    return f"{sorted(set(actual) - set(expected))[0]!r} is missing"


def _quoted(names: Iterable[object]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


def format_problems(problems: list[Problem], most: int = 3, most_reasons: int = 6) -> str:
    """Format what does not fit, by reason: the first few paths, and the number of the others.

    Example:
        >>> format_problems([("a", "not in the model"), ("b", "64 channels"), ("c", "not in the model")])
        "'a', 'c': not in the model; 'b': 64 channels"
    """
    by_reason: dict[str, list[str]] = {}
    for path, reason in problems:
        by_reason.setdefault(reason, []).append(path)
    parts = []
    for reason, paths in list(by_reason.items())[:most_reasons]:
        more = f" and {len(paths) - most} more" if len(paths) > most else ""
        parts.append(f"{_quoted(paths[:most])}{more}: {reason.rstrip('.')}")
    rest = sum(len(paths) for paths in list(by_reason.values())[most_reasons:])
    return "; ".join([*parts, f"and {rest} more for other reasons"] if rest else parts)
