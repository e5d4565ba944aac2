"""`contnorm show`: scores at any width, chosen runs and columns, and files."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from contnorm.bench import load_runs
from contnorm.bench.config.schema import from_dict, merge_settings
from contnorm.bench.label_metrics import LabelMatrix, LabelStats, c_f1, o_f1
from contnorm.bench.records import Record, Store
from contnorm.bench.streams.tasks import STREAMS
from contnorm.cli.records import show_matrices, show_scores

Show = Callable[..., tuple[int, str, str]]


def printed(show: Callable[..., None], *what: object, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    show(*what, console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return "\n".join(line.rstrip() for line in lines)


def records(
    where: Path, stream: str = "split-mnist", seeds: int = 2, gain: int = 0, files: str | None = "same", **groups: Any
) -> list[Record]:
    """Runs of a stream at its defaults but for what is given; at the end seed s has 50 + s + gain * (s + 1) right."""
    values: dict[str, Any] = dict(STREAMS[stream].defaults)
    groups["stream"] = {"name": stream, "source": "mnist", **groups.pop("of_stream", {})}
    for name, group in groups.items():
        values[name] = {**values.get(name, {}), **group}
    config, store = from_dict(values), Store(where)
    for seed in range(seeds):
        right = 50 + seed + gain * (seed + 1)
        found = {"matrix": {"correct": [[90, None], [right, right]], "total": [100, 100]}}
        store.save(config, seed, found | ({"source": {"fingerprint": files}} if files else {}))
    return list(store.find(config.hash))


def evaluated_twice(where: Path, norm: str, running: int, exact: int) -> list[Record]:
    config = from_dict({"evaluate": {"moments": "oracle"}, "norm": {"name": norm}})
    matrix = {"correct": [[exact]], "total": [100]}
    Store(where).save(config, 0, {"matrix": matrix, "matrix_running": {**matrix, "correct": [[running]]}})
    return list(Store(where).find(config.hash))


def test_scores_warn_of_different_data(tmp_path: Path) -> None:
    a, b = records(tmp_path / "a", files="2:00ff"), records(tmp_path / "b", files="2:11ff", train={"lr": 0.1})
    old = records(tmp_path / "c", files="00ff", train={"lr": 0.2})
    assert "mnist: the runs used different data" in printed(show_scores, [*a, *b])
    assert "mnist: the runs may have used different data" in printed(show_scores, [*a, *old])
    assert "different data" not in printed(show_scores, a)


def test_settings_that_vary_have_a_column_and_shared_ones_a_line(tmp_path: Path) -> None:
    plain = records(tmp_path, train={"clip_value": 1.0})
    other = records(tmp_path, train={"lr": 0.1, "clip_value": 1.0}, strategy={"forward": "separate"})
    head, first, second, note = printed(show_scores, [*other, *plain]).splitlines()
    assert head.endswith("settings") and note == "Changed from the defaults in all runs: train.clip_value=1.0."
    by_run = {line.split()[0]: line for line in (first, second)}
    assert by_run[other[0].hash].endswith("strategy.forward=separate") and "  0.1  " in by_run[other[0].hash]
    assert "=" not in by_run[plain[0].hash]
    streams = [*records(tmp_path / "b"), *records(tmp_path / "b", stream="split-cifar10")]
    assert "settings" not in printed(show_scores, streams), "each is as its stream says"


@pytest.mark.parametrize("width", [60, 80, 100, 130, 170])
def test_nothing_is_truncated_at_any_width(tmp_path: Path, width: int) -> None:
    some = [*records(tmp_path), *records(tmp_path, seeds=1, memory={"size": 9}, evaluate={"drift": False})]
    shown = printed(show_scores, some, width=width)
    assert "\u2026" not in shown and "50.50 +- 0.71" in shown
    assert "evaluate.drift=false" in shown and "memory.size=9" in shown


def test_each_kind_of_moments_has_a_row_and_a_matrix(tmp_path: Path) -> None:
    matrix = {"correct": [[50]], "total": [100]}
    task = from_dict({"evaluate": {"moments": "task"}, "stream": {"name": "split-mnist", "scenario": "class"}})
    Store(tmp_path).save(task, 0, {"matrix": matrix, "matrix_task": {**matrix, "correct": [[75]]}})
    some = [*evaluated_twice(tmp_path, "bn", 40, 60), *Store(tmp_path).find(task.hash)]
    shown = printed(show_scores, some)
    assert re.search(r"running +1 +40\.00", shown) and re.search(r"oracle +1 +60\.00", shown)
    assert re.search(r"running +1 +50\.00", shown)
    known = printed(show_matrices, some)
    assert "oracle moments" in known and "60.0" in known and "task known" in known and "75.0" in known


# --- The command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """bn at two learning rates and cn at one, on seeds 0 and 1; seed 2 of cn diverged."""
    store = Store(tmp_path / "runs")
    for norm, lr in (("bn", 0.03), ("bn", 0.1), ("cn", 0.03)):
        config = from_dict({"norm": {"name": norm}, "train": {"lr": lr}, "stream": {"source": "mnist"}})
        for seed in (0, 1):
            right = 50 + seed + (20 if norm == "cn" else 0) + (10 if lr == 0.1 else 0)
            store.save(config, seed, {"matrix": {"correct": [[90, None], [right, right]], "total": [100, 100]}})
    store.save_diverged(config, 2, "seed 2: the loss is nan.")
    return tmp_path / "runs"


@pytest.fixture
def show(runs: Path, contnorm: Show) -> Show:
    def call(*arguments: object) -> tuple[int, str, str]:
        return contnorm("show", *arguments, "--runs", runs)

    return call


def cells(out: str) -> list[list[str]]:
    lines = [line.split("  ") for line in out.splitlines()]
    return [[cell.strip() for cell in line if cell.strip()] for line in lines]


@pytest.mark.parametrize(
    ("sort", "norms"),
    [
        ("acc", ["cn32", "bn 0.1", "bn 0.03"]),
        ("fm", ["cn32", "bn 0.1", "bn 0.03"]),
        ("lr,acc", ["cn32", "bn 0.03", "bn 0.1"]),
        ("norm,lr", ["bn 0.03", "bn 0.1", "cn32"]),
    ],
)
def test_sort_orders_runs(show: Show, sort: str, norms: list[str]) -> None:
    code, out, _ = show("--sort", sort, "--columns", "norm,lr")
    names = [norm if norm == "cn32" else f"{norm} {lr}" for norm, lr in cells(out)[1:4]]
    assert code == 0 and names == norms


def test_where_selects_runs_and_diverged_seeds_are_noted(show: Show) -> None:
    _, out, _ = show("--where", "norm=bn", "--where", "lr<0.1")
    assert cells(out)[1][3:5] == ["bn", "0.03"] and "cn" not in out
    assert "1 of 3 seeds diverged" in show("--where", "norm=cn")[1]


def test_columns_have_settings_and_scores(show: Show, runs: Path) -> None:
    config = from_dict({"strategy": {"name": "mine.py:Mine", "code": "0", "temperature": 2.0}})
    Store(runs).save(config, 0, {"matrix": {"correct": [[5]], "total": [10]}})
    _, out, _ = show("--columns", "norm,train.lr,seeds,acc,batch,bwt", "--sort", "acc", "--where", "lr=0.1")
    assert cells(out)[0] == ["norm", "train.lr", "seeds", "acc", "batch", "bwt"]
    assert cells(out)[1] == ["bn", "0.1", "2", "60.50 +- 0.71", "10", f"-29.50 +- {np.std([60, 61], ddof=1):.2f}"]
    _, out, _ = show("--where", "temperature>1", "--columns", "strategy,temperature,acc")
    assert cells(out) == [["strategy", "temperature", "acc"], ["mine.py:Mine", "2.0", "50.00"]]


def test_files_have_the_runs(show: Show, runs: Path, tmp_path: Path) -> None:
    code, out, err = show("--to", tmp_path / "runs.csv", "--where", "norm=bn")
    assert code == 0 and not err and "4 finished and 0 diverged runs written to" in out
    expected = load_runs(runs).where(norm="bn").to_frame()
    assert pd.read_csv(tmp_path / "runs.csv")["acc"].tolist() == expected["acc"].tolist()
    assert show("--to", tmp_path / "tasks.csv", "--by-task")[0] == 0
    assert len(pd.read_csv(tmp_path / "tasks.csv")) == 6 * 3
    assert show("--to", tmp_path / "all.jsonl.gz")[0] == 0
    loaded = load_runs(tmp_path / "all.jsonl.gz")
    assert len(loaded) == 6 and len(loaded.diverged) == 1
    assert show("--to", tmp_path / "a.md", "--columns", "norm,acc", "--sort", "acc")[0] == 0
    assert "| cn32 | 70.50 +- 0.71 |" in (tmp_path / "a.md").read_text()
    assert show("--to", tmp_path / "a.tex", "--columns", "norm,acc")[0] == 0
    assert r"cn32 & 70.50 $\pm$ 0.71 \\" in (tmp_path / "a.tex").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sort", "ac"], "unknown key 'ac'. Did you mean 'acc'"),
        (["--columns", "nrm"], "Did you mean 'norm'"),
        (["--columns", "map"], "unknown key 'map'"),
        (["--where", "norm=cnn"], "No run has norm.name=cnn; norm.name is bn, cn."),
        (["--where", "norm"], "such as norm=cn"),
        (["--where", "seed=2"], "all runs with seed=2 diverged"),
        (["--to", "runs.xlsx"], "unknown format '.xlsx'"),
        (["feed"], "no finished run 'feed'"),
    ],
)
def test_mistakes_are_one_line(show: Show, arguments: list[str], words: str) -> None:
    code, out, err = show(*arguments)
    assert code == 2 and not out and words in err and err.count("\n") == 1


def test_invalid_record_is_reported_and_the_others_are_shown(show: Show, runs: Path) -> None:
    next(runs.glob("*/0.json")).write_text("[]")
    code, out, err = show()
    assert code == 0 and "ACC" in out and "0.json: is not a valid record" in err and err.count("\n") == 1
    assert show("--to", runs / "a.csv")[0] == 2, "the file is incomplete"


def test_unfinished_runs_are_counted_with_the_command(show: Show, contnorm: Show, runs: Path, tmp_path: Path) -> None:
    def stop(root: Path, norm: str, seed: int) -> Path:
        config = from_dict({"norm": {"name": norm}})
        folder = root / config.hash / f"{seed}.unfinished"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"schema": 3, "config": config.as_dict(), "seed": seed}))
        return folder

    stop(runs, "bn", 7)
    stop(runs, "gn", 0)
    line = f"Unfinished runs: 2 stopped, 0 in progress. Resume with: contnorm resume --runs {runs}"
    for arguments in ((), ("--columns", "norm")):
        assert show(*arguments)[1].splitlines()[-1] == line
    stop(tmp_path / "stopped", "bn", 0)
    code, _, error = contnorm("show", "--runs", tmp_path / "stopped")
    assert code == 2 and f"contnorm resume --runs {tmp_path / 'stopped'}" in error and error.count("\n") == 1


# --- Several labels per image ----------------------------------------------------------------------------------------


GROUPS = ["majority", "moderate", "minority"]


def stats(tp: tuple[int, ...], ap: tuple[float, ...]) -> LabelStats:
    return LabelStats(10, tp, (4, 4, 4), (4, 4, 4), ap)


def counts(seed: int) -> LabelMatrix:
    """Two tasks of three labels: of label 0 half is lost of the first task, of the others nothing."""
    first, then = stats((4, 3, 2), (1.0, 0.6, 0.4)), stats((2, 3, 2), (0.5, 0.6, 0.4))
    end = stats((2, 3, seed + 1), (0.5, 0.25, 0.125))
    return LabelMatrix([[first, None], [then, first]], [first, end])


def multilabel_records(where: Path, seeds: int = 2, **groups: Any) -> list[Record]:
    own: dict[str, Any] = {"stream": {"name": "cocoseq", "source": "cocoseq"}, "strategy": {"name": "prs"}}
    own["memory"] = {"kind": "prs"}
    config = from_dict(merge_settings(merge_settings(STREAMS["cocoseq"].defaults, own), groups))
    store = Store(where)
    for seed in range(seeds):
        source = {"name": "cocoseq", "fingerprint": "0", "images": 1520, "published_images": 41438}
        classes = {"names": ["a", "b", "c"], "groups": GROUPS}
        store.save(config, seed, {"labels": counts(seed).to_json(), "classes": classes, "source": source})
    return list(store.find(config.hash))


def test_scores_of_all_labels_and_each_group(tmp_path: Path) -> None:
    found = multilabel_records(tmp_path)
    _, head, *rows = printed(show_scores, found, width=200).splitlines()
    assert re.search(r"C-F1 +O-F1 +mAP +FM C-F1 +FM O-F1 +FM mAP", head)
    assert [re.search(r"running  2 +(\w+)", row)[1] for row in rows[:4]] == ["overall", *GROUPS]  # type: ignore[index]
    tallies = [counts(seed).tally[-1] for seed in range(2)]
    overall = sum(c_f1(tally) for tally in tallies) / 2
    minority = sum(o_f1(tally, [2]) for tally in tallies) / 2
    assert f"  {overall:.2f} +- " in rows[0] and f"  {minority:.2f} +- " in rows[3]
    assert "50.00 +- 0.00" in rows[1] and rows[1].count("50.00 +- 0.00") == 6, "majority: half right, and half lost"
    assert rows[3].endswith("0.00 +- 0.00")
    assert any(row.endswith(": used 1,520 of the 41,438 published images of cocoseq.") for row in rows)


def test_map_by_task(tmp_path: Path) -> None:
    shown = printed(show_matrices, multilabel_records(tmp_path, seeds=1))
    assert re.search(r"after +task 0 +task 1\ntask 0 +66\.7 +-\ntask 1 +50\.0 +66\.7", shown)
