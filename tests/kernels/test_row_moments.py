"""Kernels of batch renorm and switchable norm against torch operators in float64: all outputs and gradients.

On the CPU they run in Triton's interpreter, with blocks so small that tiny inputs need several of each;
``--device cuda`` runs the same on a GPU, and the sizes of real networks besides.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from contnorm import BatchRenorm1d, BatchRenorm2d, SwitchNorm1d, SwitchNorm2d
from contnorm.functional import batch_renorm, switch_norm
from contnorm.kernels.triton import availability, row_moments
from contnorm.kernels.triton import switch_norm as switch_norm_launcher
from contnorm.kernels.triton.launcher import recording
from tests.kernels.exactness import errors, last, same_under_vmaps

pytest.importorskip("triton", reason="Triton is not installed")

NORMS = ("brn", "sn")
NODES = {"brn": "_BatchRenormBackward", "sn": "_SwitchNormBackward"}
PARAMETERS = {"brn": ("weight", "bias"), "sn": ("weight", "bias", "mean_weight", "var_weight")}
# Sums of float32 against sums of float64: a few roundings; gradients of logits are differences of such sums.
FLOAT32 = 1e-5

# (N, C, positions), each with its reason.
SHAPES = [
    pytest.param((2, 1, (2,)), id="smallest"),
    pytest.param((1, 6, (5,)), id="one sample"),
    pytest.param((3, 19, (3, 3)), id="no power of two, two blocks of channels"),
    pytest.param((3, 5, (9, 31)), id="rows longer than a chunk"),
    pytest.param((2, 3, (13, 5)), id="rows just too long to be short"),
    pytest.param((2, 4, (2, 3, 2)), id="volumes"),
]
AS_IN_NETWORKS = [
    (20, 64, (32, 32)),
    (20, 512, (4, 4)),
    (20, 160, (2, 2)),
    (10, 20, (84, 84)),
    (256, 64, (32, 32)),
    (4, 64, (112, 112)),
    (1500, 40, (3, 3)),
    (3, 2000, (7, 7)),
]
Shape = tuple[int, int, tuple[int, ...]]
every_norm = pytest.mark.parametrize("norm", NORMS)
every_mode = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


@pytest.fixture(autouse=True)
def _select_triton(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu" and not availability.INTERPRETED:
        pytest.skip("Triton's interpreter is for machines without a GPU; here, use --device cuda")
    monkeypatch.setenv("CONTNORM_KERNEL", "triton")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples and eight channels per block, so that every loop over a table has several iterations."""
    monkeypatch.setitem(row_moments.TABLE_TILE, "BN", 2)
    monkeypatch.setattr(switch_norm_launcher, "_CHANNELS", 8)


