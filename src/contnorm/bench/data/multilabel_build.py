"""Build a data set of several labels an image: every picture decoded once, into arrays that are mapped from then on.

Pictures go in pieces of 64 rows, and a piece that is written is noted. A build that was stopped, however it was, goes
on with the pieces that are not; one that has more pictures than an earlier one takes over what that had decoded. The
manifest comes last. Two builds of the same pictures give the same fingerprint, which is made of what was decoded.
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
from contnorm.bench.signals import signals_held
from contnorm.errors import UserError, usable

if sys.platform != "win32":
    import fcntl

__all__ = ["MISSING", "begun", "build"]

MISSING = "missing.json"
NAMED = 5  # of pictures that something is wrong with, in a message
NOTE = re.compile(rf"^({'|'.join(SPLITS)}) ([0-9]{{1,9}}) ([0-9a-f]{{64}})$", re.MULTILINE)
Report = Callable[[int, int], None]  # pictures done, pictures in all
# By split, name and size in bytes: a row of an earlier build, and the signature of its file where that is known.
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
    """Build a data set into a folder, or go on with it; gives its manifest. What is there already is left as it is.

    Args:
        listed: What it should hold.
        out: The folder.
        side: Of the squares the pictures are made, in pixels.
        allow_missing: Build it without the pictures that are not there; it is then recorded as incomplete.
        jobs: Processes.
        report: Told how far it is.
    """
    _check_listed(listed, allow_missing)
    plan = _plan(listed, side)
    key = hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:16]
    mend = "Make room or let yourself write there, or say with --out where else; what is decoded is kept."
    with usable(out, "nothing can be built there", mend):
        if (out / MANIFEST).is_file():
            there = read_manifest(out)
            if there["made_of"] == key:
                _check_unchanged(listed, there, out, jobs)
                return there
            _check_replaceable(there, listed, side, out)
        out.mkdir(parents=True, exist_ok=True)
        with _alone(out):
            folder = out / f"build-{key}"
            digests = _decode(listed, plan, folder, jobs, report)
            _write_labels(listed, folder)
            return _finish(listed, side, key, folder, digests)


def begun(out: Path) -> tuple[int, int] | None:
    """How many pictures a build that is not finished has, and how many it should have; None where none was begun."""
    found = []
    for folder in out.glob("build-*"):
        plan = _read_plan(folder)
        if plan is not None:
            counts = {split: len(plan[split]) for split in SPLITS}
            rows = sum(max(0, min(ROWS, counts[split] - number * ROWS)) for split, number in _noted(folder))
            found.append((rows, sum(counts.values())))
    return max(found, default=None)


def _check_listed(listed: Listed, allow_missing: bool) -> None:
    absent = [picture for split in SPLITS for picture in listed.absent(split)]
    if absent and not allow_missing:
        total = len(listed.train) + len(listed.test)
        raise UserError(
            f"{listed.name}: {len(absent):,} of {total:,} pictures are missing, such as {_some(absent)}. Bring them, "
            f"or build without them with --allow-missing, which records how many of each task and class are absent."
        )
    for split in SPLITS:
        if not listed.present(split):
            raise UserError(f"{listed.name}: not one {split} picture is there. Say where they are.")
    for task, count in zip(listed.task_names, listed.count(listed.present("train")).by_task, strict=True):
        if not count:
            raise UserError(f"{listed.name}: task {task} has not one train picture. Bring some, or leave the task out.")
    if not listed.as_published:
        _check_once(listed)


def _check_once(listed: Listed) -> None:
    """A picture listed twice would be learned twice, each time with a part of its labels, or be learned and tested."""
    first: dict[tuple[int, int], str] = {}
    again: list[str] = []
    for split in SPLITS:
        for picture in listed.present(split):
            assert picture.path is not None
            info = picture.path.stat()
            file = info.st_dev, info.st_ino  # also by a link, or by another case where the file system ignores that
            here = f"{split} of task {listed.task_names[picture.task]}"
            if file in first:
                again.append(f"{picture.id}, in {first[file]} and in {here}")
            else:
                first[file] = here
    if again:
        raise UserError(
            f"{listed.name}: {len(again):,} pictures are listed again, such as {again[0]}. List each once, with all of "
            f"its labels."
        )


def _some(pictures: Sequence[ListedPicture]) -> str:
    return ", ".join(str(picture.id) for picture in pictures[:NAMED])


def _plan(listed: Listed, side: int) -> dict[str, Any]:
    """All that decides what is built; of the pictures their names, labels and sizes in bytes, not their dates."""

    def told(picture: ListedPicture) -> list[Any]:
        assert picture.path is not None
        return [picture.id, picture.path.stat().st_size, picture.task, list(picture.labels)]

    with usable(Path(listed.name), "a picture of it can't be looked at", "Let yourself read it."):
        pictures: dict[str, Any] = {split: [told(picture) for picture in listed.present(split)] for split in SPLITS}
    absent = {f"{split}_absent": [picture.id for picture in listed.absent(split)] for split in SPLITS}
    kinds = [listed.class_names, listed.class_groups, listed.task_names]
    return {"version": VERSION, "name": listed.name, "side": side, "kinds": kinds, **pictures, **absent}


def _check_replaceable(there: Manifest, listed: Listed, side: int, out: Path) -> None:
    """A whole data set is never replaced; one that lacks pictures is, by one that was listed the same way."""
    if there["complete"] or there["name"] != listed.name or there["size"] != side:
        count = sum(there["images"][split]["images"] for split in SPLITS)
        raise UserError(
            f"{out}: holds another data set already: {there['name']}, {count:,} pictures of {there['size']} pixels. "
            f"Delete it, or say with --out where else."
        )


def _check_unchanged(listed: Listed, there: Manifest, out: Path, jobs: int) -> None:
    """Refuse to call a data set built if a picture was replaced by another of the same size since."""
    changed = changed_pictures(out / there["folder"], listed, there["size"], jobs)
    if changed:
        raise UserError(
            f"{out}: {len(changed):,} pictures are not those it was built from any more, such as {_some(changed)}. "
            f"Delete {out} and build it again, or say with --out where else."
        )


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Two builds in one folder would take turns at ruining each other; the lock ends with the process."""
    with (out / ".lock").open("w") as file:
        try:
            if sys.platform != "win32":  # where two builds in one place are not told of each other
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{out}: another process is building there. Wait for it.") from None
        yield


