"""Listings of COCOseq, NUS-WIDEseq and CSV data sets; invalid files are refused in one line with the file name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from contnorm.bench.data.dataset import SPLITS, DatasetListing
from contnorm.bench.data.multilabel_listings import (
    find_instances,
    list_cocoseq,
    list_csv,
    list_nus_wideseq,
    read_nus_wide,
)
from contnorm.bench.data.published import find_lists, published_stream, read_lists
from contnorm.errors import UserError
from tests.datasets import DROPPED, small_coco, small_nus_wide, write_json

COCO, NUS = published_stream("cocoseq"), published_stream("nus-wideseq")


def coco(root: Path) -> DatasetListing:
    return list_cocoseq(root, find_instances(root), read_lists(COCO, root / "ids"))


def nus(root: Path) -> DatasetListing:
    return list_nus_wideseq(root, read_nus_wide(root), read_lists(NUS, root / "ids"))


@pytest.mark.parametrize("layout", ["images", "2014", "2017"])
def test_cocoseq_listing_follows_published_tasks(tmp_path: Path, layout: str) -> None:
    listed = coco(small_coco(tmp_path, layout=layout))
    # Five pictures a task, three of them to learn from; tasks are learned in the order 0, 3, 1, 2.
    assert [picture.id for picture in listed.train] == [1, 2, 3, 16, 17, 18, 6, 7, 8, 11, 12, 13]
    assert [picture.task for picture in listed.train] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert [picture.id for picture in listed.test] == [4, 5, 19, 20, 9, 10, 14, 15]
    assert listed.task_names == ("0", "3", "1", "2") and listed.published_images == 41438
    assert not listed.as_published
    for split in SPLITS:
        assert not listed.missing(split)
        for picture in listed.pictures(split):
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
    assert listed.train[0].labels == () and listed.count(listed.train).unlabelled == 1, "kept, without a label"


def test_missing_picture_is_counted_by_task_and_class(tmp_path: Path) -> None:
    small_coco(tmp_path)
    (tmp_path / "images" / f"{17:012d}.jpg").unlink()
    listed = coco(tmp_path)
    gone = listed.missing("train")
    assert [picture.id for picture in gone] == [17]
    count = listed.count(gone)
    assert count.by_task == (0, 1, 0, 0) and sum(count.by_class) == len(gone[0].labels) > 0


def spoil_json(path: str) -> Callable[[Path], None]:
    return lambda root: (root / path).write_text((root / path).read_text()[:-20])  # type: ignore[func-returns-value]


def rewrite(path: str, content: object) -> Callable[[Path], None]:
    return lambda root: write_json(root / path, content)


def remove(*paths: str) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        for path in paths:
            (root / path).unlink()

    return spoil


def refer(**to: object) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        raw = json.loads((root / INSTANCES).read_text())
        raw["annotations"][0].update(to)
        write_json(root / INSTANCES, raw)

    return spoil


INSTANCES = "annotations/instances_train2014.json"
BOTH = (INSTANCES, "annotations/instances_val2014.json")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove(*BOTH), r"has no annotations\. Add instances\*\.json or annotations/instances\*\.json"),
        (spoil_json(INSTANCES), r"instances_train2014\.json: is not valid JSON \(.*\)\. Download it again"),
        (
            rewrite(INSTANCES, [1]),
            r"instances_train2014\.json: is not an instances file of COCO: .*images, annotations, categories",
        ),
        (
            refer(image_id=999),
            r"instances_train2014\.json: is not an instances file of COCO: 999, .*missing",
        ),
        (refer(image_id=[1]), r"instances_train2014\.json: .* wrong type .*list"),
        (
            remove(INSTANCES),
            r"train_task0\.json: 1 of its 3 pictures have no annotations, such as 2\. Searched inst",
        ),
        (remove("ids/test_task2.json"), r"ids: has no test list of task 2\. Add test_task2_id_coco\.json or"),
        (spoil_json("ids/train_task1.json"), r"train_task1\.json: is not valid JSON"),
        (rewrite("ids/train_task1.json", ["a"]), r"train_task1\.json: must be a list of integers"),
        (
            rewrite("ids/train_task1.json", [999]),
            r"train_task1\.json: 1 of its 1 pictures have no annotations, such as 999",
        ),
    ],
    ids=[
        "none",
        "truncated",
        "other",
        "no such picture",
        "no number",
        "half",
        "no list",
        "truncated list",
        "words",
        "unknown",
    ],
)
def test_invalid_coco_files_are_refused(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(small_coco(tmp_path))
    with pytest.raises(UserError, match=message) as caught:
        coco(tmp_path)
    assert "\n" not in str(caught.value)


def test_other_coco_categories_are_refused(tmp_path: Path) -> None:
    small_coco(tmp_path)
    for path in (tmp_path / "images").iterdir():
        path.rename(path.with_suffix(".bmp"))
    with pytest.raises(UserError, match=r"has no pictures\..*images, train2014, val2014"):
        coco(tmp_path)
    raw = json.loads((tmp_path / INSTANCES).read_text())
    raw["categories"] = [category for category in raw["categories"] if category["name"] != "zebra"]
    write_json(tmp_path / INSTANCES, raw)
    with pytest.raises(UserError, match=r"1 of the 70 classes are not among its categories, such as 'zebra'"):
        coco(tmp_path)
    with pytest.raises(UserError, match=r"--coco .*nowhere: is not a folder"):
        find_instances(tmp_path / "nowhere")


def test_id_lists_are_compared_by_numbers(tmp_path: Path) -> None:
    """With a stream whose published lists are those of the small set."""
    small_coco(tmp_path)
    lists = read_lists(COCO, tmp_path / "ids")
    assert not lists.as_published
    hashes = dict(COCO.lists.files)
    for split in SPLITS:
        for task, numbers in enumerate(lists.ids[split]):
            text = "[" + ", ".join(map(str, numbers)) + "]"
            hashes[f"{split}_task{task}_id_coco.json"] = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    stream = replace(COCO, lists=replace(COCO.lists, files=hashes))
    assert read_lists(stream, tmp_path / "ids").as_published
    (tmp_path / "ids" / "test_task0.json").write_text("[ 4,5 ]")
    assert read_lists(stream, tmp_path / "ids").as_published
    (tmp_path / "ids" / "test_task0.json").write_text("[5, 4]")
    assert not read_lists(stream, tmp_path / "ids").as_published


def test_ids_option_precedes_ids_folder(tmp_path: Path) -> None:
    small_coco(tmp_path / "coco")
    (tmp_path / "given").mkdir()
    assert find_lists(COCO, tmp_path / "given", tmp_path / "coco", tmp_path) == tmp_path / "given"
    assert find_lists(COCO, None, tmp_path / "coco", tmp_path) == tmp_path / "coco" / "ids"
    with pytest.raises(UserError, match=r"--ids .*nowhere: is not a folder\..*train_task0_id_coco"):
        find_lists(COCO, tmp_path / "nowhere", tmp_path / "coco", tmp_path)


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


def test_nus_wide_alternative_folders(tmp_path: Path) -> None:
    small_nus_wide(tmp_path)
    before = nus(tmp_path)
    (tmp_path / "Groundtruth").mkdir()
    (tmp_path / "TrainTestLabels").rename(tmp_path / "Groundtruth" / "TrainTestLabels")
    for path in list((tmp_path / "image").glob("*/*.jpg")):
        path.rename(tmp_path / "image" / path.name)
    (tmp_path / "image").rename(tmp_path / "images")
    after = nus(tmp_path)
    assert not after.missing("train") and not after.missing("test")
    assert [picture.labels for picture in after.train] == [picture.labels for picture in before.train]
    (tmp_path / "images" / "Test_0004.jpg").unlink()
    assert [picture.id for picture in nus(tmp_path).missing("test")] == [4]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove("ImageList/TestImagelist.txt"), r"has no image list\. .*ImageList/TestImagelist\.txt"),
        (
            remove("TrainTestLabels/Labels_sky_Test.txt"),
            r"has no labels\. .*TrainTestLabels/Labels_sky_Test\.txt",
        ),
        (
            spoil_json("TrainTestLabels/Labels_sky_Test.txt"),
            r"Labels_sky_Test\.txt: has 10 labels for the 20 images of",
        ),
        (
            rewrite("ids/test_task0_id_nuswide.json", [20]),
            r"test_task0_id_nuswide\.json: 1 of its numbers, such as 20",
        ),
    ],
    ids=["no list", "no labels", "short labels", "outside"],
)
def test_invalid_nus_wide_files_are_refused(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(small_nus_wide(tmp_path))
    with pytest.raises(UserError, match=message):
        nus(tmp_path)


@pytest.mark.parametrize("name", ["..\\..\\secret.jpg", "word0/../../../secret.jpg", "\x1b[31msecret.jpg"])
def test_nus_wide_list_with_outside_paths_is_refused(tmp_path: Path, name: str) -> None:
    small_nus_wide(tmp_path / "nus")
    Image.new("RGB", (9, 9)).save(tmp_path / "secret.jpg")
    path = tmp_path / "nus" / "ImageList" / "TrainImagelist.txt"
    path.write_text("\n".join([name, *path.read_text().splitlines()[1:]]))
    with pytest.raises(UserError, match=r"secret\.jpg.* must not contain '\.\.'"):
        nus(tmp_path / "nus")


def test_absolute_paths_in_nus_wide_list_use_the_file_name(tmp_path: Path) -> None:
    small_nus_wide(tmp_path)
    for file in list((tmp_path / "image").glob("*/*.jpg")):
        file.rename(tmp_path / "image" / file.name)
    path = tmp_path / "ImageList" / "TrainImagelist.txt"
    path.write_text("\n".join(f"C:\\ImageData\\{line}" for line in path.read_text().splitlines()))
    listed = nus(tmp_path)
    assert {picture.path.parent for picture in listed.train if picture.path} == {tmp_path / "image"}
    assert not listed.missing("train")


def test_links_in_picture_folder_are_followed(tmp_path: Path) -> None:
    """They were made by the owner of the folder, for example to pictures on another disk."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b.jpg").write_bytes(b"")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "more").symlink_to(tmp_path / "other")
    (tmp_path / "table.csv").write_text("image,split,task,sky\nmore/b.jpg,train,0,1\n")
    listed = list_csv("mine", tmp_path / "table.csv", tmp_path / "images")
    assert listed.train[0].path == tmp_path / "images" / "more" / "b.jpg"


