"""ResNets for photographs: torchvision's names, shapes and counts, and their forward pass by an independent one."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contnorm.bench.config.schema import ModelConfig, NormConfig
from contnorm.bench.models import NETWORKS
from contnorm.bench.models.build import build_model
from contnorm.bench.models.networks import DEPTHS, DeepResNet, ResNet18
from contnorm.convert import convert_norm
from contnorm.errors import UserError

BLOCKS = {"resnet34": (3, 4, 6, 3), "resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}


def expected(name: str, outputs: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of torchvision's state dict, in its order, written down from its layout."""
    shapes: dict[str, tuple[int, ...]] = {}

    def norm(at: str, channels: int) -> None:
        shapes.update({f"{at}.{part}": (channels,) for part in ("weight", "bias", "running_mean", "running_var")})
        shapes[f"{at}.num_batches_tracked"] = ()

    bottleneck = name != "resnet34"
    shapes["conv1.weight"] = (64, 3, 7, 7)
    norm("bn1", 64)
    before = 64
    for stage, number in enumerate(BLOCKS[name], start=1):
        inside = 32 * 2**stage
        after = 4 * inside if bottleneck else inside
        for b in range(number):
            at = f"layer{stage}.{b}"
            kernels = [(inside, before, 1), (inside, inside, 3), (after, inside, 1)]
            for i, (out, into, k) in enumerate(kernels if bottleneck else [(inside, before, 3), (inside, inside, 3)]):
                shapes[f"{at}.conv{i + 1}.weight"] = (out, into, k, k)
                norm(f"{at}.bn{i + 1}", out)
            if b == 0 and (bottleneck or stage > 1):
                shapes[f"{at}.downsample.0.weight"] = (after, before, 1, 1)
                norm(f"{at}.downsample.1", after)
            before = after
    shapes["fc.weight"], shapes["fc.bias"] = (outputs, before), (outputs,)
    return shapes


@pytest.mark.parametrize(
    ("name", "parameters", "tensors", "norms"),
    [("resnet34", 21_797_672, 218, 36), ("resnet50", 25_557_032, 320, 53), ("resnet101", 44_549_160, 626, 104)],
)
@pytest.mark.parametrize("norm", ["bn", "cn4"])
def test_names_shapes_and_counts_equal_torchvision(
    name: str, parameters: int, tensors: int, norm: str, norms: int
) -> None:
    with torch.device("meta"):
        network = build_model(ModelConfig(name, width=64), NormConfig(norm), (3, 256, 256), 1000, 1)
    found = {key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}
    assert list(found.items()) == list(expected(name, 1000).items())
    assert sum(p.numel() for p in network.parameters()) == parameters and len(found) == tensors
    assert sum(key.endswith("running_mean") for key in found) == norms
    if name == "resnet101":  # a few as they stand in published files
        assert found["layer3.22.conv3.weight"] == (1024, 256, 1, 1)
        assert found["layer4.0.downsample.0.weight"] == (2048, 1024, 1, 1)
        assert found["layer1.0.downsample.0.weight"] == (256, 64, 1, 1)


def by_functions(state: dict[str, Tensor], x: Tensor, blocks: tuple[int, ...], training: bool) -> Tensor:
    """The forward pass of a torchvision ResNet, from its state dict and torch's functions alone."""

    def conv(at: str, x: Tensor, stride: int = 1) -> Tensor:
        weight = state[f"{at}.weight"]
        return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

    def norm(at: str, x: Tensor) -> Tensor:
        mean, var = state[f"{at}.running_mean"].clone(), state[f"{at}.running_var"].clone()
        return F.batch_norm(x, mean, var, state[f"{at}.weight"], state[f"{at}.bias"], training)

    x = F.max_pool2d(norm("bn1", conv("conv1", x, 2)).relu(), 3, 2, 1)
    for stage, number in enumerate(blocks, start=1):
        for b in range(number):
            at, stride = f"layer{stage}.{b}", 2 if stage > 1 and b == 0 else 1
            last = 3 if f"{at}.conv3.weight" in state else 2
            y = x
            for i in range(1, last + 1):  # the stride is where the kernel first is 3x3
                y = norm(f"{at}.bn{i}", conv(f"{at}.conv{i}", y, stride if i == last - 1 else 1))
                y = y.relu() if i < last else y
            if f"{at}.downsample.0.weight" in state:
                x = norm(f"{at}.downsample.1", conv(f"{at}.downsample.0", x, stride))
            x = (x + y).relu()
    return F.linear(F.adaptive_avg_pool2d(x, 1).flatten(1), state["fc.weight"], state["fc.bias"])


