"""The paper's variants with our group norm and torch's batch norm, against the definition in float64.

On the CPU the kernels run in Triton's interpreter, in tiles so small that a few values need several; ``--device cuda``
runs the same on a GPU, and the sizes of real networks besides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from contnorm import ContinualNorm2d
from contnorm.functional import continual_norm
from contnorm.kernels.triton import cn_variants as variants
from contnorm.kernels.triton import continual as fused
from contnorm.kernels.triton import group_norm as group_step
from contnorm.kernels.triton.continual.plan import Sizes
from contnorm.kernels.triton.group_norm import choose_tile
from contnorm.norms import group
from tests.kernels.exactness import errors, last, same_under_vmaps

pytest.importorskip("triton", reason="Triton is not installed")

Shape = tuple[int, int, int, tuple[int, ...]]
EPS = 1e-5
# Sums of float32 against sums of float64: a few roundings, and more where the variance of a group is near zero.
FLOAT32 = 2e-5

VARIANTS: dict[str, dict[str, Any]] = {
    "bn_gn": {"order": "bn_gn"},
    "cn_tied": {"tied": True},
    "bn_gn_tied": {"order": "bn_gn", "tied": True},
}
# (N, C, G, positions), each with its reason.
SHAPES = [
    pytest.param((2, 12, 3, ()), id="no positions"),
    pytest.param((1, 6, 2, (5,)), id="one sample"),
    pytest.param((1, 5, 5, (4, 4)), id="group of one channel"),
    pytest.param((2, 5, 1, (4, 4)), id="one group"),
    pytest.param((2, 8, 4, (4, 4)), id="as in a ResNet"),
    pytest.param((2, 9, 3, (7, 3)), id="no power of two"),
    pytest.param((1, 8, 4, (2, 3, 5)), id="volumes"),
    pytest.param((2, 72, 2, (2, 3)), id="two groups of many channels"),
    pytest.param((1, 22, 11, (3,)), id="groups that do not fill their blocks"),
    pytest.param((2, 192, 96, (2, 2)), id="groups over more than 32 lanes"),
    pytest.param((2, 129, 43, (2, 2)), id="padded groups over more than 32 lanes"),
    pytest.param((1, 160, 160, (3, 1)), id="channels over two blocks, positions that do not fill a tile"),
]
AS_IN_NETWORKS = [
    (20, 64, 32, (32, 32)),
    (20, 128, 32, (16, 16)),
    (20, 256, 32, (8, 8)),
    (20, 512, 32, (4, 4)),
    (8, 64, 32, (112, 112)),
    (64, 512, 1, (7, 7)),
    (4096, 128, 16, ()),
    (128, 96, 32, (3, 3)),
]
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_shape = pytest.mark.parametrize("shape", SHAPES)
both_layouts = pytest.mark.parametrize("is_last", [False, True], ids=["nchw", "nhwc"])


@pytest.fixture(autouse=True)
def _can_run(device: torch.device) -> None:
    if device.type == "cpu" and not fused.INTERPRETED:
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


def results(
    tensors: dict[str, Tensor], groups: int, kernel: Any, variant: str, training: bool = True
) -> dict[str, Tensor]:
    """The output, the updated running moments and every gradient."""
    leaves = {name: tensors[name].detach().requires_grad_() for name in ("x", "weight", "bias") if name in tensors}
    moments = [tensors[name].clone() for name in ("mean", "var")]
    y = continual_norm(
        leaves["x"], *moments, leaves.get("weight"), leaves.get("bias"), training, 0.3, EPS, groups,
        kernel=kernel, **VARIANTS[variant],
    )  # fmt: skip
    grads = torch.autograd.grad(y, list(leaves.values()), tensors["dy"])
    result = {"y": y.detach(), "mean": moments[0], "var": moments[1]}
    return result | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """For the reference, contiguous: torch's group norm is inaccurate at 1e4 in the other layout."""
    return {name: t.double().contiguous() for name, t in tensors.items()}


