"""Fused kernels of continual norm against float64: every launch plan, output and gradient.

On the CPU they run in Triton's interpreter, on shapes of a few programs each, with limits set so low that these take
every way the large ones take; ``--device cuda`` runs the same on a GPU, and the sizes of real networks besides.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from contnorm import ContinualNorm2d
from contnorm.kernels import reference
from contnorm.kernels.reference import add_residual_and_relu
from contnorm.kernels.triton import continual as fused
from contnorm.kernels.triton import launch, launcher, plan
from contnorm.kernels.triton.plan import LaunchLimits, Sizes
from tests.kernels.exactness import errors, last

pytestmark = pytest.mark.slow  # Triton's interpreter takes long

if not launcher.INSTALLED:
    pytest.skip("needs Triton and torch 2.11", allow_module_level=True)

Shape = tuple[int, int, int, tuple[int, ...]]
EPS = 1e-5
# Sums of float32 against sums of float64: a few roundings, and more where the variance of a group is near zero.
FLOAT32 = 2e-5

UNEVEN = (3, 6, 2, (5,))  # (N, C, G, positions), no powers of two
AS_IN_NETWORKS = [
    (20, 64, 32, (32, 32)),
    (20, 128, 32, (16, 16)),
    (20, 256, 32, (8, 8)),
    (20, 512, 32, (4, 4)),
    (20, 512, 32, (2, 2)),
    (128, 64, 32, (32, 32)),
    (20, 64, 32, (84, 84)),
    (8, 64, 32, (112, 112)),
    (64, 256, 32, (56, 56)),
    (64, 512, 1, (7, 7)),
    (4096, 128, 16, ()),
    (2048, 96, 32, (3, 3)),
]
# Limits that select each plan for a tiny input; few programs, since the interpreter runs them in sequence.
LIMITS_BY_PLAN = {
    "one, read once": LaunchLimits(),
    "cluster": LaunchLimits(part=2, cluster=10**9, cluster_least=1, eval_least=1, eval_program=64),
    "one, in chunks": LaunchLimits(single=1, one=10**9, one_rows=10**6, tile=32),
    "two, all samples": LaunchLimits(single=1, one=1, rows=10**6, share=10**6, tile=256, programs=1),
    "two, shared out": LaunchLimits(single=1, one=1, rows=10**6, share=16, tile=16, programs=10),
    "three": LaunchLimits(single=1, one=1, rows=1, tile=32, merge=16, programs=3, last_programs=3),
}
every_plan = pytest.mark.parametrize("plan_name", LIMITS_BY_PLAN)
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.fixture(autouse=True)
def _can_run(device: torch.device) -> None:
    if device.type == "cpu" and not launcher.INTERPRETED:
        pytest.skip("Triton's interpreter is for machines without a GPU; here, use --device cuda")


@pytest.fixture(autouse=True)
def _usual_limits() -> Iterator[None]:
    usual = plan.LIMITS
    yield
    plan.LIMITS = usual


def inputs(shape: Shape, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Float64 inputs, generated on the CPU so that a GPU gets the same numbers."""
    n, c, _, positions = shape
    g = torch.Generator().manual_seed(seed)
    channels = torch.rand((1, c, *[1] * len(positions)), generator=g)
    x = torch.randn((n, c, *positions), generator=g) * (channels + 0.1) + 0.5
    tensors = {"x": x, "weight": torch.randn(c, generator=g), "bias": torch.randn(c, generator=g)}
    tensors |= {"residual": torch.randn(x.shape, generator=g), "dy": torch.randn(x.shape, generator=g)}
    return {name: value.double().to(device) for name, value in tensors.items()}


Run = Callable[..., tuple[Tensor, Any]]


