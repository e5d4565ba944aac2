"""`bench.run`: arguments, records, identity of objects, processes and interruption."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from contnorm import bench
from contnorm.bench.records import Store
from contnorm.cli.main import app
from contnorm.errors import UserError
from tests.datasets import small_mnist

FAST: dict[str, Any] = {"train.max_steps": 6}


def make_net(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(input_shape[0], 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, num_outputs))


@pytest.mark.slow
def test_results_are_those_of_the_command_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = small_mnist(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    arguments = ["run", "--stream", "split-mnist", "--strategy", "er", "--norm", "cn4", "--seeds", "2", "--lr", "0.1"]
    arguments += ["--data-root", str(root), "--runs", "command", "--replay", "7", "--set", "stream.tasks=3"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    stream = bench.load_stream("split-mnist", root=root, tasks=3)
    result = bench.run(stream, norm="cn4", strategy=bench.ER(replay=7), lr=0.1, seeds=2)
    recorded = {record.seed: record for record in Store(tmp_path / "command")}
    assert result.hash == recorded[0].config.hash
    for record in result.records:
        assert record.raw["matrix"] == recorded[record.seed].raw["matrix"]
        assert record.raw["drift"] == recorded[record.seed].raw["drift"]


def test_nothing_is_written_without_a_folder(
    stream: bench.Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = bench.run(stream, settings=FAST, keep_weights=True, seeds=1)
    assert not list(tmp_path.iterdir()) and result.records[0].path is None
    assert len(result.models()) == 1  # the weights are in memory


def test_model_norm_layers_are_converted_on_a_copy(stream: bench.Stream) -> None:
    net = make_net((12,), 6)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    result = bench.run(stream, model=net, norm="cn", settings=FAST, keep_weights=True)
    assert type(net[1]) is nn.BatchNorm1d and all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert type(result.models()[0][1]).__name__ == "ContinualNorm1d"
    assert list(result.records[0].raw["norms"]) == ["ContinualNorm1d(auto)"]


@pytest.mark.slow
def test_module_gives_all_seeds_its_weights(stream: bench.Stream) -> None:
    result = bench.run(
        stream, model=make_net((12,), 6), norm="bn", settings={"train.lr": 1e-30}, seeds=2, keep_weights=True
    )
    first, second = (model.state_dict() for model in result.models())
    assert torch.equal(first["0.weight"], second["0.weight"])
    assert "for all seeds" in result.records[0].raw["initial_weights"]
    made = bench.run(stream, model=make_net, norm="bn", settings={"train.lr": 1e-30}, seeds=2, keep_weights=True)
    assert not torch.equal(*(model.state_dict()["0.weight"] for model in made.models()))


def test_factory_may_make_its_norms_itself(stream: bench.Stream) -> None:
    def make(input_shape: tuple[int, ...], num_outputs: int, norm: Any) -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (12, 1, 1)), norm(12), nn.Flatten(), nn.Linear(12, num_outputs))

    result = bench.run(stream, model=make, norm="cn4", settings=FAST)
    assert result.records[0].raw["norms"] == {"ContinualNorm2d(4)": 1}


@pytest.mark.parametrize(
    "arguments",
    [
        {"strategy": bench.ER(replay=4)},
        {"replay": 4},
        {"settings": {"train.replay": 4}},
        {"strategy": "ER", "settings": {"train.replay": 4, "strategy.name": "ER"}},
    ],
)
def test_objects_and_settings_give_the_same_hash(stream: bench.Stream, arguments: dict[str, Any]) -> None:
    reference = bench.run(stream, strategy="er", settings={"train.replay": 4, **FAST})
    arguments = {**arguments, "settings": {**arguments.get("settings", {}), **FAST}}
    assert bench.run(stream, **arguments).hash == reference.hash


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"norm": "cnn"}, ["norm", "cnn"]),
        ({"norm": "cn0"}, ["norm", "cn0"]),
        ({"norm": ["bn", "cn"]}, ["norm="]),
        ({"lr": 0.1, "settings": {"train.lr": 0.2}}, ["lr", "0.1", "0.2"]),
        ({"strategy": bench.ER(replay=4), "replay": 5}, ["ER", "train.replay", "4", "5"]),
        ({"settings": {"train.lrr": 0.1}}, ["train.lrr", "train.lr"]),
        ({"seeds": 0}, ["seeds=0"]),
        ({"seeds": [1, -1]}, ["-1"]),
        ({"seeds": []}, ["at least 1"]),
        ({"device": "gpu"}, ["gpu", "cuda"]),
        ({"lanes": 0}, ["lanes=0"]),
        ({"threads": 0}, ["threads=0"]),
        ({"model": 5j}, ["model=5j"]),
        ({"strategy": 5j}, ["strategy=5j"]),
        ({"model": "resnet19"}, ["resnet19", "resnet18"]),
        ({"tag": "a\nb", "model": make_net}, ["model.name"]),
        ({"model": lambda shape, outputs: nn.Flatten(), "norm": "none"}, ["model", "outputs"]),
        ({"model": lambda shape, outputs: 1 / 0}, ["ZeroDivisionError"]),
    ],
)
def test_bad_arguments_are_rejected_in_one_line(
    stream: bench.Stream, tmp_path: Path, arguments: dict[str, Any], words: list[str]
) -> None:
    folder = None if "model" in arguments and "tag" not in arguments else tmp_path / "runs"
    with pytest.raises(UserError) as error:
        bench.run(stream, runs=folder, **arguments)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_diverged_seeds_are_reported(stream: bench.Stream, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError, match="learning rate"):
        bench.run(stream, model="mlp", norm="none", lr=1e30)
    assert not caplog.messages, "the error says it once"


@pytest.mark.slow
def test_run_all_gives_what_single_runs_give(stream: bench.Stream) -> None:
    experiments = [{"norm": "bn", "settings": FAST}, {"norm": "gn", "strategy": "single", "settings": FAST}]
    together = bench.run_all(stream, experiments, seeds=2)
    for result, experiment in zip(together, experiments, strict=True):
        alone = bench.run(stream, seeds=2, lanes=1, **experiment)
        assert result.hash == alone.hash and np.array_equal(result.accuracy, alone.accuracy, equal_nan=True)


def test_settings_override_the_default_norm_and_strategy(stream: bench.Stream) -> None:
    result = bench.run(stream, settings={"norm.name": "bn", "strategy.name": "single", **FAST})
    assert (result.config.norm.name, result.config.strategy.name) == ("bn", "single")
    with pytest.raises(UserError, match="norm"):
        bench.run(stream, norm="gn", settings={"norm.name": "bn"})
