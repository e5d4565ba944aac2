"""`contnorm show` and `contnorm compare`: scores at any width, settings that differ, and comparisons."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scipy import stats

from contnorm.bench import compare
from contnorm.bench.config.defaults import changed, differences
from contnorm.bench.config.schema import from_dict, merge_settings
from contnorm.bench.records import Record, Store
from contnorm.bench.streams.tasks import STREAMS, stream_defaults
from contnorm.cli.compare import effect, interval, show_comparison
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
    assert printed(show_scores, two_runs, width=130).startswith("run  ")
    lines = printed(show_scores, two_runs, width=80).splitlines()
    assert lines[0] == f"{two_runs[0].config.hash}  split-mnist single bn lr=0.03"
    assert lines[1] == "    2 seeds, running: ACC 50.50 +- 0.71  FM 39.50 +- 0.71  LA 70.25 +- 0.35"
    assert lines[3].startswith("    1 seed, running: ACC") and len(lines) == 5
    assert lines[4] == "    memory.size=9 evaluate.drift=false"


def test_two_evaluations_are_one_run(tmp_path: Path) -> None:
    config = from_dict({"evaluate": {"moments": "oracle"}, "train": {"lr": 0.5}})
    matrix = {"correct": [[50]], "total": [100]}
    Store(tmp_path).save(config, 0, {"matrix": matrix, "matrix_running": {**matrix, "correct": [[40]]}})
    shown = printed(show_scores, list(Store(tmp_path)))
    assert "running  1      40.00  -   40.00" in shown and "oracle   1      50.00  -   50.00" in shown
    assert "train.lr=0.5" in shown.splitlines()[-1] and shown.count("train.lr") == 1


def evaluated_twice(where: Path, norm: str, running: int, exact: int) -> list[Record]:
    config = from_dict({"evaluate": {"moments": "oracle"}, "norm": {"name": norm}})
    matrix = {"correct": [[exact]], "total": [100]}
    Store(where).save(config, 0, {"matrix": matrix, "matrix_running": {**matrix, "correct": [[running]]}})
    return Store(where).find(config.hash)


def test_compare_matches_evaluations(tmp_path: Path) -> None:
    output = printed(show_comparison, evaluated_twice(tmp_path, "bn", 40, 50), evaluated_twice(tmp_path, "cn", 45, 52))
    rows = {re.split("  +", line)[0]: re.split("  +", line)[1:4] for line in output.splitlines()}
    assert rows["ACC"] == ["40.00", "45.00", "+5.00"]
    assert rows["ACC, exact moments"] == ["50.00", "52.00", "+2.00"]


def test_compare_uses_the_moments_of_the_memory(tmp_path: Path) -> None:
    """They are what a run with this setting is evaluated with in practice, unlike exact moments."""
    matrix = {"correct": [[50]], "total": [100]}
    memory = from_dict({"evaluate": {"moments": "memory"}})
    Store(tmp_path).save(memory, 0, {"matrix": matrix, "matrix_running": {**matrix, "correct": [[40]]}})
    running = from_dict({"norm": {"name": "cn"}})
    Store(tmp_path).save(running, 0, {"matrix": {**matrix, "correct": [[53]]}})
    output = printed(show_comparison, Store(tmp_path).find(memory.hash), Store(tmp_path).find(running.hash))
    rows = {re.split("  +", line)[0]: re.split("  +", line)[1:4] for line in output.splitlines()}
    assert rows["ACC"] == ["50.00", "53.00", "+3.00"]
    assert "evaluate.moments: memory -> running" in output


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


def test_compare_starts_with_differing_settings(tmp_path: Path) -> None:
    a, b = records(tmp_path, seeds=3), records(tmp_path, seeds=2, gain=2, train={"lr": 0.1})
    output = printed(show_comparison, a, b)
    assert "\n  train.lr: 0.03 -> 0.1\n" in output and "warning" not in output
    assert f"A  {a[0].config.hash}  split-mnist single bn\nB  {b[0].config.hash}" in output
    # Gains of 2 and 4 points: mean 3, standard deviation sqrt(2), half-width 12.706.
    row = next(line for line in output.splitlines() if line.startswith("ACC"))
    assert re.split("  +", row)[-4:] == ["+3.00 +- 1.41", "-9.71 to +15.71", "+2.00 to +4.00", "+2.12"]
    assert "2 seeds, paired" in output


@pytest.mark.parametrize("width", [60, 80])
def test_compare_truncates_no_number(tmp_path: Path, width: int) -> None:
    a, b = records(tmp_path, seeds=3), records(tmp_path, seeds=2, gain=2, train={"lr": 0.1})
    output = printed(show_comparison, a, b, width=width)
    assert "\u2026" not in output and "effect" in output
    acc = " ".join(output.split("ACC\n")[1].split("FM\n")[0].split())
    assert acc.startswith("A 50.50 +- 0.71 B 53.50 +- 2.12 B - A +3.00 +- 1.41 95 % interval -9.71 to +15.71")
    assert acc.endswith("bootstrap +2.00 to +4.00 effect +2.12")


def test_compare_without_shared_seeds_is_unpaired(tmp_path: Path) -> None:
    """Seeds 0, 1, 2 beside 3, 4 have nothing to do with each other: Welch's interval, as scipy has it."""
    a = records(tmp_path / "a", seeds=3)
    b = records(tmp_path / "b", seeds=5, gain=2, train={"lr": 0.1})[3:]
    output = printed(show_comparison, a, b)
    assert "A and B share no seed (0, 1, 2; 3, 4)" in output and "warning" not in output
    assert "Unpaired: 3 seeds of A, 2 of B" in output
    first, second = ([record.score("acc") for record in some] for some in (a, b))
    assert (first, second) == ([50.0, 51.0, 52.0], [61.0, 64.0])
    theirs = stats.ttest_ind(second, first, equal_var=False).confidence_interval(0.95)
    row = next(line for line in output.splitlines() if line.startswith("ACC"))
    cells = re.split("  +", row)
    assert cells[3:5] == ["+11.50", f"{theirs.low:+.2f} to {theirs.high:+.2f}"]
    # Deviations of 1 and 1.5 * sqrt(2) with 2 and 1 degrees of freedom: together sqrt((2 * 1 + 4.5) / 3).
    assert cells[6] == f"{11.5 / (6.5 / 3) ** 0.5:+.2f}"
    assert "one seed" in printed(show_comparison, a, b[:1])


