"""Records: what is saved, checked and read, from folders and from archives, and the pandas table of them."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from contnorm.bench.config.schema import from_dict
from contnorm.bench.label_metrics import LABEL_SCORES
from contnorm.bench.metrics import SCORES
from contnorm.bench.records import Runs, Store, load_runs, make_record, read_record, seal_of, spread_over_seeds
from contnorm.errors import UserError
from tests.committed_records import COARSE_GRID, COCOSEQ, FOLDER, contents_of

CONFIGS = [
    from_dict({"norm": {"name": norm}, "strategy": {"name": "er"}, "train": {"lr": lr, "batch": batch}})
    for norm, lr, batch in (("bn", 0.03, 10), ("cn", 0.03, 10), ("cn", 0.1, 20))
]
HASHES = [config.hash for config in CONFIGS]
FIELDS: dict[str, Any] = {
    "seconds": {"train": 12.5},
    "device": {"kind": "cpu", "name": "a processor"},
    "versions": {"torch": "2.11.0"},
}
Raw = dict[str, Any]


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


def first_file(folder: Path) -> Path:
    return folder / CONFIGS[0].hash / "0.json"


def rewrite(path: Path, change: Callable[[Raw], object]) -> None:
    """Change a record, with a new seal, so that nothing but its content is odd."""
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps({**raw, "seal": seal_of(raw)}))


def test_saved_record_loads_as_it_was_made(folder: Path) -> None:
    record = read_record(first_file(folder))
    made = make_record(CONFIGS[0], 0, {"matrix": {"correct": [[5, None], [4, 6]], "total": [10, 10]}, **FIELDS})
    assert record.raw == made.raw and record == made
    assert record.raw["seal"] == seal_of(record.raw) and record.raw["schema"] == 3
    assert (record.hash, record.score("acc"), record.task_ends) == (CONFIGS[0].hash, 50.0, [1, 2])
    assert record.path == first_file(folder)


def test_diverged_run_is_kept_apart_and_does_not_replace_a_finished_one(folder: Path, runs: Runs) -> None:
    (diverged,) = runs.diverged
    assert (diverged.status, diverged.reason) == ("diverged", "seed 2: the loss is nan.")
    assert diverged.raw["device"] == FIELDS["device"]
    store = Store(folder)
    assert store.is_diverged(CONFIGS[2], 2) and not store.has(CONFIGS[2], 2)
    of_run = store.load_seeds(CONFIGS[2], range(10))
    assert ({one.seed for one in of_run}, [one.seed for one in of_run.diverged]) == ({0, 1}, [2])
    store.save_diverged(CONFIGS[2], 0, "no")
    assert store.has(CONFIGS[2], 0)
    with pytest.raises(UserError, match="has no scores, because the run diverged"):
        store.load_run(CONFIGS[2], 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.update(schema=2),
        lambda raw: raw.update(seed=True),
        lambda raw: raw.update(hash="0" * 12),
        lambda raw: raw["config"]["train"].update(lr="fast"),
        lambda raw: raw.pop("matrix"),
        lambda raw: raw["matrix"].update(correct=[[11, None], [4, 6]]),
        lambda raw: raw["matrix"].update(correct=[[5, None], [None, 6]]),
        lambda raw: raw.update(matrix_running={"correct": [[5]], "total": [10]}),
        lambda raw: raw.update(drift={"by_task": [{"norm1": {"mean": "far"}}]}),
    ],
)
def test_invalid_record_is_a_problem_and_others_are_read(folder: Path, change: Callable[[Raw], object]) -> None:
    rewrite(first_file(folder), change)
    runs = load_runs(folder)
    assert len(runs) == 7 and len(runs.problems) == 1
    assert runs.problems[0].startswith(f"{first_file(folder)}: is not a valid record (")
    assert runs.where(norm="cn").problems == runs.problems


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 3}'])
def test_file_that_is_no_record_is_named(folder: Path, content: str) -> None:
    first_file(folder).write_text(content)
    with pytest.raises(UserError, match=r"0\.json: is not a valid record"):
        load_runs(first_file(folder))
    assert Store(folder).has(CONFIGS[0], 0), "a run does not replace it"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda raw: raw.update(classes={}), "its groups 0"),
        (lambda raw: raw["labels"].pop("own"), "is not a valid record"),
    ],
)
def test_broken_multilabel_record_is_reported(tmp_path: Path, spoil: Callable[[Raw], object], message: str) -> None:
    record = load_runs(COCOSEQ).records[0]
    path = Store(tmp_path).path(record.config, record.seed)
    path.parent.mkdir()
    path.write_text(json.dumps(record.raw))
    assert read_record(path).multi_label
    with pytest.raises(UserError, match="is multi-label and has no accuracies"):
        _ = record.matrix
    rewrite(path, spoil)
    with pytest.raises(UserError, match=message):
        read_record(path)


def test_changed_record_does_not_match_its_seal(folder: Path) -> None:
    raw = json.loads(first_file(folder).read_text())
    first_file(folder).write_text(json.dumps({**raw, "commit": "other"}))
    assert "does not match its seal" in load_runs(folder).problems[0]


def test_record_under_the_name_of_another_is_a_problem(folder: Path, tmp_path: Path) -> None:
    path = first_file(folder)
    path.rename(path.with_name("9.json"))
    assert "9.json: is the record of run" in load_runs(folder).problems[0]
    path.with_name("9.json").rename(tmp_path / "copy.json")
    assert len(load_runs(tmp_path / "copy.json")) == 1, "a copy elsewhere may have any name"


def test_infinite_drift_is_left_out() -> None:
    drift = {"by_task": [{"norm1": {"mean": float("inf"), "var": 1.0}}]}
    record = make_record(CONFIGS[0], 0, {"matrix": {"correct": [[5]], "total": [10]}, "drift": drift})
    assert record.drift == {} and record.raw["drift"] == drift


def test_all_kinds_of_paths_are_loaded(folder: Path, runs: Runs, tmp_path: Path) -> None:
    runs.save(tmp_path / "all.jsonl.gz")
    runs.save(tmp_path / "all.jsonl")
    for archive in ("all.jsonl.gz", "all.jsonl"):
        loaded = load_runs(str(tmp_path / archive))
        assert loaded.records == runs.records == list(runs) and len(runs) == 8
        assert loaded.diverged == runs.diverged
    assert len(load_runs(tmp_path)) == 8, "a folder of archives, with copies"
    assert {run: len(group) for run, group in runs.by_run().items()} == dict(zip(HASHES, (3, 3, 2), strict=True))
    last = folder / CONFIGS[2].hash
    assert repr(load_runs(last)) == "Runs(1 runs, 2 records, 1 diverged, 0 problems)"
    assert len(load_runs(last / "0.json")) == 1 and len(load_runs(last / "2.json").diverged) == 1
    with pytest.raises(UserError, match="no such file"):
        load_runs(tmp_path / "other")


def test_archive_bytes_depend_on_the_records_only(runs: Runs, tmp_path: Path) -> None:
    runs.save(tmp_path / "a.jsonl.gz")
    Runs(runs.records[::-1], runs.diverged).save(tmp_path / "b.jsonl.gz")
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def test_archives_are_read_only_and_count_as_recorded(runs: Runs, tmp_path: Path) -> None:
    runs.save(tmp_path / "a.jsonl.gz")
    for store in (Store(tmp_path / "a.jsonl.gz"), Store(tmp_path)):
        assert store.has(CONFIGS[0], 0) and store.is_diverged(CONFIGS[2], 2) and not store.has(CONFIGS[2], 2)
        assert store.load_run(CONFIGS[0], 1).seed == 1
        assert [record.seed for record in store.load_seeds(CONFIGS[1], [0, 2, 7])] == [0, 2]
    with pytest.raises(UserError, match="archives are read-only"):
        Store(tmp_path / "a.jsonl.gz").save(CONFIGS[0], 5, {})


def test_damaged_lines_and_archives_are_reported(runs: Runs, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    runs.save(path)
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    path.write_bytes(gzip.compress(b"".join([lines[0], b"{}\n", *lines[1:]])))
    loaded = load_runs(path)
    assert len(loaded) + len(loaded.diverged) == 9 and loaded.problems[0].startswith(f"{path}:2: is not a valid")
    path.write_bytes(gzip.compress(b"".join(lines))[:-20])
    assert "the archive is damaged (" in load_runs(path).problems[0]


def test_copy_with_other_results_is_reported_once(folder: Path, runs: Runs, tmp_path: Path) -> None:
    other = make_record(CONFIGS[0], 0, {"matrix": {"correct": [[5, None], [4, 5]], "total": [10, 10]}}, Path("other"))
    both = Runs.of([*runs.records, *runs.records, other])
    assert len(both) == 8 and len(both.problems) == 1 and "with different results" in both.problems[0]


def test_folder_without_records_is_named_in_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(load_runs(folder)) == 8 and not caplog.messages
    assert len(load_runs(folder.parent)) == 0 and "has no records" in caplog.messages[0]


def test_run_is_found_by_path_and_prefix(folder: Path) -> None:
    store = Store(folder)
    assert len(store.find_run(CONFIGS[0].hash[:6])) == len(store.find_run(str(folder / CONFIGS[0].hash))) == 3
    assert len(store.find(str(folder))) == 8
    with pytest.raises(UserError, match="has 3 runs"):
        store.find_run(str(folder))
    with pytest.raises(UserError, match="no finished run 'feed'"):
        store.find("feed")
    gone = from_dict({"train": {"lr": 9.0}})
    store.save_diverged(gone, 0, "seed 0: the loss is inf.")
    with pytest.raises(UserError, match=r"all its seeds diverged\. seed 0: the loss is inf"):
        store.find(gone.hash)


def test_frame_has_one_row_per_seed_and_all_columns(runs: Runs) -> None:
    frame = runs.to_frame()
    assert len(frame) == 9 and list(frame.columns[:4]) == ["hash", "seed", "status", "stream.name"]
    assert list(frame.columns[-3:]) == ["device", "torch", "seconds"] and set(SCORES) < set(frame.columns)
    assert frame.loc[frame["train.lr"] == 0.1, "acc"].mean() == pytest.approx(62.5)
    assert frame["acc"].isna().sum() == 1 and set(frame["torch"]) == {"2.11.0"}
    assert runs.where(norm="bn").to_frame()["norm.groups"].isna().all(), "batch norm has no groups"


def test_frame_has_own_settings_and_multi_label_scores() -> None:
    config = from_dict({"strategy": {"name": "mine.py:Mine", "code": "0", "temperature": 2.0}})
    record = make_record(config, 0, {"matrix": {"correct": [[5]], "total": [10]}})
    assert Runs([record]).to_frame().at[0, "strategy.temperature"] == 2.0
    frame = load_runs(COCOSEQ).to_frame()
    assert set(LABEL_SCORES) < set(frame.columns) and "acc" not in frame and len(frame) == 50


def test_frame_by_task_has_every_count(runs: Runs) -> None:
    frame = runs.to_frame(by_task=True)
    assert len(frame) == 8 * 3 and (frame["accuracy"] == 100 * frame["correct"] / frame["total"]).all()
    labels = load_runs(COCOSEQ).to_frame(by_task=True)
    assert {"after_task", "task", "map"} <= set(labels.columns)


@pytest.mark.parametrize("suffix", ["csv", "json", "parquet"])
def test_files_have_the_rows_of_the_frame(runs: Runs, tmp_path: Path, suffix: str) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    mixed = Runs([*runs.records, make_record(from_dict({"norm": {"name": "gn", "groups": "auto"}}), 0, {
        "matrix": {"correct": [[5, None], [4, 6]], "total": [10, 10]}})])  # fmt: skip
    path = tmp_path / f"runs.{suffix}"
    mixed.save(path)
    read = {"csv": pd.read_csv, "json": pd.read_json, "parquet": pd.read_parquet}[suffix](path)
    assert list(read.columns) == list(mixed.to_frame().columns)
    assert read["acc"].tolist() == pytest.approx(mixed.to_frame()["acc"].tolist())
    with pytest.raises(UserError, match=r"unknown format '\.xlsx'"):
        runs.save(tmp_path / "runs.xlsx")


def test_spread_over_seeds() -> None:
    assert spread_over_seeds([1.0, 3.0]) == (2.0, pytest.approx(2**0.5))
    assert str(spread_over_seeds([1.0])) == str(spread_over_seeds([1.0, float("nan")])).replace("(nan", "(1.0")


@pytest.mark.parametrize("archive", sorted(FOLDER.rglob("*.jsonl.gz")), ids=lambda path: path.name)
def test_committed_records_are_valid(archive: Path) -> None:
    runs = load_runs(archive)
    assert runs.problems == [] and len(runs) + len(runs.diverged) == len(
        gzip.decompress(archive.read_bytes()).splitlines()
    )


def test_committed_records_are_selected() -> None:
    runs = load_runs(COARSE_GRID).where(norm="cn", strategy="er", lr=0.01)
    (run,) = runs.by_run()
    matrices = [raw["matrix"] for raw in contents_of(run, COARSE_GRID).values()]
    accuracies = [100 * np.mean(np.array(one["correct"][-1]) / np.array(one["total"])) for one in matrices]
    assert [record.score("acc") for record in runs] == pytest.approx(accuracies)
