"""`contnorm show`: scores at any width, and settings that differ."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from contnorm.bench.config.defaults import changed, differences
from contnorm.bench.config.schema import from_dict, merge_settings
from contnorm.bench.records import Record, Store
from contnorm.bench.streams.tasks import STREAMS, stream_defaults
from contnorm.cli.show import show_diverged, show_matrices, show_scores, show_unsealed
from contnorm.report.run_tables import unknown_names
from contnorm.report.summaries import summarize


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
    return store.find(config.hash)


def test_settings_column_distinguishes_similar_runs(tmp_path: Path) -> None:
    plain = records(tmp_path)
    other = records(tmp_path, train={"lr": 0.1}, strategy={"forward": "separate"})
    head, *rows = printed(show_scores, [*other, *plain]).splitlines()
    assert head.endswith("settings") and len(rows) == 2
    assert rows[0].endswith("  strategy.forward=separate") and "  0.1   " in rows[0], "the learning rate has a column"
    assert rows[1].startswith(plain[0].config.hash) and "=" not in rows[1] and "  0.03  " in rows[1]


def test_no_settings_column_if_columns_distinguish_runs(tmp_path: Path) -> None:
    shared = {"train": {"lr": 0.1}}
    alike = [*records(tmp_path, **shared), *records(tmp_path, norm={"name": "cn"}, **shared)]
    assert "settings" not in printed(show_scores, alike), "both have the same learning rate"
    streams = [*records(tmp_path), *records(tmp_path, stream="split-cifar10")]
    assert "settings" not in printed(show_scores, streams), "each is as its stream says"


def test_settings_column_shows_hidden_column_values(tmp_path: Path) -> None:
    """BN has no groups, so its column shows none; they are part of a run's identity all the same."""
    shown = printed(show_scores, [*records(tmp_path), *records(tmp_path, norm={"groups": 8})])
    assert shown.splitlines()[2].endswith("norm.groups=8")


def test_single_run_shows_changed_settings(tmp_path: Path) -> None:
    assert printed(show_scores, records(tmp_path)).count("\n") == 1
    shown = printed(show_scores, records(tmp_path, train={"lr": 0.1}, strategy={"name": "er"}))
    assert shown.splitlines()[-1] == "changed from the stream's defaults: train.lr=0.1"


def test_diverged_seeds_are_listed(tmp_path: Path) -> None:
    plain, gone = records(tmp_path), from_dict({"train": {"lr": 9.0}})
    store = Store(tmp_path)
    store.save_diverged(plain[0].config, 2, "seed 2: the loss is nan.")
    store.save_diverged(gone, 0, "seed 0: the loss is inf.")
    found = store.load_all()
    output = printed(show_diverged, found.records, found.diverged).splitlines()
    some = "1 of 3 seeds diverged and is not counted. seed 2: the loss is nan."
    whole = "its only seed diverged. seed 0: the loss is inf."
    assert sorted(output) == sorted([f"{plain[0].config.hash}: {some}", f"{gone.hash}: {whole}"])


def test_no_truncation_at_any_width(two_runs: list[Record]) -> None:
    for width in range(78, 170):
        shown = printed(show_scores, two_runs, width=width)
        assert "…" not in shown and "50.50 +- 0.71" in shown, width
        assert "evaluate.drift=false" in shown and "memory.size=9" in shown, width


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    place = tmp_path_factory.mktemp("runs")
    return [*records(place), *records(place, seeds=1, memory={"size": 9}, evaluate={"drift": False})]


def test_narrow_terminal_prints_lines(two_runs: list[Record]) -> None:
    assert printed(show_scores, two_runs, width=150).startswith("run  ")
    lines = printed(show_scores, two_runs, width=80).splitlines()
    assert lines[0] == f"{two_runs[0].config.hash}  split-mnist single bn lr=0.03"
    scores = "ACC 50.50 +- 0.71  mean over the stream 70.25 +- 0.35  FM 39.50 +- 0.71  LA 70.25 +- 0.35"
    assert " ".join(lines[1:3]).split() == f"2 seeds, running: {scores}".split()
    assert lines[3].startswith("    1 seed, running: ACC") and len(lines) == 5
    assert lines[4] == "    memory.size=9 evaluate.drift=false"


def test_two_evaluations_are_one_run(tmp_path: Path) -> None:
    config = from_dict({"evaluate": {"moments": "oracle"}, "train": {"lr": 0.5}})
    matrix = {"correct": [[50]], "total": [100]}
    Store(tmp_path).save(config, 0, {"matrix": matrix, "matrix_running": {**matrix, "correct": [[40]]}})
    shown = printed(show_scores, list(Store(tmp_path)))
    assert re.search(r"running +1 +40.00 +40.00 +- +40.00", shown) and re.search(
        r"oracle +1 +50.00 +50.00 +- +50.00", shown
    )
    assert "train.lr=0.5" in shown.splitlines()[-1] and shown.count("train.lr") == 1


