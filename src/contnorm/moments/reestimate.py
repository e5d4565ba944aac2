"""BN*: exact running moments of a model for given data.

They are defined as the buffers after a single training-mode forward over all the data with momentum 1. Such a forward
needs all the data in memory; this implementation does not. It measures the layers depth by depth: the exact moments of
a layer are pooled over all batches, while the layers before it normalize with the exact moments measured before. The
depth of a layer is the number of norm layers on the longest path from the input to it. It is determined by tracing the
data flow of one forward pass, so that layers on parallel branches share a pass. Each pass stops at the last layer that
it measures.

Samples may have weights w_i. The mean is then the sum of w_i x_i over all samples and positions, divided by the sum of
w_i over the same, and the variance that of the squared deviations from it. The unbiased variance that buffers store is
the biased one times n / (n - 1), with the effective number of values n = (sum of w_i)^2 / (sum of w_i^2).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from contnorm.checks import check_model
from contnorm.convert.detect import DetectedNorm, UnsupportedNorm, detect_norm, holds_moments
from contnorm.functional.batch import channel_moments, unbiased
from contnorm.layers.base import MomentNorm
from contnorm.moments.freeze import evaluation_mode, frozen_stats, is_frozen
from contnorm.registry import NORMS

__all__ = [
    "Call",
    "LayerMoments",
    "NonFiniteMomentsError",
    "Reestimated",
    "Weights",
    "call_on_first_element",
    "keeps_moments",
    "moment_layers",
    "reestimate",
    "to_model_device",
]

Call = Callable[[nn.Module, Any], object]
Weights = Callable[[Any], Tensor]


class NonFiniteMomentsError(ValueError):
    """The moments of the data at a layer are NaN or infinite.

    Attributes:
        layer: The layer's name in the model.
    """

    def __init__(self, layer: str) -> None:
        super().__init__(
            f"reestimate: the moments of the data at layer {layer!r} are NaN or infinite. The model is "
            f"unchanged. Check the batches and the model's weights for values that are not finite or overflow."
        )
        self.layer = layer

    def __reduce__(self) -> tuple[type[NonFiniteMomentsError], tuple[str]]:
        return type(self), (self.layer,)


@dataclass(frozen=True)
class LayerMoments:
    """The moments of a layer before and after re-estimation."""

    old_mean: Tensor
    old_var: Tensor
    new_mean: Tensor
    new_var: Tensor


class Reestimated:
    """Result of `reestimate`: the moments of each layer, and a method to restore the old ones.

    As a context manager, it restores the old moments on exit.
    """

    def __init__(self, layers: dict[str, nn.Module], old: dict[str, tuple[Tensor, Tensor]]) -> None:
        self._layers = layers
        self._old = old
        self.moments = {
            name: LayerMoments(*old[name], *(buffer.clone() for buffer in _buffers(layer)))
            for name, layer in layers.items()
        }

    def restore(self) -> None:
        """Restore the old moments."""
        _write(self._layers, self._old)

    def __enter__(self) -> Reestimated:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"Reestimated({len(self.moments)} layers: {', '.join(self.moments)})"


def reestimate(
    model: nn.Module, batches: Iterable[Any], *, weights: Weights | None = None, call: Call | None = None
) -> Reestimated:
    """Set all running moments of a model to the exact moments of the given data (the paper's BN*), layer by layer.

    The model runs in evaluation mode without gradients, once per depth of norm layers. Memory use does not grow with
    the data. Gradients, modes, batch counters and all other state stay unchanged. If a layer is called several times
    in a forward pass, its calls are pooled.

    Args:
        model: The model, with norms of torch or of this package.
        batches: Batches that can be iterated repeatedly: a list, a DataLoader, a dataset of tensors. If a batch is a
            tuple or list, its first element is passed to the model.
        weights: A function ``weights(batch)`` that returns the weight of each sample of a batch: a tensor of shape (N,)
            of numbers from 0. Only their ratios matter. Default: all samples have the same weight.
        call: A function ``call(model, batch)`` that runs the model on a batch, if the default does not apply.

    Returns:
        The old and new moments. Used as a context manager, it restores the old moments on exit.

    Raises:
        TypeError: For a generator, which can be iterated only once, for an object that holds no batches, and for
            weights that are no function.
        ValueError: If there is no data, if the moments of a layer cannot be measured or are frozen, if the model has
            an unknown layer with running moments, or if weights do not fit a batch.
        NonFiniteMomentsError: If the moments of the data at a layer are NaN or infinite. It is a ValueError with the
            layer's name in ``layer``. After any error the model has its old moments.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(1))
        >>> data = [torch.tensor([[0.0], [1.0]]), torch.tensor([[2.0], [5.0]])]
        >>> with reestimate(model, data):
        ...     print(model[0].running_mean, model[0].running_var)
        tensor([2.]) tensor([4.6667])
        >>> model[0].running_mean
        tensor([0.])

        With weights, here of tasks, the second element of a batch, so that both tasks count the same:

        >>> data = [(torch.tensor([[0.0], [1.0], [2.0], [9.0]]), torch.tensor([0, 0, 0, 1]))]
        >>> weights_of_tasks = torch.tensor([1 / 3, 1.0])
        >>> with reestimate(model, data, weights=lambda batch: weights_of_tasks[batch[1]]):
        ...     print(model[0].running_mean)
        tensor([5.])
    """
    _check_batches(batches)
    if weights is not None and not callable(weights):
        raise TypeError(
            f"reestimate: weights is a {type(weights).__name__}. Give a function of a batch that returns one weight "
            f"per sample."
        )
    layers = _targets(check_model(model, "reestimate"))
    old = {name: (mean.clone(), var.clone()) for name, layer in layers.items() for mean, var in [_buffers(layer)]}
    run = call or call_on_first_element
    try:
        with torch.no_grad(), _in_evaluation(model):
            reached = _measure_all(_Passes(model, layers, run, weights), batches)
    except BaseException:
        _write(layers, old)
        raise
    return Reestimated(reached, {name: old[name] for name in reached})


def _check_batches(batches: object) -> None:
    if isinstance(batches, Iterator):
        raise TypeError(
            f"reestimate: batches is a one-shot iterator ({type(batches).__name__}), but the data is read once for "
            f"each depth of norm layers. Give a list, a DataLoader, or another object that can be iterated repeatedly."
        )
    if isinstance(batches, Tensor):
        raise TypeError("reestimate: batches is a tensor, whose elements are samples. Give a list of batches: [x].")
    if isinstance(batches, Mapping | str) or not isinstance(batches, Iterable):
        what = "None" if batches is None else f"a {type(batches).__name__}"
        raise TypeError(f"reestimate: batches is {what}. Give a list of batches, or a DataLoader.")


def _measure_all(plan: _Passes, batches: Iterable[Any]) -> dict[str, nn.Module]:
    """Measure and write the moments of all layers; return the layers that the data reached."""
    layers = plan.layers
    pooled: dict[str, _Pool] = {}
    while plan.depth is not None:
        pooled |= plan.measure(batches)
    _write_finite(
        layers, {name: (pool.mean, _stored(layers[name], pool.var, pool.effective)) for name, pool in pooled.items()}
    )
    return {name: layers[name] for name in pooled}


class _Passes:
    """Passes over the data, one for each depth. The first batch of the first pass is also used to trace the depths."""

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module], run: Call, weights: Weights | None) -> None:
        self.model, self.layers, self.run, self.weights = model, layers, run, weights
        self.calls: dict[str, list[int]] = {}
        self.depth: int | None = 0
        self.batches: int | None = None

    def measure(self, batches: Iterable[Any]) -> dict[str, _Pool]:
        """Run one pass over the data: pool the inputs of the layers at the current depth."""
        pools: dict[str, _Pool] = {}
        seen = 0
        for batch in batches:
            seen += 1
            if not self.calls:
                self.calls = _trace(self.model, self.layers, batch, self.run)
            # A layer with calls at several depths is measured at each of them, over all its calls up to that depth.
            due = {name: sum(d <= self.depth for d in ds) for name, ds in self.calls.items() if self.depth in ds}
            pools = pools or {name: _Pool() for name in due}
            self._pool(batch, pools, due)
        self._check(seen, pools)
        # The layers before the next depth must normalize with the variance of a training-mode forward.
        _write_finite(
            self.layers,
            {name: (p.mean, _normalizing(self.layers[name], p.var, p.effective)) for name, p in pools.items()},
        )
        deeper = {depth for depths in self.calls.values() for depth in depths if depth > (self.depth or 0)}
        self.depth = min(deeper, default=None)
        return pools

    def _pool(self, batch: Any, pools: dict[str, _Pool], due: dict[str, int]) -> None:
        calls_remaining = dict(due)
        groups = None if self.weights is None else _groups_of_weights(self.weights(batch))
        with ExitStack() as hooks:
            for name in due:
                hook = _pooling_hook(name, pools[name], calls_remaining, groups)
                hooks.callback(self.layers[name].register_forward_pre_hook(hook, with_kwargs=True).remove)
            hooks.enter_context(suppress(_StopForward))
            self.run(self.model, batch)

    def _check(self, seen: int, pools: dict[str, _Pool]) -> None:
        if self.batches is None and seen == 0:
            raise ValueError("reestimate: batches is empty. Give at least one batch of data.")
        if self.batches is not None and seen != self.batches:
            raise ValueError(
                f"reestimate: the first pass over the data had {self.batches} batches and a later one {seen}. Every "
                f"pass must read the same data; give a list, or an object that can be iterated repeatedly."
            )
        self.batches = seen
        for name, pool in pools.items():
            if pool.count == 0:
                or_weights = "" if self.weights is None else " or have the weight 0"
                raise ValueError(
                    f"reestimate: no data reached layer {name!r}: all {seen} batches are empty{or_weights}."
                )
            if pool.count == 1:
                with_weight = "" if self.weights is None else " with a weight above 0"
                raise ValueError(
                    f"reestimate: all batches together have one value per channel{with_weight} at layer {name!r}, and "
                    f"a variance needs two or more. Give more samples."
                )


@dataclass
class _Pool:
    """Weight, mean and sum of squared deviations, merged batch by batch (Chan et al.), in float64."""

    count: int = 0  # values per channel
    total: float = 0  # sum of their weights; an int if they have none
    total_squares: float = 0  # sum of the squared weights
    mean: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    squares: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    @property
    def var(self) -> Tensor:
        return self.squares / self.total

    @property
    def effective(self) -> float:
        """The effective number of values (Kish): their number if all weights are equal."""
        if self.count == self.total == self.total_squares:
            return self.count
        return self.total * self.total / self.total_squares

    def add(self, count: int, mean: Tensor, var: Tensor, weight: float = 1) -> None:
        if count == 0:
            return
        added = count * weight
        total = self.total + added
        off = mean - self.mean.to(mean.device)
        share = added / total
        self.mean = self.mean.to(mean.device) + off * share
        self.squares = self.squares.to(mean.device) + var * added + off * off * (self.total * share)
        self.count, self.total = self.count + count, total
        self.total_squares += added * weight


def _groups_of_weights(weights: object) -> list[tuple[float, Tensor | int]]:
    """Group the samples of a batch by weight: the weight and the samples' numbers, or their count if all have it.

    A layer defines moments of a batch, without weights. Those of groups are merged.
    """
    if not isinstance(weights, Tensor) or weights.dim() != 1 or weights.is_complex():
        what = f"a tensor of shape {tuple(weights.shape)}" if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"reestimate: weights(batch) returned {what}. Return a tensor of one weight per sample, (N,).")
    values = weights.detach().double()
    if not bool((values.isfinite() & (values >= 0)).all()):
        wrong = values[~(values.isfinite() & (values >= 0))][0].item()
        raise ValueError(f"reestimate: weights(batch) has the weight {wrong}. Weights are finite numbers from 0.")
    distinct, group = torch.unique(values, return_inverse=True)
    if len(distinct) == 1:
        return [(distinct.item(), len(values))]
    return [(weight, torch.nonzero(group == number).squeeze(1)) for number, weight in enumerate(distinct.tolist())]


def _pooling_hook(
    name: str, pool: _Pool, calls_remaining: dict[str, int], groups: list[tuple[float, Tensor | int]] | None
) -> Callable[..., None]:
    def hook(layer: nn.Module, args: Any, kwargs: Any) -> None:
        if calls_remaining[name] == 0:
            return
        x = args[0] if args else next(iter(kwargs.values()))
        if groups is not None:
            _add_groups(pool, name, layer, x, groups)
        elif x.numel():
            pool.add(x.numel() // x.shape[1], *_moments_of(layer, x))
        calls_remaining[name] -= 1
        if not any(calls_remaining.values()):
            raise _StopForward

    return hook


def _add_groups(pool: _Pool, name: str, layer: nn.Module, x: Tensor, groups: list[tuple[float, Tensor | int]]) -> None:
    samples = sum(rows if isinstance(rows, int) else len(rows) for _, rows in groups)
    if len(x) != samples:
        raise ValueError(
            f"reestimate: weights(batch) has {samples} weights, and the input of layer {name!r} has {len(x)} samples. "
            f"Return one weight for each sample of the first dimension."
        )
    for weight, rows in groups:
        part = x if isinstance(rows, int) else x[rows.to(x.device)]
        if weight and part.numel():
            pool.add(part.numel() // part.shape[1], *_moments_of(layer, part), weight)


class _StopForward(BaseException):
    """Ends a forward pass. A BaseException, so that no ``except Exception`` in the model catches it."""


def _trace(model: nn.Module, layers: dict[str, nn.Module], batch: Any, run: Call) -> dict[str, list[int]]:
    """Run one forward pass, and return the depth of each call of each layer."""
    calls: dict[str, list[int]] = {name: [] for name in layers}
    flow = _UncompiledDepthFlow() if "torch._dynamo" in sys.modules else _DepthFlow()
    moments = {name: {_address(buffer) for buffer in _buffers(layer)} for name, layer in layers.items()}
    flow.watched = set().union(*moments.values())
    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.register_forward_hook(_depth_hook(flow, calls[name]), with_kwargs=True).remove)
        stack.enter_context(flow)
        run(model, batch)
    for name, addresses in moments.items():
        if not calls[name] and addresses & flow.read:
            raise ValueError(
                f"reestimate: the moments of layer {name!r} ({type(layers[name]).__name__}) are used without a call of "
                f"the layer, so its input can't be measured. Call layer(x) in place of layer.forward(x) or "
                f"torch.nn.functional.batch_norm."
            )
    if not any(calls.values()):
        raise ValueError("reestimate: a forward pass reached no norm layer with running moments.")
    return calls


def _depth_hook(flow: _DepthFlow, depths: list[int]) -> Callable[..., None]:
    def hook(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        depth = flow.of((args, kwargs))
        depths.append(depth)
        flow.deepen(output, depth + 1)

    return hook


class _DepthFlow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that tracks, for each storage, how many norm layers its data has passed through."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.depth: dict[int, int] = {}
        self.alive: list[Tensor] = []  # keeps tensors alive, so that no storage address is reused
        self.watched: set[int] = set()  # addresses of running moments
        self.read: set[int] = set()  # the watched addresses that an operation has used

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Skip torch's default, which imports the compiler only to disable it here and takes seconds at first use."""
        return cls.__name__ != "_DepthFlow"

    def of(self, values: object) -> int:
        return max((self.depth.get(_address(t), 0) for t in tree_leaves(values) if isinstance(t, Tensor)), default=0)

    def deepen(self, values: object, depth: int) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and depth > self.depth.get(_address(tensor), 0):
                self.depth[_address(tensor)] = depth
                self.alive.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.read |= self.watched & {_address(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        depth = self.of((args, kwargs))
        if depth:
            self.deepen(result, depth)
            formal = func._schema.arguments
            written = [a for a, f in zip(args, formal, strict=False) if f.alias_info and f.alias_info.is_write]
            self.deepen(written, depth)
        return result


class _UncompiledDepthFlow(_DepthFlow):  # type: ignore[no-untyped-call]
    """The same mode for use when the compiler is already imported, which must not compile it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


def _address(tensor: Tensor) -> int:
    """Return a key that is equal for tensors with the same storage; for a sparse tensor, which has none, its id."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)


def _targets(model: nn.Module) -> dict[str, nn.Module]:
    layers = moment_layers(model)
    if not layers:
        raise ValueError(
            f"reestimate: {type(model).__name__} has no norm layer with running moments, so there is nothing to "
            f"estimate. See contnorm.summarize(model)."
        )
    return layers


_ADVICE = "Fix that, or replace the layer with another norm."


def moment_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the norm layers whose running moments `reestimate` sets, by name.

    Raises:
        ValueError: For a layer whose moments are frozen or cannot be estimated, and for an unknown layer with buffers
            ``running_mean`` and ``running_var``.

    Example:
        >>> list(moment_layers(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4))))
        ['1']
    """
    layers = {}
    for name, module in model.named_modules():
        detected = detect_norm(module)
        where = f"reestimate: layer {name!r} ({type(module).__name__})"
        if detected is None and _has_moment_buffers(module):
            raise ValueError(
                f"{where}: it has buffers running_mean and running_var but is not a known norm, so its moments cannot "
                f"be estimated. Replace it with a norm of torch or contnorm; if it is not a norm, rename its buffers."
            )
        if detected is None or isinstance(module, _InstanceNorm):
            continue
        if isinstance(detected, UnsupportedNorm):
            raise ValueError(f"{where}: its moments can't be computed from its input: {detected.reason}. {_ADVICE}")
        if not NORMS[detected.norm].keeps_moments or detected.constant or getattr(module, "use_running", False):
            continue
        if NORMS[detected.norm].layers and not (_defines_batch_moments(module) or type(module) in _TORCH_CLASSES):
            raise ValueError(
                f"{where}: its class does not define batch_moments(x), the mean and biased variance that an input adds "
                f"to its running moments. {_ADVICE}"
            )
        if not holds_moments(module):
            raise ValueError(
                f"{where}: it has no running moments and normalizes with the batch, so the moments of later layers "
                f"would depend on the batch size. Convert it with track_running_stats=True."
            )
        if is_frozen(module):
            raise ValueError(f"{where}: its moments are frozen. Call contnorm.freeze_stats(model, False) first.")
        layers[name] = module
    return layers


def keeps_moments(model: nn.Module) -> bool:
    """Whether any norm of the model has running moments.

    Example:
        >>> keeps_moments(nn.Sequential(nn.BatchNorm1d(4))), keeps_moments(nn.GroupNorm(2, 4))
        (True, False)
    """
    norms = (detect_norm(module) for module in model.modules())
    return any(isinstance(norm, DetectedNorm) and NORMS[norm.norm].keeps_moments for norm in norms)


def _has_moment_buffers(module: nn.Module) -> bool:
    """Whether the module itself registers running moments. Wrappers that forward attribute access do not."""
    return {"running_mean", "running_var"} <= {name for name, _ in module.named_buffers(recurse=False)}


_TORCH_CLASSES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _defines_batch_moments(layer: nn.Module) -> bool:
    """Whether a layer computes its own batch moments: those of this package, and registered ones that define it."""
    return callable(getattr(layer, "batch_moments", None))


def _moments_of(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    if _defines_batch_moments(layer):
        mean, var = layer.batch_moments(x)
        return mean.double(), var.double()
    return channel_moments(x.double())


def _stored(layer: Any, var: Tensor, count: float) -> Tensor:
    if _defines_batch_moments(layer) and hasattr(layer, "stored_variance"):
        stored: Tensor = layer.stored_variance(var, count)
        return stored
    return unbiased(var, count)


def _normalizing(layer: nn.Module, var: Tensor, count: float) -> Tensor:
    """Return the variance that a training-mode forward over the data normalizes with; the biased one in most norms."""
    return layer.normalizing_variance(var, count) if isinstance(layer, MomentNorm) else var


def _buffers(layer: nn.Module) -> tuple[Tensor, Tensor]:
    mean, var = layer._buffers["running_mean"], layer._buffers["running_var"]
    assert mean is not None and var is not None
    return mean, var


def _write(layers: dict[str, nn.Module], values: dict[str, tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for name, moments in values.items():
            for buffer, value in zip(_buffers(layers[name]), moments, strict=True):
                buffer.copy_(value)


def _write_finite(layers: dict[str, nn.Module], values: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Write moments, and raise NonFiniteMomentsError if a buffer then has NaN or infinite values."""
    _write(layers, values)
    for name in values:  # checked after the write, because a float64 moment may overflow the buffer's dtype
        if not all(bool(buffer.isfinite().all()) for buffer in _buffers(layers[name])):
            raise NonFiniteMomentsError(name)


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode, except that instance norms with running statistics normalize instances, as in training."""
    with evaluation_mode(model), ExitStack() as frozen:
        for module in model.modules():
            if isinstance(module, _InstanceNorm) and module.track_running_stats:
                frozen.enter_context(frozen_stats(module))
                module.training = True
        yield


def call_on_first_element(model: nn.Module, batch: Any) -> object:
    """Run the model, on its device, on a batch or on the first element of a tuple or list."""
    return model(to_model_device(model, batch[0] if isinstance(batch, tuple | list) else batch))


def to_model_device(model: nn.Module, x: Any) -> Any:
    """Move a tensor to the model's device; return any other object unchanged."""
    device = next((t.device for t in (*model.parameters(), *model.buffers())), None)
    return x.to(device) if isinstance(x, Tensor) and device is not None else x