def own(tmp_path: Path, text: str, groups: str | None = None) -> DatasetListing:
    (tmp_path / "a.jpg").write_bytes(b"")
    (tmp_path / "table.csv").write_text(text)
    if groups is not None:
        (tmp_path / "groups.csv").write_text(groups)
    return list_csv("mine", tmp_path / "table.csv", tmp_path, None if groups is None else tmp_path / "groups.csv")


def test_csv_with_labels_column(tmp_path: Path) -> None:
    listed = own(tmp_path, 'image,split,task,labels\na.jpg,train,10,sea; sky\n"b,c.jpg",train,9,\na.jpg,test,9,sky;\n')
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


def test_csv_spaces_around_cells_are_ignored(tmp_path: Path) -> None:
    listed = own(tmp_path, "image, split, task, sky\na.jpg, train, 0, 1\na.jpg, test, 0, 0\n")
    assert listed.class_names == ("sky",) and listed.train[0].labels == (0,) and listed.test[0].labels == ()


def test_csv_long_task_numbers_are_names(tmp_path: Path) -> None:
    long = "9" * 5000  # more digits than Python converts to a number
    listed = own(tmp_path, f"image,split,task,sky\na.jpg,train,{long},1\nb.jpg,train,1,1\n")
    assert listed.task_names == (long, "1")


