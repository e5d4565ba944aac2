"""Read a benchmark of Avalanche into arrays. Avalanche is not imported: the attributes of its benchmarks are used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.api.samples import sample_array
from contnorm.errors import UserError

__all__ = ["BenchmarkArrays", "read_benchmark"]

COMPARED = 32  # samples whose training and evaluation transforms are compared


@dataclass(frozen=True)
class BenchmarkArrays:
    """Samples of a benchmark.

    Attributes:
        arrays: Samples and labels: ``x, y, x_test, y_test``.
        scenario: ``"task"`` if every experience has a task label of its own; otherwise all have the same one, and it is
            ``"class"`` if no class is in two experiences, or ``"domain"``.
        tasks: Classes of each task; None for ``"domain"``.
        task_ids: Task of each training and of each test sample; None unless the scenario is ``"domain"``.
    """

    arrays: tuple[NDArray[Any], list[Any], NDArray[Any], list[Any]]
    scenario: Literal["task", "class", "domain"]
    tasks: list[list[Any]] | None
    task_ids: tuple[NDArray[np.int64], NDArray[np.int64]] | None


def read_benchmark(benchmark: Any, augment: bool | None) -> BenchmarkArrays:
    """Read the training and the test stream of a benchmark, with its transforms of evaluation.

    Args:
        benchmark: Benchmark with ``train_stream`` and ``test_stream``.
        augment: The setting of the stream; None if the user did not choose, which raises an error for a benchmark whose
            training transforms differ from those of evaluation.
    """
    train, test = _experiences(benchmark, "train"), _experiences(benchmark, "test")
    if len(train) != len(test):
        raise UserError(
            f"from_avalanche: the benchmark has {len(train)} training and {len(test)} test experiences. Use one test "
            f"experience for each training experience."
        )
    splits = [
        [_read(experience, f"{name} experience {i}") for i, experience in enumerate(experiences)]
        for name, experiences in (("training", train), ("test", test))
    ]
    if augment is None:
        _check_transforms(train)
    scenario, labels = _scenario(train, [[set(y) for _, y in split] for split in splits])
    if scenario == "task" and labels == "shared":
        splits = [[(x, [f"{i}:{y}" for y in ys]) for i, (x, ys) in enumerate(split)] for split in splits]
    arrays = (*_joined(splits[0]), *_joined(splits[1]))
    sizes = [[len(ys) for _, ys in split] for split in splits]
    ids = [np.repeat(np.arange(len(size)), size) for size in sizes]
    if scenario == "domain":
        return BenchmarkArrays(arrays, scenario, None, (ids[0], ids[1]))
    tasks = [list(dict.fromkeys(_sorted(ys))) for _, ys in splits[0]]
    return BenchmarkArrays(arrays, scenario, tasks, None)


def _sorted(labels: Iterable[Any]) -> list[Any]:
    """Sort labels; those of the form task:label by number."""
    return sorted(labels, key=lambda label: int(label.partition(":")[2]) if isinstance(label, str) else label)


def _experiences(benchmark: Any, split: str) -> list[Any]:
    stream = getattr(benchmark, f"{split}_stream", None)
    if stream is None or isinstance(stream, str) or not isinstance(stream, Iterable):
        raise UserError(
            f"from_avalanche: a {type(benchmark).__name__} has no {split}_stream. Use a benchmark of Avalanche, with "
            f"train_stream and test_stream."
        )
    experiences = list(stream)
    if not experiences or not all(hasattr(experience, "dataset") for experience in experiences):
        raise UserError(f"from_avalanche: {split}_stream has no experiences with a dataset.")
    return experiences


def _read(experience: Any, where: str) -> tuple[NDArray[Any], list[Any]]:
    """Return the samples of an experience, with the transforms of evaluation, and their labels."""
    data = _with_transforms(experience.dataset, "eval")
    if not len(data):
        raise UserError(f"from_avalanche: {where} has no samples. Leave it out of the benchmark.")
    samples, labels = [], []
    try:
        for i in range(len(data)):
            sample = data[i]
            samples.append(sample_array(sample[0]))
            labels.append(sample[1].item() if hasattr(sample[1], "item") else sample[1])
        stacked = np.stack(samples)
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise UserError(
            f"from_avalanche: {where} can't be read as samples (x, label) of one shape ({error})."
        ) from error
    if not all(isinstance(label, int) for label in labels):
        raise UserError(f"from_avalanche: {where} has labels that are not class indices. Use one class per sample.")
    return stacked, labels


def _with_transforms(dataset: Any, group: Literal["train", "eval"]) -> Any:
    change = getattr(dataset, group, None)
    return change() if callable(change) else dataset


def _joined(split: Sequence[tuple[NDArray[Any], list[Any]]]) -> tuple[NDArray[Any], list[Any]]:
    shapes = {x.shape[1:] for x, _ in split}
    if len(shapes) > 1:
        raise UserError(f"from_avalanche: samples have the shapes {sorted(shapes)}. Use samples of one shape.")
    return np.concatenate([x for x, _ in split]), [label for _, labels in split for label in labels]


def _check_transforms(train: Sequence[Any]) -> None:
    """Raise if training transforms samples otherwise than evaluation, as augmentation does."""
    for i, experience in enumerate(train):
        one, other = (_with_transforms(experience.dataset, group) for group in ("train", "eval"))
        chosen = np.linspace(0, len(one) - 1, min(COMPARED, len(one))).astype(int).tolist()
        arrays = [(sample_array(one[index][0]), sample_array(other[index][0])) for index in chosen]
        if not all(a.shape == b.shape and np.array_equal(a, b) for a, b in arrays):
            raise UserError(
                f"from_avalanche: training experience {i} has other transforms in training than in evaluation, which a "
                f"stream can't represent. Samples are read with those of evaluation: choose augment=True for the "
                f"random crops and flips of the bench, or augment=False for none."
            )


def _scenario(
    train: Sequence[Any], classes: Sequence[Sequence[set[Any]]]
) -> tuple[Literal["task", "class", "domain"], Literal["disjoint", "shared"]]:
    """Return the scenario by the task labels, and whether experiences share classes."""
    for i, (trained, tested) in enumerate(zip(*classes, strict=True)):
        if tested - trained:
            raise UserError(
                f"from_avalanche: class {min(tested - trained)} of test experience {i} is not in training experience "
                f"{i}. Use test experiences with the classes of the training experiences."
            )
    labels = [_task_label(experience, i) for i, experience in enumerate(train)]
    flat = [label for exp in classes[0] for label in exp]
    sharing: Literal["disjoint", "shared"] = "disjoint" if len(set(flat)) == len(flat) else "shared"
    if len(set(labels)) == 1:
        if len(labels) == 1 or sharing == "disjoint":
            return "class", sharing
        return "domain", sharing
    if len(set(labels)) < len(labels):
        raise UserError(
            f"from_avalanche: the experiences have the task labels {labels}. Use one label for all of them "
            f"(class-incremental), or a different one for each (task-incremental)."
        )
    return "task", sharing


def _task_label(experience: Any, number: int) -> int:
    labels = sorted(set(getattr(experience, "task_labels", None) or [0]))
    if len(labels) > 1:
        raise UserError(
            f"from_avalanche: training experience {number} has samples of the tasks {labels}. Use one task in each "
            f"experience."
        )
    return int(labels[0])
