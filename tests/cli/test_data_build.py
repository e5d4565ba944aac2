"""`contnorm data` builds multi-label data sets: printed text, and one-line errors with exit code 2."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from contnorm.bench.data.decoding import read_picture

from contnorm.bench.data.dataset import MultiLabelSource
from contnorm.bench.data.multilabel_build import build_progress
from contnorm.bench.data.registry import load_source
from contnorm.cli.main import main
from tests.datasets import real_data, small_coco, small_nus_wide, write_json


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """Call the command with a temporary data root; returns its output, or its error line if it must fail."""

    def call(*arguments: object, fails: bool = False) -> str:
        typed = ["contnorm", "data", *map(str, arguments), "--data-root", str(tmp_path / "sets")]
        monkeypatch.setattr(sys, "argv", typed)
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert ended.value.code == (2 if fails else 0), printed.err
        assert printed.err.count("\n") == fails
        return printed.err if fails else printed.out

    return call


def test_build_of_cocoseq_is_listed_and_loaded(data: Callable[..., str], tmp_path: Path) -> None:
    small_coco(tmp_path / "coco")
    printed = data("cocoseq", "--coco", tmp_path / "coco", "--jobs", 1).splitlines()
    assert printed[0].startswith(
        f"{tmp_path}/sets/cocoseq: cocoseq, 20 pictures of 256x256 (12 train, 8 test), 4 tasks, 70"
    )
    assert printed[1:] == [
        "a part of the published stream: 20 of 41,438",
        "train by task, in the order of training: 0: 3, 3: 3, 1: 3, 2: 3",
        "test by task, in the order of training: 0: 2, 3: 2, 1: 2, 2: 2",
        "pictures without a label: 1",
    ]
    source = load_source("cocoseq", tmp_path / "sets")
    assert isinstance(source, MultiLabelSource) and source.train_images.shape == (12, 3, 256, 256)
    assert source.class_groups[source.class_names.index("zebra")] == "majority", "as published, not as counted here"
    assert source.published_images == 41438 and source.tasks == 4 and source.classes == 70
    assert set(np.unique(source.train_labels)) == {0, 1} and not source.train_labels[0].any()
    row = next(line for line in data().splitlines() if line.startswith("cocoseq"))
    assert row.split(maxsplit=1)[1].strip() == "cocoseq (20 of 41,438 pictures)"
    assert f"folder: {tmp_path}/sets/cocoseq" in data("cocoseq").splitlines()


def test_build_with_missing_pictures_is_refused_or_recorded(data: Callable[..., str], tmp_path: Path) -> None:
    small_coco(tmp_path / "coco")
    for number in (6, 17):
        (tmp_path / "coco" / "images" / f"{number:012d}.jpg").unlink()
    how = ("cocoseq", "--coco", tmp_path / "coco", "--jobs", 1, "--size", 224)
    assert "cocoseq: 2 of 20 pictures are missing, such as 17, 6." in data(*how, fails=True)
    assert not (tmp_path / "sets").exists()
    printed = data(*how, "--allow-missing").splitlines()
    assert printed[:2] == ["missing train pictures: 2, such as 17, 6", "  by task: 3: 1, 1: 1"]
    assert printed[2].startswith("  by class: ") and "incomplete: missing.json" in "\n".join(printed)
    shown = data("cocoseq")
    assert "missing train pictures: 2\n  by task: 3: 1, 1: 1\n  by class: " in shown
    assert "cocoseq (18 of 41,438 pictures, 2 missing)" in data()


def test_build_of_nus_wideseq_by_alias(data: Callable[..., str], tmp_path: Path) -> None:
    small_nus_wide(tmp_path / "nus")
    printed = data("nus-wide", "--nus", tmp_path / "nus", "--jobs", 1, "--out", tmp_path / "elsewhere")
    assert "nus-wideseq, 18 pictures of 256x256 (12 train, 6 test), 6 tasks, 49 classes" in printed
    source = load_source(str(tmp_path / "elsewhere"), Path("nowhere"))
    assert isinstance(source, MultiLabelSource) and source.name == "nus-wideseq"
    assert source.test_task.tolist() == [0, 1, 2, 3, 4, 5]


def test_build_from_csv_or_folder(data: Callable[..., str], tmp_path: Path) -> None:
    small_coco(tmp_path / "coco")
    rows = ["image,split,task,labels", f"{1:012d}.jpg,train,0,sea", f"{2:012d}.jpg,test,0,sea;sky"]
    table = tmp_path / "coco" / "images" / "labels.csv"
    table.write_text("\n".join(rows))
    data("one", "--csv", table, "--images", table.parent, "--size", 32)
    data("two", "--images", table.parent, "--size", 32)
    one, two = (load_source(name, tmp_path / "sets") for name in ("one", "two"))
    assert one.fingerprint == two.fingerprint and one.name == "one"
    assert [line.split()[0] for line in data().splitlines()][-2:] == ["one", "two"]
    assert data("one").splitlines()[0] == f"folder: {tmp_path}/sets/one"
    (tmp_path / "sets" / "one" / "manifest.json").unlink()
    assert "one (partly built: 2 of 2 pictures)" in data()


def test_list_marks_unreadable_data_set(data: Callable[..., str], tmp_path: Path) -> None:
    small_nus_wide(tmp_path / "nus")
    data("nus-wideseq", "--nus", tmp_path / "nus", "--jobs", 1)
    (tmp_path / "sets" / "nus-wideseq" / "manifest.json").write_text("{")
    assert "nus-wideseq (cannot be read)" in data()
    assert "manifest.json: is not valid JSON" in data("nus-wideseq", fails=True)


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (("cocoseq", "--size", "300", "--coco", "."), "--size 300: must be 256 or 224"),
        (("mine", "--size", "4", "--csv", "x"), "--size 4: must be 8 to 1024"),
        (("cocoseq", "--coco", ".", "--jobs", "0"), "--jobs 0: must be at least 1"),
        (("cocoseq", "--coco", ".", "--nus", "."), "--coco and --nus: cannot be combined"),
        (("nus-wide", "--coco", "."), "--coco: builds cocoseq, not 'nus-wideseq'"),
        (("mnist", "--csv", "x"), "--csv: 'mnist' cannot be the name"),
        (("../x", "--csv", "x"), "--csv: '../x' cannot be the name"),
        (("mine", "--csv", "x", "--ids", "x"), "--ids: is for --coco and --nus"),
        (("cocoseq", "--coco", ".", "--groups", "x"), "--groups: the groups of the published streams are fixed."),
        (("cocoseq", "--allow-missing"), "--allow-missing: is for building"),
        (("cocoseq", "--fetch"), "cocoseq: cannot be downloaded. Build it with contnorm data cocoseq --coco DIR"),
        (("cocoseq", "--coco", "nowhere"), "--coco nowhere: is not a folder"),
        (("nus-wide", "--nus", "nowhere"), "--nus nowhere: is not a folder"),
    ],
)
def test_invalid_options_are_one_line_errors(
    data: Callable[..., str], tmp_path: Path, arguments: tuple[str, ...], printed: str
) -> None:
    assert printed in data(*arguments, fails=True)
    assert not (tmp_path / "sets").exists()


def test_unknown_data_set_is_one_line_error(data: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "sets").mkdir()
    assert "unknown data set 'nosuch'" in data("nosuch", fails=True)


def test_build_with_corrupt_picture_names_it_and_writes_no_manifest(data: Callable[..., str], tmp_path: Path) -> None:
    small_coco(tmp_path / "coco")
    spoilt = tmp_path / "coco" / "images" / f"{7:012d}.jpg"
    spoilt.write_bytes(spoilt.read_bytes()[:300])
    printed = data("cocoseq", "--coco", tmp_path / "coco", "--jobs", 1, fails=True)
    assert f"{spoilt}: cannot be read as a picture (" in printed and "the same command resumes" in printed
    assert not list((tmp_path / "sets").rglob("manifest.json"))
    assert "- (partly built: 8 of 20 pictures)" in data()


def test_build_into_a_file_is_one_line_error(data: Callable[..., str], tmp_path: Path) -> None:
    small_coco(tmp_path / "coco")
    (tmp_path / "file").write_text("")
    printed = data("cocoseq", "--coco", tmp_path / "coco", "--out", tmp_path / "file", fails=True)
    assert "file: the data set cannot be written there (" in printed


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_stopped_build_with_two_processes_resumes(tmp_path: Path, how: signal.Signals) -> None:
    mini = real_data("cocoseq-mini/instances.json") / "cocoseq-mini"
    for path in (mini / "ids").iterdir():
        write_json(tmp_path / "ids" / path.name, json.loads(path.read_text())[::2])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in the background are deaf to it
    for attempt in range(5):  # on a busy machine, a build may end before this process sees its progress
        out = tmp_path / f"build{attempt}" / "cocoseq"
        command = [sys.executable, "-m", "contnorm", "data", "cocoseq", "--coco", mini, "--out", out, "--jobs", "2"]
        command += ["--ids", tmp_path / "ids"]
        with subprocess.Popen(list(map(str, command)), preexec_fn=heard, **pipes) as process:
            until = time.monotonic() + 100
            while (build_progress(out) or (0, 0))[0] == 0 and time.monotonic() < until and process.poll() is None:
                time.sleep(0.005)
            process.send_signal(how)
            printed, errors = process.communicate(timeout=100)
        if process.returncode != 0:
            break
    assert "Traceback" not in errors and process.returncode == (130 if how == signal.SIGINT else -how)
    assert ("stopped. Decoded pictures are kept; the same command resumes" in printed) == (how == signal.SIGINT)
    kept = build_progress(out)
    assert kept is not None and 0 < kept[0] < 760 and not (out / "manifest.json").exists()
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and "760 pictures of 256x256 (600 train, 160 test)" in done.stdout, done.stderr
    source = load_source(str(out), Path("nowhere"))
    assert source.train_images.reshape(600, -1).max(1).all() and source.test_images.reshape(160, -1).max(1).all()
    lists = [json.loads((tmp_path / "ids" / f"train_task{task}.json").read_text()) for task in (0, 3, 1, 2)]
    for row, number in list(enumerate(number for numbers in lists for number in numbers))[::40]:
        picture = read_picture(mini / "images" / f"{number:012d}.jpg", 256)[0]
        np.testing.assert_array_equal(source.train_images[row], picture)
