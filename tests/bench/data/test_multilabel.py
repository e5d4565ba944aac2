"""Multi-label data sets: listings of COCOseq, NUS-WIDEseq and CSV tables, and their builds."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from contnorm.bench.data import multilabel
from contnorm.bench.data.dataset import MANIFEST, SPLITS, MultiLabelSource
from contnorm.bench.data.formats import read_picture
from contnorm.bench.data.multilabel import (
    Listing,
    Picture,
    build,
    list_cocoseq,
    list_csv,
    list_nus_wideseq,
    published_stream,
)
from contnorm.bench.data.registry import load_source
from contnorm.errors import UserError
from tests.datasets import DROPPED, real_data, small_coco, small_nus_wide

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
    with pytest.raises(UserError, match="one of the groups majority, moderate, minority"):
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
        ("image,split,task,labels\na.jpg,test,0,sea\na.jpg,train,0\n", "has not as many cells as the first line"),
    ],
)
def test_invalid_csv_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        own(tmp_path, text)


# Builds


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


def load(out: Path) -> MultiLabelSource:
    source = load_source(str(out), Path("nowhere"))
    assert isinstance(source, MultiLabelSource)
    return source


def load_built(listed: Listing, out: Path) -> MultiLabelSource:
    build(listed, out, SIDE)
    return load(out)


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


def test_fingerprint_is_that_of_pixels_and_labels(tmp_path: Path) -> None:
    listed = few(tmp_path / "pictures", 70)
    source = load_built(listed, tmp_path / "1")
    digest = hashlib.sha256(json.dumps([["a", "b"], ["minority", "minority"]]).encode())
    for images, labels, task in (
        (source.train_images, source.train_labels, source.train_task),
        (source.test_images, source.test_labels, source.test_task),
    ):
        for start in range(0, len(images), 64):
            digest.update(hashlib.sha256(images[start : start + 64].tobytes()).hexdigest().encode())
        digest.update(labels.tobytes() + task.tobytes())
    assert source.fingerprint == digest.hexdigest()[:16]
    relabelled = replace(listed, train=(replace(listed.train[0], labels=(0, 1)), *listed.train[1:]))
    assert load_built(relabelled, tmp_path / "2").fingerprint != source.fingerprint


def test_repeated_build_changes_nothing(tmp_path: Path) -> None:
    listed = few(tmp_path / "pictures")
    first = build(listed, tmp_path / "few", SIDE)
    written = (tmp_path / "few" / MANIFEST).stat().st_mtime_ns
    assert build(listed, tmp_path / "few", SIDE) == first
    assert (tmp_path / "few" / MANIFEST).stat().st_mtime_ns == written
    for other, side in ((listed, 16), (replace(listed, test=listed.test[:2]), SIDE)):
        with pytest.raises(UserError, match=r"few: contains another data set\. Delete it, .*out="):
            build(other, tmp_path / "few", side)


def test_stopped_or_failed_build_leaves_nothing(tmp_path: Path) -> None:
    listed = few(tmp_path / "pictures")

    def stop(_: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(listed, tmp_path / "few", SIDE, progress=stop)
    for number in (0, 5):
        (tmp_path / "pictures" / f"{number}.png").write_bytes(b"not a picture at all")
    with pytest.raises(UserError, match=r"0\.png: cannot be read .*5\.png: cannot be read .*Replace or remove them"):
        build(listed, tmp_path / "few", SIDE)
    assert [path.name for path in tmp_path.iterdir()] == ["pictures"]


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
