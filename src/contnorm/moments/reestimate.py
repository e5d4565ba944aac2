"""BN*: exact running moments of a model for given data.

They are defined as the buffers after a single training-mode forward over all the data with momentum 1. Such a forward
needs all the data in one batch; this implementation does not. It reads the batches once, and they advance together from
norm layer to norm layer (`lockstep`).

Where the batches do not fit into memory together, it measures the layers depth by depth, with the same result: the
exact moments of a layer are pooled over all batches, while the layers before it normalize with the exact moments
measured before. The depth of a layer is the number of norm layers on the longest path from the input to it. It is
determined by tracing the data flow of one forward pass, so that layers on parallel branches share a pass. Each pass
stops at the last layer that it measures.

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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from contnorm.checks import check_model
from contnorm.moments.batches import (
    Call,
    call_on_batch,
    call_on_first_element,
    check_batches,
    number_of_batches,
    to_model_device,
)
from contnorm.moments.buffers import (
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
from contnorm.moments.depth import trace_depths
from contnorm.moments.freeze import evaluation_mode, frozen_stats, released_stats
from contnorm.moments.lockstep import Lockstep, NoLockstepError, fits_lockstep
from contnorm.moments.pooling import PooledMoments, StopForward, own_moments_hook, pooling_hook
from contnorm.moments.processes import Meetings, check_process_group, pool_over_processes
from contnorm.moments.progress import PassProgress, check_progress, show_progress
from contnorm.moments.weights import BatchWeights, WeightGroups, Weights

if TYPE_CHECKING:
    from rich.console import Console

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
    progress: bool | Console = False,
    process_group: Any = None,
) -> Reestimated:
    """Set all running moments of a model to the exact moments of the given data (the paper's BN*), layer by layer.

    The model runs in evaluation mode without gradients, once on each batch: the batches advance together from norm
    layer to norm layer. If they do not fit into half of the free memory together, if their number is not known
    (``len``), if a layer is called several times in a forward pass (its calls are pooled), or if batches or processes
    call the layers in different orders, the model runs once per depth of norm layers instead, and memory use does not
    grow with the data. The moments are the same. Gradients, modes, batch counters and all other state stay unchanged.

    Args:
        model: The model, with norms of torch or of this package.
        batches: Batches that can be iterated repeatedly: a list, a DataLoader, a dataset of tensors; with
            ``exact=False`` any iterable. If a batch is a tuple or list, its first element is passed to the model. If it
            is a mapping, as in transformers, the model is called as ``model(**batch)``, without labels (``labels``,
            ``label``, ``label_ids``, unless ``forward`` requires them) and without keys that ``forward`` does not take.
        weights: A function ``weights(batch)`` that returns the weight of each sample of a batch, a tensor of shape
            (N,), or one number, the weight of each of its samples; or a sequence of such numbers, one for each batch.
            Weights are numbers from 0, and only their ratios matter. Default: all samples have the same weight.
        call: A function ``call(model, batch)`` that runs the model on a batch, if the default does not apply.
        exact: False for approximate moments in one pass over a stream of any length, one batch in memory at a time.
            Each batch is then normalized with its own moments, as by ``torch.optim.swa_utils.update_bn``, but means and
            variances of the batches are combined to those of all data. Moments of layers without another such norm
            before them are exact; those of later layers depend on the batch size. A layer that is called several times
            normalizes each call with the moments of that call, and all its calls are pooled.
        frozen: What to do with layers whose moments are frozen (`freeze_stats`): ``"raise"`` an error; ``"lift"`` to
            set their moments too and leave them frozen; ``"keep"`` to leave their moments, so that later layers are
            measured with them.
        progress: Whether to show a progress bar; or the rich console to show it on. Without rich, lines on stderr.
        process_group: The processes of ``torch.distributed`` whose data is pooled, such as
            ``torch.distributed.group.WORLD``. Each of them calls this function with its own batches, and all get the
            same moments. By default, the batches of this process alone are used.

    Returns:
        The old and new moments. Used as a context manager, it restores the old moments on exit.

    Raises:
        TypeError: For a generator, which can be iterated only once, unless ``exact=False``; for an object that holds
            no batches, for weights that are neither a function nor numbers, and for a mapping whose keys do not fit
            the model's forward.
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

        With weights of batches, here so that the second one counts three times:

        >>> with reestimate(model, data, weights=[1, 3]):
        ...     print(model[0].running_mean)
        tensor([2.7500])

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
    check_batches(batches, exact)
    check_progress(progress)
    check_process_group(process_group)
    batch_weights = None if weights is None else BatchWeights(weights, batches)
    layers = _targets(check_model(model, "reestimate"), frozen)
    old = {name: (mean.clone(), var.clone()) for name, layer in layers.items() for mean, var in [moment_buffers(layer)]}
    run = call or call_on_batch
    with released_stats(layers.values()):  # hooks of frozen layers hand out copies of the moments
        try:
            with torch.no_grad(), _in_evaluation(model), show_progress(progress, "Re-estimating moments") as shown:
                reached = _measure_all(_Passes(model, layers, run, batch_weights, shown, process_group), batches, exact)
        except BaseException:
            write_moments(layers, old)
            raise
    return Reestimated(reached, {name: old[name] for name in reached})


def _targets(model: nn.Module, frozen: Frozen) -> dict[str, nn.Module]:
    layers = moment_layers(model, frozen)
    if not layers:
        with_moments = "norm layer with running moments" + (" that are not frozen" if frozen == "keep" else "")
        raise ValueError(
            f"reestimate: {type(model).__name__} has no {with_moments}, so there is nothing to "
            f"estimate. See contnorm.summarize(model)."
        )
    return layers


def _measure_all(plan: _Passes, batches: Iterable[Any], exact: bool) -> dict[str, nn.Module]:
    """Measure and write the moments of all layers; return the layers that the data reached."""
    layers = plan.layers
    pooled = plan.sweep(batches) if exact else plan.approximate(batches)
    if pooled is None:
        pooled = {}
        while plan.depth is not None:
            pooled |= plan.measure(batches)
    write_finite_moments(
        layers,
        {name: (pool.mean, stored_variance(layers[name], pool.var, pool.effective)) for name, pool in pooled.items()},
    )
    return {name: layers[name] for name in pooled}


class _Passes:
    """Passes over the data, one for each depth. The first batch of the first pass is also used to trace the depths."""

    def __init__(
        self,
        model: nn.Module,
        layers: dict[str, nn.Module],
        run: Call,
        weights: BatchWeights | None,
        progress: PassProgress,
        group: Any,
    ) -> None:
        self.model, self.layers, self.run, self.weights, self.progress = model, layers, run, weights, progress
        self.group = group
        self.calls: dict[str, list[int]] = {}
        self.depth: int | None = 0
        self.batches: int | None = None  # batches of the first pass
        self.done = 0  # batches of all passes

    def sweep(self, batches: Iterable[Any]) -> dict[str, PooledMoments] | None:
        """Measure and write the moments of all layers in one sweep; return None if that is not possible."""
        try:
            with Meetings(self.group) as meetings:
                return self._run_sweep(batches, meetings)
        except (NoLockstepError, torch.OutOfMemoryError):
            self.batches, self.done = None, 0
            return None

    def _run_sweep(self, batches: Iterable[Any], meetings: Meetings) -> dict[str, PooledMoments]:
        if not fits_lockstep(number_of_batches(batches)):
            raise NoLockstepError
        held = list(batches)
        self._check_batches(len(held))
        groups = [None if self.weights is None else self.weights.groups(batch, i) for i, batch in enumerate(held)]
        pools = Lockstep(
            self.model, self.layers, self.run, self._check_counts, self._show_sweep, meetings.pool, meetings.size
        ).measure(held, groups)
        if len(pools) < len(self.layers):  # raises an error if the moments of a layer are used without its call
            trace_depths(self.model, self.layers, held[0], self.run)
        return pools

    def approximate(self, batches: Iterable[Any]) -> dict[str, PooledMoments]:
        """Pool the inputs of all layers over the data of all processes in one pass, each batch with its own moments."""
        pools = pool_over_processes(lambda: self._run_once(batches), self.group)
        self._check_counts(pools)
        return pools

    def _run_once(self, batches: Iterable[Any]) -> dict[str, PooledMoments]:
        pools: dict[str, PooledMoments] = {}
        seen, length = 0, number_of_batches(batches)
        for batch in batches:
            groups = None if self.weights is None else self.weights.groups(batch, seen)
            if groups is None or any(weight for weight, _ in groups):  # a batch without weight adds nothing
                first = not pools
                self._pool_with_own_moments(batch, pools, groups)
                if first and len(pools) < len(self.layers):  # raises an error if moments are used without a call
                    trace_depths(self.model, self.layers, batch, self.run)
            seen += 1
            self.progress.update(seen, length, 1)
        self._check_batches(seen)
        self.progress.update(seen, seen, 1)
        if not pools:
            raise ValueError(f"reestimate: no data reached a layer: all {seen} batches have the weight 0.")
        return pools

    def _pool_with_own_moments(self, batch: Any, pools: dict[str, PooledMoments], groups: WeightGroups | None) -> None:
        with ExitStack() as hooks:
            for name, layer in self.layers.items():
                hook = own_moments_hook(name, pools, groups)
                hooks.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
            self.run(self.model, batch)

    def _show_sweep(self) -> None:
        self.done += 1
        self.progress.update(self.done, self.batches, len(self.layers))

    @property
    def passes(self) -> int:
        return len({depth for depths in self.calls.values() for depth in depths})

    def measure(self, batches: Iterable[Any]) -> dict[str, PooledMoments]:
        """Pool the inputs of the layers at the current depth over the data of all processes; write their moments."""
        pools = pool_over_processes(lambda: self._run_pass(batches), self.group)
        self._check_counts(pools)
        # The layers before the next depth must normalize with the variance of a training-mode forward.
        write_finite_moments(
            self.layers,
            {name: (p.mean, normalizing_variance(self.layers[name], p.var, p.effective)) for name, p in pools.items()},
        )
        deeper = {depth for depths in self.calls.values() for depth in depths if depth > (self.depth or 0)}
        self.depth = min(deeper, default=None)
        return pools

    def _run_pass(self, batches: Iterable[Any]) -> dict[str, PooledMoments]:
        """Run one pass over the data of this process."""
        pools: dict[str, PooledMoments] = {}
        seen, length = 0, number_of_batches(batches)
        for batch in batches:
            if not self.calls:
                self.calls = trace_depths(self.model, self.layers, batch, self.run)
            # A layer with calls at several depths is measured at each of them, over all its calls up to that depth.
            due = {name: sum(d <= self.depth for d in ds) for name, ds in self.calls.items() if self.depth in ds}
            pools = pools or {name: PooledMoments() for name in due}
            self._pool(batch, seen, pools, due)
            seen += 1
            self.done += 1
            self.progress.update(self.done, length or self.batches, self.passes)
        self._check_batches(seen)
        if length is None and self.done == seen:
            self.progress.update(self.done, seen, self.passes)
        return pools

    def _pool(self, batch: Any, index: int, pools: dict[str, PooledMoments], due: dict[str, int]) -> None:
        calls_remaining = dict(due)
        groups = None if self.weights is None else self.weights.groups(batch, index)
        with ExitStack() as hooks:
            for name in due:
                hook = pooling_hook(name, pools[name], calls_remaining, groups)
                hooks.callback(self.layers[name].register_forward_pre_hook(hook, with_kwargs=True).remove)
            hooks.enter_context(suppress(StopForward))
            self.run(self.model, batch)

    def _check_batches(self, seen: int) -> None:
        if self.batches is None and seen == 0:
            raise ValueError("reestimate: batches is empty. Give at least one batch of data.")
        if self.batches is not None and seen != self.batches:
            raise ValueError(
                f"reestimate: the first pass over the data had {self.batches} batches and a later one {seen}. Every "
                f"pass must read the same data; give a list, or an object that can be iterated repeatedly."
            )
        self.batches = seen
        if self.weights is not None:
            self.weights.check_count(seen)

    def _check_counts(self, pools: dict[str, PooledMoments]) -> None:
        for name, pool in pools.items():
            if pool.count == 0:
                or_weights = "" if self.weights is None else " or have the weight 0"
                raise ValueError(
                    f"reestimate: no data reached layer {name!r}: all {self.batches} batches are empty{or_weights}."
                )
            if pool.count == 1:
                with_weight = "" if self.weights is None else " with a weight above 0"
                raise ValueError(
                    f"reestimate: all batches together have one value per channel{with_weight} at layer {name!r}, and "
                    f"a variance needs two or more. Give more samples."
                )


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode, except that instance norms with running statistics normalize instances, as in training."""
    with evaluation_mode(model), ExitStack() as frozen:
        for module in model.modules():
            if isinstance(module, _InstanceNorm) and module.track_running_stats:
                frozen.enter_context(frozen_stats(module))
                module.training = True
        yield
