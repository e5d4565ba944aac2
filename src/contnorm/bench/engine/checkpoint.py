"""Checkpoints of a run: tensors in a safetensors file and progress in a JSON file next to it; no pickle.

One SHA-256 covers the tensors, the progress and the run they belong to, so a checkpoint that was cut short, edited or
copied from another run is detected. The last two checkpoints stay on disk; if the newest can't be used, the one before
it is.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import Tensor

from contnorm.bench.engine.tensor_pack import Packed
from contnorm.bench.files import write_atomically

__all__ = ["Checkpoint", "Checkpoints"]

FORMAT = 2  # 1 had a checksum of the tensors alone
COUNT = 2  # checkpoints on disk
_STEP = re.compile("[0-9]{1,18}")
_FILE = re.compile(r"[0-9]{1,18}\.(json|safetensors)|\.[0-9]{1,18}\.(json|safetensors)\.[0-9]+")
FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run.

    Attributes:
        tensors: Model, optimizer and memory.
        progress: Steps done and what was measured by then.
    """

    tensors: dict[str, Tensor]
    progress: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, in a folder.

    Args:
        folder: The folder of the files.
        run: Name of the run, such as its hash and seed. A checkpoint of another run is not used.
    """

    def __init__(self, folder: Path, run: str = "") -> None:
        self.folder, self.run = folder, run
        self._steps: list[int] = []  # steps of the checkpoints that this object has written or loaded

    def save(self, tensors: Packed, progress: dict[str, Any]) -> None:
        """Write a checkpoint of tensors on the host, then delete all but the last two."""
        step = int(progress["done"])
        content = json.loads(json.dumps({"format": FORMAT, "run": self.run, "progress": progress}))
        content["sha256"] = _checksum(content, tensors.parts)
        try:
            self._write(step, tensors, content)
        except OSError as error:
            if error.errno not in FULL or len(self._steps) < COUNT:
                raise
            self._delete(keep=self._steps[-1:])  # a full disk has room for one fallback only
            self._write(step, tensors, content)
        self._note_usable(step)
        self._delete(keep=self._steps)

    def _write(self, step: int, tensors: Packed, content: dict[str, Any]) -> None:
        write_atomically(self.folder / f"{step}.safetensors", *tensors.parts)
        write_atomically(self.folder / f"{step}.json", json.dumps(content).encode())

    def latest(self) -> Checkpoint | None:
        """Return the newest usable checkpoint; None if there is none."""
        usable = next(self._usable(), None)
        if usable is None:
            return None
        content, progress = usable
        self._note_usable(int(progress["done"]))
        return Checkpoint(load(content), progress)

    def latest_step(self) -> int:
        """Return the step of the newest usable checkpoint; 0 if there is none."""
        usable = next(self._usable(), None)
        return 0 if usable is None else int(usable[1]["done"])

    def problems(self) -> list[str]:
        """Return why checkpoints newer than the one of `latest` can't be used, newest first."""
        reasons = []
        for path in self._numbered():
            reason = self._read(path)
            if not isinstance(reason, str):
                break
            reasons.append(f"{path.name}: {reason}")
        return reasons

    def _usable(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        for path in self._numbered():
            read = self._read(path)
            if not isinstance(read, str):
                yield read

    def _numbered(self) -> list[Path]:
        """Return the JSON files of the checkpoints, newest first; links and special files are ignored."""
        if self.folder.is_symlink():
            return []
        numbered = [path for path in self.folder.glob("*.json") if _STEP.fullmatch(path.stem) and _is_plain(path)]
        return sorted(numbered, key=lambda path: -int(path.stem))

    def _read(self, path: Path) -> tuple[bytes, dict[str, Any]] | str:
        """Return the tensors as bytes and the progress, or the reason why they can't be used."""
        tensors = path.with_suffix(".safetensors")
        if not _is_plain(tensors):
            return f"has no file {tensors.name}"
        try:
            raw = json.loads(path.read_text())
            content = tensors.read_bytes()
        except (OSError, ValueError, RecursionError) as error:
            return f"can't be read ({type(error).__name__}: {error})"
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            return "was written by another version of contnorm, in another format"
        expected = raw.pop("sha256", None)
        if _checksum(raw, [content]) != expected:
            return "does not match its checksum"
        if raw.get("run") != self.run:
            return f"is of another run ({raw.get('run')})"
        progress: dict[str, Any] = raw["progress"]
        return content, progress

    def clear(self) -> None:
        """Delete all checkpoints and their folder."""
        self._delete(keep=())
        if self.folder.is_dir() and not self.folder.is_symlink():
            self.folder.rmdir()

    def _note_usable(self, step: int) -> None:
        self._steps = [*(other for other in self._steps if other < step), step][-COUNT:]

    def _delete(self, keep: Iterable[int]) -> None:
        """Delete checkpoints and their temporary files only: the folder may contain files of others."""
        if self.folder.is_symlink():
            return
        stems = {str(step) for step in keep}
        for path in self.folder.glob("*"):
            if _FILE.fullmatch(path.name) and path.stem not in stems:
                path.unlink(missing_ok=True)


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _checksum(content: dict[str, Any], tensors: Iterable[bytes | memoryview]) -> str:
    """Return the SHA-256 of the JSON content in a canonical form, followed by the tensors."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for part in tensors:
        digest.update(part)
    return digest.hexdigest()
