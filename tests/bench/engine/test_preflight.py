"""Networks are tried before anything is written: on the shapes of a run, and on a single sample where it has one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contnorm.bench.engine.events import Finished
from contnorm.bench.engine.scheduler import Job, RunEnvironment, execute, resolve

from contnorm import registry
from contnorm.bench.config.schema import NormConfig
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine import preflight
from contnorm.bench.engine.loop import train_together
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.models.norm_layers import check_norms
from contnorm.errors import UserError
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
    ("groups", "said"),
    [
        ({}, "train.batch=10: the last batch of task 0, which has 21 samples, is a single sample"),
        ({"strategy": {"name": "er"}}, "the last batch of task 0, which has 21 samples"),
        ({"train": {"updates": 2}}, "which has 21 samples, is a single sample"),
        ({"train": {"updates": 2, "passes": 3}}, "which has 21 samples, is a single sample"),
        ({"train": {"batch": 1}}, "train.batch=1: every batch of the stream is one sample"),
        (
            {"per_task": 20, "train": {"replay": 1}, "strategy": {"name": "er", "forward": "separate"}},
            "train.replay=1: with strategy.forward=separate a forward pass of task 1 has one replayed sample",
        ),
        (
            {"stream": {"scenario": "free", "train_per_task": 33}, "train": {"batch": 5}},
            "66 samples, is a single",
        ),
    ],
)
def test_single_sample_without_moments_is_refused(root: Path, norm: str, groups: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as told:
        lane(root, norm=norm, **groups)
    assert f"and norm {norm!r} in model 'mlp' can't compute" in str(told.value)


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
    monkeypatch.setattr(preflight, "_checked", set())
    checked = Trainer(resolve({**values, **network}, root), 0, load_source("mnist", root), CPU)
    assert preflight._checked
    monkeypatch.setattr(preflight, "_try_norms", lambda *arguments: None)
    expected = Trainer(resolve({**values, **network}, root), 0, load_source("mnist", root), CPU)
    state, other = checked.model.state_dict(), expected.model.state_dict()
    assert state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)
    assert all(parameter.grad is None for parameter in checked.model.parameters())


def test_suggested_batch_size_is_valid(root: Path) -> None:
    with pytest.raises(UserError, match=r"--batch (\d+)") as told:
        lane(root, 21)
    advised = re.search(r"--batch (\d+)", str(told.value))
    assert advised is not None
    lane(root, 21, train={"batch": int(advised[1])})


NETS = """
from torch import nn
def few(shape):
    return nn.Identity()
def shapes(shape, outputs, norm):
    return nn.Sequential(nn.Flatten(),
                         nn.Linear(7, outputs))
def narrow(shape, outputs, norm):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 3))
def pair(shape, outputs, norm):
    class Two(nn.Module):
        def forward(self, x):
            return x, x
    return Two()
def groups(shape, outputs, norm):
    return norm(7)
def none():
    return nn.Identity()
def unlike(shape, outputs):
    return nn.Sequential(nn.Conv2d(1, 22, 3), nn.BatchNorm2d(22), nn.Flatten(), nn.Linear(22 * 26 * 26, outputs))
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("few", "can't be called with (input_shape, num_outputs). Write make(input_shape, num_outputs)"),
        ("none", "can't be called with (input_shape, num_outputs). Write make(input_shape, num_outputs)"),
        ("shapes", "images of shape (2, 1, 28, 28): {file}: RuntimeError: mat1 and mat2 shapes"),
        (
            "narrow",
            "its output must have shape (2, 10), one value per output of the stream, not (2, 3). Use num_outputs",
        ),
        ("pair", "not tuple"),
        ("groups", "{file}, line 16: GroupsError: "),
        ("groups", "norm.groups or use a norm name such as cn1."),
        ("unlike", "norm cn2 (norm.groups=2)"),
    ],
)
def test_invalid_user_network_writes_nothing(root: Path, tmp_path: Path, name: str, said: str) -> None:
    file = tmp_path / "net.py"
    file.write_text(NETS)
    values: dict[str, Any] = {"model": {"name": f"{file}:{name}"}, "norm": {"name": "cn"}}
    values["stream"] = {"name": "permuted-mnist", "train_per_task": 20}
    with pytest.raises(UserError, match=re.escape(said.format(file=file))) as told:
        list(execute([Job(resolve(values, root), 0)], RunEnvironment(tmp_path / "runs", root, CPU)))
    assert f"model '{file}:{name}'" in str(told.value) and "\n" not in str(told.value)
    assert not (tmp_path / "runs").exists()


