"""Checkpoints of a run: tensors in a safetensors file and progress in a JSON file next to it; no pickle.

One SHA-256 covers the tensors, the progress and the run they belong to, so a checkpoint that was cut short, edited or
copied from another run is detected. The last two checkpoints stay on disk; if the newest can't be used, the one before
it is.

Checkpoints are asynchronous: a background thread (`CheckpointWriter`) writes them from a copy of the tensors. A newer
checkpoint of the same run replaces one that the thread has not started to write. Checkpoints at the end of a task are
required: they are always written.

The weights of a finished run are saved next to its record on request, as ``runs/<hash>/<seed>.safetensors``: later
measurements (`contnorm diagnose`) need the network itself.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from contnorm.atomic_files import write_atomically
from contnorm.bench.cuda_streams import copying_stream
from contnorm.errors import UserError
from contnorm.model_files import differences_from_file, file_metadata, sort_metadata

__all__ = [
    "DTYPES",
    "Checkpoint",
    "CheckpointWriter",
    "Checkpoints",
    "Packed",
    "load_run_weights",
    "load_weights",
    "pack_weights",
    "packed",
    "save_weights",
    "weights_path",
]

FORMAT = 2  # 1 had a checksum of the tensors alone
COUNT = 2  # checkpoints on disk
_STEP = re.compile("[0-9]{1,18}")
_FILE = re.compile(r"[0-9]{1,18}\.(json|safetensors)|\.[0-9]{1,18}\.(json|safetensors)\.[0-9a-f]+")
FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run.

    Attributes:
        tensors: Model, optimizer, memory and strategy.
        progress: Steps done, hooks called, plain values of the strategy, and what was measured by then.
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

    def latest_files(self) -> dict[str, bytes]:
        """Return the files of the newest usable checkpoint by name, to copy them; empty if there is none."""
        for path in self._numbered():
            read = self._read(path)
            if not isinstance(read, str):
                return {path.with_suffix(".safetensors").name: read[0], path.name: path.read_bytes()}
        return {}

    def add_files(self, files: Mapping[str, bytes]) -> None:
        """Write the files of a checkpoint of another folder, then delete all but the last two."""
        for name in sorted(files, key=lambda name: name.endswith(".json")):  # the JSON file last: it is found first
            write_atomically(self.folder / name, files[name])
        self._note_usable(max(int(Path(name).stem) for name in files))
        self._delete(keep=self._steps)

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


DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Packed:
    """The content of a safetensors file: its header, and the data on the device of the tensors."""

    header: bytes
    body: Tensor

    @property
    def parts(self) -> tuple[bytes, memoryview]:
        """The bytes of the file, in order. The body must be on the host."""
        return self.header, self.body.numpy().data


def packed(tensors: Mapping[str, Tensor]) -> Packed:
    """Pack a copy of the tensors into one, in the layout of a safetensors file; on the GPU if any of them is there.

    A network has about a hundred tensors. Copying them to the host one by one would keep Python from launching training
    steps. One packed tensor needs a single copy; the host then only hashes and writes it.

    Example:
        >>> from safetensors.torch import load
        >>> load(b"".join(packed({"a": torch.ones(2), "b": torch.tensor(7)}).parts))["b"]
        tensor(7)
    """
    # Largest element size first, so that every tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    device = next((t.device for t in tensors.values() if t.is_cuda), torch.device("cpu"))
    rows = [tensors[name].detach().to(device).reshape(-1).view(torch.uint8) for name in names]
    body = torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8)
    return Packed(_header(tensors, names), body)


def _header(tensors: Mapping[str, Tensor], names: list[str]) -> bytes:
    entries, start = {}, 0
    for name in names:
        tensor = tensors[name]
        end = start + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class _Write:
    """A checkpoint that is pending, being written, or written."""

    done: Future[None]
    required: bool


class CheckpointWriter:
    """Writes the checkpoints of runs in the background.

    Leaving the context waits for all checkpoints; after a KeyboardInterrupt, only for the one being written.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1)
        self._host = _HostBuffer()
        self._writes: dict[Checkpoints, list[_Write]] = {}

    def save(
        self, checkpoints: Checkpoints, tensors: dict[str, Tensor], progress: dict[str, Any], required: bool = False
    ) -> None:
        """Copy the tensors and schedule the copy to be written.

        Args:
            checkpoints: The checkpoints of the run.
            tensors: The state of the run.
            progress: The progress of the run, saved with the state.
            required: Whether this checkpoint must be written even if a newer one follows. Blocks while another required
                checkpoint of the run is pending, so that copies do not accumulate in memory.
        """
        self._drop_replaced(checkpoints, required)
        copies = packed(tensors)
        packing = torch.cuda.current_stream(copies.body.device).record_event() if copies.body.is_cuda else None
        future = self._worker.submit(self._write, checkpoints, copies, packing, copy.deepcopy(progress))
        self._writes.setdefault(checkpoints, []).append(_Write(future, required))

    def _drop_replaced(self, checkpoints: Checkpoints, required: bool) -> None:
        """Drop the checkpoints that a new one replaces, and raise the errors of older ones."""
        waiting = []
        for write in self._writes.pop(checkpoints, []):
            if not write.required and write.done.cancel():
                continue
            if write.done.done() or (required and write.required and not write.done.running()):
                _raise_error(checkpoints, write.done)
            else:
                waiting.append(write)
        self._writes[checkpoints] = waiting

    def _write(
        self, checkpoints: Checkpoints, tensors: Packed, packing: torch.cuda.Event | None, progress: dict[str, Any]
    ) -> None:
        checkpoints.save(self._host.copy(tensors, packing), progress)

    def flush(self) -> None:
        """Wait until all checkpoints are written, and raise their errors."""
        writes, self._writes = self._writes, {}
        for checkpoints, of_run in writes.items():
            for write in of_run:
                _raise_error(checkpoints, write.done)

    def finish(self, several: Iterable[Checkpoints]) -> None:
        """Wait for the required checkpoints of completed runs and drop the others.

        Write errors are ignored: the record is written next.
        """
        self._end(several, drop_required=False)

    def forget(self, several: Iterable[Checkpoints]) -> None:
        """Drop the pending checkpoints of failed runs, and wait for the one being written."""
        self._end(several, drop_required=True)

    def _end(self, several: Iterable[Checkpoints], drop_required: bool) -> None:
        writes = [write for checkpoints in several for write in self._writes.pop(checkpoints, [])]
        for write in writes:  # cancel all before waiting for any
            if drop_required or not write.required:
                write.done.cancel()
        for write in writes:
            if not write.done.cancelled():
                write.done.exception()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        at_once = kind is not None and issubclass(kind, KeyboardInterrupt)
        self._worker.shutdown(wait=True, cancel_futures=at_once)


