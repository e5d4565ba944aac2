"""The plan of a run: what is shown to the model at each step, computed ahead from labels and a seed.

Order, memory, replay and augmentation never depend on the model. So they are settled first, as integer arrays with one
row a step. Then a step has a fixed shape and asks nobody; a run is resumed exactly from a step number; and two norms
compared on one seed see the same samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contnorm.config import MemoryConfig, RunConfig
from contnorm.errors import UserError
from contnorm.memories import NOT_KEPT, Memory, Reservoir, Ring
from contnorm.memories.base import drawn
from contnorm.seeds import generator
from contnorm.streams.classification import Stream

__all__ = ["Plan", "Step", "build_memory", "make_plan"]

Indices = NDArray[np.int64]
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


@dataclass(frozen=True)
class Plan:
    """All steps of a run.

    Attributes:
        steps: In order.
        ends: The number of steps done when each task ends.
        slots: How many slots the memory has.
    """

    steps: tuple[Step, ...]
    ends: tuple[int, ...]
    slots: int


def build_memory(config: MemoryConfig, stream: Stream, seed: int) -> Memory:
    """The memory a run asks for."""
    if config.kind == "reservoir":
        return Reservoir(config.size, generator(seed, "memory"))
    return Ring(config.size, stream.tasks if config.per == "task" else stream.outputs, config.per)


def make_plan(config: RunConfig, stream: Stream, seed: int, draws: int) -> Plan:
    """Run through the stream once, without a model.

    Args:
        config: The run's settings.
        stream: Its tasks.
        seed: Its seed.
        draws: How many independent replay draws a step of the strategy has; 0 for none.
    """
    if draws and stream.task_free:
        _check_task_free(config)
    memory = build_memory(config.memory, stream, seed)
    if draws and memory.capacity < config.train.replay and config.memory.kind == "reservoir":
        raise UserError(
            f"memory.size={config.memory.size} is smaller than the replay batch of {config.train.replay}. "
            f"Use a larger memory (--buffer), or a smaller replay batch (--replay)."
        )
    chance = generator(seed, "replay")
    views = _Views(generator(seed, "augment"), stream.padding)
    content = np.full(memory.capacity, -1, dtype=np.int64)  # the item in each slot
    steps: list[Step] = []
    for items, task in _batches(stream, config.train.batch):
        before = task if config.strategy.replay_from == "past" else None
        slots = tuple(drawn(memory.readable(before), config.train.replay, chance) for _ in range(draws))
        replay = tuple(content[chosen] for chosen in slots)
        known = 0 if stream.task_free else task
        write = memory.offer(stream.train.label[items], known) if draws else np.full(len(items), NOT_KEPT)
        kept = write != NOT_KEPT
        content[write[kept]] = items[kept]  # of two in one slot the later stays
        steps.append(Step(task, items, write, replay, slots, views.of(items), views.of_all(replay)))
    ends = _ends(stream, steps)
    limit = config.train.max_steps
    if limit is not None:
        steps, ends = steps[:limit], [min(end, limit) for end in ends]
    return Plan(tuple(steps), tuple(ends), memory.capacity if draws else 0)


def _batches(stream: Stream, size: int) -> Iterator[tuple[Indices, int]]:
    """The items in their order, cut into batches, each with its task (the latest in it): a task's last may be smaller.

    Without tasks to know of, batches go across their borders.
    """
    task = stream.train.task
    pieces = [np.arange(len(task))] if stream.task_free else [np.flatnonzero(task == t) for t in range(stream.tasks)]
    for places in pieces:
        for i in range(0, len(places), size):
            items = places[i : i + size]
            yield items, int(task[items[-1]])


def _ends(stream: Stream, steps: Sequence[Step]) -> list[int]:
    """How many steps it takes until all items of each task were shown."""
    shown = np.cumsum([len(step.stream) for step in steps])
    last = np.cumsum(np.bincount(stream.train.task, minlength=stream.tasks))
    return [int(end) + 1 for end in np.searchsorted(shown, last)]


def _check_task_free(config: RunConfig) -> None:
    rings = config.memory.kind == "ring" and config.memory.per == "task"
    if rings or config.strategy.replay_from == "past":
        wrong = "memory.kind=ring with memory.per=task" if rings else "strategy.replay_from=past"
        raise UserError(
            f"stream.scenario=free: a task-free stream has no tasks to go by, and {wrong} does. "
            f"Use memory.kind=reservoir (or memory.per=class), and strategy.replay_from=all."
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
