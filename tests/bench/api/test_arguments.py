"""Unusual arguments of the Python API: they work, or fail with a message that names them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from contnorm import bench
from contnorm.errors import UserError

FAST: dict[str, Any] = {"train.max_steps": 4}
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class HalfER(bench.ER):
    """Experience replay with half the loss."""

    def loss(self, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        loss, logits = super().loss(*arguments)
        return loss / 2, logits


def small_net(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 4), nn.BatchNorm1d(4), nn.Linear(4, outputs))


def large_net(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.Linear(8, outputs))


@pytest.mark.parametrize(
    "seeds", [np.int64(2), np.arange(2), torch.arange(2), (i for i in range(2)), {0, 1}, [1, np.uint8(0), 1]]
)
def test_seeds_may_be_any_integers(stream: bench.Stream, seeds: Any) -> None:
    assert bench.run(stream, settings=FAST, seeds=seeds, lanes=1).seeds == [0, 1]


@pytest.mark.parametrize("seeds", [2.0, None, True, "5", [1.0], [True], [-1], [2**64], []])
def test_invalid_seeds_are_rejected(stream: bench.Stream, seeds: Any) -> None:
    with pytest.raises(UserError, match="seeds"):
        bench.run(stream, seeds=seeds)


def test_numbers_of_numpy_are_accepted_as_settings(stream: bench.Stream) -> None:
    config = bench.run(
        stream, batch_size=np.int64(5), lr=np.float64(0.1), settings={"train.max_steps": np.int32(2)}
    ).config  # type: ignore[arg-type]
    assert (config.train.batch, config.train.lr, config.train.max_steps) == (5, 0.1, 2)
    assert len(next(stream.batches(np.int64(4), np.int64(1)))) == 4  # type: ignore[arg-type]


def test_nested_settings_equal_dotted_ones(stream: bench.Stream) -> None:
    nested = bench.run(stream, settings={"train": {"lr": 0.1, "max_steps": 2}})
    assert nested.hash == bench.run(stream, settings={"train.lr": 0.1, "train.max_steps": 2}).hash
    with pytest.raises(UserError, match=r"0\.5.*0\.1"):
        bench.run(stream, lr=0.5, settings={"train": {"lr": 0.1}})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"memory": 5j}, ["memory=5j", "bench.Memory"]),
        ({"memory": bench.ER}, ["memory", "bench.Memory"]),
        ({"model": "resnet18"}, ["resnet18", "(12,)", "mlp"]),
    ],
)
def test_unusable_arguments_are_named(stream: bench.Stream, arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        bench.run(stream, **arguments)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_lazy_network_is_initialized_by_the_run(stream: bench.Stream) -> None:
    net = nn.Sequential(nn.LazyLinear(8), nn.BatchNorm1d(8), nn.LazyLinear(6))
    assert bench.run(stream, model=net, settings=FAST, keep_weights=True).models()[0][0].weight.shape == (8, 12)
    assert net[0].has_uninitialized_params()


def test_stream_and_experiments_are_checked(stream: bench.Stream) -> None:
    with pytest.raises(UserError, match="stream=3: use a name"):
        bench.run(3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="'norms'"):
        bench.run_all(stream, [{"norms": "bn"}])


def test_home_folder_is_expanded(stream: bench.Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    bench.run(stream, settings=FAST, runs="~/runs")
    assert len(bench.load_runs("~/runs")) == 1 and not (tmp_path / "~").exists()


def test_object_of_a_subclass_runs_its_own_code(stream: bench.Stream) -> None:
    half = bench.run(stream, strategy=HalfER(replay=7), settings=FAST, keep_weights=True)
    assert half.config.strategy.name.endswith("test_arguments.py:HalfER") and half.config.train.replay == 7
    parent = bench.run(stream, strategy=bench.ER(replay=7), settings=FAST, keep_weights=True)
    assert not torch.equal(*(result.models()[0].head.weight for result in (half, parent)))


def test_class_of_a_strategy_is_the_strategy_of_that_name(stream: bench.Stream) -> None:
    assert bench.run(stream, strategy=bench.ER, settings=FAST).hash == bench.run(stream, settings=FAST).hash


def test_run_all_keeps_objects_of_the_same_name_apart(stream: bench.Stream) -> None:
    small, large = (
        (lambda shape, outputs: small_net(shape, outputs)),
        (lambda shape, outputs: large_net(shape, outputs)),
    )
    modules = small_net((12,), 6), large_net((12,), 6)
    experiments = [{"model": model, "settings": FAST} for model in (small, large, *modules)]
    results = bench.run_all(stream, experiments, keep_weights=True, lanes=1)
    assert [result.models()[0][0].out_features for result in results] == [4, 8, 4, 8]


def test_run_all_with_the_same_experiment_twice(stream: bench.Stream) -> None:
    first, second = bench.run_all(stream, [{"settings": FAST}, {"settings": FAST}], lanes=1)
    assert first.seeds == second.seeds == [0]


def test_one_tag_for_a_network_and_a_strategy(stream: bench.Stream, tmp_path: Path) -> None:
    strategy = HalfER()
    strategy.factor = 2  # type: ignore[attr-defined]
    net = lambda shape, outputs: small_net(shape, outputs)  # noqa: E731
    config = bench.run(stream, model=net, strategy=strategy, tag="mine", settings=FAST, runs=tmp_path).config
    assert config.strategy.name == "python:mine" and config.model.name == "python:mine"


def test_result_can_be_pickled_and_copied(stream: bench.Stream) -> None:
    result = bench.run(stream, model=lambda shape, outputs: small_net(shape, outputs), settings=FAST, keep_weights=True)
    for again in (cloudpickle.loads(cloudpickle.dumps(result)), copy.deepcopy(result)):
        assert np.array_equal(again.accuracy, result.accuracy, equal_nan=True)
        assert torch.equal(again.models()[0][0].weight, result.models()[0][0].weight)


def test_recorded_runs_give_a_result_and_a_comparison(stream: bench.Stream, tmp_path: Path) -> None:
    first, second = bench.run_all(stream, [{"norm": norm} for norm in ("bn", "cn")], seeds=2, lanes=1, runs=tmp_path)
    runs = bench.load_runs(tmp_path)
    result = bench.Result(runs.where(norm="bn"))
    assert np.array_equal(result.accuracy, first.accuracy, equal_nan=True) and result.plot().axes
    comparison = bench.compare(runs.where(norm="cn"), runs.where(norm="bn"))
    assert comparison.differences == bench.compare(second, first).differences
    for path in ("runs", tmp_path):
        with pytest.raises(UserError, match=r"use the records of one experiment, such as bench\.load_runs"):
            bench.Result(path)  # type: ignore[arg-type]
    for wrong in ("runs", 3):
        with pytest.raises(UserError, match="a="):
            bench.compare(wrong, first)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["float16", "float64", ">f4", "bool", "int16", "uint8"])
def test_types_of_samples(arrays: Arrays, kind: str) -> None:
    x, y, x_test, y_test = arrays
    x, x_test = (np.abs(20 * values).astype(kind)[:, ::-1] for values in (x, x_test))
    stream = bench.Stream.from_arrays(x, y, x_test, y_test, tasks=3)
    scale = 255 if kind == "uint8" else 1
    samples = torch.stack([sample for sample, _ in stream.tasks[0].test])
    assert samples.dtype == torch.float32
    assert np.allclose(samples.sort(0).values, np.sort(x_test[y_test < 2].astype(np.float32) / scale, axis=0))


@pytest.mark.parametrize(
    "convert",
    [
        lambda y: y.astype(object),
        lambda y: y.astype(float),
        lambda y: y.tolist(),
        lambda y: torch.from_numpy(y),
        lambda y: pd.Series(y, index=range(5, 5 + len(y))),
        lambda y: pd.DataFrame({"label": y}),
    ],
)
def test_types_of_labels(arrays: Arrays, convert: Any) -> None:
    x, y, x_test, y_test = arrays
    stream = bench.Stream.from_arrays(x, convert(4 * y), x_test, convert(4 * y_test), tasks=3)
    assert [task.classes for task in stream.tasks] == [(0, 4), (8, 12), (16, 20)]  # as numbers, not as text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"y": np.minimum(np.repeat(np.arange(6), 40), 4)}, "class 5"),
        ({"y": ["a"] * 240}, "no training samples"),
    ],
)
def test_invalid_arrays_are_rejected(arrays: Arrays, change: dict[str, Any], words: str) -> None:
    values = {**dict(zip(("x", "y", "x_test", "y_test"), arrays, strict=True)), "tasks": 3, **change}
    with pytest.raises(UserError, match=words):
        bench.Stream.from_arrays(**values)


def test_number_of_tasks_may_be_of_numpy(arrays: Arrays) -> None:
    assert bench.Stream.from_arrays(*arrays, tasks=np.int64(2)).num_tasks == 2  # type: ignore[arg-type]


def test_tensors_that_numpy_has_no_type_for(arrays: Arrays) -> None:
    x, y, x_test, y_test = arrays
    samples = [torch.tensor(values, dtype=torch.bfloat16, requires_grad=True) for values in (x, x_test)]
    stream = bench.Stream.from_arrays(samples[0], y, samples[1], y_test, tasks=3)
    values = torch.stack([sample for sample, _ in stream.tasks[0].test])
    assert torch.equal(values.sort(0).values, samples[1][:40].detach().float().sort(0).values)


def test_evaluate_needs_one_output_per_class(stream: bench.Stream) -> None:
    with pytest.raises(UserError, match="6"):
        bench.evaluate(nn.Linear(12, 5), stream)
