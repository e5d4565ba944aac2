"""Builds of multi-label data sets: content, fingerprint, resuming, and missing pictures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from contnorm.bench.data import multilabel_build as building
from contnorm.bench.data import pictures
from contnorm.bench.data.dataset import MultiLabelSource
from contnorm.bench.data.multilabel import Listing, Picture, list_cocoseq, published_stream
from contnorm.bench.data.multilabel_build import build, build_progress
from contnorm.bench.data.pictures import read_picture
from contnorm.bench.data.registry import load_source
from contnorm.bench.data.store import MANIFEST, find_stored
from contnorm.errors import UserError
from tests.datasets import real_data

SIDE = 8


def few(folder: Path, train: int = 7, test: int = 3) -> Listing:
    """Images of noise in two tasks, with two classes."""
    chance = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    listed = []
    for i in range(train + test):
        path = folder / f"{i}.png"
        Image.fromarray(chance.integers(0, 256, size=(11, 9, 3), dtype=np.uint8)).save(path)
        listed.append(Picture(path.name, path, int(train // 2 <= i < train), (i % 2,)))
    return Listing("few", ("a", "b"), ("minority",) * 2, ("0", "1"), tuple(listed[:train]), tuple(listed[train:]))


def without(listed: Listing, *gone: str) -> Listing:
    def changed(picture: Picture) -> Picture:
        return replace(picture, path=None) if picture.id in gone else picture

    return replace(listed, train=tuple(map(changed, listed.train)), test=tuple(map(changed, listed.test)))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of pictures as they are decoded; blocks of two."""
    names: list[str] = []

    def recorded(path: Path, **options: Any) -> tuple[np.ndarray, bytes]:
        names.append(path.name)
        return read_picture(path, **options)

    monkeypatch.setattr(building, "read_picture", recorded)
    monkeypatch.setattr(building, "BLOCK", 2)
    monkeypatch.setattr(pictures, "BLOCK", 2)
    return names


def load(out: Path) -> MultiLabelSource:
    source = load_source(str(out), Path("nowhere"))
    assert isinstance(source, MultiLabelSource)
    return source


def test_read_picture_returns_uint8_squares(tmp_path: Path) -> None:
    wide = np.random.default_rng(0).integers(0, 256, size=(20, 50, 3), dtype=np.uint8)
    Image.fromarray(wide).save(tmp_path / "wide.png")
    Image.fromarray(wide[:, :, 0]).save(tmp_path / "grey.png")
    one_by_one = [
        np.asarray(Image.fromarray(wide[:, :, c]).resize((16, 16), Image.Resampling.BICUBIC)) for c in range(3)
    ]
    np.testing.assert_array_equal(read_picture(tmp_path / "wide.png", 16, "bicubic")[0], np.stack(one_by_one))
    np.testing.assert_array_equal(read_picture(tmp_path / "grey.png", 16, "bicubic")[0], np.stack([one_by_one[0]] * 3))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM"])
def test_read_picture_accepts_usual_formats(tmp_path: Path, kind: str) -> None:
    Image.new("RGB", (11, 9), (200, 0, 0)).save(tmp_path / "a", format=kind)
    assert abs(int(read_picture(tmp_path / "a", SIDE, "bicubic")[0][0].mean()) - 200) < 5


def test_read_picture_refuses_what_it_would_misread_or_execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(np.linspace(0, 60000, 20 * 30).reshape(20, 30).astype(np.uint16)).save(tmp_path / "deep.tif")
    with pytest.raises(UserError, match=r"deep\.tif: .*more than 8 bits per value"):
        read_picture(tmp_path / "deep.tif", SIDE, "bicubic")

    def started(*command: object, **options: object) -> None:
        raise AssertionError(f"a program was started: {command}")

    Image.new("RGB", (11, 9)).save(tmp_path / "hidden.png", format="EPS")
    monkeypatch.setattr("subprocess.Popen", started)
    with pytest.raises(UserError, match=r"hidden\.png: cannot be read as a picture of JPEG, PNG"):
        read_picture(tmp_path / "hidden.png", SIDE, "bicubic")


