"""Build a multi-label data set: decode every picture once into arrays that are memory-mapped afterwards.

Pictures are decoded in blocks, and a log lists the blocks that are written: a build that was interrupted is resumed by
the same call. The fingerprint is computed from the decoded content, so two builds of the same pictures have the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from contnorm.bench.data.dataset import SPLITS, MultiLabelSource, Progress
from contnorm.bench.data.multilabel import Listing, Picture
from contnorm.bench.data.pictures import BLOCK, decode, read_picture
from contnorm.bench.data.store import MANIFEST, read_manifest, save_source
from contnorm.errors import UserError

__all__ = ["build", "build_progress"]

PLAN, LOG = "plan.json", "done"


def build(
    listing: Listing,
    out: Path,
    side: int,
    *,
    allow_missing: bool = False,
    jobs: int | None = None,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Build a data set into a folder, or resume its build. A data set that is already built is not changed.

    Args:
        listing: Pictures, labels and tasks of the data set.
        out: Folder of the data set.
        side: Height and width that pictures are resized to, in pixels.
        allow_missing: Whether to build without pictures that are missing; the data set is then recorded as incomplete.
        jobs: Number of threads; None for one per core.
        progress: Called with what is done, the number of decoded pictures, and the number of all.

    Returns:
        The manifest of the data set.
    """
    missing = {split: listing.pictures(split, missing=True) for split in SPLITS}
    _check_pictures(listing, missing, allow_missing)
    plan = _plan(listing, side)
    key = hashlib.sha256(plan.encode()).hexdigest()[:16]
    if (out / MANIFEST).is_file():
        about = read_manifest(out)["about"]
        if about["made_of"] == key:
            return read_manifest(out)
        if about["complete"]:
            raise UserError(f"{out}: contains another data set. Delete it, or use another folder with --out.")
        (out / MANIFEST).unlink()  # incomplete; it is built again with other pictures
    out.mkdir(parents=True, exist_ok=True)
    with FileLock(out / ".lock", timeout=0):  # two builds would corrupt each other
        source = _decode(listing, plan, out, side, jobs, progress)
        counts = {split: listing.count(listing.pictures(split)) for split in SPLITS}
        save_source(
            source,
            out,
            stream="multi-label",
            made_of=key,
            complete=not any(missing.values()),
            lists_as_published=listing.as_published,
            task_names=listing.task_names,
            images=counts,
            missing={split: listing.count(missing[split]) for split in SPLITS},
            missing_pictures={split: [[picture.id, picture.task] for picture in missing[split]] for split in SPLITS},
        )
        for name in (PLAN, LOG):
            (out / name).unlink()
    return read_manifest(out)


def build_progress(out: Path) -> tuple[int, int] | None:
    """Return the numbers of decoded and of all pictures of an unfinished build; None if there is none."""
    if not (out / PLAN).is_file():
        return None
    plan = json.loads((out / PLAN).read_bytes())
    counts = {split: len(plan[split]) for split in SPLITS}
    done = sum(min(BLOCK, counts[split] - start) for split, start in _read_log(out))
    return done, sum(counts.values())


def _check_pictures(listing: Listing, missing: Mapping[str, Sequence[Picture]], allow_missing: bool) -> None:
    count = sum(map(len, missing.values()))
    if count and not allow_missing:
        names = [str(picture.id) for split in SPLITS for picture in missing[split]]
        raise UserError(
            f"{listing.name}: {count:,} of {len(listing.train) + len(listing.test):,} pictures are missing, such as "
            f"{', '.join(names[:5])}. Add them, or build without them with --allow-missing, which records the missing "
            f"pictures of each task and class."
        )
    train, test = (listing.pictures(split) for split in SPLITS)
    untrained = set(range(len(listing.task_names))) - {picture.task for picture in train}
    if untrained or not test:
        what = f"task {listing.task_names[min(untrained)]} has no train pictures" if untrained else "no test pictures"
        raise UserError(f"{listing.name}: {what}. Check the folder of the pictures.")
    if not listing.as_published:  # trained on twice, or in both splits
        often, number = Counter(str(picture.path) for picture in (*train, *test)).most_common(1)[0]
        if number > 1:
            raise UserError(f"{listing.name}: {often} is listed {number} times. List it once, with all of its labels.")


