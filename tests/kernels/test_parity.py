"""`analytic` against `reference`, both compared with float64: outputs, moments and every gradient."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("hypothesis", reason="hypothesis is not installed")
from hypothesis import given, settings
from hypothesis import strategies as st

from contnorm import ContinualNorm2d
from contnorm.kernels import analytic, reference

# (N, C, G, positions), each with its reason.
SHAPES = [
    pytest.param((2, 3, 1, ()), id="smallest"),
    pytest.param((7, 12, 3, ()), id="no positions"),
    pytest.param((1, 6, 2, (5,)), id="one sample"),
    pytest.param((3, 5, 5, (4, 4)), id="group of one channel"),
    pytest.param((3, 5, 1, (4, 4)), id="one group"),
    pytest.param((20, 64, 32, (8, 8)), id="as in a ResNet"),
    pytest.param((5, 33, 11, (7, 3)), id="no power of two"),
    pytest.param((2, 8, 4, (2, 3, 5)), id="volumes"),
]


def run(kernel: str, x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, groups: int, eps: float) -> dict[str, Tensor]:
    x, weight, bias = (t.clone().requires_grad_() for t in (x, weight, bias))
    train = analytic.train if kernel == "analytic" else reference.train
    y, result = train(x, weight, bias, eps, groups)
    assert result is not None
    y.backward(dy)
    grads = {"dx": x.grad, "dweight": weight.grad, "dbias": bias.grad}
    return {"y": y.detach(), "mean": result.mean, "var": result.var} | {k: v for k, v in grads.items() if v is not None}


def inputs(n: int, c: int, positions: tuple[int, ...], seed: int, device: torch.device) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    shape = (n, c, *positions)
    x = torch.randn(shape, generator=g, dtype=torch.float64) * torch.rand((1, c, *[1] * len(positions)), generator=g)
    weight, bias = torch.randn(c, generator=g), torch.randn(c, generator=g)
    dy = torch.randn(shape, generator=g)
    return tuple(t.double().to(device) for t in (x + 0.5, weight, bias, dy))


def agree(shape: tuple[int, int, int, tuple[int, ...]], seed: int, eps: float, device: torch.device) -> None:
    n, c, groups, positions = shape
    arguments = inputs(n, c, positions, seed, device)
    exact = run("reference", *arguments, groups=groups, eps=eps)
    judged = run("analytic", *arguments, groups=groups, eps=eps)
    for name, value in exact.items():
        # Both are float64 and differ by the order of sums, more where a variance is near zero.
        torch.testing.assert_close(judged[name], value, rtol=1e-7, atol=1e-8 * max(1, value.abs().max().item()))
    length = math.prod(positions)
    if min(c // groups * length, n * length) <= 2:
        return  # two values always normalize to plus and minus one: the gradient is cancellation only
    single = run("analytic", *(t.float() for t in arguments), groups=groups, eps=eps)
    stock = run("reference", *(t.float() for t in arguments), groups=groups, eps=eps)
    for name, value in exact.items():
        size = max(1.0, value.abs().max().item())
        ours = (single[name].double() - value).abs().max().item() / size
        theirs = (stock[name].double() - value).abs().max().item() / size
        # float32: as accurate as torch's operators, up to a few roundings.
        assert ours <= 4 * theirs + 2e-5, name


@pytest.mark.parametrize("shape", SHAPES)
def test_analytic_equals_reference(shape: tuple[int, int, int, tuple[int, ...]], device: torch.device) -> None:
    agree(shape, seed=0, eps=1e-5, device=device)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 9),
    groups=st.integers(1, 5),
    per_group=st.integers(1, 5),
    positions=st.lists(st.integers(1, 5), max_size=3),
    eps=st.sampled_from([1e-5, 1e-3]),
    seed=st.integers(0, 10_000),
)
def test_analytic_equals_reference_on_any_shape(
    n: int, groups: int, per_group: int, positions: list[int], eps: float, seed: int
) -> None:
    values = n * torch.Size(positions).numel()
    if values < 2 or per_group * torch.Size(positions).numel() < 2:
        return  # raises: one value per channel, or per group
    agree((n, groups * per_group, groups, tuple(positions)), seed, eps, torch.device("cpu"))


@pytest.mark.parametrize("shape", SHAPES)
def test_evaluation_equals_reference(shape: tuple[int, int, int, tuple[int, ...]], device: torch.device) -> None:
    n, c, groups, positions = shape
    x, weight, bias, dy = inputs(n, c, positions, 1, device)
    mean, var = torch.randn_like(weight), torch.rand_like(weight) + 0.1
    results = []
    for module in (reference, analytic):
        tensors = [t.clone().requires_grad_() for t in (x, weight, bias)]
        y = module.evaluate(tensors[0], mean, var, *tensors[1:], 1e-5, groups)
        y.backward(dy)
        results.append([y, *(t.grad for t in tensors)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("pivot_is", ["near", "an outlier"])
def test_exact_at_large_means_where_reference_cancels(pivot_is: str, device: torch.device) -> None:
    """Mean 1e4, standard deviation 1e-2: needs the pivot; without it, the test fails."""
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(6, 16, 5, 5, generator=g) * 1e-2 + 1e4).to(device)
    if pivot_is == "an outlier":
        x[:, ::4, 0, 0] += 0.5  # fifty standard deviations away, just where the pivot is taken
    ones, zeros = torch.ones(16, device=device), torch.zeros(16, device=device)
    dy = torch.randn(x.shape, generator=g).to(device)
    exact = run("reference", x.double(), ones.double(), zeros.double(), dy.double(), 4, 1e-5)
    ours, stock = (run(kernel, x, ones, zeros, dy, 4, 1e-5) for kernel in ("analytic", "reference"))
    for name in ("y", "dx", "dweight"):
        size = exact[name].abs().max()
        assert ((ours[name] - exact[name]).abs().max() / size).item() < 1e-5
        assert ((stock[name] - exact[name]).abs().max() / size).item() > 3e-3


@pytest.mark.parametrize("kernel", ["auto", "analytic"])
@pytest.mark.parametrize("order", ["gn_bn", "bn_gn"])
def test_exact_with_an_outlier_in_the_first_position(kernel: str, order: str, device: torch.device) -> None:
    """A pivot from the first value alone would lose precision everywhere."""
    x = torch.randn(4, 4, 64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    x[:, ::2, 0, 0] = 5e4
    layer, stock, exact = (
        ContinualNorm2d(4, num_groups=2, order=order, kernel=k).to(device)  # type: ignore[arg-type]
        for k in (kernel, "reference", "reference")
    )
    expected = exact.double()(x.double())
    error, theirs = ((each(x) - expected)[:, :, 1:].abs().max().item() for each in (layer, stock))
    assert error < 4 * theirs + 1e-6
    torch.testing.assert_close(layer.running_mean.double(), exact.running_mean, rtol=1e-5, atol=1e-5)