def test_build_equals_listing(tmp_path: Path) -> None:
    listed = few(tmp_path / "pictures")
    reports: list[tuple[int, int]] = []
    manifest = build(listed, tmp_path / "few", SIDE, progress=lambda _, *count: reports.append(count))
    source = load(tmp_path / "few")
    assert source.fingerprint == manifest["fingerprint"] and manifest["about"]["complete"]
    assert source.train_labels.tolist() == [[1, 0], [0, 1]] * 3 + [[1, 0]]
    assert source.train_task.tolist() == [0, 0, 0, 1, 1, 1, 1] and source.class_names == ("a", "b")
    for picture, image in zip(listed.test, source.test_images, strict=True):
        assert picture.path is not None
        np.testing.assert_array_equal(image, read_picture(picture.path, SIDE, "bicubic")[0])
    assert reports[0] == (0, 10) and reports[-1] == (10, 10)
    assert manifest["about"]["images"]["train"]["by_class"] == {"a": 4, "b": 3}
    assert manifest["about"]["images"]["train"]["by_task"] == [3, 4]


def test_repeated_build_changes_nothing(tmp_path: Path, decoded: list[str]) -> None:
    listed = few(tmp_path / "pictures")
    first = build(listed, tmp_path / "few", SIDE)
    decoded.clear()
    assert build(listed, tmp_path / "few", SIDE) == first and not decoded
    for other, side in ((listed, 16), (replace(listed, test=listed.test[:2]), SIDE)):
        with pytest.raises(UserError, match=r"few: contains another data set\. Delete it, .*--out"):
            build(other, tmp_path / "few", side)


def test_fingerprint_depends_on_pixels_and_labels(tmp_path: Path) -> None:
    listed = few(tmp_path / "pictures")
    first = build(listed, tmp_path / "1", SIDE)["fingerprint"]
    relabelled = replace(listed, train=(replace(listed.train[0], labels=(0, 1)), *listed.train[1:]))
    assert build(relabelled, tmp_path / "2", SIDE)["fingerprint"] != first
    Image.new("RGB", (9, 11), (1, 2, 3)).save(tmp_path / "pictures" / "0.png")
    assert build(listed, tmp_path / "3", SIDE)["fingerprint"] != first


def test_interrupted_build_resumes(tmp_path: Path, decoded: list[str]) -> None:
    listed = few(tmp_path / "pictures")
    whole = build(listed, tmp_path / "whole", SIDE)

    def stop(_: str, done: int, total: int) -> None:
        if done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(listed, tmp_path / "few", SIDE, jobs=1, progress=stop)
    assert build_progress(tmp_path / "few") == (4, 10) and find_stored("few", tmp_path) is None
    with (tmp_path / "few" / "done").open("a") as log:
        log.write("train 4 0123")  # a line that broke off counts for nothing
    decoded.clear()
    assert build(listed, tmp_path / "few", SIDE) == whole
    assert sorted(decoded) == [f"{i}.png" for i in range(4, 10)]


