"""Streams of tasks: permuted images, classes split over tasks, and multi-label images.

This module computes indices only. An *item* is one sample of one task: the index of an image of the source, its label
among the outputs, and its task. A plan lists the items of each step, and the engine gathers their images.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.config.schema import StreamConfig, merge_settings
from contnorm.bench.data.dataset import ArraySource, Indices, MultiLabelSource, Source
from contnorm.bench.rng import generator
from contnorm.errors import UserError, unknown

# Permuted streams are not bounded by the number of classes; their evaluations grow with the square of the tasks.
MAX_PERMUTED_TASKS = 1000


@dataclass(frozen=True)
class Items:
    """Samples of tasks: image index in the source, label among the outputs, and task of each.

    Multi-label samples have multi-hot rows of labels, with one column per output.
    """

    image: Indices
    label: NDArray[np.integer[Any]]
    task: Indices

    def __len__(self) -> int:
        return len(self.image)


@dataclass(frozen=True)
class TaskSequence:
    """Tasks over a source.

    Attributes:
        source: Data set.
        train: Training items by task, in the order of presentation.
        test: Test items by task. With ``held_out``, they refer to training images of the source.
        tasks: Number of tasks.
        outputs: Number of outputs that a network needs.
        competing: (T, outputs) mask of the outputs that compete for a sample of each task; all of them in
            class-incremental learning.
        permutations: (T, pixels) pixel permutation of each task; None if images are not permuted.
        mean, std: Per-channel normalization after scaling to [0, 1]; None for no normalization.
        padding: Zero padding for random crops in augmentation; None for no augmentation.
        task_free: Whether task boundaries are unknown in training: batches cross them, and neither the memory nor the
            strategy receives the task. Evaluation is still by task.
        held_out: Whether the test items are training samples that were held out, for model selection.
    """

    source: Source
    train: Items
    test: Items
    tasks: int
    outputs: int
    competing: NDArray[np.bool_]
    permutations: Indices | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    padding: int | None = None
    task_free: bool = False
    held_out: bool = False

    @property
    def multi_label(self) -> bool:
        """Whether the stream is multi-label: a sample can have any number of labels."""
        return self.train.label.ndim == 2


@dataclass(frozen=True)
class StreamSpec:
    """A named stream and the default settings of its runs, as in ``streams.toml``."""

    name: str
    sources: Sequence[str]  # the first one that is available is used; empty if a setting names it
    summary: str
    kind: Literal["permuted", "split", "multi-label", "user"]
    tasks: int  # multi-label streams take the number from the source
    per_task: int = 0  # classes per task
    validation: int = 0  # number of first tasks that are held out for hyperparameter selection
    class_order: Sequence[int] = ()  # labels in the order of tasks; empty for the order of the source
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    aliases: Sequence[str] = ()
    defaults: dict[str, Any] = field(default_factory=dict)


# Without task boundaries, a memory cannot have rings per task, and replay cannot be limited to earlier tasks.
TASK_FREE: dict[str, Any] = {"memory": {"kind": "reservoir", "size": 500}, "strategy": {"replay_from": "all"}}


_TOML = resources.files(__package__).joinpath("streams.toml").read_text("utf-8")
STREAMS = {name: StreamSpec(name, **values) for name, values in tomllib.loads(_TOML).items()}
ALIASES = {alias: spec.name for spec in STREAMS.values() for alias in spec.aliases}


def find_stream(name: str) -> StreamSpec:
    """Return a stream by its name or by one of its aliases; case is ignored.

    Example:
        >>> find_stream("SplitCIFAR100").name
        'split-cifar100'
    """
    key = name.lower()
    key = ALIASES.get(key, key)
    if key not in STREAMS:
        raise unknown("stream", name, STREAMS)
    return STREAMS[key]


def stream_defaults(spec: StreamSpec, scenario: str | None) -> dict[str, Any]:
    """Return the default settings of a stream for a scenario.

    Example:
        >>> stream_defaults(STREAMS["split-mnist"], "free")["memory"]
        {'kind': 'reservoir', 'size': 500}
    """
    has_tasks = spec.defaults["stream"]["scenario"] != "free"
    return merge_settings(spec.defaults, TASK_FREE) if scenario == "free" and has_tasks else spec.defaults


def check_stream(config: StreamConfig) -> None:
    """Raise an error for settings that do not apply to a stream: the run would ignore them, but have another config."""
    spec = find_stream(config.name)
    permuted, multi_label = spec.kind == "permuted", spec.kind == "multi-label"
    problems = {
        f"stream.scenario={config.scenario}: all tasks of a permuted stream have the same classes": permuted
        and config.scenario in ("task", "class"),
        "stream.augment=true: crops and flips can't be applied to permuted pixels": permuted and config.augment,
        f"stream.tasks={config.tasks}: must be 1 to {MAX_PERMUTED_TASKS}": permuted
        and (config.tasks or 1) > MAX_PERMUTED_TASKS,
        f"stream.scenario={config.scenario}: the stream is task-free": multi_label
        and config.scenario not in (None, "free"),
        "stream.class_order=seed: the order of the tasks is fixed": multi_label and config.class_order == "seed",
        "stream.augment=true: the stream has no augmentation": multi_label and config.augment,
        f"stream.blur={config.blur:g}: needs stream.scenario=free, which has no task labels": config.blur
        and config.scenario != "free",
        f"stream.part={config.part}: the stream has no validation tasks": not spec.validation
        and config.part in ("learn", "validate"),
    }
    for problem, applies in problems.items():
        if applies:
            raise UserError(f"{problem} ({spec.name}). Use another value, or leave the setting out.")


def build_stream(config: StreamConfig, source: Source, seed: int) -> TaskSequence:
    """Build the tasks of a stream for one seed, over a loaded source."""
    spec = find_stream(config.name)
    if spec.kind == "multi-label" and not isinstance(source, MultiLabelSource):
        raise UserError(f"stream.source={source.name}: its images have one label each, but {spec.name} needs several.")
    if config.augment and source.train_images.ndim != 4:
        raise UserError("stream.augment=true: crops and flips need images of shape (channels, height, width).")
    blocks = _class_blocks(spec, config, source, seed)
    available = getattr(source, "tasks", MAX_PERMUTED_TASKS) if blocks is None else len(blocks)
    tasks = config.tasks or (spec.tasks if spec.kind == "permuted" else available)
    if tasks > available:
        raise UserError(f"stream.tasks={tasks} must be 1 to {available} for {config.name} here.")
    blocks = None if blocks is None else blocks[:tasks]
    label_of = np.arange(source.classes)
    if blocks is not None:  # outputs are numbered in the order of the tasks; -1 for classes in no task
        label_of = np.full(source.classes, -1)
        for task, block in enumerate(blocks):
            first = 0 if config.scenario == "domain" else sum(map(len, blocks[:task]))
            label_of[block] = np.arange(first, first + len(block))
    training, testing = split_samples(config.holdout, source)
    train = _draw_items("train", training, config, tasks, blocks, label_of, seed)
    if config.blur:
        train = blur_boundaries(train, config.blur, seed)
    test = _draw_items("test", testing, config, tasks, blocks, label_of, 0)
    competing = np.ones((tasks, int(label_of.max()) + 1), dtype=bool)
    if config.scenario == "task":
        competing[:] = False
        for part in (train, test):
            competing[part.task, part.label] = True
        for task, block in enumerate(blocks or ()):  # also classes of which no sample was drawn
            competing[task, label_of[block]] = True
    permutations = None
    if spec.kind == "permuted":
        rng = generator(seed if config.class_order == "seed" else 0, "permutation")
        pixels = int(np.prod(source.train_images.shape[1:]))
        permutations = np.empty((tasks, pixels), dtype=np.int64)
        for order in permutations:
            order[:] = rng.permutation(pixels)
    return TaskSequence(
        source,
        train,
        test,
        tasks,
        competing.shape[1],
        competing,
        permutations,
        mean=spec.mean,
        std=spec.std,
        padding=4 if config.augment else None,
        task_free=config.scenario == "free" or spec.kind == "multi-label",
        held_out=config.holdout is not None,
    )


def _draw_items(
    split: str,
    samples: SplitSamples,
    config: StreamConfig,
    tasks: int,
    blocks: Sequence[Indices] | None,
    label_of: Indices,
    seed: int,
) -> Items:
    """Draw the samples of each task in random order; each task has a random generator of its own."""
    limit = config.train_per_task if split == "train" else config.test_per_task
    images = []
    for task in range(tasks):
        mask = samples.usable
        if blocks is not None:
            mask = mask & np.isin(samples.labels, blocks[task])
        elif samples.task is not None:
            mask = mask & (samples.task == task)
        indices = np.flatnonzero(mask)
        if not 1 <= (limit or 1) <= len(indices):
            raise UserError(
                f"{config.name}: task {task} has {len(indices):,} {split} samples, and needs {limit or 1:,}. Complete "
                f"the data set, or change stream.tasks or stream.{split}_per_task."
            )
        shuffled = generator(seed, f"{split} {task}").permutation(indices)
        images.append(shuffled if limit is None else shuffled[:limit].copy())  # a view would hold all of them
    labels = [samples.labels[part] for part in images]
    if samples.labels.ndim == 1:
        labels = [label_of[part] for part in labels]
    task_of = np.repeat(np.arange(tasks), [len(part) for part in images])
    return Items(np.concatenate(images), np.concatenate(labels), task_of)


def blur_boundaries(items: Items, width: float, seed: int) -> Items:
    """Mix the samples of consecutive tasks near their boundary; the samples of each task keep their order.

    The window around a boundary has the last samples of one task and as many first samples of the next, ``width / 2``
    of the smaller of the two. In it, the expected share of the next task rises linearly from 0 to 1.

    Example:
        >>> items = Items(np.arange(40), np.zeros(40, dtype=np.int64), np.repeat([0, 1], 20))
        >>> blurred = blur_boundaries(items, 0.8, seed=1)
        >>> "".join(map(str, blurred.task))
        '0000000000000010001101010111111111111111'
        >>> blurred.image[blurred.task == 1].tolist() == list(range(20, 40))
        True
    """
    sizes, shown = np.bincount(items.task), items.task.copy()
    for task, end in enumerate(np.cumsum(sizes)[:-1]):
        half = int(width * sizes[task : task + 2].min() / 2)
        # Sorted by the smaller of two uniform numbers for one task, and by the larger for the next: their densities
        # 2 - 2x and 2x add up to a constant, so x is the expected share of the next task at a fraction x of the window.
        low, high = np.sort(generator(seed, f"blur {task}").random((2, 2, half)), axis=0)
        order = np.argsort(np.concatenate([low[0], high[1]]))
        shown[end - half : end + half] = shown[end - half : end + half][order]
    place = np.empty_like(shown)
    place[np.argsort(shown, kind="stable")] = np.arange(len(shown))
    return Items(items.image[place], items.label[place], shown)


def _class_blocks(spec: StreamSpec, config: StreamConfig, source: Source, seed: int) -> list[Indices] | None:
    """Return the classes of each task; None if tasks are not sets of classes.

    With ``class_order="seed"``, tasks have the same sizes and classes at random.
    """
    rng = generator(seed, "class order")
    if isinstance(source, ArraySource):
        if source.task_classes is None:
            if config.class_order == "seed":
                raise UserError("stream.class_order=seed: the tasks of the stream are given by task_ids. Leave it out.")
            return None
        sizes = [len(block) for block in source.task_classes]
        order = np.concatenate(source.task_classes)
        if config.class_order == "seed":
            order = rng.permutation(order)
    elif spec.kind == "split":
        sizes = [spec.per_task] * spec.tasks
        order = np.array(spec.class_order or range(source.classes))
        if config.class_order == "seed":
            order = rng.permutation(source.classes)
    else:
        return None
    ends = np.cumsum(sizes)
    blocks: list[Indices] = np.split(order[: ends[-1]], ends[:-1])
    parts = {"learn": blocks[spec.validation :], "validate": blocks[: spec.validation]}
    return parts.get(config.part or "all", blocks)


@dataclass(frozen=True)
class SplitSamples:
    """Samples of a data set that a split may use.

    Attributes:
        labels: Label of each sample of the data set.
        task: Task of each sample, if the data set assigns them; otherwise None.
        usable: Mask of the samples of the split.
    """

    labels: NDArray[np.integer[Any]]
    task: Indices | None
    usable: NDArray[np.bool_]


def split_samples(holdout: float | None, source: Source) -> tuple[SplitSamples, SplitSamples]:
    """Return the training and the test samples of a stream.

    The held-out samples are the same share of every class; where the data set assigns tasks to samples, of every class
    of every task. Multi-label samples have no single class, so there it is the share of every task.

    Args:
        holdout: Share of the training samples of each class that replaces the test samples; None for the test samples
            of the data set. The held-out samples are the same for all seeds.
        source: The data set.
    """
    task = getattr(source, "train_task", None)
    if holdout is None:
        test_task = getattr(source, "test_task", None)
        return (
            SplitSamples(source.train_labels, task, np.ones(len(source.train_labels), dtype=bool)),
            SplitSamples(source.test_labels, test_task, np.ones(len(source.test_labels), dtype=bool)),
        )
    labels = source.train_labels
    part = np.zeros(len(labels), dtype=np.int64) if labels.ndim == 2 else labels.astype(np.int64)
    if task is not None:
        part = part + task * (int(part.max(initial=0)) + 1)
    held = np.zeros(len(labels), dtype=bool)
    rng = generator(0, "holdout")
    for value in np.unique(part):
        indices = np.flatnonzero(part == value)
        count = round(holdout * len(indices))
        if not 1 <= count < len(indices):
            what = "a task" if labels.ndim == 2 else f"class {int(labels[indices[0]])}"
            raise UserError(
                f"stream.holdout={holdout:g}: {what} of {source.name} has {len(indices)} training samples, of which "
                f"{count} would be held out. Use a share that leaves samples in both parts."
            )
        held[rng.permutation(indices)[:count]] = True
    return SplitSamples(labels, task, ~held), SplitSamples(labels, task, held)
