"""The norm spec of a model: what a state dict does not tell, and models that are converted to match it."""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import contnorm as cn
from contnorm.registry import NORMS
from tests.models import Block, FrozenBatchNorm2d

X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(3))


class Network(nn.Module):
    """A small residual network with batch norm, as it is built before its checkpoint is loaded."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
            self.block = Block(16, 16)
            self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.block(self.stem(x)).mean((2, 3)))
        return y


def trained(model: nn.Module, steps: int = 2) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        labels = torch.arange(len(X)) % 5
        optimizer.zero_grad()
        F.cross_entropy(model(X + 0.1 * step), labels).backward()
        optimizer.step()
    return model


def stored(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec as it is after it was written to a JSON file."""
    text = json.dumps(spec, allow_nan=False)
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def outputs(model: nn.Module) -> list[Tensor]:
    """Outputs in evaluation and in training mode, and in evaluation after that, which shows the moments."""
    model = copy.deepcopy(model)
    values = []
    for training in (False, True, False):
        values.append(model.train(training)(X).detach())
    return values


def assert_same(first: nn.Module, second: nn.Module) -> None:
    for a, b in zip(outputs(first), outputs(second), strict=True):
        assert torch.equal(a, b)


def reloaded(model: nn.Module, build: Callable[[], nn.Module] = lambda: Network(seed=1)) -> nn.Module:
    """Save a model and load it into a newly built one."""
    spec = stored(cn.norm_spec(model))
    fresh = cn.apply_norm_spec(build(), spec)
    fresh.load_state_dict(model.state_dict(), strict=True)
    assert cn.norm_spec(fresh) == spec == cn.norm_spec(model)
    return fresh


OPTIONS: dict[str, dict[str, object]] = {
    "brn": {"r_max": 2.5, "d_max": 4.0, "total_steps": 4},
    "adab2n": {"kappa": 0.4, "lam": 0.7, "ada_t0": 1, "num_tasks": 7, "renormalize": True},
    "bnt": {"balanced_size": 12},
    "iabn": {"k": 1.5},
    "gn_ws": {"weight_eps": 1e-3},
    "frn": {"apply_act": False},
    "evonorm_s0": {"apply_act": False},
}


def converted(name: str, **options: object) -> nn.Module:
    groups: dict[str, object] = {"num_groups": 4} if NORMS[name].grouped else {}
    return cn.convert_norm(Network(), name, **{**groups, **OPTIONS.get(name, {}), **options})


@pytest.mark.parametrize("name", NORMS)
def test_every_norm_round_trips(name: str) -> None:
    model = trained(converted(name, **({} if name in ("none", "dyt") else {"eps": 3e-4})))
    assert_same(model, reloaded(model))
    again = reloaded(model, lambda: copy.deepcopy(model))
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
    spec = cn.norm_spec(Network())
    assert cn.norm_spec(cn.apply_norm_spec(model, spec)) == spec
    assert set(model.state_dict()) == set(Network().state_dict())


def test_entry_has_the_facts_of_a_layer() -> None:
    model = nn.Sequential(nn.Conv1d(2, 8, 3), cn.ContinualNorm1d(8, 1e-4, None, num_groups=2, order="bn_gn"))
    assert cn.norm_spec(model)["norms"]["1"] == {
        "norm": "bn_gn",
        "dim": 1,
        "num_features": 8,
        "options": {
            "eps": 1e-4,
            "momentum": None,
            "affine": True,
            "track_running_stats": True,
            "num_groups": 2,
        },
        "parameters": ["weight", "bias"],
        "running_moments": True,
        "constant": False,
        "frozen": False,
        "normalize": None,
        "fixed": False,
        "synced": False,
        "has_act": False,
        "per_position": False,
    }


@pytest.mark.parametrize("name", ["bn", "cn", "sn", "adab2n", "tbbn", "brn"])
def test_apply_keeps_the_tensors_of_a_norm_with_another_option(name: str) -> None:
    """The same objects, also those that batch norm does not have, such as the mixture weights of switchable norm."""
    model = trained(converted(name))
    spec = cn.norm_spec(model)
    for entry in spec["norms"].values():
        entry["options"]["eps"] = 0.25
    before, layer = dict([*model.named_parameters(), *model.named_buffers()]), model.block.bn1
    cn.apply_norm_spec(model, spec)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert model.block.bn1 is not layer and model.block.bn1.eps == 0.25
    limits = ("r_limit", "d_limit")  # of batch renorm: they follow from the batch counter
    assert all(after[name] is before[name] for name in before if not name.endswith(limits))


@pytest.mark.parametrize("norm", ["bn", "cn", "brn", "adab2n"])
def test_freeze_is_kept_and_released(norm: str) -> None:
    options = {"num_groups": 4} if norm == "cn" else {}
    model = trained(cn.convert_norm(Network(), norm, **options)) if norm != "bn" else trained(Network())
    thawed = cn.norm_spec(model)
    cn.freeze_stats(model.block)
    frozen = [name for name, entry in cn.norm_spec(model)["norms"].items() if entry["frozen"]]
    assert frozen == ["block.bn1", "block.bn2"]
    loaded = reloaded(model)
    assert_same(model, loaded)
    moments = loaded.block.bn1.running_mean.clone()
    loaded.train()(X)
    assert torch.equal(loaded.block.bn1.running_mean, moments)
    cn.apply_norm_spec(loaded, thawed)
    assert cn.norm_spec(loaded) == thawed
    loaded.train()(X)
    assert not torch.equal(loaded.block.bn1.running_mean, moments)


def test_layers_of_torch_and_of_contnorm_are_equal() -> None:
    """Batch norms of torch and of contnorm compute the same, so neither replaces the other."""
    model = cn.apply_norm_spec(Network(), cn.norm_spec(cn.convert_norm(Network(), "bn")))
    assert type(model.block.bn1) is nn.BatchNorm2d


