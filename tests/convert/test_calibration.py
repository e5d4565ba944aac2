"""Calibrated conversion: each channel of a layer's outputs keeps its mean and spread on the samples."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import contnorm as cn
from contnorm.norms.group import is_standardized
from tests.models import BatchNormAct2d, FrozenBatchNorm2d, ResNet

G = torch.Generator().manual_seed(3)
DATA = [torch.randn(n, 3, 16, 16, generator=G) * (1 + i) + i for i, n in enumerate((9, 9, 5))]


def trained() -> nn.Module:
    """A network with weights of both signs, and a channel of the first norm that is constant."""
    torch.manual_seed(0)
    model = ResNet()
    for batch in DATA:
        model(batch)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    nn.init.zeros_(model.stem[0].weight[3])
    return model


def outputs(model: nn.Module, norms: list[str], data: list[Tensor]) -> dict[str, Tensor]:
    """Outputs of the norms in evaluation mode, of all calls: channels first."""
    seen: dict[str, list[Tensor]] = {name: [] for name in norms}
    twin = copy.deepcopy(model).eval()
    for name in norms:
        twin.get_submodule(name).register_forward_hook(lambda m, args, y, name=name: seen[name].append(y.clone()))
    with torch.no_grad():
        for batch in data:
            twin(batch)
    return {name: torch.cat([y.transpose(0, 1).flatten(1) for y in values], 1) for name, values in seen.items()}


def assert_same_moments(old: dict[str, Tensor], new: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    for name, expected in old.items():
        torch.testing.assert_close(new[name].mean(1), expected.mean(1), rtol=tolerance, atol=tolerance, msg=name)
        spreads = new[name].std(1, correction=0), expected.std(1, correction=0)
        torch.testing.assert_close(*spreads, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("gn", {"num_groups": 4}),
        ("gn_ws", {"channels_per_group": 4}),
        ("ln", {}),
        ("in", {"affine": True}),
        ("cn", {"num_groups": 4}),
        ("bn_gn", {"num_groups": 4}),
        ("sn", {}),
        ("rbn", {}),
        (nn.InstanceNorm2d, {"affine": True}),
    ],
)
def test_outputs_of_each_layer_keep_mean_and_spread(to: Any, options: dict[str, Any]) -> None:
    model = trained()
    norms = [name for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    weight, expected = model.stem[1].weight, outputs(model, norms, DATA)
    cn.convert_norm(model, to, calibrate=DATA, **options)
    found = outputs(model, norms, DATA)
    assert_same_moments(expected, found)
    assert model.stem[1].weight is weight and weight.requires_grad and weight.grad is None and model.training
    first, second = expected["stem.1"], found["stem.1"]  # in the first layer, the inputs are those of before
    together = ((first - first.mean(1, keepdim=True)) * (second - second.mean(1, keepdim=True))).mean(1)
    assert bool((together[[0, 1, 2, 4, 5, 6, 7]] > 0).all())  # also where the weight is negative
    moments = {name: value.clone() for name, value in model.named_buffers() if "running" in name}
    assert not any("stale" in row.state for row in cn.summarize(model))
    if moments:  # those of the calibrated network; a training forward normalizes with the biased variance
        cn.reestimate(model, DATA)
        for name, value in model.named_buffers():
            if "running" in name:
                torch.testing.assert_close(value, moments[name], rtol=1e-2, atol=1e-2, msg=name)


@pytest.mark.parametrize("to", ["gn", "cn"])
def test_passes_layer_by_layer_give_the_same(to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    swept = cn.convert_norm(trained(), to, num_groups=4, calibrate=DATA).state_dict()
    monkeypatch.setattr("contnorm.moments.reestimate._free_memory", lambda model, processes: 0)
    found = cn.convert_norm(trained(), to, num_groups=4, calibrate=DATA).state_dict()
    for name, value in swept.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


class Odd(nn.Module):
    """A layer that is called twice, one with constant tensors, one with an activation, and one that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.frozen, self.act = nn.BatchNorm2d(8), FrozenBatchNorm2d(8), BatchNormAct2d(8)
        self.conv, self.unused = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.conv(x))
        y: Tensor = self.act(self.twice(x) + self.twice(3 * x.square()))
        return y


def test_layers_called_twice_with_constant_tensors_or_an_activation() -> None:
    torch.manual_seed(1)
    model = Odd()
    model(DATA[0])
    norms = ["frozen", "twice", "act.drop"]
    expected = outputs(model, norms, DATA)
    cn.convert_norm(model, "gn", num_groups=2, calibrate=DATA, treat_as={BatchNormAct2d: "bn"})
    assert_same_moments(expected, outputs(model, norms, DATA))
    assert not model.frozen.weight.requires_grad and bool((model.unused.weight == 1).all())


@pytest.mark.parametrize("to", ["gn_ws", "cn", "bn_gn"])
def test_an_error_leaves_the_model_unchanged(to: str) -> None:
    model = trained()
    kind, before, expected = type(model.stem[1]), copy.deepcopy(model.state_dict()), model.eval()(DATA[0])
    model.head["linear"].register_forward_hook(lambda m, args, y: 1 / 0 if type(model.stem[1]) is not kind else None)
    with pytest.raises(ZeroDivisionError):
        cn.convert_norm(model, to, num_groups=4, calibrate=DATA)
    assert type(model.stem[1]) is kind and not any(map(is_standardized, [model.stem[0]]))
    assert not any("stale" in row.state for row in cn.summarize(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(DATA[0]), expected)


@pytest.mark.parametrize(
    ("calibrate", "options", "error"),
    [
        (DATA[0], {}, TypeError),
        (iter(DATA), {}, TypeError),
        ([], {}, ValueError),
        (DATA, {"affine": False}, ValueError),
        ([DATA[0], DATA[1] * torch.inf], {}, ValueError),
    ],
)
def test_unusable_samples_or_layers_raise(calibrate: Any, options: dict[str, Any], error: type[Exception]) -> None:
    model = trained()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=r"calibrate|NaN"):
        cn.convert_norm(model, "gn", num_groups=4, calibrate=calibrate, **options)
    assert type(model.stem[1]) is nn.BatchNorm2d
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
