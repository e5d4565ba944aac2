"""TensorBoard: one folder of event files per run, with scalars, hyperparameters and the final status."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contnorm.bench.loggers.base import LoggedRun, Logger
from contnorm.bench.loggers.log_state import LogState
from contnorm.bench.optional_libraries import import_library

__all__ = ["TensorBoardLogger"]

EXTRA = "tensorboard"
STATE = "log.json"  # next to the event files


class TensorBoardLogger(Logger):
    """Writes event files to ``tensorboard/<stream>-<strategy>-<norm>-<hash>/seed-<seed>``.

    A run that resumes gets another file in the same folder. It begins with a mark, after which TensorBoard ignores
    earlier values of the steps that are repeated. TensorBoard stores scalars in single precision.

    Args:
        folder: Folder of logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder) / "tensorboard"
        self._event = import_library("tensorboard.compat.proto.event_pb2", EXTRA)
        self._summary = import_library("tensorboard.compat.proto.summary_pb2", EXTRA)
        self._hparams = import_library("tensorboard.plugins.hparams.summary_v2", EXTRA)
        self._text = import_library("tensorboard.plugins.text.metadata", EXTRA)
        self._tensor = import_library("tensorboard.util.tensor_util", EXTRA)
        self._writer = import_library("tensorboard.summary.writer.event_file_writer", EXTRA)
        self._writers: dict[str, Any] = {}

    def start(self, run: LoggedRun) -> None:
        folder = self.folder / run.folder
        state = LogState.read(folder / STATE)
        if state is not None and state.is_complete(run):
            return
        writer = self._writers[run.id] = self._writer.EventFileWriter(str(folder))
        LogState(record=run.record).write(folder / STATE)
        mark = self._event.SessionLog(status=self._event.SessionLog.START)
        self._add(run, run.done + 1, session_log=mark)
        if not run.done:
            self._add(run, 0, summary=self._hparams.hparams_pb(_hyperparameters(run.settings), trial_id=run.id))
            self._add_text(run, 0, "provenance", json.dumps(dict(run.provenance), indent=1))
        writer.flush()

    def metrics(self, run: LoggedRun, step: int, values: Mapping[str, float]) -> None:
        if run.id not in self._writers:
            return
        scalars = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(run, step, summary=self._summary.Summary(value=scalars))
        self._writers[run.id].flush()

    def end(self, run: LoggedRun, status: str, reason: str = "") -> None:
        if run.id not in self._writers:
            return
        self._add_text(run, run.done, "status", f"{status}: {reason}" if reason else status)
        self._writers.pop(run.id).close()
        LogState(status=status, record=run.record).write(self.folder / run.folder / STATE)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _add(self, run: LoggedRun, step: int, **content: Any) -> None:
        self._writers[run.id].add_event(self._event.Event(wall_time=time.time(), step=step, **content))

    def _add_text(self, run: LoggedRun, step: int, tag: str, text: str) -> None:
        value = self._summary.Summary.Value(
            tag=tag,
            metadata=self._text.create_summary_metadata(display_name=tag, description=""),
            tensor=self._tensor.make_tensor_proto([text.encode()]),
        )
        self._add(run, step, summary=self._summary.Summary(value=[value]))


def _hyperparameters(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in types that TensorBoard has; it has none for a missing value."""
    return {
        key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in settings.items()
    }