def compare(tensors: dict[str, Tensor], groups: int, variant: str, training: bool = True) -> None:
    """As accurate as torch's operators in float32, whose error is larger where a variance is near zero."""
    expected = results(wide(tensors), groups, "reference", variant, training)
    stock = errors(results(tensors, groups, "reference", variant, training), expected)
    for name, error in errors(results(tensors, groups, "triton", variant, training), expected).items():
        assert error <= 4 * stock[name] + FLOAT32, f"{name}: off by {error:.1e}, the stock calls by {stock[name]:.1e}"


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
            y = group_step.group_step(*leaves, EPS, shape[2], torch.float32)  # type: ignore[call-arg]
            assert y.stride() == leaves[0].stride()
        else:
            y = F.group_norm(leaves[0], shape[2], *leaves[1:], EPS)
        outcomes.append([y.detach(), *torch.autograd.grad(y, leaves, each["dy"])])
    for actual, expected in zip(*outcomes, strict=True):
        assert (actual - expected).abs().max().item() <= FLOAT32 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize(
    "shape", [(2, 9, 3, (7, 3)), (1, 6, 2, (5,)), (4, 6, 2, ())], ids=["no power of two", "one sample", "no positions"]
)
@every_variant
def test_outputs_moments_and_gradients_are_exact(variant: str, shape: Shape, device: torch.device) -> None:
    compare(inputs(shape, device), shape[2], variant)


@every_variant
def test_channels_last_and_large_slabs_are_exact(variant: str, device: torch.device) -> None:
    in_small_tiles()
    tensors = inputs((2, 6, 2, (3, 5)), device)
    tensors |= {name: last(tensors[name]) for name in ("x", "dy")}
    assert choose_tile(Sizes(2, 6, 15, 2, True, 4)).positions == 8
    compare(tensors, 2, variant)
    compare(tensors, 2, variant, training=False)


@pytest.mark.parametrize(
    ("variant", "missing"),
    [
        ("bn_gn", ("weight", "bias")),
        ("bn_gn", ("weight",)),
        ("cn_tied", ("weight",)),
        ("cn_tied", ("bias",)),
        ("bn_gn_tied", ("weight",)),
        ("bn_gn_tied", ("bias",)),
    ],
)
def test_parameters_are_optional(variant: str, missing: tuple[str, ...], device: torch.device) -> None:
    tensors = {name: t for name, t in inputs((2, 6, 2, (5,)), device).items() if name not in missing}
    compare(tensors, 2, variant)
    compare(tensors, 2, variant, training=False)


@pytest.mark.parametrize(
    ("dtype", "whole"), [(torch.bfloat16, False), (torch.float16, True)], ids=["bfloat16", "float16, parameters too"]
)
@every_variant
def test_half_precision_is_rounded_once(variant: str, dtype: torch.dtype, whole: bool, device: torch.device) -> None:
    tensors = inputs((3, 6, 2, (4, 2)), device)
    half = ("x", "dy", "weight", "bias") if whole else ("x", "dy")
    tensors |= {name: tensors[name].to(dtype) for name in half}
    actual = results(tensors, 2, "triton", variant)
    for name, value in actual.items():
        like = tensors["x" if name == "y" else name.removeprefix("d")]
        assert value.dtype == like.dtype, name
    for name, error in errors(actual, results(wide(tensors), 2, "reference", variant)).items():
        # One rounding of each result to its dtype; everything before is float32.
        assert error <= torch.finfo(dtype).eps, name


