"""Listings of COCOseq, NUS-WIDEseq and CSV tables."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from contnorm.bench.data import multilabel
from contnorm.bench.data.dataset import SPLITS
from contnorm.bench.data.multilabel import Listing, list_cocoseq, list_csv, list_nus_wideseq, published_stream
from contnorm.errors import UserError
from tests.datasets import DROPPED, small_coco, small_nus_wide, write_json

COCO, NUS = published_stream("cocoseq"), published_stream("nus-wideseq")


def coco(root: Path, ids: Path | None = None) -> Listing:
    return list_cocoseq(root, ids, root / "out")


def nus(root: Path) -> Listing:
    return list_nus_wideseq(root, None, root / "out")


def test_published_streams_are_consistent() -> None:
    for stream, groups, images in ((COCO, (18, 38, 14), 41438), (NUS, (10, 18, 21), 51114)):
        assert tuple(stream.class_groups.count(group) for group in ("majority", "moderate", "minority")) == groups
        assert stream.images == images and sorted(stream.task_order) == list(range(len(stream.task_order)))
        assert list(stream.class_names) == sorted(stream.class_names)
        assert len(stream.lists.files) == 2 * len(stream.task_order)


@pytest.mark.parametrize("layout", ["images", "2014", "2017"])
def test_cocoseq_listing_follows_published_tasks(tmp_path: Path, layout: str) -> None:
    listed = coco(small_coco(tmp_path, layout=layout))
    # Five pictures a task, three of them to learn from; tasks are learned in the order 0, 3, 1, 2.
    assert [picture.id for picture in listed.train] == [1, 2, 3, 16, 17, 18, 6, 7, 8, 11, 12, 13]
    assert [picture.task for picture in listed.train] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert [picture.id for picture in listed.test] == [4, 5, 19, 20, 9, 10, 14, 15]
    assert listed.task_names == ("0", "3", "1", "2") and listed.published_images == 41438
    assert not listed.as_published
    for picture in (*listed.train, *listed.test):
        assert picture.path is not None and int(picture.path.stem.split("_")[-1]) == picture.id


def test_coco_labels_are_categories_of_annotations(tmp_path: Path) -> None:
    listed = coco(small_coco(tmp_path))
    named: dict[int, set[str]] = {}
    for path in (tmp_path / "annotations").iterdir():
        raw = json.loads(path.read_text())
        names = {category["id"]: category["name"] for category in raw["categories"]}
        for entry in raw["annotations"]:
            named.setdefault(entry["image_id"], set()).add(names[entry["category_id"]])
    for picture in listed.train + listed.test:
        assert {COCO.class_names[column] for column in picture.labels} == named[int(picture.id)] - set(DROPPED)
    assert listed.train[0].labels == () and listed.count(listed.train)["unlabelled"] == 1, "kept, without a label"


def test_missing_picture_is_counted_by_task_and_class(tmp_path: Path) -> None:
    small_coco(tmp_path)
    (tmp_path / "images" / f"{17:012d}.jpg").unlink()
    listed = coco(tmp_path)
    gone = listed.pictures("train", missing=True)
    assert [picture.id for picture in gone] == [17] and len(listed.pictures("train")) == 11
    count = listed.count(gone)
    assert count["by_task"] == [0, 1, 0, 0] and sum(count["by_class"].values()) == len(gone[0].labels) > 0


def test_incomplete_folders_are_refused(tmp_path: Path) -> None:
    small_coco(tmp_path / "coco")
    with pytest.raises(UserError, match="has no train_task0_id_coco"):
        coco(tmp_path / "coco", tmp_path)
    (tmp_path / "coco" / "annotations" / "instances_val2014.json").unlink()
    with pytest.raises(UserError, match="has no annotations in instances_train2014"):
        coco(tmp_path / "coco")
    with pytest.raises(UserError, match=r"--coco .*has no annotations"):
        coco(tmp_path)
    small_nus_wide(tmp_path / "nus")
    (tmp_path / "nus" / "TrainTestLabels" / "Labels_sky_Test.txt").write_text("1\n0\n")
    with pytest.raises(UserError, match=r"Labels_sky_Test\.txt does not have one line for each image"):
        nus(tmp_path / "nus")
    (tmp_path / "nus" / "ImageList" / "TestImagelist.txt").unlink()
    with pytest.raises(UserError, match=r"has none of ImageList/TestImagelist\.txt"):
        nus(tmp_path / "nus")


def test_task_lists_are_compared_by_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_coco(tmp_path)
    hashes = {}
    for split in SPLITS:
        for task in range(4):
            text = (tmp_path / "ids" / f"{split}_task{task}.json").read_text()
            hashes[f"{split}_task{task}_id_coco.json"] = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    stream = replace(COCO, lists=replace(COCO.lists, files=hashes))
    monkeypatch.setattr(multilabel, "published_stream", lambda name: stream)
    assert coco(tmp_path).as_published
    (tmp_path / "ids" / "test_task0.json").write_text("[ 4,5 ]")
    assert coco(tmp_path).as_published
    (tmp_path / "ids" / "test_task0.json").write_text("[5, 4]")
    assert not coco(tmp_path).as_published


def test_nus_wideseq_listing_uses_positions(tmp_path: Path) -> None:
    listed = nus(small_nus_wide(tmp_path))
    assert [picture.id for picture in listed.train] == [6, 7, 2, 3, 0, 1, 10, 11, 8, 9, 4, 5]
    assert [picture.id for picture in listed.test] == [3, 1, 0, 5, 4, 2]
    assert [picture.task for picture in listed.test] == list(range(6)) and listed.published_images == 51114
    seventh = listed.train[1]
    assert seventh.path is not None and seventh.path == tmp_path / "image" / "word1" / "Train_0007.jpg"
    for column, kind in enumerate(NUS.class_names):
        lines = (tmp_path / "TrainTestLabels" / f"Labels_{kind}_Train.txt").read_text().split()
        assert (column in seventh.labels) == (lines[7] == "1")


@pytest.mark.parametrize("absolute", [False, True])
def test_nus_wide_alternative_folders(tmp_path: Path, absolute: bool) -> None:
    small_nus_wide(tmp_path)
    before = nus(tmp_path)
    (tmp_path / "Groundtruth").mkdir()
    (tmp_path / "TrainTestLabels").rename(tmp_path / "Groundtruth" / "TrainTestLabels")
    for path in list((tmp_path / "image").glob("*/*.jpg")):
        path.rename(tmp_path / "image" / path.name)
    (tmp_path / "image").rename(tmp_path / "images")
    if absolute:  # with the folders of their author
        table = tmp_path / "ImageList" / "TrainImagelist.txt"
        table.write_text("\n".join(f"C:\\ImageData\\{line}" for line in table.read_text().splitlines()))
    after = nus(tmp_path)
    assert not after.pictures("train", missing=True) and not after.pictures("test", missing=True)
    assert [picture.labels for picture in after.train] == [picture.labels for picture in before.train]
    (tmp_path / "images" / "Test_0004.jpg").unlink()
    assert [picture.id for picture in nus(tmp_path).pictures("test", missing=True)] == [4]


def own(tmp_path: Path, text: str, groups: str | None = None) -> Listing:
    (tmp_path / "a.jpg").write_bytes(b"")
    (tmp_path / "table.csv").write_text(text)
    if groups is not None:
        (tmp_path / "groups.csv").write_text(groups)
    return list_csv("mine", tmp_path / "table.csv", tmp_path, None if groups is None else tmp_path / "groups.csv")


def test_csv_with_labels_column(tmp_path: Path) -> None:
    text = 'image, split, task, labels\na.jpg,train,10,sea; sky\n"b,c.jpg",train,9,\n\na.jpg,test,9,sky;\n'
    listed = own(tmp_path, text)
    assert listed.class_names == ("sea", "sky") and listed.task_names == ("9", "10")
    assert [(picture.id, picture.task, picture.labels) for picture in listed.train] == [
        ("b,c.jpg", 0, ()),
        ("a.jpg", 1, (0, 1)),
    ]
    assert listed.train[0].path is None and listed.train[1].path == tmp_path / "a.jpg"
    assert listed.class_groups == ("minority", "minority") and listed.published_images is None


def test_csv_with_class_columns_and_groups(tmp_path: Path) -> None:
    text = "image,split,task,sky,sea\na.jpg,train,night,1,0\na.jpg,train,day,0,1\na.jpg,test,day,1,1\n"
    listed = own(tmp_path, text, "class,group\nsea,moderate\nsky,majority\n")
    assert listed.class_names == ("sky", "sea") and listed.task_names == ("night", "day")
    assert [picture.labels for picture in listed.train] == [(0,), (1,)] and listed.test[0].labels == (0, 1)
    assert listed.class_groups == ("majority", "moderate")
    with pytest.raises(UserError, match=r"unknown group of class 'sky' in .*'minor'\. Did you mean 'minority'"):
        own(tmp_path, text, "class,group\nsea,moderate\nsky,minor\n")


def test_csv_groups_count_train_pictures(tmp_path: Path) -> None:
    rows = [f"a.jpg,train,0,{int(i < 901)},{int(i < 200)}" for i in range(901)]
    rows += [f"a.jpg,test,0,1,{int(i < 900)}" for i in range(1000)]
    listed = own(tmp_path, "\n".join(["image,split,task,often,seldom", *rows]))
    assert listed.class_groups == ("majority", "moderate")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image,split,labels\na.jpg,train,sky\n", r"table\.csv: must have the columns image, split, task"),
        ("image,split,task,labels\n", "at least one row"),
        ("image,split,task\na.jpg,train,0\n", "has no labels"),
        ("image,split,task,sky\na.jpg,valid,0,1\n", "split is 'valid'"),
        ("image,split,task,sky\na.jpg,train,0,x\n", "must have 0 and 1 only: sky"),
        # Without its last cell, a picture would silently count as one without labels.
        ("image,split,task,labels\na.jpg,test,0,sea\na.jpg,train,0\n", "has 3 cells, and the first line has 4"),
    ],
)
def test_invalid_csv_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        own(tmp_path, text)


def test_csv_unicode_forms_are_one_class(tmp_path: Path) -> None:
    listed = own(tmp_path, "image,split,task,labels\na.jpg,train,0,caf\u00e9\na.jpg,test,0,cafe\u0301\n")
    assert listed.class_names == ("caf\u00e9",)


def test_task_lists_are_downloaded_if_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_coco(tmp_path / "coco", lists="elsewhere")
    addresses = []

    def download(lists: object, root: Path, base: str | None) -> None:
        addresses.append(base)
        (tmp_path / "coco" / "elsewhere").rename(root / "ids")

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(multilabel, "fetch", download)
    assert len(list_cocoseq(tmp_path / "coco", None, tmp_path / "out", "mirror").train) == 12
    assert addresses == ["mirror"]
    write_json(tmp_path / "coco" / "ids" / "x.json", [])
