"""The `data` command: list data sets, show one, add one, and build multi-label ones."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from contnorm import bench
from contnorm.bench.data.registry import SOURCES, load_source
from contnorm.cli.main import main
from tests.datasets import small_cifar100, small_coco, small_mini_imagenet, small_mnist


@pytest.fixture
def contnorm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """Call a command with a temporary data root; returns its output, or its error line if it must fail."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object, fails: bool = False) -> str:
        monkeypatch.setattr(sys, "argv", ["contnorm", *map(str, arguments), "--data-root", str(tmp_path / "sets")])
        (tmp_path / "sets").mkdir(exist_ok=True)
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert ended.value.code == (2 if fails else 0), printed.err
        return printed.err if fails else printed.out

    return call


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "blobs.npz", x=rng.normal(size=(80, 6)), y=np.arange(80) % 4)
    return tmp_path / "blobs.npz"


def test_list_has_folder_or_instructions_per_data_set(contnorm: Callable[..., str], tmp_path: Path) -> None:
    small_mini_imagenet(small_cifar100(small_mnist(tmp_path / "sets")))
    first, head, *rows = contnorm("data").splitlines()
    assert f"under {tmp_path / 'sets'} (" in first and "CONTNORM_DATA" in first and head.startswith("data set")
    printed = {row.split()[0]: row.split(maxsplit=1)[1].strip() for row in rows}
    assert list(printed) == list(SOURCES)
    assert printed["mnist"] == "mnist" and printed["cifar100"] == "cifar-100-binary"
    assert printed["digits"] == "included"
    assert printed["cifar10"].split(maxsplit=1) == ["-", "contnorm data cifar10 --fetch"]
    assert printed["cocoseq"].endswith("contnorm data cocoseq --coco DIR")
    assert printed["mini-imagenet"] == "mini-imagenet"


def test_add_show_and_run(contnorm: Callable[..., str], npz: Path, tmp_path: Path) -> None:
    added = contnorm("data", "add", "blobs", "--npz", npz, "--tasks", "0,3;1", "--test-share", "0.25")
    assert (
        "60 training and 20 test samples of shape 6" in added and "task 0: 0, 3" in added and "in no task: 2" in added
    )
    assert f"run it: contnorm run --stream blobs --data-root {tmp_path / 'sets'}" in added.splitlines()
    assert "blobs (80 samples)" in contnorm("data")
    assert "task 1: 1" in contnorm("data", "blobs")
    listing = bench.available(tmp_path / "sets")["streams"]["blobs"]
    assert listing == ("2 tasks, 80 samples of 4 classes", str(tmp_path / "sets"))
    run = contnorm("run", "--stream", "blobs", "--norm", "bn", "--set", "train.max_steps=3", "--lanes", "1")
    assert "blobs er bn seed 0" in run
    assert "Did you mean 'blobs'" in contnorm("run", "--stream", "blob", fails=True)


def test_build_of_cocoseq_is_listed_and_loaded(contnorm: Callable[..., str], tmp_path: Path) -> None:
    small_coco(tmp_path / "coco")
    printed = contnorm("data", "cocoseq", "--coco", tmp_path / "coco").splitlines()
    assert printed[0].startswith(
        f"{tmp_path}/sets/cocoseq: cocoseq, 20 pictures of 256x256 (12 train, 8 test), 4 tasks, 70"
    )
    assert printed[1:] == [
        "a part of the published stream: 20 of 41,438",
        "train by task, in the order of training: 0: 3, 3: 3, 1: 3, 2: 3",
        "test by task, in the order of training: 0: 2, 3: 2, 1: 2, 2: 2",
    ]
    source = bench.load_stream("cocoseq", root=tmp_path / "sets").source
    assert source.train_images.shape == (12, 3, 256, 256) and source.classes == 70
    groups = dict(zip(source.class_names, source.class_groups, strict=True))  # type: ignore[attr-defined]
    assert groups["zebra"] == "majority", "as published, not as counted here"
    assert "cocoseq (20 of 41,438 pictures)" in contnorm("data")
    assert f"folder: {tmp_path}/sets/cocoseq" in contnorm("data", "cocoseq").splitlines()


def test_build_with_missing_pictures_is_refused_or_recorded(contnorm: Callable[..., str], tmp_path: Path) -> None:
    small_coco(tmp_path / "coco")
    for number in (6, 17):
        (tmp_path / "coco" / "images" / f"{number:012d}.jpg").unlink()
    how = ("data", "cocoseq", "--coco", tmp_path / "coco", "--size", 224)
    assert "cocoseq: 2 of 20 pictures are missing, such as 17, 6." in contnorm(*how, fails=True)
    assert "missing pictures: 2 train, 0 test; missing_pictures in dataset.json" in contnorm(*how, "--allow-missing")
    assert "missing pictures: 2 train" in contnorm("data", "cocoseq")
    assert "cocoseq (18 of 41,438 pictures, 2 missing)" in contnorm("data")


def test_build_from_csv_or_folder(contnorm: Callable[..., str], tmp_path: Path) -> None:
    small_coco(tmp_path / "coco")
    rows = ["image,split,task,labels", f"{1:012d}.jpg,train,0,sea", f"{2:012d}.jpg,test,0,sea;sky"]
    table = tmp_path / "coco" / "images" / "labels.csv"
    table.write_text("\n".join(rows))
    contnorm("data", "one", "--csv", table, "--size", 32)
    contnorm("data", "two", "--images", table.parent, "--size", 32)
    one, two = (load_source(name, tmp_path / "sets") for name in ("one", "two"))
    assert one.fingerprint == two.fingerprint and one.name == "one"
    assert [line.split()[0] for line in contnorm("data").splitlines()][-2:] == ["one", "two"]
    stream = bench.load_stream("one", root=tmp_path / "sets")  # the name of its data set is that of a stream
    assert stream.settings == {"name": "multi-label", "source": "one"} and stream.num_classes == 2
    spoilt = table.parent / f"{2:012d}.jpg"
    spoilt.write_bytes(b"no picture")
    assert f"{spoilt}: cannot be read" in contnorm("data", "three", "--csv", table, "--size", 16, fails=True)
    assert not (tmp_path / "sets" / "three").exists()


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (("cocoseq", "--size", "300", "--coco", "."), "size=300: must be 256 or 224"),
        (("nus-wideseq", "--coco", "."), "nus-wideseq from one of NUS-WIDE"),
        (("mnist", "--csv", "x"), "name='mnist': is a stream or a data set"),
        (("../x", "--csv", "x"), r"name='../x': use letters"),
        (("mnists",), "Did you mean 'mnist'"),
        (("add",), "name='': use letters"),
        (("add", "blobs"), "give a folder of images or an .npz file"),
        (("add", "blobs", "--npz", "missing.npz", "--tasks", "2"), "missing.npz: can't be read"),
        (("mnist", "--npz", "x.npz"), "--npz and --tasks are for `contnorm data add NAME`"),
        (("cifar", "--fetch"), "unknown data set to download 'cifar'"),
    ],
)
def test_invalid_options_are_one_line_errors(
    contnorm: Callable[..., str], tmp_path: Path, arguments: tuple[str, ...], printed: str
) -> None:
    error = contnorm("data", *arguments, fails=True)
    assert printed in error and error.count("\n") == 1 and not list((tmp_path / "sets").iterdir())
