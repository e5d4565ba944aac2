"""The table of convolutions of a run: chosen by its settings, stored in checkpoints, obeyed on resume and recorded.

On a GPU: the law that a seed's bits do not depend on the seeds beside it, with kernels for all convolutions.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig, TrainConfig
from contnorm.bench.data.dataset import Source
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine import trainer as trainer_module
from contnorm.bench.engine.cuda_graph import SHORT, GraphStepper
from contnorm.bench.engine.provenance import numerics, provenance
from contnorm.bench.engine.run import Run
from contnorm.bench.engine.trainer import Trainer
from contnorm.errors import UserError
from contnorm.kernels.convolution import (
    DIRECTIONS,
    EMPTY,
    Convolution,
    ConvolutionTable,
    Geometry,
    Tiles,
    convolve,
    input_gradient,
    weight_gradient,
)
from tests.datasets import small_cifar100

CPU = torch.device("cpu")
SIZES = Geometry(20, 16, 8, 8, 16, 3, 1, 1)
TABLE = ConvolutionTable(
    {
        ("forward", "float32", SIZES): Tiles(64, 16, 16, 1, 4, 3),
        ("weight", "bfloat16", SIZES): Tiles(16, 16, 64, 4, 2, 3, by_position=True),
    }
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_cifar100(tmp_path_factory.mktemp("data"), per_class=61)


@pytest.fixture(scope="module")
def source(root: Path) -> Source:
    return load_source("cifar100", root)


def settings(root: Path, precision: str = "fp32", **train: Any) -> RunConfig:
    values: dict[str, Any] = {
        "stream": {"name": "split-cifar100", "tasks": 2, "augment": False},
        "strategy": {"name": "er"},
        "norm": {"name": "bn"},
        "model": {"width": 16},
        "train": {"precision": precision, "lr": 0.01, **train},
        "evaluate": {"drift": False},
    }
    return resolve(values, root)


# --- choice -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "dtypes"),
    [
        ({"precision": "tf32"}, {"float32"}),
        ({"precision": "bf16"}, {"bfloat16"}),
        ({"precision": "fp32"}, set()),
        ({"precision": "tf32", "deterministic": False}, set()),
        ({"precision": "tf32", "convolutions": "cudnn"}, set()),
    ],
    ids=str,
)
def test_table_depends_on_the_settings(
    train: dict[str, Any], dtypes: set[str], root: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "table_for", lambda device: TABLE)
    trainer = Trainer(settings(root, **train), 0, source, CPU)
    assert {dtype for _, dtype, _ in trainer.convolutions.entries} == dtypes


def test_networks_without_convolutions_have_no_table(
    root: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "table_for", lambda device: TABLE)
    config = settings(root, "tf32")
    config = replace(config, model=replace(config.model, name="mlp"))
    assert Trainer(config, 0, source, CPU).convolutions == EMPTY


def test_default_setting_keeps_the_identity_of_runs() -> None:
    default = RunConfig(train=TrainConfig(precision="tf32"))
    assert default.hash == RunConfig(train=TrainConfig(precision="tf32", convolutions="auto")).hash
    assert default.hash != RunConfig(train=TrainConfig(precision="tf32", convolutions="cudnn")).hash


# --- checkpoints ------------------------------------------------------------------------------------------------------


def saved(trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State and progress as a checkpoint contains them."""
    state = {name: tensor.clone() for name, tensor in trainer.state().items()}
    return state, json.loads(json.dumps(trainer.progress()))


