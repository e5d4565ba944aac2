"""Replay of launches by the C++ extension: equal to Python bit for bit, and never used where Python must decide.

On a CPU, a driver in software executes the launches with Triton's interpreter. ``--device cuda`` uses the real one.
"""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from contnorm import ContinualNorm1d, ContinualNorm2d, ContinualNorm3d
from contnorm.functional import continual_norm
from contnorm.kernels import build
from contnorm.kernels.triton import eager, launcher, plan
from contnorm.kernels.triton.plan import LaunchLimits
from tests.kernels.interpreter_driver import InterpreterDriver

pytestmark = pytest.mark.slow  # Triton's interpreter takes long, and so does the build of the extension

if not launcher.INSTALLED:
    pytest.skip("needs Triton and torch 2.11", allow_module_level=True)
from tests.kernels.test_continual import LAST, LIMITS_BY_PLAN  # noqa: E402


@pytest.fixture(scope="module")
def module() -> Any:
    loaded = build.load_extension("replay")
    if loaded is None:
        pytest.skip("the extension can't be built here: there is no C++ compiler")
    return loaded


@pytest.fixture
def driver(device: torch.device, module: Any) -> Iterator[Any]:
    """The driver through which launches are replayed; after the test, Python is used again."""
    used: Any = InterpreterDriver() if device.type == "cpu" else eager.CudaDriver()
    eager.start(module, used)
    yield used
    eager.stop()


@pytest.fixture(params=["cluster", "two, all samples", "three"])
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LaunchLimits:
    chosen: LaunchLimits = LIMITS_BY_PLAN[request.param]
    monkeypatch.setattr(plan, "LIMITS", chosen)
    return chosen


def layer_for(dims: int = 2, channels: int = 4, device: torch.device | str = "cpu", **options: Any) -> Any:
    made = (ContinualNorm1d, ContinualNorm2d, ContinualNorm3d)[dims - 1]
    torch.manual_seed(3)
    layer = made(channels, num_groups=2, kernel="triton", **options).to(device)
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


def steps(layer: Any, inputs: list[tuple[Tensor, ...]], relu: bool = False) -> list[list[Tensor]]:
    """Outputs, gradients and buffers after each of several training steps on (x, dy) or (x, dy, residual)."""
    found = []
    for x, dy, *rest in inputs:
        layer.zero_grad()
        x, *rest = (t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, *rest))
        y = layer(x, *rest, relu=relu) if rest or relu else layer(x)
        y.backward(dy)
        leaves = [x, *rest, *layer.parameters()]
        found.append([y.detach(), *(leaf.grad for leaf in leaves), *(b.clone() for b in layer.buffers())])
    return found


def batches(
    count: int, *shape: int, device: torch.device, residual: bool = False, last: bool = False, dtype: Any = None
) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(5)

    def drawn() -> Tensor:
        x = torch.randn(shape, generator=generator).to(device, dtype or torch.float32)
        return x.to(memory_format=LAST[x.dim()]) if last else x

    return [tuple(drawn() for _ in range(3 if residual else 2)) for _ in range(count)]


def equal(first: list[list[Tensor]], second: list[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))


def on_both_paths(run: Callable[[Any], Any], layer: Any, module: Any, device: torch.device) -> tuple[Any, Any, Any]:
    """Run with copies of a layer, through Python and replayed; returns both results and the driver."""
    other = copy.deepcopy(layer)
    eager.stop()
    expected = run(layer)
    driver: Any = InterpreterDriver() if device.type == "cpu" else eager.CudaDriver()
    eager.start(module, driver)
    try:
        return expected, run(other), driver
    finally:
        eager.stop()


# --- equal to Python ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [False, True], ids=["plain", "relu, residual and channels last"])
def test_every_plan_is_replayed_bit_for_bit(
    together: bool, limits: LaunchLimits, module: Any, device: torch.device
) -> None:
    data = batches(2, 3, 4, 2, 3, device=device, residual=together, last=together)
    expected, found, driver = on_both_paths(
        lambda layer: steps(layer, data, together), layer_for(device=device), module, device
    )
    assert equal(expected, found)
    if device.type == "cpu":  # the first step goes through Python, the other does not
        one = len([name for name in driver.replayed if name.startswith("forward")])
        assert one == len([k for k, _ in driver.known if k.launch.kernel.fn.__name__.startswith("forward")])
        assert {size for _, size, _ in driver.configurations} == {512}


@pytest.mark.parametrize(
    ("dims", "dtype", "options"),
    [(1, torch.float32, {"affine": False}), (2, torch.bfloat16, {}), (3, torch.float16, {"momentum": None})],
    ids=str,
)
def test_ranks_dtypes_and_options(
    dims: int, dtype: torch.dtype, options: dict[str, Any], module: Any, device: torch.device
) -> None:
    data = batches(2, 3, 4, *[2] * dims, device=device, dtype=dtype)
    expected, found, _ = on_both_paths(
        lambda layer: steps(layer, data), layer_for(dims, device=device, **options), module, device
    )
    assert equal(expected, found)


