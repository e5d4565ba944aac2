"""Class counts in the memory compared with the stream, at the end of each task.

The counts follow from the plan alone. They show how a memory changes the shares of a long-tailed class distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.memories import NOT_STORED
from contnorm.bench.plan import Plan
from contnorm.bench.streams.tasks import TaskSequence

__all__ = ["Census", "take_census"]

Counts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Census:
    """Counts at the end of each task.

    Attributes:
        capacity: Number of slots of the memory; 0 without a memory.
        held: (tasks, labels) number of samples of each label in the memory.
        shown: (tasks, labels) number of samples of each label in the stream so far, each counted once.
        written: (tasks,) number of samples written to the memory so far.
        evicted: (tasks,) number of writes so far that replaced another sample.
    """

    capacity: int
    held: Counts
    shown: Counts
    written: tuple[int, ...]
    evicted: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the counts for a record. Rows are strings, since a record has every JSON value on its own line.

        Example:
            >>> Census(2, held=((1, 1),), shown=((3, 1),), written=(3,), evicted=(1,)).to_json()
            {'capacity': 2, 'held': ['1 1'], 'shown': ['3 1'], 'written': [3], 'evicted': [1]}
        """
        lines = {name: [" ".join(map(str, row)) for row in getattr(self, name)] for name in ("held", "shown")}
        return {"capacity": self.capacity, **lines, "written": list(self.written), "evicted": list(self.evicted)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Census:
        """Build the counts from the output of `to_json`."""
        held, shown = (tuple(tuple(map(int, line.split())) for line in raw[name]) for name in ("held", "shown"))
        return cls(int(raw["capacity"]), held, shown, tuple(raw["written"]), tuple(raw["evicted"]))


def take_census(plan: Plan, stream: TaskSequence) -> Census:
    """Replay the memory writes of a plan and count labels at the end of each task."""
    content = np.full(max(plan.slots, 1), -1, dtype=np.int64)
    seen = np.zeros(len(stream.train), dtype=bool)
    rows: list[tuple[tuple[int, ...], tuple[int, ...], int, int]] = []
    written = evicted = done = 0
    for end in plan.ends:
        for step in plan.steps[done:end]:
            seen[step.stream] = True
            for item, slot in zip(step.stream, step.write, strict=True):
                if slot != NOT_STORED:
                    written, evicted = written + 1, evicted + int(content[slot] >= 0)
                    content[slot] = item
        done = end
        held = _counts(stream, content[content >= 0])
        rows.append((held, _counts(stream, np.flatnonzero(seen)), written, evicted))
    columns = zip(*rows, strict=True)
    return Census(plan.slots, *(tuple(column) for column in columns))


def _counts(stream: TaskSequence, items: NDArray[np.int64]) -> tuple[int, ...]:
    """Return the number of items with each label."""
    labels = stream.train.label[items]
    counts = labels.sum(0, dtype=np.int64) if stream.multi_label else np.bincount(labels, minlength=stream.outputs)
    return tuple(counts.tolist())