KILLED = """
import sys, time
from pathlib import Path
from contnorm.bench.data import multilabel_build as building, pictures
from tests.bench.data.test_multilabel_build import few
building.BLOCK = pictures.BLOCK = 2
plain = building.read_picture
def slow(path, **options):
    time.sleep(0.05)
    return plain(path, **options)
building.read_picture = slow
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
    assert kept is not None and 6 <= kept[0] < 64 and not (out / MANIFEST).exists()
    decoded.clear()
    assert build(listed, out, SIDE) == whole
    assert len(decoded) == 64 - kept[0], "what was there is not decoded again"
    np.testing.assert_array_equal(load(out).train_images, load(tmp_path / "whole").train_images)


def test_missing_pictures_are_refused_or_recorded(tmp_path: Path) -> None:
    listed = few(tmp_path / "pictures")
    lacking = without(listed, "1.png", "3.png", "8.png")
    with pytest.raises(UserError, match=r"3 of 10 pictures are missing, such as 1\.png, 3\.png, 8\.png\. .*--allow"):
        build(lacking, tmp_path / "few", SIDE)
    assert not (tmp_path / "few").exists()
    about = build(lacking, tmp_path / "few", SIDE, allow_missing=True)["about"]
    assert about["complete"] is False and about["missing_pictures"]["test"] == [["8.png", 0]]
    counts = {"images": 2, "unlabelled": 0, "by_task": [1, 1], "by_class": {"a": 0, "b": 2}}
    assert about["missing"]["train"] == counts
    assert len(load(tmp_path / "few").train_images) == 5 and load(tmp_path / "few").missing_images == 3
    # Pictures that are added later make a larger data set, the same as a fresh build.
    assert build(listed, tmp_path / "few", SIDE) == build(listed, tmp_path / "fresh", SIDE)
    with pytest.raises(UserError, match="task 1 has no train pictures"):
        build(without(listed, "3.png", "4.png", "5.png", "6.png"), tmp_path / "x", SIDE, allow_missing=True)


@pytest.mark.parametrize("where", ["train", "test"])
def test_duplicate_picture_is_refused(tmp_path: Path, where: str) -> None:
    listed = few(tmp_path / "pictures")
    again = {"train": (*listed.train, replace(listed.train[1], labels=(0, 1))), "test": (*listed.test, listed.train[1])}
    twice = replace(listed, **{where: again[where]})
    with pytest.raises(UserError, match=r"1\.png is listed 2 times"):
        build(twice, tmp_path / "few", SIDE)
    published = build(replace(twice, as_published=True), tmp_path / "few", SIDE)  # the published lists as they are
    assert published["about"]["complete"]


def test_corrupt_pictures_are_named_and_others_decoded(tmp_path: Path, decoded: list[str]) -> None:
    listed = few(tmp_path / "pictures")
    good = (tmp_path / "pictures" / "5.png").read_bytes()
    (tmp_path / "pictures" / "5.png").write_bytes(good[:60])
    (tmp_path / "pictures" / "0.png").write_bytes(b"not a picture at all")
    with pytest.raises(UserError, match=r"0\.png: cannot be read .*5\.png: cannot be read .*Replace or remove them"):
        build(listed, tmp_path / "few", SIDE)
    assert build_progress(tmp_path / "few") == (3, 10) and find_stored("few", tmp_path) is None


def test_build_of_real_cocoseq_mini(tmp_path: Path) -> None:
    mini = real_data("cocoseq-mini/instances.json") / "cocoseq-mini"
    listed = list_cocoseq(mini, None, tmp_path)
    assert len(listed.train) == 1200 and len(listed.test) == 320 and not listed.as_published
    some = replace(listed, train=listed.train[::60], test=listed.test[::40])
    build(some, tmp_path / "cocoseq", 256)
    source = load(tmp_path / "cocoseq")
    raw = json.loads((mini / "instances.json").read_text())
    name_of = {category["id"]: category["name"] for category in raw["categories"]}
    for row, picture in enumerate(some.train):
        kinds = {name_of[entry["category_id"]] for entry in raw["annotations"] if entry["image_id"] == picture.id}
        kept = [published_stream("cocoseq").class_names[column] for column in np.flatnonzero(source.train_labels[row])]
        assert set(kept) == kinds & set(published_stream("cocoseq").class_names)
        with Image.open(mini / "images" / f"{picture.id:012d}.jpg") as image:  # 256x256 already: nothing to resize
            plain = np.asarray(image.convert("RGB"))
        np.testing.assert_array_equal(source.train_images[row], plain.transpose(2, 0, 1))
