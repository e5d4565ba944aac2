"""The folder of an unfinished run: a note with its settings, its checkpoints, and a lock while it is executed."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contnorm.atomic_files import write_atomically
from contnorm.bench.components import code_hash, is_file_code, own_code, user_parts
from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.engine.checkpoint import Checkpoints
from contnorm.bench.engine.job import Job, RunEnvironment
from contnorm.bench.engine.lock import RunLock
from contnorm.bench.engine.precision import cn_kernel, cpu_instructions
from contnorm.bench.fingerprint import Match, compare_fingerprints, not_comparable
from contnorm.bench.models.pretrained import weights_change
from contnorm.bench.records import LARGEST_SEED, SCHEMA, Store
from contnorm.bench.unfinished import CHECKPOINTS, ENDING, LOCK, NOTE
from contnorm.errors import UserError, usable

__all__ = ["RunDir", "StoppedRun", "StoppedRuns", "edited", "stopped_runs"]

MOST_THREADS = 1024  # of a run on a CPU; torch aborts the process if it can't start them
_NOTED_OPTIONS = ("keep_weights", "allow_missing", "memory_moments")  # of the environment, that a resumed run keeps
ATTEMPTS = 20  # another process that has just recorded the run may remove the folder


@dataclass(frozen=True)
class StoppedRun:
    """A stopped run.

    Attributes:
        job: Its settings and seed.
        runs: The folder of records and checkpoints.
        device: The type of the device it was started on.
        threads: The CPU threads it was started with.
        keep_weights: Whether its weights are saved when it is finished.
        memory_moments: Whether it is evaluated with the moments of the replay memory too.
        allow_missing: Whether its data set may have other image counts than published.
    """

    job: Job
    runs: Path
    device: str
    threads: int
    keep_weights: bool = False
    allow_missing: bool = False
    memory_moments: bool = False


@dataclass(frozen=True)
class StoppedRuns:
    """The stopped runs in a folder, and why others in it can't be resumed."""

    runs: list[StoppedRun]
    problems: list[str]


