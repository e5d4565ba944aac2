"""Measure the cross-task normalization effect of a model: how much forgetting is caused by its running moments alone.

Three sets of moments are compared in every layer with running moments: the running ones, the exact ones of each task's
data, and the exact ones of all tasks' data (the oracle's, BN*). Exact moments are estimated layer by layer, with those
of the previous layers already set. Accuracy is measured with all three; weights do not change. The result and the
scaling of distances are in `contnorm.diagnosis.result`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from contnorm.checks import check_model
from contnorm.diagnosis.result import Diagnosis, Distance, LayerDistances
from contnorm.moments.batches import Call, call_on_first_element, to_model_device
from contnorm.moments.freeze import evaluation_mode
from contnorm.moments.reestimate import (
    LayerMoments,
    NonFiniteMomentsError,
    Reestimated,
    moment_layers,
    reestimate,
)

__all__ = ["diagnose"]

Batches = Iterable[Any]
ByTask = Sequence[Batches] | Mapping[Any, Batches]
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

    The model runs in evaluation mode without gradients. Afterwards its parameters, buffers, modes and hooks are
    bit-identical to those before, and so are the random generators of Python and torch.

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
        TypeError: If batches can be iterated only once.
        ValueError: If a task has no data, if moments are not finite (NaN in the data, or a diverged model), if
            `reestimate` can't determine a layer's moments or they are frozen, or if the model has an unknown layer with
            running moments.

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
    train = _tasks(batches_by_task, "batches_by_task")
    test = train if test_by_task is None else _tasks(test_by_task, "test_by_task")
    if list(train) != list(test):
        raise ValueError(f"diagnose: test_by_task has the tasks {list(test)} and batches_by_task {list(train)}.")
    accuracy_learned = None if learned is None else _learned(learned, list(train))
    probe = _Probe(model, test, predict, call or call_on_first_element)
    eps = {name: float(getattr(layer, "eps", 0.0)) for name, layer in moment_layers(model).items()}
    with torch.no_grad(), _state_restored(model):
        result = _measure(probe, train, eps, call)
    return Diagnosis(
        model=type(model).__name__,
        tasks=tuple(map(str, train)),
        layers=result.layers,
        running=result.running,
        oracle=result.oracle,
        own=result.own,
        learned=accuracy_learned,
        held_out=test_by_task is not None,
    )


@dataclass(frozen=True)
class _Measured:
    layers: tuple[LayerDistances, ...]
    running: tuple[float, ...]
    oracle: tuple[float, ...]
    own: tuple[float, ...]


def _measure(
    probe: _Probe, train: dict[Any, _RepeatableBatches], eps: dict[str, float], call: Call | None
) -> _Measured:
    _check_running(probe.model)
    running = tuple(map(probe.accuracy, train))
    if not eps:  # no layer has moments, so all three accuracies are equal
        return _Measured((), running, running, running)
    own: list[float] = []
    by_task: list[dict[str, LayerMoments]] = []
    for task, batches in train.items():
        with _reestimate_task(probe.model, batches, call, task) as one_task:
            own.append(probe.accuracy(task))
            by_task.append(one_task.moments)
    with reestimate(probe.model, _AllTasks(list(train.values())), call=call) as all_tasks:
        oracle = tuple(map(probe.accuracy, train))
    layers = tuple(_distances(name, m, by_task, eps[name]) for name, m in all_tasks.moments.items())
    return _Measured(layers, running, oracle, tuple(own))


def _check_running(model: nn.Module) -> None:
    """Reject running moments that are not finite: predictions and distances would be meaningless."""
    for name, layer in moment_layers(model).items():
        if not _finite(layer.running_mean, layer.running_var):
            raise ValueError(
                f"diagnose: the running moments of layer {name!r} are not finite: the model has diverged. Use a "
                f"model with finite moments."
            )


def _reestimate_task(model: nn.Module, batches: Batches, call: Call | None, task: Any) -> Reestimated:
    """Call `reestimate` on the data of one task; an error about non-finite moments names the task."""
    try:
        return reestimate(model, batches, call=call)
    except NonFiniteMomentsError as error:
        raise ValueError(
            f"diagnose: task {task!r}: the moments of its data at layer {error.layer!r} are not finite. Check its "
            f"batches for NaN, infinite values, and values too large for the model's precision."
        ) from error


def _finite(*moments: Any) -> bool:
    return all(bool(moment.isfinite().all()) for moment in moments)


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


class _Probe:
    """Measure accuracy with the current moments of the model."""

    def __init__(
        self, model: nn.Module, test: dict[Any, _RepeatableBatches], predict: Predict | None, call: Call
    ) -> None:
        self.model, self.test, self.predict, self.call = model, test, predict, call

    def accuracy(self, task: Any) -> float:
        """Accuracy on one task in percent."""
        correct = total = 0
        self.model.eval()
        for batch in self.test[task]:
            predictions, y = self._predictions(batch, task), batch[1]
            if not isinstance(predictions, Tensor):
                raise TypeError(
                    f"diagnose: task {task!r}: predict= returned a {type(predictions).__name__}. It must return a "
                    f"tensor of classes, one for each label."
                )
            if predictions.shape != y.shape:
                raise ValueError(
                    f"diagnose: task {task!r}: labels have shape {tuple(y.shape)} and predictions "
                    f"{tuple(predictions.shape)}. Give predict=, which returns the class of every label."
                )
            correct += int((predictions == y.to(predictions.device)).sum())
            total += y.numel()
        if not total:
            raise ValueError(f"diagnose: task {task!r} has no samples. Give at least one batch of each task.")
        return 100 * correct / total

    def _predictions(self, batch: Any, task: Any) -> Tensor:
        self._check_batch(batch, task)
        if self.predict is not None:
            return self.predict(self.model, to_model_device(self.model, batch[0]), task)
        scores = self.call(self.model, batch)
        if not isinstance(scores, Tensor) or scores.dim() < 2:
            what = f"a tensor of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
            raise TypeError(
                f"diagnose: the model returned {what} instead of scores by class in dimension 1. Give predict=, "
                f"which returns the classes."
            )
        return scores.argmax(1)

    def _check_batch(self, batch: Any, task: Any) -> None:
        expected = "expected (x, y) with a tensor of classes y"
        if isinstance(batch, Tensor):
            raise TypeError(
                f"diagnose: task {task!r}: a batch is a Tensor; {expected}. Give a list of batches or a DataLoader "
                f"for each task, also for a single task."
            )
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise TypeError(
                f"diagnose: task {task!r}: a batch is a {type(batch).__name__}; {expected}. Give a list of such "
                f"batches or a DataLoader for each task; x may be anything that predict= or call= accepts."
            )
        if not isinstance(batch[1], Tensor):
            raise TypeError(
                f"diagnose: task {task!r}: the labels of a batch are a {type(batch[1]).__name__}; {expected}. "
                f"Use torch.as_tensor(y)."
            )


class _RepeatableBatches:
    """Batches of one task; raises an error if a later pass has another number of batches than the first."""

    def __init__(self, task: Any, batches: Batches, argument: str) -> None:
        where = f"diagnose: {argument}: task {task!r}"
        hint = "Give a list, a DataLoader, or another object that can be iterated repeatedly."
        if isinstance(batches, Iterator):
            kind = type(batches).__name__
            raise TypeError(f"{where}: its batches are a one-shot iterator ({kind}), but are read repeatedly. {hint}")
        if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
            raise TypeError(f"{where}: its batches are a {type(batches).__name__}. Give a list of batches: [(x, y)].")
        self.batches, self.first_count = batches, -1
        self.error = f"{where}: the first pass over its data had {{}} batches and a later one {{}}. {hint}"

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for batch in self.batches:
            count += 1
            yield batch
        if self.first_count not in (-1, count):
            raise ValueError(self.error.format(self.first_count, count))
        self.first_count = count


@dataclass(frozen=True)
class _AllTasks:
    """Batches of all tasks, one task after the other."""

    tasks: list[_RepeatableBatches]

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.tasks)


def _tasks(batches_by_task: ByTask, name: str) -> dict[Any, _RepeatableBatches]:
    if isinstance(batches_by_task, Iterator | Tensor) or not isinstance(batches_by_task, Iterable):
        raise TypeError(
            f"diagnose: {name} is a {type(batches_by_task).__name__}. Give a list with an entry for each task, each a "
            f"list of batches (x, y) or a DataLoader, or a mapping from names of tasks to these."
        )
    named = batches_by_task if isinstance(batches_by_task, Mapping) else dict(enumerate(batches_by_task))
    if not named:
        raise ValueError(f"diagnose: {name} is empty. Give the batches of at least one task.")
    return {task: _RepeatableBatches(task, batches, name) for task, batches in named.items()}


def _learned(learned: Sequence[float] | Mapping[Any, float], tasks: list[Any]) -> tuple[float, ...]:
    if isinstance(learned, str) or not isinstance(learned, Iterable):
        raise TypeError(f"diagnose: learned={learned!r} must be a list with one accuracy for each task, in percent.")
    named = learned if isinstance(learned, Mapping) else dict(enumerate(learned))
    if not isinstance(learned, Mapping) and len(learned) == len(tasks):
        named = dict(zip(tasks, learned, strict=True))
    if set(named) != set(tasks):
        raise ValueError(f"diagnose: learned has {list(named)} and the tasks are {tasks}. Give one accuracy for each.")
    try:
        accuracies = tuple(float(named[task]) for task in tasks)
    except (TypeError, ValueError):
        raise TypeError(f"diagnose: learned={list(named.values())}: accuracies must be numbers, in percent.") from None
    if not all(0 <= value <= 100 for value in accuracies) or 0 < max(accuracies) <= 1:
        raise ValueError(f"diagnose: learned={list(accuracies)}: accuracies must be in percent, 0 to 100.")
    return accuracies


@contextmanager
def _state_restored(model: nn.Module) -> Iterator[None]:
    """Restore modes, buffers and random generators on exit, including generators that data loading uses."""
    buffers = [(m, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    devices = {t.device.index for t in (*model.parameters(), *model.buffers()) if t.is_cuda}
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=sorted(devices)), evaluation_mode(model):
            yield
    finally:
        random.setstate(state)
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer  # restore the object too: forward may have replaced it
            if not torch.equal(buffer, value):
                buffer.copy_(value)
