"""Group norm's kernel against torch's operator in float64.

On the CPU it runs in Triton's interpreter, in tiles so small that a few values need several; ``--device cuda``
runs the same on a GPU, and the sizes of real networks besides.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from contnorm.kernels.triton import group_norm as group_step
from contnorm.kernels.triton import launcher
from contnorm.norms import group
from tests.kernels.exactness import last, same_under_vmaps

pytestmark = pytest.mark.slow  # Triton's interpreter takes long

if not launcher.INSTALLED:
    pytest.skip("needs Triton and torch 2.11", allow_module_level=True)

Shape = tuple[int, int, int, tuple[int, ...]]
EPS = 1e-5
# Sums of float32 against sums of float64: a few roundings, and more where the variance of a group is near zero.
FLOAT32 = 2e-5

# (N, C, G, positions), each with its reason.
SHAPES = [
    pytest.param((2, 12, 3, ()), id="no positions"),
    pytest.param((2, 9, 3, (7, 3)), id="no power of two"),
    pytest.param((2, 72, 2, (2, 3)), id="two groups of many channels"),
    pytest.param((1, 22, 11, (3,)), id="groups that do not fill their blocks"),
    pytest.param((2, 192, 96, (2, 2)), id="groups over more than 32 lanes"),
    pytest.param((1, 160, 160, (3, 1)), id="channels over two blocks, positions that do not fill a tile"),
]
every_shape = pytest.mark.parametrize("shape", SHAPES)
both_layouts = pytest.mark.parametrize("is_last", [False, True], ids=["nchw", "nhwc"])


@pytest.fixture(autouse=True)
def _can_run(device: torch.device) -> None:
    if device.type == "cpu" and not launcher.INTERPRETED:
        pytest.skip("Triton's interpreter is for machines without a GPU; here, use --device cuda")


@pytest.fixture(autouse=True)
def _usual_tiles() -> Iterator[None]:
    usual = group_step.SMALL, group_step.LARGE
    yield
    group_step.SMALL, group_step.LARGE = usual


def in_small_tiles() -> None:
    """Small tiles, so that a few values need several chunks."""
    group_step.SMALL = group_step.LARGE = 64


def inputs(shape: Shape, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    n, c, _, positions = shape
    g = torch.Generator().manual_seed(seed)
    spread = torch.rand((1, c, *[1] * len(positions)), generator=g) + 0.1
    x = torch.randn((n, c, *positions), generator=g) * spread + 0.5
    tensors = {"x": x, "dy": torch.randn(x.shape, generator=g)}
    tensors |= {name: torch.randn(c, generator=g) for name in ("weight", "bias", "mean")}
    tensors["var"] = torch.rand(c, generator=g) + 0.1
    return {name: t.to(device) for name, t in tensors.items()}


def wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """For the reference, contiguous: torch's group norm is inaccurate at 1e4 in the other layout."""
    return {name: t.double().contiguous() for name, t in tensors.items()}


# --- values and gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("small", [False, True], ids=["usual tiles", "small tiles"])
@both_layouts
@every_shape
def test_group_step_is_exact(shape: Shape, is_last: bool, small: bool, device: torch.device) -> None:
    if is_last and not shape[3]:
        pytest.skip("without positions there is one layout")
    tensors = inputs(shape, device)
    tensors |= {name: last(tensors[name]) for name in ("x", "dy") if is_last}
    if small:
        in_small_tiles()
    outcomes = []
    for each in (tensors, wide(tensors)):
        leaves = [each[name].detach().requires_grad_() for name in ("x", "weight", "bias")]
        if each is tensors:
            y = group_step.group_step(*leaves, EPS, shape[2])  # type: ignore[call-arg]
            assert y.stride() == leaves[0].stride()
        else:
            y = F.group_norm(leaves[0], shape[2], *leaves[1:], EPS)
        outcomes.append([y.detach(), *torch.autograd.grad(y, leaves, each["dy"])])
    for actual, expected in zip(*outcomes, strict=True):
        assert (actual - expected).abs().max().item() <= FLOAT32 * max(1.0, expected.abs().max().item())


