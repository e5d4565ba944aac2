"""A run with capped steps is evaluated on the tasks it reached, and its record is shown and reported like any other."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from contnorm.bench.config.resolve import resolve
from contnorm.bench.engine import evaluate, loop
from contnorm.bench.engine.execute import execute
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.metrics import AccuracyMatrix
from contnorm.bench.records import Store
from contnorm.cli.show import show_matrices, show_scores
from contnorm.report.report import collect_report
from tests.cli.terminal import printed
from tests.datasets import small_mnist

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_mnist(tmp_path_factory.mktemp("data"), train=400, test=100)


def capped(root: Path, steps: int, **groups: Any) -> Run:
    stream = {"name": "permuted-mnist", "train_per_task": 60, "tasks": 5}
    values = {"stream": stream, "norm": {"name": "bn"}, "train": {"max_steps": steps}, **groups}
    return Run(resolve(values, root), 0)


@pytest.mark.parametrize(("steps", "tasks"), [(3, 1), (6, 1), (7, 2), (29, 5)])
@pytest.mark.parametrize("ahead", [False, True])
def test_only_the_tasks_reached_are_evaluated(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, tasks: int, ahead: bool
) -> None:
    evaluated: list[int] = []
    count = evaluate.count_predictions

    def counting(trainer: Trainer, of: int) -> Any:
        evaluated.append(of)
        return count(trainer, of)

    for module in (evaluate, loop):
        monkeypatch.setattr(module, "count_predictions", counting)
    job = capped(root, steps, evaluate={"ahead": ahead, "moments": "oracle"})
    list(execute([job], RunOptions(runs=tmp_path, data_root=root)))
    (record,) = Store(tmp_path)
    assert record.matrix.tasks == tasks == len(record.drift["by_task"]) and max(evaluated) == tasks
    assert len(evaluated) == 2 * tasks + ahead
    assert record.raw.get("reached") == ({"tasks": tasks, "of": 5} if tasks < 5 else None)
    assert all(row[task] is not None for task in range(tasks) for row in record.matrix.correct[task:])


@pytest.mark.slow
def test_record_of_a_capped_run_is_shown_and_reported(root: Path, tmp_path: Path) -> None:
    """Also beside seeds that reached other numbers of tasks, and a record of all tasks by an earlier version."""
    store, console = Store(tmp_path), Console(file=io.StringIO(), width=200)
    jobs = [capped(root, 3), capped(root, 9, evaluate={"moments": "oracle"})]
    list(execute(jobs, RunOptions(runs=tmp_path, data_root=root)))
    for job in jobs:
        raw = dict(store.load(store.path(job.config, 0)).raw)
        full = AccuracyMatrix([[9] * 5] * 5, [10] * 5)
        more = {key: vars(full) for key in ("matrix", "matrix_running") if key in raw}
        drift = {"by_task": raw["drift"]["by_task"][:1] * 5}
        rest = {key: value for key, value in raw.items() if key not in ("reached", "seed", "seal")}
        store.save(job.config, 1, {**rest, **more, "drift": drift})
    records = list(store)
    assert sorted(record.matrix.tasks for record in records) == [1, 2, 5, 5]
    show_scores(records, console)
    show_matrices(records, console)
    assert "first 3 steps" in printed(console)
    html = collect_report(tmp_path).html()
    assert "first 3 steps" in html and "first 1 of 5" in html
