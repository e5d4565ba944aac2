"""Folder layouts of the page of data sets: data that is laid out as the page shows is accepted."""

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tools.reference.__main__ import FOLDER
from tools.reference.datasets import TREES

from contnorm import bench
from contnorm.bench.data.formats import MINI_WNIDS
from contnorm.bench.data.multilabel import build, list_csv
from contnorm.bench.data.registry import SOURCES, find_layout, load_source
from contnorm.cli.main import load_command
from tests.datasets import small_coco, small_nus_wide, write_mini_lists

PAGE = (FOLDER / "datasets.md").read_text(encoding="utf-8")


def trees(heading: str) -> list[list[str]]:
    """Paths of each tree in a section of the page."""
    section = re.split(r"^##+ ", PAGE, flags=re.MULTILINE)
    text = next(part for part in section if part.startswith(f"{heading}\n"))
    blocks = "\n\n".join(re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    return [paths(block.strip("\n").splitlines()) for block in blocks.split("\n\n") if block.strip()]


def paths(lines: Iterable[str]) -> list[str]:
    found, folders = [], []  # type: list[str], list[str]
    for line in lines:
        name = line.partition("#")[0].rstrip()
        depth = (len(name) - len(name.lstrip())) // 2
        folders = folders[:depth]
        if name.endswith("/"):
            folders.append(name.strip().removesuffix("/"))
        else:
            found.append("/".join([*folders, name.strip()]))
    return found


def write_picture(path: Path, level: int, kind: str = "JPEG") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (level % 256, 0, 0)).save(path, format=kind)


@pytest.mark.parametrize("name", [name for name, spec in SOURCES.items() if spec.layouts and name not in TREES])
def test_files_of_arrays_are_found(name: str, tmp_path: Path) -> None:
    shown = trees(name)
    assert len(shown) == len(SOURCES[name].layouts)
    for number, layout in enumerate(shown):
        root = tmp_path / str(number)
        for file in layout:
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).touch()
        match = find_layout(SOURCES[name], root)
        assert match is not None and sorted(match[1]) == sorted(root / file for file in layout)
        (root / layout[0]).unlink()
        assert find_layout(SOURCES[name], root) is None


@pytest.mark.parametrize("tree", [0, 1])
@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.slow
def test_mini_imagenet_is_accepted(tree: int, lists: bool, tmp_path: Path) -> None:
    picture, *optional = trees("mini-imagenet")[tree]
    assert len(optional) == 4
    for label, wnid in enumerate(MINI_WNIDS):
        for number in range(3):
            name = f"{number:08d}" if "<wnid><name>" in picture else f"{wnid}{number:08d}"
            write_picture(tmp_path / picture.replace("<wnid>", wnid).replace("<name>", name), label)
    if lists:
        write_mini_lists(tmp_path / "mini-imagenet", 3, {(label, 0) for label in range(100)})
        assert all((tmp_path / file).is_file() for file in optional)
    source = load_source("mini-imagenet", tmp_path, allow_missing=True)
    assert source.train_images.shape == (200, 3, 84, 84) and len(source.test_images) == 100
    assert source.details["split"] == ("published lists" if lists else "last sixth of each class by name")


@pytest.mark.slow
def test_tiny_imagenet_is_accepted(tmp_path: Path) -> None:
    (names, train, annotations, test) = trees("tiny-imagenet")[0]
    wnids = [f"n{i:08d}" for i in range(200)]
    for label, wnid in enumerate(wnids):
        write_picture(tmp_path / train.replace("<wnid>", wnid).replace("<name>", f"{wnid}_0"), label)
        write_picture(tmp_path / test.replace("<name>", f"val_{label}"), label)
    (tmp_path / names).write_text("\n".join(wnids))
    (tmp_path / annotations).write_text("".join(f"val_{i}.JPEG\t{wnid}\t0\t0\t7\t7\n" for i, wnid in enumerate(wnids)))
    source = load_source("tiny-imagenet", tmp_path, allow_missing=True)
    assert np.array_equal(source.train_labels, range(200)) and np.array_equal(source.test_labels, range(200))


@pytest.mark.parametrize("tree", [0, 1])
def test_folder_of_images_is_accepted(tree: int, tmp_path: Path) -> None:
    for file in trees("Folder of images")[tree]:
        for label, name in enumerate(("daisy", "rose")):
            for number in range(5):
                path = file.replace("<class>", name).replace("<name>", str(number))
                write_picture(tmp_path / path, 50 * label + number, "PNG")
    stream = bench.Stream.from_folder(tmp_path / "flowers", tasks=2, size=8)
    assert len(stream.tasks) == 2 and len(stream.tasks[0].test) == (5 if tree == 0 else 1)


def test_table_and_images_are_accepted(tmp_path: Path) -> None:
    table, image = trees("Several labels per image")[0]
    rows = ["image,split,task,labels"]
    for number, split in enumerate(("train", "test")):
        file = image.replace("<folder>", "north").replace("<name>", str(number))
        write_picture(tmp_path / file, number)
        rows.append(f"{Path(file).relative_to('photos')},{split},0,sea;sky")
    (tmp_path / table).write_text("\n".join(rows))
    manifest = build(list_csv("beaches", tmp_path / table, tmp_path / "photos"), tmp_path / "beaches", side=8)
    assert manifest["about"]["complete"] and manifest["class_names"] == ["sea", "sky"]


@pytest.mark.parametrize(("name", "option"), [("cocoseq", "--coco"), ("nus-wideseq", "--nus")])
@pytest.mark.slow
def test_folder_of_multi_label_stream_is_accepted(name: str, option: str, tmp_path: Path) -> None:
    original = (small_coco if name == "cocoseq" else small_nus_wide)(tmp_path / "original")
    files = [str(path.relative_to(original)) for path in original.rglob("*") if path.is_file()]
    for shown in trees(name)[0]:
        pattern = re.sub("<.*?>", "[^/]+", shown.replace(".", r"\."))
        assert any(re.fullmatch(pattern, file) for file in files), shown
    root = tmp_path / "data"
    load_command("data").main([name, option, str(original), "--data-root", str(root)], standalone_mode=False)
    assert load_source(name, root).classes == SOURCES[name].classes
