"""A run with capped steps is evaluated on the tasks it reached, and its record is shown and reported like any other."""

from pathlib import Path
from typing import Any

import pytest

from contnorm.bench.config.resolve import resolve
from contnorm.bench.engine import evaluate, loop
from contnorm.bench.engine.execute import execute
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.records import Store
from tests.datasets import small_mnist


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
