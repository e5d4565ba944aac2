"""On a GPU: a lane in a graph, alone or beside others, stopped or not, gives the bits of a lane run step by step."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.dataset import Source
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine.cuda_graph import SHORT, GraphStepper, compile_kernels
from contnorm.bench.engine.provenance import numerics
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.streams import device as device_module
from contnorm.kernels.triton import launcher as launching
from tests.bench.engine.stopped_runs import finish, results, train
from tests.datasets import small_cifar100

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_cifar100(tmp_path_factory.mktemp("data"), per_class=61)  # 305 a task: a last batch of 5


@pytest.fixture(scope="module")
def source(root: Path) -> Source:
    return load_source("cifar100", root)


def settings(root: Path, norm: str, strategy: str, precision: str) -> RunConfig:
    values: dict[str, Any] = {
        "stream": {"name": "split-cifar100", "tasks": 3, "augment": strategy == "derpp"},
        "strategy": {"name": strategy},
        "norm": {"name": norm, "groups": 4},
        "model": {"width": 16},
        "train": {"precision": precision, "lr": 0.01},
        "evaluate": {"drift": False},
    }
    return resolve(values, root)


CASES = [
    ("bn", "er", "tf32"),
    ("cn", "er", "tf32"),
    ("cn", "derpp", "tf32"),
    ("cn", "er", "bf16"),
    ("bn_gn", "er", "tf32"),
    ("cn_tied", "er", "bf16"),
    ("brn", "single", "fp32"),
    ("sn", "single", "fp32"),
    ("evonorm_s0", "er", "tf32"),
    ("frn", "derpp", "tf32"),
    ("gn_ws", "er", "tf32"),
    ("gn_ws", "er", "bf16"),
]
every_case = pytest.mark.parametrize("case", CASES, ids=["-".join(case) for case in CASES])


def lanes_of(config: RunConfig, source: Source, seeds: range) -> list[Trainer]:
    return [Trainer(config, seed, source, torch.device("cuda")) for seed in seeds]


def same(a: Trainer, b: Trainer) -> bool:
    return all(torch.equal(tensor, b.state()[name]) for name, tensor in a.state().items())


@every_case
def test_graph_of_many_lanes_equals_single_lanes_and_eager_steps(
    root: Path, source: Source, case: tuple[str, str, str]
) -> None:
    config = settings(root, *case)
    with numerics(config.train):
        together, alone, stepped = (lanes_of(config, source, range(n)) for n in (4, 2, 2))
        steps = len(together[0].plan.steps)
        assert steps > 3 * SHORT
        GraphStepper(together).advance(steps)
        for lane in alone:
            GraphStepper([lane]).advance(steps)
        for lane in stepped:
            for _ in range(steps):
                lane.step()
        for number in range(2):
            assert same(together[number], stepped[number]), "graph of four lanes, and step by step"
            assert same(alone[number], stepped[number]), "graph of one lane, and step by step"
        assert not same(together[0], together[1])


@pytest.mark.parametrize("case", CASES[:3], ids=["-".join(case) for case in CASES[:3]])
def test_prefetched_images_give_the_same_bits(
    root: Path, source: Source, case: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of eleven steps: a stretch has several, a graph goes on over them, and evaluation reads from the host."""
    config, device = settings(root, *case), torch.device("cuda")
    monkeypatch.setattr(device_module, "WINDOW_BYTES", 2 * 11 * 30 * 3072)
    found = []
    with numerics(config.train):
        for whole in (True, False):
            images = device_module.DeviceImages.of(source, device, whole)
            lanes = [Trainer(config, seed, source, device, images) for seed in range(2)]
            assert isinstance(lanes[0].feed, device_module.PrefetchedFeed) != whole
            found.append((lanes, finish(lanes)))
    (whole_lanes, expected), (brought, matrices) = found
    assert matrices == expected
    assert all(same(a, b) for a, b in zip(brought, whole_lanes, strict=True))


@pytest.mark.parametrize("case", CASES[:3], ids=["-".join(case) for case in CASES[:3]])
def test_stopped_and_resumed_is_bitwise_equal(
    root: Path, source: Source, tmp_path: Path, case: tuple[str, str, str]
) -> None:
    config = settings(root, *case)
    with numerics(config.train):
        whole = lanes_of(config, source, range(2))
        expected = finish(whole)
        places = [tmp_path / str(seed) for seed in range(2)]
        for at in (37, 71):
            stopped = lanes_of(config, source, range(2))
            train(stopped, places, log_every=1, stop=lambda at=at, s=stopped: s[0].done == at)
            assert stopped[0].done == at
        resumed = lanes_of(config, source, range(2))
        assert finish(resumed, places) == expected
        assert all(same(a, b) for a, b in zip(resumed, whole, strict=True))


OWN_KERNELS = {
    "cn": {
        "triton.forward": ("forward_one", "forward_rows", "forward_apply"),
        "triton.backward": ("backward_one", "backward_rows", "backward_apply"),
    },
    "gn": {"triton.group_norm_device": ("forward", "backward", "sum_over_samples")},
}


@pytest.mark.parametrize("norm", OWN_KERNELS)
def test_kernels_compiled_ahead_match_the_steps_and_change_no_trainer(root: Path, source: Source, norm: str) -> None:
    if not launching.can_compile_ahead():
        pytest.skip("this Triton can't compile side by side")
    config = settings(root, norm, "er", "tf32")
    kernels = [
        getattr(import_module(f"contnorm.kernels.{module}"), name)
        for module, names in OWN_KERNELS[norm].items()
        for name in names
    ]

    def compiled() -> list[int]:
        return [len(kernel.device_caches[0][0]) for kernel in kernels]

    with numerics(config.train):
        lane, untouched = lanes_of(config, source, range(1)) + lanes_of(config, source, range(1))
        compile_kernels([lane])
        assert same(lane, untouched)
        ahead = compiled()
        assert norm == "cn" or all(ahead)  # which of CN's a layer takes is a matter of its size
        for _ in range(70):  # into the second task, which replays
            lane.step()
        assert compiled() == ahead


def test_more_lanes_than_streams_are_captured_during_checkpoint_writes(
    root: Path, source: Source, tmp_path: Path
) -> None:
    """Each lane is saved at the first task's end, and the next graph is captured three steps later."""
    config = settings(root, "bn", "er", "tf32")
    with numerics(config.train):
        many = lanes_of(config, source, range(36))
        kept = [tmp_path / str(lane.seed) for lane in many]
        assert len(results(many, kept, every=20)) == len(many)
        (alone,) = lanes_of(config, source, range(35, 36))
        GraphStepper([alone]).advance(len(alone.plan.steps))
        assert same(alone, many[35])


COUNTING = """
from contnorm.bench import Strategy

class Mine(Strategy):
    steps = 0
    def loss(self, model, head, stream):
        self.steps += 1
        return head.cross_entropy(model(stream.x), stream).mean() / self.steps, None
"""


def test_stateful_user_code_runs_at_every_step_without_graphs(root: Path, source: Source, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(COUNTING)
    config = settings(root, "bn", f"{tmp_path / 'mine.py'}:Mine", "fp32")
    with numerics(config.train, 1):
        without_graph = replace(config, train=replace(config.train, graph="off"))
        lane = Trainer(without_graph, 0, source, torch.device("cuda"))
        GraphStepper([lane]).advance(2 * SHORT)
        assert vars(lane.strategy)["steps"] == lane.done == 2 * SHORT
