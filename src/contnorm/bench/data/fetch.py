"""Download data sets from their public sources; interrupted downloads are resumed, and hashes are verified.

A download that exceeds the known size of its file is aborted. Archives are unpacked into the data root only: members
that are links, devices, absolute paths or paths with ``..`` are refused. Nothing is written through a symbolic link
under the name of a partial file.
"""

from __future__ import annotations

import shutil
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from contnorm.atomic_files import draft_of
from contnorm.bench.files import Progress, path_inside
from contnorm.errors import UserError

__all__ = ["FETCHABLE", "Fetchable", "fetch"]

CHUNK = 1 << 18
DEFAULT_LIMIT = 2**24  # bytes of a file without a known size: lists of numbers
UNPACKED_LIMIT = 2**32  # bytes of all files in an archive; the largest, Tiny-ImageNet, has under 2**29


@dataclass(frozen=True)
class Fetchable:
    """Download address and hashes of a data set. Another address can be used; the hashes must match.

    Attributes:
        base: Default address of the folder of its files.
        files: Hashes of the files by name; the same as in other loaders of the field.
        folder: Target folder under the data root.
        members: Hashes of files in the archive, which are verified after unpacking.
        sizes: Sizes of the files in bytes, if known; `DEFAULT_LIMIT` bounds the others.
    """

    base: str
    files: dict[str, str]
    folder: str = ""
    members: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


FETCHABLE: dict[str, Fetchable] = {
    "mnist": Fetchable(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        {
            "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
        },
        folder="mnist",
        sizes={
            "train-images-idx3-ubyte.gz": 9_912_422,
            "train-labels-idx1-ubyte.gz": 28_881,
            "t10k-images-idx3-ubyte.gz": 1_648_877,
            "t10k-labels-idx1-ubyte.gz": 4_542,
        },
    ),
    "fashion-mnist": Fetchable(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        {
            "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
        },
        folder="fashion-mnist",
        sizes={
            "train-images-idx3-ubyte.gz": 26_421_880,
            "train-labels-idx1-ubyte.gz": 29_515,
            "t10k-images-idx3-ubyte.gz": 4_422_102,
            "t10k-labels-idx1-ubyte.gz": 5_148,
        },
    ),
    "cifar10": Fetchable(
        "https://www.cs.toronto.edu/~kriz/",
        {"cifar-10-python.tar.gz": "md5:c58f30108f718f92721af3b95e74349a"},
        members={
            "cifar-10-batches-py/data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
            "cifar-10-batches-py/data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
            "cifar-10-batches-py/data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
            "cifar-10-batches-py/data_batch_4": "md5:634d18415352ddfa80567beed471001a",
            "cifar-10-batches-py/data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
            "cifar-10-batches-py/test_batch": "md5:40351d587109b95175f43aff81a1287e",
        },
        sizes={"cifar-10-python.tar.gz": 170_498_071},
    ),
    "cifar100": Fetchable(
        "https://www.cs.toronto.edu/~kriz/",
        {"cifar-100-python.tar.gz": "md5:eb9058c3a382ffc7106e4002c42a8d85"},
        members={
            "cifar-100-python/train": "md5:16019d7e3df5f24257cddd939b257f8d",
            "cifar-100-python/test": "md5:f0ef6b0ae62326f3e7ffdfab6717acfc",
        },
        sizes={"cifar-100-python.tar.gz": 169_001_437},
    ),
    "tiny-imagenet": Fetchable(
        "http://cs231n.stanford.edu/",
        {"tiny-imagenet-200.zip": "md5:90528d7ca1a48142e341f4ef8d21d0de"},
        sizes={"tiny-imagenet-200.zip": 248_100_043},
    ),
}


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
        limit = dataset.sizes.get(name, DEFAULT_LIMIT)
        downloader = _ResumingDownloader(folder / f"{name}.part", limit, progress)
        processor = _unpack if name.endswith((".tar.gz", ".zip")) else None
        try:
            pooch.retrieve(url, checksum, name, folder, processor, downloader)
        except ValueError as error:  # raised by pooch if the hash does not match
            (folder / f"{name}.part").unlink(missing_ok=True)
            raise UserError(
                f"{url}: the downloaded file does not match {checksum} and was deleted. Download it again, or from "
                f"another address with --base."
            ) from error
    for name, checksum in dataset.members.items():
        kind, _, expected = checksum.partition(":")
        if not (root / name).is_file() or pooch.file_hash(str(root / name), kind) != expected:
            raise UserError(f"{root / name}: is missing or does not match {checksum}. Delete it and download it again.")