def test_layers_without_affine_or_moments_round_trip() -> None:
    def build(affine: bool = True, track: bool = True) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=affine, track_running_stats=track))

    for affine, track in ((False, True), (True, False), (False, False)):
        model = build(affine, track)
        model(X)
        for target in (build(), build(False, False)):
            loaded = reloaded(model, lambda target=target: target)
            assert_same(model, loaded)
        stock = build()
        assert_same(stock, reloaded(stock, lambda affine=affine, track=track: build(affine, track)))


def test_constant_layers_round_trip() -> None:
    def build(norm: Callable[[int], nn.Module]) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), norm(8))

    model = build(FrozenBatchNorm2d)
    model[1].running_mean.fill_(0.3)
    loaded = reloaded(model, lambda: build(nn.BatchNorm2d))
    assert torch.allclose(loaded.train()(X), model.train()(X), atol=1e-6)
    assert "constant" in str(cn.summarize(loaded))
    cn.apply_norm_spec(model, cn.norm_spec(model))
    assert type(model[1]) is FrozenBatchNorm2d and not model[1]._forward_hooks  # it needs no freeze
    constant = cn.convert_norm(model, "cn", num_groups=2)
    assert_same(constant, reloaded(constant, lambda: build(nn.BatchNorm2d)))
    released = cn.apply_norm_spec(constant, cn.norm_spec(build(nn.BatchNorm2d)))
    assert "constant" not in str(cn.summarize(released)) and "frozen" not in str(cn.summarize(released))


@pytest.mark.parametrize("kind", ["bn", "cn", "bn_gn_tied"])
def test_synchronized_layers_round_trip(kind: str) -> None:
    options = {} if kind == "bn" else {"num_groups": 4}
    local = trained(cn.convert_norm(Network(), kind, **options))
    model = cn.convert_sync(copy.deepcopy(local))
    loaded = reloaded(model)
    assert type(loaded.block.bn1) is (nn.SyncBatchNorm if kind == "bn" else cn.SyncContinualNorm)
    back = cn.apply_norm_spec(loaded, cn.norm_spec(local))
    assert cn.norm_spec(back) == cn.norm_spec(local) and back.block.bn1 is not model.block.bn1


# --- norms of the user ----------------------------------------------------------------------------------------------


class ScaleNorm(nn.Module):
    """Divide by the root mean square over the channels; the exponents are an option that is a list."""

    def __init__(self, num_features: int, eps: float = 1e-5, powers: tuple[int, ...] = (2,), act: Any = None) -> None:
        super().__init__()
        self.num_features, self.eps, self.powers, self.act = num_features, eps, powers, act
        self.weight = nn.Parameter(torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        size = sum(x.abs().pow(p).mean(1, keepdim=True) for p in self.powers)
        y = x * (size + self.eps).rsqrt() * self.weight.reshape(-1, *[1] * (x.dim() - 2))
        return y if self.act is None else self.act(y)


@pytest.fixture
def registered() -> Iterator[None]:
    cn.register_norm("scale", ScaleNorm)
    cn.register_norm("made", lambda num_features, groups=2: nn.GroupNorm(groups, num_features))
    yield
    for name in ("scale", "made"):
        cn.unregister_norm(name)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("name", "options"), [("scale", {"eps": 0.1, "powers": (2, 4)}), ("made", {})])
def test_registered_norms_round_trip(name: str, options: dict[str, object]) -> None:
    model = trained(cn.freeze_stats(cn.convert_norm(Network(), name, **options)))
    assert {entry["norm"] for entry in cn.norm_spec(model)["norms"].values()} == {name}
    assert_same(model, reloaded(model))


def test_norm_that_is_not_registered_is_named() -> None:
    model = cn.convert_norm(Network(), ScaleNorm)
    spec = stored(cn.norm_spec(model))
    assert spec["norms"]["block.bn1"]["norm"] is None
    assert spec["norms"]["block.bn1"]["class"] == "ScaleNorm"
    assert cn.apply_norm_spec(model, spec) is model
    with pytest.raises(ValueError, match="ScaleNorm is not a registered norm"):
        cn.apply_norm_spec(Network(), spec)
    with pytest.raises(ValueError, match="is not a registered norm"):
        cn.apply_norm_spec(model, cn.norm_spec(Network()))


# --- what does not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec.update(version=1),
        lambda spec: spec["norms"].update(head=spec["norms"]["stem.1"]),
        lambda spec: spec["norms"].pop("block.bn2"),
        lambda spec: spec["norms"]["stem.1"].update(norm="imagined"),
        lambda spec: spec["norms"]["stem.1"].update(num_features=32),
        lambda spec: spec["norms"]["stem.1"].update(dim=1),
        lambda spec: spec["norms"]["stem.1"].update(has_act=True),
        lambda spec: spec["norms"]["stem.1"]["options"].update(num_groups=5),
        lambda spec: spec["norms"]["stem.1"]["options"].update(spin=1),
    ],
)
def test_specs_that_do_not_fit_are_refused(change: Callable[[dict[str, Any]], None]) -> None:
    spec, model = stored(cn.norm_spec(converted("cn"))), Network()
    change(spec)
    with pytest.raises((TypeError, ValueError)):
        cn.apply_norm_spec(model, spec)
    assert cn.norm_spec(model) == cn.norm_spec(Network())


def test_layer_with_hooks_can_be_frozen_and_not_replaced() -> None:
    model = Network()
    model.block.bn1.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(ValueError, match="it has hooks"):
        cn.apply_norm_spec(model, cn.norm_spec(converted("cn")))
    cn.apply_norm_spec(model, cn.norm_spec(cn.freeze_stats(Network())))