def test_resumed_run_keeps_its_table(root: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (Trainer(settings(root), 0, source, CPU) for _ in range(2))
    monkeypatch.setattr(trainer_module, "can_launch", lambda device: True)
    old.convolutions = TABLE.only("float32")
    new.convolutions = TABLE.only("bfloat16")  # as if the package had another table by now
    new.load(*saved(old))
    assert new.convolutions == TABLE.only("float32")


def test_checkpoint_without_a_table_resumes_with_cudnn(root: Path, source: Source) -> None:
    old, new = (Trainer(settings(root), 0, source, CPU) for _ in range(2))
    new.convolutions = TABLE
    state, progress = saved(old)
    assert "convolutions" not in progress, "as in checkpoints of older versions"
    new.load(state, progress)
    assert new.convolutions == EMPTY


def test_table_that_cannot_be_executed_is_refused(root: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (Trainer(settings(root), 0, source, CPU) for _ in range(2))
    old.convolutions = TABLE
    monkeypatch.setattr(trainer_module, "can_launch", lambda device: False)
    with pytest.raises(UserError, match=f"{TABLE.digest}.*cpu"):
        new.load(*saved(old))


def test_record_names_the_table(root: Path, source: Source) -> None:
    assert provenance(Run(settings(root), 0), source, CPU, TABLE)["convolutions"] == TABLE.digest
    assert "convolutions" not in provenance(Run(settings(root), 0), source, CPU)


# --- on a GPU ---------------------------------------------------------------------------------------------------------

on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def full_table(trainer: Trainer, dtype: str, batch: int) -> ConvolutionTable:
    """Tiles for all convolutions of a network, in all directions."""
    entries: dict[Any, Tiles] = {}

    def note(module: Convolution, inputs: tuple[Tensor, ...]) -> None:
        geometry = module.geometry(inputs[0])
        assert geometry is not None
        rounded = dtype == "float32"
        tiles = Tiles(32, 16, 32, 3, 4, 3, by_position=geometry.height <= 4, rounded=rounded)
        for direction in DIRECTIONS:
            prepared = rounded and (direction != "input" or geometry.stride == 1)
            entries[direction, dtype, geometry] = tiles._replace(prepared=prepared)

    layers = [module for module in trainer.model.modules() if isinstance(module, Convolution)]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]  # type: ignore[arg-type]
    with torch.no_grad():
        trainer.model.eval()(torch.zeros(batch, 3, 32, 32, device=trainer.device))
    for hook in hooks:
        hook.remove()
    return ConvolutionTable(entries)


def trained(config: RunConfig, source: Source, seeds: list[int], graph: bool, table: bool = True) -> list[Trainer]:
    """Trainers after the steps of two tasks, with kernels for all convolutions."""
    trainers = [Trainer(config, seed, source, torch.device("cuda")) for seed in seeds]
    dtype = "bfloat16" if config.train.precision == "bf16" else "float32"
    for trainer in trainers:
        tables = [full_table(trainer, dtype, size) for size in (10, 20)]
        both = ConvolutionTable({**tables[0].entries, **tables[1].entries})
        trainer.convolutions = both if table else EMPTY
    steps = len(trainers[0].plan.steps)
    assert steps > 2 * SHORT
    with numerics(config.train):
        if graph:
            GraphStepper(trainers).advance(steps)
        else:
            for _ in range(steps):
                for trainer in trainers:
                    trainer.step()
    return trainers


def same(a: Trainer, b: Trainer) -> bool:
    return all(torch.equal(tensor, b.state()[name]) for name, tensor in a.state().items())


class TestLaw:
    """A seed's bits do not depend on the seeds beside it, nor on capture."""

    pytestmark = on_a_gpu

    @pytest.mark.slow
    @pytest.mark.parametrize("precision", ["tf32", "bf16"])
    def test_seed_alone_equals_the_seed_among_others(self, root: Path, source: Source, precision: str) -> None:
        config = settings(root, precision)
        alone = trained(config, source, [3], graph=True)[0]
        assert same(alone, trained(config, source, [3], graph=False)[0]), "captured and eager"
        for seeds in ([3, 1], [1, 3], [0, 1, 2, 3, 4], [7, 6, 5, 4, 3, 2, 1, 0]):
            beside = trained(config, source, seeds, graph=True)[seeds.index(3)]
            assert same(alone, beside), seeds
        assert not same(alone, trained(config, source, [3], graph=True, table=False)[0]), "the kernels were not used"

    @pytest.mark.slow
    @pytest.mark.parametrize("precision", ["tf32", "bf16"])
    @pytest.mark.parametrize(("strategy", "stem"), [("er", "pool"), ("er", "plain"), ("derpp", "pool")])
    @pytest.mark.parametrize("norm", ["cn", "bn"])
    def test_whole_networks_give_equal_bits_twice(
        self, root: Path, source: Source, norm: str, strategy: str, stem: str, precision: str
    ) -> None:
        """Eight seeds with the table of the package, in its sizes; a race in a kernel would show now and then."""
        values = {
            "stream": {"name": "split-cifar100", "augment": False},
            "strategy": {"name": strategy},
            "norm": {"name": norm},
            "model": {"stem": stem},
            "train": {"precision": precision, "lr": 0.003},
            "evaluate": {"drift": False},
        }
        config, ends = resolve(values, root), []
        for _ in range(2):
            trainers = [Trainer(config, seed, source, torch.device("cuda")) for seed in range(8)]
            with numerics(config.train):
                GraphStepper(trainers).advance(400)
            ends.append(trainers)
        assert [same(a, b) for a, b in zip(*ends, strict=True)] == [True] * 8

    # TF32 keeps 11 bits. In units of the last one, the relative error of a product of two rounded numbers has variance
    # 2/12; if they are truncated, it has the mean 1 besides, so the RMS is sqrt(7) = 2.65 times as large.
    @pytest.mark.parametrize(
        ("tiles", "most"),
        [
            (Tiles(64, 64, 32, 1, 4, 3, rounded=True), 1.05),
            (Tiles(64, 64, 32, 1, 4, 3, rounded=True, prepared=True), 1.05),
            (Tiles(64, 64, 32, 1, 4, 3), 2.75),
        ],
        ids=["rounded", "prepared", "truncated"],
    )
    def test_error_is_comparable_with_cudnns(self, tiles: Tiles, most: float) -> None:
        g = Geometry(20, 128, 8, 8, 128, 3, 1, 1)
        chance = torch.Generator("cuda").manual_seed(0)

        def noise(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=chance, device="cuda")
            return values.contiguous(memory_format=torch.channels_last)

        x, weight, dy = noise(20, 128, 8, 8), noise(128, 128, 3, 3), noise(20, 128, 8, 8)

        def all_of(*tensors: Tensor) -> list[Tensor]:
            a, b = (tensor.clone().requires_grad_() for tensor in tensors[:2])
            y = nn.functional.conv2d(a, b, None, 1, 1)
            y.backward(tensors[2])
            assert a.grad is not None and b.grad is not None
            return [y.detach(), a.grad, b.grad]

        exact = all_of(x.double(), weight.double(), dy.double())
        with numerics(TrainConfig(precision="tf32")):
            cudnn = all_of(x, weight, dy)
        ours = [
            convolve(x, weight, g, tiles),
            input_gradient(dy, weight, g, tiles),
            weight_gradient(dy, x, g, tiles),
        ]
        for actual, other, target in zip(ours, cudnn, exact, strict=True):
            assert (actual - target).norm() <= most * (other - target).norm()
