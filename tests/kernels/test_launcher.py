"""Launches: the cache of compiled kernels is used for equal arguments only.

Compiling ahead: launches compile without running, in any thread, and all are compiled at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch

from contnorm.kernels.triton import launcher as launching

triton = pytest.importorskip("triton", reason="Triton is not installed")


class Kernel:
    """Fake Triton kernel; those of a GPU are tested in ``tests/bench/engine/test_cuda_graph.py``."""

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.compiled: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **constants: self.launched.append((grid, args, constants))

    def warmup(self, *args: Any, grid: tuple[int, ...], **constants: Any) -> None:
        mode: ContextVar[Any] = import_module("triton.runtime._async_compile").active_mode
        done = mode.get().submit(object(), lambda: self.compiled.append((grid, args, constants)), lambda _: None)
        assert done is not None


class Request(NamedTuple):
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]


class Code:
    """Fake compiled kernel, which Triton returns at each launch."""

    packed_metadata = ()

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.launched.append((grid, args))


class Compiling:
    """Fake Triton kernel that returns the compiled kernel it launched."""

    arg_names = ("x", "y", "rate", "N", "BC", "LAST")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.code = Code()
        self.pre_run_hooks: list[Any] = []
        self.gives: Any = lambda: self.code

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **constants: self.requests.append(Request(grid, args, constants)) or self.gives()


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Enable the cache, as on a GPU; the number of the current device can be changed."""
    device = [0]
    monkeypatch.setattr(launching, "CACHES_KERNELS", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device[0])
    return device


def make_launch(kernel: Any) -> launching.Launch:
    return launching.Launch(kernel, (3,), {"LAST": True, "num_warps": 4, "BC": 16})


def test_compiled_kernel_is_cached(current: list[int]) -> None:
    kernel = Compiling()
    launch = make_launch(kernel)
    x = torch.zeros(4)
    launch(x, None, 0.5, 20)
    launch(torch.ones(8), None, 0.25, 20)  # other values and sizes of the same types
    assert len(kernel.requests) == 1 and kernel.requests[0][2] == {"LAST": True, "num_warps": 4, "BC": 16}
    ((grid, (y, *rest)),) = kernel.code.launched
    assert grid == (3, 1, 1) and torch.equal(y, torch.ones(8))
    assert rest == [None, 0.25, 20, 16, True]  # constants in the kernel's order, without Triton's options


class Metadata(NamedTuple):
    target: Any
    num_warps: int = 4
    num_ctas: int = 1
    shared: int = 512


class ForClusters(Code):
    """Fake compiled kernel with the metadata that Triton's launcher reads."""

    def __init__(self) -> None:
        super().__init__()
        self.metadata = Metadata(import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32))
        self.ready = False

    def _init_handles(self) -> None:
        self.ready = True


def test_kernel_in_clusters_is_never_launched_without(current: list[int]) -> None:
    """The first launch compiles and then launches the copy; the grid that Triton gets is in clusters."""
    kernel, code = Compiling(), ForClusters()
    kernel.warmup = lambda *args, grid, **constants: code  # type: ignore[attr-defined]
    launch = launching.Launch(kernel, (15,), {"LAST": True, "num_warps": 4, "BC": 16}, cluster=5)
    for _ in range(2):
        kernel.pre_run_hooks = [print]  # with hooks, other kernels are launched by Triton
        launch(torch.zeros(4), None, 0.5, 20)
    assert kernel.requests == [] and code.ready
    assert [grid for grid, _ in code.launched] == [(3, 1, 1), (3, 1, 1)]
    own = launching.in_clusters(code, 5)
    assert own.packed_metadata[:3] == (4, 5, 512) and own.metadata.num_ctas == 5 and code.metadata.num_ctas == 1


def test_cache_misses_where_triton_specializes(current: list[int]) -> None:
    kernel = Compiling()
    launch = make_launch(kernel)
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
    for arguments in (usual, *others):
        launch(*arguments)
    assert len(kernel.requests) == 1 + len(others) and not kernel.code.launched
    for arguments in (usual, *others):
        launch(*arguments)
    assert len(kernel.requests) == 1 + len(others) == len(kernel.code.launched)
    current[0] = 1
    launch(*usual)
    assert len(kernel.requests) == 2 + len(others)
    current[0] = 0
    kernel.pre_run_hooks.append(print)  # Triton calls it
    launch(*usual)
    assert len(kernel.requests) == 3 + len(others)


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
        assert actual.setdefault(launching._key((arguments,)), special) == special, arguments
    assert len({str(special) for special in actual.values()}) > 15  # Triton distinguishes them


def _of_one_argument(arguments: Any) -> None:
    """Source of a Triton kernel."""


def test_launches_use_the_device_of_the_tensor(current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The current GPU may be another one; a tensor on the CPU is passed to the interpreter."""

    class OnGpu(NamedTuple):
        index: int
        is_cuda: bool = True

        @property
        def device(self) -> torch.device:
            return torch.device("cuda", self.index)

        def get_device(self) -> int:
            return self.index

    @contextmanager
    def switched(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", switched)
    for x, expected in ((torch.zeros(1), 0), (OnGpu(0), 0), (OnGpu(1), 1)):
        with launching.on_device_of(x):
            assert torch.cuda.current_device() == expected
        assert torch.cuda.current_device() == 0


def test_compiling_ahead_compiles_in_all_threads_without_launch() -> None:
    kernel = Kernel()
    with launching.compiling_ahead():
        launching.launch(kernel, (1,), "here")
        with ThreadPoolExecutor(1) as other:  # as a backward pass does
            other.submit(launching.launch, kernel, (2,), "there", SIZE=1).result()
    assert not kernel.launched
    assert sorted(kernel.compiled) == [((1,), ("here",), {}), ((2,), ("there",), {"SIZE": 1})]
    launching.launch(kernel, (1,), "again")
    assert kernel.launched == [((1,), ("again",), {})]