def results(train: Run, groups: int, tensors: dict[str, Tensor], relu: bool = False) -> dict[str, Tensor]:
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items() if name != "dy"}
    y, result = train(*(leaves.get(name) for name in ("x", "weight", "bias", "residual")), groups, relu)
    y.backward(tensors["dy"])
    grads = {f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert y.stride() == grads["dx"].stride() == tensors["x"].stride()
    return {"y": y.detach(), "mean": result.mean, "var": result.var, **grads}


def ours(x: Tensor, weight: Any, bias: Any, residual: Any, groups: int, relu: bool) -> tuple[Tensor, Any]:
    return fused.train(x, weight, bias, EPS, groups, residual, relu)


def exact(x: Tensor, weight: Any, bias: Any, residual: Any, groups: int, relu: bool) -> tuple[Tensor, Any]:
    """The definition, in the dtype of the inputs, with the biased variance."""
    y, result = reference.train(x, weight, bias, EPS, groups)
    assert result is not None
    count = x.numel() // x.shape[1]
    return add_residual_and_relu(y, residual, relu), result._replace(var=result.var * ((count - 1) / count))


def away_from_zero(tensors: dict[str, Tensor], groups: int) -> dict[str, Tensor]:
    """Zero the gradient where rounding could change the sign of the output."""
    y, _ = exact(tensors["x"], tensors.get("weight"), tensors.get("bias"), tensors.get("residual"), groups, False)
    return tensors | {"dy": tensors["dy"].masked_fill(y.abs() < 1e-4, 0.0)}


def agree(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = FLOAT32) -> None:
    for name, error in errors(actual, expected).items():
        assert error <= tolerance, f"{name}: off by {error:.1e}"


def narrowed(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.to(dtype) for name, t in tensors.items()}


def compare(shape: Shape, device: torch.device, names: str, relu: bool = False, channels_last: bool = False) -> None:
    """Compare outputs and gradients for some optional arguments; the reference gets the same rounded numbers."""
    every = narrowed(inputs(shape, device), torch.float32)
    if channels_last:
        every = {name: last(t) if t.dim() > 2 else t for name, t in every.items()}
    tensors = {name: every[name] for name in ("x", "dy", *names.split())}
    groups = shape[2]
    wide = narrowed(tensors, torch.float64)
    if relu:
        wide = away_from_zero(wide, groups)
        tensors["dy"] = wide["dy"].float()
    expected = results(exact, groups, wide, relu)
    stock = errors(results(exact, groups, tensors, relu), expected)
    for name, error in errors(results(ours, groups, tensors, relu), expected).items():
        # As accurate as torch's operators in float32, whose error is larger where a variance is near zero.
        assert error <= 4 * stock[name] + FLOAT32, f"{name}: off by {error:.1e}, the stock calls by {stock[name]:.1e}"


# --- values and gradients ---------------------------------------------------------------------------------------


@every_plan
def test_outputs_and_gradients_are_exact(plan_name: str, device: torch.device) -> None:
    plan.LIMITS = LIMITS_BY_PLAN[plan_name]
    compare(UNEVEN, device, "weight bias residual", relu=True)


@every_plan
def test_channels_last_outputs_and_gradients_are_exact(plan_name: str, device: torch.device) -> None:
    plan.LIMITS = LIMITS_BY_PLAN[plan_name]
    compare((2, 4, 2, (2, 3)), device, "weight bias", channels_last=True)


@pytest.mark.parametrize(
    ("plan_name", "shape"),
    [
        pytest.param("one, read once", (3, 3, 3, (2, 2)), id="group of one channel"),
        pytest.param("cluster", (9, 4, 2, (2,)), id="many samples in a cluster"),
        pytest.param("three", (9, 3, 1, (2,)), id="many samples, one group"),
        pytest.param("three", (4, 4, 2, (3, 7)), id="all chunks full but the last"),
        pytest.param("two, all samples", (5, 6, 2, ()), id="no positions"),
    ],
)
def test_missing_parameters_and_other_shapes(plan_name: str, shape: Shape, device: torch.device) -> None:
    plan.LIMITS = LIMITS_BY_PLAN[plan_name]
    compare(shape, device, "")
    compare(shape, device, "weight bias", relu=True)


@pytest.mark.parametrize(("plan_name", "whole"), [("one, read once", True), ("three", False)])
def test_half_precision_is_rounded_once(plan_name: str, whole: bool, device: torch.device) -> None:
    """With parameters in bfloat16, or in float32."""
    plan.LIMITS = LIMITS_BY_PLAN[plan_name]
    shape, dtype = UNEVEN, torch.bfloat16
    tensors = narrowed(inputs(shape, device), dtype)
    if not whole:
        tensors |= {name: tensors[name].float() for name in ("weight", "bias")}
    tensors = narrowed(away_from_zero(narrowed(tensors, torch.float64), shape[2]), dtype) | {
        name: tensors[name] for name in ("weight", "bias")
    }
    actual = results(ours, shape[2], tensors, relu=True)
    expected = results(exact, shape[2], narrowed(tensors, torch.float64), relu=True)
    for name, value in actual.items():
        assert value.dtype == (
            tensors[name[1:]].dtype if name[1:] in tensors else dtype if name == "y" else torch.float32
        )
    # One rounding of each result to its dtype; everything before is float32.
    agree(actual, expected, torch.finfo(dtype).eps)


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("shape", AS_IN_NETWORKS, ids=str)
def test_layer_sizes_of_networks(shape: Shape, channels_last: bool, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("too slow in the interpreter")
    compare(shape, device, "weight bias", channels_last=channels_last)
    compare(shape, device, "weight bias", relu=True, channels_last=channels_last)
    compare(shape, device, "weight bias residual", relu=True, channels_last=channels_last)


@pytest.mark.gpu
def test_more_than_2_to_the_31_values(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("needs 30 GB")
    n = 2**31 // (64 * 1024) + 8
    x = torch.randn(n, 64, 32, 32, device=device, dtype=torch.bfloat16).requires_grad_()
    y, result = fused.train(x, None, None, EPS, 32)
    tail = x.detach()[-2:]
    expected = reference.evaluate(tail.double(), result.mean.double(), result.var.double(), None, None, EPS, 32)
    assert (y[-2:].double() - expected).abs().max().item() < 0.05  # a rounding to bfloat16 of values up to 5
    seen = fused.evaluate(x.detach(), result.mean, result.var, None, None, EPS, 32)
    assert torch.equal(seen[-2:], fused.evaluate(tail, result.mean, result.var, None, None, EPS, 32))
    y.backward(y.detach().square())
    assert x.grad is not None
    slabs = x.grad[-2:].double().reshape(2, 32, -1)  # a constant added to a slab changes nothing: its gradients cancel
    assert (slabs.sum(2).abs() / slabs.abs().sum(2)).max().item() < 5e-3


# --- large values -----------------------------------------------------------------------------------------------


@every_plan
def test_exact_at_large_means(plan_name: str, device: torch.device) -> None:
    """Mean 1e4, standard deviation 1e-2: fails for any arithmetic with cancellation."""
    plan.LIMITS = LIMITS_BY_PLAN[plan_name]
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 3, 3, generator=g) * 1e-2 + 1e4
    x[:, ::2, 0, 0] += 0.5  # fifty standard deviations away, at one of the three values of the pivot
    tensors = {"x": x, "weight": torch.ones(4), "bias": torch.zeros(4), "dy": torch.randn(x.shape, generator=g)}
    tensors = {name: t.to(device) for name, t in tensors.items()}
    actual = results(ours, 2, tensors)
    expected = results(exact, 2, narrowed(tensors, torch.float64))
    for name in ("y", "dx", "dweight", "mean", "var"):
        size = expected[name].abs().max()
        assert ((actual[name] - expected[name]).abs().max() / size).item() < 1e-5, name


@pytest.mark.parametrize("plan_name", ["one, read once", "cluster", "three"])
@pytest.mark.parametrize("place", [(0, 0, 0), (1, 4, 2)], ids=["in the pivot", "elsewhere"])
def test_nan_stays_visible(plan_name: str, place: tuple[int, int, int], device: torch.device) -> None:
    plan.LIMITS = LIMITS_BY_PLAN[plan_name]
    x = torch.randn(3, 6, 5).to(device)
    x[place] = float("nan")
    y, result = fused.train(x, None, None, EPS, 2, relu=True)
    assert result is not None
    assert y[place].isnan() and result.mean[place[1]].isnan() and result.var[place[1]].isnan()
    sane = 5 - place[1]
    assert y[:, sane].isfinite().all()  # of the other group
    seen = fused.evaluate(x, torch.zeros(6).to(device), torch.ones(6).to(device), None, None, EPS, 2, relu=True)
    assert seen[place].isnan() and seen[:, sane].isfinite().all()


# --- clusters ---------------------------------------------------------------------------------------------------

# Sizes of evaluation in channels_last layout, with limits that give one program and several; in registers or not.
IN_PARTS = {
    "one program": (LaunchLimits(eval_least=1, programs=1), torch.float32, 1, True),
    "small programs": (LaunchLimits(eval_least=1, eval_program=512), torch.float32, 7, True),
    "several programs, read twice": (
        LaunchLimits(eval_least=1, eval_near=1, programs=1, tile=128, eval_part=4096),
        torch.bfloat16,
        4,
        False,
    ),
    "not 14 programs but 8, read twice": (
        LaunchLimits(eval_least=1, eval_program=8, programs=1, tile=128, eval_part=2048, cached=2**15),
        torch.float32,
        8,
        False,
    ),
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_evaluation_of_parts_of_the_positions_is_exact(name: str, device: torch.device) -> None:
    limits, dtype, members, held = IN_PARTS[name]
    n, c, groups, length = 2, 32, 8, 211
    p = plan.plan_evaluation(Sizes(n, c, length, groups, True, dtype.itemsize), limits)
    assert (p.launches, p.members, p.chunks > 0) == ("cluster", members, held)
    plan.LIMITS = limits
    tensors = narrowed(inputs((n, c, groups, (length,)), device), dtype)
    moments = tensors["weight"].float(), tensors["bias"].float().square() + 0.1
    y = fused.evaluate(
        last(tensors["x"]), *moments, tensors["weight"], None, EPS, groups, last(tensors["residual"]), True
    )
    wide = narrowed(tensors, torch.float64)
    expected = reference.evaluate(
        wide["x"], *(m.double() for m in moments), wide["weight"], None, EPS, groups
    ) + wide["residual"]  # fmt: skip
    agree({"y": y}, {"y": expected.relu()}, FLOAT32 if dtype == torch.float32 else torch.finfo(dtype).eps)


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(20, 256, 32, (8, 8)), (128, 512, 32, (4, 4)), (20, 64, 32, (42, 42))], ids=str)
def test_cluster_equals_two_launches(
    shape: Shape, dtype: torch.dtype, channels_last: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch with a barrier gives the bits of two launches, also on several streams at the same time."""
    if device.type == "cpu":
        pytest.skip("the interpreter has no clusters")
    tensors = narrowed(inputs(shape, device), dtype)
    if channels_last:
        tensors = {name: last(t) if t.dim() > 2 else t for name, t in tensors.items()}

    def both() -> list[Tensor]:
        moments = tensors["weight"].float(), tensors["bias"].float().square()
        seen = fused.evaluate(tensors["x"], *moments, None, None, EPS, shape[2])
        return [*results(ours, shape[2], tensors, relu=True).values(), seen]

    streams = [torch.cuda.Stream() for _ in range(4)]  # type: ignore[no-untyped-call]
    outcomes = [both()]
    for _ in range(3):
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outcomes.append(both())
    torch.cuda.synchronize()
    monkeypatch.setattr(launch, "has_clusters", lambda x: False)
    expected = both()
    for outcome in outcomes:
        for value, other in zip(outcome, expected, strict=True):
            assert torch.equal(value, other)


# --- evaluation -------------------------------------------------------------------------------------------------


EVALUATIONS = {
    "read once": LaunchLimits(),
    "in chunks": LaunchLimits(held=1, tile=64),
    "in two launches": LaunchLimits(held=1, near=0, tile=64, programs=8),
}


@pytest.mark.parametrize("limits", EVALUATIONS.values(), ids=EVALUATIONS)
def test_evaluation_is_exact_and_has_gradients(limits: LaunchLimits, device: torch.device) -> None:
    shape = (3, 6, 2, (4, 5))
    plan.LIMITS = limits
    tensors = narrowed(inputs(shape, device), torch.float32)
    g = torch.Generator().manual_seed(5)
    moments = [t.to(device) for t in (torch.randn(shape[1], generator=g), torch.rand(shape[1], generator=g) + 0.1)]
    tensors |= {"dy": tensors["dy"] * (reference_evaluation(tensors, moments, shape[2]).abs() > 1e-4)}
    outcomes = []
    for each, evaluate in ((tensors, fused.evaluate), (narrowed(tensors, torch.float64), plain_evaluation)):
        leaves = {name: t.clone().requires_grad_() for name, t in each.items() if name != "dy"}
        mean, var = (t.to(each["x"].dtype) for t in moments)
        y = evaluate(leaves["x"], mean, var, leaves["weight"], leaves["bias"], EPS, shape[2], leaves["residual"], True)
        y.backward(each["dy"])
        outcomes.append({"y": y.detach(), **{f"d{name}": leaf.grad for name, leaf in leaves.items()}})
    agree(*outcomes)


def plain_evaluation(x: Tensor, mean: Tensor, var: Tensor, *rest: Any) -> Tensor:
    weight, bias, eps, groups, residual, relu = rest
    return add_residual_and_relu(reference.evaluate(x, mean, var, weight, bias, eps, groups), residual, relu)


def reference_evaluation(tensors: dict[str, Tensor], moments: list[Tensor], groups: int) -> Tensor:
    wide = narrowed(tensors, torch.float64)
    mean, var = (t.double() for t in moments)
    return plain_evaluation(wide["x"], mean, var, wide["weight"], wide["bias"], EPS, groups, wide["residual"], False)


# --- running moments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("plan_name", "momentum"), [*((name, 0.1) for name in LIMITS_BY_PLAN), ("three", None)])
def test_running_moments_are_updated_by_the_forward_kernel(
    plan_name: str, momentum: float | None, device: torch.device
) -> None:
    """Each plan updates all channels once and counts the batch once, for any number of programs."""
    plan.LIMITS = LIMITS_BY_PLAN[plan_name]
    layer = ContinualNorm2d(6, num_groups=2, momentum=momentum, kernel="triton").to(device)
    twin = ContinualNorm2d(6, num_groups=2, momentum=momentum, kernel="reference").to(device).double()
    before = layer.running_mean._version
    for seed in range(3):
        x = inputs((3, 6, 2, (5, 1)), device, seed)["x"].float()
        layer(last(x))
        twin(x.double())
    torch.testing.assert_close(layer.running_mean.double(), twin.running_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.running_var.double(), twin.running_var, rtol=1e-5, atol=1e-6)
    assert layer.num_batches_tracked == 3
    assert layer.running_mean._version > before  # autograd sees the in-place change


# --- second derivatives, vmap, compiled graphs ------------------------------------------------------------------


@pytest.mark.parametrize(("relu", "residual"), [(False, False), (True, False), (True, True)])
def test_double_backward(relu: bool, residual: bool, device: torch.device) -> None:
    tensors = inputs((4, 6, 2, (3, 2)), device)
    if not residual:
        del tensors["residual"]
    tensors = away_from_zero(tensors, 2)
    push = torch.randn(tensors["x"].shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(device)

    def twice(train: Run, dtype: torch.dtype) -> list[Tensor]:
        leaves = {name: t.to(dtype).requires_grad_() for name, t in tensors.items()}
        y, _ = train(*(leaves.get(name) for name in ("x", "weight", "bias", "residual")), 2, relu)
        first = torch.autograd.grad(y, [leaves["x"], leaves["weight"]], leaves["dy"], create_graph=True)
        total = (first[0] * push.to(dtype)).sum() + first[1].square().sum()
        return list(torch.autograd.grad(total, [leaves["x"], leaves["weight"], leaves["dy"]]))

    for actual, expected in zip(twice(ours, torch.float32), twice(exact, torch.float64), strict=True):
        # Sums of products of first derivatives, in float32: some hundred roundings.
        assert (actual.double() - expected).abs().max().item() <= 1e-4 * max(1.0, expected.abs().max().item())


def test_compiles_as_one_graph(device: torch.device) -> None:
    torch._dynamo.reset()
    plain, twin = (ContinualNorm2d(4, num_groups=2, kernel="triton").to(device) for _ in range(2))
    graphs: list[str] = []

    def backend(module: Any, given: Any) -> Any:
        graphs.append(str(module.graph))
        return torch._dynamo.lookup_backend("aot_eager")(module, given)

    compiled = torch.compile(
        lambda x, r: (twin(x), twin(x, r, relu=True), twin(x, relu=True)), fullgraph=True, backend=backend
    )
    tensors = narrowed(inputs((3, 4, 2, (3, 3)), device), torch.float32)
    for training in (True, False):
        outcomes = []
        for layer in (plain, twin):
            layer.train(training).zero_grad()
            x, r = (tensors[name].clone().requires_grad_() for name in ("x", "residual"))
            ys = compiled(x, r) if layer is twin else (layer(x), layer(x, r, relu=True), layer(x, relu=True))
            sum((y * tensors["dy"]).sum() for y in ys).backward()  # type: ignore[union-attr]
            outcomes.append([*ys, x.grad, r.grad, *(p.grad for p in layer.parameters()), *layer.buffers()])
        for expected, actual in zip(*outcomes, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 2 and all("contnorm.continual_norm" in graph for graph in graphs)


def test_operators_pass_opcheck(device: torch.device) -> None:
    tensors = narrowed(inputs((3, 4, 2, (3, 2)), device), torch.float32)
    x, weight, bias, residual = (tensors[name] for name in ("x", "weight", "bias", "residual"))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for each in (x.clone().requires_grad_(), last(x)):
        torch.library.opcheck(fused.continual_norm, (each, weight, bias, residual, EPS, 2, True), test_utils=tests)
        torch.library.opcheck(
            fused.continual_norm_eval,
            (each, weight, weight.square(), None, bias, None, EPS, 2, True),
            test_utils=tests,
        )


# --- where it runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["INSTALLED", "INTERPRETED", "dtype", "size"])
def test_kernel_that_cannot_run_is_refused_if_named(
    missing: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "INTERPRETED" and device.type == "cuda":
        pytest.skip("only a CPU needs the interpreter")
    x, layer = torch.randn(4, 8, 3, 3).to(device), ContinualNorm2d(8, num_groups=2, kernel="triton").to(device)
    if missing == "size":
        plan.LIMITS = LaunchLimits(channels=2)
    elif missing == "dtype":
        layer, x = layer.double(), x.double()
    else:
        monkeypatch.setattr(launcher, missing, False)
    with pytest.raises(ValueError, match="kernel='triton' can't be used here"):
        layer(x)
    assert int(layer.num_batches_tracked) == 0


def test_auto_uses_triton_on_cuda_only(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    forward, evaluate = launch.forward, launch.evaluate
    monkeypatch.setattr(launch, "forward", lambda *tensors: launched.append(1) or forward(*tensors))
    monkeypatch.setattr(launch, "evaluate", lambda *tensors: launched.append(1) or evaluate(*tensors))
    x = torch.randn(4, 8, 3, 3).to(device)
    layer = ContinualNorm2d(8, num_groups=2).to(device)

    def launches() -> int:
        launched.clear()
        layer.train()(x)
        layer.eval()(x)
        return len(launched)

    assert launches() == (2 if device.type == "cuda" else 0)
    monkeypatch.setattr(launcher, "INSTALLED", False)
    assert launches() == 0


def test_auto_uses_torch_under_transforms(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward-mode AD and exported programs use torch's operators, also on CUDA."""
    layer = ContinualNorm2d(8, num_groups=2).to(device)
    x = torch.randn(4, 8, 3, 3).to(device)
    layer(x)
    layer.eval()
    _, slope = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    assert slope.abs().max().item() < 1e-4  # a constant added changes nothing
    program = torch.export.export(layer, (x,))
    assert "contnorm" not in str(program.graph)


# --- plans ------------------------------------------------------------------------------------------------------


def test_plans_cover_the_input_within_limits() -> None:
    limits = LaunchLimits()
    for shape in AS_IN_NETWORKS:
        n, c, groups, positions = shape
        for is_last in (False, True):
            sizes = Sizes(n, c, torch.Size(positions).numel(), groups, is_last, 4)
            for backward in (False, True):
                p = plan.plan_training(sizes, backward, limits)
                assert p.splits * p.span >= sizes.length or p.launches == "one"
                assert (p.splits - 1) * p.span < sizes.length  # no split is empty
                lanes = p.lanes * groups if p.launches != "three" else c
                assert p.blocks * p.block_c >= lanes
                assert p.block_n * p.block_c * p.block_l <= max(limits.tile, limits.single)
                assert p.all_n >= n and p.programs >= p.blocks * p.splits * -(-n // p.block_n)


def test_limits_of_these_tests_select_their_plans() -> None:
    sizes = Sizes(3, 6, 5, 2, False, 4)
    for name, limits in LIMITS_BY_PLAN.items():
        p = plan.plan_training(sizes, True, limits)
        assert p.launches == name.split(",")[0] and p.single == ("once" in name or name == "cluster")
        assert (p.splits > 1) == (name in ("two, shared out", "three"))
        assert (p.block_n >= p.all_n) == (name not in ("two, shared out", "three", "cluster"))
        assert (p.members > 1) == (name == "cluster")


@pytest.mark.parametrize("relu", [False, True], ids=["plain", "relu"])
def test_saved_for_backward_is_input_and_tables(relu: bool, device: torch.device) -> None:
    """As for batch norm: x, and at most 2NC + 2NG + 2C numbers besides the parameters."""
    n, c, groups = 5, 12, 3
    layer = ContinualNorm2d(c, num_groups=groups, kernel="triton").to(device)
    x = torch.randn(n, c, 4, 4, device=device, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        layer(x, relu=relu)
    there = {p.data_ptr() for p in (x, *layer.parameters())}
    extra = [t for t in saved if t.data_ptr() not in there]
    assert sum(t.numel() for t in extra) <= 2 * n * c + 2 * n * groups + 2 * c
    assert all(t.dtype == torch.float32 for t in extra) and any(t.data_ptr() == x.data_ptr() for t in saved)
