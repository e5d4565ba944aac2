"""Which trainers compute weight gradients on a second stream: only those for which that was measured to be faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from contnorm.bench.config.resolve import resolve
from contnorm.bench.data.dataset import Source
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine import cuda_graph
from contnorm.bench.engine.cuda_graph import MOST_WITH_SIDE_STREAMS
from contnorm.bench.engine.trainer import Trainer
from tests.datasets import small_cifar100


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_cifar100(tmp_path_factory.mktemp("data"), per_class=20)


@pytest.fixture(scope="module")
def source(root: Path) -> Source:
    return load_source("cifar100", root)


@pytest.fixture
def uses_side_stream(root: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cuda_graph, "has_side_streams", lambda: True)

    def answer(norm: str, together: int, strategy: str = "er", **train: Any) -> bool:
        values: dict[str, Any] = {
            "stream": {"name": "split-cifar100", "tasks": 2},
            "strategy": {"name": strategy},
            "norm": {"name": norm, "groups": 2},
            "model": {"width": 2, "stem": "pool"},
            "train": {"batch": 10, "replay": 10, **train},
        }
        trainer = Trainer(resolve(values, root), 0, source, torch.device("cpu"))
        return cuda_graph._uses_side_stream(trainer, together)

    return answer


@pytest.mark.parametrize("norm", ["cn", "gn", "brn", "sn", "none"])
def test_up_to_eight_trainers_have_side_streams(uses_side_stream: Any, norm: str) -> None:
    assert [uses_side_stream(norm, together) for together in (1, 5, MOST_WITH_SIDE_STREAMS, 9)] == [True] * 3 + [False]


def test_several_trainers_with_batch_norm_have_them_in_bfloat16_only(uses_side_stream: Any) -> None:
    """The kernels of torch's batch norm in float32 are slower beside others."""
    assert uses_side_stream("bn", 1, precision="tf32")
    assert not uses_side_stream("bn", 2, precision="tf32")
    assert uses_side_stream("bn", 2, precision="bf16")


def test_several_trainers_with_large_passes_have_none(uses_side_stream: Any) -> None:
    """A pass of ER has the samples of stream and memory: 98 of 32x32 are more than 100,000 positions, 96 are not."""
    assert uses_side_stream("cn", 2, batch=48, replay=48)
    assert not uses_side_stream("cn", 2, batch=49, replay=49)
    assert uses_side_stream("cn", 1, batch=49, replay=49)


def test_user_strategies_have_none(uses_side_stream: Any, tmp_path: Path) -> None:
    """They may call `torch.autograd.grad`, which does not return gradients of another stream."""
    (tmp_path / "mine.py").write_text(
        """
from contnorm.bench import Strategy

class Mine(Strategy):
    def loss(self, model, head, stream):
        return head.cross_entropy(model(stream.x), stream).mean(), None
"""
    )
    assert not uses_side_stream("cn", 1, strategy=f"{tmp_path / 'mine.py'}:Mine")


def test_gpus_with_few_priorities_have_none(uses_side_stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "has_side_streams", lambda: False)
    assert not uses_side_stream("cn", 1)
