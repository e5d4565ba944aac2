"""Compare a layer of another library with the norm that it is expected to compute, on random input.

A copy of the layer must give the same output, input gradient and running moments, in training and evaluation. The layer
itself and torch's random state are not changed.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from contnorm.convert.detected import DetectedNorm
from contnorm.registry import NORMS, Dim, accepted_options, build_norm, norm_class

__all__ = ["ComparisonResult", "compare_with_norm", "random_state_restored"]


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
    return build_norm(spec, expected.channels, dim, options)


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