@pytest.mark.gpu
@both_layouts
@pytest.mark.parametrize("shape", AS_IN_NETWORKS, ids=str)
@every_variant
def test_layer_sizes_of_networks(variant: str, shape: Shape, is_last: bool, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("too slow in the interpreter")
    tensors = inputs(shape, device)
    if is_last:
        tensors |= {name: last(tensors[name]) for name in ("x", "dy")}
    compare(tensors, shape[2], variant)
    compare(tensors, shape[2], variant, training=False)


@pytest.mark.gpu
def test_more_than_2_to_the_31_values(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("needs 30 GB")
    n = 2**31 // (64 * 1024) + 8
    x = torch.randn(n, 64, 32, 32, device=device, dtype=torch.bfloat16).requires_grad_()
    y = group_step.group_step(x, None, None, EPS, 32, torch.bfloat16)
    tail = x.detach()[-2:]
    assert torch.equal(y[-2:], group_step.group_step(tail, None, None, EPS, 32, torch.bfloat16))
    y.backward(y.detach().square())
    leaf = tail.clone().requires_grad_()
    group_step.group_step(leaf, None, None, EPS, 32, torch.bfloat16).backward(y.detach()[-2:].square())
    assert x.grad is not None and leaf.grad is not None and torch.equal(x.grad[-2:], leaf.grad)


@pytest.mark.parametrize(
    ("samples", "many"),
    [(1, 1024), (20, 1024), (130, 1024), (20, 10)],
    ids=["one", "few", "several tiles of samples", "many, summed by torch"],
)
@pytest.mark.parametrize(
    ("weight_type", "bias_type"),
    [(torch.float32, torch.float32), (torch.bfloat16, None), (None, torch.float16)],
    ids=["both", "weight only, bfloat16", "bias only, float16"],
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
    y = group_step.group_step(*leaves, EPS, 17, torch.float32)  # type: ignore[call-arg, arg-type]
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


def with_relu(tensors: dict[str, Tensor], groups: int, exact: bool, dtype: torch.dtype) -> list[Tensor]:
    """``relu(norm(x) + residual)`` and all gradients, by the kernel or in float64."""
    leaves = [tensors[name].detach().requires_grad_() for name in ("x", "weight", "bias", "residual")]
    if exact:
        y = torch.relu(F.group_norm(leaves[0], groups, leaves[1], leaves[2], EPS) + leaves[3])
    else:
        y = group_step.group_step(*leaves[:3], EPS, groups, dtype, leaves[3], True)  # type: ignore[call-arg]
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
    actual, expected = with_relu(tensors, 4, False, dtype), with_relu(wide(tensors), 4, True, dtype)
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
    plain = group_step.group_step(x, None, None, EPS, 3, torch.float32)
    added = group_step.group_step(x, None, None, EPS, 3, torch.float32, residual)
    torch.testing.assert_close(added, plain + residual)
    for actual, expected in zip(
        torch.autograd.grad(added, [x, residual], tensors["dy"]),
        torch.autograd.grad(plain + residual, [x, residual], tensors["dy"]),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)
    plain = group_step.group_step(x, None, None, EPS, 3, torch.float32)
    cut = group_step.group_step(x, None, None, EPS, 3, torch.float32, None, True)
    assert torch.equal(cut, plain.relu())
    (actual,), (expected,) = (torch.autograd.grad(y, [x], tensors["dy"]) for y in (cut, plain.relu()))
    torch.testing.assert_close(actual, expected)


def test_relu_keeps_nan(device: torch.device) -> None:
    x = inputs((2, 6, 3, (4,)), device)["x"]
    x[0, 0, 1] = float("nan")
    y = group_step.group_step(x, None, None, EPS, 3, torch.float32, None, True)
    assert y[0, :2].isnan().all() and y[0, 2:].isfinite().all() and y[1].isfinite().all()


def test_double_backward_through_relu(device: torch.device) -> None:
    tensors = inputs((2, 6, 3, (4,)), device)
    push = torch.randn(tensors["x"].shape, generator=torch.Generator().manual_seed(9)).to(device)

    def twice(exact: bool) -> tuple[Tensor, ...]:
        used = wide(tensors) if exact else tensors
        x, weight, dy, residual = (used[name].clone().requires_grad_() for name in ("x", "weight", "dy", "dy"))
        if exact:
            y = torch.relu(F.group_norm(x, 3, weight, used["bias"], EPS) + residual)
        else:
            y = group_step.group_step(x, weight, used["bias"], EPS, 3, torch.float32, residual, True)
        first = torch.autograd.grad(y, [x, weight, residual], dy, create_graph=True)
        return torch.autograd.grad(
            (first[0] * push).sum() + first[1].square().sum() + first[2].square().sum(), [x, weight, dy]
        )

    for actual, expected in zip(twice(False), twice(True), strict=True):
        # As in `test_double_backward`.
        assert (actual.double() - expected).abs().max().item() <= 1e-4 * max(1.0, expected.abs().max().item())


def test_double_backward_of_the_residual_alone(device: torch.device) -> None:
    tensors = inputs((2, 6, 3, (4,)), device)
    residual, dy = tensors["dy"].roll(1, 0).requires_grad_(), tensors["dy"].requires_grad_()
    y = group_step.group_step(tensors["x"], None, None, EPS, 3, torch.float32, residual, True)
    (first,) = torch.autograd.grad(y, [residual], dy, create_graph=True)
    assert torch.equal(first, torch.where(y > 0, dy, 0.0))
    (second,) = torch.autograd.grad(first.sum(), [dy])
    assert torch.equal(second, (y > 0).float())


# --- large values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@both_layouts
@every_variant
def test_exact_at_large_means(variant: str, is_last: bool, training: bool, device: torch.device) -> None:
    """Mean 1e4, standard deviation 1e-2, with an outlier in the pivot: fails with cancellation."""
    in_small_tiles()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, 3, 5, generator=g) * 1e-2 + 1e4
    x[0, :, 0, 0] += 0.5  # fifty standard deviations away
    tensors = {"x": x, "weight": torch.ones(6), "bias": torch.zeros(6), "dy": torch.randn(x.shape, generator=g)}
    level = 9e3 if "bn_gn" in variant else 0.1  # mean of the tracked signal: the input, or normalized groups
    tensors |= {"mean": torch.full((6,), level), "var": torch.full((6,), 0.5)}
    tensors = {name: (last(t) if is_last and t.dim() > 1 else t).to(device) for name, t in tensors.items()}
    actual = results(tensors, 1, "triton", variant, training)
    expected = results(wide(tensors), 1, "reference", variant, training)
    for name, value in expected.items():
        # The two gradients of the tied weight almost cancel: a norm is invariant to the scale of its input.
        size = max(value.abs().max().item(), 1.0 if name == "dweight" else 0.0)
        assert (actual[name] - value).abs().max().item() / size < 1e-5, name
    if not training and VARIANTS[variant].get("order") == "bn_gn":  # a separate kernel without gradients
        seen = {name: tensors[name] for name in ("mean", "var", "weight", "bias")}
        y = continual_norm(tensors["x"], *seen.values(), False, num_groups=1, kernel="triton", **VARIANTS[variant])
        assert (y - expected["y"]).abs().max().item() < 1e-5 * expected["y"].abs().max().item()


@every_variant
def test_evaluation_with_distant_channel_means(variant: str, device: torch.device) -> None:
    """Each channel has its own mean, equal to its running mean."""
    g = torch.Generator().manual_seed(0)
    means = torch.tensor([1e4, -1e4, 3e3, 0.0, 1.0, -7e3])
    x = (torch.randn(3, 6, 4, generator=g) + means[:, None]).to(device)
    moments = means.to(device), torch.ones(6, device=device)
    options = VARIANTS[variant]
    y = continual_norm(x, *moments, num_groups=2, kernel="triton", **options)
    exact = continual_norm(x.double(), *(t.double() for t in moments), num_groups=2, kernel="reference", **options)
    assert (y - exact).abs().max().item() < 1e-5 * exact.abs().max().item()


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@every_variant
def test_nan_stays_visible(variant: str, training: bool, device: torch.device) -> None:
    tensors = inputs((2, 6, 2, (5,)), device)
    for place in ((0, 0, 0), (1, 4, 2)):  # a value used for the pivot, and one that is not
        x = tensors["x"].clone()
        x[place] = float("nan")
        y = continual_norm(
            x, tensors["mean"].clone(), tensors["var"].clone(), None, None, training,
            num_groups=2, kernel="triton", **VARIANTS[variant],
        )  # fmt: skip
        assert y[place].isnan()
        assert y[:, 5 - place[1]].isfinite().all()  # of the other group


@every_variant
def test_results_are_deterministic(variant: str, device: torch.device) -> None:
    tensors = inputs((64, 96, 2, (30, 30)) if device.type == "cuda" else (2, 6, 2, (5,)), device)
    first, second = (results(tensors, 2, "triton", variant) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


# --- layouts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["bn_gn", "cn_tied"])
def test_output_and_gradient_keep_the_layout_of_the_input(variant: str, device: torch.device) -> None:
    tensors = inputs((2, 4, 2, (3, 4)), device)
    outcomes = []
    for arrange in (torch.Tensor.contiguous, last):
        x = arrange(tensors["x"]).detach().requires_grad_()
        layer = ContinualNorm2d(4, num_groups=2, kernel="triton", **VARIANTS[variant]).to(device)
        y = layer(x)
        assert y.stride() == x.stride()
        y.backward(tensors["dy"])  # in the other layout in the second round
        seen = layer.eval()(x.detach())
        assert seen.stride() == x.stride()
        outcomes.append([y, x.grad, seen])
    for first, second in zip(*outcomes, strict=True):
        torch.testing.assert_close(second, first, rtol=1e-5, atol=1e-5)


def test_other_layouts_are_accepted(device: torch.device) -> None:
    whole = inputs((2, 4, 2, (4, 6)), device)["x"]
    for x in (whole[:, :, ::2], whole[:, :, :1].expand(-1, -1, 4, -1)):
        leaf = x.detach().requires_grad_()
        y = group_step.group_step(leaf, None, None, EPS, 2, torch.float32)
        y.sum().backward()
        torch.testing.assert_close(y.double(), F.group_norm(x.double(), 2, eps=EPS), rtol=FLOAT32, atol=FLOAT32)
        assert leaf.grad is not None and leaf.grad.abs().max() < 1e-4  # the sum of a slab does not depend on x


def test_strided_parameters_and_wrong_sizes(device: torch.device) -> None:
    x, spaced = inputs((3, 4, 2, (5,)), device)["x"], torch.rand(8).to(device)
    weight, bias = spaced[::2], spaced[:1].expand(4)
    options = {"training": True, "num_groups": 2, "order": "bn_gn", "kernel": "triton"}
    y = continual_norm(x, None, None, weight, bias, **options)  # type: ignore[arg-type]
    assert torch.equal(y, continual_norm(x, None, None, weight.clone(), bias.clone(), **options))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"4 channels.* has shape \(3,\)"):
        continual_norm(x, None, None, weight, torch.ones(3).to(device), **options)  # type: ignore[arg-type]


# --- running moments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, 0.0, None])
@every_variant
def test_running_moments_follow_torch(variant: str, momentum: float | None, device: torch.device) -> None:
    """Updated by torch's batch norm, or from the returned moments if the momentum is on the device."""
    layer, reference_layer = (
        ContinualNorm2d(4, num_groups=2, momentum=momentum, kernel=kernel, **VARIANTS[variant]).to(device)
        for kernel in ("triton", "reference")
    )
    reference_layer.double()
    for seed in range(2):
        x = inputs((2, 4, 2, (2, 3)), device, seed)["x"] + 100
        layer(x)
        reference_layer(x.double())
    torch.testing.assert_close(layer.running_mean.double(), reference_layer.running_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.running_var.double(), reference_layer.running_var, rtol=1e-5, atol=1e-6)
    assert int(layer.num_batches_tracked) == 2


@every_variant
def test_running_moments_of_other_dtype_or_strided(variant: str, device: torch.device) -> None:
    x = inputs((3, 4, 2, (3,)), device)["x"]
    buffers = torch.zeros(2, 8, device=device)[:, ::2]
    for mean, var in (buffers, torch.zeros(2, 4, device=device, dtype=torch.bfloat16)):
        exact = [torch.zeros(4, device=device, dtype=torch.float64) for _ in range(2)]
        for tensors, moments, kernel in ((x, (mean, var), "triton"), (x.double(), exact, "reference")):
            continual_norm(
                tensors, *moments, training=True, momentum=0.5, num_groups=2, kernel=kernel, **VARIANTS[variant]  # type: ignore[arg-type]
            )  # fmt: skip
        for moved, expected in zip((mean, var), exact, strict=True):
            torch.testing.assert_close(moved.double(), expected, rtol=torch.finfo(moved.dtype).eps, atol=1e-5)


@every_variant
def test_two_passes_before_one_backward(variant: str, device: torch.device) -> None:
    """As in replay: the second pass updates the moments that the first one used."""
    tensors = inputs((2, 4, 2, (5,)), device)
    sums = []
    for kernel in ("triton", "reference"):
        dtype = torch.float32 if kernel == "triton" else torch.float64
        x = tensors["x"].to(dtype, copy=True).requires_grad_()
        moments = torch.zeros(4, device=device, dtype=dtype), torch.ones(4, device=device, dtype=dtype)
        ys = [
            continual_norm(each, *moments, training=True, num_groups=2, kernel=kernel, **VARIANTS[variant])  # type: ignore[arg-type]
            for each in (x, x.square())
        ]
        (ys[0] * tensors["dy"] + ys[1] * tensors["dy"]).sum().backward()
        sums.append(x.grad.double())
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-5)


# --- double backward, batched gradients -------------------------------------------------------------------------


@every_variant
def test_double_backward(variant: str, device: torch.device) -> None:
    tensors = inputs((4, 6, 2, (3, 2)), device)
    push = torch.randn(tensors["x"].shape, generator=torch.Generator().manual_seed(9)).to(device)

    def twice(dtype: torch.dtype, kernel: Any) -> tuple[Tensor, ...]:
        x, weight, bias, dy = (tensors[name].to(dtype).requires_grad_() for name in ("x", "weight", "bias", "dy"))
        y = continual_norm(
            x, None, None, weight, bias, training=True, num_groups=2, kernel=kernel, **VARIANTS[variant]
        )  # fmt: skip
        first = torch.autograd.grad(y, [x, weight], dy, create_graph=True)
        return torch.autograd.grad((first[0] * push).sum() + first[1].square().sum(), [x, weight, dy])

    for actual, expected in zip(twice(torch.float32, "triton"), twice(torch.float64, "reference"), strict=True):
        # Sums of products of first derivatives, in float32: some hundred roundings.
        assert (actual.double() - expected).abs().max().item() <= 1e-4 * max(1.0, expected.abs().max().item())


@every_variant
def test_batched_gradients(variant: str, device: torch.device) -> None:
    """Backward pass under both of torch's vmaps: `is_grads_batched` and `torch.func.vmap`."""
    tensors = inputs((2, 4, 2, (5,)), device)
    x = tensors["x"].requires_grad_()
    parameters = tensors["weight"], tensors["bias"]
    options = {"training": True, "num_groups": 2, "kernel": "triton", **VARIANTS[variant]}
    y = continual_norm(x, None, None, *parameters, **options)
    pushes = torch.stack([tensors["dy"], tensors["dy"].square()])
    same_under_vmaps(x, y, pushes)


def test_bias_before_batch_norm_has_no_gradient(device: torch.device) -> None:
    """Batch norm cancels it: the gradient of the tied bias is that of the second step, bit-exactly."""
    tensors = inputs((3, 4, 2, (5,)), device)
    bias = tensors["bias"].requires_grad_()
    y = continual_norm(
        tensors["x"], None, None, tensors["weight"], bias, training=True, num_groups=2, tied=True, kernel="triton"
    )  # fmt: skip
    y.backward(torch.ones_like(y))
    assert bias.grad is not None and torch.equal(bias.grad, torch.full_like(bias, 15.0))


# --- where it runs ----------------------------------------------------------------------------------------------


@every_variant
def test_triton_kernel_that_cannot_run_raises(variant: str, device: torch.device) -> None:
    layer = ContinualNorm2d(8, num_groups=2, kernel="triton", **VARIANTS[variant]).to(device)
    x = torch.randn(4, 8, 3, 3).to(device)
    with pytest.raises(ValueError, match=r"moments in float32, and the input is torch\.float64"):
        layer(x.double())
    with pytest.raises(
        ValueError, match=r"can't be used here: for order='bn_gn' and tied=True it runs only in eager mode"
    ):
        torch.func.vmap(layer)(x[None])
    with pytest.raises(ValueError, match=r"it needs CUDA .*the input is on meta"):
        layer.to("meta")(x.to("meta"))


@every_variant
def test_auto_uses_triton_on_cuda_in_eager_mode_only(
    variant: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    for name in ("train", "evaluate"):
        own = getattr(variants, name)
        monkeypatch.setattr(variants, name, lambda *a, own=own, **k: taken.append(1) or own(*a, **k))
    x = torch.randn(4, 8, 3, 3).to(device)
    layer = ContinualNorm2d(8, num_groups=2, **VARIANTS[variant]).to(device)
    layer(x)
    layer.eval()(x)
    assert len(taken) == (2 if device.type == "cuda" else 0)
    taken.clear()
    _, slope = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    assert slope.isfinite().all() and not taken
    for kernel in ("reference", "pivoted", "analytic"):
        ContinualNorm2d(8, num_groups=2, kernel=kernel, **VARIANTS[variant]).to(device)(x)
    assert not taken


@pytest.mark.parametrize("variant", ["bn_gn_tied"])
def test_compiled_graphs_use_torch_operators(variant: str, device: torch.device) -> None:
    torch._dynamo.reset()
    plain, twin = (ContinualNorm2d(4, num_groups=2, **VARIANTS[variant]).to(device) for _ in range(2))
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    x = inputs((3, 4, 2, (3, 3)), device)["x"]
    torch.testing.assert_close(compiled(x), plain(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(twin.running_mean, plain.running_mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("variant", "kernels"),
    [
        ("bn_gn", ["subtract_channel_pivot", "forward", "backward", "sum_over_samples", "evaluate"]),
        ("cn_tied", ["forward", "backward", "sum_over_samples", "forward"]),
    ],
)
def test_training_step_launches_these_kernels(
    variant: str, kernels: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for ahead compilation, where all values are undefined."""
    launched: list[str] = []
    monkeypatch.setattr(group_step, "launch", lambda kernel, *_, **__: launched.append(kernel.__name__))
    layer = ContinualNorm2d(8, num_groups=2, kernel="triton", **VARIANTS[variant]).to(device)
    layer(torch.randn(4, 8, 3, 3, device=device, requires_grad=True)).sum().backward()
    with torch.no_grad():
        layer.eval()(torch.randn(4, 8, 3, 3, device=device))
    assert launched == kernels


# --- tiles ------------------------------------------------------------------------------------------------------


@both_layouts
def test_tiles_cover_all_groups_and_are_few(is_last: bool) -> None:
    seen = set()
    for n, c, groups, positions in AS_IN_NETWORKS:
        length = torch.Size(positions).numel()
        tile = choose_tile(Sizes(n, c, length, groups, is_last, 4))
        assert tile.group >= c // groups and tile.lanes % tile.group == 0
        side = tile.lanes // tile.group  # groups side by side
        assert side * tile.blocks >= groups > side * (tile.blocks - 1)
        assert tile.whole == (tile.positions >= length)
        assert tile.lanes * tile.positions <= max(group_step.LARGE, tile.lanes)
        seen.add(tile[:3])
    assert len(seen) <= 8


@pytest.mark.parametrize("groups", [32, None], ids=["group norm", "instance norm"])
def test_tiles_of_small_maps_have_many_channels(groups: int | None) -> None:
    """A ResNet-18 on images of 32x32: nearly all values of a tile exist, and rows of memory are read as a whole."""
    for c, length in ((64, 1024), (64, 256), (128, 64), (256, 16), (512, 4)):
        tile = choose_tile(Sizes(20, c, length, groups or c, True, 4))
        assert tile.whole and tile.positions == length and tile.lanes * tile.blocks == c
        assert tile.lanes >= group_step.TWO_SECTORS or 2 * tile.lanes * length > group_step.LARGE
        assert tile.lanes >= group_step.SECTOR and tile.lanes * length >= group_step.SMALL


@pytest.mark.parametrize("norm", ["group", "instance", "layer"])
def test_group_norm_layers_use_the_kernel_in_channels_last(
    norm: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's operator would copy there. Other layouts, and kernel="reference", use torch's operator."""
    taken: list[int] = []

    def noted(*tensors: Any) -> Tensor:
        taken.append(tensors[4])
        return group_step.group_step(*tensors)

    monkeypatch.setattr(group, "group_step", noted)
    if device.type == "cpu":
        monkeypatch.setattr(group, "_uses_kernel", lambda x, groups: not x.is_contiguous())
    groups = {"group": 2, "instance": 6, "layer": 1}[norm]
    tensors = inputs((3, 6, groups, (5, 3)), device)
    call = {
        "group": lambda x, *affine: group.group_norm(x, 2, *affine, eps=EPS),
        "instance": lambda x, *affine: group.instance_norm(x, *affine, eps=EPS),
        "layer": lambda x, *affine: group.layer_norm(x, *affine, eps=EPS),
    }[norm]
    leaves = [last(tensors["x"]).requires_grad_(), tensors["weight"].requires_grad_(), tensors["bias"].requires_grad_()]
    y = call(*leaves)
    assert taken == [groups] and y.is_contiguous(memory_format=torch.channels_last)
    expected_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = F.group_norm(expected_leaves[0], groups, *expected_leaves[1:], EPS)
    torch.testing.assert_close(y.double(), expected, rtol=FLOAT32, atol=FLOAT32)
    grads = torch.autograd.grad(y, leaves, tensors["dy"])
    wanted = torch.autograd.grad(expected, expected_leaves, tensors["dy"].double())
    for result, right in zip(grads, wanted, strict=True):
        torch.testing.assert_close(result.double(), right, rtol=1e-4, atol=1e-4)  # sums of 45 products of size one
    call(tensors["x"])
    if device.type == "cuda":
        monkeypatch.setenv("CONTNORM_KERNEL", "reference")
        call(leaves[0])
    assert taken == [groups]


def test_bias_of_wrong_size_raises(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel would read past its end."""
    if device.type == "cpu":
        monkeypatch.setattr(group, "_uses_kernel", lambda x, groups: True)
    tensors = inputs((3, 6, 2, (5, 3)), device)
    with pytest.raises(ValueError, match=r"6 channels.* has shape \(5,\)"):
        group.group_norm(last(tensors["x"]), 2, tensors["weight"], tensors["bias"][:-1])
