"""The C++ kernel of continual normalization, compared with float64; its determinism; and when it is selected."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import contnorm as cn
from contnorm.functional import continual_norm
from contnorm.kernels import cpp
from contnorm.kernels.build import compile_library
from tests.kernels.exactness import errors, last, same_under_vmaps

REASON = cpp.unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

# (N, C, G, positions), each with its reason.
SHAPES = [
    pytest.param((6, 8, 2, ()), id="no positions"),
    pytest.param((3, 32, 16, (16, 16)), id="as in a ResNet"),
    pytest.param((3, 6, 3, (9, 11)), id="positions that are no multiple of lanes"),
    pytest.param((1, 8, 2, (50, 90)), id="one sample, several blocks and segments"),
    pytest.param((70, 4, 2, (5, 5)), id="more samples than tasks"),
    pytest.param((2, 150, 5, (4, 5)), id="channels in strips of all widths, and a rest"),
]
LAYOUTS = pytest.mark.parametrize("layout", ["contiguous", "channels_last"])


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Tests set the number of threads; two is more than one even if workers of pytest have one each."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def laid_out(x: Tensor, layout: str) -> Tensor:
    return last(x) if layout == "channels_last" and x.dim() > 2 else x.contiguous()


def draw(
    shape: tuple[int, int, int, tuple[int, ...]], mean: float = 0.0, spread: float = 1.0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return float32 data, its push, a weight and a bias."""
    n, c, _, positions = shape
    g = torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, n, c, *positions, generator=g)
    weight, bias = torch.randn(2, c, generator=g)
    return x * spread + mean, dy, weight, bias


def normalized(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    off = x - x.mean(dims, keepdim=True)
    return off / (off.square().mean(dims, keepdim=True) + eps).sqrt()


def formula(x: Tensor, groups: int, eps: float = 1e-5) -> Tensor:
    """The group-normalized signal: two steps, from the definition."""
    return normalized(x.reshape(x.shape[0], groups, -1), (2,), eps).reshape(x.shape)


def exact_results(
    x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor, groups: int, shift: float = 0.0, mask: Tensor | None = None
) -> dict[str, Tensor]:
    """Output, moments and gradients in float64. The shift, which changes nothing, keeps the formula accurate."""
    x, weight, bias = ((t.double().contiguous() - s).requires_grad_() for t, s in ((x, shift), (weight, 0), (bias, 0)))
    grouped = formula(x, groups)
    dims, shape = (0, *range(2, x.dim())), (1, -1, *[1] * (x.dim() - 2))
    y = normalized(grouped, dims, 1e-5) * weight.view(shape) + bias.view(shape)
    push = dy.double() if mask is None else dy.double() * mask
    dx, dweight, dbias = torch.autograd.grad(y, (x, weight, bias), push)
    mean, var = grouped.mean(dims), grouped.var(dims, correction=0)
    return {"y": y, "mean": mean, "var": var, "dx": dx, "dweight": dweight, "dbias": dbias}


def results(x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor, groups: int, **options: Any) -> dict[str, Tensor]:
    x, weight, bias = (t.detach().clone().requires_grad_() for t in (x, weight, bias))
    y, moments = cpp.train(x, weight, bias, 1e-5, groups, **options)
    y.backward(dy)
    grads = {"dx": x.grad, "dweight": weight.grad, "dbias": bias.grad}
    return {"y": y.detach(), "mean": moments.mean, "var": moments.var} | {
        k: v for k, v in grads.items() if v is not None
    }


def check_errors(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, error in errors(actual, expected).items():
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize("shape", SHAPES)
@LAYOUTS
@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1.0), (1e4, 1e-2)])
def test_training_equals_float64(
    shape: tuple[int, int, int, tuple[int, ...]], layout: str, mean: float, spread: float
) -> None:
    """Also at large means. The errors are a few roundings of float32, of 6e-8 each."""
    x, dy, weight, bias = draw(shape, mean, spread)
    x = laid_out(x, layout)
    actual = results(x, dy, weight, bias, shape[2])
    check_errors(actual, exact_results(x, dy, weight, bias, shape[2], shift=mean), 2e-6)
    assert actual["y"].stride() == x.stride() and actual["dx"].stride() == x.stride()


