"""The plan of a run: what is shown to the model at each step, computed ahead from labels and a seed.

Order, memory, replay and augmentation never depend on the model. So they are settled first, as integer arrays with one
row a step. Then a step has a fixed shape and asks nobody; a run is resumed exactly from a step number; and two norms
compared on one seed see the same samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.config.schema import MemoryConfig, RunConfig, TrainConfig
from contnorm.bench.memories import NOT_KEPT, Memory, PartitioningReservoir, Reservoir, Ring
from contnorm.bench.memories.batched_draws import drawn_each
from contnorm.bench.rng import generator
from contnorm.bench.streams.tasks import Stream
from contnorm.errors import UserError

__all__ = ["Plan", "Step", "build_memory", "make_plan", "offered_labels"]

Indices = NDArray[np.int64]
AT_ONCE = 1000  # steps whose replay is drawn together
MOST_STEPS = 10_000_000  # about a kilobyte of memory each
Views = NDArray[np.int64]  # (samples, 3): vertical and horizontal offset of the crop, and whether it is flipped


@dataclass(frozen=True)
class Step:
    """One step: items of the stream and the slots they are written to; items replayed and the slots they came from."""

    task: int
    stream: Indices
    write: Indices
    replay: tuple[Indices, ...]  # one array a draw, of items
    replay_slots: tuple[Indices, ...]
    stream_views: Views | None
    replay_views: tuple[Views, ...] | None

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many samples of the stream there are, and of each draw."""
        return len(self.stream), *map(len, self.replay)

    def passes(self, forward: str) -> tuple[int, ...]:
        """How many samples each forward pass has: all in one where they go jointly, else a pass a part that has any."""
        return (sum(self.sizes),) if forward == "joint" else tuple(size for size in self.sizes if size)


@dataclass(frozen=True)
class Plan:
    """All steps of a run.

    Attributes:
        steps: In order.
        ends: The number of steps done when each task ends, of the tasks that are reached: with ``max_steps``, those
            that at least one step shows a sample of.
        slots: How many slots the memory has.
    """

    steps: tuple[Step, ...]
    ends: tuple[int, ...]
    slots: int


def build_memory(config: MemoryConfig, stream: Stream, seed: int) -> Memory:
    """The memory a run asks for."""
    chance = generator(seed, "memory")
    if config.kind == "prs":
        return PartitioningReservoir(config.size, stream.outputs, config.rho, chance, config.quirk)
    if config.kind == "reservoir":
        return Reservoir(config.size, chance)
    return Ring(config.size, stream.tasks if config.per == "task" else stream.outputs, config.per)


def offered_labels(config: MemoryConfig, stream: Stream, items: Indices) -> Indices:
    """The labels of items as the memory takes them: PRS is made for several a sample, so it gets rows of 0 and 1."""
    labels: Indices = stream.train.label[items].astype(np.int64)
    if config.kind == "prs" and not stream.several_labels:
        return np.eye(stream.outputs, dtype=np.int64)[labels]
    return labels


def make_plan(config: RunConfig, stream: Stream, seed: int, draws: int) -> Plan:
    """Run through the stream once, without a model.

    Args:
        config: The run's settings.
        stream: Its tasks.
        seed: Its seed.
        draws: How many independent replay draws a step of the strategy has; 0 for none.
    """
    if draws:
        _check_rings(config, stream)
    try:
        memory = build_memory(config.memory, stream, seed)
        content = np.full(memory.capacity, -1, dtype=np.int64)  # the item in each slot
    except MemoryError as error:
        raise UserError(
            f"memory.size={config.memory.size}: so many slots do not fit into memory. Use a smaller --buffer."
        ) from error
    _check_step_count(config.train, stream)
    if draws:
        _check_replay_can_be_full(config, stream)
    chance = generator(seed, "replay")
    views = _Views(generator(seed, "augment"), stream.padding)
    steps: list[Step] = []
    batches = list(islice(_batches(config.train, stream, seed), config.train.max_steps))
    for start in range(0, len(batches), AT_ONCE):
        batch = batches[start : start + AT_ONCE]
        readable, writes = _passed_through(memory, config, stream, batch, draws)
        chosen = iter(drawn_each(readable, config.train.replay, chance))
        for (items, task, _), write in zip(batch, writes, strict=True):
            slots = tuple(islice(chosen, draws))
            replay = tuple(content[few] for few in slots)
            kept = write != NOT_KEPT
            content[write[kept]] = items[kept]  # of two in one slot the later stays
            steps.append(Step(task, items, write, replay, slots, views.of(items), views.of_all(replay)))
    return Plan(tuple(steps), tuple(_ends(stream, steps)), memory.capacity if draws else 0)


