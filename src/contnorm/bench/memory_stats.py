"""What was in the memory: how often each label is held at each task's end, and how often the stream has shown it.

It follows from a plan alone. Beside each other the two say what a memory does with a long tail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.memories import NOT_KEPT
from contnorm.bench.plan import Plan
from contnorm.bench.streams.tasks import Stream

__all__ = ["Census", "take_census"]

Counts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Census:
    """Counts at each task's end.

    Attributes:
        capacity: Slots of the memory; 0 where there is none.
        held: (tasks, labels) how many slots hold a sample of each label.
        shown: (tasks, labels) how many samples of each label the stream has shown by then, each counted once.
        written: (tasks,) how many samples had been written to the memory.
        evicted: (tasks,) how many of these took the place of another.
    """

    capacity: int
    held: Counts
    shown: Counts
    written: tuple[int, ...]
    evicted: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """For a record: a line of numbers each, since a record puts every value on a line of its own.

        Example:
            >>> Census(2, held=((1, 1),), shown=((3, 1),), written=(3,), evicted=(1,)).to_json()
            {'capacity': 2, 'held': ['1 1'], 'shown': ['3 1'], 'written': [3], 'evicted': [1]}
        """
        lines = {name: [" ".join(map(str, row)) for row in getattr(self, name)] for name in ("held", "shown")}
        return {"capacity": self.capacity, **lines, "written": list(self.written), "evicted": list(self.evicted)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Census:
        """What `to_json` wrote."""
        held, shown = (tuple(tuple(map(int, line.split())) for line in raw[name]) for name in ("held", "shown"))
        return cls(int(raw["capacity"]), held, shown, tuple(raw["written"]), tuple(raw["evicted"]))


def take_census(plan: Plan, stream: Stream) -> Census:
    """Go through the writes of a plan and count at each task's end."""
    content = np.full(max(plan.slots, 1), -1, dtype=np.int64)
    seen = np.zeros(len(stream.train), dtype=bool)
    rows: list[tuple[tuple[int, ...], tuple[int, ...], int, int]] = []
    written = evicted = done = 0
    for end in plan.ends:
        for step in plan.steps[done:end]:
            seen[step.stream] = True
            for item, slot in zip(step.stream, step.write, strict=True):
                if slot != NOT_KEPT:
                    written, evicted = written + 1, evicted + int(content[slot] >= 0)
                    content[slot] = item
        done = end
        held = _counts(stream, content[content >= 0])
        rows.append((held, _counts(stream, np.flatnonzero(seen)), written, evicted))
    columns = zip(*rows, strict=True)
    return Census(plan.slots, *(tuple(column) for column in columns))


def _counts(stream: Stream, items: NDArray[np.int64]) -> tuple[int, ...]:
    """How many of the items have each label."""
    labels = stream.train.label[items]
    counts = labels.sum(0, dtype=np.int64) if stream.several_labels else np.bincount(labels, minlength=stream.outputs)
    return tuple(counts.tolist())
