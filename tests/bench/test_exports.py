"""`bench.export`: tables and logs that are made of records."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contnorm import bench
from contnorm.bench.config.schema import from_dict
from contnorm.bench.metrics.multilabel import LabelMatrix, LabelStats, c_f1, mean_ap
from contnorm.bench.records import DivergedRun
from contnorm.errors import UserError
from tests.bench.api.conftest import arrays, stream
from tests.committed_records import COARSE_GRID, COCOSEQ

__all__ = ["arrays", "stream"]


@pytest.fixture
def runs(stream: bench.Stream, tmp_path: Path) -> Path:
    """Two finished runs of cn with 4 groups, one of bn, and a diverged one."""
    folder = tmp_path / "runs"
    bench.run(stream, norm="cn4", seeds=2, lanes=1, runs=folder, settings={"evaluate.ahead": True})
    bench.run(stream, norm="bn", runs=folder)
    with pytest.raises(UserError):
        bench.run(stream, model="mlp", norm="none", lr=1e30, runs=folder)
    return folder


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_tables_have_one_row_per_run_and_per_accuracy(runs: Path, tmp_path: Path) -> None:
    exported = bench.export(runs, "csv", tmp_path / "out.csv")
    assert exported.paths == [tmp_path / "out.csv", tmp_path / "out-accuracy.csv"]
    rows = read_csv(exported.paths[0])
    assert [(row["norm.name"], row["status"]) for row in rows].count(("cn", "finished")) == 2
    by_run = {(row["hash"], int(row["seed"])): row for row in rows}
    assert len(by_run) == len(rows) == 4
    for record in exported.records:
        row = by_run[record.hash, record.seed]
        assert float(row["acc"]) == record.score("acc") and float(row["train.lr"]) == record.config.train.lr
        assert row["norm.groups"] == ("4" if record.config.norm.name == "cn" else "")
    (diverged,) = [row for row in rows if row["status"] == "diverged"]
    assert diverged["acc"] == "" and float(diverged["train.lr"]) == 1e30

    accuracy = read_csv(exported.paths[1])
    for record in exported.records:
        own = [row for row in accuracy if (row["hash"], int(row["seed"])) == (record.hash, record.seed)]
        matrix: dict[tuple[int, int], float] = {
            (int(row["after_task"]), int(row["task"])): float(row["accuracy"]) for row in own
        }
        assert len(matrix) == len(own) == (12 if record.config.evaluate.ahead else 6)
        for (after, task), value in matrix.items():
            counts = record.matrix.before if after == -1 else record.matrix.correct[after]
            assert counts is not None and value == pytest.approx(100 * counts[task] / 40)  # type: ignore[operator]


def test_formats_have_the_same_content(runs: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    texts = [read_csv(path) for path in bench.export(runs, "csv", tmp_path / "a.csv").paths]
    as_json = [json.loads(path.read_text()) for path in bench.export(runs, "json", tmp_path / "a.json").paths]
    tables = [parquet.read_table(path) for path in bench.export(runs, "parquet", tmp_path / "a.parquet").paths]
    for rows, values, table in zip(texts, as_json, tables, strict=True):
        assert [list(row) for row in values] == [list(row) for row in rows] and table.to_pylist() == values
        assert [[_text(value) for value in row.values()] for row in values] == [list(row.values()) for row in rows]
    assert tables[0].schema.field("train.lr").type == "double" and tables[0].schema.field("seed").type == "int64"


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def test_parquet_column_of_numbers_and_words_is_text(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    matrix = bench.metrics.AccuracyMatrix([[5]], [10])
    configs = [from_dict({"norm": {"name": "cn", "groups": groups}}) for groups in (4, "auto")]
    runs = bench.Runs([bench.Record(config, 0, matrix, {}, {}) for config in configs])
    exported = bench.export(runs, "parquet", tmp_path / "a.parquet")
    assert parquet.read_table(exported.paths[0]).column("norm.groups").to_pylist() == ["4", "auto"]


def test_multi_label_scores_are_exported_by_task(tmp_path: Path) -> None:
    stats = [LabelStats(4, (right, 1), (2, 2), (2, 1), (right / 2, 0.25)) for right in (2, 1)]
    matrix = LabelMatrix(own=[[stats[0], None], [stats[1], stats[0]]], tally=stats)
    record = bench.Record(from_dict({"stream": {"name": "cocoseq"}}), 3, matrix, {}, {})
    rows = read_csv(bench.export(bench.Runs([record]), "csv", tmp_path / "a.csv").paths[1])
    assert [(row["after_task"], row["task"], row["total"]) for row in rows] == [
        ("0", "0", "4"),
        ("1", "0", "4"),
        ("1", "1", "4"),
    ]
    assert [float(row["map"]) for row in rows] == [mean_ap(s) for s in (stats[0], stats[1], stats[0])]
    assert float(rows[1]["c_f1"]) == c_f1(stats[1]) != c_f1(stats[0])


def test_selection_and_default_names(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exported = bench.export("runs", "json", where=["norm=cn", "seed>0"])
    assert [str(path) for path in exported.paths] == ["runs.json", "runs-accuracy.json"]
    assert [(row["norm.name"], row["seed"]) for row in json.loads(Path("runs.json").read_text())] == [("cn", 1)]


def test_other_content_is_replaced_only_with_force(runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    bench.export(runs, "csv", path)
    bench.export(runs, "csv", path)  # the same content
    before = path.read_bytes(), (tmp_path / "a-accuracy.csv").read_bytes()
    with pytest.raises(UserError, match=r"a\.csv: exists with other content.*--force"):
        bench.export(runs, "csv", path, where="norm=bn")
    assert (path.read_bytes(), (tmp_path / "a-accuracy.csv").read_bytes()) == before
    bench.export(runs, "csv", path, where="norm=bn", force=True)
    assert len(read_csv(path)) == 1


@pytest.mark.parametrize(("archive", "score"), [(COARSE_GRID, "acc"), (COCOSEQ, "map")])
def test_committed_archive_is_exported_completely(tmp_path: Path, archive: Path, score: str) -> None:
    exported = bench.export(archive, "csv", tmp_path / "a.csv")
    frame = bench.load_runs(archive).to_frame()
    rows = read_csv(exported.paths[0])
    assert len(rows) == len(frame) and list(rows[0]) == list(frame.columns)
    assert np.array_equal([float(row[score]) for row in rows if row[score]], frame[score].dropna())


def _tensorboard(folder: Path) -> dict[str, Any]:
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = {}
    for path in sorted((folder / "tensorboard").glob("*/seed-*")):
        accumulator = module.EventAccumulator(str(path))
        accumulator.Reload()
        found[path.parent.name, path.name] = {
            tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
            for tag in accumulator.Tags()["scalars"]
        }
    return found


def test_tensorboard_replays_records(runs: Path, tmp_path: Path) -> None:
    content = bench.export(runs, "tensorboard", tmp_path / "logs")
    logged = _tensorboard(tmp_path / "logs")
    assert len(logged) == 4, "three finished, and one diverged without scalars"
    for record in content.records:
        (scalars,) = [
            scalars
            for (run, seed), scalars in logged.items()
            if run.endswith(record.hash) and seed == f"seed-{record.seed}"
        ]
        assert scalars["score/acc"] == [(24, pytest.approx(record.score("acc")))]
        first = [100 * row[0] / 40 for row in record.matrix.correct]  # type: ignore[operator]
        assert scalars["accuracy/task_0"] == [
            (step, pytest.approx(value)) for step, value in zip((8, 16, 24), first, strict=True)
        ]
    bench.export(runs, "tensorboard", tmp_path / "logs")
    assert _tensorboard(tmp_path / "logs") == logged, "nothing is logged twice"


def test_replay_equals_the_log_of_the_run(stream: bench.Stream, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    bench.run(stream, runs=tmp_path / "runs", log="tensorboard")
    bench.export(tmp_path / "runs", "tensorboard", tmp_path / "replayed")
    ((live,), (replayed,)) = (_tensorboard(tmp_path / name).values() for name in ("runs-logs", "replayed"))
    common = [name for name in live if name.startswith(("accuracy/", "score/"))]
    assert common and {name: replayed[name] for name in common} == {name: live[name] for name in common}
    assert replayed["system/train_seconds"] == live["system/train_seconds"][-1:]


def test_mlflow_replays_records_once(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for _ in range(2):
        content = bench.export(runs, "mlflow", tmp_path / "logs")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "logs" / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("contnorm").experiment_id
    found = {run.data.tags["contnorm.run"]: run for run in client.search_runs([experiment])}
    assert len(found) == len(client.search_runs([experiment])) == 4
    for record in content.records:
        run = found[f"{record.hash}-{record.seed}"]
        assert run.data.metrics["score/acc"] == record.score("acc") and run.info.status == "FINISHED"
        history = client.get_metric_history(run.info.run_id, "accuracy/average")
        assert [metric.step for metric in history] == [8, 16, 24]
    (diverged,) = content.diverged
    run = found[f"{diverged.hash}-{diverged.seed}"]
    assert run.info.status == "FAILED" and run.data.tags["contnorm.reason"] == diverged.reason


@pytest.mark.slow
def test_wandb_replays_records_once(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "offline")
    for _ in range(2):
        bench.export(runs, "wandb", tmp_path / "logs")
    wandb.teardown()
    assert len(list((tmp_path / "logs" / "wandb").glob("offline-run-*"))) == 4


def test_record_without_steps_is_replayed_by_task(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    matrix = bench.metrics.AccuracyMatrix([[9, None], [6, 8]], [10, 10])
    raw = {"seconds": {"train": 2.0}}
    bench.export(bench.Runs([bench.Record(from_dict({}), 0, matrix, {}, raw)]), "tensorboard", tmp_path)
    (scalars,) = _tensorboard(tmp_path).values()
    assert scalars["accuracy/task_0"] == [(1, 90.0), (2, 60.0)] and scalars["score/acc"] == [(2, 70.0)]
    assert scalars["system/train_seconds"] == [(2, 2.0)] and "system/steps_per_second" not in scalars


def test_failing_library_is_reported_in_one_line(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(bench.Logger):
        def start(self, run: Any) -> None:
            raise ConnectionError("no\nnetwork")

    monkeypatch.setattr("contnorm.bench.exports.create_logger", lambda name, folder: Refusing())
    with pytest.raises(UserError, match=r"wandb: .*ConnectionError: no network"):
        bench.export(runs, "wandb", tmp_path / "logs")


def test_invalid_arguments_are_rejected(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown format 'parket'.*'parquet'"):
        bench.export(runs, "parket", tmp_path / "a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no runs to export"):
        bench.export(tmp_path / "empty", "csv", tmp_path / "a.csv")
    with pytest.raises(UserError, match="no runs to export"):
        bench.export(bench.Runs([], [], ["a problem"]), "csv", tmp_path / "a.csv")
    assert not list(tmp_path.glob("a*"))


def test_diverged_run_without_settings_is_in_the_table(tmp_path: Path) -> None:
    runs = bench.Runs([], [DivergedRun("0123456789ab", 2, "the loss is nan")])
    (row,) = read_csv(bench.export(runs, "csv", tmp_path / "a.csv").paths[0])
    assert (row["hash"], row["seed"], row["status"], row["train.lr"]) == ("0123456789ab", "2", "diverged", "")


def test_file_name_of_another_format_is_rejected(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"json file.*format is csv"):
        bench.export(runs, "csv", tmp_path / "out.JSON")
    assert not list(tmp_path.glob("out*"))
    assert bench.export(runs, "csv", tmp_path / "out.txt").paths[0].is_file()