def test_csv_groups_count_train_pictures(tmp_path: Path) -> None:
    rows = [f"a.jpg,train,0,{int(i < 901)},{int(i < 200)}" for i in range(901)]
    rows += [f"a.jpg,test,0,1,{int(i < 900)}" for i in range(1000)]
    listed = own(tmp_path, "\n".join(["image,split,task,often,seldom", *rows]))
    assert listed.class_groups == ("majority", "moderate")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "image,split,labels\n",
            r"table\.csv: has no column 'task'.*image,split,task,labels",
        ),
        ("image,split,task\na.jpg,train,0\n", r"table\.csv: has no labels\."),
        ("image,split,task,labels,sky\n", r"has a column 'labels' and others"),
        ("image,split,task,sky\na.jpg,valid,0,1\n", r"line 2: split is 'valid'\. Use train or test"),
        ("image,split,task,sky\na.jpg,train,0,1\na.jpg,train,0,x\n", r"line 3: sky is 'x'\. Use 0 or 1"),
        ("image,split,task,sky\na.jpg,train,,1\n", r"line 2: has no task"),
        ("image,split,task,sky\na.jpg,train,0,1,1\n", r"line 2: has more cells than the first line: '1'"),
        ("image,split,task,sky\n\n\na.jpg,train,0,x\n", r"line 4: sky is 'x'"),
        ('image,split,task,sky\n"a\nb.jpg",train,0,1\na.jpg,train,0,x\n', r"line 3: 'a\\nb\.jpg' has a control"),
        ("image,split,task,sky\na.jpg,train,\x1b[31m,1\n", r"line 2: .*x1b.* has a control character"),
        ("image,split,task,s\vky\na.jpg,train,0,1\n", r"column name .* has a control character"),
        ("image,split,task,sky\n../a.jpg,train,0,1\n", r"line 2: image is '\.\./a\.jpg'\. Use a path below"),
        ("image,split,task,sky\nb/../../a.jpg,train,0,1\n", r"line 2: image is .*Use a path below"),
        ("image,split,task,sky\n/etc/a.jpg,train,0,1\n", r"line 2: image is '/etc/a\.jpg'"),
        ("image,split,task,sky,sea,sky\na.jpg,train,0,1,0,0\n", r"has the column 'sky' more than once"),
        (",image,split,task,sky\n0,a.jpg,train,0,1\n", r"column 1 of 5 has no name .*index=False"),
        ("image,split,task,labels,\na.jpg,train,0,sky,\n", r"column 5 of 5 has no name"),
        ("image,split,task,labels\n", r"table\.csv: has no rows"),
        (
            f"image,split,task,sky\n{'a' * 300}.jpg,train,0,1\n",
            r"aaa\.jpg: .*\(File name too long\)\. Check line 2 of .*table\.csv",
        ),
    ],
    ids=[
        "no task",
        "no labels",
        "both",
        "split",
        "cell",
        "empty",
        "long",
        "empty lines",
        "line of two",
        "escape",
        "column escape",
        "parent folder",
        "inner parent folder",
        "absolute",
        "column again",
        "index",
        "comma at the end",
        "no rows",
        "name",
    ],
)
def test_invalid_csv_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        own(tmp_path, text)


