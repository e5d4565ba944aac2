"""Checkpoints written beside the run, not in its way: a thread writes them from a copy of the tensors.

Of one run at most one copy waits while another is written; a newer one takes the place of the one that waits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from contnorm.engine.checkpoint import Checkpoints
from contnorm.engine.packing import Packed, packed
from contnorm.errors import UserError
from contnorm.streams.copying import copying_stream

__all__ = ["Saver"]


class Saver:
    """Writes the checkpoints of runs in the background.

    Leaving its context waits for what is still being written.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1)
        self._host = _Host()
        self._last: dict[Checkpoints, Future[None]] = {}

    def save(self, place: Checkpoints, tensors: dict[str, Tensor], progress: dict[str, Any]) -> None:
        """Copy the tensors now, and have the copy written."""
        last = self._last.get(place)
        if last is not None and not last.cancel() and last.done():
            _raise_what_went_wrong(place, last)
        copies = packed(tensors)
        made = torch.cuda.current_stream(copies.body.device).record_event() if copies.body.is_cuda else None
        self._last[place] = self._worker.submit(self._write, place, copies, made, copy.deepcopy(progress))

    def _write(
        self, place: Checkpoints, tensors: Packed, made: torch.cuda.Event | None, progress: dict[str, Any]
    ) -> None:
        place.save(self._host.bring(tensors, made), progress)

    def flush(self) -> None:
        """Wait until all is written; what went wrong is raised here."""
        waiting, self._last = self._last, {}
        for place, last in waiting.items():
            if not last.cancelled():
                _raise_what_went_wrong(place, last)

    def forget(self, places: Iterable[Checkpoints]) -> None:
        """Write nothing more for runs that are over. What is being written is waited for; what waits never is."""
        waiting = [self._last.pop(place) for place in places if place in self._last]
        for last in [last for last in waiting if not last.cancel()]:  # all are cancelled before any is waited for
            last.exception()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.shutdown(wait=True)


class _Host:
    """Brings what is packed on a GPU to the host, through page-locked memory that is kept from one copy to the next."""

    def __init__(self) -> None:
        self._stage = torch.empty(0, dtype=torch.uint8)

    def bring(self, tensors: Packed, made: torch.cuda.Event | None) -> Packed:
        """Beside whatever the device is doing, once the packing is done; good until the next is brought."""
        if made is None:
            return tensors
        size = len(tensors.body)
        if len(self._stage) < size:
            self._stage = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(copying_stream(tensors.body.device)):
            stream = torch.cuda.current_stream()
            stream.wait_event(made)
            self._stage[:size].copy_(tensors.body, non_blocking=True)
            stream.synchronize()
        return Packed(tensors.head, self._stage[:size])


def _raise_what_went_wrong(place: Checkpoints, written: Future[None]) -> None:
    error = written.exception()
    if isinstance(error, OSError):
        raise UserError(
            f"{place.folder}: a checkpoint can't be written ({error.strerror}). The one before it stays: make room, "
            f"then go on with `contnorm resume`."
        ) from error
    if error is not None:
        raise error