def inputs(shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Generated on the CPU, so that a GPU gets the same numbers; channels and samples differ in mean and variance."""
    n, c, positions = shape
    g = torch.Generator().manual_seed(seed)
    ones = [1] * len(positions)
    spread, level = torch.rand((1, c, *ones), generator=g), torch.randn((n, c, *ones), generator=g)
    x = torch.randn((n, c, *positions), generator=g) * (spread + 0.3) + level + 0.5
    tensors = {"x": x, "dy": torch.randn(x.shape, generator=g)}
    tensors |= {"weight": torch.randn(c, generator=g), "bias": torch.randn(c, generator=g)}
    tensors |= {"mean_weight": torch.randn(3, generator=g), "var_weight": torch.randn(3, generator=g)}
    tensors |= {"running_mean": torch.randn(c, generator=g), "running_var": torch.rand(c, generator=g) + 0.2}
    return {name: value.to(device, dtype) for name, value in tensors.items()}


def call(norm: str, tensors: dict[str, Any], training: bool, **options: Any) -> Tensor:
    moments = tensors.get("running_mean"), tensors.get("running_var")
    options["residual"] = tensors.get("residual")
    if norm == "brn":  # limits that some channels reach and others don't
        limits = {"r_max": 1.5, "d_max": 0.8, **options}
        return batch_renorm(tensors["x"], *moments, tensors.get("weight"), tensors.get("bias"), training, **limits)
    arguments = tensors.get("weight"), tensors.get("bias"), tensors["mean_weight"], tensors["var_weight"]
    return switch_norm(tensors["x"], *moments, *arguments, training, **options)


def leaves_of(norm: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    wanted = {"x", "residual", *PARAMETERS[norm]}
    return {name: t.detach().clone().requires_grad_(name in wanted) for name, t in tensors.items()}


def results(norm: str, tensors: dict[str, Tensor], training: bool = True, **options: Any) -> dict[str, Tensor]:
    """The output, all gradients, and the running moments afterwards."""
    leaves = leaves_of(norm, tensors)
    if tensors["x"].dim() > 2 and not tensors["x"].is_contiguous():
        leaves["x"] = last(tensors["x"].detach()).requires_grad_()
    y = call(norm, leaves, training, **options)
    uses_kernels = type(y.grad_fn).__name__ == NODES[norm]
    assert uses_kernels == (tensors["x"].dtype != torch.float64), "kernels, except for the float64 reference"
    y.backward(tensors["dy"])
    result = {f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    result |= {name: leaves[name] for name in ("running_mean", "running_var") if name in leaves}
    return {"y": y.detach(), **result}


def wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.double() for name, t in tensors.items()}


def with_residual(norm: str, tensors: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
    """With a residual, and a gradient that is zero where rounding could change the sign of the output."""
    tensors = tensors | {"residual": tensors["dy"].flip(0) * 0.7}
    y = call(norm, wide(tensors), training, momentum=0.0)
    return tensors | {"dy": tensors["dy"].masked_fill(y.abs() < 1e-4, 0.0)}


def agree(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = FLOAT32, values: int = 1) -> None:
    """``values`` is the number of values of the input, whose float32 sums the gradients of the logits are made of.

    These sums nearly cancel, so that their rounding errors do not become smaller with the result.
    """
    for name, error in errors(actual, expected).items():
        of_logits = name in ("dmean_weight", "dvar_weight")
        limit = max(tolerance, values**0.5 * 2**-24) if of_logits else tolerance
        assert error <= limit, f"{name}: off by {error:.1e}"


def compare(norm: str, tensors: dict[str, Tensor], training: bool = True, **options: Any) -> None:
    """The float64 reference gets the same rounded numbers."""
    in_double = {
        name: o.double() if isinstance(o, Tensor) and o.is_floating_point() else o for name, o in options.items()
    }
    actual, expected = results(norm, tensors, training, **options), results(norm, wide(tensors), training, **in_double)
    agree(actual, expected, values=tensors["x"].numel())


# --- values and gradients ---------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("shape", SHAPES)
@every_norm
@pytest.mark.usefixtures("small_blocks")
def test_outputs_moments_and_gradients_are_exact(norm: str, shape: Shape, training: bool, device: torch.device) -> None:
    compare(norm, inputs(shape, device), training)


@every_mode
@pytest.mark.parametrize("shape", [(3, 19, (3, 3)), (2, 5, (9, 31)), (2, 4, (2, 3, 2)), (2, 3, (6,))], ids=str)
@every_norm
def test_channels_last_outputs_and_gradients_are_exact(
    norm: str, shape: Shape, training: bool, device: torch.device
) -> None:
    tensors = inputs(shape, device)
    compare(norm, tensors | {name: last(tensors[name]) for name in ("x", "dy")}, training)


def test_more_samples_than_one_block(device: torch.device) -> None:
    """With the default block of 32 samples."""
    compare("brn", inputs((33, 2, (2,)), device))


@every_mode
def test_batch_renorm_of_flat_input(training: bool, device: torch.device) -> None:
    compare("brn", inputs((7, 12, ()), device), training)


@every_norm
@pytest.mark.parametrize("absent", ["weight", "bias", "weight bias", "running_mean running_var"])
def test_optional_arguments_may_be_none(norm: str, absent: str, device: torch.device) -> None:
    tensors = inputs((3, 4, (3, 2)), device)
    for name in absent.split():
        del tensors[name]
    compare(norm, tensors)
    if "running" not in absent:
        compare(norm, tensors, training=False)


@pytest.mark.parametrize("momentum", [0.0, 0.3, 1.0, torch.tensor(0.75), torch.tensor(1 / 3, dtype=torch.float64)])
@every_norm
def test_running_moments_with_any_momentum(norm: str, momentum: float | Tensor, device: torch.device) -> None:
    tensors = inputs((3, 4, (3,)), device)
    if isinstance(momentum, Tensor):
        momentum = momentum.to(device)
    compare(norm, tensors, momentum=momentum)


def test_limits_on_device_equal_limits_on_host(device: torch.device) -> None:
    tensors = inputs((3, 6, (3,)), device)
    limits = {"r_max": torch.tensor(1.5, device=device), "d_max": torch.tensor(0.8, device=device)}
    agree(results("brn", tensors, **limits), results("brn", tensors), 1e-6)


@pytest.mark.parametrize("whole", [True, False], ids=["parameters too", "parameters in float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_norm
def test_half_precision_is_rounded_once(norm: str, dtype: torch.dtype, whole: bool, device: torch.device) -> None:
    tensors = inputs((2, 5, (3, 3)), device, dtype)
    if not whole:
        tensors |= {name: t.float() for name, t in tensors.items() if name not in ("x", "dy")}
    for training in (True, False):
        actual, expected = results(norm, tensors, training), results(norm, wide(tensors), training)
        for name, value in actual.items():
            assert value.dtype == tensors[name.removeprefix("d") if name not in ("dy", "y") else "x"].dtype, name
        agree(actual, expected, torch.finfo(dtype).eps)  # one rounding of each result to its type


# --- residual and ReLU ------------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("is_last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("shape", [(3, 19, (3, 3)), (2, 5, (9, 31))], ids=str)
@every_norm
@pytest.mark.usefixtures("small_blocks")
def test_residual_and_relu_are_exact(
    norm: str, shape: Shape, is_last: bool, training: bool, device: torch.device
) -> None:
    tensors = with_residual(norm, inputs(shape, device), training)
    if is_last:
        tensors |= {name: last(tensors[name]) for name in ("x", "dy")}  # not the residual
    compare(norm, tensors, training, relu=True)
    compare(norm, tensors, training)
    y = results(norm, tensors, training, relu=True)["y"]
    assert 0.2 < (y == 0).double().mean() < 0.8


@every_norm
def test_relu_without_residual_equals_a_separate_relu(norm: str, device: torch.device) -> None:
    tensors = inputs((3, 5, (4, 3)), device)
    plain = call(norm, leaves_of(norm, tensors), True)
    leaves = leaves_of(norm, tensors)
    y = call(norm, leaves, True, relu=True)
    assert torch.equal(y, plain.relu())
    y.backward(tensors["dy"])
    cut = results(norm, tensors | {"dy": tensors["dy"].masked_fill(plain <= 0, 0.0)})
    for name in ("x", *PARAMETERS[norm]):
        assert torch.equal(leaves[name].grad, cut[f"d{name}"]), name  # type: ignore[arg-type]


@every_norm
def test_gradient_of_the_residual_is_that_before_the_relu(norm: str, device: torch.device) -> None:
    tensors = inputs((3, 5, (4, 3)), device)
    tensors["residual"] = tensors["dy"].flip(0)
    result = results(norm, tensors, relu=True)
    assert torch.equal(result["dresidual"], tensors["dy"].masked_fill(result["y"] <= 0, 0.0))
    assert torch.equal(results(norm, tensors)["dresidual"], tensors["dy"])
    for name, value in results(norm, tensors, relu=True).items():
        assert torch.equal(value, result[name]), name
    # The gradients of the others have the same bits if the residual needs no gradient, for which nothing is written.
    leaves = leaves_of(norm, tensors) | {"residual": tensors["residual"]}
    y = call(norm, leaves, True, relu=True)
    with recording() as launches:
        y.backward(tensors["dy"])
    if device.type == "cpu":  # on a GPU, backward passes run in a thread whose launches are not recorded
        written = {id(t) for each in launches for t in each.args if isinstance(t, Tensor) and t.shape == y.shape}
        assert len(written) == 4  # x, dy, y and dx
    for name in ("x", *PARAMETERS[norm]):
        assert torch.equal(leaves[name].grad, result[f"d{name}"]), name  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_norm
def test_half_precision_with_residual_and_relu_is_rounded_once(
    norm: str, dtype: torch.dtype, device: torch.device
) -> None:
    tensors = with_residual(norm, inputs((2, 5, (3, 3)), device, dtype), True)
    actual, expected = results(norm, tensors, relu=True), results(norm, wide(tensors), relu=True)
    assert all(value.dtype == dtype for value in actual.values())
    agree(actual, expected, torch.finfo(dtype).eps)


@every_norm
def test_relu_keeps_nan(norm: str, device: torch.device) -> None:
    tensors = inputs((3, 4, (5,)), device)
    tensors["residual"] = tensors["dy"].flip(0)
    tensors["residual"][1, 2, 3] = float("nan")
    result = results(norm, tensors, relu=True)
    assert result["y"].isnan().sum() == 1 and result["y"][1, 2, 3].isnan()
    assert result["dresidual"][1, 2, 3] == tensors["dy"][1, 2, 3]  # as torch's ReLU does


@every_mode
@every_norm
def test_residual_of_any_layout(norm: str, training: bool, device: torch.device) -> None:
    tensors = inputs((3, 4, (6, 2)), device)
    whole = tensors["dy"].flip(0).repeat_interleave(2, 2)
    for is_last in (False, True):
        if is_last:
            tensors["x"] = last(tensors["x"])
        for residual in (whole[:, :, ::2], whole[:, :, :1].expand(-1, -1, 6, -1), last(whole[:, :, ::2])):
            expected = call(norm, tensors | {"residual": residual.contiguous()}, training, relu=True, momentum=0.0)
            leaf = residual.detach().requires_grad_()
            y = call(norm, tensors | {"residual": leaf}, training, relu=True, momentum=0.0)
            assert taken(y) and torch.equal(y, expected) and y.stride() == tensors["x"].stride()
            y.backward(tensors["dy"])
            assert torch.equal(leaf.grad, tensors["dy"].masked_fill(y <= 0, 0.0))  # type: ignore[arg-type]


# --- large values -----------------------------------------------------------------------------------------------


@every_mode
@every_norm
def test_exact_at_large_means(norm: str, training: bool, device: torch.device) -> None:
    """Mean 1e4, standard deviation 1e-2: fails for any arithmetic with cancellation."""
    tensors = inputs((4, 5, (4, 5)), device)
    g = torch.Generator().manual_seed(1)
    tensors["x"] = (torch.randn(tensors["x"].shape, generator=g) * 1e-2 + 1e4).to(device)
    tensors["x"][:, 1, 0, 0] += 0.5  # fifty standard deviations away, where one of the three values of a pivot is taken
    tensors["running_mean"] = torch.full_like(tensors["bias"], 1e4)
    tensors["running_var"] = torch.full_like(tensors["bias"], 2e-4)
    actual, expected = results(norm, tensors, training), results(norm, wide(tensors), training)
    for name, value in expected.items():
        size = value.abs().max()
        assert ((actual[name] - value).abs().max() / size).item() < 2e-5, name


@every_norm
def test_nan_stays_visible(norm: str, device: torch.device) -> None:
    for place in ((0, 0, 0), (1, 3, 2)):  # a value used for the pivot, and one that is not
        tensors = inputs((3, 4, (5,)), device)
        tensors["x"][place] = float("nan")
        result = results(norm, tensors)
        assert result["y"][place].isnan()
        for name in ("running_mean", "running_var"):
            assert result[name][place[1]].isnan() and not result[name][3 - place[1]].isnan()


def test_constant_channel_has_finite_gradient(device: torch.device) -> None:
    tensors = inputs((3, 2, (4,)), device)
    tensors["x"][:, 0] = 2.5
    result = results("brn", tensors)
    assert all(value.isfinite().all() for value in result.values())


@every_norm
def test_results_are_deterministic(norm: str, device: torch.device) -> None:
    tensors = inputs((64, 96, (30, 30)) if device.type == "cuda" else (3, 6, (5,)), device)
    first, second = (results(norm, tensors) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


# --- layouts and memory -----------------------------------------------------------------------------------------


@every_norm
def test_strided_inputs_and_gradients(norm: str, device: torch.device) -> None:
    tensors = inputs((3, 4, (6, 2)), device)
    plain = results(norm, tensors | {"x": tensors["x"][:, :, ::2], "dy": torch.ones_like(tensors["dy"][:, :, ::2])})
    leaves = leaves_of(norm, tensors)
    y = call(norm, {**leaves, "x": leaves["x"][:, :, ::2]}, True)
    y.sum().backward()  # a gradient of one number, repeated
    torch.testing.assert_close(y.detach(), plain["y"])
    torch.testing.assert_close(leaves["x"].grad[:, :, ::2], plain["dx"])  # type: ignore[index]


@pytest.mark.parametrize("positions", [(6,), (3, 4), (2, 3, 2)], ids=["3d", "4d", "5d"])
@every_norm
def test_output_keeps_the_layout(norm: str, positions: tuple[int, ...], device: torch.device) -> None:
    tensors = inputs((2, 3, positions), device)
    leaves = leaves_of(norm, tensors) | {"x": last(tensors["x"]).requires_grad_()}
    y = call(norm, leaves, True)
    y.backward(tensors["dy"])
    assert y.stride() == leaves["x"].stride() == leaves["x"].grad.stride()  # type: ignore[union-attr]


@every_norm
def test_saved_for_backward_is_input_and_tables(norm: str, device: torch.device) -> None:
    n, c = 3, 4
    tensors = inputs((n, c, (8, 8)), device)
    leaves = leaves_of(norm, tensors)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        call(norm, leaves, True)
    there = {t.data_ptr() for t in leaves.values()}
    assert sum(t.numel() for t in saved if t.data_ptr() not in there) <= 2 * (n * c + n + c)
    saved.clear()
    residual = leaves["dy"].clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        call(norm, leaves | {"residual": residual}, True)
        added = len(saved)
        y = call(norm, leaves | {"residual": residual}, True, relu=True)
    assert residual.data_ptr() not in {t.data_ptr() for t in saved}
    large = [t.data_ptr() for t in saved if t.numel() == y.numel()]
    assert large[:1] == [leaves["x"].data_ptr()] and set(large[1:]) == {leaves["x"].data_ptr(), y.data_ptr()}
    assert len(saved) == 2 * added + 1  # the output, for the sign


@every_norm
def test_moments_may_change_between_evaluation_and_backward(norm: str, device: torch.device) -> None:
    tensors = inputs((3, 4, (3,)), device)
    expected = results(norm, tensors, training=False)
    leaves = leaves_of(norm, tensors)
    y = call(norm, leaves, False)
    leaves["running_mean"].add_(1.0), leaves["running_var"].mul_(4.0)
    y.backward(tensors["dy"])
    for name in ("x", *PARAMETERS[norm]):
        assert torch.equal(leaves[name].grad, expected[f"d{name}"]), name  # type: ignore[arg-type]


# --- double backward, batched gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("relu", [False, True], ids=["", "residual and relu"])
@every_mode
@every_norm
def test_double_backward(norm: str, training: bool, relu: bool, device: torch.device) -> None:
    tensors = inputs((3, 4, (3, 2)), device)
    if relu:
        tensors["residual"] = tensors["dy"].flip(0)
    push = torch.randn(tensors["x"].shape, generator=torch.Generator().manual_seed(9)).to(device)

    def twice(tensors: dict[str, Tensor]) -> list[Tensor]:
        leaves = leaves_of(norm, tensors)
        leaves["dy"].requires_grad_()
        y = call(norm, leaves, training, momentum=0.0, relu=relu)
        names = ["x", *PARAMETERS[norm], *(["residual"] if relu else [])]
        first = torch.autograd.grad(y, [leaves[name] for name in names], leaves["dy"], create_graph=True)
        total = (first[0] * push.to(y.dtype)).sum() + sum(each.square().sum() for each in first[1:])
        return list(torch.autograd.grad(total, [leaves[name] for name in ("x", "weight", "dy")]))

    for actual, expected in zip(twice(tensors), twice(wide(tensors)), strict=True):
        # Sums of products of first derivatives, in float32: some hundred roundings.
        assert (actual.double() - expected).abs().max().item() <= 1e-4 * max(1.0, expected.abs().max().item())


@every_norm
def test_double_backward_of_the_residual_alone(norm: str, device: torch.device) -> None:
    tensors = inputs((3, 4, (3, 2)), device)
    residual, dy = tensors["dy"].flip(0).requires_grad_(), tensors["dy"].requires_grad_()
    y = call(norm, tensors | {"residual": residual}, True, relu=True)
    (first,) = torch.autograd.grad(y, [residual], dy, create_graph=True)
    assert torch.equal(first, torch.where(y > 0, dy, 0.0))
    (second,) = torch.autograd.grad(first.sum(), [dy])
    assert torch.equal(second, (y > 0).float())


@every_norm
def test_double_backward_with_a_parameter_computed_from_the_input(norm: str, device: torch.device) -> None:
    """The gradient of x inside the norm does not include that through the weight."""
    tensors = inputs((3, 4, (3, 2)), device)

    def slope(tensors: dict[str, Tensor]) -> Tensor:
        leaves = leaves_of(norm, tensors)
        weight = leaves["x"].mean((0, 2, 3))
        y = call(norm, leaves | {"weight": weight}, True, momentum=0.0)
        (dx,) = torch.autograd.grad(y, leaves["x"], tensors["dy"], create_graph=True)
        return dx.detach()

    torch.testing.assert_close(slope(tensors).double(), slope(wide(tensors)), rtol=1e-4, atol=1e-4)


@every_norm
def test_batched_gradients(norm: str, device: torch.device) -> None:
    """Backward pass under both of torch's vmaps: `is_grads_batched` and `torch.func.vmap`."""
    tensors = inputs((3, 4, (5,)), device)
    pushes = torch.stack([tensors["dy"], tensors["x"]])
    leaves = leaves_of(norm, tensors)
    same_under_vmaps(leaves["x"], call(norm, leaves, True, momentum=0.0), pushes)
    leaves = leaves_of(norm, tensors | {"residual": tensors["dy"].flip(0)})
    y = call(norm, leaves, True, momentum=0.0, relu=True)
    for name in ("x", "residual"):
        same_under_vmaps(leaves[name], y, pushes)


# --- the layers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [BatchRenorm2d(4, total_steps=20), SwitchNorm2d(4, momentum=None)], ids=NORMS)
def test_layer_trains_as_in_float64(layer: nn.Module, device: torch.device) -> None:
    """Moments, counter and limits over six batches along the ramps."""
    layer = layer.to(device)
    reference_layer = type(layer)(4, momentum=layer.momentum).to(device).double()  # type: ignore[call-arg, arg-type]
    reference_layer.total_steps = getattr(layer, "total_steps", None)  # type: ignore[assignment]
    for seed in range(6):
        x = inputs((3, 4, (3, 2)), device, seed=seed)["x"]
        torch.testing.assert_close(layer(x).double(), reference_layer(x.double()), rtol=1e-5, atol=1e-5)
    for (name, a), b in zip(layer.named_buffers(), reference_layer.buffers(), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-6, msg=name)
    assert layer.num_batches_tracked == 6
    torch.testing.assert_close(layer.eval()(x).double(), reference_layer.eval()(x.double()), rtol=1e-5, atol=1e-5)


def test_frozen_layers_keep_their_limits_and_moments(device: torch.device) -> None:
    layer = BatchRenorm1d(4, total_steps=20).to(device)
    for seed in range(4):
        layer(inputs((3, 4, (3,)), device, seed=seed)["x"])
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    layer.stats_frozen = True
    x = inputs((3, 4, (3,)), device, seed=9)["x"]
    y = layer(x)
    reference_layer = BatchRenorm1d(4, total_steps=20).to(device)
    reference_layer.load_state_dict(layer.state_dict())
    torch.testing.assert_close(y.double(), reference_layer.double()(x.double()), rtol=1e-5, atol=1e-5)
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[name]), name


