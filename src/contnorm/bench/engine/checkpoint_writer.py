"""Checkpoints written in the background: a thread writes them from a copy of the tensors.

A copy that waits for the thread is replaced by a newer one of the same run, unless it was taken at the end of a task:
that one is always written.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from contnorm.bench.engine.checkpoint import Checkpoints
from contnorm.bench.engine.tensor_pack import Packed, packed
from contnorm.bench.streams.copy_stream import copying_stream
from contnorm.errors import UserError

__all__ = ["Saver"]


@dataclass(frozen=True)
class _Write:
    """A checkpoint that is written, waits to be, or was."""

    done: Future[None]
    required: bool


class Saver:
    """Writes the checkpoints of runs in the background.

    Leaving its context waits for all checkpoints; after a KeyboardInterrupt only for the one that is being written.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1)
        self._host = _Host()
        self._writes: dict[Checkpoints, list[_Write]] = {}

    def save(
        self, place: Checkpoints, tensors: dict[str, Tensor], progress: dict[str, Any], required: bool = False
    ) -> None:
        """Copy the tensors now and have the copy written.

        Args:
            place: The checkpoints of the run.
            tensors: The state of the run.
            progress: Goes with it.
            required: Whether this one must be written, also where a newer one comes before its turn. Waits where
                another required one of the run has not had its turn yet, so that copies do not pile up.
        """
        self._make_room(place, required)
        copies = packed(tensors)
        made = torch.cuda.current_stream(copies.body.device).record_event() if copies.body.is_cuda else None
        future = self._worker.submit(self._write, place, copies, made, copy.deepcopy(progress))
        self._writes.setdefault(place, []).append(_Write(future, required))

    def _make_room(self, place: Checkpoints, required: bool) -> None:
        """Drop what a new checkpoint replaces; raise what went wrong with older ones."""
        waiting = []
        for write in self._writes.pop(place, []):
            if not write.required and write.done.cancel():
                continue
            if write.done.done() or (required and write.required and not write.done.running()):
                _raise_what_went_wrong(place, write.done)
            else:
                waiting.append(write)
        self._writes[place] = waiting

    def _write(
        self, place: Checkpoints, tensors: Packed, made: torch.cuda.Event | None, progress: dict[str, Any]
    ) -> None:
        place.save(self._host.bring(tensors, made), progress)

    def flush(self) -> None:
        """Wait until all is written; what went wrong is raised here."""
        writes, self._writes = self._writes, {}
        for place, of_run in writes.items():
            for write in of_run:
                _raise_what_went_wrong(place, write.done)

    def finish(self, places: Iterable[Checkpoints]) -> None:
        """Wait for the required checkpoints of runs that are complete and drop the others.

        A checkpoint that can't be written is no error: the record comes next.
        """
        self._end(places, drop_required=False)

    def forget(self, places: Iterable[Checkpoints]) -> None:
        """Drop the waiting checkpoints of runs that failed, and wait for the one that is being written."""
        self._end(places, drop_required=True)

    def _end(self, places: Iterable[Checkpoints], drop_required: bool) -> None:
        writes = [write for place in places for write in self._writes.pop(place, [])]
        for write in writes:  # all are cancelled before any is waited for
            if drop_required or not write.required:
                write.done.cancel()
        for write in writes:
            if not write.done.cancelled():
                write.done.exception()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        at_once = kind is not None and issubclass(kind, KeyboardInterrupt)
        self._worker.shutdown(wait=True, cancel_futures=at_once)


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
