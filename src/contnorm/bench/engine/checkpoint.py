"""The folder of an unfinished run with its checkpoint, and the weights of a finished one; no pickle.

A checkpoint is one safetensors file, with the progress as JSON in its header. It replaces the one before it atomically,
so that a kill leaves one of them whole. The weights of a finished run are saved next to its record on request, as
``runs/<hash>/<seed>.safetensors``: later measurements (`contnorm diagnose`) need the network itself.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import socket
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from contnorm.atomic_files import write_atomically
from contnorm.bench.data.dataset import Source
from contnorm.bench.engine.provenance import cpu_circumstances
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.bench.records import SCHEMA
from contnorm.bench.unfinished import CHECKPOINT, LOCK, NOTE, UNFINISHED_SUFFIX, read_progress
from contnorm.errors import UserError
from contnorm.spec import differences_from_file, file_metadata, sort_metadata

ATTEMPTS = 100  # another process that has just recorded the run may remove the folder


class RunFolder:
    """The folder of a run that is not recorded yet.

    A lock, which ends with its process, keeps other processes from executing the run. On file systems without flock,
    the lock file of a killed process stays and has to be deleted.

    Args:
        record: The path that the record will have.

    Example:
        >>> import tempfile
        >>> record = Path(tempfile.mkdtemp()) / "75cc28cb778a" / "0.json"
        >>> first, second = RunFolder(record), RunFolder(record)
        >>> first.acquire(), second.acquire()
        (True, False)
        >>> first.release()
        >>> record.parent.exists()
        False
    """

    def __init__(self, record: Path) -> None:
        self.record = record
        self.folder = record.with_suffix(UNFINISHED_SUFFIX)
        self.note, self.checkpoint = self.folder / NOTE, self.folder / CHECKPOINT
        self._lock = FileLock(self.folder / LOCK, timeout=0, thread_local=False)

    def acquire(self) -> bool:
        """Lock the run for this process; False if another process executes it."""
        for _ in range(ATTEMPTS):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire()
                return True
            except Timeout:
                return False
            except FileNotFoundError:
                continue
        return False

    def release(self) -> None:
        """Unlock the run. Its folder is removed if it is recorded, or there is nothing to resume."""
        if self.record.is_file() or not self.checkpoint.is_file():
            shutil.rmtree(self.folder, ignore_errors=True)  # while it is locked
            for folder in (self.record.parent, self.record.parent.parent):
                with suppress(OSError):  # there are other files
                    folder.rmdir()
        self._lock.release(force=True)

    def holder(self) -> str:
        """Return the process that executes the run, as far as known."""
        with suppress(OSError, ValueError):
            return str(json.loads(self.note.read_bytes()).get("process", "another process"))
        return "another process"

    def start(self, run: Run, options: RunOptions, source: Source) -> str:
        """Write the note of a run that starts or resumes here.

        Returns:
            Why resuming the run here would not be bit-exact; empty if it would be, or there is no checkpoint.
        """
        here: dict[str, Any] = {"device": "cuda" if options.on_gpu else "cpu", "data": source.fingerprint}
        if not options.on_gpu:
            here |= {"threads": options.threads, "cn_kernel": None, **cpu_circumstances(run.config)}
        with suppress(OSError, ValueError):
            was = json.loads(self.note.read_bytes())["circumstances"]
            other = [
                f"{name} {was.get(name)}, here {here.get(name)}"
                for name in was | here
                if was.get(name) != here.get(name)
            ]
            if other and self.checkpoint.is_file():
                return (
                    f"{self.folder}: started with other circumstances ({'; '.join(other)}), so resuming it here would "
                    f"not be bit-exact. Resume it as it started, or delete the folder to start again."
                )
        content = {
            "schema": SCHEMA,
            "config": run.config.as_dict(),
            "seed": run.seed,
            "circumstances": here,
            "options": {name: getattr(options, name) for name in ("keep_weights", "allow_missing", "memory_moments")},
            "process": f"process {os.getpid()} on {socket.gethostname()}",
        }
        write_atomically(self.note, json.dumps(content).encode())
        return ""


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return the tensors and the progress in a checkpoint; None if there is none, or if it can't be read."""
    if not path.is_file():
        return None
    try:
        return load(path.read_bytes()), read_progress(path)
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        logging.getLogger("contnorm").warning(f"{path}: can't be read ({error}). The run starts again from step 0.")
        return None


class CheckpointWriter:
    """Writes the checkpoints of runs in the background; one per run at a time.

    Leaving the context waits for all checkpoints.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1)
        self._writes: dict[Path, Future[None]] = {}

    def save(self, path: Path, tensors: Mapping[str, Tensor], progress: dict[str, Any]) -> None:
        """Copy the tensors to the host and let the copies be written, after the checkpoint before."""
        if path in self._writes:
            self._writes.pop(path).result()
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        metadata = {"progress": json.dumps(progress)}
        self._writes[path] = self._worker.submit(lambda: write_atomically(path, save(copies, metadata)))

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._worker.shutdown(wait=True)
        for write in self._writes.values() if kind is None else ():
            write.result()


def weights_path(record: Path) -> Path:
    """Return the path of the weights of a run, which exists if they were saved.

    Example:
        >>> print(weights_path(Path("runs/0123abcd/4.json")))
        runs/0123abcd/4.safetensors
    """
    return record.with_suffix(".safetensors")


def pack_weights(model: nn.Module) -> bytes:
    """Return the parameters and buffers of a network as the content of a safetensors file, with its norm spec."""
    tensors = {name: t.detach().cpu().clone().contiguous() for name, t in model.state_dict().items()}
    content = io.BytesIO(save(tensors, file_metadata(model)))
    sort_metadata(content)
    return content.getvalue()


def load_weights(model: nn.Module, record: Path) -> None:
    """Load the weights that were saved next to a record into a network.

    Raises:
        UserError: If there are none, or they are of a network with other norms.
    """
    path = weights_path(record)
    if not path.is_file():
        raise UserError(
            f"{path}: the weights of this run were not saved. Move {record} away, and run it again "
            f"with the same settings and keep_weights=True (--keep-weights)."
        )
    if other_norms := differences_from_file(model, path):
        raise UserError(f"{path}: has the weights of a network with other norms: {other_norms}.")
    model.load_state_dict(load(path.read_bytes()))
