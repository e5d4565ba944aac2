"""Seeded mutations of every file that a loader reads: each gives a data set or one UserError, never a traceback."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from contnorm.bench.data.decoding import read_picture
from contnorm.bench.data.image_folders import (
    MINI_LISTS,
    list_mini_imagenet,
    list_tiny_imagenet,
    tiny_imagenet_inputs,
)
from contnorm.bench.data.multilabel_build import build, build_progress
from contnorm.bench.data.multilabel_listings import (
    find_instances,
    list_cocoseq,
    list_csv,
    list_nus_wideseq,
    read_nus_wide,
)
from contnorm.bench.data.multilabel_store import load_stored, read_manifest
from contnorm.bench.data.published import published_stream, read_lists
from contnorm.bench.data.registry import load_source
from contnorm.cli.data import describe_build
from contnorm.errors import UserError
from tests.datasets import small_coco, small_mini_imagenet, small_mnist, small_nus_wide, small_tiny_imagenet

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**200, 0.5, float("nan"), float("inf")),
    *("", "..", "../../x.png", "/etc/passwd", "C:\\x", "a\nb", "\x1b[31m", "\0", "\ud800", "x" * 5000),
    *([], {}, [None], [[]], {"id": []}, [1, "a"]),
)
TOKENS = (
    b"..",
    b"/",
    b"\\",
    b"\n",
    b"\r",
    b"\0",
    b'"',
    b",",
    b";",
    b"\t",
    b"\xff",
    b"9" * 5000,
    b"[" * 3000,
    b"{",
    b"}",
)


def mutated_bytes(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 4])):
        at = chance.randrange(len(changed) + 1)
        action = chance.randrange(5)
        if action == 0 and at < len(changed):
            changed[at] = chance.randrange(256)
        elif action == 1:
            del changed[at : at + chance.randrange(1, 20)]
        elif action == 2:
            changed[at:at] = chance.choice(TOKENS)
        elif action == 3:
            start = chance.randrange(len(changed) + 1)
            changed[at:at] = changed[start : start + 30]
        else:
            del changed[at:]
    return bytes(changed)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON value with every key or index in it; of long lists the first few."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for number, (key, entry) in enumerate(entries):
        if number < 12:
            yield value, key
            yield from places(entry)


def mutated_json(content: bytes, chance: random.Random) -> bytes:
    value = json.loads(content)
    for _ in range(chance.choice([1, 1, 2])):
        found = list(places(value))
        if not found:
            return json.dumps(chance.choice(VALUES)).encode()
        container, key = chance.choice(found)
        if chance.random() < 0.25:
            del container[key]
        else:
            container[key] = copy.deepcopy(chance.choice(VALUES))
    return json.dumps(value).encode()


def rewrite(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)  # some file systems wait for the disk where a file is truncated
    path.write_bytes(content)


def fuzz(folder: Path, files: list[str], load: Callable[[], object], rounds: int) -> None:
    """Mutate one file at a time, load, and restore it."""
    chance = random.Random(0)
    originals = {name: (folder / name).read_bytes() for name in files}
    load()
    for number in range(rounds):
        name = chance.choice(files)
        structured = name.endswith(".json") and chance.random() < 0.7
        content = (mutated_json if structured else mutated_bytes)(originals[name], chance)
        rewrite(folder / name, content)
        try:
            load()
        except UserError as error:
            message = str(error)
            assert message.isprintable() and len(message) < 12_000, (number, name, message[:500])
        except Exception as error:
            pytest.fail(f"round {number}, {name}: {error!r} of {content[:300]!r}")
        rewrite(folder / name, originals[name])


def test_coco_files(tmp_path: Path) -> None:
    small_coco(tmp_path, train=1, test=1)
    stream = published_stream("cocoseq")
    files = [f"annotations/instances_{half}2014.json" for half in ("train", "val")]
    files += ["ids/train_task0.json", "ids/test_task3.json"]
    fuzz(
        tmp_path,
        files,
        lambda: list_cocoseq(tmp_path, find_instances(tmp_path), read_lists(stream, tmp_path / "ids")),
        rounds=400,
    )


def test_nus_wide_files(tmp_path: Path) -> None:
    small_nus_wide(tmp_path)
    stream = published_stream("nus-wideseq")
    files = ["ImageList/TrainImagelist.txt", "ImageList/TestImagelist.txt", "TrainTestLabels/Labels_sky_Test.txt"]
    files += ["ids/train_task0_id_nuswide.json"]
    fuzz(
        tmp_path,
        files,
        lambda: list_nus_wideseq(tmp_path, read_nus_wide(tmp_path), read_lists(stream, tmp_path / "ids")),
        rounds=80,
    )


@pytest.mark.parametrize("joined", [True, False])
def test_csv_and_groups(tmp_path: Path, joined: bool) -> None:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (9, 9)).save(tmp_path / name)
    text = "image,split,task,labels\na.png,train,10,sea;sky\nb.png,test,9,sky\n"
    columns = "image,split,task,sea,sky\na.png,train,10,1,1\nb.png,test,9,0,1\n"
    (tmp_path / "table.csv").write_text(text if joined else columns)
    (tmp_path / "groups.csv").write_text("class,group\nsea,minority\nsky,majority\n")

    def load() -> None:
        listed = list_csv("own", tmp_path / "table.csv", tmp_path, tmp_path / "groups.csv")
        for picture in (*listed.train, *listed.test):
            assert picture.path is None or picture.path.resolve().parent == tmp_path

    fuzz(tmp_path, ["table.csv", "groups.csv"], load, rounds=300)


def built(tmp_path: Path) -> Path:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (9, 9)).save(tmp_path / name)
    (tmp_path / "labels.csv").write_text("image,split,task,labels\na.png,train,0,sea;sky\nb.png,test,0,sea\n")
    build(list_csv("own", tmp_path / "labels.csv", tmp_path), tmp_path / "own", side=8)
    return tmp_path / "own"


def test_built_data_set(tmp_path: Path) -> None:
    folder = built(tmp_path)
    arrays = [f"{path.parent.name}/{path.name}" for path in folder.glob("build-*/*.npy")]

    def load() -> None:
        source = load_stored(folder)
        assert source.train_labels.max() <= 1
        list(describe_build(read_manifest(folder)))

    fuzz(folder, ["manifest.json"] * 6 + arrays, load, rounds=400)


@pytest.mark.slow
def test_partial_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interrupted build left is used or discarded; the data set is the same in either case."""
    monkeypatch.setattr("os.fsync", lambda handle: None)
    folder = built(tmp_path)
    whole = read_manifest(folder)
    listed = list_csv("own", tmp_path / "labels.csv", tmp_path)
    build_folder = folder / whole["folder"]
    shutil.copytree(build_folder, tmp_path / "kept")

    def load() -> None:
        (folder / "manifest.json").unlink(missing_ok=True)
        build_progress(folder)
        manifest = build(listed, folder, side=8)
        assert {**manifest, "fingerprint": ""} == {**whole, "fingerprint": ""}
        for path in (tmp_path / "kept").iterdir():
            rewrite(build_folder / path.name, path.read_bytes())

    fuzz(build_folder, ["plan.json", "done", "train_images.npy", "test_images.npy"], load, rounds=60)


