"""Streams of tasks: permuted images, classes split over tasks, and multi-label images.

This module computes indices only. An *item* is one sample of one task: the index of an image of the source, its label
among the outputs, and its task. A plan lists the items of each step, and the engine gathers their images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from contnorm.bench.config.schema import StreamConfig, merge_settings
from contnorm.bench.data.arrays import ArraySource
from contnorm.bench.data.dataset import MultiLabelSource, Source
from contnorm.bench.lazy_numpy import NDArray, np
from contnorm.bench.rng import generator
from contnorm.bench.streams.splits import SplitSamples, split_samples
from contnorm.errors import UserError, unknown

__all__ = [
    "ALIASES",
    "STREAMS",
    "TASK_FREE",
    "Items",
    "StreamSpec",
    "TaskSequence",
    "build_stream",
    "check_stream",
    "find_stream",
    "stream_defaults",
]

Indices: TypeAlias = "NDArray[np.int64]"
# Bounds of permuted streams, whose tasks are not bounded by the number of classes. The accuracy matrix, its record and
# the evaluations grow with the square of the tasks; the items of all tasks take 24 bytes each.
MAX_PERMUTED_TASKS = 1000
MAX_ITEMS = 50_000_000


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
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    padding: int | None = None
    task_free: bool = False
    held_out: bool = False

    @property
    def multi_label(self) -> bool:
        """Whether the stream is multi-label: a sample can have any number of labels."""
        return self.train.label.ndim == 2


@dataclass(frozen=True)
class StreamSpec:
    """A named stream and the default settings of its runs."""

    name: str
    sources: tuple[str, ...]  # the first one that is available is used; empty if a setting names it
    summary: str
    kind: Literal["permuted", "split", "multi-label", "user"]
    tasks: int  # multi-label streams take the number from the source
    per_task: int = 0  # classes per task
    validation: int = 0  # number of first tasks that are held out for hyperparameter selection
    class_order: tuple[int, ...] = ()  # labels in the order of tasks; empty for the order of the source
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    defaults: dict[str, Any] = field(default_factory=dict)


# Fine labels in the order of the stream: blocks of five are tasks, and the first three tasks are for selection.
# fmt: off
_CIFAR100_ORDER = (
    67, 63, 52, 50, 44, 47, 54, 35, 29, 76, 23, 66, 69, 84, 92, 43, 24, 81, 80, 1,
    38, 87, 68, 37, 31, 72, 20, 91, 51, 39, 33, 30, 64, 94, 65, 32, 74, 6, 90, 86,
    19, 27, 11, 97, 0, 62, 49, 73, 85, 56, 71, 99, 45, 8, 48, 58, 15, 22, 95, 46,
    55, 41, 78, 17, 88, 34, 25, 83, 57, 5, 53, 4, 59, 93, 14, 82, 16, 61, 40, 60,
    12, 10, 18, 77, 79, 13, 96, 70, 89, 26, 3, 9, 21, 2, 42, 7, 75, 28, 36, 98,
)
# fmt: on
# Off by default: oracle moments need a pass over all data seen so far for each of 20 norm layers, after each task.
_NO_DRIFT = {"evaluate": {"drift": False}}
_RESNET = {"model": {"name": "resnet18", "width": 64, "stem": "pool"}, **_NO_DRIFT}
# 100 channels are not divisible by 32 groups. An MLP has no spatial positions, so moments of small groups are noisy.
_MLP = {"model": {"name": "mlp", "width": 100}, "norm": {"groups": 4}}
_TINY_STEPS = {"train": {"lr": 0.03, "batch": 10, "replay": 10}}
_TWO_AT_A_TIME = {**_MLP, **_TINY_STEPS, "stream": {"scenario": "task", "part": "all", "augment": False}}
_FIVE_AT_A_TIME = {**_RESNET, **_TINY_STEPS, "stream": {"scenario": "task", "part": "learn", "augment": False}}
_CLASS_INCREMENTAL = {
    "model": {"name": "resnet18", "width": 64, "stem": "plain"},
    "train": {"lr": 0.03, "batch": 32, "replay": 32},
    "memory": {"kind": "reservoir", "size": 500},
    "strategy": {"forward": "separate", "replay_from": "all"},
    "stream": {"scenario": "class", "part": "all", "augment": True},
    **_NO_DRIFT,
}
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _long_tail(rho: float) -> dict[str, Any]:
    """Settings published for PRS: Adam, and joint batches of 10 stream images and 10 of 2,000 memory images."""
    return {
        "model": {"name": "resnet101", "width": 64},
        "norm": {"groups": 4},
        "train": {
            "lr": 1e-4,
            "optimizer": "adam",
            "clip_value": 5.0,
            "batch": 10,
            "replay": 10,
            "partial": "drop",
        },
        "memory": {"kind": "reservoir", "size": 2000, "rho": rho, "quirk": True},
        "strategy": {"forward": "joint", "replay_from": "all"},
        "stream": {"scenario": "free", "part": "all", "augment": False},
        **_NO_DRIFT,
    }


_USER_DATA = {
    "norm": {"groups": "auto"},
    "stream": {"scenario": "class", "part": "all", "augment": False},
    **_NO_DRIFT,
}

# Without task boundaries, a memory cannot have rings per task, and replay cannot be limited to earlier tasks.
TASK_FREE: dict[str, Any] = {"memory": {"kind": "reservoir", "size": 500}, "strategy": {"replay_from": "all"}}
STREAMS: dict[str, StreamSpec] = {
    spec.name: spec
    for spec in (
        StreamSpec(
            "permuted-mnist",
            ("mnist", "digits"),
            "5 tasks of 2,000 digits, each with another permutation of the pixels",
            "permuted",
            tasks=5,
            defaults={
                **_MLP,
                **_TINY_STEPS,
                "stream": {"scenario": "domain", "part": "all", "train_per_task": 2000, "augment": False},
            },
        ),
        StreamSpec(
            "split-mnist",
            ("mnist", "digits"),
            "5 tasks of 2 digits",
            "split",
            tasks=5,
            per_task=2,
            defaults=_TWO_AT_A_TIME,
        ),
        StreamSpec(
            "split-fashion-mnist",
            ("fashion-mnist",),
            "5 tasks of 2 kinds of clothing",
            "split",
            tasks=5,
            per_task=2,
            defaults=_TWO_AT_A_TIME,
        ),
        StreamSpec(
            "split-cifar10",
            ("cifar10",),
            "5 tasks of 2 classes, augmented",
            "split",
            tasks=5,
            per_task=2,
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2615),
            defaults=_CLASS_INCREMENTAL,
        ),
        StreamSpec(
            "split-tiny-imagenet",
            ("tiny-imagenet",),
            "10 tasks of 20 classes, augmented",
            "split",
            tasks=10,
            per_task=20,
            mean=(0.4802, 0.4480, 0.3975),
            std=(0.2770, 0.2691, 0.2821),
            defaults=_CLASS_INCREMENTAL,
        ),
        StreamSpec(
            "split-mini-imagenet",
            ("mini-imagenet",),
            "17 tasks of 5 classes, and 3 more for selection",
            "split",
            tasks=20,
            per_task=5,
            validation=3,
            defaults=_FIVE_AT_A_TIME,
        ),
        StreamSpec(
            "split-cifar100",
            ("cifar100",),
            "17 tasks of 5 classes, and 3 more for selection",
            "split",
            tasks=20,
            per_task=5,
            validation=3,
            class_order=_CIFAR100_ORDER,
            defaults=_FIVE_AT_A_TIME,
        ),
        StreamSpec(
            "cocoseq",
            ("cocoseq",),
            "4 tasks of 70 kinds of things, several in a picture, common and rare; task-free",
            "multi-label",
            tasks=4,
            mean=_IMAGENET_MEAN,
            std=_IMAGENET_STD,
            defaults=_long_tail(rho=-0.03),
        ),
        StreamSpec(
            "nus-wideseq",
            ("nus-wideseq",),
            "6 tasks of 49 kinds of things, several in a picture, common and rare; task-free",
            "multi-label",
            tasks=6,
            mean=_IMAGENET_MEAN,
            std=_IMAGENET_STD,
            defaults=_long_tail(rho=0.02),
        ),
        StreamSpec(
            "multi-label",
            (),
            "one of your own whose pictures have several labels: stream.source names it; task-free",
            "multi-label",
            tasks=0,
            mean=_IMAGENET_MEAN,
            std=_IMAGENET_STD,
            defaults=_long_tail(rho=0.0),
        ),
        StreamSpec(
            "arrays", (), "your arrays: bench.Stream.from_arrays in Python", "user", tasks=0, defaults=_USER_DATA
        ),
        StreamSpec(
            "folder",
            (),
            "your folder of images: bench.Stream.from_folder in Python",
            "user",
            tasks=0,
            defaults=_USER_DATA,
        ),
    )
}
ALIASES = {
    "seq-tinyimg": "split-tiny-imagenet",
    "splittinyimagenet": "split-tiny-imagenet",
    "splitminiimagenet": "split-mini-imagenet",
    "perm-mnist": "permuted-mnist",
    "permutedmnist": "permuted-mnist",
    "seq-mnist": "split-mnist",
    "splitmnist": "split-mnist",
    "seq-fmnist": "split-fashion-mnist",
    "splitfmnist": "split-fashion-mnist",
    "seq-cifar10": "split-cifar10",
    "splitcifar10": "split-cifar10",
    "seq-cifar100": "split-cifar100",
    "splitcifar100": "split-cifar100",
    "coco-seq": "cocoseq",
    "nuswideseq": "nus-wideseq",
    "nus-wide-seq": "nus-wideseq",
}


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
    if spec.kind == "permuted" and config.scenario in ("task", "class"):
        raise UserError(
            f"stream.scenario={config.scenario}: all tasks of {spec.name} have the same classes. "
            f"Use stream.scenario=domain, or free."
        )
    if spec.kind == "permuted" and config.tasks is not None and not 1 <= config.tasks <= MAX_PERMUTED_TASKS:
        raise UserError(f"stream.tasks={config.tasks} must be 1 to {MAX_PERMUTED_TASKS} for {spec.name}.")
    if spec.kind == "permuted" and config.augment:
        raise UserError(
            f"stream.augment=true: crops and flips can't be applied to the permuted pixels of {spec.name}. Use "
            f"stream.augment=false."
        )
    if spec.kind == "multi-label":
        _check_multi_label(config)
    if not spec.validation and config.part in ("learn", "validate"):
        raise UserError(f"stream.part={config.part}: {spec.name} has no validation tasks. Use stream.part=all.")


def _check_multi_label(config: StreamConfig) -> None:
    problems = {
        f"stream.scenario={config.scenario}: the stream is task-free": config.scenario not in (None, "free"),
        "stream.class_order=seed: the order of the tasks is fixed": config.class_order == "seed",
        "stream.augment=true: the stream has no augmentation": bool(config.augment),
    }
    for problem, applies in problems.items():
        if applies:
            raise UserError(f"{problem} ({config.name}). Leave the setting out.")


def build_stream(config: StreamConfig, source: Source, seed: int) -> TaskSequence:
    """Build the tasks of a stream for one seed, over a loaded source."""
    check_stream(config)
    spec = find_stream(config.name)
    if spec.kind == "multi-label":
        return _multi_label(spec, config, source, seed)
    if spec.kind == "permuted":
        return _permuted(spec, config, source, seed)
    if isinstance(source, ArraySource):
        return _user_data(config, source, seed)
    return _split(spec, config, source, seed)


def _permuted(spec: StreamSpec, config: StreamConfig, source: Source, seed: int) -> TaskSequence:
    tasks = spec.tasks if config.tasks is None else config.tasks
    _check_items(config, tasks, source)
    rng = generator(seed if config.class_order == "seed" else 0, "permutation")
    pixels = int(np.prod(source.train_images.shape[1:]))
    permutations = np.empty((tasks, pixels), dtype=np.int64)
    for order in permutations:
        order[:] = rng.permutation(pixels)
    training, testing = split_samples(config.holdout, source)
    all_train, all_test = np.flatnonzero(training.usable), np.flatnonzero(testing.usable)
    train = _draw_tasks([all_train] * tasks, config.train_per_task, "train", seed, spec.name)
    test = _draw_tasks([all_test] * tasks, config.test_per_task, "test", 0, spec.name)
    return TaskSequence(
        source,
        _items(train, [training.labels[chosen] for chosen in train]),
        _items(test, [testing.labels[chosen] for chosen in test]),
        tasks,
        source.classes,
        np.ones((tasks, source.classes), dtype=bool),
        permutations,
        task_free=config.scenario == "free",
        held_out=config.holdout is not None,
    )


def _split(spec: StreamSpec, config: StreamConfig, source: Source, seed: int) -> TaskSequence:
    order = np.array(spec.class_order or range(source.classes))
    if config.class_order == "seed":
        order = generator(seed, "class order").permutation(source.classes)
    blocks = order[: spec.tasks * spec.per_task].reshape(spec.tasks, spec.per_task)
    blocks = {"all": blocks, "learn": blocks[spec.validation :], "validate": blocks[: spec.validation]}[
        config.part or "all"
    ]
    blocks = blocks[: _task_count(config, len(blocks))]
    tasks, domain = len(blocks), config.scenario == "domain"
    outputs = spec.per_task if domain else blocks.size
    label_of = np.full(source.classes, -1)
    label_of[blocks.ravel()] = np.tile(np.arange(spec.per_task), tasks) if domain else np.arange(blocks.size)

    def indices_by_task(samples: SplitSamples, split: str) -> list[Indices]:
        indices = [samples.where(np.isin(samples.labels, block)) for block in blocks]
        _check_samples(indices, split, spec.name, source)
        return indices

    training, testing = split_samples(config.holdout, source)
    train = _draw_tasks(indices_by_task(training, "train"), config.train_per_task, "train", seed, spec.name)
    test = _draw_tasks(indices_by_task(testing, "test"), config.test_per_task, "test", 0, spec.name)
    competing = np.ones((tasks, outputs), dtype=bool)
    if config.scenario == "task":
        competing = np.arange(outputs)[None] // spec.per_task == np.arange(tasks)[:, None]
    return TaskSequence(
        source,
        _items(train, [label_of[training.labels[c]] for c in train]),
        _items(test, [label_of[testing.labels[c]] for c in test]),
        tasks,
        outputs,
        competing,
        mean=spec.mean,
        std=spec.std,
        padding=4 if config.augment else None,
        task_free=config.scenario == "free",
        held_out=config.holdout is not None,
    )


def _user_data(config: StreamConfig, source: ArraySource, seed: int) -> TaskSequence:
    """Build the tasks of a user's data set: sets of classes, or the given tasks of the samples."""
    tasks, domain = _task_count(config, source.tasks), config.scenario == "domain"
    if config.augment and source.train_images.ndim != 4:
        raise UserError("stream.augment=true: crops and flips need images of shape (channels, height, width).")
    if source.task_classes is None:
        if config.class_order == "seed":
            raise UserError("stream.class_order=seed: the tasks of this stream are given by task_ids. Leave it out.")
        label_of, outputs = np.arange(source.classes), source.classes
    else:
        blocks = _class_blocks(config, source.task_classes, seed)[:tasks]
        label_of, task_of_class = np.full(source.classes, -1), np.full(source.classes, -1)
        for task, block in enumerate(blocks):
            label_of[block] = np.arange(len(block)) + (0 if domain else sum(map(len, blocks[:task])))
            task_of_class[block] = task
        outputs = int(label_of.max()) + 1
    items = []
    training, testing = split_samples(config.holdout, source)
    for split, samples, limit, split_seed in (
        ("train", training, config.train_per_task, seed),
        ("test", testing, config.test_per_task, 0),
    ):
        task_of = task_of_class[samples.labels] if samples.task is None else samples.task
        indices = [samples.where(task_of == task) for task in range(tasks)]
        _check_samples(indices, split, config.name, source)
        chosen = _draw_tasks(indices, limit, split, split_seed, config.name)
        items.append(_items(chosen, [label_of[samples.labels[part]] for part in chosen]))
    competing = np.ones((tasks, outputs), dtype=bool)
    if config.scenario == "task":
        competing[:] = False
        for part in items:
            competing[part.task, part.label] = True
    train, test = items
    return TaskSequence(
        source,
        train,
        test,
        tasks,
        outputs,
        competing,
        padding=4 if config.augment else None,
        task_free=config.scenario == "free",
        held_out=config.holdout is not None,
    )


