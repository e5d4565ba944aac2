"""Builds of multi-label data sets: resuming, reuse of decoded rows, and refusal of incomplete or damaged data."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from contnorm.bench.data import decoding
from contnorm.bench.data import multilabel_build as building
from contnorm.bench.data import multilabel_store as stored
from contnorm.bench.data.dataset import DatasetListing, ListedPicture
from contnorm.bench.data.decoding import read_picture
from contnorm.bench.data.multilabel_build import build, build_progress
from contnorm.bench.data.multilabel_listings import find_instances, list_cocoseq
from contnorm.bench.data.multilabel_store import find_stored, list_stored, load_stored, read_manifest
from contnorm.bench.data.published import published_stream, read_lists
from contnorm.bench.data.registry import load_source
from contnorm.errors import UserError
from tests.datasets import real_data

SIDE = 8


def few(folder: Path, train: int = 7, test: int = 3, name: str = "few") -> DatasetListing:
    """DeviceImages of noise in two tasks, with two classes."""
    chance = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for i in range(train + test):
        path = folder / f"{i}.png"
        Image.fromarray(chance.integers(0, 256, size=(11, 9, 3), dtype=np.uint8)).save(path)
        pictures.append(path)
    listed = [ListedPicture(path.name, path, 0, (i % 2,)) for i, path in enumerate(pictures)]
    learned = [replace(picture, task=int(i >= train // 2)) for i, picture in enumerate(listed[:train])]
    return DatasetListing(name, ("a", "b"), ("minority",) * 2, ("0", "1"), tuple(learned), tuple(listed[train:]))


def without(listed: DatasetListing, *gone: str) -> DatasetListing:
    def told(picture: ListedPicture) -> ListedPicture:
        return replace(picture, path=None) if picture.id in gone else picture

    return replace(listed, train=tuple(map(told, listed.train)), test=tuple(map(told, listed.test)))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of pictures as they are decoded, in this process; pieces of two."""
    names: list[str] = []

    def told(path: Path, side: int, *rest: Any) -> tuple[np.ndarray, bytes]:
        names.append(path.name)
        return read_picture(path, side, *rest)

    monkeypatch.setattr(decoding, "read_picture", told)
    monkeypatch.setattr(building, "ROWS", 2)
    monkeypatch.setattr(stored, "ROWS", 2)
    return names


def test_read_picture_returns_uint8_squares(tmp_path: Path) -> None:
    wide = np.random.default_rng(0).integers(0, 256, size=(20, 50, 3), dtype=np.uint8)
    Image.fromarray(wide).save(tmp_path / "wide.png")
    Image.fromarray(wide[:, :, 0]).save(tmp_path / "grey.png")
    one_by_one = [
        np.asarray(Image.fromarray(wide[:, :, c]).resize((16, 16), Image.Resampling.BICUBIC)) for c in range(3)
    ]
    np.testing.assert_array_equal(read_picture(tmp_path / "wide.png", 16)[0], np.stack(one_by_one))
    np.testing.assert_array_equal(read_picture(tmp_path / "grey.png", 16)[0], np.stack([one_by_one[0]] * 3))


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_read_picture_refuses_more_than_8_bits(tmp_path: Path, kind: type) -> None:
    path = tmp_path / "deep.tif"
    Image.fromarray(np.linspace(0, 60000, 20 * 30).reshape(20, 30).astype(kind)).save(path)
    with pytest.raises(UserError, match=r"deep\.tif: has more than 8 bits per value"):
        read_picture(path, SIDE)[0]


def test_read_picture_refuses_too_many_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (11, 9)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)  # at twice as many Pillow refuses
    with pytest.raises(UserError, match=r"bomb\.png: cannot be read .*decompression bomb") as caught:
        read_picture(tmp_path / "bomb.png", SIDE)[0]
    assert "\n" not in str(caught.value)


def test_read_picture_refuses_formats_that_start_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (11, 9)).save(tmp_path / "hidden.png", format="EPS")

    def started(*command: object, **options: object) -> None:
        raise AssertionError(f"a program was started: {command}")

    monkeypatch.setattr("subprocess.check_call", started)
    monkeypatch.setattr("subprocess.Popen", started)
    with pytest.raises(UserError, match=r"hidden\.png: .*unknown format.*JPEG, PNG"):
        read_picture(tmp_path / "hidden.png", SIDE)[0]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM"])
