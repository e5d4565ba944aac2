"""The steps of a plan as an index tensor on a device: one row per step, for steps of the same shape.

A captured step reads its row with a single gather; all parts of it are views of that row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contnorm.bench.memories import NOT_STORED
from contnorm.bench.plan import Step
from contnorm.bench.streams.tasks import Items

__all__ = ["StepIndices", "StepTable", "build_step_table", "samples_of", "stretch_end"]

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class StepIndices:
    """One step. Each tensor has the samples of the stream first, then those of each replay draw.

    Attributes:
        sizes: Number of samples of the stream, and of each replay draw.
        image: Index of the image of each sample.
        label: Label of each sample; for multi-label streams the index of the item that has the labels.
        task: Task of each sample.
        slots: Memory slots that the samples of the stream are written to, then those that the draws are read from.
        views: (samples, 3) crops and flips; None without augmentation.
    """

    sizes: tuple[int, ...]
    image: Tensor
    label: Tensor
    task: Tensor
    slots: Tensor
    views: Tensor | None


@dataclass(frozen=True)
class StepTable:
    """The rows of steps of the same shape.

    Attributes:
        table: (steps, values) integers.
        sizes: Number of samples of the stream, and of each replay draw.
        augmented: Whether rows contain crops and flips.
    """

    table: Tensor
    sizes: tuple[int, ...]
    augmented: bool

    def at(self, number: int | Tensor) -> StepIndices:
        """Return one row. In a CUDA graph, its number is a tensor on the device."""
        row = self.table[number] if isinstance(number, int) else self.table.index_select(0, number).squeeze(0)
        samples = sum(self.sizes)
        image, label, task, slots, views = torch.split(row, [samples] * 4 + [len(row) - 4 * samples])
        return StepIndices(self.sizes, image, label, task, slots, views.view(samples, 3) if self.augmented else None)

    def overwrite(self, others: StepTable) -> None:
        """Copy other rows, which may be fewer, into this table in place, so that a captured step reads them."""
        self.table[: len(others.table)].copy_(others.table)


def build_step_table(
    steps: Sequence[Step],
    samples: Indices,
    images: Sequence[Indices],
    items: Items,
    spare: int,
    device: torch.device,
) -> StepTable:
    """Build the rows of steps of the same shape.

    Args:
        steps: The steps.
        samples: The items of the steps, as `samples_of` returns them.
        images: For each step, the indices of the images of its samples.
        items: The items that the steps refer to.
        spare: The slot for samples that are not stored, or are overwritten in the same step.
        device: The device of the rows.
    """
    first = steps[0]
    label = items.label[samples] if items.label.ndim == 1 else samples
    slots = [_last_writers(_table([step.write for step in steps]), spare), *_draws([s.replay_slots for s in steps])]
    views = (
        [] if first.stream_views is None else [_table([s.stream_views for s in steps if s.stream_views is not None])]
    )
    views += _draws([step.replay_views for step in steps if step.replay_views is not None])
    table = np.concatenate([_table(images), label, items.task[samples], *slots, *views], axis=1)
    return StepTable(torch.from_numpy(table).to(device), first.sizes, first.stream_views is not None)


def samples_of(steps: Sequence[Step]) -> Indices:
    """Return the items of steps of the same shape as (steps, samples): of the stream, then of each draw."""
    return np.concatenate([_table([step.stream for step in steps]), *_draws([step.replay for step in steps])], axis=1)


def _draws(of_steps: Sequence[tuple[Indices, ...]]) -> list[Indices]:
    """Return one table per draw, from the draws of each step."""
    return [_table(draw) for draw in zip(*of_steps, strict=True)]


def _table(rows: Sequence[Indices]) -> Indices:
    """Stack one row per step; in one call, since a stretch has thousands of steps."""
    return np.concatenate(rows).reshape(len(rows), -1)


def _last_writers(write: Indices, spare: int) -> Indices:
    """Keep each slot of a row at its last writer only; all other samples go to the spare slot."""
    order = np.argsort(write, axis=1, kind="stable")
    ranked = np.take_along_axis(write, order, axis=1)
    last = np.ones(write.shape, dtype=bool)
    last[:, :-1] = ranked[:, :-1] != ranked[:, 1:]
    slots = np.empty_like(write)
    np.put_along_axis(slots, order, np.where(last & (ranked != NOT_STORED), ranked, spare), axis=1)
    return slots


def stretch_end(steps: Sequence[Step], start: int) -> int:
    """Return the end of the consecutive steps that have the shape of the step at ``start``."""
    end = start
    while end < len(steps) and steps[end].sizes == steps[start].sizes:
        end += 1
    return end
