"""Loggers: the metrics of runs in TensorBoard, Weights & Biases, MLflow or CSV files.

A logger gets the settings of a run, its losses, the scores after each task and the final scores. Records do not depend
on loggers. The library of a logger is imported when it is created.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from contnorm.atomic_files import write_atomically
from contnorm.bench.config.defaults import resolved_settings, stream_name
from contnorm.bench.config.schema import RunConfig, StreamConfig, flatten_settings
from contnorm.bench.metrics import TaskScores
from contnorm.errors import UserError, import_library, unknown


@dataclass(frozen=True)
class LoggedRun:
    """A run, as loggers see it.

    Attributes:
        hash: Hash of the settings.
        seed: Seed of the run.
        settings: All settings with the values that the run uses, by dotted key.
        provenance: Versions, device, data and commit, as in the record.
        done: Steps done before; 0 unless the run resumes from a checkpoint. A logger continues the log of a run that
            resumes. Steps that were logged after this one are repeated.

    Example:
        >>> run = LoggedRun.of(RunConfig(), seed=3)
        >>> run.name, run.id == f"{run.hash}-3", run.settings["train.batch"]
        ('permuted-mnist single bn seed 3', True, 10)
    """

    hash: str
    seed: int
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    done: int = 0

    @classmethod
    def of(cls, config: RunConfig, seed: int, provenance: Mapping[str, Any] | None = None, done: int = 0) -> LoggedRun:
        """Make it of resolved settings."""
        return cls(config.hash, seed, resolved_settings(config), provenance or {}, done)

    @property
    def id(self) -> str:
        """Hash and seed, which identify the run."""
        return f"{self.hash}-{self.seed}"

    @property
    def experiment(self) -> str:
        """Stream, strategy and norm: a short description, the same for all seeds."""
        stream = stream_name(StreamConfig(self.settings["stream.name"], self.settings.get("stream.source")))
        return f"{stream} {self.settings['strategy.name']} {self.settings['norm.name']}"

    @property
    def name(self) -> str:
        """Description and seed."""
        return f"{self.experiment} seed {self.seed}"

    @property
    def folder(self) -> str:
        """Relative path that is unique to the run and can be read."""
        return f"{re.sub(r'[^A-Za-z0-9.+-]+', '-', self.experiment)}-{self.hash}/seed-{self.seed}"


class Logger:
    """Base class of loggers. Override the methods that you need; by default they do nothing.

    One logger gets the events of all runs of a call. Several runs may be in progress at the same time, so a logger
    keeps what belongs to a run by `LoggedRun.id`. It is called in the process that starts the runs, between their
    steps. If it raises an error, one warning is logged, the logger gets no further events, and the runs continue.

    Names of metrics: ``loss`` and ``task`` every N steps; ``accuracy/task_0``, ``accuracy/task_1`` ... and
    ``accuracy/average`` (over the tasks learned so far) after each task, or ``c_f1/...``, ``o_f1/...`` and ``map/...``
    for multi-label data; ``system/...`` after each task; ``score/acc``, ``score/fm`` ... at the end. Scores and
    accuracies are in percent. Values that are not finite are left out.

    Example:
        >>> class Print(Logger):
        ...     def metrics(self, run, step, values):
        ...         print(run.seed, step, values)
        >>> Print().metrics(LoggedRun.of(RunConfig(), seed=0), 50, {"loss": 0.5})
        0 50 {'loss': 0.5}
    """

    def start(self, run: LoggedRun) -> None:
        """Start the log of a run, or continue it if ``run.done`` is not 0."""

    def metrics(self, run: LoggedRun, step: int, values: Mapping[str, float]) -> None:
        """Log metrics by name, after a number of steps. It may be called several times with the same step."""

    def end(self, run: LoggedRun, status: str, reason: str = "") -> None:
        """End the log of a run.

        Args:
            run: The run.
            status: ``"finished"``, ``"diverged"``, ``"stopped"`` (it can be resumed) or ``"failed"``.
            reason: Why it diverged or failed.
        """

    def close(self) -> None:
        """Release resources, after the last run."""


class CSVLogger(Logger):
    """Writes the metrics of each run to a CSV file with the columns ``step``, ``metric`` and ``value``.

    Args:
        folder: Folder of logs; the files are in its subfolder ``csv``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder) / "csv"
        self._files: dict[str, TextIO] = {}

    def path(self, run: LoggedRun) -> Path:
        """Return the CSV file of a run."""
        return self.folder / run.hash / f"{run.seed}.csv"

    def start(self, run: LoggedRun) -> None:
        path = self.path(run)
        rows = [row for row in _read(path) if int(row[0]) <= run.done] if run.done else []
        lines = [",".join(row) for row in (_COLUMNS, *rows)]
        write_atomically(path, "".join(f"{line}\n" for line in lines).encode())
        self._files[run.id] = path.open("a", newline="")
        self._describe(run, "running")

    def metrics(self, run: LoggedRun, step: int, values: Mapping[str, float]) -> None:
        file = self._files[run.id]
        csv.writer(file, lineterminator="\n").writerows((step, name, repr(value)) for name, value in values.items())
        file.flush()

    def end(self, run: LoggedRun, status: str, reason: str = "") -> None:
        self._files.pop(run.id).close()
        self._describe(run, status, reason)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _describe(self, run: LoggedRun, status: str, reason: str = "") -> None:
        content: dict[str, Any] = {"hash": run.hash, "seed": run.seed, "status": status, "settings": dict(run.settings)}
        content |= {"provenance": dict(run.provenance), **({"reason": reason} if reason else {})}
        write_atomically(self.path(run).with_suffix(".json"), json.dumps(content, indent=1).encode())