@pytest.mark.gpu
def test_more_than_2_to_the_31_values(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("needs 30 GB")
    n = 2**31 // (64 * 1024) + 8
    x = torch.randn(n, 64, 32, 32, device=device, dtype=torch.bfloat16).requires_grad_()
    y = group_step.group_step(x, None, None, EPS, 32)
    tail = x.detach()[-2:]
    assert torch.equal(y[-2:], group_step.group_step(tail, None, None, EPS, 32))
    y.backward(y.detach().square())
    leaf = tail.clone().requires_grad_()
    group_step.group_step(leaf, None, None, EPS, 32).backward(y.detach()[-2:].square())
    assert x.grad is not None and leaf.grad is not None and torch.equal(x.grad[-2:], leaf.grad)


@pytest.mark.parametrize(
    ("samples", "many", "weight_type", "bias_type"),
    [
        pytest.param(1, 1024, torch.bfloat16, None, id="one, weight only"),
        pytest.param(20, 1024, None, torch.float16, id="few, bias only"),
        pytest.param(20, 10, torch.float32, torch.float32, id="many, summed by torch"),
        pytest.param(36, 1024, torch.float32, torch.float32, id="more than a small tile of samples"),
    ],
)
def test_parameter_gradients_are_summed_over_samples(
    samples: int,
    many: int,
    weight_type: torch.dtype | None,
    bias_type: torch.dtype | None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_step, "MANY_SAMPLES", many)
    tensors = inputs((samples, 34, 17, (2,)), device)
    types = {"x": torch.float32, "weight": weight_type, "bias": bias_type}
    leaves = [None if d is None else tensors[name].to(d).requires_grad_() for name, d in types.items()]
    exact = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]
    y = group_step.group_step(*leaves, EPS, 17)  # type: ignore[call-arg, arg-type]
    given = [leaf for leaf in leaves if leaf is not None]
    actual = torch.autograd.grad(y, given, tensors["dy"])
    normalized = F.group_norm(exact[0], 17, eps=EPS)  # type: ignore[arg-type]
    scale, offset = (default if p is None else p[:, None] for p, default in zip(exact[1:], (1.0, 0.0), strict=True))
    wanted = [leaf for leaf in exact if leaf is not None]
    expected = torch.autograd.grad(normalized * scale + offset, wanted, tensors["dy"].double())
    for leaf, result, right in zip(given, actual, expected, strict=True):
        assert result.dtype == leaf.dtype
        # One rounding to the dtype of the parameter, and sums in float32.
        limit = torch.finfo(leaf.dtype).eps + FLOAT32
        assert (result.double() - right).abs().max().item() <= limit * max(1.0, right.abs().max().item())


def with_relu(tensors: dict[str, Tensor], groups: int, exact: bool) -> list[Tensor]:
    """``relu(norm(x) + residual)`` and all gradients, by the kernel or in float64."""
    leaves = [tensors[name].detach().requires_grad_() for name in ("x", "weight", "bias", "residual")]
    if exact:
        y = torch.relu(F.group_norm(leaves[0], groups, leaves[1], leaves[2], EPS) + leaves[3])
    else:
        y = group_step.group_step(*leaves[:3], EPS, groups, leaves[3], True)  # type: ignore[call-arg]
        assert y.stride() == leaves[0].stride()
    return [y.detach(), *torch.autograd.grad(y, leaves, tensors["dy"])]


@pytest.mark.parametrize("small", [False, True], ids=["usual tiles", "small tiles"])
@both_layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_residual_and_relu_in_the_same_pass(
    dtype: torch.dtype, is_last: bool, small: bool, device: torch.device
) -> None:
    tensors = inputs((3, 12, 4, (5, 6)), device)
    tensors["residual"] = tensors["dy"].roll(1, 0)
    tensors |= {name: (last(t) if is_last else t).to(dtype) for name, t in tensors.items() if t.dim() > 1}
    if small:
        in_small_tiles()
    actual, expected = with_relu(tensors, 4, False), with_relu(wide(tensors), 4, True)
    zero = expected[0] == 0
    assert torch.equal(actual[0] == 0, zero) and 0.2 < zero.double().mean() < 0.8
    assert torch.equal(actual[4].double(), expected[4])  # a copy of dy, or zero
    for result, right in zip(actual, expected, strict=True):
        # One rounding to the dtype of the result, and sums in float32.
        limit = torch.finfo(result.dtype).eps + FLOAT32
        assert (result.double() - right).abs().max().item() <= limit * max(1.0, right.abs().max().item())


def test_residual_without_relu_and_relu_without_residual(device: torch.device) -> None:
    tensors = inputs((2, 6, 3, (4,)), device)
    x, residual = tensors["x"].requires_grad_(), tensors["dy"].roll(1, 0).requires_grad_()
    plain = group_step.group_step(x, None, None, EPS, 3)
    added = group_step.group_step(x, None, None, EPS, 3, residual)
    torch.testing.assert_close(added, plain + residual)
    for actual, expected in zip(
        torch.autograd.grad(added, [x, residual], tensors["dy"]),
        torch.autograd.grad(plain + residual, [x, residual], tensors["dy"]),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)
    plain = group_step.group_step(x, None, None, EPS, 3)
    cut = group_step.group_step(x, None, None, EPS, 3, None, True)
    assert torch.equal(cut, plain.relu())
    (actual,), (expected,) = (torch.autograd.grad(y, [x], tensors["dy"]) for y in (cut, plain.relu()))
    torch.testing.assert_close(actual, expected)


