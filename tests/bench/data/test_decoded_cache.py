"""The decoded cache: verified against its source and its checksums, and never half written."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from contnorm.bench import files
from contnorm.bench.data import decoded_cache, image_folders
from contnorm.bench.data.registry import load_source
from contnorm.errors import UserError
from tests.datasets import picture, small_mini_imagenet, small_mnist, write_mini_lists

LONG_AGO = 10**9  # seconds since 1970, long before the first check of a file


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose content is read to check them."""
    names: list[str] = []
    plain = files.file_sha256

    def recorded(path: Path, *rest: object) -> str:
        names.append(path.name)
        return plain(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(decoded_cache, "file_sha256", recorded)
    return names


def make_old(root: Path) -> None:
    """Set all modification times to the distant past: the time stamp of a file that was just written is not trusted."""
    for path in [*root.rglob("*"), root]:
        os.utime(path, (LONG_AGO, LONG_AGO))


def array_file(root: Path, name: str = "train_images") -> Path:
    (path,) = root.rglob(f"{name}.npy")
    return path


def invert_half(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for i in range(len(content) // 2, len(content)):
        content[i] ^= 255
    path.write_bytes(content)


def test_lack_of_memory_is_not_a_damaged_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object, **more: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    load_source("mnist", small_mnist(tmp_path))
    monkeypatch.setattr("numpy.lib.format.open_memmap", fails)
    with pytest.raises(OSError, match="allocate memory"):
        load_source("mnist", tmp_path)


def test_changed_array_is_decoded_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = load_source("mnist", small_mnist(tmp_path)).train_images.copy()
    invert_half(array_file(tmp_path))
    with caplog.at_level(logging.WARNING):
        source = load_source("mnist", tmp_path)
    np.testing.assert_array_equal(source.train_images, expected)
    (message,) = caplog.messages
    assert "does not match its checksum" in message and ".contnorm" in message
    assert len(list(tmp_path.rglob("train_images.npy"))) == 1, "the damaged array is removed"


@pytest.mark.parametrize("damage", [b"", b"junk", None])
def test_damaged_array_or_manifest_is_decoded_again(tmp_path: Path, damage: bytes | None) -> None:
    load_source("mnist", small_mnist(tmp_path))
    path = array_file(tmp_path, "test_labels")
    path.unlink() if damage is None else path.write_bytes(damage)
    assert len(load_source("mnist", tmp_path).test_labels) == 100
    manifest = tmp_path / "mnist" / ".contnorm" / "mnist.json"
    manifest.write_bytes(damage or b'{"kind": "contnorm decoded data set", "version": 1, "folder": "../.."}')
    assert len(load_source("mnist", tmp_path).test_labels) == 100
    assert json.loads(manifest.read_text())["fingerprint"].startswith("2:")


def test_files_are_hashed_once_per_change(tmp_path: Path, hashed: list[str]) -> None:
    load_source("mnist", small_mnist(tmp_path))
    make_old(tmp_path)
    hashed.clear()
    load_source("mnist", tmp_path)
    assert len(hashed) == 8, "four source files and four arrays have another time"
    hashed.clear()
    load_source("mnist", tmp_path)
    assert not hashed
    os.utime(array_file(tmp_path), (LONG_AGO, LONG_AGO + 1))
    load_source("mnist", tmp_path)
    assert set(hashed) == {f"{name}.npy" for name in decoded_cache.ARRAYS}


def test_recent_time_stamp_is_not_trusted(tmp_path: Path, hashed: list[str]) -> None:
    load_source("mnist", small_mnist(tmp_path))
    path = array_file(tmp_path)
    before = path.stat()
    invert_half(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if written within the clock's resolution
    hashed.clear()
    load_source("mnist", tmp_path)
    assert "train_images.npy" in hashed


def test_copied_source_is_not_decoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_source("mini-imagenet", small_mini_imagenet(tmp_path))
    make_old(tmp_path)
    monkeypatch.setattr(decoded_cache, "decode_blocks", None)
    assert len(load_source("mini-imagenet", tmp_path).train_labels) == 200


def test_unwritable_state_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_source("mnist", small_mnist(tmp_path))

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_atomically", full)
    make_old(tmp_path)
    assert len(load_source("mnist", tmp_path).train_labels) == 300


def test_later_loads_stat_folders_not_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_source("mini-imagenet", small_mini_imagenet(tmp_path))
    make_old(tmp_path)
    load_source("mini-imagenet", tmp_path)
    inputs = image_folders.mini_imagenet_inputs([tmp_path / "mini-imagenet"])
    assert len(inputs) == 1 + 100 + 4 and not any(path.suffix == ".jpg" for path in inputs)
    monkeypatch.setattr(decoded_cache.PictureReader, "digest", None)
    assert len(load_source("mini-imagenet", tmp_path).train_labels) == 200


@pytest.mark.slow
def test_changed_split_lists_change_the_fingerprint(tmp_path: Path) -> None:
    folder = small_mini_imagenet(tmp_path) / "mini-imagenet"
    for path in folder.glob("n*/*.jpg"):
        picture(path, 84, 50 * int(path.stem[-1]))
    lists = {path: path.read_text() for path in folder.glob("*.csv")}
    load_source("mini-imagenet", tmp_path)
    make_old(tmp_path)
    by_lists = load_source("mini-imagenet", tmp_path)
    for path in lists:
        path.unlink()
    by_name = load_source("mini-imagenet", tmp_path)
    assert by_name.fingerprint != by_lists.fingerprint and by_name.details["split"] != by_lists.details["split"]
    make_old(tmp_path)
    load_source("mini-imagenet", tmp_path)
    for path, text in lists.items():
        path.write_text(text)
    assert load_source("mini-imagenet", tmp_path).fingerprint == by_lists.fingerprint
    write_mini_lists(folder, 3, {(i, 1 + i % 2) for i in range(100)})
    assert load_source("mini-imagenet", tmp_path).fingerprint not in (by_lists.fingerprint, by_name.fingerprint)


@pytest.mark.slow
def test_fingerprint_is_independent_of_file_layout(tmp_path: Path) -> None:
    by_class = load_source("mini-imagenet", small_mini_imagenet(tmp_path / "a"))
    flat = small_mini_imagenet(tmp_path / "b") / "mini-imagenet"
    (flat / "images").mkdir()
    for path in flat.glob("n*/*.jpg"):
        path.rename(flat / "images" / path.name)
    assert load_source("mini-imagenet", tmp_path / "b").fingerprint == by_class.fingerprint
    plain = load_source("mnist", small_mnist(tmp_path / "c"))
    zipped = load_source("mnist", small_mnist(tmp_path / "d", ending=".gz", folder="MNIST/raw"))
    assert plain.fingerprint == zipped.fingerprint


def test_incomplete_or_wrong_split_lists_are_refused(tmp_path: Path) -> None:
    folder = small_mini_imagenet(tmp_path) / "mini-imagenet"
    text = (folder / "mini_cl_test.csv").read_text()

    def refused(*words: str) -> None:
        with pytest.raises(UserError) as caught:
            load_source("mini-imagenet", tmp_path)
        assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)

    (folder / "mini_cl_test.csv").unlink()
    refused("mini_cl_test.csv", "missing")
    (folder / "mini_cl_test.csv").write_text(text.replace(".jpg", ".jpeg"))
    refused("lists are of other pictures", "no entry")
    (folder / "mini_cl_test.csv").write_text("".join(f"{line[:-1]}1\n" for line in text.splitlines()))
    refused("lists are of other pictures", "label")
    (folder / "mini_cl_test.csv").write_text(text + (folder / "mini_cl_train.csv").read_text())
    refused("in a train and a test list")
    (folder / "mini_cl_test.csv").write_text("one column\n")
    refused("mini_cl_test.csv", "row 1")
    (folder / "mini_cl_test.csv").write_bytes(b"\xff\xfe\x00")
    refused("mini_cl_test.csv", "not a text file")


def test_corrupt_picture_leaves_no_cache(tmp_path: Path) -> None:
    folder = small_mini_imagenet(tmp_path) / "mini-imagenet"
    (folder / image_folders.MINI_WNIDS[3] / f"{image_folders.MINI_WNIDS[3]}00000001.jpg").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"00000001\.jpg.*Replace it"):
        load_source("mini-imagenet", tmp_path)
    assert not list(tmp_path.rglob("*.npy")) and not list(tmp_path.rglob("mini-imagenet.json"))


@pytest.mark.slow
def test_processes_and_threads_decode_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = np.random.default_rng(0)
    folder = small_mini_imagenet(tmp_path) / "mini-imagenet"
    for path in sorted(folder.glob("n*/*.jpg")):
        picture(path, 84, int(chance.integers(256)))
    threads = load_source("mini-imagenet", tmp_path)
    images = threads.train_images.copy()
    (tmp_path / ".contnorm" / "mini-imagenet.json").unlink()
    monkeypatch.setattr(decoded_cache, "PROCESSES_FROM", 1)
    reports: list[tuple[str, int, int]] = []
    processes = load_source("mini-imagenet", tmp_path, jobs=2, progress=lambda *report: reports.append(report))
    np.testing.assert_array_equal(processes.train_images, images)
    assert processes.fingerprint == threads.fingerprint
    decoding = [done for what, done, total in reports if what == "decoding pictures" and total == 300]
    assert decoding[0] == 0 and decoding[-1] == 300 and decoding == sorted(decoding)


INTERRUPTED = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process inherits that it is ignored
from pathlib import Path
from contnorm.bench.data import decoding
from contnorm.bench.data.registry import load_source

plain = decoding.read_picture
def slow(*given):
    time.sleep(0.01)
    return plain(*given)
decoding.read_picture = slow
print("ready", flush=True)
load_source("mini-imagenet", Path(sys.argv[1]), progress=lambda what, done, total: print(done, flush=True))
"""


@pytest.mark.slow
def test_ctrl_c_during_decoding_leaves_no_cache(tmp_path: Path) -> None:
    small_mini_imagenet(tmp_path, per_class=12)
    # One thread, so that what is left would take twelve seconds.
    script = "import os; os.cpu_count = lambda: 1; os.process_cpu_count = lambda: 1\n" + INTERRUPTED
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() not in ("ready", "0"):
                break
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        started = time.monotonic()
        process.wait(timeout=60)
        assert time.monotonic() - started < 60
    assert process.returncode not in (0, None)
    assert not list(tmp_path.rglob("*.npy")) and not list(tmp_path.rglob("mini-imagenet.json"))
