"""BN*: exact running moments of a model for given data.

They are defined as the buffers after a single training-mode forward over all the data with momentum 1. Such a forward
needs all the data in one batch; this implementation does not. It reads the batches once, in one sweep in which they
advance together from norm layer to norm layer: each has a forward pass of its own, in a thread of its own, and one of
them runs at a time. At a norm layer a pass stops until all batches have arrived and their pooled moments are written.
The arithmetic is that of one pass over the data for each layer, and so are the bits.

Where the batches do not fit into memory together, with the activations between two norm layers, or do not call the
same layers once each in the same order, it measures the layers one by one in the order of their calls, with
the same result: the exact moments of a layer are pooled over all batches, while the layers before it normalize with the
exact moments measured before. Each of these passes stops at the layer that it measures.

With ``exact=False`` the moments are approximate: one pass, in which each batch is normalized with its own moments, as
in training, and the moments of the batches are pooled.

Samples may have weights w_i. The mean is then the sum of w_i x_i over all samples and positions, divided by the sum of
w_i over the same, and the variance that of the squared deviations from it. The unbiased variance that buffers store is
the biased one times n / (n - 1), with the effective number of values n = (sum of w_i)^2 / (sum of w_i^2).

The same sweep calibrates the layers of a converted model. Where all batches have arrived at a layer, the moments of its
outputs without weight and bias are pooled over the inputs, too, and set its weight and bias.

With ``mix`` below 1 the moments of the data are blended with those that the model has (alpha-BN): mean and variance
each become (1 - mix) * old + mix * measured. The variance has no term for the distance of the two means. That term
belongs to the pooled data of both sources; here the old moments are a prior for those of the new data alone, and the
two variances are two estimates of the same number. Layers are measured behind layers with blended moments, as the
model will be used.
"""

from __future__ import annotations

import contextvars
import inspect
import os
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from operator import length_hint
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from contnorm.checks import in_float64
from contnorm.detect import holds_moments
from contnorm.moments.freeze import evaluation_mode, frozen_stats, set_stale, stale_moments, stats_mode, stats_state
from contnorm.moments.pooling import (
    Frozen,
    Meetings,
    Moments,
    NoLockstepError,
    NonFiniteMomentsError,
    PooledMoments,
    WeightGroups,
    group_by_weight,
    meetings_of,
    moment_layers,
    read_moments,
    write_moments,
)

Call = Callable[[nn.Module, Any], object]
Weights = Callable[[Any], Tensor | float]
Use = Callable[[nn.Module, Tensor, WeightGroups | None], None]  # what is done with an input of a layer

# The names of labels in batches of transformers' data sets and collators.
_LABELS = frozenset(("label", "labels", "label_ids"))
# Each forward pass has a thread, and on a CPU each such thread has a team of OpenMP threads.
MOST_THREADS = 1024
# Activations alive at a norm layer, in multiples of its input: input, output, residual and the next layer's output.
ALIVE = 4
# Of outputs without weight and bias, whose scale is 1: below it, a channel is constant up to rounding.
LEAST_DEVIATION = 1e-6


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

    def __init__(self, layers: dict[str, nn.Module], old: dict[str, Moments], marks: dict[str, Any]) -> None:
        self._layers = layers
        self._old = old
        self._marks = marks
        self.moments = {name: LayerMoments(*old[name], *new) for name, new in read_moments(layers).items()}

    def restore(self) -> None:
        """Restore the old moments."""
        write_moments(self._layers, self._old)
        for name in self._marks.keys() & self._layers.keys():
            set_stale(self._layers[name], self._marks[name])

    def __enter__(self) -> Reestimated:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"Reestimated({len(self.moments)} layers: {', '.join(self.moments)})"


