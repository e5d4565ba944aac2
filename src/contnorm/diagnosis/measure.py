"""The cross-task normalization effect of a model: how much of what it forgot lies in its running moments alone.

Three sets of moments are compared, in every layer that keeps any: the running ones as they are, the exact ones of each
task's data, and the exact ones of all tasks' data (the oracle's, BN*), each estimated layer by layer with those of the
layers before it in place. Accuracy is measured with all three; no weight is touched. What comes of it is in
`contnorm.diagnosis.result`, with how distances are scaled.
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
from contnorm.moments.modes import modes_restored
from contnorm.moments.reestimate import (
    Call,
    LayerMoments,
    NonFiniteMomentsError,
    Reestimated,
    call_with_first,
    moment_layers,
    on_model,
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
    """Measure how much of a model's forgetting lies in its running moments, by task and by layer.

    The model runs in evaluation mode without gradient. It is left as it was found, bit for bit: parameters, buffers,
    modes and hooks; and so are the random generators of Python and torch.

    Args:
        model: Any model with norm layers that keep running moments, torch's or ours.
        batches_by_task: For each task, in the order they were learned, its batches ``(x, y)``, which can be gone over
            again and again; or a mapping from names of tasks to them. The moments are estimated from these.
        test_by_task: The same for the data that accuracy is measured on; the very data of the moments by default, and
            the sentence then says so.
        learned: The accuracy on each task when it had just been learned, in percent. With it, what is forgotten is
            known, and the share of that which re-estimation recovers.
        predict: The classes of ``x``, ``predict(model, x, task)``, where they are not ``model(x).argmax(1)``: a head
            for each task, say. ``task`` is its number, or its key in the mapping.
        call: How to run the model on a batch, ``call(model, batch)``, where ``model(x)`` is not right.

    Returns:
        What was found: ``.sentence``, ``.table()``, ``.draw(path)``, ``.as_dict()``, and the numbers.

    Raises:
        TypeError: For batches that can be gone over only once.
        ValueError: Where a task has no data, where moments are not finite (NaN among the data, or a model that has
            diverged), where `reestimate` can't tell a layer's moments or finds them frozen, or where the model has an
            unknown layer with running moments.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(2, affine=False))  # the larger feature is the class
        >>> model[0].running_mean.copy_(torch.tensor([5.0, 0.0]))  # has drifted from 0
        tensor([5., 0.])
        >>> x = torch.tensor([[1.0, -1.0], [-1.0, 1.0]] * 5)
        >>> tasks = [[(x, x.argmax(1))], [(2 * x, x.argmax(1))]]
        >>> print(diagnose(model, tasks, test_by_task=tasks, learned=[100.0, 50.0]).sentence)
        Re-estimated statistics recover 50.0 of the 50.0 points forgotten; layer 0's mean has drifted most.
    """
    check_model(model, "diagnose")
    train = _tasks(batches_by_task, "batches_by_task")
    test = train if test_by_task is None else _tasks(test_by_task, "test_by_task")
    if list(train) != list(test):
        raise ValueError(f"diagnose: test_by_task has the tasks {list(test)} and batches_by_task {list(train)}.")
    before = None if learned is None else _learned(learned, list(train))
    probe = _Probe(model, test, predict, call or call_with_first)
    eps = {name: float(getattr(layer, "eps", 0.0)) for name, layer in moment_layers(model).items()}
    with torch.no_grad(), _left_as_found(model):
        found = _measure(probe, train, eps, call)
    return Diagnosis(
        model=type(model).__name__,
        tasks=tuple(map(str, train)),
        layers=found.layers,
        running=found.running,
        oracle=found.oracle,
        own=found.own,
        learned=before,
        held_out=test_by_task is not None,
    )


@dataclass(frozen=True)
class _Measured:
    layers: tuple[LayerDistances, ...]
    running: tuple[float, ...]
    oracle: tuple[float, ...]
    own: tuple[float, ...]


def _measure(probe: _Probe, train: dict[Any, _Again], eps: dict[str, float], call: Call | None) -> _Measured:
    _check_running(probe.model)
    running = tuple(map(probe.accuracy, train))
    if not eps:  # no moments: the same whatever data they would be of
        return _Measured((), running, running, running)
    own: list[float] = []
    by_task: list[dict[str, LayerMoments]] = []
    for task, batches in train.items():
        with _reestimate_task(probe.model, batches, call, task) as one_task:
            own.append(probe.accuracy(task))
            by_task.append(one_task.moments)
    with reestimate(probe.model, _All(list(train.values())), call=call) as all_tasks:
        oracle = tuple(map(probe.accuracy, train))
    layers = tuple(_distances(name, m, by_task, eps[name]) for name, m in all_tasks.moments.items())
    return _Measured(layers, running, oracle, tuple(own))


def _check_running(model: nn.Module) -> None:
    """Refuses running moments of no number: with them every answer is the first class, and distances are nothing."""
    for name, layer in moment_layers(model).items():
        if not _finite(layer.running_mean, layer.running_var):
            raise ValueError(
                f"diagnose: the running moments of layer {name!r} are not finite: the model has diverged, or met NaN "
                f"or infinite values in training. Nothing can be said of what it forgot."
            )


def _reestimate_task(model: nn.Module, batches: Batches, call: Call | None, task: Any) -> Reestimated:
    """`reestimate` from the data of one task, whose name an error about non-finite moments gives."""
    try:
        return reestimate(model, batches, call=call)
    except NonFiniteMomentsError as error:
        raise ValueError(
            f"diagnose: task {task!r}: the moments of its data at layer {error.layer!r} are not finite. Look for NaN "
            f"and infinite values in its batches, and for values too large for the model's precision."
        ) from error


def _finite(*moments: Any) -> bool:
    return all(bool(moment.isfinite().all()) for moment in moments)


def _distances(
    name: str, found: LayerMoments, by_task: Sequence[Mapping[str, LayerMoments]], eps: float
) -> LayerDistances:
    running, oracle = (found.old_mean, found.old_var), (found.new_mean, found.new_var)
    tasks = [(m[name].new_mean, m[name].new_var) if name in m else None for m in by_task]
    spread = oracle[1].double() + eps

    def distances(to: Moments) -> tuple[Distance | None, ...]:
        return tuple(None if own is None else _distance(own, to, spread) for own in tasks)

    return LayerDistances(name, _distance(running, oracle, spread), distances(running), distances(oracle))


def _distance(a: Moments, b: Moments, spread: Tensor) -> Distance:
    mean, var = (float((x.double() - y.double()).abs().sum()) for x, y in zip(a, b, strict=True))
    return Distance(mean, var, _over(mean, spread.sqrt()), _over(var, spread))


def _over(distance: float, spread: Tensor) -> float:
    whole = float(spread.sum())
    return distance / whole if whole != 0 else 0.0  # a layer of constants and without eps has no scale


class _Probe:
    """Measures accuracy with the moments that are in place."""

    def __init__(self, model: nn.Module, test: dict[Any, _Again], predict: Predict | None, call: Call) -> None:
        self.model, self.test, self.predict, self.call = model, test, predict, call

    def accuracy(self, task: Any) -> float:
        """On one task, in percent."""
        right = total = 0
        self.model.eval()
        for batch in self.test[task]:
            answers, y = self._answers(batch, task), batch[1]
            if not isinstance(answers, Tensor):
                raise TypeError(
                    f"diagnose: task {task!r}: predict= gives a {type(answers).__name__}, and has to give a tensor of "
                    f"classes, one for each label."
                )
            if answers.shape != y.shape:
                raise ValueError(
                    f"diagnose: task {task!r}: labels of shape {tuple(y.shape)} and answers of shape "
                    f"{tuple(answers.shape)}. Give predict=, with predict(model, x, task) the class of every label."
                )
            right += int((answers == y.to(answers.device)).sum())
            total += y.numel()
        if not total:
            raise ValueError(f"diagnose: task {task!r} has no samples. Give at least one batch of each task.")
        return 100 * right / total

    def _answers(self, batch: Any, task: Any) -> Tensor:
        self._check_batch(batch, task)
        if self.predict is not None:
            return self.predict(self.model, on_model(self.model, batch[0]), task)
        scores = self.call(self.model, batch)
        if not isinstance(scores, Tensor) or scores.dim() < 2:
            what = f"a tensor of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
            raise TypeError(
                f"diagnose: the model gives {what}, and not a score for each class in dimension 1. Give predict=, with "
                f"predict(model, x, task) the classes."
            )
        return scores.argmax(1)

    def _check_batch(self, batch: Any, task: Any) -> None:
        needed = "and (x, y) is needed, y a tensor of classes"
        if isinstance(batch, Tensor):
            raise TypeError(
                f"diagnose: task {task!r}: a batch is a Tensor, {needed}. Give for each task a list of such batches, "
                f"or a DataLoader; of one task alone, a list with that one in it."
            )
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise TypeError(
                f"diagnose: task {task!r}: a batch is a {type(batch).__name__}, {needed}. Give for each task a list of "
                f"such batches, or a DataLoader that makes them; x may be anything that predict= or call= takes."
            )
        if not isinstance(batch[1], Tensor):
            raise TypeError(
                f"diagnose: task {task!r}: the labels of a batch are a {type(batch[1]).__name__}, {needed}. "
                f"torch.as_tensor(y) makes one."
            )


class _Again:
    """The batches of one task; notices where a later pass is not the first one again."""

    def __init__(self, task: Any, batches: Batches, given: str) -> None:
        where = f"diagnose: {given}: task {task!r}"
        again = "Give a list, a DataLoader, or any object whose iter() starts anew."
        if isinstance(batches, Iterator):
            kind = type(batches).__name__
            raise TypeError(f"{where}: its batches are a one-shot iterator ({kind}), and are gone over often. {again}")
        if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
            raise TypeError(f"{where}: is a {type(batches).__name__}. Give a list of batches: [(x, y)].")
        self.batches, self.seen = batches, -1
        self.error = f"{where}: the first pass over its data saw {{}} batches and a later one {{}}. {again}"

    def __iter__(self) -> Iterator[Any]:
        seen = 0
        for batch in self.batches:
            seen += 1
            yield batch
        if self.seen not in (-1, seen):
            raise ValueError(self.error.format(self.seen, seen))
        self.seen = seen


@dataclass(frozen=True)
class _All:
    """The batches of all tasks, one task after the other."""

    tasks: list[_Again]

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.tasks)


def _tasks(given: ByTask, name: str) -> dict[Any, _Again]:
    if isinstance(given, Iterator | Tensor) or not isinstance(given, Iterable):
        raise TypeError(
            f"diagnose: {name} is a {type(given).__name__}. Give a list with an entry for each task, each a list of "
            f"batches (x, y) or a DataLoader; or a mapping from names of tasks to such."
        )
    named = given if isinstance(given, Mapping) else dict(enumerate(given))
    if not named:
        raise ValueError(f"diagnose: {name} is empty. Give the batches of at least one task.")
    return {task: _Again(task, batches, name) for task, batches in named.items()}


def _learned(given: Sequence[float] | Mapping[Any, float], tasks: list[Any]) -> tuple[float, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"diagnose: learned={given!r}: give one accuracy for each task, in percent, in a list.")
    named = given if isinstance(given, Mapping) else dict(enumerate(given))
    if not isinstance(given, Mapping) and len(given) == len(tasks):
        named = dict(zip(tasks, given, strict=True))
    if set(named) != set(tasks):
        raise ValueError(f"diagnose: learned has {list(named)} and the tasks are {tasks}. Give one accuracy for each.")
    try:
        found = tuple(float(named[task]) for task in tasks)
    except (TypeError, ValueError):
        raise TypeError(f"diagnose: learned={list(named.values())}: accuracies are numbers, in percent.") from None
    if not all(0 <= value <= 100 for value in found) or 0 < max(found) <= 1:
        raise ValueError(f"diagnose: learned={list(found)}: accuracies are in percent, 0 to 100.")
    return found


@contextmanager
def _left_as_found(model: nn.Module) -> Iterator[None]:
    """Modes, buffers and random generators are as they were afterwards, also those that reading data moves."""
    buffers = [(m, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    devices = {t.device.index for t in (*model.parameters(), *model.buffers()) if t.is_cuda}
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=sorted(devices)), modes_restored(model):
            yield
    finally:
        random.setstate(state)
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer  # the object too: a forward may have put another in its place
            if not torch.equal(buffer, value):
                buffer.copy_(value)
