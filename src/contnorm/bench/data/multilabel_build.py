"""Build a multi-label data set: decode every picture once into arrays that are memory-mapped afterwards.

Pictures are decoded in pieces of 64 rows, and a log lists the pieces that are written. A build that was interrupted, in
whatever way, resumes with the pieces that are not in the log. A build with more pictures than an earlier one copies the
rows that the earlier one has decoded. The manifest is written last. The fingerprint is computed from the decoded
content, so two builds of the same pictures have the same fingerprint.
"""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from contnorm.bench.data.decoding import Done, Kept, Piece, fill, settle
from contnorm.bench.data.file_state import Signature
from contnorm.bench.data.json_text import parse_json
from contnorm.bench.data.multilabel_manifest import SPLITS, Counted, Listed, ListedPicture
from contnorm.bench.data.multilabel_store import (
    KIND,
    MANIFEST,
    ROWS,
    VERSION,
    Manifest,
    content_fingerprint,
    read_manifest,
)
from contnorm.bench.data.picture_state import (
    changed_pictures,
    changed_rows,
    load_signatures,
    picture_signature,
    save_signatures,
)
from contnorm.bench.records import write_atomically
from contnorm.bench.signals import block_signals
from contnorm.errors import UserError, usable

if sys.platform != "win32":
    import fcntl

__all__ = ["MISSING", "begun", "build"]

MISSING = "missing.json"
NAMED = 5  # number of examples in an error message
NOTE = re.compile(rf"^({'|'.join(SPLITS)}) ([0-9]{{1,9}}) ([0-9a-f]{{64}})$", re.MULTILINE)
Report = Callable[[int, int], None]  # pictures done, pictures in total
# Decoded rows of earlier builds by split, name and size in bytes, with the signature of the file if it is known.
KeptRows = dict[tuple[str, int | str, int], tuple[Kept, Signature | None]]


def build(
    listed: Listed,
    out: Path,
    side: int,
    *,
    allow_missing: bool = False,
    jobs: int = 1,
    report: Report = lambda *_: None,
) -> Manifest:
    """Build a data set into a folder, or resume its build. A data set that is already built is not changed.

    Args:
        listed: Pictures, labels and tasks of the data set.
        out: Folder of the data set.
        side: Height and width that pictures are resized to, in pixels.
        allow_missing: Whether to build without pictures that are missing; the data set is then recorded as incomplete.
        jobs: Number of processes.
        report: Called with the progress.

    Returns:
        The manifest of the data set.
    """
    _check_pictures(listed, allow_missing)
    plan = _plan(listed, side)
    key = hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:16]
    hint = "Make room or let yourself write there, or say with --out where else; what is decoded is kept."
    with usable(out, "nothing can be built there", hint):
        if (out / MANIFEST).is_file():
            manifest = read_manifest(out)
            if manifest["made_of"] == key:
                _check_unchanged(listed, manifest, out, jobs)
                return manifest
            _check_replaceable(manifest, listed, side, out)
        out.mkdir(parents=True, exist_ok=True)
        with _locked(out):
            folder = out / f"build-{key}"
            digests = _decode(listed, plan, folder, jobs, report)
            _write_labels(listed, folder)
            return _finish(listed, side, key, folder, digests)


def begun(out: Path) -> tuple[int, int] | None:
    """Return the numbers of decoded and of all pictures of the most advanced build; None if there is none."""
    progress = []
    for folder in out.glob("build-*"):
        plan = _read_plan(folder)
        if plan is not None:
            counts = {split: len(plan[split]) for split in SPLITS}
            rows = sum(max(0, min(ROWS, counts[split] - number * ROWS)) for split, number in _read_log(folder))
            progress.append((rows, sum(counts.values())))
    return max(progress, default=None)


def _check_pictures(listed: Listed, allow_missing: bool) -> None:
    absent = [picture for split in SPLITS for picture in listed.absent(split)]
    if absent and not allow_missing:
        total = len(listed.train) + len(listed.test)
        raise UserError(
            f"{listed.name}: {len(absent):,} of {total:,} pictures are missing, such as {_examples(absent)}. Bring "
            f"them, or build without them with --allow-missing, which records how many of each task and class are "
            f"absent."
        )
    for split in SPLITS:
        if not listed.present(split):
            raise UserError(f"{listed.name}: not one {split} picture is there. Say where they are.")
    for task, count in zip(listed.task_names, listed.count(listed.present("train")).by_task, strict=True):
        if not count:
            raise UserError(f"{listed.name}: task {task} has not one train picture. Bring some, or leave the task out.")
    if not listed.as_published:
        _check_duplicates(listed)