@pytest.mark.parametrize("row", ["a.jpg,train,0", "a.jpg,train", "a.jpg"])
def test_csv_truncated_row_is_refused(tmp_path: Path, row: str) -> None:
    """Without its last cell, a picture would silently count as one without labels."""
    with pytest.raises(UserError, match=r"table\.csv, line 3: has no cell for the column"):
        own(tmp_path, f"image,split,task,labels\na.jpg,test,0,sea\n{row}\n")


def test_csv_tasks_are_ordered_by_signed_number(tmp_path: Path) -> None:
    rows = "".join(f"a.jpg,train,{task},sea\n" for task in ("2", "-1", "+1", "-10"))
    assert own(tmp_path, f"image,split,task,labels\n{rows}").task_names == ("-10", "-1", "+1", "2")


def test_csv_task_number_with_two_spellings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"table\.csv: task '1' is also written as '01'"):
        own(tmp_path, "image,split,task,labels\na.jpg,train,1,sea\na.jpg,test,01,sea\n")


def test_csv_unicode_forms_are_one_class(tmp_path: Path) -> None:
    listed = own(tmp_path, "image,split,task,labels\na.jpg,train,0,caf\u00e9\na.jpg,test,0,cafe\u0301\n")
    assert listed.class_names == ("caf\u00e9",)


def test_invalid_csv_groups_and_folders_are_refused(tmp_path: Path) -> None:
    text = "image,split,task,sky\na.jpg,train,0,1\na.jpg,test,0,1\n"
    with pytest.raises(
        UserError, match=r"unknown group of class 'sky' in .*groups\.csv: 'minor'\. Did you mean 'minority'"
    ):
        own(tmp_path, text, "class,group\nsky,minor\n")
    with pytest.raises(UserError, match=r"groups\.csv: has no group of class 'sky'"):
        own(tmp_path, text, "class,group\nsea,minority\n")
    with pytest.raises(UserError, match=r"groups\.csv, line 3: class 'sky' .*'minority'.*'majority'"):
        own(tmp_path, text, "class,group\nsky,majority\nsky,minority\n")
    with pytest.raises(UserError, match=r"--images .*nowhere: is not a folder"):
        list_csv("mine", tmp_path / "table.csv", tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"none\.csv: cannot be read"):
        list_csv("mine", tmp_path / "none.csv", tmp_path)