class RunDir:
    """The folder of a run that is not recorded yet.

    Args:
        record: The path that its record will have.
    """

    def __init__(self, record: Path) -> None:
        self.record = record
        self.folder = record.parent / f"{record.stem}{ENDING}"
        self.note = self.folder / NOTE
        self.checkpoints = Checkpoints(self.folder / CHECKPOINTS, f"{record.parent.name}/{record.stem}")
        self.lock = RunLock(self.folder / LOCK)

    @classmethod
    def of(cls, job: Job, store: Store) -> RunDir:
        """Return the folder of a job."""
        return cls(store.path(job.config, job.seed))

    def write_note(self, job: Job, environment: RunEnvironment, data: str) -> None:
        """Write the settings and the circumstances of a run; its bits depend on data, device and threads.

        Args:
            job: The settings and the seed.
            environment: The environment of the run.
            data: The fingerprint of its data.
        """
        identity = {"schema": SCHEMA, "config": job.config.as_dict(), "seed": job.seed, "data": data}
        circumstances: dict[str, object] = {"device": environment.device.type, "threads": environment.threads}
        if environment.device.type == "cpu":
            circumstances["instructions"] = cpu_instructions()
            if kernel := cn_kernel(job.config):
                circumstances["cn_kernel"] = kernel
        for option in _NOTED_OPTIONS:
            if getattr(environment, option):
                circumstances[option] = True
        with usable(self.folder, "no run can be saved there", "Use another folder for runs (--runs)."):
            for attempt in range(ATTEMPTS):
                with suppress(*([FileNotFoundError] if attempt + 1 < ATTEMPTS else [])):
                    write_atomically(self.note, json.dumps(identity | circumstances).encode())
                    break

    def acquire(self) -> bool:
        """Lock the run for this process; False if another process holds it."""
        for folder in (self.folder, self.checkpoints.folder):
            if folder.is_symlink():
                raise UserError(f"{folder}: is a symbolic link, and no run is saved through one. Remove the link.")
        with usable(self.folder, "no run can be saved there", "Use another folder for runs (--runs)."):
            return self.lock.acquire()

    def clear_if_free(self) -> None:
        """Remove files that waiting processes may have written after the run was recorded."""
        with suppress(OSError):
            if self.folder.is_dir() and self.lock.acquire():
                self.clear()
                self.lock.release()

    def resume_mismatch(self, job: Job, environment: RunEnvironment, data: str) -> str:
        """Return why resuming here, with data of that fingerprint, would not be bit-exact; empty if it would be."""
        steps = self.checkpoints.latest_step()
        if not steps or not self.note.is_file():
            return ""
        try:
            note = _read(self.note)
        except _BrokenNoteError:
            return ""  # it is written again
        noted_data = note.get("data")
        if reason := not_comparable(noted_data, data):
            logging.getLogger("contnorm").warning(
                f"{self.folder}: resumes without a check that the data is the same: {reason}."
            )
        if compare_fingerprints(noted_data, data) is Match.DIFFERENT:
            return (
                f"{self.folder}: has {steps} steps on other data (fingerprint {noted_data}) than the data here "
                f"({data}). Name the folder of that data (root= or --data-root), or delete the folder to start again."
            )
        device, threads = note.get("device", environment.device.type), note.get("threads", environment.threads)
        if device == environment.device.type and (threads == environment.threads or device != "cpu"):
            if device != "cpu":
                return ""
            return self._other_instructions(note, steps) or self._other_kernel(job.config, note, steps)
        return (
            f"{self.folder}: started with --device {device} --threads {threads} and has {steps} steps. Resuming with "
            f"--device {environment.device.type} --threads {environment.threads} would not be bit-exact. Resume it as "
            f"it started (`contnorm resume` does), or delete the folder to start again."
        )

    def _other_instructions(self, note: Mapping[str, object], steps: int) -> str:
        """Return why a run can't resume with the instruction set of this CPU; empty if it can, or none was noted."""
        now = cpu_instructions()
        if (was := note.get("instructions", now)) == now:
            return ""
        return (
            f"{self.folder}: has {steps} steps on a CPU with {was}; resuming with {now} would not be bit-exact. "
            f"Resume it on a CPU with {was}, or delete the folder to start again."
        )

    def _other_kernel(self, config: RunConfig, note: Mapping[str, object], steps: int) -> str:
        """Return why a run can't resume with the kernel of continual normalization here; empty if it can."""
        now = cn_kernel(config)
        was = note.get("cn_kernel", "torch")  # versions that did not note it had no C++ kernel
        if now is None or was == now:
            return ""
        how = {
            "cpp": "where its C++ kernel can be compiled, without CONTNORM_KERNEL",
            "torch": "with CXX=none in the environment, which avoids compiled kernels",
        }.get(str(was), f"with CONTNORM_KERNEL={was}")
        return (
            f"{self.folder}: has {steps} steps with the kernel {was!r} of continual normalization; resuming with "
            f"{now!r} would not be bit-exact. Resume it {how}, or delete the folder to start again."
        )

    def clear(self) -> None:
        """Remove the folder of a run that is recorded or can't be resumed."""
        with suppress(OSError):  # another process may use the folder; it is ignored once a record exists
            self.checkpoints.clear()
            self.note.unlink(missing_ok=True)
            self.lock.remove_files()  # while the lock is held: rmdir needs an empty folder
            self.folder.rmdir()
            self.folder.parent.rmdir()  # fails if a record is in it

    def clear_if_untouched(self) -> None:
        """Remove the folder of a run without a checkpoint, unless another process holds it."""
        with suppress(OSError):
            if self.folder.is_dir() and not self.checkpoints.latest_step() and self.lock.acquire():
                self.clear()
                self.lock.release()