OWN = """
import torch
from torch import nn

def plain(shape, outputs, norm):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, outputs))

def frozen(shape, outputs, norm):
    return plain(shape, outputs, norm).requires_grad_(False)

def dropping(shape, outputs, norm):
    return nn.Sequential(nn.Dropout(0.5), *plain(shape, outputs, norm))

class AlwaysDropping(nn.Dropout):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, training=True)

def lazy(shape, outputs, norm):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(outputs))
def always_dropping(shape, outputs, norm):
    return nn.Sequential(AlwaysDropping(), *plain(shape, outputs, norm))

def complex(shape, outputs, norm):
    model = plain(shape, outputs, norm)
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    return model

class Two(nn.Linear):
    def forward(self, x):
        y = super().forward(x.flatten(1))
        return y[:, :2] if self.training else y

def other_in_training(shape, outputs, norm):
    return Two(784, outputs)
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("frozen", "no parameter has requires_grad=True"),
        (
            "complex",
            "phase in its state_dict() is of torch.complex64, which a checkpoint can't contain",
        ),
        ("other_in_training", "in training, for images of shape (2, 1, 28, 28) its output must have shape (2, 10)"),
    ],
)
def test_untrainable_or_unsavable_network_is_refused(root: Path, tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(UserError, match=re.escape(said)):
        lane(root, per_task=20, norm="none", model={"name": f"{tmp_path / 'own.py'}:{name}"})


def test_random_numbers_in_evaluation_cause_a_warning(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    for name in ("plain", "dropping", "lazy"):
        lane(root, per_task=20, norm="none", model={"name": f"{tmp_path / 'own.py'}:{name}"})
    assert not caplog.messages
    for _ in range(2):
        lane(root, per_task=20, norm="none", model={"name": f"{tmp_path / 'own.py'}:always_dropping"})
    (message,) = caplog.messages
    assert "always_dropping': draws random numbers in evaluation mode" in message


def test_out_of_memory_error_names_the_setting(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*given: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    def no_memory(*given: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("contnorm.bench.models.build.MLP", no_network)
        with pytest.raises(UserError, match=r"model\.width=100: a mlp of this width does not fit into memory"):
            lane(root, per_task=20)
    monkeypatch.setattr("contnorm.bench.plan.build_memory", no_memory)
    with pytest.raises(UserError, match=r"memory\.size=50: .* not fit into memory\. Use a smaller"):
        lane(root, per_task=20)


@pytest.mark.parametrize(
    ("evaluate", "advice"),
    [
        ({"moments": "oracle"}, "--eval-moments running"),
        ({"drift": True}, "evaluate.drift=false"),
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

def fixed_and_unused(shape, outputs, norm):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.unused = fixed(shape, outputs, norm), norm(8)
        def forward(self, x):
            return self.inner(x)
    return Net()

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
    ("name", "norm", "words"),
    [
        ("fixed", "cn8", "none of its normalization layers is the run's norm 'cn8', but 1 (BatchNorm2d)"),
        ("fixed", "gn8", "'gn8', but 1 (BatchNorm2d)"),
        ("fixed", "none", "'none', but 1 (BatchNorm2d)"),
        ("fixed_and_unused", "cn8", "'cn8', but inner.1 (BatchNorm2d)"),
        ("layer_norm", "bn", "'bn', but 1 (LayerNorm)"),
        ("plain", "cn8", "has no normalization layer, but the run's norm is 'cn8'"),
        ("plain", "bn", '"none" (--norm none)'),
    ],
)
def test_network_without_the_norm_of_the_run_is_refused(
    root: Path, tmp_path: Path, name: str, norm: str, words: str
) -> None:
    with pytest.raises(UserError, match=re.escape(words)) as error:
        norm_net(root, tmp_path, name, norm)
    assert "norm(channels)" in str(error.value) and "\n" not in str(error.value)


def test_message_about_missing_layers_names_a_norm_with_automatic_groups() -> None:
    with pytest.raises(UserError, match="the run's norm is 'cn'"):
        check_norms(torch.nn.Linear(2, 2), "mine", NormConfig("cn", groups="auto"), set())


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
    *_, (_, last) = train_together([Trainer(resolve(values, root), 0, load_source("mnist", root), CPU)])
    assert isinstance(last, Finished) and last.results["norms"] == norms