def test_evaluation(module: Any, device: torch.device) -> None:
    layer, ((x, _),) = layer_for(device=device).eval(), batches(1, 3, 4, 2, 2, device=device)

    def run(each: Any) -> list[list[Tensor]]:
        with torch.no_grad():
            return [[each(x)] for _ in range(3)]

    expected, found, driver = on_both_paths(run, layer, module, device)
    assert equal(expected, found)
    assert device.type != "cpu" or driver.replayed == ["evaluate", "evaluate"]


def test_gradients_in_evaluation_go_through_python(driver: Any, device: torch.device) -> None:
    layer, ((x, dy),) = layer_for(device=device).eval(), batches(1, 3, 4, 2, 2, device=device)
    with torch.no_grad():
        layer(x), layer(x)
    x.requires_grad_()
    layer(x).backward(dy)
    wide = copy.deepcopy(layer).double()
    wide.kernel = "reference"
    (expected,) = torch.autograd.grad(wide(x.double()), x, dy.double())
    torch.testing.assert_close(x.grad, expected.float(), rtol=1e-4, atol=1e-5)


# --- signatures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        lambda x: x[:2],
        lambda x: x.bfloat16(),
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: torch.cat([x.flatten(), x.flatten()[:1]])[1:].view_as(x),  # not aligned to 16 bytes
    ],
    ids=["samples", "dtype", "layout", "alignment"],
)
def test_other_inputs_are_not_replayed_with_the_launches_of_this_one(
    changed: Callable[[Tensor], Tensor], module: Any, device: torch.device
) -> None:
    def run(layer: Any) -> list[list[Tensor]]:
        (x, _), found = batches(1, 3, 4, 2, 2, device=device)[0], []
        for each in (x, x, changed(x), changed(x)):
            each = each.detach()
            rest = layer.running_mean, layer.running_var, layer.weight, layer.bias, True, 0.1, 1e-5, 2
            y = continual_norm(each.requires_grad_(), *rest, kernel="triton")
            gradient = torch.autograd.grad(y, (each, layer.weight), torch.ones_like(y))
            found.append([y.detach(), *gradient, layer.running_var.clone()])
        return found

    expected, found, _ = on_both_paths(run, layer_for(device=device), module, device)
    assert equal(expected, found)


def test_gradients_of_any_layout(module: Any, device: torch.device) -> None:
    """The gradient of a sum is expanded, that of a transposed output is not dense."""

    def run(layer: Any) -> list[list[Tensor]]:
        ((x, dy),) = batches(1, 3, 4, 2, 2, device=device)
        found = []
        for gradient in (dy, dy, dy[:1].expand_as(dy), dy.transpose(2, 3), dy.to(memory_format=torch.channels_last)):
            each = x.clone().requires_grad_()
            y = layer(each)
            found.append(list(torch.autograd.grad(y, (each, layer.weight, layer.bias), gradient)))
        return found

    expected, found, _ = on_both_paths(run, layer_for(device=device), module, device)
    assert equal(expected, found)


def test_wrong_arguments_are_still_refused(driver: Any, device: torch.device) -> None:
    ((x, _),) = batches(1, 3, 4, 2, 2, device=device)
    mean, var = torch.zeros(4, device=device), torch.ones(4, device=device)
    usual: dict[str, Any] = {"training": True, "num_groups": 2, "kernel": "triton"}
    continual_norm(x, mean, var, **usual), continual_norm(x, mean, var, **usual)
    for wrong in ({"num_groups": 3}, {"weight": torch.ones(5, device=device)}):
        with pytest.raises(ValueError, match="channels"):
            continual_norm(x, mean, var, **(usual | wrong))


# --- not plain eager mode -----------------------------------------------------------------------------------------


def test_double_backward(driver: Any, device: torch.device) -> None:
    layer, ((x, dy),) = layer_for(device=device), batches(1, 3, 4, 2, 2, device=device)
    layer(x.requires_grad_()).backward(dy)  # registers
    ours = torch.autograd.grad(layer(x), x, dy, create_graph=True)[0].square().sum()
    wide = copy.deepcopy(layer).double()
    wide.kernel = "reference"
    y = wide(x.double())
    expected = torch.autograd.grad(y, x, dy.double(), create_graph=True)[0].square().sum()
    for parameter, other in ((layer.weight, wide.weight), (x, x)):
        (first,) = torch.autograd.grad(ours, parameter, retain_graph=True)
        (second,) = torch.autograd.grad(expected, other, retain_graph=True)
        torch.testing.assert_close(first.double(), second.double(), rtol=1e-3, atol=1e-4)