def test_double_backward_through_relu(device: torch.device) -> None:
    tensors = inputs((2, 6, 3, (4,)), device)
    push = torch.randn(tensors["x"].shape, generator=torch.Generator().manual_seed(9)).to(device)

    def twice(exact: bool) -> tuple[Tensor, ...]:
        used = wide(tensors) if exact else tensors
        x, weight, dy, residual = (used[name].clone().requires_grad_() for name in ("x", "weight", "dy", "dy"))
        if exact:
            y = torch.relu(F.group_norm(x, 3, weight, used["bias"], EPS) + residual)
        else:
            y = group_step.group_step(x, weight, used["bias"], EPS, 3, residual, True)
        first = torch.autograd.grad(y, [x, weight, residual], dy, create_graph=True)
        return torch.autograd.grad(
            (first[0] * push).sum() + first[1].square().sum() + first[2].square().sum(), [x, weight, dy]
        )

    for actual, expected in zip(twice(False), twice(True), strict=True):
        # Sums of products of first derivatives, in float32: some hundred roundings.
        assert (actual.double() - expected).abs().max().item() <= 1e-4 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("is_last", [False, True], ids=["nchw", "nhwc"])
def test_exact_at_large_means(is_last: bool, device: torch.device) -> None:
    """Mean 1e4, standard deviation 1e-2, with an outlier in the pivot: fails with cancellation."""
    in_small_tiles()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, 3, 5, generator=g) * 1e-2 + 1e4
    x[0, :, 0, 0] += 0.5  # fifty standard deviations away
    dy = torch.randn(x.shape, generator=g)
    leaf = (last(x) if is_last else x).to(device).requires_grad_()
    wide_leaf = x.double().to(device).requires_grad_()
    for actual, expected in zip(
        (y := group_step.group_step(leaf, None, None, EPS, 1), *torch.autograd.grad(y, [leaf], dy.to(device))),
        (y := F.group_norm(wide_leaf, 1, eps=EPS), *torch.autograd.grad(y, [wide_leaf], dy.double().to(device))),
        strict=True,
    ):
        assert (actual - expected).abs().max().item() < 1e-5 * expected.abs().max().item()


def test_other_layouts_are_accepted(device: torch.device) -> None:
    whole = inputs((2, 4, 2, (4, 6)), device)["x"]
    for x in (whole[:, :, ::2], whole[:, :, :1].expand(-1, -1, 4, -1)):
        leaf = x.detach().requires_grad_()
        y = group_step.group_step(leaf, None, None, EPS, 2)
        y.sum().backward()
        torch.testing.assert_close(y.double(), F.group_norm(x.double(), 2, eps=EPS), rtol=FLOAT32, atol=FLOAT32)
        assert leaf.grad is not None and leaf.grad.abs().max() < 1e-4  # the sum of a slab does not depend on x


def test_batched_gradients(device: torch.device) -> None:
    """Backward pass under both of torch's vmaps: `is_grads_batched` and `torch.func.vmap`."""
    tensors = inputs((2, 4, 2, (5,)), device)
    x = tensors["x"].requires_grad_()
    y = group_step.group_step(x, tensors["weight"], tensors["bias"], EPS, 2)
    same_under_vmaps(x, y, torch.stack([tensors["dy"], tensors["dy"].square()]))


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [2, 6, 1], ids=["group", "instance", "layer"])
def test_layers_use_the_kernel_in_channels_last(
    groups: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's operator would copy there. Other layouts, and kernel="reference", use torch's operator."""
    if device.type == "cpu":
        pytest.skip("the kernel is selected on a GPU only")
    taken: list[int] = []
    step = group_step.group_step
    monkeypatch.setattr(group, "group_step", lambda *args: taken.append(args[4]) or step(*args))
    x = inputs((3, 6, groups, (5, 3)), device)["x"]
    y = group.group_norm(last(x), groups, eps=EPS)
    assert taken == [groups] and y.is_contiguous(memory_format=torch.channels_last)
    group.group_norm(x, groups)
    monkeypatch.setenv("CONTNORM_KERNEL", "reference")
    group.group_norm(last(x), groups)
    assert taken == [groups]