def reestimate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    weights: Weights | None = None,
    call: Call | None = None,
    mix: float = 1.0,
    exact: bool = True,
    frozen: Frozen = "raise",
    process_group: Any = None,
) -> Reestimated:
    """Set all running moments of a model to the exact moments of the given data (the paper's BN*), layer by layer.

    The model runs in evaluation mode without gradients, once on each batch: the batches advance together from norm
    layer to norm layer. If they do not fit into half of the free memory together, if their number is not known
    (``len``), if a layer is called several times in a forward pass (its calls are pooled), or if batches or processes
    call the layers in different orders, the model runs once per call of a norm layer instead, and memory use does not
    grow with the data. The moments are the same. Gradients, modes, batch counters and all other state stay unchanged.

    Args:
        model: The model, with norms of torch or of this package.
        batches: Batches that can be iterated repeatedly: a list, a DataLoader, a dataset of tensors; with
            ``exact=False`` any iterable. If a batch is a tuple or list, its first element is passed to the model. If it
            is a mapping, as in transformers, the model is called as ``model(**batch)``, without labels (``labels``,
            ``label``, ``label_ids``) and without keys that ``forward`` does not take.
        weights: A function ``weights(batch)`` that returns the weight of each sample of a batch, a tensor of shape
            (N,), or one number, the weight of each of its samples. Weights are numbers from 0, and only their ratios
            matter. Default: all samples have the same weight.
        call: A function ``call(model, batch)`` that runs the model on a batch, if the default does not apply.
        mix: The weight of the given data, from 0 to 1: means and variances become (1 - mix) * old + mix * measured, as
            in alpha-BN. Below 1, the moments that the model has are a prior, which counts when there is little data. A
            prior worth N samples is mix = n / (n + N) for n samples.
        exact: False for approximate moments in one pass over a stream of any length, one batch in memory at a time.
            Each batch is then normalized with its own moments, as by ``torch.optim.swa_utils.update_bn`` (with ``mix``,
            blended with the old ones), but means and variances of the batches are combined to those of all data.
            Moments of layers without another such norm before them are exact; those of later layers depend on the batch
            size. A layer that is called several times normalizes each call with the moments of that call, and all its
            calls are pooled.
        frozen: What to do with layers whose moments are frozen (`freeze_stats`): ``"raise"`` an error; ``"lift"`` to
            set their moments too and leave them frozen; ``"keep"`` to leave their moments, so that later layers are
            measured with them.
        process_group: The processes of ``torch.distributed`` whose data is pooled, such as
            ``torch.distributed.group.WORLD``. Each of them calls this function with its own batches, and all get the
            same moments. By default, the batches of this process alone are used.

    Returns:
        The old and new moments. Used as a context manager, it restores the old moments on exit.

    Raises:
        TypeError: For a generator, which can be iterated only once, unless ``exact=False``; and for a tensor.
        ValueError: If there is no data, if the moments of a layer cannot be measured or are frozen, if the model has
            an unknown layer with running moments, if weights do not fit the batches, if ``mix`` is below 1 and the
            old moments are stale, or if with ``exact=False`` a batch has one value per channel at a layer.
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

        With weights of samples, here of tasks, the second element of a batch, so that both tasks count the same:

        >>> data = [(torch.tensor([[0.0], [1.0], [2.0], [9.0]]), torch.tensor([0, 0, 0, 1]))]
        >>> weights_of_tasks = torch.tensor([1 / 3, 1.0])
        >>> with reestimate(model, data, weights=lambda batch: weights_of_tasks[batch[1]]):
        ...     print(model[0].running_mean)
        tensor([5.])

        Blended with the old mean of 0 and variance of 1:

        >>> with reestimate(model, [torch.tensor([[2.0], [4.0], [6.0]])], mix=0.25):
        ...     print(model[0].running_mean, model[0].running_var)
        tensor([1.]) tensor([1.7500])

        Approximate moments of a stream, here a generator, which can be read only once:

        >>> stream = (torch.tensor([[step], [step + 1.0]]) for step in range(1000))
        >>> with reestimate(model, stream, exact=False):
        ...     print(model[0].running_mean)
        tensor([500.])
    """
    check_batches(batches, "reestimate: batches", not exact, "; or exact=False, for approximate moments in one pass")
    if not 0 <= mix <= 1:
        raise ValueError(f"reestimate: mix={mix} must be from 0 to 1, the weight of the given data.")
    if process_group is not None and not (dist.is_available() and dist.is_initialized()):
        raise ValueError("reestimate: process_group is given, but torch.distributed is not initialized.")
    layers = moment_layers(model, frozen)
    if not layers:
        raise ValueError(
            f"reestimate: {type(model).__name__} has no norm layer with running moments to estimate. See "
            f"contnorm.summarize(model)."
        )
    marks = {name: mark for name, layer in layers.items() if (mark := stale_moments(layer)) is not None}
    if marks and mix < 1:
        raise ValueError(
            f"reestimate: the moments of layer {next(iter(marks))!r} are stale, those of another signal, and can't be "
            f"blended. Call reestimate without mix first, if possible with data that the model was trained on."
        )
    old = read_moments(layers)
    measurement = _Measurement(model, layers, call or call_on_batch, weights, process_group, old=old, mix=mix)
    with ExitStack() as undo:
        undo.callback(write_moments, layers, old)
        for name, mark in marks.items():
            undo.callback(set_stale, layers[name], mark)
            set_stale(layers[name], None)
        with measuring(model):
            pools = measurement.exact(batches) if exact else measurement.approximate(batches)
        if not pools:
            raise ValueError("reestimate: no data reached a norm layer with running moments. Give batches of samples.")
        measured = {name: measurement.blend(name, pool.moments(layers[name])) for name, pool in pools.items()}
        write_moments(layers, measured, finite=True)
        undo.pop_all()
    for name in marks.keys() - pools.keys():
        set_stale(layers[name], marks[name])
    return Reestimated({name: layers[name] for name in pools}, {name: old[name] for name in pools}, marks)


