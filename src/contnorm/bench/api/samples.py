"""Samples of other libraries' data as arrays: PyTorch data sets, and benchmarks of Avalanche.

Avalanche is not imported: the attributes of its benchmarks are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
from torch import Tensor

from contnorm.errors import UserError

__all__ = ["BenchmarkArrays", "read_benchmark", "read_samples"]

COMPARED = 32  # samples whose training and evaluation transforms are compared


def sample_array(x: Any) -> np.ndarray:
    """Return a sample as an array; the channels of an image (as of Pillow) come first.

    Example:
        >>> sample_array([1, 2]).tolist()
        [1, 2]
    """
    if isinstance(x, Tensor):
        return x.detach().cpu().numpy()
    array = np.asarray(x)
    return array.transpose(2, 0, 1) if hasattr(x, "getbands") and array.ndim == 3 else array


def read_samples(dataset: Any, what: str) -> tuple[np.ndarray, list[Any]]:
    """Return the samples of a map-style data set of ``(x, label, ...)`` as one array, and their labels."""
    try:
        samples = [dataset[i] for i in range(len(dataset))]
        labels = [sample[1].item() if hasattr(sample[1], "item") else sample[1] for sample in samples]
        return np.stack([sample_array(sample[0]) for sample in samples]), labels
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{what}: can't be read as a data set of (x, label) with samples of one shape ({error})."
        ) from error


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

    arrays: list[Any]
    scenario: Literal["task", "class", "domain"]
    tasks: list[list[Any]] | None
    task_ids: tuple[Any, Any] | None


def read_benchmark(benchmark: Any, augment: bool | None) -> BenchmarkArrays:
    """Read the training and the test stream of a benchmark, with its transforms of evaluation.

    Args:
        benchmark: Benchmark with ``train_stream`` and ``test_stream``.
        augment: The setting of the stream; None if the user did not choose, which raises an error for a benchmark whose
            training transforms differ from those of evaluation.
    """
    train, test = list(benchmark.train_stream), list(benchmark.test_stream)
    if not train or len(train) != len(test):
        raise UserError(
            f"from_avalanche: the benchmark has {len(train)} training and {len(test)} test experiences. Use one test "
            f"experience for each training experience."
        )
    if augment is None:
        _check_transforms(train)
    splits = [
        [
            read_samples(_with_transforms(experience.dataset, "eval"), f"from_avalanche: experience {i}")
            for i, experience in enumerate(experiences)
        ]
        for experiences in (train, test)
    ]
    task_labels = [label for experience in train for label in set(getattr(experience, "task_labels", None) or [0])]
    classes = [list(dict.fromkeys(sorted(labels))) for _, labels in splits[0]]
    shared = len(set(chain(*classes))) < len(list(chain(*classes)))
    scenario: Literal["task", "class", "domain"]
    if len(task_labels) == len(train) == len(set(task_labels)) > 1:
        scenario = "task"
    elif set(task_labels) == {task_labels[0]}:
        scenario = "domain" if shared and len(train) > 1 else "class"
    else:
        raise UserError(
            f"from_avalanche: the experiences have the task labels {task_labels}. Use one label for all of them "
            f"(class-incremental), or a different one for each (task-incremental)."
        )
    if scenario == "task" and shared:  # each experience has classes of its own
        splits = [[(x, [f"{i}:{y}" for y in labels]) for i, (x, labels) in enumerate(split)] for split in splits]
        classes = [[f"{i}:{y}" for y in labels] for i, labels in enumerate(classes)]
    arrays: list[Any] = []
    for split in splits:
        arrays += [np.concatenate([x for x, _ in split]), list(chain(*(labels for _, labels in split)))]
    if scenario == "domain":
        ids = [np.repeat(np.arange(len(split)), [len(labels) for _, labels in split]) for split in splits]
        return BenchmarkArrays(arrays, scenario, None, (ids[0], ids[1]))
    return BenchmarkArrays(arrays, scenario, classes, None)


def _with_transforms(dataset: Any, group: Literal["train", "eval"]) -> Any:
    """Return a data set with its transforms of training or evaluation; one without groups of transforms as it is."""
    change = getattr(dataset, group, None)
    return change() if callable(change) else dataset


def _check_transforms(train: list[Any]) -> None:
    """Raise an error if training transforms samples otherwise than evaluation, as augmentation does."""
    for i, experience in enumerate(train):
        one, other = (_with_transforms(experience.dataset, group) for group in ("train", "eval"))
        for index in np.linspace(0, len(one) - 1, min(COMPARED, len(one))).astype(int).tolist():
            if not np.array_equal(sample_array(one[index][0]), sample_array(other[index][0])):
                raise UserError(
                    f"from_avalanche: training experience {i} has other transforms in training than in evaluation, "
                    f"which a stream can't represent. Samples are read with those of evaluation: choose augment=True "
                    f"for the random crops and flips of the bench, or augment=False for none."
                )