def test_read_picture_accepts_usual_formats(tmp_path: Path, kind: str) -> None:
    Image.new("RGB", (11, 9), (200, 0, 0)).save(tmp_path / "a", format=kind)
    assert abs(int(read_picture(tmp_path / "a", SIDE)[0][0].mean()) - 200) < 5


@pytest.mark.parametrize("folder", ["..", "../other", "{root}/other", "", ".", "a/b", None, 7])
def test_manifest_with_folder_outside_is_refused(tmp_path: Path, folder: object) -> None:
    manifest = dict(build(few(tmp_path / "pictures"), tmp_path / "few", SIDE))
    (tmp_path / "few" / manifest["folder"]).rename(tmp_path / "other")
    manifest["folder"] = folder.format(root=tmp_path) if isinstance(folder, str) else folder
    (tmp_path / "few" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"manifest\.json: has an unusable value of 'folder'"):
        load_stored(tmp_path / "few")


def test_build_with_large_picture_warns_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = few(tmp_path / "pictures")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60)  # of 11 * 9; at twice as many Pillow refuses
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build(listed, tmp_path / "few", SIDE)["complete"]


def test_build_equals_listing(tmp_path: Path, decoded: list[str]) -> None:
    listed = few(tmp_path / "pictures")
    told: list[tuple[int, int]] = []
    manifest = build(listed, tmp_path / "few", SIDE, progress=lambda _, *count: told.append(count))
    source = load_source("few", tmp_path)
    assert source.fingerprint == manifest["fingerprint"] and manifest["complete"]
    assert source.train_labels.tolist() == [[1, 0], [0, 1]] * 3 + [[1, 0]]
    assert load_stored(tmp_path / "few").train_task.tolist() == [0, 0, 0, 1, 1, 1, 1]
    for picture, image in zip(listed.test, source.test_images, strict=True):
        assert picture.path is not None
        np.testing.assert_array_equal(image, read_picture(picture.path, SIDE)[0])
    assert told[0] == (0, 10) and told[-1] == (10, 10)
    assert manifest["images"]["train"]["by_class"] == {"a": 4, "b": 3}
    assert manifest["images"]["train"]["by_task"] == [3, 4]


def test_repeated_build_decodes_and_writes_nothing(tmp_path: Path, decoded: list[str]) -> None:
    listed = few(tmp_path / "pictures")
    first = build(listed, tmp_path / "few", SIDE)
    before = (tmp_path / "few" / "manifest.json").stat().st_mtime_ns
    decoded.clear()
    assert build(listed, tmp_path / "few", SIDE) == first and not decoded
    assert (tmp_path / "few" / "manifest.json").stat().st_mtime_ns == before


