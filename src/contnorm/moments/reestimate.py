"""BN*: exact running moments of a model for given data.

They are defined as the buffers after a single training-mode forward over all the data with momentum 1. Such a forward
needs all the data in one batch; this implementation does not. It reads the batches once, and they advance together from
norm layer to norm layer (`lockstep`).

Where the batches do not fit into memory together, it measures the layers one by one in the order of their calls, with
the same result: the exact moments of a layer are pooled over all batches, while the layers before it normalize with the
exact moments measured before. Each of these passes stops at the layer that it measures.

With ``exact=False`` the moments are approximate: one pass, in which each batch is normalized with its own moments, as
in training, and the moments of the batches are pooled.

Samples may have weights w_i. The mean is then the sum of w_i x_i over all samples and positions, divided by the sum of
w_i over the same, and the variance that of the squared deviations from it. The unbiased variance that buffers store is
the biased one times n / (n - 1), with the effective number of values n = (sum of w_i)^2 / (sum of w_i^2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from contnorm.checks import check_model
from contnorm.moments.batches import Call, WeightGroups, Weights, call_on_batch, group_by_weight, number_of_batches
from contnorm.moments.freeze import evaluation_mode, frozen_stats, released_stats
from contnorm.moments.layers import (
    Frozen,
    NonFiniteMomentsError,
    keeps_moments,
    moment_buffers,
    moment_layers,
    normalizing_variance,
    stored_variance,
    write_finite_moments,
    write_moments,
)
from contnorm.moments.lockstep import Lockstep, StopForward, first_input, fits_lockstep
from contnorm.moments.pooling import Meetings, NoLockstepError, PooledMoments

__all__ = [
    "LayerMoments",
    "NonFiniteMomentsError",
    "Reestimated",
    "keeps_moments",
    "moment_layers",
    "reestimate",
]


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
            name: LayerMoments(*old[name], *(buffer.clone() for buffer in moment_buffers(layer)))
            for name, layer in layers.items()
        }

    def restore(self) -> None:
        """Restore the old moments."""
        write_moments(self._layers, self._old)

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
            ``label``, ``label_ids``, unless ``forward`` requires them) and without keys that ``forward`` does not take.
        weights: A function ``weights(batch)`` that returns the weight of each sample of a batch, a tensor of shape
            (N,), or one number, the weight of each of its samples. Weights are numbers from 0, and only their ratios
            matter. Default: all samples have the same weight.
        call: A function ``call(model, batch)`` that runs the model on a batch, if the default does not apply.
        exact: False for approximate moments in one pass over a stream of any length, one batch in memory at a time.
            Each batch is then normalized with its own moments, as by ``torch.optim.swa_utils.update_bn``, but means and
            variances of the batches are combined to those of all data. Moments of layers without another such norm
            before them are exact; those of later layers depend on the batch size. A layer that is called several times
            normalizes each call with the moments of that call, and all its calls are pooled.
        frozen: What to do with layers whose moments are frozen (`freeze_stats`): ``"raise"`` an error; ``"lift"`` to
            set their moments too and leave them frozen; ``"keep"`` to leave their moments, so that later layers are
            measured with them.
        process_group: The processes of ``torch.distributed`` whose data is pooled, such as
            ``torch.distributed.group.WORLD``. Each of them calls this function with its own batches, and all get the
            same moments. By default, the batches of this process alone are used.

    Returns:
        The old and new moments. Used as a context manager, it restores the old moments on exit.

    Raises:
        TypeError: For a generator, which can be iterated only once, unless ``exact=False``; for a tensor; and for a
            mapping whose keys do not fit the model's forward.
        ValueError: If there is no data, if the moments of a layer cannot be measured or are frozen, if the model has
            an unknown layer with running moments, if weights do not fit the batches, or if with ``exact=False`` a batch
            has one value per channel at a layer.
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

        Approximate moments of a stream, here a generator, which can be read only once:

        >>> stream = (torch.tensor([[step], [step + 1.0]]) for step in range(1000))
        >>> with reestimate(model, stream, exact=False):
        ...     print(model[0].running_mean)
        tensor([500.])
    """
    if isinstance(batches, Tensor):
        raise TypeError("reestimate: batches is a tensor, whose elements are samples. Give a list of batches: [x].")
    if exact and isinstance(batches, Iterator):
        raise TypeError(
            f"reestimate: batches is a one-shot iterator ({type(batches).__name__}), and exact moments may need "
            f"several passes over the data. Give a list, a DataLoader, or another object that can be iterated "
            f"repeatedly; or exact=False, for approximate moments in one pass."
        )
    if process_group is not None and not (dist.is_available() and dist.is_initialized()):
        raise ValueError("reestimate: process_group is given, but torch.distributed is not initialized.")
    layers = moment_layers(check_model(model, "reestimate"), frozen)
    if not layers:
        raise ValueError(
            f"reestimate: {type(model).__name__} has no norm layer with running moments to estimate. See "
            f"contnorm.summarize(model)."
        )
    old = {name: (mean.clone(), var.clone()) for name, layer in layers.items() for mean, var in [moment_buffers(layer)]}
    measurement = _Measurement(model, layers, call or call_on_batch, weights, process_group)
    with released_stats(layers.values()):  # hooks of frozen layers hand out copies of the moments
        try:
            with torch.no_grad(), _in_evaluation(model):
                pools = measurement.exact(batches) if exact else measurement.approximate(batches)
            stored = {n: (pool.mean, stored_variance(layers[n], pool.var, pool.effective)) for n, pool in pools.items()}
            write_finite_moments(layers, stored)
        except BaseException:
            write_moments(layers, old)
            raise
    return Reestimated({name: layers[name] for name in pools}, {name: old[name] for name in pools})


