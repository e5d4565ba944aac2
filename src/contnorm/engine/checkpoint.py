"""Checkpoints: tensors in a safetensors file, and what is counted in a JSON beside them; no pickle.

Each is written under a new name and only then made the current one, and the one before is kept until then: a disk that
fills up, or a process that is killed, leaves the last good one in place.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import Tensor

from contnorm.engine.packing import Packed
from contnorm.results import write_atomically

__all__ = ["Checkpoint", "Checkpoints"]


@dataclass(frozen=True)
class Checkpoint:
    """A state and what had been counted by then."""

    tensors: dict[str, Tensor]
    progress: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, in a folder of its own.

    Args:
        folder: Where they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, tensors: Packed, progress: dict[str, Any]) -> None:
        """Write a checkpoint of tensors that are on the host, then forget the older ones."""
        step, digest = progress["done"], hashlib.sha256()
        for part in tensors.parts:
            digest.update(part)
        write_atomically(self.folder / f"{step}.safetensors", *tensors.parts)
        beside = json.dumps({**progress, "sha256": digest.hexdigest()}).encode()
        write_atomically(self.folder / f"{step}.json", beside)
        self._forget(keep=step)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; None where there is none."""
        found = self._newest_whole()
        return None if found is None else Checkpoint(load(found[0]), found[1])

    def latest_step(self) -> int:
        """The step it was taken after; 0 where there is none."""
        found = self._newest_whole()
        return 0 if found is None else int(found[1]["done"])

    def _newest_whole(self) -> tuple[bytes, dict[str, Any]] | None:
        numbered = [path for path in self.folder.glob("*.json") if path.stem.isdigit()]
        for path in sorted(numbered, key=lambda p: -int(p.stem)):
            try:
                progress = json.loads(path.read_text())
                content = path.with_suffix(".safetensors").read_bytes()
                if hashlib.sha256(content).hexdigest() == progress.pop("sha256"):
                    return content, progress
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue  # cut short, or something else: an older one will do
        return None

    def clear(self) -> None:
        """Remove them all: the run is recorded."""
        self._forget(keep=None)
        if self.folder.is_dir():
            self.folder.rmdir()

    def _forget(self, keep: int | None) -> None:
        for path in self.folder.glob("*"):
            if keep is None or path.stem != str(keep):
                path.unlink(missing_ok=True)