def stopped_runs(root: Path) -> StoppedRuns:
    """Return the stopped runs in a folder. Runs that can't be read are listed as problems."""
    stopped = StoppedRuns([], [])
    root_folder = [root] if root.resolve().suffix == ENDING else []
    for folder in [*root_folder, *sorted(root.glob(f"**/*{ENDING}"))]:
        if folder.is_symlink() and folder != root:
            stopped.problems.append(f"{folder}: is a symbolic link, which is not followed. Name its target instead.")
            continue
        run_dir = RunDir(_relative(folder).with_suffix(".json"))
        if run_dir.record.is_file():  # another process may have written a note after the run was recorded
            continue
        try:
            stopped.runs.extend(_stopped_run(run_dir))
        except UserError as error:
            stopped.problems.append(str(error))
        except (OSError, RuntimeError) as error:  # such as an invalid path in the note
            stopped.problems.append(f"{run_dir.folder}: can't be resumed ({type(error).__name__}: {error}).")
    return stopped


def _relative(folder: Path) -> Path:
    """Return the resolved path of a folder, relative to the current folder if its grandparent is in there.

    It is resolved because the names of its parents are needed.
    """
    resolved, current = folder.resolve(), Path.cwd()
    return resolved.relative_to(current) if resolved.parent.parent.is_relative_to(current) else resolved


def _whole_number(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r} must be a whole number from {least} to {most}")
    return value


def _stopped_run(run_dir: RunDir) -> list[StoppedRun]:
    """Return the run in a folder, or nothing if the folder has neither a note nor checkpoints."""
    if not run_dir.note.is_file():
        if run_dir.checkpoints.latest_step():
            raise UserError(
                f"{run_dir.folder}: has checkpoints but no run.json, so its settings are unknown. Repeat the command "
                f"that started it to resume it, or delete the folder."
            )
        return []
    raw = _read(run_dir.note)
    try:
        seed = _whole_number(raw["seed"], 0, LARGEST_SEED)
        job = Job(from_dict(raw["config"], str(run_dir.note)), seed)
        device = str(raw.get("device", "cpu"))
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device={device!r} must be cpu or cuda")
        threads = _whole_number(raw.get("threads", 1), 1, MOST_THREADS)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _invalid_note(run_dir.note, error) from error
    runs = run_dir.folder.parent.parent
    if RunDir.of(job, Store(runs)).folder != run_dir.folder:
        raise UserError(
            f"{run_dir.note}: is of run {job.config.hash}, seed {job.seed}, but is in the folder of another run. Move "
            f"{run_dir.folder.name} to the folder {job.config.hash}, or delete it."
        )
    if reason := own_code(job.config):
        raise UserError(f"{run_dir.folder}: {reason}. To resume it, repeat the command that started it.")
    reason = edited(job.config)
    if reason:
        raise UserError(f"{run_dir.folder}: {reason} To start it again, delete the folder.")
    return [StoppedRun(job, runs, device, threads, **{option: raw.get(option) is True for option in _NOTED_OPTIONS})]


def _read(note: Path) -> dict[str, Any]:
    try:
        raw = json.loads(note.read_text())
        newer = raw["schema"] > SCHEMA
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _invalid_note(note, error) from error
    if newer:
        raise UserError(
            f"{note}: was written by a newer contnorm (schema {raw['schema']}). Upgrade contnorm to resume the run."
        )
    content: dict[str, Any] = raw
    return content


class _BrokenNoteError(UserError):
    """A note that is truncated or invalid."""


def _invalid_note(note: Path, error: Exception) -> UserError:
    return _BrokenNoteError(
        f"{note}: is not a valid note of a stopped run ({type(error).__name__}: {error}). Repeat the command that "
        f"started it, or delete {note.parent}."
    )


def edited(config: RunConfig) -> str:
    """Return which file that the settings name has changed since the run was started; empty if none.

    The checked files are user code, and the initial weights of a network.
    """
    for kind, (name, code) in user_parts(config).items():
        if is_file_code(name) and code_hash(kind, name, code) != code:
            return f"{kind} {name!r}: the file has changed since the run was started. Run it again."
    return "" if config.model.weights is None else weights_change(config.model)