def check_batches(batches: Iterable[Any], what: str, once: bool = False, otherwise: str = "") -> None:
    """Raise a TypeError for a tensor and, unless batches are read ``once``, for an iterator."""
    if isinstance(batches, Tensor):
        raise TypeError(f"{what} is a tensor, whose elements are samples. Give a list of batches: [x].")
    if not once and isinstance(batches, Iterator):
        raise TypeError(
            f"{what} is a one-shot iterator ({type(batches).__name__}), and several passes over the data may be "
            f"needed. Give a list, a DataLoader, or another object that can be iterated repeatedly{otherwise}."
        )


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Context manager for evaluation mode without gradients, in which layers with running moments use them."""
    with torch.no_grad(), evaluation_mode(model), ExitStack() as stack:
        for module in model.modules():
            if holds_moments(module) and stats_state(module)[0] == "batch":
                stack.enter_context(stats_mode(module))
            if isinstance(module, _InstanceNorm) and module.track_running_stats:
                stack.enter_context(frozen_stats(module))  # it normalizes instances, as in training
                module.training = True
        yield


# --- calibration ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def output_targets(model: nn.Module, layers: Mapping[str, nn.Module], batches: Iterable[Any]) -> dict[str, Moments]:
    """Return mean and standard deviation of the outputs of each layer that batches reach, in evaluation mode.

    A deviation has the sign of the layer's weight: outputs that decrease with the inputs shall do so in another norm.
    Of a layer with an activation, these are the values before it.
    """
    pools = {name: PooledMoments() for name in layers}
    with evaluation_mode(model), ExitStack() as stack:
        for name, layer in layers.items():

            def hook(module: nn.Module, args: Any, output: Any = None, name: str = name) -> None:
                pools[name].add_input(nn.Identity(), args[0] if output is None else output, None)

            own: Any = layer
            acts = isinstance(getattr(layer, "drop", None), nn.Module)
            handle = own.drop.register_forward_pre_hook(hook) if acts else own.register_forward_hook(hook)
            stack.callback(handle.remove)
        for batch in batches:
            call_on_batch(model, batch)
    targets = {}
    for name, pool in pools.items():
        if pool.count:
            weight = getattr(layers[name], "weight", None)
            deviation = (pool.squares / pool.total).sqrt()
            targets[name] = pool.mean, deviation if weight is None else deviation.copysign(weight.to(deviation))
    if not targets:
        raise ValueError("convert_norm: no data of calibrate reached a norm layer. Give batches of samples.")
    return targets


def calibrate_layers(
    model: nn.Module, layers: Mapping[str, nn.Module], targets: Mapping[str, Moments], batches: Iterable[Any]
) -> None:
    """Set weight and bias of layers so that their outputs have the target moments, and re-estimate running moments.

    Args:
        model: The model.
        layers: The layers, with a weight and a bias for each channel.
        targets: Mean and deviation of the outputs, by layer, as `output_targets` returns them.
        batches: Batches that can be iterated repeatedly.

    Raises:
        ValueError: If the moments cannot be measured. All layers are as before.
    """
    layers = {name: layers[name] for name in targets}
    held = [t for layer in layers.values() for t in (*layer._parameters.values(), *layer._buffers.values())]
    old = [(tensor, tensor.clone()) for tensor in held if tensor is not None]
    with ExitStack() as undo, measuring(model):
        for tensor, value in old:
            undo.callback(tensor.detach().copy_, value)
        for layer in layers.values():
            undo.callback(set_stale, layer, stale_moments(layer))
            set_stale(layer, None)
        _Measurement(model, layers, call_on_batch, None, None, targets).exact(batches)
        undo.pop_all()


class ChainedBatches:
    """Batches of several data sets, one after the other, which can be iterated repeatedly."""

    def __init__(self, parts: Sequence[Iterable[Any]]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))  # type: ignore[arg-type]


@contextmanager
def generators_restored(*owners: object) -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch on exit, and the generators of some objects.

    Args:
        *owners: Objects such as a DataLoader and its sampler, with a ``torch.Generator`` in ``generator``, or without.

    Example:
        >>> before = torch.random.get_rng_state()
        >>> with generators_restored():
        ...     _ = torch.randn(3)
        >>> torch.equal(torch.random.get_rng_state(), before)
        True
    """
    generators = [g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)]
    states = [generator.get_state() for generator in generators]
    numpy: Any = sys.modules.get("numpy")  # not a dependency of the norms
    state, numpy_state = random.getstate(), numpy and numpy.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)
        for generator, old in zip(generators, states, strict=True):
            generator.set_state(old)


