"""The norm spec of a model: what a state dict does not tell, and models that are converted to match it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import contnorm as cn
from contnorm.norms.activation import AbsorbedActivation
from contnorm.norms.weight_standardization import is_standardized
from contnorm.registry import NORMS, norm_names

X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(3))


class Block(nn.Module):
    """A residual block with one ReLU module that is applied to the output of a norm and to the sum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + x)
        return y


class Network(nn.Module):
    """A small residual network with batch norm, as it is built before its checkpoint is loaded."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
            self.block = Block(16)
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
}


@pytest.mark.parametrize("name", norm_names())
def test_every_norm_round_trips(name: str) -> None:
    groups: dict[str, object] = {"num_groups": 4} if NORMS[name].grouped else {}
    eps = {} if name == "none" else {"eps": 3e-4}
    options = {**groups, **eps, **OPTIONS.get(name, {})}
    model = trained(cn.convert_norm(Network(), name, example_input=X, **options))
    assert_same(model, reloaded(model))
    again = reloaded(model, lambda: copy.deepcopy(model))
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]


@pytest.mark.parametrize("name", norm_names())
def test_a_spec_of_batch_norm_undoes_every_norm(name: str) -> None:
    groups: dict[str, object] = {"num_groups": 4} if NORMS[name].grouped else {}
    spec = cn.norm_spec(Network())
    model = cn.convert_norm(Network(), name, example_input=X, **groups)
    cn.apply_norm_spec(model, spec)
    assert cn.norm_spec(model) == spec
    assert not any(isinstance(m, AbsorbedActivation) or is_standardized(m) for m in model.modules())
    assert set(model.state_dict()) == set(Network().state_dict())


def test_spec_tells_what_state_dicts_do_not() -> None:
    """Models whose checkpoints load into each other, and which compute something else, have other specs."""
    kinds: list[tuple[str, dict[str, object]]] = [
        ("bn", {}),
        ("cn", {"num_groups": 4}),
        ("cn", {"num_groups": 8}),
        ("bn_gn", {"num_groups": 4}),
        ("cn_tied", {"num_groups": 4}),
        ("cn", {"num_groups": 4, "eps": 1e-3}),
        ("bn", {"momentum": None}),
    ]
    models = [trained(cn.convert_norm(Network(), name, **options)) for name, options in kinds]
    assert len({tuple(model.state_dict()) for model in models}) == 1
    specs = [json.dumps(cn.norm_spec(model), sort_keys=True) for model in models]
    assert len(set(specs)) == len(specs)
    for model in models:
        assert_same(model, reloaded(model))
    wrong = cn.apply_norm_spec(Network(), cn.norm_spec(models[2]))
    wrong.load_state_dict(models[1].state_dict())  # all keys match
    assert not torch.allclose(wrong.eval()(X), models[1].eval()(X), atol=1e-3)


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
            "order": "bn_gn",
            "tied": False,
        },
        "parameters": ["weight", "bias"],
        "running_moments": True,
        "constant": False,
        "frozen": False,
        "synced": False,
        "has_act": False,
        "also_at": [],
    }


def test_apply_keeps_parameters_and_moments() -> None:
    model = Network()
    before = dict([*model.named_parameters(), *model.named_buffers()])
    cn.apply_norm_spec(model, cn.norm_spec(cn.convert_norm(Network(), "cn", num_groups=4)))
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in after)


@pytest.mark.parametrize("name", ["sn", "adab2n", "tbbn", "frn", "evonorm_s0", "brn"])
def test_apply_keeps_the_tensors_of_a_norm_with_another_option(name: str) -> None:
    """Also those that batch norm does not have, such as the mixture weights of switchable norm."""
    options = {"num_groups": 4} if NORMS[name].grouped else {}
    model = trained(cn.convert_norm(Network(), name, example_input=X, **options))
    spec = cn.norm_spec(model)
    for entry in spec["norms"].values():
        entry["options"]["eps"] = 0.25
    before, layer = dict([*model.named_parameters(), *model.named_buffers()]), model.block.bn1
    cn.apply_norm_spec(model, spec)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert model.block.bn1 is not layer and model.block.bn1.eps == 0.25
    limits = ("r_limit", "d_limit")  # of batch renorm: they follow from the batch counter
    assert all(after[name] is before[name] for name in before if not name.endswith(limits))


def test_apply_replaces_only_layers_that_differ() -> None:
    model = cn.convert_norm(Network(), "cn", num_groups=4)
    spec = stored(cn.norm_spec(model))
    layers = list(model.modules())
    assert cn.apply_norm_spec(model, spec) is model and list(model.modules()) == layers
    spec["norms"]["block.bn1"]["options"]["eps"] = 1e-3
    cn.apply_norm_spec(model, spec)
    assert [a is b for a, b in zip(model.modules(), layers, strict=True)].count(False) == 1
    assert model.block.bn1.eps == 1e-3


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


def test_group_norm_of_torch_round_trips() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8, eps=1e-3), nn.ReLU())
    spec = stored(cn.norm_spec(model))
    fresh = cn.apply_norm_spec(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), spec)
    fresh.load_state_dict(model.state_dict())
    assert isinstance(fresh[1], nn.GroupNorm) and torch.equal(fresh(X), model(X))
    assert cn.norm_spec(fresh) == spec


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


def test_only_a_weight_round_trips() -> None:
    model = cn.convert_norm(Network(), "cn", num_groups=4)
    for part in (model.block.bn1, model.stem[1]):
        part.register_parameter("bias", None)
    assert_same(model, reloaded(model))
    back = cn.apply_norm_spec(model, cn.norm_spec(Network()))
    assert back.block.bn1.bias is not None


def test_tracking_that_was_switched_off_keeps_its_moments() -> None:
    """``track_running_stats = False`` on a layer with moments: they are kept, used in evaluation and not updated."""
    model = trained(Network())
    model.block.bn1.track_running_stats = False
    loaded = reloaded(model, lambda: cn.convert_norm(Network(seed=1), "cn", num_groups=4))
    assert_same(model, loaded)


class FrozenBatchNorm2d(nn.Module):
    """As in torchvision: constant moments and affine parameters."""

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return x * scale.reshape(1, -1, 1, 1) + (self.bias - self.running_mean * scale).reshape(1, -1, 1, 1)


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


def test_shared_layers_stay_shared() -> None:
    def build() -> nn.Module:
        shared = nn.BatchNorm1d(4)
        return nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared)

    spec = stored(cn.norm_spec(cn.convert_norm(build(), "cn", num_groups=2)))
    assert list(spec["norms"]) == ["1"] and spec["norms"]["1"]["also_at"] == ["3"]
    model = cn.apply_norm_spec(build(), spec)
    assert model[1] is model[3] and isinstance(model[1], cn.ContinualNorm1d)
    apart = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match=r"'1': shared with '3' in the spec, and with nothing in the model"):
        cn.apply_norm_spec(apart, spec)
    with pytest.raises(ValueError, match=r"shared with nothing in the spec, and with '3' in the model"):
        cn.apply_norm_spec(build(), cn.norm_spec(apart))


def test_a_model_that_is_a_norm_is_returned_converted() -> None:
    spec = stored(cn.norm_spec(cn.ContinualNorm2d(8, num_groups=2)))
    assert list(spec["norms"]) == [""]
    assert isinstance(cn.apply_norm_spec(nn.BatchNorm2d(8), spec), cn.ContinualNorm2d)


def test_training_mode_and_device_are_those_of_the_model() -> None:
    model = Network().double().eval()
    cn.apply_norm_spec(model, cn.norm_spec(cn.convert_norm(Network(), "sn")))
    assert model.block.bn1.mean_weight.dtype is torch.float64 and not model.block.bn1.training


def test_implementation_is_that_of_the_model() -> None:
    spec = cn.norm_spec(nn.Sequential(cn.ContinualNorm2d(8, num_groups=2, kernel="analytic")))
    assert "kernel" not in spec["norms"]["0"]["options"]
    model = nn.Sequential(cn.ContinualNorm2d(8, num_groups=4, kernel="reference"))
    assert cn.apply_norm_spec(model, spec)[0].kernel == "reference" and model[0].num_groups == 2


@pytest.mark.parametrize("kind", ["bn", "cn", "bn_gn_tied"])
def test_synchronized_layers_round_trip(kind: str) -> None:
    options = {} if kind == "bn" else {"num_groups": 4}
    local = trained(cn.convert_norm(Network(), kind, **options))
    model = cn.convert_sync(copy.deepcopy(local))
    loaded = reloaded(model)
    assert type(loaded.block.bn1) is (nn.SyncBatchNorm if kind == "bn" else cn.SyncContinualNorm)
    back = cn.apply_norm_spec(loaded, cn.norm_spec(local))
    assert cn.norm_spec(back) == cn.norm_spec(local) and back.block.bn1 is not model.block.bn1


def test_synchronized_layers_of_torch_round_trip() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Network())
    assert cn.norm_spec(model)["norms"]["block.bn1"]["dim"] is None
    assert isinstance(reloaded(model).block.bn1, nn.SyncBatchNorm)


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


class PairNorm(nn.Module):
    """A norm that contains another one, whose moments are frozen with it."""

    def __init__(self, num_features: int, momentum: float = 0.1) -> None:
        super().__init__()
        self.num_features, self.momentum = num_features, momentum
        self.inner = nn.BatchNorm2d(num_features, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x).tanh()
        return y


@pytest.fixture
def registered() -> Iterator[None]:
    cn.register_norm("scale", ScaleNorm)
    cn.register_norm("pair", layers={2: PairNorm})
    cn.register_norm("made", lambda num_features, groups=2: nn.GroupNorm(groups, num_features))
    yield
    for name in ("scale", "pair", "made"):
        cn.unregister_norm(name)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("name", "options"), [("scale", {"eps": 0.1, "powers": (2, 4)}), ("pair", {"momentum": 0.3}), ("made", {})]
)
def test_registered_norms_round_trip(name: str, options: dict[str, object]) -> None:
    model = trained(cn.freeze_stats(cn.convert_norm(Network(), name, **options)))
    assert {entry["norm"] for entry in cn.norm_spec(model)["norms"].values()} == {name}
    assert_same(model, reloaded(model))


@pytest.mark.usefixtures("registered")
def test_option_that_is_no_json_needs_the_layer() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), ScaleNorm(8, act=torch.tanh))
    spec = stored(cn.norm_spec(model))
    assert spec["norms"]["1"]["other_options"] == ["act"]
    assert cn.apply_norm_spec(model, spec) is model
    with pytest.raises(ValueError, match=r"'1': its options 'act' are not in the spec; build the model with this norm"):
        cn.apply_norm_spec(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), spec)


def test_norm_that_is_not_registered_is_named() -> None:
    model = cn.convert_norm(Network(), ScaleNorm)
    spec = stored(cn.norm_spec(model))
    assert spec["norms"]["block.bn1"]["norm"] is None
    assert spec["norms"]["block.bn1"]["class"] == "ScaleNorm"
    assert cn.apply_norm_spec(model, spec) is model
    with pytest.raises(ValueError, match=r"ScaleNorm, which was not registered .* contnorm\.register_norm"):
        cn.apply_norm_spec(Network(), spec)
    with pytest.raises(ValueError, match=r"can't be replaced: its class ScaleNorm is not registered"):
        cn.apply_norm_spec(model, cn.norm_spec(Network()))


class ObservationNorm(nn.Module):
    """A layer with moments that is no known norm; it may be frozen."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("running_var", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), 0.1)
        return (x - self.running_mean) * 2


