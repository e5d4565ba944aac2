"""Unusual arguments of the Python API: they work, or fail with a message that names them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from contnorm import bench
from contnorm.errors import UserError

FAST: dict[str, Any] = {"train.max_steps": 4}


class HalfER(bench.ER):
    """Experience replay with half the loss."""

    def loss(self, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        loss, logits = super().loss(*arguments)
        return loss / 2, logits


def small_net(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 4), nn.BatchNorm1d(4), nn.Linear(4, outputs))


def large_net(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.Linear(8, outputs))


@pytest.mark.parametrize("seeds", [2.0, None, True, "5", [1.0], [True], [-1], [2**64], []])
def test_invalid_seeds_are_rejected(stream: bench.Stream, seeds: Any) -> None:
    with pytest.raises(UserError, match="seeds"):
        bench.run(stream, seeds=seeds)


@pytest.mark.parametrize("name", ["keep_weights", "memory_moments", "progress"])
def test_only_booleans_are_switches(stream: bench.Stream, name: str) -> None:
    with pytest.raises(UserError, match=f"{name}='no': use True"):
        bench.run(stream, **{name: "no"})  # type: ignore[arg-type]


def test_numbers_of_numpy_are_accepted_as_settings(stream: bench.Stream) -> None:
    config = bench.run(
        stream, batch_size=np.int64(5), lr=np.float64(0.1), settings={"train.max_steps": np.int32(2)}
    ).config  # type: ignore[arg-type]
    assert (config.train.batch, config.train.lr, config.train.max_steps) == (5, 0.1, 2)
    assert len(next(stream.batches(np.int64(4), np.int64(1)))) == 4  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        *(("learning_rate", "'lr'"), ("batch", "'batch_size'"), ("epochs", "train.passes"), ("lane", "'lanes'")),
        *(("optimizer", "settings={'train.optimizer'"), ("scenario", "load_stream(..., scenario"), ("seed", "'seeds'")),
    ],
)
def test_unknown_arguments_name_what_is_meant(stream: bench.Stream, argument: str, words: str) -> None:
    for call in (bench.run, bench.sweep):
        with pytest.raises(UserError, match=f"unknown argument '{argument}'. Did you mean .*{re.escape(words)}"):
            call(stream, **{argument: 3})  # type: ignore[operator]


@pytest.mark.parametrize("argument", [{"norm": ["bn", "cn"]}, {"lr": [0.1, 0.2]}, {"strategy": ("er", "lwf")}])
def test_several_values_are_a_sweep(stream: bench.Stream, argument: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"takes one value\. Run several with bench\.sweep"):
        bench.run(stream, **argument)


def test_notebooks_show_the_frames_of_the_user(stream: bench.Stream) -> None:
    class Wrong(bench.Strategy):
        def loss(self, model: Any, head: Any, stream: Any) -> Any:
            return model(stream.x) + torch.zeros(7)

    with pytest.raises(UserError) as error:
        bench.run(stream, strategy=Wrong, settings=FAST, lanes=1)
    *frames, message = error.value._render_traceback_()
    assert len(frames) == 2 and "bench.run(" in frames[0] and "torch.zeros(7)" in frames[1]
    assert "must match the size of tensor b (7)" in message


def test_network_that_returns_probabilities_is_remarked(stream: bench.Stream, caplog: pytest.LogCaptureFixture) -> None:
    for last in (nn.Identity(), nn.LogSoftmax(1), nn.Softmax(1)):
        assert not caplog.messages
        bench.run(stream, model=nn.Sequential(small_net((12,), 6), last), settings=FAST, seeds=2, lanes=1)
    assert len(caplog.messages) == 1 and "Leave the softmax out" in caplog.text


def test_nested_settings_equal_dotted_ones(stream: bench.Stream) -> None:
    nested = bench.run(stream, settings={"train": {"lr": 0.1, "max_steps": 2}})
    assert nested.hash == bench.run(stream, settings={"train.lr": 0.1, "train.max_steps": 2}).hash
    with pytest.raises(UserError, match=r"0\.5.*0\.1"):
        bench.run(stream, lr=0.5, settings={"train": {"lr": 0.1}})


def test_lazy_network_is_initialized_by_the_run(stream: bench.Stream) -> None:
    net = nn.Sequential(nn.LazyLinear(8), nn.BatchNorm1d(8), nn.LazyLinear(6))
    assert bench.run(stream, model=net, settings=FAST, keep_weights=True).models()[0][0].weight.shape == (8, 12)
    assert net[0].has_uninitialized_params()


def test_object_of_a_subclass_runs_its_own_code(stream: bench.Stream) -> None:
    half = bench.run(stream, strategy=HalfER(replay=7), settings=FAST, keep_weights=True)
    assert half.config.strategy.name.endswith("test_arguments.py:HalfER") and half.config.train.replay == 7
    parent = bench.run(stream, strategy=bench.ER(replay=7), settings=FAST, keep_weights=True)
    assert not torch.equal(*(result.models()[0].head.weight for result in (half, parent)))


def test_run_all_keeps_objects_of_the_same_name_apart(stream: bench.Stream) -> None:
    small, large = (
        (lambda shape, outputs: small_net(shape, outputs)),
        (lambda shape, outputs: large_net(shape, outputs)),
    )
    modules = small_net((12,), 6), large_net((12,), 6)
    experiments = [{"model": model, "settings": FAST} for model in (small, large, *modules)]
    results = bench.run_all(stream, experiments, keep_weights=True, lanes=1)
    assert [result.models()[0][0].out_features for result in results] == [4, 8, 4, 8]


def test_one_tag_for_a_network_and_a_strategy(stream: bench.Stream, tmp_path: Path) -> None:
    strategy = HalfER()
    strategy.factor = 2  # type: ignore[attr-defined]
    net = lambda shape, outputs: small_net(shape, outputs)  # noqa: E731
    config = bench.run(stream, model=net, strategy=strategy, tag="mine", settings=FAST, runs=tmp_path).config
    assert config.strategy.name == "python:mine" and config.model.name == "python:mine"


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


def test_evaluate_needs_one_output_per_class(stream: bench.Stream) -> None:
    with pytest.raises(UserError, match="6"):
        bench.evaluate(nn.Linear(12, 5), stream)
