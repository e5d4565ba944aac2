"""Download published data sets: pooch verifies their hashes, and archives are unpacked into the data root."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contnorm.bench.data.dataset import Progress, published
from contnorm.errors import UserError

__all__ = ["FETCHABLE", "Fetchable", "fetch"]


@dataclass(frozen=True)
class Fetchable:
    """Download address and hashes of a data set. Another address can be used; the hashes must match.

    Attributes:
        base: Default address of the folder of its files.
        files: Hashes of the files by name; the same as in other loaders of the field.
        folder: Target folder under the data root.
    """

    base: str
    files: dict[str, str]
    folder: str = ""


FETCHABLE = {name: Fetchable(**facts) for name, facts in published()["downloads"].items()}


def fetch(dataset: Fetchable, root: Path, base: str | None = None, progress: Progress = lambda *_: None) -> None:
    """Download a data set, verify it and unpack it. Valid files that exist are not downloaded again.

    Args:
        dataset: Data set.
        root: Data root.
        base: Address to download from, in place of the default.
        progress: Called with the name of a file, its bytes received so far, and its size.
    """
    import pooch

    folder = root / dataset.folder
    for name, checksum in dataset.files.items():
        url = (base or dataset.base).rstrip("/") + "/" + name
        downloader = pooch.HTTPDownloader(progressbar=_Bar(name, progress))
        try:
            pooch.retrieve(url, checksum, name, folder, downloader=downloader)
        except (OSError, ValueError) as error:  # ValueError: the hash does not match
            raise UserError(f"{url}: download failed ({error}). Try again, or another address with --base.") from error
        if name.endswith((".tar.gz", ".zip")):
            safe: Any = {"filter": "data"} if name.endswith(".tar.gz") else {}
            shutil.unpack_archive(folder / name, folder, **safe)


class _Bar:
    """A progress bar for pooch.

    Args:
        name: Name of the file.
        progress: Called with the name, the bytes received so far, and the size.
    """

    def __init__(self, name: str, progress: Progress) -> None:
        self.name, self.progress, self.done, self.total = name, progress, 0, 0

    def update(self, count: int) -> None:
        """Add received bytes; pooch passes the size of its chunks, also for the last one."""
        self.done = min(self.done + count, self.total)
        self.progress(self.name, self.done, self.total)

    def reset(self) -> None:
        """Start from zero; pooch does so before it reports the whole file."""
        self.done = 0

    def close(self) -> None:
        """Do nothing: the display belongs to the caller."""
