"""Steps of a plan as index tensors on a device: one row a step, all of one shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contnorm.memories import NOT_KEPT
from contnorm.plan import Step

__all__ = ["Rows", "rows_of", "stretch_end"]


@dataclass(frozen=True)
class Rows:
    """Rows of steps, or one row.

    Attributes:
        stream: Items shown.
        images: Where their images are, and then those of each replay draw.
        write: Slots they are written to.
        replay: Items replayed, by draw.
        replay_slots: The slots they came from.
        stream_views, replay_views: Crops and flips, where the stream has any.
    """

    stream: Tensor
    images: Tensor
    write: Tensor
    replay: tuple[Tensor, ...]
    replay_slots: tuple[Tensor, ...]
    stream_views: Tensor | None
    replay_views: tuple[Tensor | None, ...]

    def at(self, number: int | Tensor) -> Rows:
        """One row; by a tensor on the device where the number must not come from the host."""

        def pick(rows: Tensor) -> Tensor:
            return rows[number] if isinstance(number, int) else rows.index_select(0, number).squeeze(0)

        return self._each(pick)

    def overwrite(self, others: Rows) -> None:
        """Take on the rows of others, which may be fewer, in place: a captured step goes on with them."""
        for own, new in zip(self._tensors(), others._tensors(), strict=True):
            own[: len(new)].copy_(new)

    def __len__(self) -> int:
        return len(self.stream)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Rows:
        return Rows(
            change(self.stream),
            change(self.images),
            change(self.write),
            tuple(map(change, self.replay)),
            tuple(map(change, self.replay_slots)),
            None if self.stream_views is None else change(self.stream_views),
            tuple(None if views is None else change(views) for views in self.replay_views),
        )

    def _tensors(self) -> list[Tensor]:
        parts = (self.stream, self.images, self.write, *self.replay, *self.replay_slots)
        return [*parts, *(views for views in (self.stream_views, *self.replay_views) if views is not None)]


def rows_of(steps: Sequence[Step], images: Sequence[NDArray[np.int64]], spare: int, device: torch.device) -> Rows:
    """The rows of steps of one shape; what is not kept, or is overwritten in the same step, goes to a spare slot."""

    def stacked(parts: Sequence[NDArray[np.int64]]) -> Tensor:
        return torch.from_numpy(np.stack(parts)).to(device)

    draws = range(len(steps[0].replay))
    return Rows(
        stacked([step.stream for step in steps]),
        stacked(images),
        stacked([_last_writers(step.write, spare) for step in steps]),
        tuple(stacked([step.replay[draw] for step in steps]) for draw in draws),
        tuple(stacked([step.replay_slots[draw] for step in steps]) for draw in draws),
        None if steps[0].stream_views is None else stacked([_views(step.stream_views) for step in steps]),
        tuple(
            None if steps[0].replay_views is None else stacked([_views(step.replay_views, draw) for step in steps])
            for draw in draws
        ),
    )


def _views(views: object, draw: int | None = None) -> NDArray[np.int64]:
    chosen = views if draw is None else views[draw]  # type: ignore[index]
    assert isinstance(chosen, np.ndarray)
    return chosen


def _last_writers(write: NDArray[np.int64], spare: int) -> NDArray[np.int64]:
    """Each slot once, at its last writer; all else to the spare slot."""
    last = {int(slot): place for place, slot in enumerate(write)}
    return np.array([slot if slot != NOT_KEPT and last[int(slot)] == i else spare for i, slot in enumerate(write)])


def stretch_end(steps: Sequence[Step], start: int) -> int:
    """Where the run of steps ends that have the shape of the one at ``start``."""

    def shape(step: Step) -> tuple[int, ...]:
        return (len(step.stream), *(len(draw) for draw in step.replay))

    end = start
    while end < len(steps) and shape(steps[end]) == shape(steps[start]):
        end += 1
    return end