# --- where they run ---------------------------------------------------------------------------------------------


def taken(y: Tensor) -> bool:
    return type(y.grad_fn).__name__ in NODES.values()


def test_single_position_uses_torch_operators(device: torch.device) -> None:
    for layer, shape in ((SwitchNorm1d(4), (3, 4)), (SwitchNorm2d(4), (3, 4, 1, 1))):
        assert not taken(layer.to(device)(torch.randn(shape, device=device)))


@every_norm
def test_auto_uses_triton_on_cuda_only(norm: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    make = BatchRenorm1d if norm == "brn" else SwitchNorm1d
    x = torch.randn(3, 4, 5, device=device)
    for kernel in ("auto", "reference", "pivoted", "analytic"):
        monkeypatch.setenv("CONTNORM_KERNEL", kernel)
        layer = make(4).to(device)
        assert taken(layer(x)) == (kernel == "auto" and device.type == "cuda")
        assert taken(make(4, kernel="triton").to(device)(x))  # the layer's argument overrides the variable
    monkeypatch.setenv("CONTNORM_KERNEL", "triton")
    assert not taken(make(4, kernel="reference").to(device)(x))
    monkeypatch.setenv("CONTNORM_KERNEL", "fast")
    with pytest.raises(ValueError, match="CONTNORM_KERNEL='fast' is unknown"):
        make(4)


class SpecialTensor(Tensor):
    """A tensor subclass, which may not have its values in memory."""


@every_norm
def test_unsupported_arguments_use_torch_operators(
    norm: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = inputs((3, 4, (3,)), device)
    others: list[tuple[str, Tensor]] = [("x", tensors["x"].double()), ("weight", tensors["weight"].double())]
    others += [("running_mean", tensors["running_mean"].repeat_interleave(2)[::2])]
    others += [("running_var", tensors["running_var"].clone().requires_grad_())]
    for name, value in others:
        leaves = leaves_of(norm, tensors) | {name: value}
        assert not taken(call(norm, leaves, name != "running_var", momentum=0.0)), name
    for name in ("weight", "bias"):  # a kernel would read past the end
        leaves = leaves_of(norm, tensors) | {name: tensors[name][:3].clone()}
        with pytest.raises((ValueError, RuntimeError), match=r"3"):
            call(norm, leaves, True)
    special = tensors["dy"].as_subclass(SpecialTensor)
    assert not taken(call(norm, leaves_of(norm, tensors) | {"residual": special}, True))
    assert taken(call(norm, leaves_of(norm, tensors), True))
    monkeypatch.setattr(availability, "INSTALLED", False)
    assert not taken(call(norm, leaves_of(norm, tensors), True))


@every_norm
def test_transforms_use_torch_operators(norm: str, device: torch.device) -> None:
    layer = (BatchRenorm1d if norm == "brn" else SwitchNorm1d)(4).to(device).eval()
    x = torch.randn(3, 4, 5, device=device)
    _, slope = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    assert slope.isfinite().all()
    together = torch.func.vmap(layer)(torch.stack([x, -x]))
    torch.testing.assert_close(together, torch.stack([layer(x), layer(-x)]), rtol=1e-5, atol=1e-6)
    residual = x.flip(0)
    both = torch.stack([residual, -residual])  # of which each is added to the same x
    together = torch.func.vmap(lambda r: layer(x, r, relu=True))(both)
    torch.testing.assert_close(together, torch.stack([layer(x, r, relu=True) for r in both]), rtol=1e-5, atol=1e-6)
    program = torch.export.export(layer, (x,))
    assert "contnorm" not in str(program.graph)
    fused = torch.export.export(layer, (x, residual), {"relu": True}).module()
    torch.testing.assert_close(fused(x, residual, relu=True), layer(x, residual, relu=True), rtol=1e-5, atol=1e-6)


# --- on a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("is_last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("shape", AS_IN_NETWORKS, ids=str)
@every_norm
def test_layer_sizes_of_networks(norm: str, shape: Shape, is_last: bool, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("too slow in the interpreter")
    tensors = inputs(shape, device)
    if is_last:
        tensors |= {name: last(tensors[name]) for name in ("x", "dy")}
    for training in (True, False):
        compare(norm, tensors, training)
        compare(norm, with_residual(norm, tensors, training), training, relu=True)


@pytest.mark.gpu
@pytest.mark.parametrize("relu", [False, True], ids=["", "residual and relu"])
@every_norm
def test_cuda_graph_is_bit_exact(norm: str, relu: bool, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("needs a GPU")
    make = BatchRenorm2d if norm == "brn" else SwitchNorm2d
    plain, captured = (make(16, momentum=None).to(device) for _ in range(2))
    x, dy, added = torch.randn(3, 8, 16, 9, 9, device=device)

    def step(layer: nn.Module) -> list[Tensor]:
        leaf, residual = x.detach().requires_grad_(), added.detach().requires_grad_()
        y = layer(leaf, residual, relu=True) if relu else layer(leaf)
        leaves = [leaf, *layer.parameters(), *([residual] if relu else [])]
        return [y, *torch.autograd.grad(y, leaves, dy)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(captured), step(plain)  # compiled before the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step(captured)
    for _ in range(3):
        graph.replay()
        expected = step(plain)
        torch.cuda.synchronize()
        for a, b in zip([*result, *captured.buffers()], [*expected, *plain.buffers()], strict=True):
            assert torch.equal(a, b)


def test_use_kernels_rejects_meta_and_large_tensors(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    x = torch.randn(3, 4, 5, device=device)
    assert row_moments.use_kernels(x, (), (), (), None)
    assert not row_moments.use_kernels(x.to("meta"), (), (), (), None)
    monkeypatch.setattr(row_moments, "MOST", 12)
    assert not row_moments.use_kernels(x, (), (), (), None)
