"""Detect which norm a module is: a layer of this package, of torch, or a subclass of torch's in another library.

A subclass of torch's ``BatchNorm2d`` may compute anything. It counts as the layer it derives from only if a copy of it
gives the same output, input gradient and running moments on random input, in training and evaluation
(`compare_with_norm`). The layer itself and torch's random state are not changed. Three further kinds of layers are
supported:

- norm-then-activation layers (timm's ``BatchNormAct2d``): they normalize, then call ``drop`` and ``act``;
- constant batch norms (``FrozenBatchNorm2d`` of torchvision and detectron, timm's ``FrozenBatchNormAct2d``): their
  moments and affine parameters are buffers, which are also used in training;
- layer norms over the channels of each position of (N, C, H, W) input (``LayerNorm2d`` of timm and torchvision), which
  are subclasses of torch's ``LayerNorm``. Other layer norms normalize the last dimension and are not norms over
  dimension 1.

A layer of a norm that was registered with `register_norm` is detected by its class. Any other layer with running
moments is unsupported and described by a `UnsupportedNorm`.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from contnorm.layers.base import NormLayer
from contnorm.layers.continual import ContinualNormBase
from contnorm.layers.stock import StockGroupNorm
from contnorm.layers.sync import SyncContinualNorm
from contnorm.norm_entry import Dim, NormEntry, accepted_options, build_norm, layer_parameters, norm_class
from contnorm.registry import NORMS

__all__ = ["DetectedNorm", "UnsupportedNorm", "detect_norm", "drop_and_act", "holds_moments"]


@dataclass(frozen=True)
class DetectedNorm:
    """Description of a norm layer, sufficient to build a replacement."""

    norm: str  # its name in the registry
    channels: int
    dim: int | None  # 1, 2, 3; None if the class accepts any rank
    options: dict[str, object] = field(default_factory=dict)  # eps, momentum, num_groups, ...
    synced: bool = False
    acts: bool = False  # it applies its submodules `drop` and `act` to the result
    constant: bool = False  # its moments and affine parameters are buffers that never change
    obeys_tracking: bool = True  # setting `track_running_stats` to False stops updates of its moments

    @property
    def per_position(self) -> bool:
        """Whether it is a layer norm of each position, not of each sample as the norm ``"ln"`` of the registry is."""
        return bool(self.options.get("per_position"))


@dataclass(frozen=True)
class UnsupportedNorm:
    """A norm layer that is not supported, because it is of an unknown kind or does more than a known norm."""

    reason: str


_TORCH: tuple[tuple[type[nn.Module], str, int | None], ...] = (
    (nn.SyncBatchNorm, "bn", None),
    (nn.BatchNorm1d, "bn", 1),
    (nn.BatchNorm2d, "bn", 2),
    (nn.BatchNorm3d, "bn", 3),
    (nn.InstanceNorm1d, "in", 1),
    (nn.InstanceNorm2d, "in", 2),
    (nn.InstanceNorm3d, "in", 3),
    (StockGroupNorm, "gn", None),
    (nn.GroupNorm, "gn", None),
)
_NAMES = {cls.__name__ for cls, _, _ in _TORCH} | {
    norm_class(spec, dim).__name__
    for spec in NORMS.values()
    if spec.name != "none" and not spec.layers
    for dim in (1, 2, 3)
}
_OPTIONS = ("eps", "momentum", "affine", "track_running_stats", "num_groups", "kernel", "r_max", "d_max", "total_steps")


def detect_norm(module: nn.Module) -> DetectedNorm | UnsupportedNorm | None:
    """Detect which norm a module is; None if it is not a norm over channels in dimension 1.

    Example:
        >>> detect_norm(nn.BatchNorm2d(8)).norm, detect_norm(nn.Conv2d(3, 8, 3)) is None
        ('bn', True)
    """
    registered = _registered_spec(module)
    if registered is not None:
        return _describe_registered(module, registered)
    if isinstance(module, NormLayer):
        return _detect_own_layer(module)
    for cls, norm, dim in _TORCH:
        if isinstance(module, cls):
            if isinstance(module, _InstanceNorm) and module.track_running_stats:
                return UnsupportedNorm("it is an instance norm with running statistics, which no norm of contnorm has")
            if cls is nn.SyncBatchNorm:
                dim = _recorded_dim(module)
            return _describe(module, cls, norm, dim, synced=cls is nn.SyncBatchNorm)
    if isinstance(module, torch.jit.ScriptModule) and (module.original_name in _NAMES or holds_moments(module)):
        return UnsupportedNorm("it is scripted or traced and can't be changed; convert the model first, then script it")
    if isinstance(module, LazyModuleMixin) and isinstance(module, _BatchNorm | _InstanceNorm):
        return UnsupportedNorm("it is lazy and has no channels yet; run a batch through the model first")
    if isinstance(module, _BatchNorm | _InstanceNorm):
        return UnsupportedNorm("it is a batch or instance norm of an unknown class")
    return _detect_other_layer(module)


def _detect_other_layer(module: nn.Module) -> DetectedNorm | UnsupportedNorm | None:
    if isinstance(module, nn.LayerNorm):
        return _detect_layer_norm(module)
    return _detect_constant_norm(module) if _has_moment_buffers(module) else None


def _registered_spec(module: nn.Module) -> NormEntry | None:
    """Return the registered norm whose class a module has; None if there is none.

    A subclass of a registered class may compute anything, so the class must be the same.
    """
    name = vars(module).get("_contnorm_norm")  # made by `create_norm` or `convert_norm`
    if isinstance(name, str) and name in NORMS and NORMS[name].layers:
        return NORMS[name]
    if type(module).__module__.partition(".")[0] in ("torch", "contnorm"):
        return None
    return next((spec for spec in NORMS.values() if type(module) in spec.layers.values()), None)


def _describe_registered(module: nn.Module, spec: NormEntry) -> DetectedNorm | UnsupportedNorm:
    if is_parametrized(module):
        return UnsupportedNorm("its parameters are computed by a parametrization; remove that first")
    channels = _channels(module)
    if channels is None:
        return UnsupportedNorm("its number of channels is unknown; store it as the attribute num_features")
    dims = list(spec.layers)
    dim = dims[0] if len(dims) == 1 else vars(module).get("_contnorm_dim")
    if dim is None:
        of_class = [dim for dim, factory in spec.layers.items() if type(module) is factory]
        dim = of_class[0] if len(of_class) == 1 else None
    factory = spec.layers[dim if dim is not None else dims[0]]
    options = {name: getattr(module, name) for name in layer_parameters(factory) if hasattr(module, name)}
    plain: dict[str, object] = {
        name: value for name, value in options.items() if value is None or isinstance(value, int | float | str)
    }
    if "affine" in plain:
        plain["affine"] = module._parameters.get("weight") is not None or module._parameters.get("bias") is not None
    if hasattr(module, "_contnorm_tracked"):  # frozen by moments/freeze.py
        plain["track_running_stats"] = module._contnorm_tracked
    return DetectedNorm(spec.name, channels, dim, plain, obeys_tracking=False)


def _channels(module: nn.Module) -> int | None:
    """Return the number of channels of a layer, from its attributes or the shape of its tensors."""
    for name in ("num_features", "num_channels"):
        if isinstance(value := getattr(module, name, None), int):
            return value
    for name in ("weight", "bias", "running_mean"):
        if isinstance(tensor := getattr(module, name, None), Tensor) and tensor.dim() == 1:
            return len(tensor)
    return None


def _has_moment_buffers(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return False
    mean, var = module._buffers.get("running_mean"), module._buffers.get("running_var")
    return isinstance(mean, Tensor) and isinstance(var, Tensor) and mean.dim() == 1 and mean.shape == var.shape


def _detect_constant_norm(module: nn.Module) -> DetectedNorm | UnsupportedNorm:
    """Describe a layer with running moments that is not of torch's classes: a constant batch norm, or unsupported."""
    eps = getattr(module, "eps", None)
    reason = _unknown_members(module)
    if not isinstance(eps, float) or reason:
        return UnsupportedNorm(reason or "it keeps running moments but is not a known norm")
    reasons = []
    for dim in (2, 1, 3):
        candidate = DetectedNorm(
            "bn", _size(module, "running_mean"), dim, {"eps": eps}, acts=_has_drop_and_act(module), constant=True
        )
        reasons.append(compare_with_norm(module, candidate).reason)
        if not reasons[-1]:
            return candidate
    return UnsupportedNorm(
        f"it keeps running moments but is not a known norm: compared with a constant batch norm, {reasons[0]}"
    )


