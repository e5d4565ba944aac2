"""The plan of a run: the samples of each training step, computed in advance from labels and a seed.

Order, memory, replay and augmentation do not depend on the model. So they are computed first, as integer arrays for
each step. A training step then has a fixed shape and makes no decisions, a run resumes bit-exactly from a step number,
and two norms that are compared on one seed see the same samples.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.config.schema import MemoryConfig, RunConfig, TrainConfig
from contnorm.bench.data.registry import Source
from contnorm.bench.memories import MEMORIES, NOT_STORED, Memory, StreamInfo, build
from contnorm.bench.memories.base import draw_slots, draw_slots_batched
from contnorm.bench.memories.build import memory_errors
from contnorm.bench.rng import generator
from contnorm.bench.streams.tasks import TaskSequence, build_stream
from contnorm.errors import UserError

__all__ = ["ExtraDraw", "Plan", "PlanCache", "Step", "add_extra_draw", "build_memory", "make_plan", "offered_labels"]

Indices = NDArray[np.int64]
AT_ONCE = 1000  # steps whose replay samples are drawn in one call
MOST_STEPS = 10_000_000  # a step takes about a kilobyte of memory
Views = NDArray[np.int64]  # (samples, 3): vertical and horizontal offset of the crop, and whether it is flipped


@dataclass(frozen=True)
class Step:
    """One training step.

    Attributes:
        task: The task of the step; the latest if a batch has samples of several.
        stream: Items of the stream.
        write: Memory slots that these items are written to.
        replay: Replayed items, one array per draw.
        replay_slots: Memory slots of the replayed items, likewise.
        stream_views: Crops and flips of the stream's items; None without augmentation.
        replay_views: Crops and flips of the replayed items, likewise.
        has_extra: Whether the last draw is an extra one for a norm, and not for the strategy.

    Items are rows of the ``train`` items of the stream. Slots that are not written to are -1. If two items of a step
    are written to one slot, the later one stays.

    Example:
        >>> items, slots = np.array([4, 5]), np.array([0, 1])
        >>> Step(0, np.array([7]), np.array([NOT_STORED]), (items,), (slots,), None, None).sizes
        (1, 2)
    """

    task: int
    stream: Indices
    write: Indices
    replay: tuple[Indices, ...]
    replay_slots: tuple[Indices, ...]
    stream_views: Views | None
    replay_views: tuple[Views, ...] | None
    has_extra: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of samples of the stream, and of each replay draw."""
        return len(self.stream), *map(len, self.replay)

    def passes(self, forward: str) -> tuple[int, ...]:
        """Return the batch size of each forward pass: one joint pass, or one pass per part that has samples."""
        sizes, extra = (self.sizes[:-1], self.sizes[-1:]) if self.has_extra else (self.sizes, ())
        parts = (sum(sizes), *extra) if forward == "joint" else self.sizes
        return tuple(size for size in parts if size)


@dataclass(frozen=True)
class Plan:
    """All steps of a run.

    Attributes:
        steps: The steps in order.
        ends: The number of steps done when each task ends. With ``max_steps``, only tasks with at least one sample in
            the plan are listed.
        slots: Number of slots of the memory; 0 without replay.

    Example:
        >>> step = Step(0, np.array([7]), np.array([NOT_STORED]), (), (), None, None)
        >>> len(Plan((step,), ends=(1,), slots=0).steps)
        1
    """

    steps: tuple[Step, ...]
    ends: tuple[int, ...]
    slots: int


def build_memory(config: MemoryConfig, stream: TaskSequence, seed: int) -> Memory:
    """Build the memory that the settings name, for a stream and a seed."""
    info = StreamInfo(stream.outputs, stream.tasks, stream.multi_label)
    return build.build_memory(config, info, generator(seed, "memory"))


def offered_labels(memory: Memory, stream: TaskSequence, items: Indices) -> Indices:
    """Return the labels of items in the format of the memory: class indices, or multi-hot rows."""
    labels: Indices = stream.train.label[items].astype(np.int64)
    if memory.multi_hot and not stream.multi_label:
        return np.eye(stream.outputs, dtype=np.int64)[labels]
    return labels


