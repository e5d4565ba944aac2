"""What a run keeps until it is recorded: a note of what it is, its checkpoints, and a lock while it is run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.engine.checkpoint import Checkpoints
from contnorm.bench.engine.job import Job, Workplace
from contnorm.bench.engine.lock import Claim
from contnorm.bench.engine.precision import cpu_instructions
from contnorm.bench.fingerprint import Match, compare_fingerprints, not_comparable
from contnorm.bench.models.weights_files import replaced_weights
from contnorm.bench.record_checks import check_whole
from contnorm.bench.records import LARGEST_SEED, SCHEMA, Store, write_atomically
from contnorm.bench.user_code import code_hash, is_own_code, untrusted_code
from contnorm.errors import UserError, usable

__all__ = ["Left", "Leftovers", "Unfinished", "edited", "unfinished", "untrusted_in"]

ENDING = ".unfinished"
MOST_THREADS = 1024  # of a run on a CPU; torch ends the process where the system can't give them
ATTEMPTS = 20  # another process that has just recorded the run may remove the folder in between


@dataclass(frozen=True)
class Left:
    """A run that was stopped: what it is, where it lies, and with what it was begun."""

    job: Job
    runs: Path
    device: str
    threads: int
    keep_weights: bool = False
    allow_missing: bool = False


@dataclass(frozen=True)
class Leftovers:
    """The stopped runs under a folder, and why others there can't be gone on with."""

    runs: list[Left]
    problems: list[str]


class Unfinished:
    """The folder of a run that is not recorded yet.

    Args:
        record: Where its record will be.
    """

    def __init__(self, record: Path) -> None:
        self.record = record
        self.folder = record.parent / f"{record.stem}{ENDING}"
        self.note = self.folder / "run.json"
        self.checkpoints = Checkpoints(self.folder / "checkpoints", f"{record.parent.name}/{record.stem}")
        self.claim = Claim(self.folder / "lock")

    @classmethod
    def of(cls, job: Job, store: Store) -> Unfinished:
        return cls(store.path(job.config, job.seed))

    def write_note(self, job: Job, place: Workplace, data: str) -> None:
        """Say what is run, and with what: the bits depend on the data, on the device and on its threads.

        Args:
            job: What.
            place: Where.
            data: The fingerprint of its data.
        """
        begun = {"schema": SCHEMA, "config": job.config.as_dict(), "seed": job.seed, "data": data}
        circumstances: dict[str, object] = {"device": place.device.type, "threads": place.threads}
        if place.device.type == "cpu":
            circumstances["instructions"] = cpu_instructions()
        if place.keep_weights:
            circumstances["keep_weights"] = True
        if place.allow_missing:
            circumstances["allow_missing"] = True
        with usable(self.folder, "a run can't be kept there", "Say with --runs where else."):
            for attempt in range(ATTEMPTS):
                with suppress(*([FileNotFoundError] if attempt + 1 < ATTEMPTS else [])):
                    write_atomically(self.note, json.dumps(begun | circumstances).encode())
                    break

    def take(self) -> bool:
        """Claim the run for this process; False where another has it."""
        for folder in (self.folder, self.checkpoints.folder):
            if folder.is_symlink():
                raise UserError(f"{folder}: is a symbolic link, and a run is not kept behind one. Remove the link.")
        with usable(self.folder, "a run can't be kept there", "Say with --runs where else."):
            return self.claim.take()

    def clear_if_free(self) -> None:
        """Remove what processes that waited for the run may have written after it was recorded."""
        with suppress(OSError):
            if self.folder.is_dir() and self.claim.take():
                self.clear()
                self.claim.give_back()

    def begun_otherwise(self, place: Workplace, data: str) -> str:
        """Why going on here, with data of that fingerprint, would give other bits; empty where it would not."""
        steps = self.checkpoints.latest_step()
        if not steps or not self.note.is_file():
            return ""
        try:
            begun = _read(self.note)
        except _BrokenNoteError:
            return ""  # it is written anew
        begun_on = begun.get("data")
        if why := not_comparable(begun_on, data):
            logging.getLogger("contnorm").warning(
                f"{self.folder}: resumes without a check that the data is the same: {why}."
            )
        if compare_fingerprints(begun_on, data) is Match.DIFFERENT:
            return (
                f"{self.folder}: was begun on other data than is found here (fingerprint {begun_on}, here {data}) and "
                f"has {steps} steps. Say with --data-root where that is, or delete the folder to begin anew."
            )
        device, threads = begun.get("device", place.device.type), begun.get("threads", place.threads)
        if device == place.device.type and (threads == place.threads or device != "cpu"):
            return self._other_instructions(begun, steps) if device == "cpu" else ""
        return (
            f"{self.folder}: was begun with --device {device} --threads {threads} and has {steps} steps; with --device "
            f"{place.device.type} --threads {place.threads} its end would be neither's. Go on as it was begun "
            f"(`contnorm resume` does), or delete the folder to begin anew."
        )

    def _other_instructions(self, begun: Mapping[str, object], steps: int) -> str:
        """Why a run cannot go on with the instruction set of this CPU; empty if it can, or if none was noted."""
        now = cpu_instructions()
        if (was := begun.get("instructions", now)) == now:
            return ""
        return (
            f"{self.folder}: was begun on a CPU with {was} and has {steps} steps; {now} of this one gives other bits. "
            f"Resume it on a CPU with {was}, or delete the folder to begin anew."
        )

    def clear(self) -> None:
        """A run that is recorded, or can't go on, needs its folder no more."""
        with suppress(OSError):  # another process may have come in between; what stays beside a record is passed over
            self.checkpoints.clear()
            self.note.unlink(missing_ok=True)
            self.claim.remove_files()  # still held: they go before the folder can
            self.folder.rmdir()
            self.folder.parent.rmdir()  # goes only where no record is in it

    def clear_if_untouched(self) -> None:
        """Take back the note of a run that never came to a checkpoint, unless another process is at it."""
        with suppress(OSError):
            if self.folder.is_dir() and not self.checkpoints.latest_step() and self.claim.take():
                self.clear()
                self.claim.give_back()