def test_batched_gradients(driver: Any, device: torch.device) -> None:
    layer, ((x, dy),) = layer_for(device=device), batches(1, 3, 4, 2, 2, device=device)
    x.requires_grad_()
    layer(x).backward(dy)
    several = torch.stack([dy, 2 * dy, dy.flip(0)])
    found = torch.autograd.grad(layer(x), x, several, is_grads_batched=True)[0]
    expected = torch.stack([torch.autograd.grad(layer(x), x, each)[0] for each in several])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_transforms_and_modes_go_through_python(driver: Any, device: torch.device) -> None:
    layer, ((x, _),) = layer_for(device=device), batches(1, 3, 4, 2, 2, device=device)
    layer(x), layer(x)
    state = layer.running_mean, layer.running_var, layer.weight, layer.bias
    arguments: tuple[Any, ...] = x, *state, True, 0.1, 1e-5, 2, False, None, None
    assert eager.normalize(*arguments) is None  # without the counter it is another signature
    arguments = *arguments[:-1], layer.num_batches_tracked
    assert eager.normalize(*arguments) is not None
    with forward_ad.dual_level():
        assert eager.normalize(*arguments) is None
    torch.func.vmap(lambda _: _answers_none(arguments))(torch.zeros(2))

    class Subclass(Tensor):
        pass

    assert eager.normalize(x.as_subclass(Subclass), *arguments[1:]) is None  # type: ignore[no-untyped-call]
    with FlopCounterMode(display=False):
        assert eager.normalize(*arguments) is None


def _answers_none(arguments: tuple[Any, ...]) -> Tensor:
    assert eager.normalize(*arguments) is None
    return torch.zeros(())


def test_compile_and_export_do_not_see_the_extension(driver: Any, device: torch.device) -> None:
    layer, ((x, _),) = layer_for(device=device), batches(1, 3, 4, 2, 2, device=device)
    layer.kernel = "auto"
    expected = copy.deepcopy(layer)(x)
    torch.testing.assert_close(torch.compile(copy.deepcopy(layer), backend="aot_eager")(x), expected)
    exported = torch.export.export(copy.deepcopy(layer).eval(), (x,)).module()
    torch.testing.assert_close(exported(x), copy.deepcopy(layer).eval()(x))


# --- autograd -----------------------------------------------------------------------------------------------------


def test_changes_in_place_are_noticed(driver: Any, device: torch.device) -> None:
    layer, ((x, dy),) = layer_for(device=device), batches(1, 3, 4, 2, 2, device=device)
    for change in ("x", "weight", "y"):
        for _ in range(2):
            each = (x * 1).requires_grad_()
            y = layer(each, each * 1, relu=True)
        with torch.no_grad():
            {"x": each, "weight": layer.weight, "y": y}[change].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(dy)


def test_buffers_are_marked_as_changed(driver: Any, device: torch.device) -> None:
    layer, ((x, _),) = layer_for(device=device), batches(1, 3, 4, 2, 2, device=device)
    layer(x)
    before = [buffer._version for buffer in layer.buffers()]
    layer(x)
    assert [buffer._version for buffer in layer.buffers()] == [version + 1 for version in before]


def test_saved_tensors_are_released_and_hooks_are_called(driver: Any, device: torch.device) -> None:
    layer, ((x, dy),) = layer_for(device=device), batches(1, 3, 4, 2, 2, device=device)
    layer(x)
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    assert x.numel() in packed
    y.backward(dy)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(dy)
    each = x.clone().requires_grad_()
    gone = weakref.ref(each)
    y = layer(each)
    del each, y
    gc.collect()
    assert gone() is None


# --- the driver ---------------------------------------------------------------------------------------------------


@pytest.fixture
def software(module: Any) -> Iterator[InterpreterDriver]:
    if not launcher.INTERPRETED:
        pytest.skip("the driver in software needs Triton's interpreter")
    driver = InterpreterDriver()
    eager.start(module, driver)
    yield driver
    eager.stop()


def test_launch_attributes_and_errors(software: InterpreterDriver) -> None:
    layer, ((x, _),) = layer_for(), batches(1, 3, 4, 2, 2, device=torch.device("cpu"))
    software.cooperative, software.cluster = True, 4
    layer(x), layer(x)
    ((threads, shared, attributes),) = software.configurations
    assert (threads, shared) == (32 * software.known[0][0].launch.constants["num_warps"], 512)
    assert attributes == [(4, 4), (5, 1), (2, 1)]  # numbers of the driver: cluster size and policy, cooperative
    software.fails = True
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        layer(x)


# --- when it is built ---------------------------------------------------------------------------------------------


def test_short_programs_do_not_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the state of a new process with a GPU, where the extension can't be built."""
    loaded: list[str] = []
    for name, value in {"_state": "unused", "_calls": 0, "_extension": None, "CACHES_KERNELS": True}.items():
        monkeypatch.setattr(eager, name, value)
    monkeypatch.setattr(build, "is_built", lambda name: False)
    monkeypatch.setattr(build, "load_extension", loaded.append)
    monkeypatch.delenv("CONTNORM_EAGER", raising=False)
    x: Any = SimpleNamespace(is_cuda=True)
    for calls, expected in ((eager.BUILD_AFTER - 1, []), (1, ["replay"]), (3 * eager.BUILD_AFTER, ["replay"])):
        for _ in range(calls):  # a failed build is not tried again
            eager._count(x)
        for thread in eager.threading.enumerate():
            if thread.name == "contnorm-build":
                thread.join()
        assert loaded == expected
    assert not eager.is_active()
