"""EvoNorm-S0, FRN and GN with weight standardization in the networks of a run."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contnorm import bench
from contnorm.bench.config.schema import ModelConfig, NormConfig
from contnorm.bench.models.build import build_model
from contnorm.errors import UserError
from contnorm.norms.group import is_standardized

NORMS = ["evonorm_s0", "frn", "gn_ws"]
every_norm = pytest.mark.parametrize("name", NORMS)


def network(name: str, model: str = "resnet18", **settings: Any) -> Any:
    torch.manual_seed(0)
    return build_model(ModelConfig(model, 8), NormConfig(name, groups=4, **settings), (3, 32, 32), 5, 1)


def images() -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def expected_norm(name: str, layer: Any, x: Tensor, is_activated: bool) -> Tensor:
    """A norm and its activation, where one follows."""
    weight, bias = (p.reshape(1, -1, 1, 1) for p in (layer.weight, layer.bias))
    if name == "gn_ws":
        y = F.group_norm(x, 4, layer.weight, layer.bias)
        return y.relu() if is_activated else y
    if name == "frn":
        y = x / (x.square().mean((2, 3), keepdim=True) + 1e-5).sqrt() * weight + bias
        return torch.maximum(y, layer.tau.reshape(1, -1, 1, 1)) if is_activated else y
    groups = x.unflatten(1, (4, -1))
    std = (groups.var((2, 3, 4), correction=0, keepdim=True) + 1e-5).sqrt()
    y = (groups / std).flatten(1, 2)
    return (y * torch.sigmoid(x * layer.v.reshape(1, -1, 1, 1)) if is_activated else y) * weight + bias


def expected_output(name: str, net: Any, x: Tensor) -> Tensor:
    """ResNet-18 of the paper, written again: an activation follows all norms but those before a residual sum."""

    def convolve(conv: Any, x: Tensor) -> Tensor:
        w = conv.weight
        if name == "gn_ws":
            w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.var((1, 2, 3), correction=0, keepdim=True) + 1e-6).sqrt()
        return F.conv2d(x, w, None, conv.stride, conv.padding)

    x = net.pool(expected_norm(name, net.norm, convolve(net.conv, x), True))
    for block in net.blocks:
        y = expected_norm(name, block.norm1, convolve(block.conv1, x), True)
        y = expected_norm(name, block.norm2, convolve(block.conv2, y), False)
        if len(block.shortcut):
            x = expected_norm(name, block.shortcut[1], convolve(block.shortcut[0], x), False)
        x = (x + y).relu()
    z: Tensor = net.head(x.mean((2, 3)))
    return z


@every_norm
def test_network_computes_the_norm_at_every_position(name: str) -> None:
    net = network(name).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    x = images().double()
    torch.testing.assert_close(net(x), expected_output(name, net, x), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("model", "activated"), [("resnet18", 9), ("resnet34", 17), ("resnet50", 33)])
def test_parameters_of_the_activation_exist_where_one_follows(model: str, activated: int) -> None:
    for name, parameter in (("evonorm_s0", "v"), ("frn", "tau")):
        keys = network(name, model).state_dict()
        assert sum(key.split(".")[-1] == parameter for key in keys) == activated


def test_apply_act_false_keeps_the_relus() -> None:
    net = network("frn", options=(("apply_act", False),))
    assert not any("tau" in key for key in net.state_dict())
    x = F.conv2d(images(), net.conv.weight, padding=1)
    torch.testing.assert_close(
        net.pool(expected_norm("frn", net.norm, x, False).relu()), net.pool(net.norm(net.conv(images())).relu())
    )


def test_weight_standardization_keeps_keys_and_initial_weights() -> None:
    plain, standardized = network("gn"), network("gn_ws")
    assert list(plain.state_dict()) == list(standardized.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), standardized.parameters(), strict=True))
    assert all(is_standardized(m) for m in standardized.modules() if isinstance(m, nn.Conv2d))
    custom = network("gn_ws", options=(("weight_eps", 0.01),))
    assert custom.conv.weight_eps == 0.01


# --- runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stream() -> Any:
    return bench.load_stream("split-mnist", source="digits", tasks=2, train_per_task=20, test_per_task=20)


def test_frn_is_refused_for_a_perceptron(stream: Any) -> None:
    with pytest.raises(UserError, match=r"norm 'frn': does not fit model 'mlp'.*one value per channel") as error:
        bench.run(stream, norm="frn")
    assert "\n" not in str(error.value)


class Net(nn.Module):
    """A user's network, which applies an activation after its norm."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int, norm: Any) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(input_shape[0], 8, 3, 2), norm(8), nn.ReLU()
        self.head = nn.Linear(8, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.act(self.norm(self.conv(x))).mean((2, 3)))
        return y


@every_norm
def test_user_network_gets_the_norm(name: str) -> None:
    """Of a norm with an activation, the user says whether the layers apply it."""

    def make(input_shape: tuple[int, ...], num_outputs: int, norm: Any) -> nn.Module:
        return Net(input_shape, num_outputs, norm)

    stream = bench.load_stream("split-mnist", source="digits", tasks=2, train_per_task=20, test_per_task=20)
    settings: dict[str, Any] = {"norm.groups": 2} if name != "frn" else {}
    if name != "gn_ws":
        with pytest.raises(UserError, match=r"contains an activation. Set norm\.apply_act=false"):
            bench.run(stream, norm=name, model=make, settings=settings)
        settings["norm.apply_act"] = False
    for model in (make, lambda shape, outputs: Net(shape, outputs, nn.BatchNorm2d)):
        result = bench.run(stream, norm=name, model=model, settings=settings, tag=str(model is make))
        (kind,) = result.records[0].raw["norms"]
        assert kind.startswith({"evonorm_s0": "EvoNorm2d", "frn": "FilterResponse", "gn_ws": "WSGroupNorm2d"}[name])