def _check_duplicates(listed: Listed) -> None:
    """Raise an error if a file is listed twice.

    Its picture would be trained on twice, each time with a part of its labels, or be in both splits.
    """
    locations: dict[tuple[int, int], str] = {}
    duplicates: list[str] = []
    for split in SPLITS:
        for picture in listed.present(split):
            assert picture.path is not None
            info = picture.path.stat()
            # The same for links, and for names in another case if the file system ignores case.
            file = info.st_dev, info.st_ino
            location = f"{split} of task {listed.task_names[picture.task]}"
            if file in locations:
                duplicates.append(f"{picture.id}, in {locations[file]} and in {location}")
            else:
                locations[file] = location
    if duplicates:
        raise UserError(
            f"{listed.name}: {len(duplicates):,} pictures are listed again, such as {duplicates[0]}. List each once, "
            f"with all of its labels."
        )


def _examples(pictures: Sequence[ListedPicture]) -> str:
    return ", ".join(str(picture.id) for picture in pictures[:NAMED])


def _plan(listed: Listed, side: int) -> dict[str, Any]:
    """Return everything that determines the build. Pictures count by name, labels and size in bytes, not by date."""

    def entry(picture: ListedPicture) -> list[Any]:
        assert picture.path is not None
        return [picture.id, picture.path.stat().st_size, picture.task, list(picture.labels)]

    with usable(Path(listed.name), "a picture of it can't be looked at", "Let yourself read it."):
        pictures: dict[str, Any] = {split: [entry(picture) for picture in listed.present(split)] for split in SPLITS}
    absent = {f"{split}_absent": [picture.id for picture in listed.absent(split)] for split in SPLITS}
    kinds = [listed.class_names, listed.class_groups, listed.task_names]
    return {"version": VERSION, "name": listed.name, "side": side, "kinds": kinds, **pictures, **absent}


def _check_replaceable(manifest: Manifest, listed: Listed, side: int, out: Path) -> None:
    """Raise an error unless an existing data set is an incomplete build of the same name and picture size."""
    if manifest["complete"] or manifest["name"] != listed.name or manifest["size"] != side:
        count = sum(manifest["images"][split]["images"] for split in SPLITS)
        raise UserError(
            f"{out}: holds another data set already: {manifest['name']}, {count:,} pictures of {manifest['size']} "
            f"pixels. Delete it, or say with --out where else."
        )


