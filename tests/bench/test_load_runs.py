"""Loading and selecting recorded runs in Python, and their pandas table."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from contnorm.bench.archives import write_archive
from contnorm.bench.config.schema import RunConfig, flatten_settings, from_dict
from contnorm.bench.metrics.accuracy_matrix import SCORES, AccuracyMatrix
from contnorm.bench.metrics.multilabel import LABEL_SCORES
from contnorm.bench.records import Record, Store
from contnorm.bench.runs import Runs, load_runs
from contnorm.errors import UserError
from tests.committed_records import COARSE_GRID, COCOSEQ, FOLDER

CONFIGS = [
    from_dict({"norm": {"name": norm}, "strategy": {"name": "er"}, "train": {"lr": lr, "batch": batch}})
    for norm, lr, batch in (("bn", 0.03, 10), ("cn", 0.03, 10), ("cn", 0.1, 20))
]
FIELDS = {
    "seconds": {"train": 12.5},
    "device": {"kind": "cpu", "name": "a processor"},
    "versions": {"torch": "2.11.0"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three runs of seeds 0 to 2, where seed 2 of the last one diverged."""
    store = Store(tmp_path / "runs")
    for number, config in enumerate(CONFIGS):
        for seed in range(3 if number < 2 else 2):
            matrix = {"correct": [[5, None], [4 + number, 6 + seed]], "total": [10, 10]}
            store.save(config, seed, {"matrix": matrix, **FIELDS})
    store.save_diverged(CONFIGS[2], 2, "seed 2: the loss is nan.", FIELDS)
    return tmp_path / "runs"


@pytest.fixture
def runs(folder: Path) -> Runs:
    return load_runs(folder)


def test_all_kinds_of_paths_are_loaded(folder: Path, runs: Runs, tmp_path: Path) -> None:
    archive = tmp_path / "all.jsonl.gz"
    write_archive(archive, [*runs.records, *runs.diverged])
    assert load_runs(str(archive)).records == runs.records == list(runs) and len(runs) == 8
    assert load_runs(archive).diverged == runs.diverged
    assert len(load_runs(tmp_path)) == 8, "a folder of archives"
    last = folder / CONFIGS[2].hash
    assert repr(load_runs(last)) == "Runs(1 runs, 2 records, 1 diverged, 0 problems)"
    assert len(load_runs(last / "0.json")) == 1 and len(load_runs(last / "2.json").diverged) == 1
    with pytest.raises(UserError, match="no such file"):
        load_runs(tmp_path / "other")


def test_file_that_is_no_record_is_not_to_be_deleted(folder: Path, tmp_path: Path) -> None:
    """Only a file in the folder of a run can be written again by a run."""
    (tmp_path / "package.json").write_text('{"name": "a"}')
    with pytest.raises(UserError, match="is not a valid record") as error:
        load_runs(tmp_path / "package.json")
    assert "elete" not in str(error.value)
    path = folder / CONFIGS[0].hash / "0.json"
    path.write_text("{}")
    assert load_runs(folder).problems[0].endswith("Delete it to run it again.")


def test_invalid_records_are_problems(folder: Path) -> None:
    (folder / CONFIGS[0].hash / "7.json").write_text("{")
    runs = load_runs(folder)
    assert len(runs) == 8 and len(runs.problems) == 1 and "7.json" in runs.problems[0]
    assert repr(runs) == "Runs(3 runs, 8 records, 1 diverged, 1 problems)"
    assert runs.where(norm="cn").problems == runs.problems


