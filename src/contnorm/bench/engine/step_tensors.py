"""Steps of a plan as numbers on a device: one row a step, all of one shape, in one table.

A captured step reads its row with a single gather; everything else is a view into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contnorm.bench.memories import NOT_KEPT
from contnorm.bench.plan import Step
from contnorm.bench.streams.tasks import Items

__all__ = ["Row", "Rows", "rows_of", "samples_of", "stretch_end"]

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """One step. What is known of samples is given for those of the stream, then for those of each replay draw.

    Attributes:
        sizes: How many samples the stream has in it, and each draw.
        image: Where the images are.
        label, task: Of each sample; for a label, where samples have several, the item whose labels they are.
        slots: The slots the stream's samples are written to, then those the draws came from.
        views: (samples, 3) crops and flips, where the stream has any.
    """

    sizes: tuple[int, ...]
    image: Tensor
    label: Tensor
    task: Tensor
    slots: Tensor
    views: Tensor | None


@dataclass(frozen=True)
class Rows:
    """Rows of one shape: a table of whole numbers, and how many samples each part has."""

    table: Tensor
    sizes: tuple[int, ...]
    augmented: bool

    def at(self, number: int | Tensor) -> Row:
        """One row; by a tensor on the device where the number must not come from the host."""
        row = self.table[number] if isinstance(number, int) else self.table.index_select(0, number).squeeze(0)
        samples = sum(self.sizes)
        image, label, task, slots, views = torch.split(row, [samples] * 4 + [len(row) - 4 * samples])
        return Row(self.sizes, image, label, task, slots, views.view(samples, 3) if self.augmented else None)

    def overwrite(self, others: Rows) -> None:
        """Take on the rows of others, which may be fewer, in place: a captured step goes on with them."""
        self.table[: len(others.table)].copy_(others.table)


def rows_of(steps: Sequence[Step], images: Sequence[Indices], items: Items, spare: int, device: torch.device) -> Rows:
    """The rows of steps of one shape.

    Args:
        steps: The steps.
        images: For each, where the images of its samples are.
        items: What the steps' numbers stand for.
        spare: The slot for what is not kept, or is overwritten in the same step.
        device: Where the rows go.
    """
    first = steps[0]
    samples = samples_of(steps)
    label = items.label[samples] if items.label.ndim == 1 else samples
    slots = [_last_writers(_table([step.write for step in steps]), spare), *_draws([s.replay_slots for s in steps])]
    views = (
        [] if first.stream_views is None else [_table([s.stream_views for s in steps if s.stream_views is not None])]
    )
    views += _draws([step.replay_views for step in steps if step.replay_views is not None])
    table = np.concatenate([_table(images), label, items.task[samples], *slots, *views], axis=1)
    return Rows(torch.from_numpy(table).to(device), first.sizes, first.stream_views is not None)


def samples_of(steps: Sequence[Step]) -> Indices:
    """(steps, samples) the items of steps of one shape: of the stream, then of each draw."""
    return np.concatenate([_table([step.stream for step in steps]), *_draws([step.replay for step in steps])], axis=1)


def _draws(of_steps: Sequence[tuple[Indices, ...]]) -> list[Indices]:
    """A table of each draw, from the draws of each step."""
    return [_table(one) for one in zip(*of_steps, strict=True)]


def _table(rows: Sequence[Indices]) -> Indices:
    """A row of numbers for each step; at once, since a stretch has thousands of steps."""
    return np.concatenate(rows).reshape(len(rows), -1)


def _last_writers(write: Indices, spare: int) -> Indices:
    """In each row each slot once, at its last writer; all else to the spare slot."""
    order = np.argsort(write, axis=1, kind="stable")
    ranked = np.take_along_axis(write, order, axis=1)
    last = np.ones(write.shape, dtype=bool)
    last[:, :-1] = ranked[:, :-1] != ranked[:, 1:]
    found = np.empty_like(write)
    np.put_along_axis(found, order, np.where(last & (ranked != NOT_KEPT), ranked, spare), axis=1)
    return found


def stretch_end(steps: Sequence[Step], start: int) -> int:
    """Where the run of steps ends that have the shape of the one at ``start``."""
    end = start
    while end < len(steps) and steps[end].sizes == steps[start].sizes:
        end += 1
    return end
