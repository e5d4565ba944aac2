"""Passes that compile kernels ahead are made once in a process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from contnorm.bench.config.resolve import resolve
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine import cuda_graph
from contnorm.bench.engine.trainer import Trainer
from tests.datasets import small_mnist

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_mnist(tmp_path_factory.mktemp("data"), train=200, test=50)


def made(root: Path, batch: int, seed: int = 0) -> Trainer:
    train = {"batch": batch, "replay": 4, "max_steps": 30}
    config = resolve({"stream": {"name": "split-mnist"}, "model": {"width": 16}, "train": train}, root)
    return Trainer(config, seed, load_source("mnist", root), CPU)


def test_second_passes_of_the_same_sizes_are_not_made(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[nn.Module] = []
    trainers = [made(root, batch, seed) for batch, seed in ((6, 0), (6, 1), (7, 0), (6, 2))]
    monkeypatch.setattr(cuda_graph, "_passed", set())
    monkeypatch.setattr(cuda_graph.copy, "deepcopy", lambda model: copied.append(model) or nn.Identity())
    monkeypatch.setattr(cuda_graph, "evaluation_batch", lambda trainer: 8)
    monkeypatch.setattr(torch.Tensor, "backward", lambda tensor: None)
    for trainer in trainers:
        cuda_graph._run_passes(trainer, ("network",))
    assert copied == [trainers[0].model, trainers[2].model]  # one of each batch size
    cuda_graph._run_passes(trainers[1], ("another network",))
    assert copied[2:] == [trainers[1].model]


def test_failed_pass_is_made_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "_passed", set())
    monkeypatch.setattr(cuda_graph, "evaluation_batch", lambda trainer: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            cuda_graph._run_passes(made(root, 6), ("network",))
