"""Checkpoints written beside the run, not in its way: a thread writes them from a copy of the tensors.

Of one run at most one copy waits while another is written; a newer one takes the place of the one that waits.
"""

from __future__ import annotations

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from contnorm.engine.checkpoint import Checkpoints
from contnorm.errors import UserError
from contnorm.streams.copying import copying_stream

__all__ = ["Saver"]


class Saver:
    """Writes the checkpoints of runs in the background.

    Leaving its context waits for what is still being written.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1)
        self._last: dict[Checkpoints, Future[None]] = {}

    def save(self, place: Checkpoints, tensors: dict[str, Tensor], progress: dict[str, Any]) -> None:
        """Copy the tensors now, and have the copy written."""
        last = self._last.get(place)
        if last is not None and not last.cancel() and last.done():
            _raise_what_went_wrong(place, last)
        copies = _Copies(tensors)
        self._last[place] = self._worker.submit(_write, place, copies, copy.deepcopy(progress))

    def flush(self) -> None:
        """Wait until all is written; what went wrong is raised here."""
        waiting, self._last = self._last, {}
        for place, last in waiting.items():
            if not last.cancelled():
                _raise_what_went_wrong(place, last)

    def forget(self, place: Checkpoints) -> None:
        """Write nothing more for a run: it is over. What is being written is waited for."""
        last = self._last.pop(place, None)
        if last is not None and not last.cancel():
            last.exception()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.shutdown(wait=True)


class _Copies:
    """Tensors as they are now, where they are: a device copies its own in no time, and the run goes on."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = {name: t.detach().clone() for name, t in tensors.items()}
        self.device = next((t.device for t in tensors.values() if t.is_cuda), None)
        if self.device is not None:
            self.made = torch.cuda.current_stream(self.device).record_event()

    def on_host(self) -> dict[str, Tensor]:
        """Brought beside whatever the device is doing."""
        if self.device is None:
            return self.tensors
        with torch.cuda.stream(copying_stream(self.device)):
            torch.cuda.current_stream().wait_event(self.made)
            return {name: t.cpu() for name, t in self.tensors.items()}  # waits for each


def _write(place: Checkpoints, copies: _Copies, progress: dict[str, Any]) -> None:
    place.save(copies.on_host(), progress)


def _raise_what_went_wrong(place: Checkpoints, written: Future[None]) -> None:
    error = written.exception()
    if isinstance(error, OSError):
        raise UserError(
            f"{place.folder}: a checkpoint can't be written ({error.strerror}). The one before it stays: make room, "
            f"then go on with `contnorm resume`."
        ) from error
    if error is not None:
        raise error
