"""Records: one JSON file a run, ``runs/<hash>/<seed>.json``, written at once or not at all.

This is the wall in the middle of the house: to the left of it runs are made, with torch; to the right they are scored,
compared and shown, from these files alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from contnorm.config import RunConfig, from_dict
from contnorm.errors import UserError
from contnorm.metrics.matrix import AccuracyMatrix, score

__all__ = ["SCHEMA", "Record", "Store", "spread_over_seeds", "write_atomically"]

SCHEMA = 1


@dataclass(frozen=True)
class Record:
    """What a finished run left."""

    config: RunConfig
    seed: int
    matrix: AccuracyMatrix
    drift: Mapping[str, Any]
    raw: Mapping[str, Any]  # the file whole: times, versions, device

    def score(self, name: str) -> float:
        return score(self.matrix, name)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is either the old one or the new one, whatever happens meanwhile.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_atomically(folder / "a" / "b.json", b"{}")
        >>> (folder / "a" / "b.json").read_bytes()
        b'{}'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


class Store:
    """The records under a folder.

    Example:
        >>> list(Store(Path("no such folder")))
        []
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, config: RunConfig, seed: int) -> Path:
        return self.root / config.hash / f"{seed}.json"

    def has(self, config: RunConfig, seed: int) -> bool:
        return self.path(config, seed).is_file()

    def save(self, config: RunConfig, seed: int, found: Mapping[str, Any]) -> Path:
        content = {"schema": SCHEMA, "config": config.as_dict(), "hash": config.hash, "seed": seed, **found}
        path = self.path(config, seed)
        write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
        return path

    def load(self, path: Path) -> Record:
        try:
            raw = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise UserError(f"{path}: is no record of a run ({error}).") from error
        if raw.get("schema", 0) > SCHEMA:
            raise UserError(
                f"{path}: is a record of version {raw['schema']}, and this is contnorm that knows up to {SCHEMA}. "
                f"Upgrade contnorm to read it."
            )
        missing = {"schema", "config", "seed", "matrix"} - raw.keys()
        if missing:
            raise UserError(f"{path}: is no record of a run (without {', '.join(sorted(missing))}).")
        config = from_dict(raw["config"], str(path))
        return Record(config, raw["seed"], AccuracyMatrix(**raw["matrix"]), raw.get("drift", {}), raw)

    def __iter__(self) -> Iterator[Record]:
        for path in sorted(self.root.glob("*/*.json")):
            if path.stem.isdigit():
                yield self.load(path)

    def find(self, given: str) -> list[Record]:
        """The records of a path or the beginning of a hash, all its seeds."""
        path = Path(given)
        if path.is_file():
            return [self.load(path)]
        folders = [path] if path.is_dir() else sorted(f for f in self.root.glob(f"{given}*") if f.is_dir())
        if len(folders) > 1:
            raise UserError(f"{given!r} begins {len(folders)} hashes: {', '.join(f.name for f in folders)}. Say more.")
        records = [self.load(p) for f in folders for p in sorted(f.glob("*.json")) if p.stem.isdigit()]
        if not records:
            raise UserError(f"no finished run {given!r} under {self.root}. A run is a path or the beginning of a hash.")
        return sorted(records, key=lambda record: record.seed)


def spread_over_seeds(values: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; the latter is not a number for a single seed, both where a value is none.

    Example:
        >>> spread_over_seeds([1.0, 3.0])
        (2.0, 1.4142135623730951)
    """
    spread = len(values) > 1 and not any(map(isnan, values))  # `stdev` fails on what is not a number
    return fmean(values), stdev(values) if spread else float("nan")