@pytest.mark.slow
def test_tiny_imagenet_lists(tmp_path: Path) -> None:
    folder = small_tiny_imagenet(tmp_path, per_class=1, test_labels=range(3)) / "tiny-imagenet-200"
    lists = [folder / "wnids.txt", folder / "val" / "val_annotations.txt"]

    def load() -> None:
        try:
            tiny_imagenet_inputs(lists)
            list_tiny_imagenet(lists)
        except OSError as error:  # `load_source` turns them into errors of one line
            raise UserError(error.strerror) from error

    fuzz(folder, ["wnids.txt", "val/val_annotations.txt"], load, rounds=100)


def test_mini_imagenet_lists(tmp_path: Path) -> None:
    folder = small_mini_imagenet(tmp_path, per_class=2) / "mini-imagenet"
    fuzz(folder, [name for names in MINI_LISTS for name in names], lambda: list_mini_imagenet([folder]), rounds=60)


@pytest.mark.slow
def test_decoded_cache(tmp_path: Path) -> None:
    """Whatever happens to the files of a cache, the data that is loaded is that of its source."""
    small_mnist(tmp_path, train=20, test=10)
    first = load_source("mnist", tmp_path)
    images = first.train_images.copy()

    def load() -> None:
        source = load_source("mnist", tmp_path)
        np.testing.assert_array_equal(source.train_images, images)
        assert source.fingerprint == first.fingerprint and source.details == first.details

    fuzz(tmp_path / "mnist" / ".contnorm", ["mnist.json", ".mnist.checked.json"], load, rounds=60)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM"])
def test_picture_files(tmp_path: Path, kind: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, size=(12, 10, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a", format=kind)

    def load() -> None:
        assert read_picture(tmp_path / "a", 8)[0].shape == (3, 8, 8)

    fuzz(tmp_path, ["a"], load, rounds=150)