def _class_blocks(config: StreamConfig, blocks: Sequence[Sequence[int]], seed: int) -> list[Indices]:
    """Return the classes of each task; with ``class_order="seed"``, tasks of the same sizes with classes at random."""
    classes = np.concatenate([np.array(block) for block in blocks])
    if config.class_order == "seed":
        classes = generator(seed, "class order").permutation(classes)
    return np.split(classes, np.cumsum([len(block) for block in blocks])[:-1])


def _multi_label(spec: StreamSpec, config: StreamConfig, source: Source, seed: int) -> TaskSequence:
    """Build the tasks that the source defines; images are in random order within each task."""
    if not isinstance(source, MultiLabelSource):
        raise UserError(f"stream.source={source.name}: its images have one label each, but {spec.name} needs several.")
    tasks = _task_count(config, source.tasks)

    def indices_by_task(samples: SplitSamples) -> list[Indices]:
        assert samples.task is not None
        return [samples.where(samples.task == task) for task in range(tasks)]

    training, testing = split_samples(config.holdout, source)
    train = _draw_tasks(indices_by_task(training), config.train_per_task, "train", seed, spec.name)
    test = _draw_tasks(indices_by_task(testing), config.test_per_task, "test", 0, spec.name)
    return TaskSequence(
        source,
        _items(train, [training.labels[c] for c in train]),
        _items(test, [testing.labels[c] for c in test]),
        tasks,
        source.classes,
        np.ones((tasks, source.classes), dtype=bool),
        mean=spec.mean,
        std=spec.std,
        task_free=True,
        held_out=config.holdout is not None,
    )