def unfinished(root: Path) -> Leftovers:
    """The runs under a folder that were stopped; what can't be read is named and does not keep the others back."""
    found = Leftovers([], [])
    itself = [root] if root.resolve().suffix == ENDING else []
    for folder in [*itself, *sorted(root.glob(f"**/*{ENDING}"))]:
        if folder.is_symlink() and folder != root:
            found.problems.append(f"{folder}: is a symbolic link, which is not followed. Name the folder it leads to.")
            continue
        left = Unfinished(_near(folder).with_suffix(".json"))
        if left.record.is_file():  # another process may have noted a run just recorded
            continue
        try:
            found.runs.extend(_left(left))
        except UserError as error:
            found.problems.append(str(error))
        except (OSError, RuntimeError) as error:  # such as a path in the note that no system can have
            found.problems.append(f"{left.folder}: can't be resumed ({type(error).__name__}: {error}).")
    return found


def _near(folder: Path) -> Path:
    """A folder by its whole name, from here where it is under here: parts of the name are needed."""
    whole, here = folder.resolve(), Path.cwd()
    return whole.relative_to(here) if whole.parent.parent.is_relative_to(here) else whole


def _left(left: Unfinished) -> list[Left]:
    if not left.note.is_file():
        if left.checkpoints.latest_step():
            raise UserError(
                f"{left.folder}: has checkpoints and no run.json, so of which run is not known. Run the command that "
                f"began it again, and it goes on; or delete the folder."
            )
        return []
    raw = _read(left.note)
    try:
        seed = check_whole(raw["seed"], "seed", most=LARGEST_SEED)
        job = Job(from_dict(raw["config"], str(left.note)), seed)
        device = str(raw.get("device", "cpu"))
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device={device!r} must be cpu or cuda")
        threads = check_whole(raw.get("threads", 1), "threads", least=1, most=MOST_THREADS)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _no_note(left.note, error) from error
    runs = left.folder.parent.parent
    if Unfinished.of(job, Store(runs)).folder != left.folder:
        raise UserError(
            f"{left.note}: is of run {job.config.hash}, seed {job.seed}, and lies where another belongs. Move "
            f"{left.folder.name} back to its place, or delete it."
        )
    why = untrusted_in(job.config)  # first: a file that is not trusted is not even read
    if why:
        raise UserError(f"{left.folder}: {why}")
    why = edited(job.config)
    if why:
        raise UserError(f"{left.folder}: {why} To run it anew, delete the folder.")
    return [Left(job, runs, device, threads, raw.get("keep_weights") is True, raw.get("allow_missing") is True)]


def _read(note: Path) -> dict[str, Any]:
    try:
        raw = json.loads(note.read_text())
        newer = raw["schema"] > SCHEMA
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _no_note(note, error) from error
    if newer:
        raise UserError(f"{note}: was begun by a newer contnorm (version {raw['schema']}). Upgrade to go on.")
    found: dict[str, Any] = raw
    return found


class _BrokenNoteError(UserError):
    """A note that was cut short, or is none."""


def _no_note(note: Path, error: Exception) -> UserError:
    return _BrokenNoteError(
        f"{note}: is no note of a stopped run ({type(error).__name__}: {error}). Run the command that began it again, "
        f"or delete {note.parent}."
    )


def untrusted_in(config: RunConfig) -> str:
    """Which code that settings name may not be executed on this call, and how to allow it; empty where there is none.

    Settings from a record or a note were written by whoever made the file, so they name code without trusting it.
    """
    reasons = (
        untrusted_code(config.strategy.name, "strategy"),
        untrusted_code(config.model.name, "model"),
    )
    return next(filter(None, reasons), "")


def edited(config: RunConfig) -> str:
    """Which file named by settings is not the one a run was begun with, and what to do; empty where all are.

    Checked are code of the user's own, with the local modules it imports, and the weights that a network begins with.
    Settings that name such a file without its hash were not written by this package, and are refused as well.
    """
    for what, name, begun_with in (
        ("strategy", config.strategy.name, config.strategy.code),
        ("model", config.model.name, config.model.code),
    ):
        now = code_hash(name)
        path = name.rpartition(":")[0]
        if is_own_code(name) and begun_with is None and now is not None:
            return (
                f"{what} {name!r}: {what}.code is missing, so whether {path} is the file that the run was begun with "
                f"is not known."
            )
        if begun_with is not None and now is None:
            return f"{what} {name!r}: there is no file {path} here. Go on from the folder where it is."
        if begun_with is not None and now != begun_with:
            return (
                f"{what} {name!r}: {path} has changed since the run was begun ({what}.code was {begun_with}, and is "
                f"{now}), or a local module that it imports, and edited code is another run. Put it back as it was to "
                f"go on."
            )
    if config.model.weights is not None and config.model.weights_hash is None:
        return (
            f"model.weights={config.model.weights!r}: model.weights_hash is missing, so whether it is the file that "
            f"the run was begun with is not known."
        )
    return replaced_weights(config.model)
