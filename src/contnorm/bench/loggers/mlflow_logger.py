"""MLflow: one MLflow run per run, in the experiment ``contnorm``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from contnorm.bench.config.schema import flatten_settings
from contnorm.bench.loggers.base import LoggedRun, Logger
from contnorm.bench.optional_libraries import import_library

__all__ = ["MLflowLogger"]

EXTRA = "mlflow"
EXPERIMENT = "contnorm"  # unless MLFLOW_EXPERIMENT_NAME is set
_STATUS = {"finished": "FINISHED", "stopped": "KILLED"}  # all others: FAILED
_LONGEST = 5000  # characters of a parameter or a tag
_ALLOW_FILES = "MLFLOW_ALLOW_FILE_STORE"


class MLflowLogger(Logger):
    """Logs to MLflow: to the server or store of MLFLOW_TRACKING_URI, or to the folder ``mlflow`` of the logs.

    A run that resumes continues the same MLflow run; steps that were logged before are skipped.

    Args:
        folder: Folder of logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder) / "mlflow"
        self._entities = import_library("mlflow.entities", EXTRA)
        self._tracking = import_library("mlflow.tracking", EXTRA)
        self.uri = os.environ.get("MLFLOW_TRACKING_URI") or self.folder.absolute().as_uri()
        self._experiment: str | None = None
        self._runs: dict[str, str] = {}
        self._logged: dict[str, dict[str, int]] = {}  # by run and metric, the last step that was logged before

    @cached_property
    def _client(self) -> Any:
        with _file_store_allowed():  # creates the folder, so not before the first run
            return self._tracking.MlflowClient(tracking_uri=self.uri)

    def start(self, run: LoggedRun) -> None:
        earlier = self._find(run) if run.done or run.record else None
        if earlier is None:
            tags = {"contnorm.run": run.id, "contnorm.hash": run.hash, "contnorm.seed": str(run.seed)}
            tags |= {"contnorm.record": run.record} if run.record else {}
            provenance = flatten_settings(run.provenance, "contnorm.")
            tags |= {key: str(value)[:_LONGEST] for key, value in provenance.items() if value is not None}
            started = self._client.create_run(self._experiment_id(), run_name=run.name, tags=tags)
            self._runs[run.id], self._logged[run.id] = started.info.run_id, {}
            self._log_settings(run)
            return
        self._runs[run.id] = earlier.info.run_id
        self._logged[run.id] = {name: self._last_step(earlier.info.run_id, name) for name in earlier.data.metrics}
        self._client.update_run(earlier.info.run_id, status="RUNNING")

    def metrics(self, run: LoggedRun, step: int, values: Mapping[str, float]) -> None:
        now, logged = int(time.time() * 1000), self._logged[run.id]
        new = [
            self._entities.Metric(name, float(value), now, step)
            for name, value in values.items()
            if step > logged.get(name, -1)
        ]
        if new:
            self._client.log_batch(self._runs[run.id], metrics=new)

    def end(self, run: LoggedRun, status: str, reason: str = "") -> None:
        run_id = self._runs.pop(run.id)
        self._client.set_tag(run_id, "contnorm.status", status)
        if reason:
            self._client.set_tag(run_id, "contnorm.reason", reason[:_LONGEST])
        self._client.set_terminated(run_id, _STATUS.get(status, "FAILED"))

    def close(self) -> None:
        for run_id in self._runs.values():
            self._client.set_terminated(run_id, "KILLED")
        self._runs.clear()

    def _experiment_id(self) -> str:
        if self._experiment is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
            existing = self._client.get_experiment_by_name(name)
            self._experiment = existing.experiment_id if existing else self._client.create_experiment(name)
        return str(self._experiment)

    def _find(self, run: LoggedRun) -> Any:
        """Return the newest MLflow run of this run; None if there is none, or if it is of another record."""
        condition = f"tags.`contnorm.run` = '{run.id}'"
        newest = self._client.search_runs([self._experiment_id()], condition, order_by=["start_time DESC"])
        for earlier in newest[:1]:
            if run.record is None or earlier.data.tags.get("contnorm.record") in (None, run.record):
                return earlier
        return None

    def _last_step(self, run_id: str, name: str) -> int:
        return max((metric.step for metric in self._client.get_metric_history(run_id, name)), default=-1)

    def _log_settings(self, run: LoggedRun) -> None:
        settings = {**run.settings, "seed": run.seed}
        params = [self._entities.Param(key, str(value)[:_LONGEST]) for key, value in settings.items()]
        for i in range(0, len(params), 100):  # the most that one request may have
            self._client.log_batch(self._runs[run.id], params=params[i : i + 100])


@contextmanager
def _file_store_allowed() -> Iterator[None]:
    """Allow a folder as the store; recent versions of MLflow require this variable."""
    before = os.environ.get(_ALLOW_FILES)
    os.environ.setdefault(_ALLOW_FILES, "true")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ALLOW_FILES]