def scrambled(name: str, norm: str = "bn", outputs: int = 5) -> nn.Module:
    """In small, with affine parameters and moments that are not where they begin."""
    network = build_model(ModelConfig(name, width=8), NormConfig(norm), (3, 64, 64), outputs, 1).double()
    with torch.no_grad():
        for key, tensor in network.state_dict().items():
            if key.endswith("running_var"):
                tensor.uniform_(0.5, 2)
            elif "num_batches" not in key and tensor.dim() == 1:
                tensor.normal_(1 if key.endswith("weight") else 0, 0.2)
    return network


@pytest.mark.parametrize("training", [False, True], ids=["evaluating", "training"])
@pytest.mark.parametrize("name", BLOCKS)
def test_forward_equals_independent_implementation(name: str, training: bool) -> None:
    network = scrambled(name).train(training)
    x = torch.randn(3, 3, 64, 64, dtype=torch.float64)
    state = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    torch.testing.assert_close(network(x), by_functions(state, x, BLOCKS[name], training), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["resnet34", "resnet50"])
def test_cn_network_equals_converted_bn_network(name: str) -> None:
    """Same names, so that weights pass from one to the other; then the same outputs, gradients and moments."""
    converted = convert_norm(scrambled(name), "cn", num_groups=4).train()
    built = scrambled(name, "cn4").train()
    built.load_state_dict(copy.deepcopy(converted.state_dict()))
    x = torch.randn(3, 3, 64, 64, dtype=torch.float64)
    outputs = [network(x) for network in (built, converted)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-9, atol=1e-9)
    for y in outputs:
        y.square().sum().backward()
    for (key, a), b in zip(built.named_parameters(), converted.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-9, msg=key)
    for (key, a), b in zip(built.named_buffers(), converted.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=key)


def test_initialization_equals_torchvision() -> None:
    """He's for the way back: variance 2 over outputs times kernel positions; norms begin at 1 and 0."""
    torch.manual_seed(0)
    network = DeepResNet("resnet34", 3, 10, 64, norm=nn.BatchNorm2d)
    for key in ("layer3.1.conv2.weight", "layer4.0.conv1.weight", "layer3.0.downsample.0.weight"):
        weight = network.state_dict()[key]
        wanted = math.sqrt(2 / (weight.shape[0] * weight[0, 0].numel()))
        error = 4 / math.sqrt(2 * weight.numel())  # four standard errors of a normal's deviation
        assert abs(weight.std().item() / wanted - 1) < error, key
    assert all((p == 1).all() for key, p in network.named_parameters() if "bn" in key and key.endswith("weight"))
    assert all((p == 0).all() for key, p in network.named_parameters() if "bn" in key and key.endswith("bias"))


def test_settings_determine_the_network() -> None:
    plain = build_model(ModelConfig("resnet34", width=4, stem="plain"), NormConfig("none"), (1, 32, 32), 7, 1)
    assert isinstance(plain, DeepResNet) and isinstance(plain.maxpool, nn.Identity)
    assert plain.conv1.weight.shape == (4, 1, 7, 7) and plain(torch.randn(1, 1, 32, 32)).shape == (1, 7)
    assert isinstance(build_model(ModelConfig("resnet18", 8), NormConfig(), (3, 32, 32), 4, 1), ResNet18)
    with pytest.raises(UserError, match=r"norm\.groups=32 does not divide the 8 channels"):
        build_model(ModelConfig("resnet50", 8), NormConfig("cn"), (3, 32, 32), 4, 1)
    with pytest.raises(
        UserError, match=r"unknown model 'resnet51'\. Did you mean .*There are: mlp, resnet18, resnet34"
    ):
        build_model(ModelConfig("resnet51"), NormConfig(), (3, 32, 32), 4, 1)
    assert tuple(DEPTHS) == tuple(BLOCKS)


def test_every_registered_network_can_be_built() -> None:
    for name in NETWORKS:
        network = build_model(ModelConfig(name, width=8), NormConfig("bn"), (3, 32, 32), 4, 1).eval()
        assert network(torch.randn(2, 3, 32, 32)).shape == (2, 4)
