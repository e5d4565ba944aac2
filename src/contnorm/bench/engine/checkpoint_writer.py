"""Asynchronous checkpoints: a background thread writes them from a copy of the tensors.

A newer checkpoint of the same run replaces one that the thread has not started to write. Checkpoints at the end of a
task are required: they are always written.
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

__all__ = ["CheckpointWriter"]


@dataclass(frozen=True)
class _Write:
    """A checkpoint that is pending, being written, or written."""

    done: Future[None]
    required: bool


class CheckpointWriter:
    """Writes the checkpoints of runs in the background.

    Leaving the context waits for all checkpoints; after a KeyboardInterrupt, only for the one being written.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1)
        self._host = _HostBuffer()
        self._writes: dict[Checkpoints, list[_Write]] = {}

    def save(
        self, checkpoints: Checkpoints, tensors: dict[str, Tensor], progress: dict[str, Any], required: bool = False
    ) -> None:
        """Copy the tensors and schedule the copy to be written.

        Args:
            checkpoints: The checkpoints of the run.
            tensors: The state of the run.
            progress: The progress of the run, saved with the state.
            required: Whether this checkpoint must be written even if a newer one follows. Blocks while another required
                checkpoint of the run is pending, so that copies do not accumulate in memory.
        """
        self._make_room(checkpoints, required)
        copies = packed(tensors)
        packing = torch.cuda.current_stream(copies.body.device).record_event() if copies.body.is_cuda else None
        future = self._worker.submit(self._write, checkpoints, copies, packing, copy.deepcopy(progress))
        self._writes.setdefault(checkpoints, []).append(_Write(future, required))

    def _make_room(self, checkpoints: Checkpoints, required: bool) -> None:
        """Drop the checkpoints that a new one replaces, and raise the errors of older ones."""
        waiting = []
        for write in self._writes.pop(checkpoints, []):
            if not write.required and write.done.cancel():
                continue
            if write.done.done() or (required and write.required and not write.done.running()):
                _raise_error(checkpoints, write.done)
            else:
                waiting.append(write)
        self._writes[checkpoints] = waiting

    def _write(
        self, checkpoints: Checkpoints, tensors: Packed, packing: torch.cuda.Event | None, progress: dict[str, Any]
    ) -> None:
        checkpoints.save(self._host.copy(tensors, packing), progress)

    def flush(self) -> None:
        """Wait until all checkpoints are written, and raise their errors."""
        writes, self._writes = self._writes, {}
        for checkpoints, of_run in writes.items():
            for write in of_run:
                _raise_error(checkpoints, write.done)

    def finish(self, several: Iterable[Checkpoints]) -> None:
        """Wait for the required checkpoints of completed runs and drop the others.

        Write errors are ignored: the record is written next.
        """
        self._end(several, drop_required=False)

    def forget(self, several: Iterable[Checkpoints]) -> None:
        """Drop the pending checkpoints of failed runs, and wait for the one being written."""
        self._end(several, drop_required=True)

    def _end(self, several: Iterable[Checkpoints], drop_required: bool) -> None:
        writes = [write for checkpoints in several for write in self._writes.pop(checkpoints, [])]
        for write in writes:  # cancel all before waiting for any
            if drop_required or not write.required:
                write.done.cancel()
        for write in writes:
            if not write.done.cancelled():
                write.done.exception()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        at_once = kind is not None and issubclass(kind, KeyboardInterrupt)
        self._worker.shutdown(wait=True, cancel_futures=at_once)


class _HostBuffer:
    """Copies packed tensors from a GPU to the host, through a buffer of pinned memory that all copies share."""

    def __init__(self) -> None:
        self._stage = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Packed, packing: torch.cuda.Event | None) -> Packed:
        """Copy on a separate CUDA stream after the ``packing`` event. The result is valid until the next copy."""
        if packing is None:
            return tensors
        size = len(tensors.body)
        if len(self._stage) < size:
            self._stage = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(copying_stream(tensors.body.device)):
            stream = torch.cuda.current_stream()
            stream.wait_event(packing)
            self._stage[:size].copy_(tensors.body, non_blocking=True)
            stream.synchronize()
        return Packed(tensors.head, self._stage[:size])


def _raise_error(checkpoints: Checkpoints, written: Future[None]) -> None:
    error = written.exception()
    if isinstance(error, OSError):
        raise UserError(
            f"{checkpoints.folder}: a checkpoint can't be written ({error.strerror}). The previous one is kept. "
            f"Free disk space, then continue with `contnorm resume`."
        ) from error
    if error is not None:
        raise error