def test_starting_workers_block_sigint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take over what waits in the one that starts them, until they say for themselves that they ignore it."""
    waiting: list[bool] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, jobs: int, **_: object) -> None:
            super().__init__(jobs)

        def submit(self, *what: Any, **named: Any) -> Future[Any]:
            waiting.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
            return super().submit(*what, **named)

    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", Pool)
    monkeypatch.setattr(building, "ROWS", 2)
    monkeypatch.setattr(stored, "ROWS", 2)
    build(few(tmp_path / "pictures"), tmp_path / "few", SIDE, jobs=2)
    assert waiting == [True] * 6, "pieces of two: four of seven pictures, two of three"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_task_without_train_pictures_is_refused(tmp_path: Path) -> None:
    listed = without(few(tmp_path / "pictures"), "3.png", "4.png", "5.png", "6.png")
    with pytest.raises(UserError, match=r"few: task 1 has no train pictures"):
        build(listed, tmp_path / "few", SIDE, allow_missing=True)


@pytest.mark.parametrize("where", ["train", "test"])
def test_duplicate_picture_is_refused(tmp_path: Path, where: str) -> None:
    listed = few(tmp_path / "pictures")
    again = {"train": (*listed.train, replace(listed.train[1], labels=(0, 1))), "test": (*listed.test, listed.train[1])}
    twice = replace(listed, **{where: again[where]})
    message = (
        rf"few: 1 pictures are listed twice, such as 1\.png, in train of task 0 and in {where} of task 0\. List each"
    )
    with pytest.raises(UserError, match=message):
        build(twice, tmp_path / "few", SIDE)
    assert not (tmp_path / "few").exists()
    assert build(replace(twice, as_published=True), tmp_path / "few", SIDE)["complete"], (
        "the published lists as they are"
    )


def test_hard_link_is_a_duplicate(tmp_path: Path) -> None:
    listed = few(tmp_path / "pictures")
    link = tmp_path / "pictures" / "link.png"
    os.link(tmp_path / "pictures" / "1.png", link)
    linked = replace(listed, test=(*listed.test, replace(listed.train[1], id="link.png", path=link)))
    with pytest.raises(UserError, match=r"listed twice, such as link\.png"):
        build(linked, tmp_path / "few", SIDE)


def replace_picture(path: Path, level: int) -> None:
    """Another picture in a file of the same size."""
    size = path.stat().st_size
    Image.new("RGB", (9, 11), (level, 0, 0)).save(path)
    content = path.read_bytes()
    path.write_bytes(content + bytes(size - len(content)))  # what follows the end of a PNG is ignored


def row_of(out: Path, row: int) -> np.ndarray:
    return np.asarray(load_stored(out).train_images[row])


def test_replaced_picture_is_detected(tmp_path: Path) -> None:
    listed = few(tmp_path / "pictures")
    build(listed, tmp_path / "few", SIDE)
    replace_picture(tmp_path / "pictures" / "1.png", 200)
    with pytest.raises(UserError, match=r"1 pictures have changed since the build, such as 1\.png"):
        build(listed, tmp_path / "few", SIDE)


def test_copied_pictures_are_unchanged(tmp_path: Path) -> None:
    listed = few(tmp_path / "pictures")
    first = build(listed, tmp_path / "few", SIDE)
    for path in (tmp_path / "pictures").iterdir():
        path.write_bytes(path.read_bytes())
        os.utime(path, (10**9, 10**9))
    assert build(listed, tmp_path / "few", SIDE) == first


def test_resumed_build_decodes_replaced_picture(tmp_path: Path, decoded: list[str]) -> None:
    listed, last = few(tmp_path / "pictures"), tmp_path / "pictures" / "6.png"
    content = last.read_bytes()
    last.write_bytes(bytes(len(content)))
    with pytest.raises(UserError, match=r"6\.png: cannot be read"):
        build(listed, tmp_path / "few", SIDE)
    last.write_bytes(content)
    replace_picture(tmp_path / "pictures" / "0.png", 200)
    decoded.clear()
    build(listed, tmp_path / "few", SIDE)
    assert sorted(decoded) == ["0.png", "1.png", "6.png"]
    assert row_of(tmp_path / "few", 0)[0].min() == 200


@pytest.mark.parametrize("cause", ["replaced", "damaged"])
def test_larger_build_copies_only_valid_rows(tmp_path: Path, decoded: list[str], cause: str) -> None:
    listed, out = few(tmp_path / "pictures"), tmp_path / "few"
    build(without(listed, "6.png"), out, SIDE, allow_missing=True)
    if cause == "replaced":
        replace_picture(tmp_path / "pictures" / "0.png", 200)
    else:
        (array,) = out.glob("build-*/train_images.npy")
        rows = np.lib.format.open_memmap(array, mode="r+")
        rows[0] ^= 255
        rows.flush()
    decoded.clear()
    build(listed, out, SIDE)
    assert "0.png" in decoded and "2.png" not in decoded
    np.testing.assert_array_equal(row_of(out, 0), read_picture(tmp_path / "pictures" / "0.png", SIDE)[0])


def test_symbolic_link_to_picture_is_unchanged(tmp_path: Path) -> None:
    listed = few(tmp_path / "pictures")
    roundabout = replace(listed.train[1], id="1 again", path=tmp_path / "pictures" / ".." / "pictures" / "1.png")
    with pytest.raises(UserError, match=r"listed twice, such as 1 again, in train of task 0 and in test of task 0"):
        build(replace(listed, test=(*listed.test, roundabout)), tmp_path / "few", SIDE)


@pytest.mark.slow
def test_processes_build_the_same_bits_as_one(tmp_path: Path) -> None:
    listed = few(tmp_path / "pictures", train=70, test=3)
    one, two = (build(listed, tmp_path / f"with{jobs}", SIDE, jobs=jobs) for jobs in (1, 2))
    assert one == two
    sources = [load_stored(tmp_path / f"with{jobs}") for jobs in (1, 2)]
    np.testing.assert_array_equal(sources[0].train_images, sources[1].train_images)


def test_fingerprint_depends_on_pixels_and_labels(tmp_path: Path) -> None:
    listed = few(tmp_path / "pictures")
    first = build(listed, tmp_path / "1", SIDE)["fingerprint"]
    relabelled = replace(listed, train=(replace(listed.train[0], labels=(0, 1)), *listed.train[1:]))
    assert build(relabelled, tmp_path / "2", SIDE)["fingerprint"] != first
    Image.new("RGB", (9, 11), (1, 2, 3)).save(tmp_path / "pictures" / "0.png")
    assert build(listed, tmp_path / "3", SIDE)["fingerprint"] != first


def test_interrupted_build_resumes(tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    listed = few(tmp_path / "pictures")
    whole = build(listed, tmp_path / "whole", SIDE)

    def stop(_: str, done: int, total: int) -> None:
        if done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(listed, tmp_path / "few", SIDE, progress=stop)
    assert build_progress(tmp_path / "few") == (4, 10) and find_stored("few", tmp_path) is None
    notes = next((tmp_path / "few").glob("build-*")) / "done"
    notes.write_text(notes.read_text() + "train 2 0123")  # a line that broke off counts for nothing
    decoded.clear()
    assert build(listed, tmp_path / "few", SIDE) == whole
    assert sorted(decoded) == [f"{i}.png" for i in range(4, 10)]


KILLED = """
import sys
from contnorm.bench.data import multilabel_build as building
from contnorm.bench.data import decoding
from tests.bench.data.test_multilabel_build import few
from pathlib import Path
import time
building.ROWS = 2
plain = decoding.read_picture
def slow(*arguments):
    time.sleep(0.02)
    return plain(*arguments)
