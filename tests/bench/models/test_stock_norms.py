"""Networks of torch's layers: same results as ours, so that only the time differs."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from contnorm.bench.config.schema import ModelConfig, NormConfig
from contnorm.bench.models.build import build_model
from contnorm.bench.models.norm_layers import STOCK_NORMS, StockGroupNorm
from contnorm.detect import DetectedNorm, detect_norm
from contnorm.errors import UserError


def network(norm: NormConfig) -> nn.Module:
    torch.manual_seed(0)
    return build_model(ModelConfig("resnet18", width=8), norm, (3, 8, 8), 5, 100)


@pytest.mark.parametrize("name", STOCK_NORMS)
def test_stock_layers_train_as_ours(name: str) -> None:
    """In float64, where two orders of the same sums agree to 1e-9 after three steps."""
    ours, stock = (network(NormConfig(name, groups=4, layers=kind)).double() for kind in ("ours", "stock"))
    chance = torch.Generator().manual_seed(1)
    losses: list[list[float]] = [[], []]
    for _ in range(3):
        x = torch.randn(6, 3, 8, 8, generator=chance, dtype=torch.float64)
        for model, seen in zip((ours, stock), losses, strict=True):
            loss = model(x).square().mean()
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            seen.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    x = torch.randn(6, 3, 8, 8, generator=chance, dtype=torch.float64)
    torch.testing.assert_close(ours.eval()(x), stock.eval()(x), rtol=1e-8, atol=1e-9)
    parameters = [sum(p.numel() for p in model.parameters()) for model in (ours, stock)]
    assert parameters[0] == parameters[1]


@pytest.mark.parametrize("name", ["bn", "gn", "cn"])
def test_stock_layers_are_torchs(name: str) -> None:
    model = network(NormConfig(name, groups=4, layers="stock"))
    leaves = [m for m in model.blocks.modules() if not list(m.children()) and not isinstance(m, nn.Conv2d)]
    plain = [m for m in leaves if type(m) is not StockGroupNorm]  # torch's forward, except where that would crash
    assert {type(module).__module__.partition(".")[0] for module in plain} <= {"torch"}
    assert len(plain) < len(leaves) if name == "gn" else plain == leaves


CHANNELS_LAST = """
import torch
from contnorm.bench.config.schema import NormConfig
from contnorm.bench.models.norm_layers import norm_maker

for name in ("gn", "cn"):
    for shape in ((3, 8, 5), (3, 8, 4, 5), (3, 8, 2, 4, 5)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        found = []
        for given in (x, x.movedim(1, -1).contiguous().movedim(-1, 1)):
            layer = norm_maker(NormConfig(name, groups=4, layers='stock'), len(shape) - 2, 100)(8)
            y = layer(given)
            y.square().sum().backward()
            found.append([y, *(p.grad for p in layer.parameters())])
            assert y.dim() == 3 or y.stride() == given.stride()
        for plain, last in zip(*found):
            torch.testing.assert_close(plain, last, rtol=1e-5, atol=1e-5)
print("done")
"""


@pytest.mark.slow
def test_channels_last_input_without_gradient_does_not_crash() -> None:
    """Run in a subprocess, because torch's group norm causes a segmentation fault."""
    ran = subprocess.run([sys.executable, "-c", CHANNELS_LAST], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, "done"), ran.stderr


def test_stock_group_norm_is_bit_exact_and_detected() -> None:
    ours, stock = StockGroupNorm(2, 8), nn.GroupNorm(2, 8)
    x = torch.randn(3, 8, 4, 4, generator=torch.Generator().manual_seed(0))
    for tensors in (x, x.clone().requires_grad_()):
        assert torch.equal(ours(tensors), stock(tensors))
    assert ours.state_dict().keys() == stock.state_dict().keys()
    result = detect_norm(ours)
    assert isinstance(result, DetectedNorm) and result.norm == "gn" and result.options["num_groups"] == 2


@pytest.mark.parametrize("more", [{"name": "brn"}, {"groups": "auto"}, {"momentum": "cumulative"}])
def test_norms_and_options_that_torch_lacks_raise(more: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"norm\.layers='stock': torch has layers for"):
        network(NormConfig(**{"name": "cn", "groups": 4, "layers": "stock", **more}))  # type: ignore[arg-type]
