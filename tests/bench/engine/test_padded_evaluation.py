"""Evaluation in padded batches, as on a GPU: few batch sizes, and the counts of batches that are not padded."""

from pathlib import Path
from typing import Any

import pytest
import torch

from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine import evaluate
from contnorm.bench.engine.trainer import Trainer
from tests.datasets import small_mnist, small_multi_label


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_mnist(tmp_path_factory.mktemp("data"), train=200, test=150)


def settings(root: Path, **norm: Any) -> RunConfig:
    values = {
        "stream": {"name": "split-mnist", "scenario": "class"},
        "norm": {"name": "bn", **norm},
        "model": {"width": 16},
        "train": {"max_steps": 20},
    }
    return resolve(values, root)


def trained(config: RunConfig, root: Path, device: torch.device) -> Trainer:
    trainer = Trainer(config, 0, load_source("mnist", root), device)
    while trainer.done < len(trainer.plan.steps):
        trainer.step()
    return trainer


def batch_sizes(trainer: Trainer) -> list[int]:
    """Return a list to which the size of every batch is added."""
    sizes: list[int] = []
    trainer.model.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    return sizes


@pytest.mark.parametrize("norm", ["bn", "cn", "gn", "none"])
def test_padding_does_not_change_counts(
    root: Path, norm: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trained(settings(root, name=norm), root, device)
    monkeypatch.setattr(evaluate, "evaluation_batch", lambda trainer: 64)
    sizes, counts, seen = batch_sizes(trainer), {}, {}
    for padded in (False, True):
        monkeypatch.setattr(evaluate, "_may_pad", lambda trainer, padded=padded: padded)
        counts[padded] = [evaluate.count_predictions(trainer, tasks) for tasks in range(1, 6)]
        seen[padded] = sizes.copy()
        sizes.clear()
    assert counts[True] == counts[False] and sum(counts[True][-1]["matrix"]) > 0
    assert len(seen[True]) == len(seen[False])
    assert set(seen[True]) <= {1, 2, 4, 8, 16, 32, 64}
    assert not set(seen[False]) <= set(seen[True])  # without padding there are other sizes


def test_padding_does_not_change_labels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    source = small_multi_label(test=50)
    config = from_dict({"stream": {"name": "cocoseq", "source": source.name}, "model": {"name": "mlp", "width": 16}})
    trainer = Trainer(config, 0, source, device)
    sizes, rows = batch_sizes(trainer), []
    for padded in (False, True):
        monkeypatch.setattr(evaluate, "_may_pad", lambda trainer, padded=padded: padded)
        rows.append(evaluate.count_predictions(trainer, 3)["labels"]["tally"])
    assert sizes == [50, 64]
    assert rows[0]["samples"] == rows[1]["samples"] == 50 and rows[0]["predicted"] == rows[1]["predicted"]


@pytest.mark.parametrize(
    ("norm", "padded"),
    [({"name": "bn"}, True), ({"name": "gn"}, True), ({"name": "bn", "track_running_stats": False}, False)],
)
def test_samples_that_are_normalized_together_are_not_padded(
    root: Path, norm: dict[str, Any], padded: bool, device: torch.device
) -> None:
    trainer = Trainer(settings(root, **norm), 0, load_source("mnist", root), device)
    assert evaluate._may_pad(trainer) is (padded and device.type == "cuda")
