"""Archives of records: one file with one record per line, ``*.jsonl`` or gzipped ``*.jsonl.gz``.

An archive holds finished and diverged runs, sorted by hash and seed, and can be read wherever a runs folder can.
Lines that are not valid records are reported by their number; the others are read. Sizes are limited, so that a
damaged or malicious file can't fill the memory.
"""

from __future__ import annotations

import gzip
import io
import json
import stat
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, cast

from contnorm.bench.files import write_output
from contnorm.bench.record import LARGEST_FILE, DivergedRun, Record, parse_json, parse_record
from contnorm.bench.record_sets import RecordSet
from contnorm.errors import UserError

__all__ = ["archives_in", "is_archive", "read_archive", "write_archive"]

ENDINGS = (".jsonl.gz", ".jsonl")
LARGEST_ARCHIVE = 2**30  # bytes, uncompressed
LARGEST_LINE = LARGEST_FILE
MOST_PROBLEMS = 100  # invalid lines after which the rest of an archive is not read
_CHUNK = 2**16


class _UnreadableError(Exception):
    """The rest of an archive can't be read."""


def is_archive(path: Path) -> bool:
    """Whether a path has the name of an archive and is not a folder.

    Example:
        >>> is_archive(Path("tuning.jsonl.gz")), is_archive(Path("runs"))
        (True, False)
    """
    return path.name.endswith(ENDINGS) and not path.is_dir()


def archives_in(folder: Path) -> list[Path]:
    """Archives directly in a folder, sorted by name.

    Example:
        >>> archives_in(Path("no such folder"))
        []
    """
    try:
        return sorted(path for path in folder.iterdir() if path.name.endswith(ENDINGS) and path.is_file())
    except OSError:
        return []


def read_archive(path: Path) -> RecordSet:
    """Read the records of an archive, sorted by hash and seed; invalid lines are reported as problems.

    A missing file has no records. The result is cached until the file changes.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return RecordSet([], [])
    except OSError as error:
        return RecordSet([], [f"{path}: can't be read ({error.strerror})."])
    if not stat.S_ISREG(status.st_mode):  # a pipe or device could be read without end
        return RecordSet([], [f"{path}: can't be read (not a regular file)."])
    content = _read_cached(path, (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
    return RecordSet(list(content.records), list(content.problems), list(content.diverged_runs))


@lru_cache(maxsize=16)
def _read_cached(path: Path, identity: tuple[int, ...]) -> RecordSet:
    items: dict[tuple[str, int], tuple[int, Record | DivergedRun]] = {}
    problems: list[str] = []
    number = 0
    try:
        if not identity[0] and path.name.endswith(".gz"):  # gzip reads it as a file without lines
            raise EOFError("the file is empty")
        for number, line in _lines(path):
            _add_line(path, number, line, items, problems)
            if len(problems) >= MOST_PROBLEMS:
                raise _UnreadableError(f"{len(problems)} invalid lines")
    except _UnreadableError as error:
        problems.append(f"{path}:{number + 1}: the archive is not read from this line on ({error}).")
    except (OSError, EOFError, zlib.error) as error:
        problems.append(f"{path}:{number + 1}: the archive is damaged from this line on ({error}).")
    ordered = [item for _, (_, item) in sorted(items.items())]
    return RecordSet(
        [item for item in ordered if isinstance(item, Record)],
        problems,
        [item for item in ordered if isinstance(item, DivergedRun)],
    )


def _add_line(
    path: Path,
    number: int,
    line: bytes,
    items: dict[tuple[str, int], tuple[int, Record | DivergedRun]],
    problems: list[str],
) -> None:
    place = Path(f"{path}:{number}")
    try:
        item = parse_record(parse_json(line, place), place)
    except UserError as error:
        problems.append(str(error))
        return
    first, _ = items.setdefault((item.hash, item.seed), (number, item))
    if first != number:
        problems.append(f"{place}: is ignored. Line {first} is of the same run and seed ({item.hash}, {item.seed}).")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines; reads in chunks, so that all lines before a damage are returned."""
    with path.open("rb") as file:
        # GzipFile.read1 returns a limited part of the content at a time
        source = gzip.GzipFile(fileobj=file) if path.name.endswith(".gz") else file
        yield from _split(cast(BinaryIO, source))


def _split(source: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number, total, size = 1, 0, 0
    parts: list[bytes] = []
    while chunk := source.read1(_CHUNK):  # type: ignore[attr-defined]
        total += len(chunk)
        if total > LARGEST_ARCHIVE:
            raise _UnreadableError(f"more than {LARGEST_ARCHIVE:,} bytes uncompressed")
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            yield number, b"".join([*parts, part])
            parts, size, number = [], 0, number + 1
        parts.append(rest)
        size += len(rest)
        if size > LARGEST_LINE:
            raise _UnreadableError(f"a line of more than {LARGEST_LINE:,} bytes")
    if size:
        yield number, b"".join(parts)


def write_archive(path: Path, items: Iterable[Record | DivergedRun], force: bool = False) -> bool:
    """Write records as an archive, atomically. Equal records give equal bytes.

    Args:
        path: File to write; gzipped if its name ends in ``.jsonl.gz``.
        items: Finished and diverged runs. A run that occurs twice is written once, if possible as finished.
        force: Whether to replace a file with different content.

    Returns:
        Whether the file was written; False if it has this content already.

    Raises:
        UserError: If the name is not that of an archive, the records are too large to be read again, or the file has
            different content and ``force`` is False.
    """
    if not path.name.endswith(ENDINGS):
        raise UserError(f"{path}: is not the name of an archive. Use a name that ends in .jsonl.gz or .jsonl.")
    first: dict[tuple[str, int], Record | DivergedRun] = {}
    for item in sorted(items, key=lambda item: isinstance(item, DivergedRun)):  # finished runs first
        first.setdefault((item.hash, item.seed), item)
    lines = [json.dumps(item.raw, separators=(",", ":")) + "\n" for _, item in sorted(first.items())]
    content = "".join(lines).encode()
    if len(content) > LARGEST_ARCHIVE:
        raise UserError(
            f"{path}: {len(content):,} bytes exceed {LARGEST_ARCHIVE:,}. Split the runs into several folders."
        )
    if path.is_file() and not force:
        if _same_content(path, content):
            return False
        raise UserError(f"{path}: exists with different content. Use --force to replace it, or another name.")
    write_output(path, _gzipped(content) if path.name.endswith(".gz") else content)
    return True


def _gzipped(content: bytes) -> bytes:
    """Compress without a name or a time in the header, so that equal content gives equal bytes."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=buffer, mtime=0) as file:
        file.write(content)
    return buffer.getvalue()


def _same_content(path: Path, content: bytes) -> bool:
    """Whether an archive has the given uncompressed content; reads no more than needed."""
    try:
        with path.open("rb") as file:
            source = gzip.GzipFile(fileobj=file) if path.name.endswith(".gz") else file
            return source.read(len(content) + 1) == content
    except (OSError, EOFError, zlib.error):
        return False