def evaluated_twice(where: Path, norm: str, running: int, exact: int) -> list[Record]:
    config = from_dict({"evaluate": {"moments": "oracle"}, "norm": {"name": norm}})
    matrix = {"correct": [[exact]], "total": [100]}
    Store(where).save(config, 0, {"matrix": matrix, "matrix_running": {**matrix, "correct": [[running]]}})
    return Store(where).find(config.hash)


def test_task_wise_matrix_of_class_incremental_run_is_shown(tmp_path: Path) -> None:
    config = from_dict({"evaluate": {"moments": "task"}, "stream": {"name": "split-mnist", "scenario": "class"}})
    matrix = {"correct": [[50]], "total": [100]}
    task = {**matrix, "correct": [[75]]}
    Store(tmp_path).save(config, 0, {"matrix": matrix, "matrix_task": task, "matrix_task_running": matrix})
    known, running = " ".join(printed(show_matrices, list(Store(tmp_path))).split()).split(", running moments")
    assert "task known, task-wise moments" in known and "75.0" in known and "50.0" in running
    assert "running  1      50.00" in printed(show_scores, list(Store(tmp_path)))


def test_by_task_titles_name_the_moments(tmp_path: Path) -> None:
    output = " ".join(printed(show_matrices, evaluated_twice(tmp_path, "bn", 40, 50)).split())
    running, exact = output.split("exact moments")
    assert "seed 0, running moments" in running and "40.0" in running and "50.0" in exact
    assert "moments" not in printed(show_matrices, records(tmp_path, seeds=1))


def test_scores_warn_of_different_data(tmp_path: Path) -> None:
    a, b = records(tmp_path / "a", files="2:00ff"), records(tmp_path / "b", files="2:11ff", train={"lr": 0.1})
    old = records(tmp_path / "c", files="00ff", train={"lr": 0.2})
    assert "mnist: the runs used different data" in printed(show_scores, [*a, *b])
    assert "mnist: the runs may have used different data" in printed(show_scores, [*a, *old])
    assert "different data" not in printed(show_scores, a)


def test_changed_settings_and_differences() -> None:
    cifar, default = (from_dict({"stream": {"name": "split-cifar10"}, **more}) for more in ({}, {"train": {"lr": 1}}))
    assert changed(cifar)["train.batch"] == 10, "the stream says 32"
    assert differences(cifar, default) == {"train.lr": (0.03, 1.0)}
    assert changed(from_dict({"stream": {"name": "a stream of a later version"}})).keys() == {"stream.name"}


def test_task_free_defaults_are_not_changed_settings() -> None:
    free = from_dict(
        merge_settings(stream_defaults(STREAMS["split-mnist"], "free"), {"stream": {"name": "split-mnist"}})
    )
    config = replace(free, stream=replace(free.stream, scenario="free"))
    assert changed(config) == {"stream.name": "split-mnist", "stream.scenario": "free"}
    assert "memory.size" in changed(replace(config, memory=replace(config.memory, size=50)))


def test_brackets_in_names_are_not_markup(tmp_path: Path) -> None:
    name = "r[bold]x.py:Mine"
    shown = printed(show_scores, records(tmp_path, strategy={"name": name}))
    assert name in shown


def test_unknown_names_are_shown_and_reported(tmp_path: Path) -> None:
    known, other = records(tmp_path), from_dict({"norm": {"name": "xn"}, "stream": {"name": "split-x", "source": "x"}})
    Store(tmp_path).save(other, 0, {"matrix": {"correct": [[5]], "total": [10]}})
    found = Store(tmp_path).load_all().records
    shown = printed(show_scores, found)
    assert known[0].config.hash in shown and "split-x" in shown and "xn" in shown
    output = unknown_names(found)
    assert len(output) == 2 and all(other.hash in line for line in output)
    assert "'xn'" in output[0] and "'split-x'" in output[1]


def test_unsealed_records_are_reported(tmp_path: Path) -> None:
    sealed = [summarize(record) for record in records(tmp_path, seeds=3)]
    some = [replace(sealed[0], sealed=False), *sealed[1:]]
    output = printed(show_unsealed, some)
    assert output.startswith(sealed[0].config.hash) and "1 of 3 records have no checksum (schema 1)" in output
    console = Console(file=io.StringIO())
    show_unsealed(sealed, console)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