def test_compare_uses_shared_seeds(tmp_path: Path) -> None:
    a = records(tmp_path / "a", seeds=3)
    b = records(tmp_path / "b", seeds=5, gain=2, train={"lr": 0.1})[1:]
    output = printed(show_comparison, a, b)
    assert "2 seeds, paired" in output, "seeds 1 and 2"
    row = next(line for line in output.splitlines() if line.startswith("ACC"))
    assert re.split("  +", row)[3] == "+5.00 +- 1.41", "4 and 6 points more"


def test_compare_one_seed_and_identical_runs(tmp_path: Path) -> None:
    a = records(tmp_path, seeds=1)
    output = printed(show_comparison, a, a)
    assert "no differing settings" in output and "1 seed, paired" in output.splitlines()[-3]
    assert output.splitlines()[-1] == "No difference: B and A have the same ACC in 1 paired seed."
    assert "one seed" in output


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"stream": "split-fashion-mnist"}, "stream.name"),
        ({"files": "others"}, "mnist has different content"),
        ({"of_stream": {"class_order": "seed", "tasks": 3}}, "stream.class_order, stream.tasks"),
    ],
)
def test_compare_warns_of_different_samples(tmp_path: Path, other: dict[str, Any], why: str) -> None:
    a, b = records(tmp_path / "a"), records(tmp_path / "b", **other)
    output = printed(show_comparison, a, b)
    assert f"warning: A and B did not use the same samples ({why})" in output
    assert "Unpaired: 2 seeds of A, 2 of B" in output and "Welch's" in output


def test_compare_does_not_warn_of_equal_samples(tmp_path: Path) -> None:
    a = records(tmp_path)
    b = records(tmp_path / "b", of_stream={"scenario": "class", "augment": True})
    old = records(tmp_path / "c", files=None, train={"lr": 0.1})  # a record that does not know its files
    assert "warning" not in printed(show_comparison, a, b) + printed(show_comparison, a, old)


def test_compare_pairs_fingerprints_of_different_versions(tmp_path: Path) -> None:
    a, b = records(tmp_path / "a", files="00ff"), records(tmp_path / "b", files="2:00ff", train={"lr": 0.1})
    output = " ".join(printed(show_comparison, a, b).split())
    assert "may have used different data" in output and "cannot be compared" in output and "2 seeds, paired" in output


def test_scores_warn_of_different_data(tmp_path: Path) -> None:
    a, b = records(tmp_path / "a", files="2:00ff"), records(tmp_path / "b", files="2:11ff", train={"lr": 0.1})
    old = records(tmp_path / "c", files="00ff", train={"lr": 0.2})
    assert "mnist: the runs used different data" in printed(show_scores, [*a, *b])
    assert "mnist: the runs may have used different data" in printed(show_scores, [*a, *old])
    assert "different data" not in printed(show_scores, a)


def test_no_scores_without_records() -> None:
    nothing = [float("nan")] * 2
    assert interval(nothing) == effect(nothing) == effect([1.0, 1.0]) == interval([1.0, 1.0]) == "-"


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


def test_compare_prints_the_numbers_of_bench_compare(tmp_path: Path) -> None:
    a, b = records(tmp_path, seeds=3), records(tmp_path, seeds=3, gain=2, train={"lr": 0.1})
    row = next(line for line in printed(show_comparison, a, b).splitlines() if line.startswith("ACC"))
    expected = compare(b, a, "acc")
    difference, *rest = re.split("  +", row)[-4:]
    assert difference.startswith(f"{expected.mean:+.2f} ")
    assert rest == [str(expected.interval), str(expected.bootstrap), f"{expected.effect:+.2f}"]
