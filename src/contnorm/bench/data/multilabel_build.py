"""Build a multi-label data set: decode every picture once into arrays that are memory-mapped afterwards.

Pictures are decoded in blocks of 64 rows, and a log lists the blocks that are written. An interrupted build resumes
with the blocks that are not in the log. A build with more pictures than an earlier one copies the rows that the earlier
one has decoded. The manifest is written last. The fingerprint is computed from the decoded content, so two builds of
the same pictures have the same fingerprint.

A picture counts as unchanged while it has the size, modification time and inode that it had when it was decoded. The
size is part of the plan of a build. The others are stored next to the arrays, row by row.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from contnorm.atomic_files import write_atomically
from contnorm.bench.data.dataset import SPLITS, DatasetListing, ListedPicture, PictureCounts
from contnorm.bench.data.decoding import (
    DecodedRow,
    RowBlock,
    decode_blocks,
    process_pool,
    read_picture,
    row_blocks,
)
from contnorm.bench.data.multilabel_store import (
    KIND,
    MANIFEST,
    ROWS,
    VERSION,
    Manifest,
    content_fingerprint,
    read_manifest,
)
from contnorm.bench.files import Progress, Signature, file_signature, load_state, locked, parse_json
from contnorm.errors import UserError, usable

__all__ = ["MISSING", "build", "build_progress"]

MISSING = "missing.json"
EXAMPLES = 5  # number of examples in an error message
SIGNATURES = "pictures.json"
LOG_LINE = re.compile(rf"^({'|'.join(SPLITS)}) ([0-9]{{1,9}}) ([0-9a-f]{{64}})$", re.MULTILINE)
# Decoded rows of earlier builds by split, name and size in bytes, with the signature of the file if it is known.
DecodedRows = dict[tuple[str, int | str, int], tuple[DecodedRow, Signature | None]]


def build(
    listing: DatasetListing,
    out: Path,
    side: int,
    *,
    allow_missing: bool = False,
    jobs: int = 1,
    progress: Progress = lambda *_: None,
) -> Manifest:
    """Build a data set into a folder, or resume its build. A data set that is already built is not changed.

    Args:
        listing: Pictures, labels and tasks of the data set.
        out: Folder of the data set.
        side: Height and width that pictures are resized to, in pixels.
        allow_missing: Whether to build without pictures that are missing; the data set is then recorded as incomplete.
        jobs: Number of processes.
        progress: Called with what is done, the number of decoded pictures, and the number of all.

    Returns:
        The manifest of the data set.
    """
    _check_pictures(listing, allow_missing)
    plan = _plan(listing, side)
    key = hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:16]
    hint = "Check disk space and permissions, or use another folder with --out; decoded pictures are kept."
    with usable(out, "the data set cannot be written there", hint):
        if (out / MANIFEST).is_file():
            manifest = read_manifest(out)
            if manifest["made_of"] == key:
                _check_unchanged(listing, manifest, out, jobs)
                return manifest
            _check_replaceable(manifest, listing, side, out)
        out.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(out / ".lock", wait=False))  # two builds would corrupt each other
            except BlockingIOError:
                raise UserError(f"{out}: another process is building there. Wait until it has finished.") from None
            folder = out / f"build-{key}"
            digests = _decode(listing, plan, folder, jobs, progress)
            _write_labels(listing, folder)
            return _finish(listing, side, key, folder, digests)


def build_progress(out: Path) -> tuple[int, int] | None:
    """Return the numbers of decoded and of all pictures of the most advanced build; None if there is none."""
    progress = []
    for folder in out.glob("build-*"):
        plan = _read_plan(folder)
        if plan is not None:
            counts = {split: len(plan[split]) for split in SPLITS}
            rows = sum(max(0, min(ROWS, counts[split] - number * ROWS)) for split, number in _read_log(folder))
            progress.append((rows, sum(counts.values())))
    return max(progress, default=None)


def _check_pictures(listing: DatasetListing, allow_missing: bool) -> None:
    missing = [picture for split in SPLITS for picture in listing.missing(split)]
    if missing and not allow_missing:
        total = len(listing.train) + len(listing.test)
        raise UserError(
            f"{listing.name}: {len(missing):,} of {total:,} pictures are missing, such as {_examples(missing)}. Add "
            f"them, or build without them with --allow-missing, which records the missing pictures of each task and "
            f"class."
        )
    for split in SPLITS:
        if not listing.present(split):
            raise UserError(f"{listing.name}: has no {split} pictures. Check the folder of the pictures.")
    for task, count in zip(listing.task_names, listing.count(listing.present("train")).by_task, strict=True):
        if not count:
            raise UserError(f"{listing.name}: task {task} has no train pictures. Add some, or remove the task.")
    if not listing.as_published:
        _check_duplicates(listing)


def _check_duplicates(listing: DatasetListing) -> None:
    """Raise an error if a file is listed twice.

    Its picture would be trained on twice, each time with a part of its labels, or be in both splits.
    """
    locations: dict[tuple[int, int], str] = {}
    duplicates: list[str] = []
    for split in SPLITS:
        for picture in listing.present(split):
            assert picture.path is not None
            info = picture.path.stat()
            # The same for links, and for names in another case if the file system ignores case.
            file = info.st_dev, info.st_ino
            location = f"{split} of task {listing.task_names[picture.task]}"
            if file in locations:
                duplicates.append(f"{picture.id}, in {locations[file]} and in {location}")
            else:
                locations[file] = location
    if duplicates:
        raise UserError(
            f"{listing.name}: {len(duplicates):,} pictures are listed twice, such as {duplicates[0]}. List each "
            f"picture once, with all of its labels."
        )


def _examples(pictures: Sequence[ListedPicture]) -> str:
    return ", ".join(str(picture.id) for picture in pictures[:EXAMPLES])


def _plan(listing: DatasetListing, side: int) -> dict[str, Any]:
    """Return everything that determines the build. Pictures count by name, labels and size in bytes, not by date."""

    def entry(picture: ListedPicture) -> list[Any]:
        assert picture.path is not None
        return [picture.id, picture.path.stat().st_size, picture.task, list(picture.labels)]

    with usable(Path(listing.name), "a picture cannot be read", "Check its permissions."):
        pictures: dict[str, Any] = {split: [entry(picture) for picture in listing.present(split)] for split in SPLITS}
    missing = {f"{split}_absent": [picture.id for picture in listing.missing(split)] for split in SPLITS}
    kinds = [listing.class_names, listing.class_groups, listing.task_names]
    return {"version": VERSION, "name": listing.name, "side": side, "kinds": kinds, **pictures, **missing}


def _check_replaceable(manifest: Manifest, listing: DatasetListing, side: int, out: Path) -> None:
    """Raise an error unless an existing data set is an incomplete build of the same name and picture size."""
    if manifest["complete"] or manifest["name"] != listing.name or manifest["size"] != side:
        count = sum(manifest["images"][split]["images"] for split in SPLITS)
        raise UserError(
            f"{out}: contains another data set: {manifest['name']}, {count:,} pictures of {manifest['size']} pixels. "
            f"Delete it, or use another folder with --out."
        )


def _check_unchanged(listing: DatasetListing, manifest: Manifest, out: Path, jobs: int) -> None:
    """Raise an error if a picture was replaced by another of the same size after the data set was built."""
    changed = _changed_pictures(out / manifest["folder"], listing, manifest["size"], jobs)
    if changed:
        raise UserError(
            f"{out}: {len(changed):,} pictures have changed since the build, such as {_examples(changed)}. Delete "
            f"{out} and build it again, or use another folder with --out."
        )


def _decode(
    listing: DatasetListing, plan: dict[str, Any], folder: Path, jobs: int, progress: Progress
) -> dict[tuple[str, int], str]:
    """Decode all blocks that are not written yet; returns the hashes of all blocks."""
    blocks = _blocks(listing, plan["side"], folder, _create_arrays(plan, folder))
    expected = {(block.split, block.number) for block in blocks}
    changed = {(split, row // ROWS) for split, row, _ in _changed_rows(folder, listing)}
    digests = {key: digest for key, digest in _read_log(folder).items() if key in expected and key not in changed}
    total = sum(len(block.pictures) for block in blocks)
    pending = [block for block in blocks if (block.split, block.number) not in digests]
    count = total - sum(len(block.pictures) for block in pending)
    progress("decoding pictures", count, total)
    problems: list[str] = []
    lines = [_log_line(*key, digest) for key, digest in digests.items()]
    write_atomically(folder / "done", "".join(lines).encode())  # removes an incomplete last line
    _save_signatures(folder, listing)  # after changed blocks are removed from the log
    pool = process_pool(min(jobs, len(pending))) if min(jobs, len(pending)) > 1 else None
    with (folder / "done").open("a") as log, closing(decode_blocks(pending, pool)) as results:
        for result in results:
            problems += result.problems
            if not result.problems:
                block = result.block
                digests[block.split, block.number] = result.digest
                log.write(_log_line(block.split, block.number, result.digest))
                log.flush()
                count += len(block.pictures)
                progress("decoding pictures", count, total)
    if problems:
        more = f" ({len(problems) - EXAMPLES:,} more)" if len(problems) > EXAMPLES else ""
        raise UserError(
            f"{'; '.join(problems[:EXAMPLES])}{more}. Replace them, or delete them and use --allow-missing; the same "
            f"command resumes the build."
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
    """Return the blocks in the log with their hashes; an incomplete line is ignored."""
    path = folder / "done"
    text = path.read_text(errors="replace") if path.is_file() else ""
    return {(split, int(number)): digest for split, number, digest in LOG_LINE.findall(text)}


def _blocks(listing: DatasetListing, side: int, folder: Path, offsets: Mapping[str, int]) -> list[RowBlock]:
    decoded_rows = _decoded_rows(folder, side)
    blocks: list[RowBlock] = []
    for split in SPLITS:
        pictures = [_decoded_or_file(split, picture, decoded_rows) for picture in listing.present(split)]
        array = _array_path(folder, split)
        # Synced, because the log says that the rows are on disk.
        blocks += row_blocks(split, array, offsets[split], side, pictures, ROWS, resampling="bicubic", sync=True)
    return blocks


def _decoded_or_file(split: str, picture: ListedPicture, decoded_rows: DecodedRows) -> Path | DecodedRow:
    """Return the decoded row of an earlier build if it is of the same file, otherwise the file."""
    assert picture.path is not None
    if decoded_rows:
        row, signature = decoded_rows.get((split, picture.id, picture.path.stat().st_size), (None, None))
        if row is not None and signature in (None, _picture_signature(picture)):
            return row
    return picture.path


def _decoded_rows(folder: Path, side: int) -> DecodedRows:
    """Return the rows that other builds in the same folder have decoded, by split, name and size in bytes.

    Only rows of blocks that match their checksum are returned: a damaged row must not get a new checksum by being
    copied.
    """
    decoded_rows: DecodedRows = {}
    for other in sorted(folder.parent.glob("build-*")):
        plan = _read_plan(other) if other != folder and _has_arrays(other) else None
        if plan is None or plan["side"] != side:
            continue
        signatures = _load_signatures(other)
        arrays = {split: np.load(_array_path(other, split), mmap_mode="r") for split in SPLITS}
        for (split, number), digest in _read_log(other).items():
            rows = slice(number * ROWS, (number + 1) * ROWS)
            if hashlib.sha256(np.ascontiguousarray(arrays[split][rows]).data).hexdigest() != digest:
                continue
            row_signatures = signatures[split][rows] if signatures else [None] * ROWS
            pairs = zip(plan[split][rows], row_signatures, strict=False)
            for row, (planned, signature) in enumerate(pairs, rows.start):
                decoded_rows[split, planned[0], planned[1]] = DecodedRow(_array_path(other, split), row), signature
    return decoded_rows


def _write_labels(listing: DatasetListing, folder: Path) -> None:
    for split in SPLITS:
        present = listing.present(split)
        labels = np.zeros((len(present), len(listing.class_names)), dtype=np.uint8)
        for row, picture in enumerate(present):
            labels[row, list(picture.labels)] = 1
        _save(folder / f"{split}_labels.npy", labels)
        _save(folder / f"{split}_task.npy", np.array([picture.task for picture in present], dtype=np.int64))


def _save(path: Path, array: np.ndarray) -> None:
    content = io.BytesIO()
    np.save(content, array)
    write_atomically(path, content.getvalue())


def _finish(
    listing: DatasetListing, side: int, key: str, folder: Path, digests: dict[tuple[str, int], str]
) -> Manifest:
    """Write the manifest, which completes the data set, and remove the folders of earlier builds."""
    missing = {split: listing.missing(split) for split in SPLITS}
    complete = not any(missing.values())
    published = {"images": listing.published_images, "lists_as_published": listing.as_published}
    manifest = {
        "kind": KIND,
        "version": VERSION,
        "name": listing.name,
        "complete": complete,
        "size": side,
        "fingerprint": _fingerprint(listing, folder, digests),
        "made_of": key,
        "folder": folder.name,
        "published": None if listing.published_images is None else published,
        "images": {split: _counts(listing, listing.count(listing.present(split))) for split in SPLITS},
        "missing": {split: _counts(listing, listing.count(missing[split])) for split in SPLITS},
        "task_names": listing.task_names,
        "class_names": listing.class_names,
        "class_groups": listing.class_groups,
    }
    out = folder.parent
    missing_ids = {split: [[picture.id, picture.task] for picture in missing[split]] for split in SPLITS}
    if not complete:
        write_atomically(out / MISSING, json.dumps(missing_ids, indent=1).encode())
    write_atomically(out / MANIFEST, json.dumps(manifest, indent=1).encode())
    if complete:
        (out / MISSING).unlink(missing_ok=True)
    for other in out.glob("build-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    return read_manifest(out)


def _counts(listing: DatasetListing, count: PictureCounts) -> dict[str, Any]:
    return {
        "images": count.images,
        "unlabelled": count.unlabelled,
        "by_task": count.by_task,
        "by_class": dict(zip(listing.class_names, count.by_class, strict=True)),
    }


def _fingerprint(listing: DatasetListing, folder: Path, digests: dict[tuple[str, int], str]) -> str:
    """Compute the fingerprint of pixels, labels, tasks and classes."""
    blocks = {split: [digests[key] for key in sorted(digests) if key[0] == split] for split in SPLITS}
    arrays = {
        f"{split}_{part}": np.load(folder / f"{split}_{part}.npy") for split in SPLITS for part in ("labels", "task")
    }
    return content_fingerprint(listing.class_names, listing.class_groups, blocks, arrays)


def _picture_signature(picture: ListedPicture) -> Signature:
    """Return the modification time in ns and the inode of an existing picture; its size is in the plan."""
    assert picture.path is not None
    return file_signature(picture.path)[1:]


def _save_signatures(folder: Path, listing: DatasetListing) -> None:
    """Store the signatures of all pictures; called before decoding, so that a change during decoding is detected."""
    signatures = {split: [_picture_signature(picture) for picture in listing.present(split)] for split in SPLITS}
    write_atomically(folder / SIGNATURES, json.dumps(signatures).encode())


def _load_signatures(folder: Path) -> Mapping[str, list[Signature]]:
    """Load the signatures that `_save_signatures` stored; empty for builds of earlier versions, which have none."""
    state = load_state(folder / SIGNATURES)
    by_split = {split: rows for split, rows in state.items() if split in SPLITS and isinstance(rows, list)}
    return by_split if len(by_split) == len(SPLITS) else {}


def _changed_rows(folder: Path, listing: DatasetListing) -> Iterator[tuple[str, int, ListedPicture]]:
    """Yield split, row and picture of the rows whose file is not the one that was decoded."""
    known = _load_signatures(folder)
    for split in SPLITS if known else ():
        present = listing.present(split)
        rows = known[split] if len(known[split]) == len(present) else [None] * len(present)
        for row, (signature, picture) in enumerate(zip(rows, present, strict=True)):
            if signature != _picture_signature(picture):
                yield split, row, picture


def _changed_pictures(folder: Path, listing: DatasetListing, side: int, jobs: int) -> list[ListedPicture]:
    """Return pictures whose pixels differ from their rows of a finished build; only changed files are decoded."""
    rows = list(_changed_rows(folder, listing))
    if not rows:
        return []
    arrays = {split: np.load(folder / f"{split}_images.npy", mmap_mode="r") for split in SPLITS}

    def differs(row: tuple[str, int, ListedPicture]) -> bool:
        split, index, picture = row
        assert picture.path is not None
        try:
            return not np.array_equal(read_picture(picture.path, side)[0], arrays[split][index])
        except UserError:  # it can no longer be read
            return True

    with ThreadPoolExecutor(jobs) as pool:
        changed = [row[2] for row, has_changed in zip(rows, pool.map(differs, rows), strict=True) if has_changed]
    if not changed:
        with suppress(OSError):  # the next build compares them again
            _save_signatures(folder, listing)
    return changed