class _HostBuffer:
    """Copies packed tensors from a GPU to the host, through a buffer of pinned memory that all copies share."""

    def __init__(self) -> None:
        self._stage = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Packed, packing: torch.cuda.Event | None) -> Packed:
        """Copy on a separate CUDA stream after the ``packing`` event. The result is valid until the next copy."""
        if packing is None:
            return tensors
        size = len(tensors.body)
        if len(self._stage) < size:
            self._stage = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(copying_stream(tensors.body.device)):
            stream = torch.cuda.current_stream()
            stream.wait_event(packing)
            self._stage[:size].copy_(tensors.body, non_blocking=True)
            stream.synchronize()
        return Packed(tensors.header, self._stage[:size])


def _raise_error(checkpoints: Checkpoints, written: Future[None]) -> None:
    error = written.exception()
    if isinstance(error, OSError):
        raise UserError(
            f"{checkpoints.folder}: a checkpoint can't be written ({error.strerror}). Free disk space, then resume "
            f"with `contnorm resume`: the previous checkpoint is intact."
        ) from error
    if error is not None:
        raise error


def weights_path(record: Path) -> Path:
    """Return the path of the weights of a run, which exists if they were saved.

    Example:
        >>> print(weights_path(Path("runs/0123abcd/4.json")))
        runs/0123abcd/4.safetensors
    """
    return record.with_suffix(".safetensors")


def save_weights(model: nn.Module, record: Path) -> None:
    """Write the parameters and buffers of a network next to its record, atomically."""
    write_atomically(weights_path(record), pack_weights(model))


def pack_weights(model: nn.Module) -> bytes:
    """Return the parameters and buffers of a network as the content of a safetensors file, with its norm spec."""
    tensors = {name: t.detach().cpu().clone().contiguous() for name, t in model.state_dict().items()}
    content = io.BytesIO(save(tensors, file_metadata(model)))
    sort_metadata(content)
    return content.getvalue()


def load_run_weights(model: nn.Module, record: Path) -> None:
    """Load the weights that were saved next to a record into a network.

    Raises:
        UserError: If there are none, or they are of another run.
    """
    path = weights_path(record)
    if not path.is_file():
        raise UserError(
            f"{path}: the weights of this run were not saved. Move {record} away, and run it again "
            f"with the same settings and keep_weights=True (--keep-weights)."
        )
    load_weights(model, path, f"Move it and {record} away, and run it again with --keep-weights.")


def load_weights(model: nn.Module, path: Path, advice: str) -> None:
    """Load the weights in a safetensors file into a network.

    Args:
        model: The network.
        path: The file.
        advice: What to do about an error, for its message.

    Raises:
        UserError: If the file can't be read or belongs to another network, or to one with other norms.
    """
    try:
        tensors = load(path.read_bytes())
        other_norms = differences_from_file(model, path)
        if not other_norms:
            model.load_state_dict(tensors)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        detail = " ".join(str(error).split())
        raise UserError(
            f"{path}: is not a safetensors file with the weights of this network ({detail}). {advice}"
        ) from error
    if other_norms:
        raise UserError(f"{path}: has the weights of a network with other norms: {other_norms}. {advice}")
