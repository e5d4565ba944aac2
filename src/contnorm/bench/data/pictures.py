"""Decode pictures into arrays, in threads: Pillow decodes and resizes without the interpreter lock."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from contnorm.bench.data.dataset import Images, Progress
from contnorm.errors import UserError

BLOCK = 64  # pictures that are decoded and reported together; an interrupt waits for one block of each thread
# Pillow has other formats that start programs: EPS starts Ghostscript.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
EXAMPLES = 5  # unreadable pictures that a message names

Resize = Literal["bilinear", "bicubic", "crop"]  # to a square regardless of the aspect ratio, or cropped to one


def cores() -> int:
    """Number of cores that this process may use; in a container this may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def decode_pictures(
    splits: Mapping[str, Sequence[Path]],
    size: int | None,
    resize: Resize,
    folder: Path | None,
    progress: Progress,
    jobs: int | None = None,
) -> tuple[dict[str, Images], dict[str, list[bytes]]]:
    """Decode the pictures of the splits of a data set.

    Args:
        splits: Picture files by split.
        size: Height and width that pictures are resized to; None if all have the same size.
        resize: How they are resized.
        folder: Folder for the files ``train_images.npy`` and ``test_images.npy``; None to keep the pixels in memory.
        progress: Called with what is done, the number of decoded pictures, and the number of all.
        jobs: Number of threads; None for one per core.

    Returns:
        The pixels (pictures, 3, height, width) and the SHA-256 of each file, by split.

    Raises:
        UserError: If pictures cannot be read; it names several of them.
    """
    first = next(chain.from_iterable(splits.values()))
    shape = (3, size, size) if size else read_picture(first, None, resize)[0].shape
    images, digests, problems = {}, {}, list[str]()
    for split, paths in splits.items():
        of_split = (len(paths), *shape)
        digests[split] = [b""] * len(paths)
        if folder is None:
            images[split] = np.empty(of_split, dtype=np.uint8)
        else:
            file = folder / f"{split}_images.npy"
            images[split] = np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=of_split)

    def decode_block(split: str, start: int) -> int:
        paths = splits[split][start : start + BLOCK]
        for i, path in enumerate(paths, start):
            try:
                pixels, digests[split][i] = read_picture(path, size, resize)
                if pixels.shape != shape:
                    size_of = "{1} x {2}".format
                    raise UserError(f"{path}: is {size_of(*pixels.shape)} pixels, and others {size_of(*shape)}")
                images[split][i] = pixels
            except UserError as error:
                problems.append(str(error))
        return len(paths)

    done, total = 0, sum(map(len, splits.values()))
    progress("decoding pictures", done, total)
    pool = ThreadPoolExecutor(jobs or cores())
    try:
        blocks = [(split, start) for split, paths in splits.items() for start in range(0, len(paths), BLOCK)]
        for future in as_completed([pool.submit(decode_block, *block) for block in blocks]):
            done += future.result()
            progress("decoding pictures", done, total)
    finally:
        pool.shutdown(cancel_futures=True)
    if problems:
        more = f"; {len(problems) - EXAMPLES:,} more" if len(problems) > EXAMPLES else ""
        advice = "Replace or remove them, or resize all with size=N (--size N)."
        raise UserError(f"{'; '.join(sorted(problems)[:EXAMPLES])}{more}. {advice}")
    return images, digests


def read_picture(path: Path, size: int | None, resize: Resize) -> tuple[Images, bytes]:
    """Decode a picture as RGB, and resize it to a square; None keeps its size.

    EXIF orientation is ignored, as in the published code.

    Returns:
        The pixels (3, height, width), and the SHA-256 of the file.
    """
    from PIL import Image, ImageOps

    content = path.read_bytes()
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as picture:
            if picture.mode.startswith(("I", "F")):  # conversion to RGB would clip values above 255
                raise ValueError(f"mode {picture.mode} has more than 8 bits per value")
            image = picture.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: cannot be read as a picture of {', '.join(FORMATS)} ({error})") from error
    if size is not None and resize == "crop":
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    elif size is not None:
        image = image.resize((size, size), Image.Resampling[resize.upper()])
    return np.asarray(image).transpose(2, 0, 1), hashlib.sha256(content).digest()


def decoder_name() -> str:
    """Return the versions of the image decoder: decoded JPEG pixels can differ between versions in the last bit."""
    import PIL
    from PIL import features

    return f"Pillow {PIL.__version__}, libjpeg-turbo {features.version('libjpeg_turbo') or 'none'}"