def _read(path: Path) -> list[list[str]]:
    """Return the complete rows of a log; the last line may be cut off if its process was killed."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    if rows and not path.read_text().endswith("\n"):
        rows.pop()
    return [row for row in rows[1:] if len(row) == len(_COLUMNS) and row[0].isdigit()]


_COLUMNS = ("step", "metric", "value")


class TensorBoardLogger(Logger):
    """Writes event files to ``tensorboard/<stream>-<strategy>-<norm>-<hash>/seed-<seed>``.

    A run that resumes gets another file in the same folder, after whose start TensorBoard ignores earlier values of the
    steps that are repeated. TensorBoard stores scalars in single precision.

    Args:
        folder: Folder of logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder) / "tensorboard"
        import_library("tensorboard", "tensorboard")
        self._library = import_library("torch.utils.tensorboard", "tensorboard")
        self._writers: dict[str, Any] = {}

    def start(self, run: LoggedRun) -> None:
        writer = self._library.SummaryWriter(str(self.folder / run.folder), purge_step=run.done + 1)
        self._writers[run.id] = writer
        if not run.done:
            known = {
                key: value if isinstance(value, bool | int | float) else str(value)
                for key, value in run.settings.items()
            }
            for summary in self._library.summary.hparams(known, {}):
                writer.file_writer.add_summary(summary)
            writer.add_text("provenance", json.dumps(dict(run.provenance), indent=1), 0)

    def metrics(self, run: LoggedRun, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writers[run.id].add_scalar(name, value, step)
        self._writers[run.id].flush()

    def end(self, run: LoggedRun, status: str, reason: str = "") -> None:
        writer = self._writers.pop(run.id)
        writer.add_text("status", f"{status}: {reason}" if reason else status, run.done)
        writer.close()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()


class WandbLogger(Logger):
    """Logs to Weights & Biases, to the project ``contnorm`` or that of WANDB_PROJECT, grouped by the hash of settings.

    A run that resumes continues the same W&B run, which keeps the first values of steps that are repeated.

    Args:
        folder: Folder of logs; the files of W&B are in its subfolder ``wandb``.

    Raises:
        UserError: If W&B is online and has no API key.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._wandb = import_library("wandb", "wandb")
        settings = self._wandb.setup().settings  # settings of the environment and of W&B's files
        self._project = settings.project or "contnorm"
        if settings.mode in ("online", "shared") and not self._wandb.login(prompt=False, verify=False):
            raise UserError("wandb: there is no API key. Run `wandb login`, or set WANDB_MODE=offline.")
        self._runs: dict[str, Any] = {}

    def start(self, run: LoggedRun) -> None:
        known = self.folder / "wandb" / "contnorm" / run.id  # has the identifier of the W&B run
        if not run.done or not known.is_file():
            write_atomically(known, f"{run.id}-{secrets.token_hex(3)}".encode())
        self._runs[run.id] = self._wandb.init(
            project=self._project,
            dir=str(self.folder),
            id=known.read_text(),
            resume="allow",
            name=run.name,
            group=run.hash,
            config={**run.settings, "seed": run.seed, "hash": run.hash, "provenance": dict(run.provenance)},
            reinit="create_new",  # several runs are in progress at the same time
            settings=self._wandb.Settings(silent=True, console="off"),
        )

    def metrics(self, run: LoggedRun, step: int, values: Mapping[str, float]) -> None:
        self._runs[run.id].log(dict(values), step=step)

    def end(self, run: LoggedRun, status: str, reason: str = "") -> None:
        wandb_run = self._runs.pop(run.id)
        wandb_run.summary.update({"status": status, **({"reason": reason} if reason else {})})
        wandb_run.finish(exit_code=0 if status == "finished" else 1)

    def close(self) -> None:
        for wandb_run in self._runs.values():
            wandb_run.finish(exit_code=1)
        self._runs.clear()


class MLflowLogger(Logger):
    """Logs to MLflow: to the server or store of MLFLOW_TRACKING_URI, or to the folder ``mlflow`` of the logs.

    There is one MLflow run per run, in the experiment ``contnorm`` or that of MLFLOW_EXPERIMENT_NAME. A run that
    resumes continues the same MLflow run, which has the values of steps that are repeated twice.

    Args:
        folder: Folder of logs.
    """

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # recent versions need it for a folder
        tracking = import_library("mlflow.tracking", "mlflow")
        self._entities = import_library("mlflow.entities", "mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (Path(folder) / "mlflow").absolute().as_uri()
        self._client = tracking.MlflowClient(tracking_uri=uri)
        self._runs: dict[str, str] = {}

    def start(self, run: LoggedRun) -> None:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "contnorm"
        known = self._client.get_experiment_by_name(name)
        experiment = str(known.experiment_id if known else self._client.create_experiment(name))
        condition = f"tags.`contnorm.run` = '{run.id}'"
        earlier = self._client.search_runs([experiment], condition, order_by=["start_time DESC"]) if run.done else []
        if earlier:
            self._runs[run.id] = earlier[0].info.run_id
            self._client.update_run(self._runs[run.id], status="RUNNING")
            return
        tags = {"contnorm.run": run.id, "contnorm.hash": run.hash, "contnorm.seed": str(run.seed)}
        provenance = flatten_settings(run.provenance, "contnorm.")
        tags |= {key: str(value)[:5000] for key, value in provenance.items() if value is not None}
        started = self._client.create_run(experiment, run_name=run.name, tags=tags)
        self._runs[run.id] = started.info.run_id
        settings = {**run.settings, "seed": run.seed}
        params = [self._entities.Param(key, str(value)[:5000]) for key, value in settings.items()]
        for first in range(0, len(params), 100):  # the most that one request may have
            self._client.log_batch(self._runs[run.id], params=params[first : first + 100])

    def metrics(self, run: LoggedRun, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._runs[run.id], metrics=metrics)

    def end(self, run: LoggedRun, status: str, reason: str = "") -> None:
        run_id = self._runs.pop(run.id)
        self._client.set_tag(run_id, "contnorm.status", status)
        if reason:
            self._client.set_tag(run_id, "contnorm.reason", reason[:5000])
        self._client.set_terminated(run_id, {"finished": "FINISHED", "stopped": "KILLED"}.get(status, "FAILED"))

    def close(self) -> None:
        for run_id in self._runs.values():
            self._client.set_terminated(run_id, "KILLED")
        self._runs.clear()


LOGGERS: dict[str, type[Logger]] = {
    "csv": CSVLogger,
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MLflowLogger,
}


def create_logger(name: str, folder: Path) -> Logger:
    """Create a logger by name.

    Args:
        name: One of `LOGGERS`.
        folder: Folder of logs. Each logger writes to a subfolder with its name.

    Raises:
        UserError: If the name is unknown, or the library of the logger is not installed or can't be used.

    Example:
        >>> create_logger("tensorbord", Path("logs"))
        Traceback (most recent call last):
        contnorm.errors.UserError: unknown logger 'tensorbord'. Did you mean 'tensorboard'? There are: csv, ...
    """
    if name not in LOGGERS:
        raise unknown("logger", name, LOGGERS)
    return LOGGERS[name](folder)  # type: ignore[call-arg]


def default_log_folder(runs: Path | None) -> Path:
    """Return the folder of logs next to a folder of runs.

    Example:
        >>> str(default_log_folder(Path("results/runs")))
        'results/runs-logs'
    """
    runs = Path("runs") if runs is None else runs
    return runs.with_name(f"{runs.resolve().name if runs.name in ('', '..') else runs.name}-logs")


def loss_metrics(loss: float, task: int) -> dict[str, float]:
    """Return the loss of a step, and the task that the step belongs to."""
    return _finite({"loss": loss, "task": task})


def task_metrics(scores: TaskScores) -> dict[str, float]:
    """Return the scores on each task, and on all tasks learned so far.

    Example:
        >>> task_metrics(TaskScores({"accuracy": [60.0, 80.0, None]}, {"accuracy": 70.0}))
        {'accuracy/task_0': 60.0, 'accuracy/task_1': 80.0, 'accuracy/average': 70.0}
    """
    by_task = {
        f"{name}/task_{task}": value
        for name, values in scores.by_task.items()
        for task, value in enumerate(values)
        if value is not None
    }
    return _finite({**by_task, **{f"{name}/average": value for name, value in scores.so_far.items()}})


def system_metrics(seconds: Mapping[str, float], steps: int, batch: int, memory: int | None) -> dict[str, float]:
    """Return times so far, the mean throughput of training, and the peak memory in MiB.

    Args:
        seconds: Seconds of training (``train``) and of evaluation (``evaluate``).
        steps: Steps done.
        batch: Stream samples per step.
        memory: Peak memory in bytes; None if it is unknown.

    Example:
        >>> system_metrics({"train": 2.0, "evaluate": 0.5}, steps=100, batch=10, memory=2**21)["system/memory_mib"]
        2.0
    """
    values = {f"system/{name}_seconds": seconds[name] for name in ("train", "evaluate") if name in seconds}
    if train := seconds.get("train", 0.0):
        values["system/steps_per_second"] = steps / train
        values["system/samples_per_second"] = steps * batch / train
    if memory is not None:
        values["system/memory_mib"] = memory / 2**20
    return _finite(values)


def score_metrics(scores: Mapping[str, float]) -> dict[str, float]:
    """Return the scores of a finished run.

    Example:
        >>> score_metrics({"acc": 70.0, "fwt": float("nan")})
        {'score/acc': 70.0}
    """
    return _finite({f"score/{name}": value for name, value in scores.items()})


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}