@pytest.mark.parametrize(
    ("conditions", "finished", "diverged"),
    [
        ({}, 8, 1),
        ({"norm": "cn"}, 5, 1),
        ({"norm": "cn", "strategy": "er", "lr": 0.03, "train.batch": 10}, 3, 0),
        ({"norm.name": "cn", "batch": 20}, 2, 1),
        ({"norm": ["bn", "gn"]}, 3, 0),
        ({"lr": (0.1, 0.3)}, 2, 1),
        ({"norm": {"bn", "cn"}, "seed": range(1, 9)}, 5, 1),
        ({"seed": 0}, 3, 0),
        ({"lr": lambda lr: lr > 0.05}, 2, 1),
        ({"hash": CONFIGS[0].hash}, 3, 0),
        ({"status": "diverged"}, 0, 1),
        ({"status": "finished", "memory": "ring", "buffer": 50, "stream": "permuted-mnist", "model": "mlp"}, 8, 0),
        ({"max_steps": None}, 8, 1),
        ({"norm": "gn"}, 0, 0),
    ],
)
def test_where_selects_by_settings(runs: Runs, conditions: dict[str, Any], finished: int, diverged: int) -> None:
    selected = runs.where(**conditions)
    assert (len(selected), len(selected.diverged)) == (finished, diverged)