def test_freeze_of_layers_of_unknown_classes_is_kept() -> None:
    def build() -> nn.Module:
        inner = nn.Sequential(nn.InstanceNorm1d(4, track_running_stats=True))
        return nn.Sequential(ObservationNorm(4), inner, nn.BatchNorm1d(4))

    model = build()
    assert cn.apply_norm_spec(model, cn.norm_spec(build())) is model and not model[0]._forward_hooks
    cn.freeze_stats(model[0])
    spec = stored(cn.norm_spec(model))
    assert [entry["frozen"] for entry in spec["norms"].values()] == [True, False, False]
    assert {path: entry.get("class") for path, entry in spec["norms"].items()} == {
        "0": "ObservationNorm",
        "1.0": "InstanceNorm1d",
        "2": None,
    }
    loaded = cn.apply_norm_spec(build(), spec)
    assert cn.norm_spec(loaded) == spec
    loaded[0](torch.ones(3, 4))
    assert torch.equal(loaded[0].running_mean, torch.zeros(4))


# --- what does not fit ----------------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> list[Any]:
    return [[id(m) for m in model.modules()], json.dumps(cn.norm_spec(model)), [type(m) for m in model.modules()]]


def test_everything_that_does_not_fit_is_in_one_error() -> None:
    spec = stored(cn.norm_spec(cn.convert_norm(Network(), "cn", num_groups=4)))
    norms = spec["norms"]
    norms["gone.bn"] = copy.deepcopy(norms["stem.1"])
    norms["head"] = copy.deepcopy(norms["stem.1"])
    norms["stem.1"]["norm"] = "imagined"
    norms["block.bn1"]["num_features"] = 32
    del norms["block.bn2"]
    model = Network()
    before = state_of(model)
    with pytest.raises(ValueError, match="does not fit") as caught:
        cn.apply_norm_spec(model, spec)
    message = str(caught.value)
    assert message.startswith("apply_norm_spec: the spec does not fit Network: ")
    assert message.endswith("The model is unchanged.") and "\n" not in message
    for part in (
        "'gone.bn': not in the model",
        "'head': a norm layer in the spec, and a Linear in the model",
        "'stem.1': the norm 'imagined' is unknown; register it",
        "'block.bn1': 32 channels in the spec, and 16 in the model",
        "'block.bn2': a norm layer in the model, and not in the spec",
    ):
        assert part in message
    assert state_of(model) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: e.update(dim=1), "for 1d input in the spec, and for 2d input in the model"),
        (lambda e: e["options"].update(num_groups=5), "can't be built: .*num_groups=5"),
        (lambda e: e["options"].update(order="bn_gn"), "contradicts itself: norm is 'cn', and 'bn_gn' if it is built"),
        (lambda e: e["options"].update(spin=1), "does not accept 'spin'"),
        (lambda e: e.update(has_act=True), "with an activation of its own in the spec, and without one in the model"),
        (lambda e: e.update(norm="brn", synced=True), "the norm 'brn' has no synchronised form"),
        (lambda e: e.update(norm=3), "damaged: norms.'stem.1'..'norm'. is 3 and must be str"),
        (lambda e: e.pop("frozen"), "damaged: norms.'stem.1'. has no 'frozen'"),
        (lambda e: e.update(colour="red"), "has 'colour', which is unknown"),
        (lambda e: e.update(absorbed=["stem.2"]), "absorbed has 'stem.2', and activations does not"),
    ],
)
def test_wrong_entries_are_refused(change: Callable[[dict[str, Any]], None], words: str) -> None:
    spec = stored(cn.norm_spec(cn.convert_norm(Network(), "cn", num_groups=4)))
    change(spec["norms"]["stem.1"])
    model = Network()
    before = state_of(model)
    with pytest.raises(ValueError, match=words):
        cn.apply_norm_spec(model, spec)
    assert state_of(model) == before