# --- how a model is run on a batch ----------------------------------------------------------------------------------


def call_on_batch(model: nn.Module, batch: Any) -> object:
    """Run the model on a batch: a mapping as keyword arguments, of a tuple or list the first element, else all of it.

    A mapping is passed without labels (``labels``, ``label`` and ``label_ids``), so that no loss is computed, and
    without keys that ``forward`` does not take.

    Example:
        >>> call_on_batch(nn.Identity(), (torch.ones(2), "labels"))
        tensor([1., 1.])
    """
    if not isinstance(batch, Mapping):
        return call_on_first_element(model, batch)
    inner = model
    while isinstance(inner, DataParallel | DistributedDataParallel) or "_orig_mod" in inner._modules:
        inner = cast(nn.Module, inner._modules.get("_orig_mod", inner._modules.get("module")))
    parameters = inspect.signature(inner.forward).parameters
    any_key = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    taken = {key: v for key, v in batch.items() if (any_key or key in parameters) and key not in _LABELS}
    return model(**tree_map(lambda value: to_model_device(model, value), taken))


def call_on_first_element(model: nn.Module, batch: Any) -> object:
    """Run the model, on its device, on a batch or on the first element of a tuple or list."""
    return model(to_model_device(model, batch[0] if isinstance(batch, tuple | list) else batch))