def _detect_layer_norm(module: nn.LayerNorm) -> DetectedNorm | UnsupportedNorm | None:
    """Describe a layer norm over the channels of each position; None if it normalizes other dimensions."""
    if type(module).forward is nn.LayerNorm.forward or len(module.normalized_shape) != 1:
        return None
    affine = module.weight is not None or module.bias is not None
    options: dict[str, object] = {"eps": module.eps, "affine": affine, "per_position": True}
    candidate = DetectedNorm("ln", module.normalized_shape[0], 2, options, acts=_has_drop_and_act(module))
    if compare_with_norm(module, candidate).reason:
        return None
    reason = _obstacle(module, nn.LayerNorm)
    return UnsupportedNorm(reason) if reason else candidate


def _detect_own_layer(module: NormLayer) -> DetectedNorm | UnsupportedNorm:
    for spec in NORMS.values():
        if spec.layers:
            continue
        for dim in (1, 2, 3, None):
            cls = SyncContinualNorm if dim is None else cast(type[nn.Module], norm_class(spec, dim))
            if isinstance(module, cls):
                name = _variant(module) if isinstance(module, ContinualNormBase) else spec.name
                synced = dim is None
                return _describe(module, cls, name, _recorded_dim(module) if synced else dim, synced)
    return UnsupportedNorm(f"the class {type(module).__name__} is not in the registry of norms")