@pytest.mark.parametrize(
    ("conditions", "finished"),
    [
        ({"norm": "CN"}, 2),
        ({"norm": "cn8"}, 1),
        ({"norm.name": "Cn32"}, 1),
        ({"norm": ["cn8", "bn"]}, 2),
        ({"norm": "cn4"}, 0),
        ({"strategy": "DER++"}, 3),
        ({"stream": "SplitCIFAR100", "memory": "ring"}, 3),
        ({"stream": "seq-mnist"}, 0),
        ({"model": "mine.py:make"}, 1),
        ({"model": "resnet18"}, 0),
    ],
)
def test_where_understands_names_as_run_does(conditions: dict[str, Any], finished: int) -> None:
    norms = ({"name": "cn", "groups": 8}, {"name": "cn", "groups": 32}, {"name": "bn", "groups": 8})
    models = ("mlp", "mine.py:make", "mlp")
    base = {"strategy": {"name": "derpp"}, "stream": {"name": "split-cifar100"}}
    configs = [from_dict({**base, "norm": n, "model": {"name": m}}) for n, m in zip(norms, models, strict=True)]
    matrix = AccuracyMatrix([[9, None], [6, 8]], [10, 10])
    runs = Runs([Record(config, 0, matrix, {}, {}) for config in configs])
    assert len(runs.where(**conditions)) == finished


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("norm", "cnn", r"norm: no record has 'cnn'. Did you mean 'cn'\? There are bn, cn\."),
        ("norm", "bn8", "norm: no record has 'bn8'"),
        ("strategy", ["er", "derp"], "strategy: no record has 'derp'. Did you mean 'derpp'.* There are er"),
        ("stream", "mnist", "stream: no record has 'mnist'"),
        ("model", "mine.py:make", "model: no record has 'mine.py:make'"),
        ("memory.kind", "rings", "memory.kind: no record has 'rings'"),
        ("norm", None, "norm: no record has None"),
    ],
)
def test_where_rejects_a_name_that_is_nowhere(runs: Runs, key: str, value: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        runs.where(**{key: value})


def test_unread_subfolders_are_named_in_one_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(load_runs(folder)) == 8 and not caplog.messages
    (tmp_path / "tuning").mkdir()
    write_archive(tmp_path / "tuning" / "all.jsonl", list(load_runs(folder)))
    assert len(load_runs(tmp_path)) == 0
    (message,) = caplog.messages
    assert "not read: runs, tuning." in message
    caplog.clear()
    run = folder / CONFIGS[0].hash
    shutil.copytree(run, run / "copy")
    assert len(load_runs(run)) == 3
    assert len(caplog.messages) == 1 and "not read: copy." in caplog.text


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("train.bach", "'train.bach'.*Did you mean 'train.batch'"),
        ("strateg", "Did you mean 'strategy'"),
        ("lrr", "Did you mean 'lr'"),
        ("name", "ambiguous.*stream.name, strategy.name"),
        ("xyzzy", "'xyzzy'.*There are: hash, seed, status, stream.name"),
    ],
)
def test_unknown_key_is_an_error_with_the_nearest_key(runs: Runs, key: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        runs.where(**{key: 1})


def test_grouping_by_run(runs: Runs) -> None:
    groups = runs.by_run()
    assert set(groups) == {config.hash for config in CONFIGS}
    assert [record.seed for record in groups[CONFIGS[1].hash]] == [0, 1, 2]
    assert (len(groups[CONFIGS[2].hash]), groups[CONFIGS[2].hash].diverged[0].seed) == (2, 2)


def test_frame_has_one_row_per_seed_and_all_columns(runs: Runs) -> None:
    frame = runs.to_frame()
    assert list(frame.columns[:3]) == ["hash", "seed", "status"] and len(frame) == 9
    assert set(frame.columns) == {
        *("hash", "seed", "status", "device", "torch", "seconds"),
        *flatten_settings(RunConfig().as_dict()),
        *SCORES,
    }
    assert frame[frame["norm.name"] == "bn"]["acc"].tolist() == [50.0, 55.0, 60.0]
    assert frame["status"].value_counts().to_dict() == {"finished": 8, "diverged": 1}
    diverged = frame[frame["status"] == "diverged"].iloc[0]
    assert math.isnan(diverged["acc"]) and (diverged["train.lr"], diverged["seed"]) == (0.1, 2)
    assert set(frame["device"]) == {"a processor"} and set(frame["torch"]) == {"2.11.0"}
    assert set(frame["seconds"][:8]) == {12.5}
    assert frame["fwt"].isna().all(), "needs the accuracies before training"
    assert runs.where(norm="gn").to_frame().empty


def test_frame_has_a_column_for_own_settings(runs: Runs) -> None:
    config = from_dict({"strategy": {"name": "mine.py:Mine", "temperature": 2.0}})
    own = Record(config, 0, AccuracyMatrix([[9]], [10]), {}, {})
    frame = Runs([*runs.records, own]).to_frame()
    columns = list(frame.columns)
    assert columns.index("strategy.temperature") < columns.index("acc"), "settings come before scores"
    assert frame["strategy.temperature"].isna().sum() == 8 and frame["strategy.temperature"].iloc[-1] == 2.0


def test_frame_has_groups_of_grouped_norms_only(runs: Runs) -> None:
    frame = runs.to_frame()
    for key in ("norm.groups", "norm.auto_channels"):
        missing = frame.groupby("norm.name")[key].apply(lambda column: column.isna().all())
        assert missing.to_dict() == {"bn": True, "cn": False}


def test_frame_of_multilabel_runs_has_their_scores() -> None:
    frame = load_runs(COCOSEQ).where(norm=["bn", "cn"], memory="prs").to_frame()
    assert len(frame) == 10 and set(LABEL_SCORES) < set(frame.columns) and "acc" not in frame.columns
    assert frame["map"].between(0, 100).all() and frame["map"].nunique() > 5


def test_frame_without_pandas_is_an_error(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="needs pandas"):
        runs.to_frame()


def test_divergence_note_gets_the_settings_of_its_run(folder: Path) -> None:
    """Notes of schema 1 have no settings of their own."""
    unknown = "0123456789ab"
    for run, seed in ((CONFIGS[0].hash, 9), (unknown, 0)):
        (folder / run).mkdir(exist_ok=True)
        (folder / run / f"{seed}.lost.json").write_text(json.dumps({"schema": 1, "lost": "the loss is nan."}))
    runs = load_runs(folder)
    assert [(run.hash, run.seed) for run in runs.where(norm="bn").diverged] == [(CONFIGS[0].hash, 9)]
    assert runs.where(hash=unknown).diverged[0].config is None and len(runs.to_frame()) == 11


def test_committed_records_are_selected() -> None:
    grid = load_runs(COARSE_GRID)
    assert len(grid.diverged) == 7 and len(grid.where(norm="brn").diverged) == 7
    assert len(grid.where(norm="cn", strategy="er", lr=0.03, seed=[0, 1])) == 2
    assert len(load_runs(FOLDER).by_run()) > 100