def _plan(listing: Listing, side: int) -> str:
    """Return everything that determines the build, as JSON. Pictures count by name, labels and size in bytes."""
    kinds = [listing.class_names, listing.class_groups, listing.task_names]
    plan: dict[str, Any] = {"name": listing.name, "side": side, "kinds": kinds}
    for split in SPLITS:
        plan[split] = [
            [picture.id, picture.path.stat().st_size, picture.task, picture.labels]
            for picture in listing.pictures(split)
            if picture.path is not None
        ]
    return json.dumps(plan)


def _decode(
    listing: Listing, plan: str, out: Path, side: int, jobs: int | None, progress: Progress
) -> MultiLabelSource:
    """Decode all blocks that are not in the log, and return the data set."""
    files = {split: out / f"{split}_images.npy" for split in SPLITS}
    if not (out / PLAN).is_file() or (out / PLAN).read_text() != plan:
        for path in (out / PLAN, out / LOG, *out.glob("*.npy")):
            path.unlink(missing_ok=True)
        for split, file in files.items():
            shape = (len(listing.pictures(split)), 3, side, side)
            np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=shape)
        (out / PLAN).write_text(plan)
    arrays: dict[str, Any] = {}
    log, total = _read_log(out), len(listing.pictures("train")) + len(listing.pictures("test"))
    done, _ = build_progress(out) or (0, 0)
    progress("decoding pictures", done, total)
    digest = hashlib.sha256(json.dumps([listing.class_names, listing.class_groups]).encode())
    read = partial(read_picture, side=side, resampling="bicubic")
    with (out / LOG).open("a") as lines:
        for split in SPLITS:
            pictures = listing.pictures(split)
            images = arrays[f"{split}_images"] = np.lib.format.open_memmap(files[split], mode="r+")
            starts = range(0, len(pictures), BLOCK)
            todo = [start for start in starts if (split, start) not in log]
            paths = [picture.path for picture in pictures if picture.path is not None]
            for start, digests in decode(paths, images, read, starts=todo, jobs=jobs):
                log[split, start] = hashlib.sha256(images[start : start + BLOCK].data).hexdigest()
                lines.write(f"{split} {start} {log[split, start]}\n")
                lines.flush()
                done += len(digests)
                progress("decoding pictures", done, total)
            labels = np.zeros((len(pictures), len(listing.class_names)), dtype=np.uint8)
            for row, picture in enumerate(pictures):
                labels[row, list(picture.labels)] = 1
            arrays[f"{split}_labels"] = labels
            arrays[f"{split}_task"] = np.array([picture.task for picture in pictures], dtype=np.int64)
            digest.update("".join(log[split, start] for start in starts).encode())
            digest.update(labels.data)
            digest.update(arrays[f"{split}_task"].data)
    return MultiLabelSource(
        name=listing.name,
        **arrays,
        classes=len(listing.class_names),
        fingerprint=digest.hexdigest()[:16],
        tasks=len(listing.task_names),
        class_names=listing.class_names,
        class_groups=listing.class_groups,
        published_images=listing.published_images,
        missing_images=len(listing.train) + len(listing.test) - total,
    )


def _read_log(out: Path) -> dict[tuple[str, int], str]:
    """Return the digests of the blocks in the log, by split and start; a line that was cut off is ignored."""
    text = (out / LOG).read_text() if (out / LOG).is_file() else ""
    lines = re.findall(r"^(train|test) (\d+) ([0-9a-f]{64})$", text, re.MULTILINE)
    return {(split, int(start)): digest for split, start, digest in lines}