def _check_items(config: StreamConfig, tasks: int, source: Source) -> None:
    """Raise an error for a permuted stream that does not fit in memory, before it is built."""
    train = min(config.train_per_task or len(source.train_labels), len(source.train_labels))
    test = min(config.test_per_task or len(source.test_labels), len(source.test_labels))
    if tasks * (train + test) > MAX_ITEMS:
        raise UserError(
            f"stream.tasks={tasks}: {tasks:,} tasks of {train:,} train and {test:,} test samples are more than the "
            f"{MAX_ITEMS:,} samples a stream may have. Use up to {MAX_ITEMS // (train + test)} tasks, or set "
            f"stream.train_per_task and stream.test_per_task."
        )


def _check_samples(indices_by_task: Sequence[Indices], split: str, name: str, source: Source) -> None:
    """Raise an error if a task has no samples: its accuracy would be undefined, or measured without training."""
    empty = [task for task, indices in enumerate(indices_by_task) if not len(indices)]
    if empty:
        raise UserError(
            f"{name}: {len(empty)} of {len(indices_by_task)} tasks have no {split} samples in {source.name}, such "
            f"as task {empty[0]}. Complete the data set, or use the first tasks only with stream.tasks."
        )


def _task_count(config: StreamConfig, available: int) -> int:
    tasks = available if config.tasks is None else config.tasks
    if not 1 <= tasks <= available:
        raise UserError(f"stream.tasks={tasks} must be 1 to {available} for {config.name} here.")
    return tasks


def _draw_tasks(
    indices_by_task: Sequence[Indices], limit: int | None, purpose: str, seed: int, name: str
) -> list[Indices]:
    """Draw ``limit`` samples of each task, or all without a limit; each task has a random generator of its own."""
    return [
        _draw_task(indices, limit, generator(seed, f"{purpose} {task}"), name)
        for task, indices in enumerate(indices_by_task)
    ]


def _draw_task(indices: Indices, limit: int | None, rng: np.random.Generator, name: str) -> Indices:
    """Draw ``limit`` samples in random order; all of them without a limit."""
    if limit is not None and not 1 <= limit <= len(indices):
        raise UserError(f"{name}: {limit:,} samples per task are requested, but a task has {len(indices):,}.")
    shuffled = rng.permutation(indices)
    return shuffled if limit is None else shuffled[:limit].copy()  # a view would hold all indices in memory


def _items(images: list[Indices], labels: list[NDArray[Any]]) -> Items:
    task = np.repeat(np.arange(len(images)), [len(part) for part in images])
    return Items(np.concatenate(images), np.concatenate(labels), task)
