"""Public streams: from arrays, from a folder, by name; their tasks, batches and bad input."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from contnorm import bench
from contnorm.bench.engine.trainer import Trainer
from contnorm.errors import UserError

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def test_classes_are_split_over_tasks_in_sorted_order(arrays: Arrays) -> None:
    stream = bench.Stream.from_arrays(*arrays, tasks=4)
    assert [task.classes for task in stream.tasks] == [(0, 1), (2, 3), (4,), (5,)]
    assert (stream.num_tasks, stream.num_classes, stream.num_outputs, stream.input_shape) == (4, 6, 6, (12,))


def test_task_dataset_has_the_samples_of_its_task(arrays: Arrays) -> None:
    x, y, x_test, y_test = arrays
    task = bench.Stream.from_arrays(*arrays, tasks=3).tasks[1]
    assert len(task.train) == 80 and len(task.test) == 40
    expected = {tuple(row) for row in x[(y == 2) | (y == 3)].astype(np.float32)}
    assert {tuple(task.train[i][0].numpy()) for i in range(80)} == expected
    sample, label = task.test[0]
    assert label in (2, 3) and any(np.array_equal(sample, row) for row in x_test[y_test == label].astype(np.float32))


def test_tensors_and_names_of_classes(arrays: Arrays) -> None:
    x, y, x_test, y_test = arrays
    names = np.array(["dog", "cat", "ant", "bee", "elk", "fox"])
    stream = bench.Stream.from_arrays(
        torch.tensor(x), names[y], torch.tensor(x_test), names[y_test], tasks=[["dog", "cat"], ["ant", "fox", "elk"]]
    )
    assert [set(task.classes) for task in stream.tasks] == [{"dog", "cat"}, {"ant", "fox", "elk"}]
    assert stream.num_outputs == 5  # bees are in no task
    assert {stream.tasks[0].train[i][1] for i in range(80)} == {0, 1}


def test_task_ids_of_samples(arrays: Arrays) -> None:
    x, y, x_test, y_test = arrays
    stream = bench.Stream.from_arrays(x, y, x_test, y_test, task_ids=(np.arange(240) % 2, np.arange(120) % 2))
    assert stream.num_tasks == 2 and stream.num_classes == 6 and stream.num_outputs == 6
    assert stream.tasks[0].classes == stream.tasks[1].classes == tuple(range(6))


def test_domain_scenario_shares_outputs_between_tasks(arrays: Arrays) -> None:
    stream = bench.Stream.from_arrays(*arrays, tasks=3, scenario="domain")
    assert stream.num_outputs == 2 and {label for _, label in (stream.tasks[2].test[i] for i in range(40))} == {0, 1}


def test_class_order_by_seed_moves_classes_between_tasks(arrays: Arrays) -> None:
    stream = bench.Stream.from_arrays(*arrays, tasks=3, class_order="seed")
    orders = {tuple(map(tuple, _classes_by_task(stream, seed))) for seed in range(5)}
    assert len(orders) > 1 and all(sorted(c for task in order for c in task) == list(range(6)) for order in orders)


def _classes_by_task(stream: bench.Stream, seed: int) -> list[list[int]]:
    sequence = stream.sequence(seed)
    labels = stream.source.train_labels[sequence.train.image]
    return [sorted(set(labels[sequence.train.task == task].tolist())) for task in range(3)]


def test_bytes_are_scaled_and_floats_are_not() -> None:
    images, labels = np.full((8, 3, 4, 4), 51, dtype=np.uint8), np.arange(8) % 2
    scaled = bench.Stream.from_arrays(images, labels, images, labels, tasks=2).tasks[0].train[0][0]
    assert scaled.shape == (3, 4, 4) and torch.allclose(scaled, torch.tensor(0.2))
    floats = images.astype(np.float64)
    assert bench.Stream.from_arrays(floats, labels, floats, labels, tasks=2).tasks[0].train[0][0].max() == 51


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"y": np.zeros(3)}, ["y has shape (3,)", "240 samples"]),
        ({"x_test": np.zeros((120, 5))}, ["(12,)", "(5,)"]),
        ({"x": np.zeros(240)}, ["x has shape (240,)"]),
        ({"x": np.full((240, 12), np.nan)}, ["x", "NaN"]),
        ({"x": np.zeros((240, 8, 8, 3)), "x_test": np.zeros((120, 8, 8, 3))}, ["channels last", "transpose"]),
        ({"y": np.full(240, 0.5)}, ["y", "whole numbers"]),
        ({"y": np.zeros((240, 6))}, ["one label per sample"]),
        ({"tasks": 7}, ["tasks=7", "6 classes"]),
        ({"tasks": None}, ["give tasks"]),
        ({"tasks": [[0, 1], [1, 2]]}, ["each class once"]),
        ({"tasks": [[0, 9]]}, ["each class once"]),
        ({"tasks": None, "task_ids": (np.zeros(240, int), np.ones(120, int))}, ["task_ids[1]", "without gaps"]),
        ({"task_ids": (np.zeros(240, int), np.zeros(120, int))}, ["give tasks", "or task_ids"]),
        ({"scenario": "taks"}, ["stream.scenario", "taks"]),
        ({"source": "mnist"}, ["stream.source", "filled in"]),
    ],
)
def test_bad_arrays_are_rejected_in_one_line(arrays: Arrays, change: dict[str, Any], words: list[str]) -> None:
    x, y, x_test, y_test = arrays
    arguments: dict[str, Any] = {"x": x, "y": y, "x_test": x_test, "y_test": y_test, "tasks": 3, **change}
    with pytest.raises(UserError) as error:
        bench.Stream.from_arrays(**arguments).sequence()
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_notebook_shows_tasks_of_stream(arrays: Arrays) -> None:
    x, y, x_test, y_test = arrays
    names = np.array(["<a>", "b", "c", "d", "e", "f"])
    stream = bench.Stream.from_arrays(x, names[y], x_test, names[y_test], tasks=3)
    table = stream._repr_html_()
    assert table.count("<tr>") == 4 and "<td>&lt;a&gt;, b</td>" in table and "<a>" not in table
    train, test = (len(part) for part in (stream.tasks[0].train, stream.tasks[0].test))
    assert f"<td>{train}</td><td>{test}</td>" in table
    assert repr(stream.tasks[0].test) == f"TaskDataset({test} test samples)"


def test_identity_is_that_of_content_and_tasks(arrays: Arrays) -> None:
    x, y, x_test, y_test = arrays
    source = bench.Stream.from_arrays(*arrays, tasks=3).source
    assert bench.Stream.from_arrays(x.copy(), y, x_test, y_test, tasks=3).source.name == source.name
    changed = x.copy()
    changed[0, 0] += 1
    others = [
        bench.Stream.from_arrays(changed, y, x_test, y_test, tasks=3),
        bench.Stream.from_arrays(*arrays, tasks=2),
        bench.Stream.from_arrays(x, y[::-1], x_test, y_test, tasks=3),
    ]
    assert len({source.name, *(other.source.name for other in others)}) == 4


def test_batches_are_those_of_a_run() -> None:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, size=(60, 3, 8, 8)).astype(np.uint8), np.arange(60) % 4
    stream = bench.Stream.from_arrays(images, labels, images, labels, tasks=2, augment=True)
    settings = {"strategy.name": "er", "model.name": "mlp"}
    config = bench.run(stream, settings=settings, seeds=[3]).config
    trainer = Trainer(config, 3, stream.source, torch.device("cpu"))
    batches = list(stream.batches(seed=3, settings=settings))
    assert len(batches) == len(trainer.plan.steps) and sum(map(len, batches)) == 60
    for number, batch in enumerate(batches):
        _, expected, *_ = trainer._batches(trainer.rows(number, number + 1).at(0))
        assert torch.equal(batch.x, expected.x)
        assert torch.equal(batch.y, expected.label) and torch.equal(batch.task, expected.task)


def make_folder(folder: Path, splits: tuple[str, ...], size: tuple[int, int] = (20, 20)) -> Path:
    rng = np.random.default_rng(0)
    for split in splits:
        for label, name in enumerate(("ant", "bee", "cat", "dog")):
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(6):
                pixels = rng.integers(0, 64, size=(*size, 3)) + 60 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / split / name / f"{number}.png")
    return folder


def test_folder_with_train_and_test(tmp_path: Path) -> None:
    stream = bench.Stream.from_folder(make_folder(tmp_path / "pets", ("train", "test")), tasks=2)
    assert [task.classes for task in stream.tasks] == [("ant", "bee"), ("cat", "dog")]
    assert stream.input_shape == (3, 20, 20) and len(stream.tasks[0].train) == len(stream.tasks[0].test) == 12
    assert "pets@" in stream.source.name and stream.defaults["model"]["name"] == "resnet18"
    pixels = np.asarray(Image.open(tmp_path / "pets" / "train" / "ant" / "3.png"))
    expected = torch.tensor(pixels).permute(2, 0, 1) / 255
    assert any(torch.allclose(stream.tasks[0].train[i][0], expected) for i in range(12))


def test_folder_of_classes_is_split(tmp_path: Path) -> None:
    stream = bench.Stream.from_folder(make_folder(tmp_path, ("",)), tasks=2, test_share=0.5)
    assert len(stream.tasks[0].train) == len(stream.tasks[0].test) == 6
    again = bench.Stream.from_folder(tmp_path, tasks=2, test_share=0.5)
    assert again.source.name == stream.source.name


def test_classes_of_a_task_are_in_the_order_of_outputs(arrays: Arrays) -> None:
    stream = bench.Stream.from_arrays(*arrays, tasks=[[5, 0], [2, 1], [3, 4]])
    assert [task.classes for task in stream.tasks] == [(5, 0), (2, 1), (3, 4)]
    x, y, _, _ = arrays
    sample, label = stream.tasks[0].train[0]
    (original,) = {int(y[i]) for i in range(len(x)) if np.array_equal(x[i].astype(np.float32), sample)}
    assert (5, 0)[label] == original