decoding.read_picture = slow
building.build(few(Path(sys.argv[1]), 60, 4), Path(sys.argv[2]), 8)
"""


@pytest.mark.slow
def test_killed_build_resumes_bit_exactly(tmp_path: Path, decoded: list[str]) -> None:
    listed = few(tmp_path / "pictures", 60, 4)
    whole = build(listed, tmp_path / "whole", SIDE)
    out = tmp_path / "few"
    root = Path(__file__).resolve().parents[3]
    paths = os.pathsep.join([str(root), str(root / "src")])
    command = [sys.executable, "-c", KILLED, str(tmp_path / "pictures"), str(out)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}) as process:
        until = time.monotonic() + 60
        while (build_progress(out) or (0, 0))[0] < 6 and time.monotonic() < until:
            assert process.poll() is None, "it ended by itself"
            time.sleep(0.01)
        process.kill()
    kept = build_progress(out)
    assert kept is not None and 6 <= kept[0] < 64 and not (out / "manifest.json").exists()
    decoded.clear()
    assert build(listed, out, SIDE) == whole
    assert len(decoded) == 64 - kept[0], "what was there is not decoded again"


def test_block_missing_in_the_log_is_decoded_again(tmp_path: Path, decoded: list[str]) -> None:
    listed = few(tmp_path / "pictures")
    whole = build(listed, tmp_path / "few", SIDE)
    folder = tmp_path / "few" / whole["folder"]
    (tmp_path / "few" / "manifest.json").unlink()
    lines = (folder / "done").read_text().splitlines(keepends=True)
    (folder / "done").write_text("".join(line for line in lines if not line.startswith("train 1 ")))
    decoded.clear()
    assert build(listed, tmp_path / "few", SIDE) == whole and decoded == ["2.png", "3.png"]


@pytest.mark.parametrize(
    ("file", "content"),
    [("train_images.npy", None), ("test_images.npy", b"cut"), ("done", b"\0\0\0\xff\ntrain x y\n")],
    ids=["gone", "cut short", "notes"],
)
def test_damaged_partial_build_is_started_again(
    tmp_path: Path, decoded: list[str], file: str, content: bytes | None
) -> None:
    listed = few(tmp_path / "pictures")
    whole = build(listed, tmp_path / "few", SIDE)
    (tmp_path / "few" / "manifest.json").unlink()
    broken = tmp_path / "few" / whole["folder"] / file
    broken.unlink() if content is None else broken.write_bytes(content)
    decoded.clear()
    assert build(listed, tmp_path / "few", SIDE) == whole and len(decoded) == 10
    np.testing.assert_array_equal(
        load_stored(tmp_path / "few").train_images[0], read_picture(listed.train[0].path, SIDE)[0]
    )


def test_rows_of_a_damaged_build_are_not_copied(tmp_path: Path, decoded: list[str]) -> None:
    listed = few(tmp_path / "pictures")
    part = build(without(listed, "0.png"), tmp_path / "few", SIDE, allow_missing=True)
    (tmp_path / "few" / part["folder"] / "train_images.npy").unlink()
    decoded.clear()
    assert build(listed, tmp_path / "few", SIDE)["complete"] and len(decoded) == 10


def test_missing_pictures_are_refused_or_recorded(tmp_path: Path, decoded: list[str]) -> None:
    listed = few(tmp_path / "pictures")
    lacking = without(listed, "1.png", "3.png", "8.png")
    with pytest.raises(
        UserError, match=r"few: 3 of 10 pictures are missing, such as 1\.png, 3\.png, 8\.png\. .*--allow"
    ):
        build(lacking, tmp_path / "few", SIDE)
    assert not (tmp_path / "few").exists()
    manifest = build(lacking, tmp_path / "few", SIDE, allow_missing=True)
    assert manifest["complete"] is False
    assert manifest["missing"]["train"] == {
        "images": 2,
        "unlabelled": 0,
        "by_task": [1, 1],
        "by_class": {"a": 0, "b": 2},
    }
    assert json.loads((tmp_path / "few" / "missing.json").read_text())["test"] == [["8.png", 0]]
    source = load_stored(tmp_path / "few")
    assert len(source.train_images) == 5 and source.missing_images == 3


def test_pictures_added_later_extend_the_build(tmp_path: Path, decoded: list[str]) -> None:
    listed = few(tmp_path / "pictures")
    build(without(listed, "1.png", "8.png"), tmp_path / "few", SIDE, allow_missing=True)
    decoded.clear()
    grown = build(listed, tmp_path / "few", SIDE)
    assert sorted(decoded) == ["1.png", "8.png"] and grown["complete"]
    assert grown == build(listed, tmp_path / "fresh", SIDE)
    assert not (tmp_path / "few" / "missing.json").exists()
    assert len(list((tmp_path / "few").glob("build-*"))) == 1


def test_complete_data_set_is_not_replaced(tmp_path: Path, decoded: list[str]) -> None:
    listed = few(tmp_path / "pictures")
    build(listed, tmp_path / "few", SIDE)
    message = r"few: contains another data set: few, 10 pictures of 8 pixels\. Delete it, .*--out"
    for other, side in ((listed, 16), (replace(listed, test=listed.test[:2]), SIDE)):
        with pytest.raises(UserError, match=message):
            build(other, tmp_path / "few", side)


def test_corrupt_pictures_are_named_and_others_decoded(tmp_path: Path, decoded: list[str]) -> None:
    listed = few(tmp_path / "pictures")
    good = (tmp_path / "pictures" / "5.png").read_bytes()
    (tmp_path / "pictures" / "5.png").write_bytes(good[:60])
    (tmp_path / "pictures" / "0.png").write_bytes(b"not a picture at all")
    with pytest.raises(UserError, match=r"0\.png: cannot be read .*5\.png: cannot be read .*resumes"):
        build(listed, tmp_path / "few", SIDE)
    assert build_progress(tmp_path / "few") == (6, 10) and find_stored("few", tmp_path) is None
    decoded.clear()
    build(without(listed, "0.png", "5.png"), tmp_path / "few", SIDE, allow_missing=True)
    assert sorted(decoded) == ["1.png", "4.png"], "the others of the two pieces that could not be written"


def test_unwritable_folder_is_refused(tmp_path: Path) -> None:
    listed = few(tmp_path / "pictures")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"file/few: .*\(Not a directory\)\. .*--out"):
        build(listed, tmp_path / "file" / "few", SIDE)


def test_full_disk_keeps_decoded_blocks(tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    listed = few(tmp_path / "pictures")
    real = os.fsync

    def full(handle: int) -> None:
        if len(decoded) > 5:
            raise OSError(28, "No space left on device")
        real(handle)

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(UserError, match=r"\(No space left on device\)\. .*--out"):
            build(listed, tmp_path / "few", SIDE)
    assert build_progress(tmp_path / "few") == (4, 10)
    decoded.clear()
    assert build(listed, tmp_path / "few", SIDE)["complete"] and len(decoded) == 6


def test_concurrent_build_in_one_folder_is_refused(tmp_path: Path) -> None:
    listed = few(tmp_path / "pictures")

    def second(_: str, done: int, total: int) -> None:
        build(listed, tmp_path / "few", SIDE)

    with pytest.raises(UserError, match=r"another process is building there"):
        build(listed, tmp_path / "few", SIDE, progress=second)


def test_damaged_or_newer_data_set_is_refused(tmp_path: Path) -> None:
    manifest = build(few(tmp_path / "pictures"), tmp_path / "few", SIDE)
    path = tmp_path / "few" / "manifest.json"
    path.write_text(json.dumps({**manifest, "version": 2}))
    with pytest.raises(UserError, match=r"version 2; this contnorm supports 1\. Upgrade"):
        load_source("few", tmp_path)
    path.write_text(json.dumps({**manifest, "size": 16}))
    with pytest.raises(UserError, match=r"train_images\.npy has shape \(7, 3, 8, 8\) instead of \(7, 3, 16, 16\)"):
        load_source("few", tmp_path)
    path.write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json: is not valid JSON .*build it again"):
        load_source("few", tmp_path)
    for gone in ("version", "folder", "missing"):
        path.write_text(json.dumps({key: value for key, value in manifest.items() if key != gone}))
        with pytest.raises(UserError, match=rf"manifest\.json: has no {gone}\. Delete .*few and build it again"):
            load_source("few", tmp_path)
    path.write_text("{}")
    assert list_stored(tmp_path) == {}
    path.write_text(json.dumps(manifest))
    (tmp_path / "few" / manifest["folder"] / "test_task.npy").unlink()
    with pytest.raises(UserError, match=r"test_task\.npy: is missing or damaged"):
        load_source(str(tmp_path / "few"), Path("nowhere"))


def test_unknown_data_set_lists_known_ones(tmp_path: Path) -> None:
    build(few(tmp_path / "pictures"), tmp_path / "few", SIDE)
    with pytest.raises(UserError, match=r"unknown data set 'fewer'.*nus-wideseq, few\."):
        load_source("fewer", tmp_path)
    with pytest.raises(UserError, match=r"no cocoseq under .*Build it with contnorm data cocoseq --coco DIR"):
        load_source("cocoseq", tmp_path)
    assert read_manifest(tmp_path / "few")["name"] == "few"


def test_published_streams_are_consistent() -> None:
    for name, groups, images in (("cocoseq", (18, 38, 14), 41438), ("nus-wideseq", (10, 18, 21), 51114)):
        stream = published_stream(name)
        assert tuple(stream.class_groups.count(group) for group in ("majority", "moderate", "minority")) == groups
        assert stream.images == images and sorted(stream.task_order) == list(range(len(stream.task_order)))
        assert list(stream.class_names) == sorted(stream.class_names)
        for known in stream.lists.files.values():
            assert known.startswith("sha256:") and len(known) == 7 + 64
        assert len(stream.lists.files) == 2 * len(stream.task_order)


def test_build_of_real_cocoseq_mini(tmp_path: Path) -> None:
    mini = real_data("cocoseq-mini/instances.json") / "cocoseq-mini"
    listed = list_cocoseq(mini, find_instances(mini), read_lists(published_stream("cocoseq"), mini / "ids"))
    assert len(listed.train) == 1200 and len(listed.test) == 320 and not listed.as_published
    some = replace(listed, train=listed.train[::60], test=listed.test[::40])
    manifest = build(some, tmp_path / "cocoseq", 256)
    source = load_source("cocoseq", tmp_path)
    assert manifest["published"] == {"images": 41438, "lists_as_published": False}
    raw = json.loads((mini / "instances.json").read_text())
    name_of = {category["id"]: category["name"] for category in raw["categories"]}
    for row, picture in enumerate(some.train):
        kinds = {name_of[entry["category_id"]] for entry in raw["annotations"] if entry["image_id"] == picture.id}
        kept = [published_stream("cocoseq").class_names[column] for column in np.flatnonzero(source.train_labels[row])]
        assert set(kept) == kinds & set(published_stream("cocoseq").class_names)
        with Image.open(mini / "images" / f"{picture.id:012d}.jpg") as image:  # 256x256 already: nothing to resize
            plain = np.asarray(image.convert("RGB"))
        np.testing.assert_array_equal(source.train_images[row], plain.transpose(2, 0, 1))


def test_changed_array_is_refused(tmp_path: Path) -> None:
    build(few(tmp_path / "pictures"), tmp_path / "few", SIDE)
    load_source("few", tmp_path)
    (path,) = tmp_path.rglob("train_images.npy")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"few: the arrays do not match fingerprint \w+ .*build it again"):
        load_source("few", tmp_path)


def test_data_set_is_hashed_once_per_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(few(tmp_path / "pictures"), tmp_path / "few", SIDE)
    for path in tmp_path.rglob("*"):
        os.utime(path, (10**9, 10**9))
    load_source("few", tmp_path)
    monkeypatch.setattr(stored, "content_fingerprint", None)
    load_source("few", tmp_path)