def _recorded_dim(module: nn.Module) -> int | None:
    """Return the dimension of the layer that a synchronized layer replaced; None if it is unknown."""
    dim: int | None = vars(module).get("_contnorm_dim")
    return dim


def _variant(module: ContinualNormBase) -> str:
    names = {
        ("gn_bn", False): "cn",
        ("gn_bn", True): "cn_tied",
        ("bn_gn", False): "bn_gn",
        ("bn_gn", True): "bn_gn_tied",
    }
    return names[module.order, module.tied]


def _describe(
    module: nn.Module, cls: type[nn.Module], norm: str, dim: int | None, synced: bool
) -> DetectedNorm | UnsupportedNorm:
    """Describe a layer of a known class, or of a subclass that computes the same norm."""
    reason = _obstacle(module, cls)
    if reason:
        return UnsupportedNorm(reason)
    channels = module.num_channels if isinstance(module, nn.GroupNorm) else module.num_features
    assert isinstance(channels, int)
    candidate = DetectedNorm(norm, channels, dim, _options_of(module), synced=synced, acts=_has_drop_and_act(module))
    if type(module) is cls and candidate.acts == (drop_and_act in module._forward_hooks.values()):
        return candidate
    if (
        vars(type(module)).get("normalizes_as") is cls
    ):  # our norm-then-activation classes; their subclasses are compared
        return candidate
    result = compare_with_norm(module, candidate)
    return UnsupportedNorm(result.reason) if result.reason else replace(candidate, obeys_tracking=result.obeys_tracking)


# A subclass that overrides one of these changes more than its output, which a comparison of outputs would not show.
_METHODS = ("__call__", "train", "eval", "_load_from_state_dict", "_save_to_state_dict")