def _check_step_count(config: TrainConfig, stream: Stream) -> None:
    """Refuse a plan of more steps than memory can hold, before it is begun."""
    steps = -(-len(stream.train.task) // config.batch) * config.passes
    if min(steps, config.max_steps or steps) > MOST_STEPS:
        raise UserError(
            f"train.passes={config.passes}: makes {steps:,} steps, and a plan has at most {MOST_STEPS:,}. Use fewer "
            f"passes, a larger --batch, or --max-steps."
        )


def _passed_through(
    memory: Memory, config: RunConfig, stream: Stream, batches: Sequence[tuple[Indices, int, bool]], draws: int
) -> tuple[list[Indices], list[Indices]]:
    """Which slots each draw of each batch may read, and where each batch is written then."""
    readable, writes = [], []
    for items, task, first_time in batches:
        if draws:
            readable += [memory.readable(task if config.strategy.replay_from == "past" else None)] * draws
        if draws and first_time:
            labels = offered_labels(config.memory, stream, items)
            writes.append(memory.offer(labels, 0 if stream.task_free else task))
        else:
            writes.append(np.full(len(items), NOT_KEPT))
    return readable, writes


def _check_replay_can_be_full(config: RunConfig, stream: Stream) -> None:
    """Refuse a memory that could never fill a replay batch, not even in the last task.

    What rings hold grows with the tasks: in early ones a batch may be smaller, as with the published rings of one
    sample a class (Chaudhry et al., 2019). With one task and replay of the past there is nothing to replay at all.
    """
    past = config.strategy.replay_from == "past"
    if past and stream.tasks == 1:
        return
    rings = _rings_read(config.memory, stream, past)
    size, replay = config.memory.size, config.train.replay
    if rings * size < replay:
        raise UserError(
            f"memory.size={size} is too small: {_in_words(config.memory, rings, past)} {rings * size} slots in all, "
            f"and a replay batch of {replay} would never be full. Use a larger memory (--buffer "
            f"{-(-replay // rings)}), or a smaller replay batch (--replay {rings * size})."
        )


def _rings_read(config: MemoryConfig, stream: Stream, past: bool) -> int:
    """How many rings can be read in the last task; one where the memory is all one piece."""
    if config.kind != "ring":
        return 1
    readable = stream.train.task < stream.tasks - past
    return len(np.unique((stream.train.task if config.per == "task" else stream.train.label)[readable]))


def _in_words(config: MemoryConfig, rings: int, past: bool) -> str:
    if config.kind != "ring":
        return "it has"
    what = {"task": "tasks", "class": "classes of the tasks" if past else "classes"}[config.per]
    return f"the rings of the {rings} {what} before the last have" if past else f"the rings of all {rings} {what} have"


def _batches(config: TrainConfig, stream: Stream, seed: int) -> Iterator[tuple[Indices, int, bool]]:
    """The items in their order, cut into batches, each with its task (the latest in it) and whether it is new.

    The last batch of a task may be smaller, or is left out. Without tasks to know of, batches go across their borders,
    unless what fills no batch is left out, or tasks are gone over again. That is done in another order each time, and
    samples are not new then: a memory is offered those of the first pass, or it would come to hold one many times.
    """
    size, task = config.batch, stream.train.task
    across = stream.task_free and config.partial == "keep" and config.passes == 1
    pieces = [np.arange(len(task))] if across else _places_by_task(task, stream.tasks)
    for number, places in enumerate(pieces):  # all of them first: a run may be stopped before it comes to the last
        if config.partial == "drop" and len(places) < size:
            raise UserError(
                f"train.batch={size}: task {number} has {len(places)} samples, none of which would be learned with "
                f"train.partial=drop. Use a smaller --batch, or train.partial=keep."
            )
    for number, places in enumerate(pieces):
        end = len(places) // size * size if config.partial == "drop" else len(places)
        for again in range(config.passes):
            order = generator(seed, f"task {number} again {again}").permutation(places) if again else places
            for i in range(0, end, size):
                items = order[i : min(i + size, end)]
                yield items, int(task[items[-1]]), again == 0


def _places_by_task(task: Indices, tasks: int) -> list[Indices]:
    """The places of each task's items, in one pass over all of them.

    Example:
        >>> [places.tolist() for places in _places_by_task(np.array([0, 0, 2, 1]), 3)]
        [[0, 1], [3], [2]]
    """
    ends = np.cumsum(np.bincount(task, minlength=tasks))
    return np.split(np.argsort(task, kind="stable"), ends[:-1])


def _ends(stream: Stream, steps: Sequence[Step]) -> list[int]:
    """How many steps it takes until all of each task was shown; a task that the steps end in ends with them."""
    task = stream.train.task[np.concatenate([step.stream for step in steps])]
    number = np.repeat(np.arange(1, len(steps) + 1), [len(step.stream) for step in steps])
    last = np.zeros(stream.tasks, dtype=np.int64)
    np.maximum.at(last, task, number)
    ends: list[int] = last[: task.max() + 1].tolist()
    return ends


def _check_rings(config: RunConfig, stream: Stream) -> None:
    """Refuse rings of what a stream has not, and a past that is not known."""
    rings = config.memory.kind == "ring"
    of_tasks = rings and config.memory.per == "task"
    if stream.task_free and (of_tasks or config.strategy.replay_from == "past"):
        wrong = "memory.kind=ring with memory.per=task" if of_tasks else "strategy.replay_from=past"
        raise UserError(
            f"stream.scenario=free: a task-free stream has no tasks to go by, and {wrong} does. "
            f"Use memory.kind=reservoir (or memory.per=class), and strategy.replay_from=all."
        )
    if stream.several_labels and rings:
        raise UserError(
            f"memory.kind=ring with memory.per=class: a sample of {config.stream.name} has several labels, and would "
            f"belong to several rings. Use memory.kind=prs or reservoir."
        )


class _Views:
    """Crops and flips, drawn from their own generator; none where the stream has no augmentation."""

    def __init__(self, chance: np.random.Generator, padding: int | None) -> None:
        self.chance, self.padding = chance, padding

    def of(self, items: Indices) -> Views | None:
        if self.padding is None:
            return None
        crop = self.chance.integers(0, 2 * self.padding + 1, size=(len(items), 2))
        return np.concatenate([crop, self.chance.integers(0, 2, size=(len(items), 1))], axis=1)

    def of_all(self, draws: tuple[Indices, ...]) -> tuple[Views, ...] | None:
        if self.padding is None:
            return None
        return tuple(v for v in (self.of(items) for items in draws) if v is not None)
