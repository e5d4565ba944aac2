"""Class-incremental runs are also counted with the task known: the same outputs, those of other tasks left out."""

from pathlib import Path

import pytest
import torch

from contnorm.bench.config.resolve import resolve
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine.evaluate import count_predictions
from contnorm.bench.engine.execute import execute
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.records import Store, read_record
from tests.datasets import small_mnist

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_mnist(tmp_path_factory.mktemp("data"), train=400, test=100)


def lane(root: Path, scenario: str) -> Trainer:
    config = resolve({"stream": {"name": "split-mnist", "scenario": scenario}, "norm": {"name": "bn"}}, root)
    return Trainer(config, 0, load_source("mnist", root), CPU)


def test_task_aware_and_class_counts_use_the_same_outputs(root: Path) -> None:
    made = lane(root, "class")
    for _ in range(6):
        made.step()
    right = count_predictions(made, 5)
    made.model.eval()
    stream = made.data.sequence
    with torch.no_grad():
        logits = made.model(made.data.test_x(torch.arange(len(stream.test))))
    all_right, within = [0] * 5, [0] * 5
    for row, label, task in zip(logits, stream.test.label.tolist(), stream.test.task.tolist(), strict=True):
        all_right[task] += int(row.argmax()) == label
        pair = row[2 * task : 2 * task + 2]
        within[task] += int(pair.argmax()) + 2 * task == label
    assert right == {"matrix": all_right, "matrix_task": within}
    assert sum(within) > sum(all_right)  # else the two could be mixed up unseen


def test_record_has_both_counts(root: Path, tmp_path: Path) -> None:
    values = {
        "stream": {"name": "split-mnist", "scenario": "class"},
        "evaluate": {"ahead": True},
        "train": {"max_steps": 8},
    }
    config = resolve(values, root)
    for _ in execute([Run(config, 0)], RunOptions(runs=tmp_path, data_root=root)):
        pass
    raw = read_record(Store(tmp_path).path(config, 0)).raw
    plain, known = raw["matrix"], raw["matrix_task"]
    assert plain["total"] == known["total"] and len(known["correct"]) == len(plain["total"]) == raw["reached"]["tasks"]
    for mine, theirs in zip([*known["correct"], known["before"]], [*plain["correct"], plain["before"]], strict=True):
        assert all(a >= b for a, b in zip(mine, theirs, strict=True))
    assert raw["parameters"] > 784 * 100
