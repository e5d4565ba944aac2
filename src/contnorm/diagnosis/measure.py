"""Measure the cross-task normalization effect of a model: how much forgetting is caused by its running moments alone.

Three sets of moments are compared in every layer with running moments: the running ones, the exact ones of each task's
data, and the exact ones of all tasks' data (the oracle's, BN*). Exact moments are estimated layer by layer, with those
of the previous layers already set. Accuracy is measured with all three; weights do not change. The result and the
scaling of distances are in `contnorm.diagnosis.result`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from contnorm.checks import check_model
from contnorm.diagnosis.result import Diagnosis, Distance, LayerDistances
from contnorm.moments.freeze import evaluation_mode
from contnorm.moments.pooling import moment_layers
from contnorm.moments.reestimate import Call, LayerMoments, call_on_first_element, reestimate, to_model_device

__all__ = ["ByTask", "diagnose"]

ByTask = Sequence[Iterable[Any]] | Mapping[Any, Iterable[Any]]
Predict = Callable[[nn.Module, Any, Any], Tensor]
Moments = tuple[Tensor, Tensor]


def diagnose(
    model: nn.Module,
    batches_by_task: ByTask,
    *,
    test_by_task: ByTask | None = None,
    learned: Sequence[float] | Mapping[Any, float] | None = None,
    predict: Predict | None = None,
    call: Call | None = None,
) -> Diagnosis:
    """Measure how much of a model's forgetting is caused by its running moments, by task and by layer.

    The model runs in evaluation mode without gradients. Afterwards its parameters, moments, modes and hooks are
    bit-identical to those before, and so are the random generators of Python and torch. Frozen moments are measured
    like others, and stay frozen.

    Args:
        model: Any model with norm layers that have running moments, of torch or of this package.
        batches_by_task: For each task, in training order, an iterable of batches ``(x, y)`` that can be iterated
            repeatedly; or a mapping from names of tasks to such iterables. The moments are estimated from these.
        test_by_task: Data for measuring accuracy, in the same form. By default accuracy is measured on
            ``batches_by_task``, and the sentence says so.
        learned: Accuracy on each task right after it was learned, in percent. It is needed to compute forgetting and
            the share of it that re-estimation recovers.
        predict: Function ``predict(model, x, task)`` that returns the classes of ``x``, by default
            ``model(x).argmax(1)``; needed for one head per task, for example. ``task`` is the index of the task, or its
            key in the mapping.
        call: Function ``call(model, batch)`` that runs the model on a batch, by default ``model(x)``.

    Returns:
        The diagnosis: ``.sentence``, ``.table()``, ``.draw(path)``, ``.as_dict()``, and the numbers.

    Raises:
        ValueError: If a task has no data, if moments are not finite (NaN in the data, or a diverged model), or if
            `reestimate` can't determine a layer's moments.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(2, affine=False))  # the larger feature is the class
        >>> model[0].running_mean.copy_(torch.tensor([5.0, 0.0]))  # simulated drift from 0
        tensor([5., 0.])
        >>> x = torch.tensor([[1.0, -1.0], [-1.0, 1.0]] * 5)
        >>> tasks = [[(x, x.argmax(1))], [(2 * x, x.argmax(1))]]
        >>> print(diagnose(model, tasks, test_by_task=tasks, learned=[100.0, 50.0]).sentence)
        Re-estimated moments recover 50.0 of the 50.0 points forgotten; the last task gains 50.0 points; layer ...
    """
    check_model(model, "diagnose")
    train = _named(batches_by_task)
    test = train if test_by_task is None else _named(test_by_task)
    before = None if learned is None else _named(learned)
    for name, other in (("test_by_task", test), ("learned", before)):
        if other is not None and set(other) != set(train):
            raise ValueError(f"diagnose: {name} has the tasks {list(other)} and batches_by_task {list(train)}.")

    def accuracy(task: Any) -> float:
        return _accuracy(model, test[task], task, predict, call or call_on_first_element)

    eps = {name: float(getattr(layer, "eps", 0.0)) for name, layer in moment_layers(model, "lift").items()}
    devices = {t.device.index for t in (*model.parameters(), *model.buffers()) if t.is_cuda}
    with (
        ExitStack() as restored,
        torch.no_grad(),
        torch.random.fork_rng(devices=sorted(devices)),
        evaluation_mode(model),
    ):
        restored.callback(random.setstate, random.getstate())
        running = tuple(map(accuracy, train))
        oracle, own = running, running
        layers: tuple[LayerDistances, ...] = ()
        if eps:  # else no layer has moments, so all three accuracies are equal
            by_task: list[tuple[float, dict[str, LayerMoments]]] = []
            for task, batches in train.items():
                with reestimate(model, batches, call=call, frozen="lift") as done:
                    by_task.append((accuracy(task), done.moments))
            with reestimate(model, _Chained(list(train.values())), call=call, frozen="lift") as done:
                oracle = tuple(map(accuracy, train))
            own = tuple(value for value, _ in by_task)
            moments = [measured for _, measured in by_task]
            layers = tuple(_distances(name, m, moments, eps[name]) for name, m in done.moments.items())
    past = None if before is None else tuple(float(before[task]) for task in train)
    held_out = test_by_task is not None
    return Diagnosis(type(model).__name__, tuple(map(str, train)), layers, running, oracle, own, past, held_out)


def _named(values: Sequence[Any] | Mapping[Any, Any]) -> dict[Any, Any]:
    return dict(values) if isinstance(values, Mapping) else dict(enumerate(values))


class _Chained:
    """Batches of all tasks, one task after the other."""

    def __init__(self, tasks: Sequence[Iterable[Any]]) -> None:
        self.tasks = tasks

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.tasks)

    def __len__(self) -> int:
        return sum(map(len, self.tasks))  # type: ignore[arg-type]


def _accuracy(model: nn.Module, batches: Iterable[Any], task: Any, predict: Predict | None, call: Call) -> float:
    """Return the accuracy on one task in percent, with the current moments of the model."""
    correct = total = 0
    for batch in batches:
        if predict is not None:
            predictions = predict(model, to_model_device(model, batch[0]), task)
        else:
            predictions = call(model, batch).argmax(1)  # type: ignore[attr-defined]
        y = batch[1]
        if predictions.shape != y.shape:
            raise ValueError(
                f"diagnose: task {task!r}: labels have shape {tuple(y.shape)} and predictions "
                f"{tuple(predictions.shape)}. Give predict=, which returns the class of every label."
            )
        correct += int((predictions == y.to(predictions.device)).sum())
        total += y.numel()
    if not total:
        raise ValueError(f"diagnose: task {task!r} has no samples. Give a list of batches (x, y) for each task.")
    return 100 * correct / total


def _distances(
    name: str, layer_moments: LayerMoments, by_task: Sequence[Mapping[str, LayerMoments]], eps: float
) -> LayerDistances:
    running, oracle = (layer_moments.old_mean, layer_moments.old_var), (layer_moments.new_mean, layer_moments.new_var)
    tasks = [(m[name].new_mean, m[name].new_var) if name in m else None for m in by_task]
    spread = oracle[1].double() + eps

    def distances(to: Moments) -> tuple[Distance | None, ...]:
        return tuple(None if moments is None else _distance(moments, to, spread) for moments in tasks)

    return LayerDistances(name, _distance(running, oracle, spread), distances(running), distances(oracle))


def _distance(a: Moments, b: Moments, spread: Tensor) -> Distance:
    mean, var = (float((x.double() - y.double()).abs().sum()) for x, y in zip(a, b, strict=True))
    return Distance(mean, var, _over(mean, spread.sqrt()), _over(var, spread))


def _over(distance: float, spread: Tensor) -> float:
    scale = float(spread.sum())
    return distance / scale if scale != 0 else 0.0  # a layer with constant input and eps=0 has no scale