def test_activations_and_convolutions_must_be_there() -> None:
    spec = stored(cn.norm_spec(cn.convert_norm(Network(), "frn", example_input=X)))
    model = Network()
    model.block.relu = nn.Sigmoid()
    with pytest.raises(ValueError, match=r"'block\.relu': an activation in the spec, and a Sigmoid in the model"):
        cn.apply_norm_spec(model, spec)
    spec = stored(cn.norm_spec(cn.convert_norm(Network(), "gn_ws", num_groups=4, example_input=X)))
    model = Network()
    model.block.conv2 = nn.ConvTranspose2d(16, 16, 3, padding=1)
    with pytest.raises(ValueError, match=r"'block\.conv2': a ConvTranspose2d can't be standardized"):
        cn.apply_norm_spec(model, spec)
    assert not any(is_standardized(m) for m in model.modules())


@pytest.mark.parametrize("value", [None, [], "cn"])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match=r"expected a spec of contnorm\.norm_spec, a dict"):
        cn.apply_norm_spec(Network(), value)  # type: ignore[arg-type]


def test_other_dicts_and_versions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"not a spec of contnorm\.norm_spec.*'head\.weight'"):
        cn.apply_norm_spec(Network(), {"head.weight": 1})
    with pytest.raises(ValueError, match=r"version 2, and this release of contnorm reads version 1"):
        cn.apply_norm_spec(Network(), {**cn.norm_spec(Network()), "version": 2})
    with pytest.raises(ValueError, match="'activations' is None and must be a dict"):
        cn.apply_norm_spec(Network(), {**cn.norm_spec(Network()), "activations": None})


