"""Networks are tried before anything is written: on the shapes of a run, and on a single sample where it has one."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contnorm import registry
from contnorm.bench.config.resolve import resolve
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine import hooks
from contnorm.bench.engine.trainer import Trainer
from contnorm.errors import UserError
from tests.bench.engine.stopped_runs import results
from tests.datasets import small_mnist

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_mnist(tmp_path_factory.mktemp("data"), train=400, test=100)


def lane(root: Path, per_task: int = 21, norm: str = "cn", **groups: dict[str, Any]) -> Trainer:
    stream = {"name": "permuted-mnist", "train_per_task": per_task, "tasks": 2, **groups.pop("stream", {})}
    config = resolve({"stream": stream, "norm": {"name": norm}, **groups}, root)
    return Trainer(config, 0, load_source("mnist", root), CPU)


@pytest.mark.parametrize("norm", ["bn", "brn", "sn", "cn"])
@pytest.mark.parametrize(
    "groups",
    [
        {},
        {"train": {"updates": 2, "passes": 3}},
        {"train": {"batch": 1}},
        {"per_task": 20, "train": {"replay": 1}, "strategy": {"name": "er", "forward": "separate"}},
        {"stream": {"scenario": "free", "train_per_task": 33}, "train": {"batch": 5}},
    ],
)
def test_single_sample_without_moments_is_refused(root: Path, norm: str, groups: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"norm '{norm}': does not fit model 'mlp' with .*train.partial=drop"):
        lane(root, norm=norm, **groups)


@pytest.mark.parametrize(
    "groups",
    [
        {"norm": "none"},
        {"norm": "gn"},
        {"per_task": 22},
        {"model": {"name": "resnet18", "width": 4}},
        {"strategy": {"name": "er", "replay_from": "all"}, "train": {"batch": 20}},
    ],
)
def test_valid_batches_are_accepted(root: Path, groups: dict[str, Any]) -> None:
    """Also a single sample: with positions to take moments of, without moments, or with replay beside it."""
    one = lane(root, **groups)
    losses = [float(one.step()) for _ in one.plan.steps]
    assert one.done == len(losses) > 1 and np.isfinite(losses).all()


@pytest.mark.parametrize("norm", sorted(registry.NORMS))
def test_check_does_not_change_the_network(root: Path, norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checked copy shares its weights with the network."""
    network = {"model": {"name": "resnet18", "width": 8}}
    values = {
        "stream": {"name": "split-mnist"},
        "norm": {"name": norm, **({"groups": 4} if registry.NORMS[norm].grouped else {})},
    }
    monkeypatch.setattr(hooks, "_checked", set())
    checked = Trainer(resolve({**values, **network}, root), 0, load_source("mnist", root), CPU)
    assert hooks._checked
    monkeypatch.setattr(hooks, "_checked", set())
    monkeypatch.setattr(hooks, "_run_in_training", lambda *arguments: None)
    expected = Trainer(resolve({**values, **network}, root), 0, load_source("mnist", root), CPU)
    state, other = checked.model.state_dict(), expected.model.state_dict()
    assert state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)
    assert all(parameter.grad is None for parameter in checked.model.parameters())


@pytest.mark.parametrize(
    ("evaluate", "advice"),
    [
        ({"moments": "oracle"}, "evaluate.moments"),
        ({"drift": True}, "evaluate.drift"),
        ({"drift": False}, None),
    ],
)
def test_network_without_estimable_moments_is_refused(
    root: Path, tmp_path: Path, evaluate: dict[str, Any], advice: str | None
) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "from torch import nn\n"
        "from tests.models import UnknownNorm\n"
        "def make(shape, outputs, norm):\n"
        "    return nn.Sequential(nn.Conv2d(shape[0], 8, 9, 9), norm(8), UnknownNorm(8), nn.Flatten(),\n"
        "                         nn.Linear(72, outputs))\n"
    )
    groups: dict[str, Any] = {"model": {"name": f"{file}:make"}, "evaluate": evaluate}
    if advice is None:
        assert lane(root, per_task=20, norm="bn", **groups).model is not None
        return
    with pytest.raises(UserError, match=re.escape(advice)) as refused:
        lane(root, per_task=20, norm="bn", **groups)
    assert "layer '2' (UnknownNorm)" in str(refused.value)


NORMS = """
import copy
from torch import nn

def network(outputs, *norms):
    return nn.Sequential(nn.Conv2d(1, 8, 5, stride=4), *norms, nn.Flatten(), nn.Linear(8 * 36, outputs))

def fixed(shape, outputs, norm):
    return network(outputs, nn.BatchNorm2d(8))

def plain(shape, outputs, norm):
    return network(outputs)

def layer_norm(shape, outputs, norm):
    return network(outputs, nn.LayerNorm(6))

def mixed(shape, outputs, norm):
    return network(outputs, nn.LayerNorm(6), norm(8))

def copied(shape, outputs, norm):
    return network(outputs, *(copy.deepcopy(norm(8)) for _ in range(2)))
"""


def norm_net(root: Path, folder: Path, name: str, norm: str, **groups: Any) -> Trainer:
    (folder / "norms.py").write_text(NORMS)
    return lane(root, per_task=20, norm=norm, model={"name": f"{folder / 'norms.py'}:{name}"}, **groups)


@pytest.mark.parametrize(
    ("name", "norm", "layers", "norms"),
    [
        ("fixed", "bn", "ours", {"BatchNorm2d": 1}),
        ("plain", "none", "ours", {}),
        ("mixed", "cn8", "ours", {"LayerNorm": 1, "ContinualNorm2d(8)": 1}),
        ("mixed", "none", "stock", {"LayerNorm": 1, "Identity": 1}),
        ("copied", "gn4", "ours", {"GroupNorm2d(4)": 2}),
        ("copied", "cn4", "stock", {"GroupNorm(4)": 2, "BatchNorm2d": 2}),
    ],
)
def test_record_lists_all_norms_of_a_user_network(
    root: Path, tmp_path: Path, name: str, norm: str, layers: str, norms: dict[str, int]
) -> None:
    (tmp_path / "norms.py").write_text(NORMS)
    values: dict[str, Any] = {
        "stream": {"name": "permuted-mnist", "train_per_task": 20, "tasks": 2},
        "model": {"name": f"{tmp_path / 'norms.py'}:{name}"},
        "norm": {"name": norm, "layers": layers},
    }
    (found,) = results([Trainer(resolve(values, root), 0, load_source("mnist", root), CPU)])
    assert found["norms"] == norms