@pytest.mark.parametrize("shape", SHAPES)
@LAYOUTS
@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1.0), (1e4, 1e-2)])
def test_evaluation_equals_float64(
    shape: tuple[int, int, int, tuple[int, ...]], layout: str, mean: float, spread: float
) -> None:
    x, dy, weight, bias = draw(shape, mean, spread)
    center, var = torch.linspace(-0.5, 0.5, shape[1]), torch.linspace(0.5, 2.0, shape[1])
    one = (1, -1, *[1] * (x.dim() - 2))
    ours, exact = (t.clone().requires_grad_() for t in (laid_out(x, layout), x.double() - mean))
    y = cpp.evaluate(ours, center, var, weight, bias, 1e-5, shape[2])
    scale = weight.double() / (var.double() + 1e-5).sqrt()
    expected = (formula(exact, shape[2]) - center.double().view(one)) * scale.view(one) + bias.double().view(one)
    y.backward(dy)
    expected.backward(dy.double())
    assert ours.grad is not None and exact.grad is not None
    check_errors({"y": y, "dx": ours.grad}, {"y": expected, "dx": exact.grad}, 5e-6)
    assert y.stride() == ours.stride()


@LAYOUTS
def test_training_is_accurate_with_outliers_and_distant_channels(layout: str) -> None:
    """The first value of a row is far away, one row is constant, and the means of a group differ by 1e4."""
    x, dy, weight, bias = draw((4, 8, 2, (40, 40)))
    x[:, 0, 0, 0] = 5e4
    x[:, 1] = 3.0
    x[:, 6] += 1e4
    check = results(laid_out(x, layout), dy, weight, bias, 2)
    expected = exact_results(x, dy, weight, bias, 2)
    for name, error in errors(check, expected).items():
        # A channel that is nearly constant after the group step is scaled up by at most 1 / sqrt(eps), about 300.
        assert error < 300 * 2e-7, f"{name}: {error}"


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "no residual"])
def test_relu_and_residual_have_the_gradients_of_float64(layout: str, dtype: torch.dtype, with_residual: bool) -> None:
    shape = (4, 12, 3, (9, 11))
    x, dy, weight, bias = draw(shape)
    x, dy = laid_out(x, layout).to(dtype), dy.to(dtype)
    residual = torch.randn(x.shape).to(dtype).requires_grad_() if with_residual else None
    actual = results(x, dy, weight, bias, 3, relu=True, residual=residual)
    expected = exact_results(x, dy, weight, bias, 3, mask=actual["y"] > 0)
    y = expected["y"] if residual is None else expected["y"] + residual.detach().double()
    assert 0.2 < (actual["y"] > 0).double().mean().item() < 0.8
    expected["y"] = y.clamp_min(0)
    check_errors(actual, expected, 2e-6 if dtype == torch.float32 else 4e-3)  # half an ulp of bfloat16 is 2e-3 to 4e-3
    assert actual["y"].dtype == actual["dx"].dtype == dtype
    if residual is not None:
        assert residual.grad is not None
        assert torch.equal(residual.grad, torch.where(actual["y"] > 0, dy, 0))


@LAYOUTS
def test_bfloat16_rounds_the_result_of_float32_once(layout: str) -> None:
    x, dy, weight, bias = draw((4, 12, 3, (9, 11)))
    x, dy = laid_out(x, layout).bfloat16(), dy.bfloat16()
    half, single = results(x, dy, weight, bias, 3), results(x.float(), dy.float(), weight, bias, 3)
    for name, value in single.items():
        assert torch.equal(half[name], value.to(half[name].dtype)), name
    values = torch.tensor([math.nan, math.inf, -math.inf, 3.4e38])
    out = cpp.evaluate(torch.zeros(1, 4, 3, 3).bfloat16(), torch.zeros(4), torch.ones(4), None, values, 1e-5, 2)
    assert torch.equal(out[0, :, 0, 0].isnan(), values.isnan()) and torch.equal(out[0, 1:, 2, 2], values[1:].bfloat16())


@LAYOUTS
@pytest.mark.parametrize("shape", [(3, 64, 32, (40, 41)), (1, 16, 4, (96, 96)), (40, 32, 8, (9, 9))])
def test_bits_do_not_depend_on_the_number_of_threads(shape: Any, layout: str) -> None:
    x, dy, weight, bias = draw(shape, mean=3.0)
    x = laid_out(x, layout)
    versions = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        result = results(x, dy, weight, bias, shape[2], relu=True)
        result["eval"] = cpp.evaluate(x, bias, weight.abs(), weight, bias, 1e-5, shape[2])
        versions.append(result)
    for result in versions[1:]:
        assert all(torch.equal(value, result[name]) for name, value in versions[0].items())