class _Measurement:
    """The moments of the layers of a model, pooled over batches and processes."""

    def __init__(
        self, model: nn.Module, layers: dict[str, nn.Module], run: Call, weights: Weights | None, group: Any
    ) -> None:
        self.model, self.layers, self.run, self.weights, self.group = model, layers, run, weights, group
        self.meetings = Meetings(None)
        self.pools: dict[str, PooledMoments] = {}

    def exact(self, batches: Iterable[Any]) -> dict[str, PooledMoments]:
        """Measure all layers in one sweep; where that is not possible, in a pass for each call of a layer."""
        try:
            with Meetings(self.group) as self.meetings:
                self._sweep(batches)
        except (NoLockstepError, torch.OutOfMemoryError):
            self.pools = {}
            with Meetings(self.group) as self.meetings:
                self._run_passes(batches)
        return self._measured()

    def approximate(self, batches: Iterable[Any]) -> dict[str, PooledMoments]:
        """Pool the inputs of all layers in one pass, in which each batch is normalized with its own moments."""
        pools: dict[str, PooledMoments] = {}
        with Meetings(self.group) as self.meetings:
            for batch in batches:
                groups = self._groups(batch)
                if groups is None or any(weight for weight, _ in groups):  # a batch without weight adds nothing
                    self._run(batch, {name: self._own_moments_hook(name, pools, groups) for name in self.layers})
            for name, pool in pools.items():
                self.pools[name] = self._merged(name, pool)
        return self._measured()

    def _measured(self) -> dict[str, PooledMoments]:
        if not self.pools:
            raise ValueError("reestimate: no data reached a norm layer with running moments. Give batches of samples.")
        return self.pools

    def _sweep(self, batches: Iterable[Any]) -> None:
        if not fits_lockstep(number_of_batches(batches)):
            raise NoLockstepError
        held = list(batches)
        if held:
            lockstep = Lockstep(self.model, self.layers, self.run, self._settle, self.meetings.size)
            lockstep.measure(held, [self._groups(batch) for batch in held])

    def _run_passes(self, batches: Iterable[Any]) -> None:
        calls: list[str] = []  # the layers in the order of their calls, of the first batch
        settled, length = 0, None
        while settled < len(calls) or length is None:
            seen, pool = 0, PooledMoments()
            for batch in batches:
                if not calls:
                    self._run(batch, {name: self._recording_hook(name, calls) for name in self.layers})
                if calls:
                    name = calls[settled]
                    # A layer that is called several times is measured at each call, over all its calls up to there.
                    hook = self._pooling_hook(pool, calls[: settled + 1].count(name), self._groups(batch))
                    self._run(batch, {name: hook})
                seen += 1
            if length not in (None, seen):
                raise ValueError(
                    f"reestimate: the first pass over the data had {length} batches and a later one {seen}. Give a "
                    f"list, or an object that can be iterated repeatedly."
                )
            length = seen
            if calls:
                self._settle(calls[settled], pool)
                settled += 1

    def _groups(self, batch: Any) -> WeightGroups | None:
        return None if self.weights is None else group_by_weight(self.weights(batch))

    def _run(self, batch: Any, hooks: dict[str, Any]) -> None:
        with ExitStack() as stack:
            for name, hook in hooks.items():
                stack.callback(self.layers[name].register_forward_pre_hook(hook, with_kwargs=True).remove)
            stack.enter_context(suppress(StopForward))
            self.run(self.model, batch)

    def _settle(self, name: str, pool: PooledMoments) -> None:
        """Write the moments of a layer with which the layers after it are measured, those of a training forward."""
        pool = self.pools[name] = self._merged(name, pool)
        moments = pool.mean, normalizing_variance(self.layers[name], pool.var, pool.effective)
        write_finite_moments(self.layers, {name: moments})

    def _merged(self, name: str, pool: PooledMoments) -> PooledMoments:
        pool = self.meetings.pool(name, pool)
        if pool.count < 2:
            values = "one value" if pool.count else "no value"
            raise ValueError(
                f"reestimate: all batches together have {values} per channel with a weight above 0 at layer {name!r}, "
                f"and a variance needs two or more. Give more samples."
            )
        return pool

    def _recording_hook(self, name: str, calls: list[str]) -> Any:
        return lambda layer, args, kwargs: calls.append(name)

    def _pooling_hook(self, pool: PooledMoments, calls: int, groups: WeightGroups | None) -> Any:
        remaining = calls

        def hook(layer: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal remaining
            pool.add_input(layer, first_input(args, kwargs), groups)
            remaining -= 1
            if not remaining:
                raise StopForward

        return hook

    def _own_moments_hook(self, name: str, pools: dict[str, PooledMoments], groups: WeightGroups | None) -> Any:
        """Return a hook that adds an input to the layer's pool, and sets the layer's moments to those of this input."""

        def hook(layer: nn.Module, args: Any, kwargs: Any) -> None:
            own = PooledMoments()
            own.add_input(layer, first_input(args, kwargs), groups)
            if own.count == 1:
                raise ValueError(
                    f"reestimate: a batch has one value per channel at layer {name!r}, and its variance needs two or "
                    f"more. With exact=False, each batch is normalized with its own moments: give larger batches."
                )
            if own.count:
                moments = own.mean, normalizing_variance(layer, own.var, own.effective)
                write_moments({name: layer}, {name: moments})
            pools.setdefault(name, PooledMoments()).merge(own)

        return hook


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode, except that instance norms with running statistics normalize instances, as in training."""
    with evaluation_mode(model), ExitStack() as frozen:
        for module in model.modules():
            if isinstance(module, _InstanceNorm) and module.track_running_stats:
                frozen.enter_context(frozen_stats(module))
                module.training = True
        yield
