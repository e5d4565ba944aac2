"""The submitit launcher: a Slurm job for each unit."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from contnorm.bench.engine.events import Failed
from contnorm.bench.engine.job_events import Event
from contnorm.bench.engine.units import Unit
from contnorm.bench.engine.work import UnitWork
from contnorm.bench.launchers.base import Launcher
from contnorm.bench.launchers.batch_unit import BatchUnit, UnitResult, stop_file
from contnorm.bench.optional_libraries import import_library
from contnorm.errors import UserError, check_count

__all__ = ["SubmititLauncher"]

POLL = 1.0  # seconds between two looks at the jobs


class SubmititLauncher(Launcher):
    """Executes each unit as a Slurm job, with submitit. Its events arrive when the job ends, not while it runs.

    The folder of runs and the one of submitit must be on a file system that all nodes see. A job that Slurm preempts or
    that reaches its time limit is requeued by submitit, and resumes from its checkpoints.

    Args:
        folder: Folder of submitit, for scripts and logs of jobs.
        cluster: ``"slurm"``, ``"local"`` (processes of this machine) or ``"debug"`` (this process); None for Slurm
            where it is installed, otherwise local.
        partition: Partition of Slurm; None for the default one.
        timeout_min: Time limit of a job, in minutes.
        most_jobs: Largest number of jobs that run at a time. Runs are divided into at least as many groups.
        parameters: Further parameters of ``submitit.AutoExecutor.update_parameters``, such as ``{"mem_gb": 32}``.
    """

    def __init__(
        self,
        folder: str | Path = "submitit",
        cluster: str | None = None,
        partition: str | None = None,
        timeout_min: int = 240,
        most_jobs: int = 8,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self._submitit = import_library("submitit", "submitit")
        self.folder, self._cluster = Path(folder).expanduser().absolute(), cluster
        self._most_jobs = check_count(most_jobs, "most_jobs")
        own = {"timeout_min": timeout_min, "slurm_array_parallelism": most_jobs, "name": "contnorm"}
        own |= {"slurm_partition": partition} if partition is not None else {}
        if not isinstance(parameters, Mapping | None):
            raise UserError(f"parameters={parameters!r}: use a dictionary, in Python.")
        self._parameters: dict[str, Any] = {**own, **(parameters or {})}
        with tempfile.TemporaryDirectory() as elsewhere:  # checks them; nothing is written to the folder before launch
            try:
                self._executor(Path(elsewhere))
            except (AssertionError, NameError, RuntimeError, TypeError, ValueError) as error:  # of submitit
                reason = " ".join(str(error).split())
                raise UserError(f"launcher submitit: an option is not valid ({reason.removesuffix('.')}).") from error

    def _executor(self, folder: Path) -> Any:
        executor = self._submitit.AutoExecutor(folder, cluster=self._cluster)
        executor.update_parameters(**self._parameters)
        return executor

    def workers(self) -> int | None:
        """Return the largest number of jobs that run at a time."""
        return self._most_jobs

    def launch(self, work: UnitWork, units: Sequence[Unit], stop: Callable[[], bool]) -> Iterator[Event]:
        """Submit units as one array of jobs, then wait for them; after a request to stop, those that run save."""
        gpus, threads = int(work.environment.device.type == "cuda"), work.environment.threads
        self.folder.mkdir(parents=True, exist_ok=True)
        executor = self._executor(self.folder)
        executor.update_parameters(gpus_per_node=gpus, cpus_per_task=threads)
        with stop_file(self.folder, f"stop-{secrets.token_hex(8)}", stop) as file:
            calls = _RequeuedUnit.of(work, [*units], file)
            with executor.batch():
                jobs = [executor.submit(call) for call in calls]
            waiting = dict(zip(jobs, units, strict=True))
            try:
                while waiting:
                    for job in [job for job in waiting if job.done()]:
                        yield from _events(job, waiting.pop(job))
                    if file.exists():
                        _cancel_pending(waiting)
                    if waiting:
                        time.sleep(POLL)
            except Exception:
                file.touch()
                _cancel_pending(waiting)
                for job in waiting:  # the others save their runs
                    job.wait()
                raise


class _RequeuedUnit(BatchUnit):
    """A unit that submitit submits again when its job is preempted or reaches its time limit."""

    def checkpoint(self) -> Any:
        """Return the same unit; its runs resume from their checkpoints."""
        return import_library("submitit", "submitit").helpers.DelayedSubmission(self)


def _cancel_pending(waiting: dict[Any, Unit]) -> None:
    """Cancel the jobs that have not started yet."""
    for job in [job for job in waiting if job.state == "PENDING"]:
        job.cancel()
        del waiting[job]


def _events(job: Any, unit: Unit) -> Iterator[Event]:
    """Yield the events of a job that has ended; its runs have failed if it has no result."""
    try:
        result: UnitResult = job.result()
    except Exception as error:  # of submitit, such as for a job that was killed
        reason = " ".join(str(error).split())[:300]
        why = (
            f"job {job.job_id}: ended without a result ({reason}). See {job.paths.stderr}, then run it again to resume."
        )
        yield from (Event(each, Failed(why), None) for each in unit.jobs)
        return
    yield from result.events
    result.raise_error()