def _obstacle(module: nn.Module, cls: type[nn.Module]) -> str:
    """Return why a layer cannot be described by its class and attributes; empty if it can."""
    if is_parametrized(module):
        return "its parameters are computed by a parametrization; remove that first"
    if "forward" in module.__dict__:
        return "its forward was replaced on the object; restore the method of the class first"
    changed = [m for m in _METHODS if getattr(type(module), m, None) is not getattr(cls, m, None)]
    if changed:
        return f"its class overrides {changed[0]}"
    return _unknown_members(module)


def _unknown_members(module: nn.Module) -> str:
    known = {"weight", "bias", "mean_weight", "var_weight", "running_mean", "running_var", "num_batches_tracked"}
    known |= {"r_limit", "d_limit"} | ({"drop", "act"} if _has_drop_and_act(module) else set())
    known |= set(module.own_tensors) if isinstance(module, NormLayer) else set()
    unknown = sorted({*module._parameters, *module._buffers, *module._modules} - known)
    return f"it holds {', '.join(map(repr, unknown))}, which its norm does not have" if unknown else ""


def _has_drop_and_act(module: nn.Module) -> bool:
    return isinstance(getattr(module, "drop", None), nn.Module) and isinstance(getattr(module, "act", None), nn.Module)


def drop_and_act(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Forward hook with which `convert_norm` keeps the activation of a norm-then-activation layer."""
    if args and output is args[0]:  # no norm at all; an activation in place must not change what the network reads
        output = output.clone()
    result: Tensor = cast(Any, module).act(cast(Any, module).drop(output))
    return result


def _options_of(module: nn.Module) -> dict[str, object]:
    names = (*_OPTIONS, *module.own_options) if isinstance(module, NormLayer) else _OPTIONS
    options = {name: getattr(module, name) for name in names if hasattr(module, name)}
    if "affine" in options:
        options["affine"] = module._parameters.get("weight") is not None or module._parameters.get("bias") is not None
    if isinstance(module, _InstanceNorm):
        options = {name: options[name] for name in ("eps", "affine")}
    if "kernel" not in vars(module):  # a class attribute is not the user's choice and must not bind the replacement
        options.pop("kernel", None)
    if hasattr(module, "_contnorm_tracked"):  # a layer of torch, frozen by moments/freeze.py
        options["track_running_stats"] = module._contnorm_tracked
    return options


def _size(module: nn.Module, buffer: str) -> int:
    return int(getattr(module, buffer).shape[0])


def holds_moments(module: nn.Module) -> bool:
    """Whether a module has running moments. It may be a layer of any library.

    Example:
        >>> holds_moments(nn.BatchNorm2d(8)), holds_moments(nn.GroupNorm(2, 8))
        (True, False)
    """
    return isinstance(getattr(module, "running_mean", None), Tensor)


# --- comparison of a layer with the norm it appears to be, on random input -----------------------------------------

_SEED = 20_260_101
_TOLERANCE = 1e-4  # relative, for float32 values; a layer that computes something else differs by far more
_MOVE_TOLERANCE = 1e-2  # relative, for the update of running moments by a batch: a biased variance differs by 3 %
_COUNTED = 1_000_000  # batches, to detect layers that change their behaviour after a warm-up
# Batch size and positions of each input: a small batch, and one large enough for layers that split large batches.
_SHAPES: Mapping[int, tuple[tuple[int, ...], ...]] = {
    2: ((6,), (160,)),
    3: ((6, 5), (160, 2)),
    4: ((6, 3, 2), (160, 1, 2)),
    5: ((6, 2, 1, 3), (160, 1, 1, 2)),
}
_RANKS: Mapping[int | None, tuple[int, ...]] = {1: (3, 2), 2: (4,), 3: (5,), None: (4, 3)}
_DIM_OF_RANK: Mapping[int, Dim] = {2: 1, 3: 1, 4: 2, 5: 3}


@dataclass(frozen=True)
class ComparisonResult:
    """Result of a comparison: the reason why the layer is not the expected norm, or empty if it is."""

    reason: str = ""
    obeys_tracking: bool = True  # setting `track_running_stats` to False stops updates of its moments


def compare_with_norm(module: nn.Module, expected: DetectedNorm) -> ComparisonResult:
    """Check whether a module computes the expected norm.

    Example:
        >>> expected = DetectedNorm("bn", 4, 2, {"eps": 1e-5, "momentum": 0.1})
        >>> compare_with_norm(nn.BatchNorm2d(4), expected).reason
        ''
        >>> compare_with_norm(nn.BatchNorm2d(4, eps=1e-2), expected).reason
        "its output differs from that of 'bn' on random input in training mode"
    """
    if hasattr(module, "process_group") and dist.is_available() and dist.is_initialized():
        return ComparisonResult(
            "a synchronised subclass can't be run alone; convert before the process group is initialized"
        )
    known, key = _COMPARISONS.setdefault(type(module), {}), _fingerprint(module, expected)
    if key is not None and key in known:
        return known[key]
    try:
        with random_state_restored(), _plain_arithmetic(module):
            result = _compare(module, expected)
        if key is not None:
            known[key] = result
        return result
    except Exception as error:  # code of another library may raise anything
        lines = str(error).splitlines() or [""]
        failed = ComparisonResult(
            f"it can't be compared with {expected.norm!r} on random input: {type(error).__name__}: {lines[0]}"
        )
        if key is not None and expected.per_position:  # networks have dozens of layer norms of the last dimension
            known[key] = failed
        return failed


# Cache of results by class and settings, because networks repeat the same layer dozens of times.
_COMPARISONS: WeakKeyDictionary[type[nn.Module], dict[Hashable, ComparisonResult]] = WeakKeyDictionary()
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def _fingerprint(module: nn.Module, expected: DetectedNorm) -> Hashable | None:
    """Return the cache key of a comparison; None if the layer has attributes other than numbers and strings."""
    attributes = {name: value for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES}
    if not all(value is None or isinstance(value, int | float | str) for value in attributes.values()):
        return None
    tensors = {**module._parameters, **module._buffers}.items()
    return (
        getattr(type(module).forward, "__code__", None),
        repr(expected),
        tuple(sorted((name, repr(value)) for name, value in attributes.items())),
        tuple((name, None if tensor is None else (tensor.dtype, tensor.device)) for name, tensor in tensors),
        tuple((name, type(child), str(child)) for name, child in module.named_children()),
    )


class _CannotRunError(Exception):
    """The layer raised on an input."""


def _compare(module: nn.Module, expected: DetectedNorm) -> ComparisonResult:
    failure: Exception | None = None
    results = []
    for rank in _RANKS[expected.dim]:
        try:
            results.append(_compare_at_rank(module, expected, rank))
        except _CannotRunError as error:  # a 1d layer may take (N, C) only, or (N, C, L) only
            failure = cast(Exception, error.__cause__)
    if not results:
        assert failure is not None
        raise failure
    reason = next((result.reason for result in results if result.reason), "")
    return ComparisonResult(reason, all(result.obeys_tracking for result in results))


def _compare_at_rank(module: nn.Module, expected: DetectedNorm, rank: int) -> ComparisonResult:
    layer = _isolated_copy(module)
    reference = _reference(layer, expected, rank)
    small, large = (_input(layer, expected.channels, shape) for shape in _SHAPES[rank])
    # Variances near eps show where eps is added; variances near 1 show all other differences.
    eps = float(cast(float, expected.options.get("eps", 1e-5)))
    faint = small * eps**0.5
    for training, inputs in ((True, (small, faint, large)), (False, (small, faint))):
        layer.train(training)
        reference.train(training)
        for x in inputs:
            for each in (layer, reference.norm):
                _prepare(each, late=x is large, var_scale=eps if x is faint and not training else 1.0)
            reason = _difference(layer, reference, x, with_gradient=training and x is small)
            if reason:
                mode = "training" if training else "evaluation"
                return ComparisonResult(f"its {reason} that of {expected.norm!r} on random input in {mode} mode")
    if expected.constant or getattr(reference.norm, "running_mean", None) is None:
        return ComparisonResult()
    for each in (layer, reference.norm):
        cast(Any, each).track_running_stats = False
        each.train(True)
    return ComparisonResult(obeys_tracking=not _difference(layer, reference, small))


def _prepare(layer: nn.Module, late: bool, var_scale: float) -> None:
    """Set the state of a layer before the next input: its batch counter, and the scale of its running variance."""
    if late:
        _set_count(layer, _COUNTED)
    if isinstance(var := layer._buffers.get("running_var"), Tensor):
        var.mul_(var_scale)


def _isolated_copy(module: nn.Module) -> nn.Module:
    """Return a float32 copy without hooks that shares no tensor with the layer; its tensors are random."""
    # Hooks are not copied: they may refer to the whole model, and must not see the random inputs.
    hooks = [value for part in module.modules() for name, value in vars(part).items() if "_hooks" in name]
    layer = copy.deepcopy(module, {id(value): type(value)() for value in hooks if isinstance(value, dict)})
    tensors = {id(t) for t in (*module.parameters(), *module.buffers())}
    if layer is module or any(id(t) in tensors for t in (*layer.parameters(), *layer.buffers())):
        raise TypeError("its copy shares tensors with it")
    if any(t.is_meta for t in (*layer.parameters(), *layer.buffers())):
        layer = layer.to_empty(device="cpu")
    layer = layer.float()
    layer.__dict__.pop("_contnorm_own", None)
    if hasattr(layer, "_contnorm_tracked"):  # frozen by moments/freeze.py
        cast(Any, layer).track_running_stats = layer._contnorm_tracked
    _randomize(layer)
    return layer


def _randomize(layer: nn.Module) -> None:
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for name, tensor in {**layer._parameters, **layer._buffers}.items():
            if tensor is None or not tensor.is_floating_point() or tensor.dim() == 0:
                continue
            value = torch.randn(tensor.shape, generator=generator, device="cpu")
            tensor.copy_(value.abs() + 0.5 if name == "running_var" else value)
    _set_count(layer, 0)


def _set_count(layer: nn.Module, batches: int) -> None:
    if isinstance(counter := layer._buffers.get("num_batches_tracked"), Tensor):
        counter.fill_(batches)


def _input(layer: nn.Module, channels: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED + len(shape) + shape[0])
    x = torch.randn((shape[0], channels, *shape[1:]), generator=generator, device="cpu")
    x = x * 1.5 + torch.randn((1, channels, *[1] * (len(shape) - 1)), generator=generator, device="cpu")
    device = next((t.device for t in (*layer.parameters(), *layer.buffers())), torch.device("cpu"))
    return x.to(device)


class _Reference(nn.Module):
    """The expected norm, followed by the layer's dropout and activation if it has them."""

    def __init__(self, norm: nn.Module, then: tuple[nn.Module, ...], constant: bool) -> None:
        super().__init__()
        self.norm, self.then, self.constant = norm, nn.ModuleList(then), constant

    def train(self, mode: bool = True) -> _Reference:
        super().train(mode)
        if self.constant:
            self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        for module in self.then:
            y = module(y)
        return y


class _LayerNormOfPositions(nn.LayerNorm):
    """Layer norm over dimension 1."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


def _expected_norm(expected: DetectedNorm, rank: int) -> nn.Module:
    if expected.per_position:
        return _LayerNormOfPositions(expected.channels, cast(float, expected.options["eps"]))
    spec, dim = NORMS[expected.norm], _DIM_OF_RANK[rank]
    allowed = accepted_options(norm_class(spec, dim))
    options = {key: value for key, value in expected.options.items() if key in allowed and key not in spec.preset}
    return build_norm(spec, expected.channels, dim, options, "probe")


def _reference(layer: nn.Module, expected: DetectedNorm, rank: int) -> _Reference:
    norm = _expected_norm(expected, rank)
    tensors = {**layer._parameters, **layer._buffers}
    for name in norm._parameters:
        value = tensors.get(name)
        norm._parameters[name] = None if value is None else nn.Parameter(value.detach().clone())
    for name, initial in norm._buffers.items():
        value = tensors.get(name)
        norm._buffers[name] = initial if value is None else value.detach().clone()
    device = next((t.device for t in tensors.values() if t is not None), torch.device("cpu"))
    then = copy.deepcopy((layer.drop, layer.act)) if expected.acts else ()
    return _Reference(norm, cast("tuple[nn.Module, ...]", then), expected.constant).to(device)


def _difference(layer: nn.Module, reference: _Reference, x: Tensor, with_gradient: bool = False) -> str:
    """Return which result of a layer differs, as the start of a sentence; empty if none does."""
    before = _moments(reference.norm)
    try:
        expected_results, results = (_run(each, x, with_gradient) for each in (reference, layer))
    except Exception as error:
        raise _CannotRunError from error
    for what, value, expected in zip(("output", "input gradient"), results, expected_results, strict=True):
        if not _close(value, expected, _TOLERANCE):
            return f"{what} differs from"
    after, expected_after = _moments(layer), _moments(reference.norm)
    for name, start in before.items():
        change, expected_change = after[name] - start, expected_after[name] - start
        if not _close(change, expected_change, _MOVE_TOLERANCE, rounding=1e-6 * float(start.abs().max())):
            return f"{name} after a batch differs from"
    return ""


def _moments(layer: nn.Module) -> dict[str, Tensor]:
    buffers = {name: layer._buffers.get(name) for name in ("running_mean", "running_var")}
    return {name: buffer.detach().clone() for name, buffer in buffers.items() if buffer is not None}


def _close(value: object, expected: Tensor, tolerance: float, rounding: float = 0.0) -> bool:
    """Whether values agree up to a tolerance relative to their average magnitude; NaN equals NaN."""
    if not isinstance(value, Tensor) or value.shape != expected.shape:
        return False
    value, expected = value.detach().float(), expected.detach().float()
    level = float(expected.abs().nanmean()) if expected.numel() else 0.0
    return torch.allclose(value, expected, rtol=tolerance, atol=tolerance * level + rounding, equal_nan=True)


def _run(layer: nn.Module, x: Tensor, with_gradient: bool) -> tuple[Any, Any]:
    """Return output and input gradient, with a fixed seed so that dropout is the same for both layers."""
    for generator in _generators():
        generator.manual_seed(_SEED)
    leaf = x.clone().requires_grad_(with_gradient)
    y = layer.forward(leaf * 1)  # not `layer(...)`, which would run global module hooks
    if not with_gradient or not isinstance(y, Tensor):
        return y, x
    weight = torch.linspace(-1, 2, y.numel(), device=y.device).reshape(y.shape)
    return y, torch.autograd.grad((y * weight).sum(), leaf)[0]


def _generators() -> list[torch.Generator]:
    on_gpu = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    return [torch.default_generator, *on_gpu]


@contextmanager
def random_state_restored() -> Iterator[None]:
    """Restore the random state on exit, as `torch.random.fork_rng`, but without initializing unused devices."""
    states = [(generator, generator.get_state()) for generator in _generators()]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


@contextmanager
def _plain_arithmetic(module: nn.Module) -> Iterator[None]:
    """Enable gradients and disable autocast, whatever the caller has set."""
    tensor = next((t for t in (*module.parameters(), *module.buffers())), None)
    kind = "cpu" if tensor is None or tensor.is_meta else tensor.device.type
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(kind, enabled=False):
        yield