def _check_unchanged(listed: Listed, manifest: Manifest, out: Path, jobs: int) -> None:
    """Raise an error if a picture was replaced by another of the same size after the data set was built."""
    changed = changed_pictures(out / manifest["folder"], listed, manifest["size"], jobs)
    if changed:
        raise UserError(
            f"{out}: {len(changed):,} pictures are not those it was built from any more, such as {_examples(changed)}. "
            f"Delete {out} and build it again, or say with --out where else."
        )


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Lock the folder, because two builds in it would corrupt each other; the lock ends with the process."""
    with (out / ".lock").open("w") as file:
        try:
            if sys.platform != "win32":  # on Windows, builds are not locked
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{out}: another process is building there. Wait for it.") from None
        yield


def _decode(
    listed: Listed, plan: dict[str, Any], folder: Path, jobs: int, report: Report
) -> dict[tuple[str, int], str]:
    """Decode all pieces that are not written yet; returns the hashes of all pieces."""
    offsets = _create_arrays(plan, folder)
    pieces = list(_pieces(listed, plan["side"], folder, offsets))
    expected = {(piece.split, piece.number) for piece in pieces}
    changed = {(split, row // ROWS) for split, row, _ in changed_rows(folder, listed)}
    digests = {
        piece: digest for piece, digest in _read_log(folder).items() if piece in expected and piece not in changed
    }
    total = sum(len(piece.pictures) for piece in pieces)
    missing = [piece for piece in pieces if (piece.split, piece.number) not in digests]
    count = total - sum(len(piece.pictures) for piece in missing)
    report(count, total)
    problems: list[str] = []
    lines = [_log_line(*piece, digest) for piece, digest in digests.items()]
    write_atomically(folder / "done", "".join(lines).encode())  # removes an incomplete last line
    save_signatures(folder, listed)  # after changed pieces are removed from the log
    with (folder / "done").open("a") as log:
        for done in _decode_pieces(missing, jobs):
            problems += done.problems
            if not done.problems:
                piece = done.piece
                digests[piece.split, piece.number] = done.digest
                log.write(_log_line(piece.split, piece.number, done.digest))
                log.flush()
                count += len(piece.pictures)
                report(count, total)
    if problems:
        more = f" So with {len(problems) - NAMED:,} more." if len(problems) > NAMED else ""
        raise UserError(
            f"{'; '.join(problems[:NAMED])}.{more} Mend it, or delete it and use --allow-missing; the others are "
            f"decoded, and the same command goes on."
        )
    return digests


def _create_arrays(plan: dict[str, Any], folder: Path) -> dict[str, int]:
    """Create the array files of both splits if necessary; returns the offset of the first row in each file."""
    if not _has_arrays(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for split in SPLITS:
            shape = (len(plan[split]), 3, plan["side"], plan["side"])
            np.lib.format.open_memmap(_array_path(folder, split), mode="w+", dtype=np.uint8, shape=shape)
        write_atomically(folder / "plan.json", json.dumps(plan).encode())
    return {split: np.load(_array_path(folder, split), mmap_mode="r").offset for split in SPLITS}


def _has_arrays(folder: Path) -> bool:
    """Whether the folder has a plan, which is written after the arrays are created, and arrays of the planned shape."""
    plan = _read_plan(folder)
    if plan is None:
        return False
    try:
        arrays = {split: np.lib.format.open_memmap(_array_path(folder, split), mode="r") for split in SPLITS}
    except Exception:  # a damaged header can raise any exception
        return False
    return all(
        array.dtype == np.uint8 and array.shape == (len(plan[split]), 3, plan["side"], plan["side"])
        for split, array in arrays.items()
    )


def _array_path(folder: Path, split: str) -> Path:
    return folder / f"{split}_images.npy"


def _read_plan(folder: Path) -> dict[str, Any] | None:
    """Return the plan of a build; None if there is none, or none that this version has written."""
    try:
        plan: dict[str, Any] = parse_json((folder / "plan.json").read_bytes())
    except (OSError, ValueError):
        return None
    return plan if _is_plan(plan) else None


def _is_plan(plan: Any) -> bool:
    """Whether a plan has a side, and for each split pictures as [name, bytes, task, labels]."""
    if not isinstance(plan, dict) or type(plan.get("side")) is not int:
        return False
    pictures = [plan.get(split) for split in SPLITS]
    return all(isinstance(entries, list) and all(map(_is_planned, entries)) for entries in pictures)


def _is_planned(picture: Any) -> bool:
    return (
        isinstance(picture, list)
        and len(picture) == 4
        and type(picture[0]) in (int, str)
        and all(type(number) is int for number in picture[1:3])
    )


def _log_line(split: str, number: int, digest: str) -> str:
    return f"{split} {number} {digest}\n"


def _read_log(folder: Path) -> dict[tuple[str, int], str]:
    """Return the pieces in the log with their hashes; an incomplete line is ignored."""
    path = folder / "done"
    text = path.read_text(errors="replace") if path.is_file() else ""
    return {(split, int(number)): digest for split, number, digest in NOTE.findall(text)}


def _pieces(listed: Listed, side: int, folder: Path, offsets: dict[str, int]) -> Iterator[Piece]:
    decoded_rows = _decoded_rows(folder, side)
    for split in SPLITS:
        present = listed.present(split)
        for number, start in enumerate(range(0, len(present), ROWS)):
            offset = offsets[split] + start * 3 * side * side
            origins = tuple(_origin(split, picture, decoded_rows) for picture in present[start : start + ROWS])
            yield Piece(split, number, _array_path(folder, split), offset, side, origins)


def _origin(split: str, picture: ListedPicture, decoded_rows: KeptRows) -> Path | Kept:
    """Return the decoded row of an earlier build if it is of the same file, otherwise the file."""
    assert picture.path is not None
    if decoded_rows:
        row, signature = decoded_rows.get((split, picture.id, picture.path.stat().st_size), (None, None))
        if row is not None and signature in (None, picture_signature(picture)):
            return row
    return picture.path


def _decoded_rows(folder: Path, side: int) -> KeptRows:
    """Return the rows that other builds in the same folder have decoded, by split, name and size in bytes.

    Only rows of pieces that match their checksum are returned: a damaged row must not get a new checksum by being
    copied.
    """
    decoded_rows: KeptRows = {}
    for other in sorted(folder.parent.glob("build-*")):
        plan = _read_plan(other) if other != folder and _has_arrays(other) else None
        if plan is None or plan["side"] != side:
            continue
        signatures = load_signatures(other)
        arrays = {split: np.load(_array_path(other, split), mmap_mode="r") for split in SPLITS}
        for (split, number), digest in _read_log(other).items():
            rows = slice(number * ROWS, (number + 1) * ROWS)
            if hashlib.sha256(np.ascontiguousarray(arrays[split][rows]).data).hexdigest() != digest:
                continue
            row_signatures = signatures[split][rows] if signatures else [None] * ROWS
            pairs = zip(plan[split][rows], row_signatures, strict=False)
            for row, (planned, signature) in enumerate(pairs, rows.start):
                decoded_rows[split, planned[0], planned[1]] = Kept(_array_path(other, split), row), signature
    return decoded_rows


def _decode_pieces(pieces: Sequence[Piece], jobs: int) -> Iterator[Done]:
    """Decode pieces, in this process or in several; yields each result as it is completed."""
    if min(jobs, len(pieces)) < 2:
        yield from map(fill, pieces)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(pieces)), mp_context=context, initializer=settle)
    try:
        with block_signals([signal.SIGINT]):  # workers start here, and must not receive Ctrl-C
            futures = [pool.submit(fill, piece) for piece in pieces]
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a process that decoded pictures was ended from outside, perhaps for want of memory. The same command goes "
            "on; with fewer --jobs it needs less."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _write_labels(listed: Listed, folder: Path) -> None:
    for split in SPLITS:
        present = listed.present(split)
        labels = np.zeros((len(present), len(listed.class_names)), dtype=np.uint8)
        for row, picture in enumerate(present):
            labels[row, list(picture.labels)] = 1
        _save(folder / f"{split}_labels.npy", labels)
        _save(folder / f"{split}_task.npy", np.array([picture.task for picture in present], dtype=np.int64))


def _save(path: Path, array: np.ndarray) -> None:
    content = io.BytesIO()
    np.save(content, array)
    write_atomically(path, content.getvalue())


def _finish(listed: Listed, side: int, key: str, folder: Path, digests: dict[tuple[str, int], str]) -> Manifest:
    """Write the manifest, which completes the data set, and remove the folders of earlier builds."""
    absent = {split: listed.absent(split) for split in SPLITS}
    complete = not any(absent.values())
    published = {"images": listed.published_images, "lists_as_published": listed.as_published}
    manifest = {
        "kind": KIND,
        "version": VERSION,
        "name": listed.name,
        "complete": complete,
        "size": side,
        "fingerprint": _fingerprint(listed, folder, digests),
        "made_of": key,
        "folder": folder.name,
        "published": None if listed.published_images is None else published,
        "images": {split: _counts(listed, listed.count(listed.present(split))) for split in SPLITS},
        "missing": {split: _counts(listed, listed.count(absent[split])) for split in SPLITS},
        "task_names": listed.task_names,
        "class_names": listed.class_names,
        "class_groups": listed.class_groups,
    }
    out = folder.parent
    listing = {split: [[picture.id, picture.task] for picture in absent[split]] for split in SPLITS}
    if not complete:
        write_atomically(out / MISSING, json.dumps(listing, indent=1).encode())
    write_atomically(out / MANIFEST, json.dumps(manifest, indent=1).encode())
    if complete:
        (out / MISSING).unlink(missing_ok=True)
    for other in out.glob("build-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    return read_manifest(out)


def _counts(listed: Listed, count: Counted) -> dict[str, Any]:
    return {
        "images": count.images,
        "unlabelled": count.unlabelled,
        "by_task": count.by_task,
        "by_class": dict(zip(listed.class_names, count.by_class, strict=True)),
    }


def _fingerprint(listed: Listed, folder: Path, digests: dict[tuple[str, int], str]) -> str:
    """Compute the fingerprint of pixels, labels, tasks and classes."""
    pieces = {split: [digests[key] for key in sorted(digests) if key[0] == split] for split in SPLITS}
    arrays = {
        f"{split}_{part}": np.load(folder / f"{split}_{part}.npy") for split in SPLITS for part in ("labels", "task")
    }
    return content_fingerprint(listed.class_names, listed.class_groups, pieces, arrays)