def make_plan(config: RunConfig, stream: TaskSequence, seed: int, draws: int) -> Plan:
    """Make the plan of one pass over the stream, without a model.

    Args:
        config: The settings of the run.
        stream: The stream of tasks.
        seed: The seed of the run.
        draws: Number of independent replay draws per step of the strategy; 0 without replay.
    """
    if config.memory.kind in MEMORIES:
        return _make_plan(config, stream, seed, draws)
    with memory_errors(config.memory.kind):
        return _make_plan(config, stream, seed, draws)


def _make_plan(config: RunConfig, stream: TaskSequence, seed: int, draws: int) -> Plan:
    if draws:
        _check_rings(config, stream)
    try:
        memory = build_memory(config.memory, stream, seed)
        content = np.full(memory.capacity, -1, dtype=np.int64)  # the item in each slot
    except MemoryError as error:
        raise UserError(
            f"memory.size={config.memory.size}: the slots do not fit into memory. Use a smaller memory.size (--buffer)."
        ) from error
    _check_step_count(config.train, stream)
    if draws:
        _check_labels(memory, config, stream)
        _check_replay_can_be_full(config, stream, memory.capacity)
    rng = generator(seed, "replay")
    views = None if stream.padding is None else _Views(generator(seed, "augment"), stream.padding)
    steps: list[Step] = []
    batches = list(islice(_batches(config.train, stream, seed), config.train.max_steps))
    for start in range(0, len(batches), AT_ONCE):
        batch = batches[start : start + AT_ONCE]
        readable, writes = _offer_batches(memory, config, stream, batch, draws)
        chosen = draw_slots_batched(readable, config.train.replay, rng)
        of_step = [tuple(chosen[draws * i : draws * (i + 1)]) for i in range(len(batch))]
        drawn = iter(() if views is None else views.draw_batched(_sizes(batch, of_step)))
        for (items, task, _), write, slots in zip(batch, writes, of_step, strict=True):
            replay = tuple(content[draw] for draw in slots)
            stored = write != NOT_STORED
            content[write[stored]] = items[stored]  # if two items have the same slot, the later one stays
            stream_views = None if views is None else next(drawn)
            replay_views = None if views is None else tuple(islice(drawn, draws))
            steps.append(Step(task, items, write, replay, slots, stream_views, replay_views))
    return Plan(tuple(steps), tuple(_ends(stream, steps)), memory.capacity if draws else 0)


def _sizes(batches: Sequence[tuple[Indices, int, bool]], slots: Sequence[Sequence[Indices]]) -> list[int]:
    """Return the number of samples of each batch of the stream, followed by those of its replay draws."""
    return [len(part) for (items, _, _), of_step in zip(batches, slots, strict=True) for part in (items, *of_step)]