def to_model_device(model: nn.Module, x: Any) -> Any:
    """Move a tensor to the model's device; return any other object unchanged."""
    device = next((t.device for t in (*model.parameters(), *model.buffers())), None)
    return x.to(device) if isinstance(x, Tensor) and device is not None else x


# --- measurement ----------------------------------------------------------------------------------------------------


class _Measurement:
    """The moments of the layers of a model, pooled over batches and processes; with targets, their calibration."""

    def __init__(
        self,
        model: nn.Module,
        layers: dict[str, nn.Module],
        run: Call,
        weights: Weights | None,
        group: Any,
        targets: Mapping[str, Moments] | None = None,
        old: Mapping[str, Moments] | None = None,
        mix: float = 1.0,
    ) -> None:
        self.model, self.layers, self.run, self.weights, self.group = model, layers, run, weights, group
        self.targets, self.old, self.mix = targets, old or {}, mix
        keeping = (name for name, layer in layers.items() if targets is None or moment_layers(layer, "lift"))
        self.keeping = frozenset(keeping)  # the layers with running moments
        self.meetings: Meetings | None = None
        self.pools: dict[str, PooledMoments] = {}

    def blend(self, name: str, measured: Moments) -> Moments:
        """Blend the measured moments of a layer with its old ones."""
        if self.mix == 1:
            return measured
        mean, var = (
            torch.lerp(in_float64(old).to(new.device), new, self.mix)
            for old, new in zip(self.old[name], measured, strict=True)
        )
        return mean, var

    def exact(self, batches: Iterable[Any]) -> dict[str, PooledMoments]:
        """Measure all layers in one sweep; where that is not possible, in a pass for each call of a layer."""
        streamed = isinstance(batches, DataLoader) and isinstance(batches.dataset, IterableDataset)
        count = -1 if streamed else length_hint(batches, -1)  # the length of a stream is a rough one
        try:
            with meetings_of(self.group) as self.meetings:
                if count < 0 or (count > 1 and count * torch.get_num_threads() > MOST_THREADS):
                    raise NoLockstepError
                if held := list(batches):
                    processes = 1 if self.meetings is None else self.meetings.size
                    lockstep = Lockstep(self.model, self.layers, self.run, self._settle, processes)
                    lockstep.measure(held, [self._groups(batch) for batch in held])
        except (NoLockstepError, torch.OutOfMemoryError):
            self.pools = {}
            with meetings_of(self.group) as self.meetings:
                self._run_passes(batches)
        return self.pools

    def approximate(self, batches: Iterable[Any]) -> dict[str, PooledMoments]:
        """Pool the inputs of all layers in one pass, in which each batch is normalized with its own moments."""
        pools: dict[str, PooledMoments] = {}

        def add(name: str, layer: nn.Module, x: Tensor) -> None:
            own = PooledMoments()
            own.add_input(layer, x, groups)
            if own.count == 1:
                raise ValueError(
                    f"reestimate: a batch has one value per channel at layer {name!r}, and its variance needs two or "
                    f"more. With exact=False, each batch is normalized with its own moments: give larger batches."
                )
            if own.count:
                write_moments(self.layers, {name: self.blend(name, own.moments(layer, normalizing=True))})
            pools.setdefault(name, PooledMoments()).merge(own)

        with meetings_of(self.group) as self.meetings:
            for batch in batches:
                groups = self._groups(batch)
                if groups is None or any(weight for weight, _ in groups):  # a batch without weight adds nothing
                    self._run(batch, self.layers, add)
            for name, pool in pools.items():
                self.pools[name] = self._merged(name, pool)
        return self.pools

    def _run_passes(self, batches: Iterable[Any]) -> None:
        calls: list[str] = []  # the layers in the order of their calls, of the first batch
        settled = 0

        def visit(use: Use) -> None:
            for batch in batches:
                if not calls:
                    self._run(batch, self.layers, lambda name, layer, x: calls.append(name))
                if calls:
                    # A layer that is called several times is measured at each call, over all its calls up to there.
                    remaining, groups = calls[: settled + 1].count(calls[settled]), self._groups(batch)

                    def add(name: str, layer: nn.Module, x: Tensor) -> None:
                        nonlocal remaining
                        use(layer, x, groups)  # noqa: B023 - called in this iteration alone
                        remaining -= 1
                        if not remaining:
                            raise StopForward

                    self._run(batch, [calls[settled]], add)

        while settled < max(1, len(calls)):
            pool = PooledMoments()
            if not calls or calls[settled] in self.keeping:
                visit(pool.add_input)
            if not calls:
                return
            self._settle(calls[settled], pool, visit)
            settled += 1

    def _groups(self, batch: Any) -> WeightGroups | None:
        return None if self.weights is None else group_by_weight(self.weights(batch))

    def _run(self, batch: Any, names: Iterable[str], add: Callable[[str, nn.Module, Tensor], None]) -> None:
        """Run the model on a batch, and call a function with the input of some of its layers before each call."""
        with ExitStack() as stack:
            for name in names:

                def hook(layer: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                    add(name, layer, first_input(args, kwargs))

                untraced = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
                stack.callback(self.layers[name].register_forward_pre_hook(untraced, with_kwargs=True).remove)
            stack.enter_context(suppress(StopForward))
            self.run(self.model, batch)

    def _settle(self, name: str, pool: PooledMoments, visit: Callable[[Use], None]) -> None:
        """Set a layer by its pooled inputs, for the layers after it; ``visit`` calls a function with each input.

        The running moments are those of a training forward; in a calibration, those that stay.
        """
        layer: Any = self.layers[name]
        if name in self.keeping:
            pool = self._merged(name, pool)
            moments = self.blend(name, pool.moments(layer, normalizing=self.targets is None))
            write_moments(self.layers, {name: moments}, finite=True)
        if self.targets is not None:
            mean, deviation = self.targets[name]
            layer.weight.fill_(1)
            layer.bias.zero_()
            pool, plain = PooledMoments(), nn.Identity()
            visit(lambda layer, x, groups: pool.add_input(plain, cast(Any, layer).forward(x), groups))
            pool = self._merged(name, pool)
            own = (pool.squares / pool.total).sqrt()
            weight = deviation.to(own) / own.where(own > LEAST_DEVIATION, 1)
            layer.weight.copy_(weight)
            layer.bias.copy_(mean.to(own) - weight * pool.mean)
            if not bool((layer.weight.isfinite() & layer.bias.isfinite()).all()):
                raise NonFiniteMomentsError(name)
        self.pools[name] = pool

    def _merged(self, name: str, pool: PooledMoments) -> PooledMoments:
        pool = pool if self.meetings is None else self.meetings.pool(name, pool)
        if pool.count < 2:
            values = "one value" if pool.count else "no value"
            raise ValueError(
                f"reestimate: all batches together have {values} per channel with a weight above 0 at layer {name!r}, "
                f"and a variance needs two or more. Give more samples."
            )
        return pool


# --- one sweep ------------------------------------------------------------------------------------------------------


class StopForward(BaseException):
    """Ends a forward pass. A BaseException, so that no ``except Exception`` in the model catches it."""


def first_input(args: Any, kwargs: Any) -> Tensor:
    """Return the input of a layer, from the arguments of its call."""
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    return x


class Lockstep:
    """One sweep over batches, which measures the moments of all layers.

    Args:
        model: The model, in evaluation mode.
        layers: The layers to measure.
        run: A function that runs the model on a batch.
        settle: Called with the name and the pooled moments of a layer, which it writes, and with a function that calls
            another one with each of the layer's inputs.
        processes: The number of processes, which may share the memory of this machine.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: dict[str, nn.Module],
        run: Call,
        settle: Callable[[str, PooledMoments, Callable[[Use], None]], None],
        processes: int = 1,
    ) -> None:
        self.model, self.layers, self.run, self.settle, self.processes = model, layers, run, settle, processes
        self.settled: set[str] = set()
        self.current: str | None = None  # the layer at which the batches gather
        self.pool = PooledMoments()
        self.inputs: list[Tensor] = []  # inputs of that layer
        self.index = 0  # index of the batch whose forward pass runs
        self.error: BaseException | None = None
        self.batons: list[threading.Semaphore] = []

    def measure(self, batches: Sequence[Any], groups: Sequence[WeightGroups | None]) -> None:
        """Run all batches.

        Args:
            batches: The batches.
            groups: The samples of each batch by weight; None for a batch without weights.

        Raises:
            NoLockstepError: If the batches can't advance together. Moments may have been written.
        """
        self.groups, self.count = groups, len(batches)
        device = next((t.device for t in (*self.model.parameters(), *self.model.buffers())), torch.device("cpu"))
        self.room = _free_memory(device, self.processes) // 2
        with ExitStack() as hooks:
            hooks.callback(self.inputs.clear)
            for name, layer in self.layers.items():
                hooks.callback(layer.register_forward_pre_hook(self._hook(name), with_kwargs=True).remove)
            if self.count == 1:
                self.run(self.model, batches[0])
            else:
                self._run_all(batches, device)

    def _run_all(self, batches: Sequence[Any], device: torch.device) -> None:
        self.batons = [threading.Semaphore(0) for _ in range(self.count + 1)]  # the last one wakes this thread
        enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        default = torch.empty(0).device  # torch before 2.8 does not name that of a `with` block
        contexts = [contextvars.copy_context() for _ in batches]

        def run_one(index: int) -> None:
            self.batons[index].acquire()
            try:
                if self.error is None:
                    self.index = index
                    # A thread starts without this thread's modes of torch and context variables.
                    mode = torch.autocast(device.type, dtype, enabled)
                    new_tensors = nullcontext() if default.type == "cpu" else default
                    with torch.no_grad(), mode, new_tensors, torch.cuda.stream(stream), suppress(StopForward):
                        contexts[index].run(self.run, self.model, batches[index])
                    if index == 0:
                        self.current = None
                    elif self.current is not None:
                        raise NoLockstepError
            except BaseException as error:  # raised again by the thread that waits
                self.error = self.error or error
            finally:
                self.batons[index + 1 if self.error is None else -1].release()

        threads = [threading.Thread(target=run_one, args=(index,), daemon=True) for index in range(self.count)]
        for thread in threads:
            thread.start()
        try:
            self.batons[0].release()
            self.batons[-1].acquire()
        except BaseException as error:  # an interrupt: the passes end at their next norm layer
            self.error = error
        finally:
            for baton in self.batons if self.error is not None else ():
                baton.release()
            for thread in threads:
                thread.join()
        if self.error is not None:
            raise self.error

    def _visit(self, use: Use) -> None:
        for x, groups in zip(self.inputs, self.groups, strict=True):
            use(self.layers[cast(str, self.current)], x, groups)

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: Any, kwargs: Any) -> None:
            index = self.index
            x = first_input(args, kwargs)
            if index == 0:
                if name in self.settled or (self.count > 1 and ALIVE * x.nbytes * self.count > self.room):
                    raise NoLockstepError
                self.pool, self.current = PooledMoments(), name
            elif name != self.current:
                raise NoLockstepError
            self.pool.add_input(layer, x, self.groups[index])
            self.inputs.append(x)
            if index == self.count - 1:
                self.settle(name, self.pool, self._visit)
                self.settled.add(name)
                self.inputs.clear()
            if self.count > 1:
                self.batons[(index + 1) % self.count].release()
                self.batons[index].acquire()
                if self.error is not None:
                    raise StopForward
                self.index = index

        if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing the compiler takes seconds
            return hook
        untraced: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
        return untraced


def _free_memory(device: torch.device, processes: int) -> int:
    """Return the free memory of a device, in bytes; 4 GiB where it is not known; of a CPU, the share."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", ()):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // processes
    return 4 << 30
