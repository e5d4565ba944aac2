"""Decode pictures, resize them to squares and write them to rows of an array file, in worker processes or threads."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import threading
import warnings
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from contnorm.bench.data.dataset import Images
from contnorm.bench.lazy_numpy import np
from contnorm.bench.signals import block_signals, unblock_signals
from contnorm.errors import UserError

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

__all__ = [
    "BlockResult",
    "DecodedRow",
    "Resampling",
    "RowBlock",
    "decode_block",
    "decode_blocks",
    "decoder_name",
    "process_pool",
    "read_picture",
    "row_blocks",
]

# Accepted picture formats. Pillow has others that start programs (EPS starts Ghostscript) or are obscure.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
# Prefixes of Pillow's modes with more than 8 bits per value: conversion to RGB clips them, and does not scale.
DEEP = ("I", "F")

Resampling = Literal["bicubic", "bilinear"]


@dataclass(frozen=True)
class DecodedRow:
    """A picture that an earlier build has decoded: array file and row."""

    array: Path
    row: int


@dataclass(frozen=True)
class RowBlock:
    """Consecutive rows of an array file and the pictures that are decoded into them.

    Attributes:
        split, number: Split, and index of the block in it.
        array: File of the array.
        offset: Position of the first row in the file, in bytes.
        side: Height and width of a row, in pixels.
        pictures: Files to decode, or decoded rows to copy.
        resampling: Filter for resizing.
        sync: Whether the rows are synced to disk before the block counts as done.
    """

    split: str
    number: int
    array: Path
    offset: int
    side: int
    pictures: tuple[Path | DecodedRow, ...]
    resampling: Resampling
    sync: bool


@dataclass(frozen=True)
class BlockResult:
    """Result of a block.

    Attributes:
        block: The block.
        digest: SHA-256 of its pixels; empty if there are problems, in which case nothing was written.
        file_digests: SHA-256 of each picture file; empty for copied rows.
        problems: Messages about pictures that cannot be read.
    """

    block: RowBlock
    digest: str
    file_digests: tuple[bytes, ...]
    problems: tuple[str, ...] = ()


def row_blocks(
    split: str,
    array: Path,
    offset: int,
    side: int,
    pictures: Sequence[Path | DecodedRow],
    size: int,
    *,
    resampling: Resampling,
    sync: bool,
) -> Iterator[RowBlock]:
    """Divide the rows of an array into blocks of ``size`` pictures; ``offset`` is the position of the first row."""
    for number, start in enumerate(range(0, len(pictures), size)):
        first = offset + start * 3 * side * side
        yield RowBlock(split, number, array, first, side, tuple(pictures[start : start + size]), resampling, sync)


def read_picture(path: Path, side: int, resampling: Resampling = "bicubic") -> tuple[Images, bytes]:
    """Decode a picture as RGB and resize it to a square, regardless of its aspect ratio.

    EXIF orientation is ignored, as in the published code.

    Returns:
        The pixels (3, side, side), and the SHA-256 of the file.

    Raises:
        UserError: If the picture has another format than `FORMATS`, more than 8 bits per value, or more pixels than
            Pillow's limit. The message has no final period.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        content = path.read_bytes()
        with Image.open(io.BytesIO(content), formats=FORMATS) as picture:
            if picture.mode.startswith(DEEP):
                raise UserError(
                    f"{path}: has more than 8 bits per value (mode {picture.mode}), and values above 255 would be "
                    f"clipped; save it with 8 bits"
                )
            resized = picture.convert("RGB").resize((side, side), Image.Resampling[resampling.upper()])
    except UserError:
        raise
    except Exception as error:  # other files and damaged pictures can raise any exception
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            reason = "unknown format"
        raise UserError(
            f"{path}: cannot be read as a picture ({reason}); supported formats are {', '.join(FORMATS)}"
        ) from error
    return np.asarray(resized).transpose(2, 0, 1), hashlib.sha256(content).digest()


def decode_block(block: RowBlock) -> BlockResult:
    """Decode the pictures of a block and write them to its rows, unless one of them cannot be read."""
    rows = np.empty((len(block.pictures), 3, block.side, block.side), dtype=np.uint8)
    digests, problems = [], []
    for i, picture in enumerate(block.pictures):
        try:
            rows[i], digest = _pixels(picture, block)
            digests.append(digest)
        except UserError as error:
            problems.append(str(error))
    if problems:
        return BlockResult(block, "", (), tuple(problems))
    with block.array.open("r+b") as file:
        file.seek(block.offset)
        file.write(rows.data)
        if block.sync:
            file.flush()
            os.fsync(file.fileno())
    return BlockResult(block, hashlib.sha256(rows.data).hexdigest(), tuple(digests))


def _pixels(picture: Path | DecodedRow, block: RowBlock) -> tuple[Images, bytes]:
    if isinstance(picture, DecodedRow):
        return np.load(picture.array, mmap_mode="r")[picture.row], b""
    return read_picture(picture, block.side, block.resampling)


def decode_blocks(blocks: Sequence[RowBlock], pool: Executor | None) -> Generator[BlockResult, None, None]:
    """Decode blocks and yield each result as it is completed.

    Close the generator if it is not exhausted: this cancels the remaining blocks and shuts the pool down.

    Args:
        blocks: Blocks.
        pool: Workers; None to decode the blocks in order, in this thread.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about large pictures and odd metadata; errors are reported
        if pool is None:
            yield from map(decode_block, blocks)
            return
        try:
            # Only this process handles Ctrl-C: workers, which the first tasks start, must not end with a traceback.
            with block_signals([signal.SIGINT]):
                futures = [pool.submit(decode_block, block) for block in blocks]
            for future in as_completed(futures):
                yield future.result()
        except BrokenExecutor as error:
            raise UserError(
                "a process that decoded pictures was killed, perhaps for lack of memory. Run the command again; fewer "
                "processes need less memory."
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def process_pool(jobs: int) -> ProcessPoolExecutor:
    """Create a pool of worker processes for `decode_blocks`."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_init_worker)


def decoder_name() -> str:
    """Return the versions of the image decoder: decoded JPEG pixels can differ between versions in the last bit."""
    import PIL
    from PIL import features

    return f"Pillow {PIL.__version__}, libjpeg-turbo {features.version('libjpeg_turbo') or 'none'}"


def _init_worker() -> None:
    """Initialize a worker process: it ignores Ctrl-C, which the parent handles, and ends when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    unblock_signals([signal.SIGINT])
    warnings.simplefilter("ignore")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    import multiprocessing

    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
