"""The plan of a run: the samples of each training step, computed in advance from labels and a seed.

Order, memory, replay and augmentation do not depend on the model. So they are computed first, as integer arrays for
each step. A training step then has a fixed shape and makes no decisions, a run resumes bit-exactly from a step number,
and two norms that are compared on one seed see the same samples.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.components import user_code_errors
from contnorm.bench.config.schema import RunConfig, TrainConfig
from contnorm.bench.data.dataset import Source
from contnorm.bench.memories import MEMORIES, NOT_STORED, Memory, StreamInfo, build_memory
from contnorm.bench.memories.base import draw_slots
from contnorm.bench.rng import generator
from contnorm.bench.streams.tasks import TaskSequence, build_stream
from contnorm.errors import UserError

if TYPE_CHECKING:
    from contnorm.tags import ReplayRequest  # needs torch

Indices = NDArray[np.int64]
STEPS_PER_DRAW = 1000  # steps whose crops and flips are drawn in one call
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
        >>> Plan((step,), ends=(1,), slots=0)
        Plan(ends=(1,), slots=0)
    """

    steps: tuple[Step, ...] = field(repr=False)
    ends: tuple[int, ...]
    slots: int


def make_plan(config: RunConfig, stream: TaskSequence, seed: int, draws: int) -> Plan:
    """Make the plan of one pass over the stream, without a model.

    Args:
        config: The settings of the run.
        stream: The stream of tasks.
        seed: The seed of the run.
        draws: Number of independent replay draws per step of the strategy; 0 without replay.
    """
    errors: AbstractContextManager[object] = nullcontext()
    if config.memory.kind not in MEMORIES:
        errors = user_code_errors(f"memory {config.memory.kind!r}", "while the plan of the run was made")
    with errors:
        info = StreamInfo(stream.outputs, stream.tasks, stream.multi_label)
        memory = build_memory(config.memory, info, generator(seed, "memory"))
        if draws:
            _check_memory(memory, config, stream)
        content = np.full(memory.capacity, -1, dtype=np.int64)  # the item in each slot
        rng = generator(seed, "replay")
        views = None if stream.padding is None else _Views(generator(seed, "augment"), stream.padding)
        before = config.strategy.replay_from == "past"
        steps: list[Step] = []
        batches = list(islice(_batches(config.train, stream, seed), config.train.max_steps))
        for start in range(0, len(batches), STEPS_PER_DRAW):
            batch = batches[start : start + STEPS_PER_DRAW]
            readable, writes = [], []
            for items, task, is_offered in batch:
                readable += [memory.readable(task if before else None)] * draws if draws else []
                if draws and is_offered:
                    labels = stream.train.label[items].astype(np.int64)
                    if memory.multi_hot and not stream.multi_label:
                        labels = np.eye(stream.outputs, dtype=np.int64)[labels]
                    writes.append(memory.offer(labels, 0 if stream.task_free else task))
                else:
                    writes.append(np.full(len(items), NOT_STORED))
            chosen = [draw_slots(slots, config.train.replay, rng) for slots in readable]
            of_step = [tuple(chosen[draws * i : draws * (i + 1)]) for i in range(len(batch))]
            sizes = [len(part) for (items, _, _), of in zip(batch, of_step, strict=True) for part in (items, *of)]
            drawn = iter(() if views is None else views.draw_batched(sizes))
            for (items, task, _), write, slots in zip(batch, writes, of_step, strict=True):
                replay = tuple(content[draw] for draw in slots)
                stored = write != NOT_STORED
                content[write[stored]] = items[stored]  # if two items have the same slot, the later one stays
                stream_views = None if views is None else next(drawn)
                replay_views = None if views is None else tuple(islice(drawn, draws))
                steps.append(Step(task, items, write, replay, slots, stream_views, replay_views))
        last = np.zeros(stream.tasks, dtype=np.int64)  # a task that is cut short ends with the last step
        shown = stream.train.task[np.concatenate([step.stream for step in steps])]
        np.maximum.at(last, shown, np.repeat(np.arange(1, len(steps) + 1), [len(step.stream) for step in steps]))
        ends = np.maximum.accumulate(last[: shown.max() + 1])
        return Plan(tuple(steps), tuple(ends.tolist()), memory.capacity if draws else 0)


