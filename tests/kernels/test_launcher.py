"""Launches: compiled kernels are reused for equal arguments only; compiling ahead compiles without a launch."""

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch

from contnorm.kernels.triton import launcher

if not launcher.INSTALLED:
    pytest.skip("needs Triton and torch 2.11", allow_module_level=True)

CONSTANTS = {"LAST": True, "num_warps": 4, "BC": 16}


class Metadata(NamedTuple):
    target: Any
    num_warps: int = 4
    num_ctas: int = 1
    shared: int = 512


class Code:
    """Fake compiled kernel, which Triton returns at each launch."""

    packed_metadata = ()

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.metadata = Metadata(import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32))

    def _init_handles(self) -> None: ...

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.launched.append((grid, args))


class Kernel:
    """Fake Triton kernel that notes what it is launched and compiled with; a real one needs a GPU."""

    arg_names = ("x", "y", "rate", "N", "BC", "LAST")

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.compiled: list[Any] = []
        self.code = Code()
        self.pre_run_hooks: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **constants: self.launched.append((grid, args, constants)) or self.code

    def warmup(self, *args: Any, grid: tuple[int, ...], **constants: Any) -> Code:
        mode = import_module("triton.runtime._async_compile").active_mode.get()
        if mode is None:
            return self.code
        mode.submit(object(), lambda: self.compiled.append((grid, args, constants)), lambda _: None)
        return self.code


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Enable the cache, as on a GPU; the number of the current device can be changed."""
    device = [0]
    monkeypatch.setattr(launcher, "CACHES_KERNELS", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device[0])
    return device


def test_compiled_kernel_is_cached(current: list[int]) -> None:
    kernel = Kernel()
    launch = launcher.Launch(kernel, (3,), CONSTANTS)
    launch(torch.zeros(4), None, 0.5, 20)
    launch(torch.ones(8), None, 0.25, 20)  # other values and sizes of the same types
    assert len(kernel.launched) == 1 and kernel.launched[0][2] == CONSTANTS
    ((grid, (y, *rest)),) = kernel.code.launched
    assert grid == (3, 1, 1) and torch.equal(y, torch.ones(8))
    assert rest == [None, 0.25, 20, 16, True]  # constants in the kernel's order, without Triton's options


def test_kernel_in_clusters_is_never_launched_without(current: list[int]) -> None:
    """The first launch compiles and then launches the copy; the grid that Triton gets is in clusters."""
    kernel = Kernel()
    launch = launcher.Launch(kernel, (15,), CONSTANTS, cluster=5)
    for _ in range(2):
        kernel.pre_run_hooks = [print]  # with hooks, other kernels are launched by Triton
        launch(torch.zeros(4), None, 0.5, 20)
    assert kernel.launched == []
    assert [grid for grid, _ in kernel.code.launched] == [(3, 1, 1), (3, 1, 1)]
    own = launcher.in_clusters(kernel.code, 5)
    assert own.packed_metadata[:3] == (4, 5, 512) and own.metadata.num_ctas == 5
    assert kernel.code.metadata.num_ctas == 1


def test_cache_misses_where_triton_specializes(current: list[int]) -> None:
    kernel = Kernel()
    launch = launcher.Launch(kernel, (3,), CONSTANTS)
    x = torch.zeros(5)
    usual = x, None, 0.5, 20
    others: list[tuple[Any, ...]] = [
        (x.bfloat16(), None, 0.5, 20),
        (x[1:], None, 0.5, 20),  # four bytes off
        (x, x, 0.5, 20),
        (x, None, 0.5, 32),  # divisible by 16
        (x, None, 0.5, 1),
        (x, None, 1, 20),
        (x, None, 0.5, True),  # equal to 1, and of another type
    ]
    for _ in range(2):
        for arguments in (usual, *others):
            launch(*arguments)
        assert len(kernel.launched) == 1 + len(others)
    assert len(kernel.code.launched) == 1 + len(others)
    current[0] = 1
    launch(*usual)
    assert len(kernel.launched) == 2 + len(others)
    current[0] = 0
    kernel.pre_run_hooks.append(print)  # Triton calls it
    launch(*usual)
    assert len(kernel.launched) == 3 + len(others)


def test_cache_key_is_as_specific_as_triton(current: list[int]) -> None:
    """With Triton's code, which needs no GPU."""
    jit, compiler = (import_module(f"triton.{name}") for name in ("runtime.jit", "compiler.compiler"))
    kernel = jit.JITFunction(_of_one_argument)
    target = import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    seen = jit.create_function_from_signature(kernel.signature, kernel.params, compiler.make_backend(target))
    x = torch.zeros(64)
    tensors = [x, x[1:], x[4:], x[:0], x[0], torch.nn.Parameter(x), x.view(8, 8).t(), x.bfloat16(), x.half()[1:]]
    tensors += [x.to(dtype) for dtype in (torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)]
    numbers = [sign * 2**power + more for sign in (1, -1) for power in (0, 4, 31, 32, 63) for more in (-1, 0, 1)]
    others = [None, True, False, 0.0, 1.0, 16.0, float("nan"), 1e300]
    actual: dict[Any, Any] = {}
    for arguments in (*tensors, *(n for n in numbers if -(2**63) <= n < 2**64), *others):
        special = seen(arguments)[1]
        assert actual.setdefault(launcher._key((arguments,)), special) == special, arguments
    assert len({str(special) for special in actual.values()}) > 15  # Triton distinguishes them


def _of_one_argument(arguments: Any) -> None:
    """Source of a Triton kernel."""


def test_compiling_ahead_compiles_in_all_threads_without_launch() -> None:
    kernel = Kernel()
    with launcher.compiling_ahead():
        launcher.launch(kernel, (1,), "here")
        with ThreadPoolExecutor(1) as other:  # as a backward pass does
            other.submit(launcher.launch, kernel, (2,), "there", SIZE=1).result()
    assert not kernel.launched
    assert sorted(kernel.compiled) == [((1,), ("here",), {}), ((2,), ("there",), {"SIZE": 1})]
    launcher.launch(kernel, (1,), "again")
    assert kernel.launched == [((1,), ("again",), {})]