def _unpack(archive: str, action: str, pooch: Any) -> None:
    """Unpack an archive into its folder, after a download or if a file is missing; a processor for pooch."""
    import tarfile

    path = Path(archive)
    try:
        members = list(_members(path))
        if action != "fetch" or not all(target.is_file() for _, target in members):
            _extract(path, dict(members))
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise UserError(f"{path}: cannot be unpacked ({error}). Delete it and download it again.") from error


def _members(archive: Path) -> Iterator[tuple[str, Path]]:
    """Yield the regular files of an archive with their targets; raises an error for links, devices and unsafe paths."""
    total = 0
    for name, size, regular in _listing(archive):
        target = path_inside(archive.parent, name)
        if target is None or not regular:
            raise UserError(
                f"{archive}: member {name[:200]!r} is not a file inside the target folder, so nothing was unpacked. "
                f"Download the archive from another address with --base."
            )
        total += size
        yield name, target
    if total > UNPACKED_LIMIT:
        raise UserError(f"{archive}: unpacks to {total:,} bytes, more than the {UNPACKED_LIMIT:,} allowed.")


def _listing(archive: Path) -> Iterator[tuple[str, int, bool]]:
    """Yield the name and size of each member that is not a folder, and whether it is a regular file."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as file:
            yield from ((info.filename, info.file_size, True) for info in file.infolist() if not info.is_dir())
    else:
        import tarfile

        with tarfile.open(archive) as file:
            yield from ((info.name, info.size, info.isreg()) for info in file if not info.isdir())


def _extract(archive: Path, targets: dict[str, Path]) -> None:
    """Write the members of an archive; each is renamed to its final name when it is complete."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as file:
            for name, target in targets.items():
                with file.open(name) as content:
                    _write(content, target)
    else:
        import tarfile

        with tarfile.open(archive) as file:
            for info in file:
                member = file.extractfile(info) if info.isreg() else None
                if member is not None:
                    with member:
                        _write(member, targets[info.name])


def _write(content: IO[bytes], target: Path) -> None:
    with draft_of(target) as draft, draft.open("xb") as output:
        shutil.copyfileobj(content, output, CHUNK)


class _ResumingDownloader:
    """A downloader for pooch that resumes interrupted downloads.

    Args:
        part: File of the bytes received so far.
        limit: Maximum number of bytes to accept.
        progress: Called with the name of the file, its bytes received so far, and its size.
    """

    def __init__(self, part: Path, limit: int, progress: Progress) -> None:
        self.part, self.limit, self.progress = part, limit, progress

    def __call__(self, url: str, output_file: Any, pooch: Any) -> None:
        import http.client
        import urllib.error

        self.part.parent.mkdir(parents=True, exist_ok=True)
        if self.part.is_symlink():  # it would be written through; a data set from elsewhere may contain one
            self.part.unlink()
        try:
            self._download(url)
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
            raise UserError(f"{url}: download failed ({error}). Run the command again to resume it.") from error
        shutil.copyfile(self.part, output_file)
        self.part.unlink()

    def _download(self, url: str) -> None:
        import urllib.error
        import urllib.request

        received = self.part.stat().st_size if self.part.exists() else 0
        if received > self.limit:
            self.part.unlink()
            received = 0
        request = urllib.request.Request(url, headers={"Range": f"bytes={received}-"} if received else {})
        try:
            response = urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            if error.code == 416 and received:  # range not satisfiable: the file was already complete
                return
            raise
        with response, self.part.open("ab" if response.status == 206 else "wb") as file:
            done = received if response.status == 206 else 0
            total = done + int(response.headers.get("Content-Length") or 0)
            self._check_size(url, total)
            while chunk := response.read(CHUNK):
                done += len(chunk)
                self._check_size(url, done)
                file.write(chunk)
                self.progress(self.part.stem, done, total)
        if total and done < total:
            raise OSError(f"the connection ended after {done:,} of {total:,} bytes")

    def _check_size(self, url: str, size: int) -> None:
        """Abort a download that is larger than the file is known to be: a hostile server could fill the disk."""
        if size > self.limit:
            self.part.unlink(missing_ok=True)
            raise UserError(
                f"{url}: sends at least {size:,} bytes, but {self.part.stem} has at most {self.limit:,}. The download "
                f"was deleted; use another address with --base."
            )