def _check_memory(memory: Memory, config: RunConfig, stream: TaskSequence) -> None:
    """Raise an error for a memory that the stream can't fill.

    A ring per task and replay of past tasks need tasks, and a memory of classes needs one class per sample. A memory
    must be able to fill a replay batch in the last task; in earlier ones a batch may be smaller, as with the published
    rings of one sample per class (Chaudhry et al., 2019).
    """
    settings, past = config.memory, config.strategy.replay_from == "past"
    is_ring = settings.kind == "ring"
    if stream.task_free and (past or (is_ring and settings.per == "task")):
        raise UserError(
            "stream.scenario=free: a task-free stream has no task boundaries, which memory.kind=ring with "
            "memory.per=task and strategy.replay_from=past need. Use memory.kind=reservoir (or memory.per=class), and "
            "strategy.replay_from=all."
        )
    if stream.multi_label and not memory.supports_multi_label:
        raise UserError(
            f"memory.kind={settings.kind}: a sample of {config.stream.name} has several labels, so it has no single "
            f"class. Use memory.kind=prs or reservoir."
        )
    if past and stream.tasks == 1:
        return  # nothing to replay
    slots = memory.capacity
    if is_ring:
        readable = stream.train.task < stream.tasks - past
        rings = len(np.unique((stream.train.task if settings.per == "task" else stream.train.label)[readable]))
        slots = rings * settings.size
    if slots < config.train.replay:
        raise UserError(
            f"memory.size={settings.size} is too small: {slots} slots can be replayed in the last task, and a replay "
            f"batch of {config.train.replay} would never be full. Use a larger memory.size (--buffer), or a smaller "
            f"train.replay (--replay)."
        )


def _batches(config: TrainConfig, stream: TaskSequence, seed: int) -> Iterator[tuple[Indices, int, bool]]:
    """Yield the batch of each step in stream order, with its task and whether it is offered to the memory.

    The task of a batch is the latest in it. The last batch of a task may be smaller, or is dropped. In task-free
    streams, batches cross task boundaries, unless partial batches are dropped or there are several passes. Every
    further pass has another order. A batch is yielded once for each of its updates. It is offered to the memory once,
    at the last update of the first pass; otherwise the memory would store duplicates.
    """
    size, task = config.batch, stream.train.task
    is_blurred = bool((np.diff(task) < 0).any())
    across = stream.task_free and config.passes == 1 and (config.partial == "keep" or is_blurred)
    ends = np.cumsum(np.bincount(task, minlength=stream.tasks))
    pieces = [np.arange(len(task))] if across else np.split(np.argsort(task, kind="stable"), ends[:-1])
    smallest = min(map(len, pieces))
    if smallest < size:
        if config.partial == "drop":
            raise UserError(
                f"train.batch={size}: a task has {smallest} samples, fewer than a batch, and train.partial=drop drops "
                f"them all. Use a smaller train.batch (--batch), or train.partial=keep."
            )
        warn_once(f"train.batch={size}: a task has {smallest} samples only, and is learned in one batch of them.")
    for number, places in enumerate(pieces):
        end = len(places) // size * size if config.partial == "drop" else len(places)
        for repeat in range(config.passes):
            order = generator(seed, f"task {number} again {repeat}").permutation(places) if repeat else places
            for i in range(0, end, size):
                items = order[i : min(i + size, end)]
                for update in range(config.updates):
                    yield items, int(task[items].max()), repeat == 0 and update == config.updates - 1


@cache  # once per process, not for each seed
def warn_once(text: str) -> None:
    """Log a warning, unless it was logged already."""
    logging.getLogger("contnorm").warning(text)


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


def add_extra_draw(plan: Plan, config: RunConfig, stream: TaskSequence, seed: int, draw: ReplayRequest) -> Plan:
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
    rank = np.empty(len(order), dtype=np.int64)  # rank of each slot in its group
    turn = np.empty(len(order), dtype=np.int64)  # turn of the group of each slot
    for number, name in enumerate(names):
        members = np.flatnonzero(of_group == name)
        rank[members], turn[members] = np.arange(len(members)), number
    return order[np.lexsort((turn, rank))[:size]]


