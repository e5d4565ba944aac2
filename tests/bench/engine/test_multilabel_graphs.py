"""On a GPU: PRS with Adam and clipped gradients in a graph gives the bits of single steps, stopped or not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from contnorm.bench.config.schema import RunConfig, from_dict, merge_settings
from contnorm.bench.engine.cuda_graph import SHORT, GraphStepper
from contnorm.bench.engine.provenance import numerics
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.streams import device as device_module
from contnorm.bench.streams.tasks import STREAMS
from tests.bench.engine.stopped_runs import results, train
from tests.datasets import small_multi_label

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
SOURCE = small_multi_label(train=930, test=60, side=32)  # 310 a task: 31 steps
every_norm = pytest.mark.parametrize("norm", ["bn", "cn"])


def settings(norm: str, kind: str = "prs") -> RunConfig:
    own: dict[str, Any] = {
        "stream": {"name": "cocoseq", "source": "cocoseq"},
        "strategy": {"name": "prs"},
        "memory": {"kind": kind, "size": 50},
        "model": {"name": "resnet18", "width": 16, "stem": "plain"},
        "norm": {"name": norm, "groups": 4},
        "train": {"precision": "tf32", "clip_value": 0.01},
    }
    return from_dict(merge_settings(STREAMS["cocoseq"].defaults, own))


def same(a: Trainer, b: Trainer) -> bool:
    return a.state().keys() == b.state().keys() and all(
        torch.equal(t, b.state()[name]) for name, t in a.state().items()
    )


@every_norm
def test_graph_of_many_lanes_equals_eager_steps(norm: str) -> None:
    """PRS and the reservoir move together: their memories differ, their shapes do not."""
    configs = [settings(norm, kind) for kind in ("prs", "reservoir", "prs")]
    with numerics(configs[0].train):
        together, stepped = ([Trainer(config, 0, SOURCE, CUDA) for config in configs] for _ in range(2))
        steps = len(together[0].plan.steps)
        assert steps > 3 * SHORT
        GraphStepper(together).advance(steps)
        for lane in stepped:
            for _ in range(steps):
                lane.step()
        assert all(same(a, b) for a, b in zip(together, stepped, strict=True))
        assert same(together[0], together[2]) and not same(together[0], together[1])
        assert any(name.startswith("optimizer.") for name in together[0].state())


@every_norm
def test_stopped_and_resumed_is_bitwise_equal(tmp_path: Path, norm: str) -> None:
    config = settings(norm)
    with numerics(config.train):
        whole = Trainer(config, 0, SOURCE, CUDA)
        expected = [found["labels"] for found in results([whole])]
        for at in (37, 71):
            stopped = Trainer(config, 0, SOURCE, CUDA)
            train([stopped], [tmp_path], log_every=1, stop=lambda at=at, s=stopped: s.done == at)
            assert stopped.done == at
        resumed = Trainer(config, 0, SOURCE, CUDA)
        assert [found["labels"] for found in results([resumed], [tmp_path])] == expected and same(resumed, whole)


def test_prefetched_images_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings("cn")
    monkeypatch.setattr(device_module, "WINDOW_BYTES", 2 * 11 * 20 * 3 * 32 * 32)
    lanes = []
    with numerics(config.train):
        for whole in (True, False):
            lane = Trainer(config, 0, SOURCE, CUDA, device_module.DeviceImages.of(SOURCE, CUDA, whole))
            assert isinstance(lane.feed, device_module.PrefetchedFeed) != whole
            assert results([lane])
            lanes.append(lane)
    assert same(*lanes)
