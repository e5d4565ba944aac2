"""Events of a run at its start and after each task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from contnorm.bench.engine.events import Finished, Started, Steps, TaskDone

from contnorm.bench.config.resolve import resolve
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine.checkpoint import Checkpoints
from contnorm.bench.engine.loop import train_together
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.metrics.multilabel import LabelMatrix, label_score
from tests.bench.engine import test_multilabel_runs as multilabel
from tests.datasets import small_mnist

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_mnist(tmp_path_factory.mktemp("data"), train=400, test=100)


def trainer(root: Path, seed: int = 0) -> Trainer:
    values = {"stream": {"name": "permuted-mnist", "train_per_task": 60, "tasks": 3}, "norm": {"name": "bn"}}
    return Trainer(resolve(values, root), seed, load_source("mnist", root), CPU)


def of_type(events: list[tuple[Trainer, Any]], kind: type, lane: Trainer) -> list[Any]:
    return [what for of, what in events if of is lane and isinstance(what, kind)]


def test_each_lane_reports_the_scores_of_each_task(root: Path) -> None:
    lanes = [trainer(root, seed) for seed in (0, 1)]
    events: list[tuple[Trainer, Any]] = list(train_together(lanes))
    for lane in lanes:
        assert of_type(events, Started, lane) == [Started(0, 18)] and isinstance(events[0][1], Started)
        (finished,) = of_type(events, Finished, lane)
        matrix = finished.results["matrix"]
        done: list[TaskDone] = of_type(events, TaskDone, lane)
        assert [event.task for event in done] == [0, 1, 2] and [event.done for event in done] == [6, 12, 18]
        assert finished.results["task_ends"] == [6, 12, 18]
        for event, correct in zip(done, matrix["correct"], strict=True):
            expected = [None if n is None else 100 * n / of for n, of in zip(correct, matrix["total"], strict=True)]
            assert event.scores.by_task == {"accuracy": expected}
            learned = [value for value in expected if value is not None]
            assert event.scores.so_far == {"accuracy": pytest.approx(sum(learned) / len(learned))}
            assert event.memory is None or event.memory > 2**20
        seconds = [event.seconds["train"] for event in done]
        assert seconds == sorted(seconds) and seconds[-1] == finished.results["seconds"]["train"]


def test_resumed_run_reports_later_tasks_only(root: Path, tmp_path: Path) -> None:
    stopped = trainer(root)
    list(train_together([stopped], [Checkpoints(tmp_path)], report_every=1, stop=lambda: stopped.done == 8))
    lane = trainer(root)
    events: list[tuple[Trainer, Any]] = list(train_together([lane], [Checkpoints(tmp_path)]))
    assert of_type(events, Started, lane) == [Started(8, 18)]
    assert [event.task for event in of_type(events, TaskDone, lane)] == [1, 2]


@pytest.mark.parametrize("every", [1, 4, 7, 100])
def test_losses_are_reported_at_the_interval_of_loggers(root: Path, every: int) -> None:
    lane = trainer(root)
    events: list[tuple[Trainer, Any]] = list(train_together([lane], log_every=every))
    steps = [event.done for event in of_type(events, Steps, lane)]
    assert steps == sorted({*range(every, 19, every), 6, 12, 18})


@pytest.mark.slow
def test_multi_label_scores_are_those_of_the_record() -> None:
    lane = Trainer(multilabel.settings(), 0, multilabel.SOURCE, CPU)
    events: list[tuple[Trainer, Any]] = list(train_together([lane]))
    matrix = LabelMatrix.from_json(of_type(events, Finished, lane)[0].results["labels"])
    last = of_type(events, TaskDone, lane)[-1]
    assert last.scores.so_far == {name: label_score(matrix, name) for name in ("c_f1", "o_f1", "map")}
    assert [value is None for value in last.scores.by_task["map"]] == [stats is None for stats in matrix.own[-1]]