def _decode(
    listed: Listed, plan: dict[str, Any], folder: Path, jobs: int, report: Report
) -> dict[tuple[str, int], str]:
    """Fill all pieces that are not there yet; the hashes of all."""
    offsets = _arrays(plan, folder)
    pieces = list(_pieces(listed, plan["side"], folder, offsets))
    expected = {(piece.split, piece.number) for piece in pieces}
    changed = {(split, row // ROWS) for split, row, _ in changed_rows(folder, listed)}
    digests = {piece: digest for piece, digest in _noted(folder).items() if piece in expected and piece not in changed}
    total = sum(len(piece.pictures) for piece in pieces)
    missing = [piece for piece in pieces if (piece.split, piece.number) not in digests]
    count = total - sum(len(piece.pictures) for piece in missing)
    report(count, total)
    problems: list[str] = []
    lines = [_note(*piece, digest) for piece, digest in digests.items()]
    write_atomically(folder / "done", "".join(lines).encode())  # without a line that broke off
    save_signatures(folder, listed)  # after changed pieces are removed from the notes
    with (folder / "done").open("a") as notes:
        for done in _filled(missing, jobs):
            problems += done.problems
            if not done.problems:
                piece = done.piece
                digests[piece.split, piece.number] = done.digest
                notes.write(_note(piece.split, piece.number, done.digest))
                notes.flush()
                count += len(piece.pictures)
                report(count, total)
    if problems:
        more = f" So with {len(problems) - NAMED:,} more." if len(problems) > NAMED else ""
        raise UserError(
            f"{'; '.join(problems[:NAMED])}.{more} Mend it, or delete it and use --allow-missing; the others are "
            f"decoded, and the same command goes on."
        )
    return digests


def _arrays(plan: dict[str, Any], folder: Path) -> dict[str, int]:
    """The two arrays of pictures, made once and filled later; where in each file the rows begin."""
    if not _has_arrays(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for split in SPLITS:
            shape = (len(plan[split]), 3, plan["side"], plan["side"])
            np.lib.format.open_memmap(_array(folder, split), mode="w+", dtype=np.uint8, shape=shape)
        write_atomically(folder / "plan.json", json.dumps(plan).encode())
    return {split: np.load(_array(folder, split), mmap_mode="r").offset for split in SPLITS}


def _has_arrays(folder: Path) -> bool:
    """Whether a build was begun there and its arrays are whole; the plan is written after they are made."""
    plan = _read_plan(folder)
    if plan is None:
        return False
    try:
        arrays = {split: np.lib.format.open_memmap(_array(folder, split), mode="r") for split in SPLITS}
    except Exception:  # a damaged header can fail in any way
        return False
    return all(
        array.dtype == np.uint8 and array.shape == (len(plan[split]), 3, plan["side"], plan["side"])
        for split, array in arrays.items()
    )


def _array(folder: Path, split: str) -> Path:
    return folder / f"{split}_images.npy"


def _read_plan(folder: Path) -> dict[str, Any] | None:
    """The plan of a build that was begun; None where there is none, or none that this version wrote."""
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
    return all(isinstance(listed, list) and all(map(_is_planned, listed)) for listed in pictures)


def _is_planned(picture: Any) -> bool:
    return (
        isinstance(picture, list)
        and len(picture) == 4
        and type(picture[0]) in (int, str)
        and all(type(number) is int for number in picture[1:3])
    )


def _note(split: str, number: int, digest: str) -> str:
    return f"{split} {number} {digest}\n"


def _noted(folder: Path) -> dict[tuple[str, int], str]:
    """The pieces that are written, with their hashes; a line that broke off is none."""
    path = folder / "done"
    text = path.read_text(errors="replace") if path.is_file() else ""
    return {(split, int(number)): digest for split, number, digest in NOTE.findall(text)}


def _pieces(listed: Listed, side: int, folder: Path, offsets: dict[str, int]) -> Iterator[Piece]:
    kept = _kept(folder, side)
    for split in SPLITS:
        present = listed.present(split)
        for number, start in enumerate(range(0, len(present), ROWS)):
            offset = offsets[split] + start * 3 * side * side
            origins = tuple(_origin(split, picture, kept) for picture in present[start : start + ROWS])
            yield Piece(split, number, _array(folder, split), offset, side, origins)


def _origin(split: str, picture: ListedPicture, kept: KeptRows) -> Path | Kept:
    """An earlier row of the same file, else the file."""
    assert picture.path is not None
    if kept:
        row, signature = kept.get((split, picture.id, picture.path.stat().st_size), (None, None))
        if row is not None and signature in (None, picture_signature(picture)):
            return row
    return picture.path


def _kept(folder: Path, side: int) -> KeptRows:
    """Pictures that other builds in the same place have decoded, by split, name and size in bytes.

    Only rows that still have their checksum count: a damaged one must not get a new checksum by being copied.
    """
    found: KeptRows = {}
    for other in sorted(folder.parent.glob("build-*")):
        plan = _read_plan(other) if other != folder and _has_arrays(other) else None
        if plan is None or plan["side"] != side:
            continue
        signatures = load_signatures(other)
        arrays = {split: np.load(_array(other, split), mmap_mode="r") for split in SPLITS}
        for (split, number), digest in _noted(other).items():
            rows = slice(number * ROWS, (number + 1) * ROWS)
            if hashlib.sha256(np.ascontiguousarray(arrays[split][rows]).data).hexdigest() != digest:
                continue
            known = signatures[split][rows] if signatures else [None] * ROWS
            for row, (planned, signature) in enumerate(zip(plan[split][rows], known, strict=False), rows.start):
                found[split, planned[0], planned[1]] = Kept(_array(other, split), row), signature
    return found


def _filled(pieces: Sequence[Piece], jobs: int) -> Iterator[Done]:
    """Pieces as they are done, in this process or in several."""
    if min(jobs, len(pieces)) < 2:
        yield from map(fill, pieces)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(pieces)), mp_context=context, initializer=settle)
    try:
        with signals_held([signal.SIGINT]):  # processes are started here; a Ctrl-C is not for them
            waiting = [pool.submit(fill, piece) for piece in pieces]
        for future in as_completed(waiting):
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
    """Write the manifest, which makes it a data set, and clear away what an earlier one left."""
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
        "images": {split: _told(listed, listed.count(listed.present(split))) for split in SPLITS},
        "missing": {split: _told(listed, listed.count(absent[split])) for split in SPLITS},
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


def _told(listed: Listed, count: Counted) -> dict[str, Any]:
    return {
        "images": count.images,
        "unlabelled": count.unlabelled,
        "by_task": count.by_task,
        "by_class": dict(zip(listed.class_names, count.by_class, strict=True)),
    }


def _fingerprint(listed: Listed, folder: Path, digests: dict[tuple[str, int], str]) -> str:
    """Of pixels, labels, tasks and classes."""
    pieces = {split: [digests[key] for key in sorted(digests) if key[0] == split] for split in SPLITS}
    arrays = {
        f"{split}_{part}": np.load(folder / f"{split}_{part}.npy") for split in SPLITS for part in ("labels", "task")
    }
    return content_fingerprint(listed.class_names, listed.class_groups, pieces, arrays)