def stored_items(plan: Plan, steps: int) -> Indices:
    """Return the items in the memory after a number of steps, in the order of the slots."""
    content = np.full(plan.slots, -1, dtype=np.int64)
    if steps:
        items = np.concatenate([step.stream for step in plan.steps[:steps]])
        slots = np.concatenate([step.write for step in plan.steps[:steps]])
        stored = slots != NOT_STORED
        content[slots[stored]] = items[stored]  # if items have the same slot, the latest one stays
    return content[content >= 0]


def take_census(plan: Plan, stream: TaskSequence) -> dict[str, Any]:
    """Return class counts in the memory and in the stream at the end of each task, as a record has them.

    Returns:
        The ``capacity`` of the memory, and lists over the tasks: of texts with one number per label, ``held`` by the
        memory and ``shown`` in the stream so far, each sample counted once; and of the numbers of samples that were
        ``written`` so far, and that were ``evicted`` by others.
    """
    census: dict[str, Any] = {"capacity": plan.slots, "held": [], "shown": [], "written": [], "evicted": []}
    seen, written, done = np.zeros(len(stream.train), dtype=bool), 0, 0
    for end in plan.ends:
        for step in plan.steps[done:end]:
            seen[step.stream] = True
            written += int((step.write != NOT_STORED).sum())
        done, items = end, stored_items(plan, end)
        for name, chosen in (("held", items), ("shown", np.flatnonzero(seen))):
            labels = stream.train.label[chosen]
            counts = labels.sum(0) if stream.multi_label else np.bincount(labels, minlength=stream.outputs)
            census[name].append(" ".join(map(str, counts.astype(np.int64).tolist())))
        census["written"].append(written)
        census["evicted"].append(written - len(items))
    return census


def sample_weights(config: RunConfig, plan: Plan, tasks: Indices, current: int) -> NDArray[np.float64]:
    """Return the weight of each stored sample when moments are estimated from them, by ``evaluate.weights``.

    With ``plain``, every stored sample has the same weight; with ``task``, every task, divided equally among its
    samples. With ``batch``, they are as in a training batch at the end of the task: the ``train.batch`` samples of the
    stream are represented by the stored samples of the current task, the replayed ones by those that the strategy may
    draw. If the memory holds no sample of the current task, the replayed part remains.

    Args:
        config: The settings of the run.
        plan: The plan of the run.
        tasks: The task of each stored sample.
        current: The task that was learned last.

    Example:
        >>> from contnorm.bench.config.schema import from_dict
        >>> config = from_dict({"evaluate": {"moments": "memory", "weights": "task"}})
        >>> sample_weights(config, Plan((), (), 4), np.array([0, 0, 0, 1]), current=1).round(2).tolist()
        [0.33, 0.33, 0.33, 1.0]
    """
    weights = np.ones(len(tasks))
    if config.evaluate.weights == "task":
        weights /= np.bincount(tasks)[tasks]
    elif config.evaluate.weights == "batch":
        of_stream = tasks == current
        replayed = tasks < current if config.strategy.replay_from == "past" else np.ones(len(tasks), dtype=bool)
        draws = len(plan.steps[0].replay) - plan.steps[0].has_extra  # an extra draw for a norm is not part of a batch
        shown = draws * min(config.train.replay, int(replayed.sum()))
        weights = np.where(of_stream, config.train.batch / max(1, int(of_stream.sum())), 0.0)
        weights += np.where(replayed, shown / max(1, int(replayed.sum())), 0.0)
    return weights


class PlanCache:
    """Streams and plans of one data set, made on first use.

    Args:
        source: The data set.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._plans: dict[tuple[object, ...], tuple[TaskSequence, Plan]] = {}

    def of(
        self, config: RunConfig, seed: int, draws: int, extra: ReplayRequest | None = None
    ) -> tuple[TaskSequence, Plan]:
        """Return the stream and the plan of a run.

        Args:
            config: The settings of the run.
            seed: The seed of the run.
            draws: Number of replay draws per step.
            extra: An extra draw for a norm.
        """
        train = config.train
        batching = train.batch, train.replay, train.partial, train.passes, train.updates, train.max_steps
        key = config.stream, config.memory, config.strategy.replay_from, batching, seed, draws, extra
        if key not in self._plans:
            if extra is None:
                stream = build_stream(config.stream, self.source, seed)
                self._plans[key] = stream, make_plan(config, stream, seed, draws)
            else:
                stream, plan = self.of(config, seed, draws)
                self._plans[key] = stream, add_extra_draw(plan, config, stream, seed, extra)
        return self._plans[key]
