"""Decode pictures into rows of an array, in threads: Pillow decodes and resizes without the interpreter lock."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from contnorm.bench.data.dataset import Images
from contnorm.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["BLOCK", "cores", "decode", "decoder_name", "read_cropped", "read_picture"]

BLOCK = 64  # pictures that are decoded and reported together; an interrupt waits for one block of each thread
# Pillow has other formats that start programs: EPS starts Ghostscript.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
EXAMPLES = 5  # unreadable pictures that a message names


def cores() -> int:
    """Number of cores that this process may use; in a container this may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def decode(
    paths: Sequence[Path],
    rows: Images,
    read: Callable[[Path], tuple[Images, bytes]],
    *,
    starts: Iterable[int] | None = None,
    jobs: int | None = None,
) -> Iterator[tuple[int, list[bytes]]]:
    """Decode pictures into rows of an array, and yield the start and the results of each block when it is written.

    Args:
        paths: Picture files.
        rows: Array with a row for each of them.
        read: Returns the pixels of a picture, and a digest, which is passed on.
        starts: Indices of the first pictures of the blocks of `BLOCK` to decode; None for all.
        jobs: Number of threads; None for one per core.

    Raises:
        UserError: At the end, if pictures cannot be read. Their blocks are not yielded.
    """

    def decode_block(start: int) -> tuple[int, list[bytes]]:
        digests = []
        for i, path in enumerate(paths[start : start + BLOCK], start):
            try:
                rows[i], digest = read(path)
                digests.append(digest)
            except UserError as error:
                problems.append(str(error))
        return start, digests

    problems: list[str] = []
    starts = range(0, len(paths), BLOCK) if starts is None else starts
    pool = ThreadPoolExecutor(jobs or cores())
    try:
        for future in as_completed([pool.submit(decode_block, start) for start in starts]):
            start, digests = future.result()
            if len(digests) == len(paths[start : start + BLOCK]):
                yield start, digests
    finally:
        pool.shutdown(cancel_futures=True)
    if problems:
        more = f"; {len(problems) - EXAMPLES:,} more" if len(problems) > EXAMPLES else ""
        raise UserError(f"{'; '.join(sorted(problems)[:EXAMPLES])}{more}. Replace or remove them.")


def read_picture(path: Path, side: int, resampling: str) -> tuple[Images, bytes]:
    """Decode a picture as RGB and resize it to a square, regardless of its aspect ratio.

    EXIF orientation is ignored, as in the published code.

    Args:
        path: File.
        side: Height and width, in pixels.
        resampling: ``"bicubic"`` or ``"bilinear"``.

    Returns:
        The pixels (3, side, side), and the SHA-256 of the file.
    """
    from PIL import Image

    content = path.read_bytes()
    resized = _open(path, content).resize((side, side), Image.Resampling[resampling.upper()])
    return np.asarray(resized).transpose(2, 0, 1), hashlib.sha256(content).digest()


def read_cropped(path: Path, size: int | None) -> Images:
    """Decode a picture as RGB, and resize and center-crop it to a square; None keeps its size."""
    from PIL import Image, ImageOps

    image = _open(path, path.read_bytes())
    if size is not None:
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    return np.asarray(image).transpose(2, 0, 1)


def _open(path: Path, content: bytes) -> Image:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as picture:
            if picture.mode.startswith(("I", "F")):  # conversion to RGB would clip values above 255
                raise ValueError(f"mode {picture.mode} has more than 8 bits per value")
            return picture.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: cannot be read as a picture of {', '.join(FORMATS)} ({error})") from error


def decoder_name() -> str:
    """Return the versions of the image decoder: decoded JPEG pixels can differ between versions in the last bit."""
    import PIL
    from PIL import features

    return f"Pillow {PIL.__version__}, libjpeg-turbo {features.version('libjpeg_turbo') or 'none'}"