@pytest.mark.slow
@LAYOUTS
def test_bits_do_not_depend_on_the_instruction_set(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for any processor of this architecture, with narrower registers, and less optimized."""
    x, dy, weight, bias = draw((3, 24, 4, (45, 47)), mean=2.0)
    x = laid_out(x, layout)
    native = results(x, dy, weight, bias, 4)
    plain = [flag if flag != "-O3" else "-O1" for flag in cpp.FLAGS if flag != "-march=native"]
    other = cpp.open_library(compile_library(cpp.SOURCE, plain))
    monkeypatch.setattr(cpp, "library", lambda: other)
    for name, value in results(x, dy, weight, bias, 4).items():
        assert torch.equal(value, native[name]), name


@LAYOUTS
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_propagate(layout: str, value: float) -> None:
    x, dy, weight, bias = draw((4, 8, 4, (6, 7)))
    x[1, 2, 3, 4] = value
    actual = results(laid_out(x, layout), dy, weight, bias, 4)
    # The batch statistics of the group's channels contain it, and so does all that is computed with them.
    for name in ("y", "dx"):
        assert actual[name][:, 2:4].isnan().all() and actual[name][:, [0, 1, 4, 5, 6, 7]].isfinite().all(), name
    assert actual["mean"].isnan().tolist() == [False, False, True, True, False, False, False, False]


def test_input_of_any_strides_is_accepted() -> None:
    x, dy, weight, bias = draw((4, 8, 4, (6, 7)))
    base = results(x, dy, weight, bias, 4)
    for strided in (x.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1), x.repeat(1, 1, 1, 2)[..., :7]):
        for push in (dy, last(dy)):
            again = results(strided, push, weight, bias, 4)
            assert all(torch.equal(value, again[name]) for name, value in base.items())
    negative = torch._neg_view(-x)
    assert negative.is_neg() and torch.equal(cpp.train(negative, weight, bias, 1e-5, 4)[0], base["y"])
    sums = results(x, torch.ones(()).expand(x.shape), weight, bias, 4)  # the gradient of a sum has no memory of its own
    assert torch.equal(sums["dbias"], torch.full((8,), 4.0 * 42))


@pytest.mark.parametrize("parameters", ["weight", "bias", "neither"])
@LAYOUTS
def test_missing_parameters_are_ones_and_zeros(parameters: str, layout: str) -> None:
    x, dy, weight, bias = draw((4, 8, 4, (6, 7)))
    x = laid_out(x, layout)
    scale, offset = (weight if parameters == "weight" else None), (bias if parameters == "bias" else None)
    full = results(x, dy, torch.ones(8) if scale is None else scale, torch.zeros(8) if offset is None else offset, 4)
    x.requires_grad_()
    y, _ = cpp.train(x, scale, offset, 1e-5, 4)
    y.backward(dy)
    assert torch.equal(y, full["y"]) and torch.equal(x.grad, full["dx"])  # type: ignore[arg-type]


# --- autograd and transforms ------------------------------------------------------------------------------------


@pytest.mark.parametrize("relu", [True, False])
def test_double_backward_equals_float64(relu: bool) -> None:
    x, dy, weight, bias = draw((4, 8, 4, (6, 7)))

    def penalty(*arguments: Tensor, compiled: bool) -> list[Tensor]:
        x, dy, weight, bias = (t.clone().requires_grad_() for t in arguments)
        kernel = "cpp" if compiled else "analytic"
        y = continual_norm(x, None, None, weight, bias, True, 0.0, 1e-5, 4, kernel=kernel, relu=relu)  # type: ignore[arg-type]
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        return list(torch.autograd.grad(dx.square().sum(), (x, dy, weight)))

    ours = penalty(x, dy, weight, bias, compiled=True)
    exact = penalty(*(t.double() for t in (x, dy, weight, bias)), compiled=False)
    for actual, expected in zip(ours, exact, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_backward_runs_under_vmap() -> None:
    x, dy, weight, bias = draw((4, 8, 4, (6, 7)))
    x.requires_grad_()
    y, _ = cpp.train(x, weight, bias, 1e-5, 4)
    same_under_vmaps(x, y, torch.stack([dy, 2 * dy]))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_transforms_of_torch_use_torch_operators(training: bool) -> None:
    x, tangent, weight, bias = draw((4, 8, 4, (6, 7)))
    mean, var = (None, None) if training else (torch.zeros(8), torch.ones(8))

    def run(x: Tensor, kernel: str) -> Tensor:
        return continual_norm(x, mean, var, weight, bias, training, 0.0, 1e-5, 4, kernel=kernel)  # type: ignore[arg-type]

    both = [
        (
            torch.func.grad(lambda x, k=kernel: run(x, k).square().mean())(x),
            torch.func.vmap(lambda x, k=kernel: run(x, k))(torch.stack([x, tangent])),
            torch.func.jvp(lambda x, k=kernel: run(x, k), (x,), (tangent,))[1],
        )
        for kernel in ("cpp", "pivoted")  # `analytic` has no forward-mode derivative
    ]
    for ours, expected in zip(*both, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiled_layer_equals_eager() -> None:
    torch._dynamo.reset()
    layer = cn.CN(8, num_groups=4, kernel="cpp")
    x, dy, _, _ = draw((4, 8, 4, (6, 7)))
    eager, fast = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = layer(eager)
    y.backward(dy)
    z = torch.compile(layer, fullgraph=True)(fast)
    z.backward(dy)
    torch.testing.assert_close(z, y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fast.grad, eager.grad, rtol=1e-4, atol=1e-5)


# --- selection --------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions of the library that are called."""
    names: list[str] = []
    call = cpp.call
    monkeypatch.setattr(cpp, "call", lambda name, *args: names.append(name.rpartition("_")[2]) or call(name, *args))
    monkeypatch.delenv("CONTNORM_KERNEL", raising=False)
    return names


LARGE = (2, 32, 32, 32)  # the smallest size of `auto`


def test_auto_selects_the_kernel_for_large_inputs(calls: list[str]) -> None:
    layer = cn.CN(32)
    layer(torch.randn(LARGE)).sum().backward()
    layer.eval()(torch.randn(LARGE))
    assert calls == ["train", "backward", "evaluate"]
    assert math.prod(LARGE) == cpp.SMALLEST


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.randn(2, 32, 31, 32), id="small"),
        pytest.param(torch.randn(LARGE, dtype=torch.float64), id="float64"),
        pytest.param(torch.randn(LARGE).half(), id="float16"),
        pytest.param(torch.randn(LARGE, device="meta"), id="another device"),
    ],
)
def test_auto_does_not_select_the_kernel_for_other_inputs(x: Tensor, calls: list[str]) -> None:
    cn.CN(32, device=x.device, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)(x)
    assert calls == []