def test_lazy_layers_are_refused() -> None:
    model = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d())
    with pytest.raises(ValueError, match=r"norm_spec: layer '1' \(LazyBatchNorm2d\) is lazy.*Run a batch"):
        cn.norm_spec(model)
    with pytest.raises(ValueError, match=r"apply_norm_spec: layer '1' \(LazyBatchNorm2d\) is lazy"):
        cn.apply_norm_spec(model, cn.norm_spec(Network()))
    model(X)
    assert cn.norm_spec(model)["norms"]["1"]["num_features"] == 8


def test_layers_that_cannot_be_replaced_are_refused() -> None:
    spec = cn.norm_spec(cn.convert_norm(Network(), "cn", num_groups=4))
    model = Network()
    model.block.bn1.register_forward_hook(lambda module, args, output: None)
    model.block.steps = [model.block.bn2]  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"'block\.bn1': it has hooks.*'block\.bn2': the attribute 'steps' refers"):
        cn.apply_norm_spec(model, spec)
    assert type(model.stem[1]) is nn.BatchNorm2d
    cn.apply_norm_spec(model, cn.norm_spec(cn.freeze_stats(Network())))  # a freeze needs no replacement


def test_a_model_is_needed() -> None:
    for call in (cn.norm_spec, lambda model: cn.apply_norm_spec(model, {})):
        with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
            call(3)


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (nn.DataParallel, "inside of DistributedDataParallel; call norm_spec or save_model with model.module"),
        (torch.compile, "inside of torch.compile; call norm_spec or save_model with model._orig_mod"),
    ],
)
def test_spec_of_wrapped_model_is_named(wrap: Any, words: str) -> None:
    spec = cn.norm_spec(wrap(nn.Sequential(nn.BatchNorm2d(4))))
    with pytest.raises(ValueError, match=f"the spec does not fit Sequential: it describes a model {words}"):
        cn.apply_norm_spec(nn.Sequential(nn.BatchNorm2d(4)), spec)


def test_wrapped_model_for_spec_of_inner_model_is_named() -> None:
    model = torch.compile(nn.Sequential(nn.BatchNorm2d(4)))
    with pytest.raises(ValueError, match=r"the model is inside of torch.compile; give model._orig_mod"):
        cn.apply_norm_spec(model, cn.norm_spec(nn.Sequential(nn.BatchNorm2d(4))))  # type: ignore[arg-type]