def _check_step_count(config: TrainConfig, stream: TaskSequence) -> None:
    """Reject a plan of more steps than fit into memory, before it is made."""
    steps = -(-len(stream.train.task) // config.batch) * config.passes * config.updates
    if min(steps, config.max_steps or steps) > MOST_STEPS:
        raise UserError(
            f"train.passes={config.passes}: makes {steps:,} steps, more than the {MOST_STEPS:,} a plan can have. Use "
            f"fewer passes or train.updates, a larger train.batch (--batch), or train.max_steps (--max-steps)."
        )


def _offer_batches(
    memory: Memory,
    config: RunConfig,
    stream: TaskSequence,
    batches: Sequence[tuple[Indices, int, bool]],
    draws: int,
) -> tuple[list[Indices], list[Indices]]:
    """Offer batches to the memory; returns the slots each draw may read, and the slots each batch is written to."""
    readable, writes = [], []
    only_past = config.strategy.replay_from == "past"
    for items, task, is_offered in batches:
        if draws:
            readable += [memory.readable(task if only_past else None)] * draws
        if draws and is_offered:
            labels = offered_labels(memory, stream, items)
            writes.append(memory.offer(labels, 0 if stream.task_free else task))
        else:
            writes.append(np.full(len(items), NOT_STORED))
    return readable, writes


def _check_replay_can_be_full(config: RunConfig, stream: TaskSequence, capacity: int) -> None:
    """Reject a memory that could not fill a replay batch even in the last task.

    The content of rings grows with the tasks. In early tasks a batch may be smaller, as with the published rings of one
    sample per class (Chaudhry et al., 2019). With one task and replay of past tasks there is nothing to replay.
    """
    past = config.strategy.replay_from == "past"
    if past and stream.tasks == 1:
        return
    rings = _rings_read(config.memory, stream, past)
    size, replay = config.memory.size, config.train.replay
    if capacity != size and config.memory.kind not in MEMORIES:  # a user's memory with another number of slots
        if capacity < replay:
            raise UserError(
                f"memory.size={size} is too small: memory {config.memory.kind!r} has {capacity} slots, and a replay "
                f"batch of {replay} would never be full. Use a larger memory.size (--buffer), or a smaller "
                f"train.replay (--replay)."
            )
        return
    if rings * size < replay:
        raise UserError(
            f"memory.size={size} is too small: {_describe(config.memory, rings, past)} {rings * size} slots in all, "
            f"and a replay batch of {replay} would never be full. Use memory.size={-(-replay // rings)} (--buffer) or "
            f"more, or train.replay={rings * size} (--replay)."
        )


def _rings_read(config: MemoryConfig, stream: TaskSequence, past: bool) -> int:
    """Return the number of rings that can be read in the last task; 1 for memories without rings."""
    if config.kind != "ring":
        return 1
    readable = stream.train.task < stream.tasks - past
    return len(np.unique((stream.train.task if config.per == "task" else stream.train.label)[readable]))


def _describe(config: MemoryConfig, rings: int, past: bool) -> str:
    if config.kind != "ring":
        return "it has"
    unit = {"task": "tasks", "class": "classes of the tasks" if past else "classes"}[config.per]
    return f"the rings of the {rings} {unit} before the last have" if past else f"the rings of all {rings} {unit} have"


def _batches(config: TrainConfig, stream: TaskSequence, seed: int) -> Iterator[tuple[Indices, int, bool]]:
    """Yield the batch of each step in stream order, with its task and whether it is offered to the memory.

    The task of a batch is the latest in it. The last batch of a task may be smaller, or is dropped. In task-free
    streams, batches cross task boundaries, unless partial batches are dropped or there are several passes. Every
    further pass has another order. A batch is yielded once for each of its updates. It is offered to the memory once,
    at the last update of the first pass; otherwise the memory would store duplicates.
    """
    size, task = config.batch, stream.train.task
    across = stream.task_free and config.partial == "keep" and config.passes == 1
    pieces = [np.arange(len(task))] if across else _places_by_task(task, stream.tasks)
    for number, places in enumerate(pieces):  # check all tasks before the first batch
        if config.partial == "drop" and len(places) < size:
            raise UserError(
                f"train.batch={size}: task {number} has {len(places)} samples, fewer than a batch, and "
                f"train.partial=drop drops them all. Use a smaller train.batch (--batch), or train.partial=keep."
            )
    for number, places in enumerate(pieces):
        end = len(places) // size * size if config.partial == "drop" else len(places)
        for repeat in range(config.passes):
            order = generator(seed, f"task {number} again {repeat}").permutation(places) if repeat else places
            for i in range(0, end, size):
                items = order[i : min(i + size, end)]
                for update in range(config.updates):
                    yield items, int(task[items[-1]]), repeat == 0 and update == config.updates - 1


def _places_by_task(task: Indices, tasks: int) -> list[Indices]:
    """Return the positions of the items of each task, in one pass over all items.

    Example:
        >>> [places.tolist() for places in _places_by_task(np.array([0, 0, 2, 1]), 3)]
        [[0, 1], [3], [2]]
    """
    ends = np.cumsum(np.bincount(task, minlength=tasks))
    return np.split(np.argsort(task, kind="stable"), ends[:-1])


def _ends(stream: TaskSequence, steps: Sequence[Step]) -> list[int]:
    """Return the number of steps after which each task ends; a task that is cut short ends with the last step."""
    task = stream.train.task[np.concatenate([step.stream for step in steps])]
    number = np.repeat(np.arange(1, len(steps) + 1), [len(step.stream) for step in steps])
    last = np.zeros(stream.tasks, dtype=np.int64)
    np.maximum.at(last, task, number)
    ends: list[int] = last[: task.max() + 1].tolist()
    return ends


def _check_rings(config: RunConfig, stream: TaskSequence) -> None:
    """Reject rings and replay of past tasks for streams without tasks."""
    rings = config.memory.kind == "ring"
    per_task = rings and config.memory.per == "task"
    if stream.task_free and (per_task or config.strategy.replay_from == "past"):
        setting = "memory.kind=ring with memory.per=task" if per_task else "strategy.replay_from=past"
        raise UserError(
            f"stream.scenario=free: a task-free stream has no task boundaries, which {setting} needs. "
            f"Use memory.kind=reservoir (or memory.per=class), and strategy.replay_from=all."
        )


def _check_labels(memory: Memory, config: RunConfig, stream: TaskSequence) -> None:
    """Reject memories of classes for multi-label streams."""
    if not stream.multi_label or memory.supports_multi_label:
        return
    per_class = " with memory.per=class" if config.memory.kind == "ring" else ""
    raise UserError(
        f"memory.kind={config.memory.kind}{per_class}: a sample of {config.stream.name} has several labels, so it has "
        f"no single class. Use memory.kind=prs or reservoir."
    )


class _Views:
    """Random crops and flips, drawn from a separate generator: for each batch the crops first, then the flips.

    Example:
        >>> batches = _Views(np.random.default_rng(0), 4).draw_batched([2, 1])
        >>> [views.tolist() for views in batches]
        [[[7, 5, 0], [4, 2, 0]], [[0, 0, 0]]]
    """

    def __init__(self, rng: np.random.Generator, padding: int) -> None:
        self.rng, self.offsets = rng, 2 * padding + 1

    def draw_batched(self, sizes: Sequence[int]) -> list[Views]:
        """Draw the views of consecutive batches, in one call of the generator."""
        counts = np.asarray(sizes, dtype=np.int64)
        bounds = np.repeat(np.tile([self.offsets, 2], len(counts)), np.outer(counts, [2, 1]).ravel())
        draws, is_crop = self.rng.integers(0, bounds), bounds == self.offsets
        views = np.concatenate([draws[is_crop].reshape(-1, 2), draws[~is_crop].reshape(-1, 1)], axis=1)
        ends = np.cumsum(counts).tolist()
        return [views[end - size : end] for size, end in zip(sizes, ends, strict=True)]


@dataclass(frozen=True)
class ExtraDraw:
    """An extra draw from the memory at every step, for a norm that requests one.

    Attributes:
        size: Number of samples; None for ``train.replay``.
        balance: Draw uniformly over the stored samples, or as many (plus or minus one) of each class or task.
    """

    size: int | None
    balance: Literal["none", "class", "task"]


def add_extra_draw(plan: Plan, config: RunConfig, stream: TaskSequence, seed: int, draw: ExtraDraw) -> Plan:
    """Return a plan whose steps have one more replay draw, from all samples in the memory.

    The draw has its own generators, so all other draws stay the same. A run without replay gets the memory that its
    settings name, for this draw alone.
    """
    if draw.balance == "class" and stream.multi_label:
        raise UserError(
            f"norm {config.norm.name!r}: requests an extra batch with balance='class', but a sample of "
            f"{config.stream.name} has several labels. Use balance='none'."
        )
    if draw.balance == "task" and stream.task_free:
        raise UserError(
            f"norm {config.norm.name!r}: requests an extra batch with balance='task', but stream.scenario=free has no "
            f"tasks. Use balance='none' or 'class'."
        )
    stored = plan
    if not plan.slots:
        with_replay = replace(config, strategy=replace(config.strategy, replay_from="all"))
        stored = make_plan(with_replay, stream, seed, draws=1)
    content = np.full(stored.slots, -1, dtype=np.int64)  # the item in each slot
    rng = generator(seed, "norm replay")
    views = None if stream.padding is None else _Views(generator(seed, "norm replay augment"), stream.padding)
    size = config.train.replay if draw.size is None else draw.size
    groups = None if draw.balance == "none" else getattr(stream.train, {"class": "label", "task": "task"}[draw.balance])
    steps = []
    for step, write in zip(plan.steps, (step.write for step in stored.steps), strict=True):
        slots = _draw_balanced(np.flatnonzero(content >= 0), content, groups, size, rng)
        items = content[slots]
        extended = replace(step, replay=(*step.replay, items), replay_slots=(*step.replay_slots, slots), has_extra=True)
        if views is not None and step.replay_views is not None:
            (drawn,) = views.draw_batched([len(items)])
            extended = replace(extended, replay_views=(*step.replay_views, drawn))
        steps.append(extended)
        content[write[write != NOT_STORED]] = step.stream[write != NOT_STORED]
    return replace(plan, steps=tuple(steps))


def _draw_balanced(
    slots: Indices, content: Indices, groups: NDArray[np.int64] | None, size: int, rng: np.random.Generator
) -> Indices:
    """Draw up to ``size`` of the slots, uniformly or with the same number of each group of items, plus or minus one.

    A group with too few samples contributes all of them, and the others contribute more.
    """
    if groups is None or len(slots) <= size:
        return draw_slots(slots, size, rng)
    order = rng.permutation(slots)
    of_group = groups[content[order]]
    names = rng.permutation(np.unique(of_group))  # in random order: which groups give one more
    rank = np.empty(len(order), dtype=np.int64)  # of each slot in its group
    turn = np.empty(len(order), dtype=np.int64)  # of its group
    for number, name in enumerate(names):
        members = np.flatnonzero(of_group == name)
        rank[members], turn[members] = np.arange(len(members)), number
    return order[np.lexsort((turn, rank))[:size]]


class PlanCache:
    """Streams and plans of one data set, made on first use.

    Args:
        source: The data set.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._plans: dict[tuple[object, ...], tuple[TaskSequence, Plan]] = {}
        self._in_progress: dict[tuple[object, ...], threading.Event] = {}

    def prepare(self, runs: Sequence[tuple[RunConfig, int, int]]) -> None:
        """Make the plans of runs in a background thread, in order; `of` waits for the one that it returns.

        For memories of the package: a user's draws from the global generators, which belong to the main thread.

        Args:
            runs: The settings, the seed and the number of replay draws of each run.
        """
        work = {self._key(*run): run for run in runs if run[0].memory.kind in MEMORIES}
        work = {key: run for key, run in work.items() if key not in self._plans and key not in self._in_progress}
        self._in_progress |= {key: threading.Event() for key in work}
        # A daemon thread, so that an interrupt does not wait for a long plan.
        threading.Thread(target=self._make_all, args=(work, dict(self._in_progress)), daemon=True).start()

    def _make_all(
        self, work: Mapping[tuple[object, ...], tuple[RunConfig, int, int]], made: Mapping[object, threading.Event]
    ) -> None:
        for key, (config, seed, draws) in work.items():
            try:
                self._plans[key] = self._make(config, seed, draws)
            except Exception:  # invalid settings: `of` makes the plan again, and raises the error in the main thread
                break
            finally:
                made[key].set()
        for key in work:
            made[key].set()

    def of(self, config: RunConfig, seed: int, draws: int, extra: ExtraDraw | None = None) -> tuple[TaskSequence, Plan]:
        """Return the stream and the plan of a run.

        Args:
            config: The settings of the run.
            seed: The seed of the run.
            draws: Number of replay draws per step.
            extra: An extra draw for a norm.
        """
        key = self._key(config, seed, draws, extra)
        if key in self._in_progress:
            self._in_progress.pop(key).wait()
        if key not in self._plans and extra is not None:
            stream, plan = self.of(config, seed, draws)
            self._plans[key] = stream, add_extra_draw(plan, config, stream, seed, extra)
        elif key not in self._plans:
            self._plans[key] = self._make(config, seed, draws)
        return self._plans[key]

    def _make(self, config: RunConfig, seed: int, draws: int) -> tuple[TaskSequence, Plan]:
        stream = build_stream(config.stream, self.source, seed)
        return stream, make_plan(config, stream, seed, draws)

    @staticmethod
    def _key(config: RunConfig, seed: int, draws: int, extra: ExtraDraw | None = None) -> tuple[object, ...]:
        train = config.train
        batching = train.batch, train.replay, train.partial, train.passes, train.updates, train.max_steps
        return config.stream, config.memory, config.strategy.replay_from, batching, seed, draws, extra