@pytest.mark.parametrize("batch", [torch.export.Dim("batch"), torch.export.Dim.DYNAMIC], ids=["named", "dynamic"])
def test_exported_program_takes_smaller_batches_than_the_kernel(batch: Any) -> None:
    layer = cn.CN(32).eval()
    program = torch.export.export(layer, (torch.randn(128, 32, 8, 8),), dynamic_shapes=({0: batch},))
    for size in (7, 200):
        x = torch.randn(size, 32, 8, 8)
        torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{"order": "bn_gn"}, {"tied": True}], ids=["bn_gn", "tied"])
def test_variants_are_pivoted(options: dict[str, Any], calls: list[str]) -> None:
    x = torch.randn(LARGE)
    for kernel in ("auto", "cpp"):
        y, expected = (cn.CN(32, kernel=k, **options)(x) for k in (kernel, "pivoted"))  # type: ignore[arg-type]
        assert torch.equal(y, expected)
    assert calls == []


def test_auto_does_not_select_the_kernel_under_transforms(calls: list[str]) -> None:
    layer = cn.CN(32, track_running_stats=False)
    x = torch.randn(LARGE)
    torch.func.grad(lambda x: layer(x).sum())(x)
    torch.func.jvp(layer, (x,), (x,))
    torch.export.export(cn.CN(32), (x,), strict=False)
    with FlopCounterMode(display=False):
        layer(x)
    assert calls == []


def test_without_a_compiler_auto_is_as_before_and_cpp_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(LARGE)
    layer = cn.CN(32)
    expected = {k: cn.CN(32, kernel=k)(x) for k in ("pivoted",)}["pivoted"]
    monkeypatch.setattr(cpp, "library", lambda: "there is no C++ compiler")
    assert torch.equal(layer(x), expected)
    analytic = cn.CN(32, kernel="analytic").eval()
    analytic.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x), analytic(x))
    with pytest.raises(ValueError, match=r"kernel='cpp' can't be used here: there is no C\+\+ comp"):
        cn.CN(32, kernel="cpp")(x)


def test_running_moments_follow_torch(calls: list[str]) -> None:
    """With a momentum, and with the cumulative average; the variance is the unbiased one."""
    x = torch.randn(LARGE)
    for momentum in (0.3, None):
        layer = cn.CN(32, num_groups=8, momentum=momentum)
        twin = nn.BatchNorm2d(32, momentum=momentum).double()
        for _ in range(2):
            layer(x)
            twin(formula(x.double(), 8))
        torch.testing.assert_close(layer.running_mean.double(), twin.running_mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(layer.running_var.double(), twin.running_var, rtol=1e-5, atol=1e-6)
        assert int(layer.num_batches_tracked) == 2
    assert calls == ["train"] * 4
