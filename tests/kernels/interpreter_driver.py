"""A driver in software for the replay of launches on a CPU: a launched kernel runs in Triton's interpreter.

The extension gives a driver what it would give that of a GPU: the handle of a kernel, its grid, and the addresses of
its arguments. The values are read from these addresses, so wrong or missing arguments give wrong results.
"""

import ctypes
import traceback
from typing import Any

import torch
from torch import Tensor

from contnorm.kernels.triton.launcher import RecordedLaunch

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.int64: "*i64",
}


class Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("values", ctypes.c_uint * 3),
        ("rest", ctypes.c_char * 52),
    )


class Configuration(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("number", ctypes.c_uint),
    )


LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Configuration), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)
STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
SIZE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)


class InterpreterDriver:
    """Describes launches that the interpreter executed, and executes them again when they are replayed.

    Attributes:
        replayed: Names of the kernels that were launched by the extension, in order.
        configurations: Block size, shared memory and launch attributes of each of them.
        cluster, cooperative: Launch attributes of the described launches.
        fails: Whether launches fail, with error 700.
    """

    def __init__(self) -> None:
        self.known: list[tuple[RecordedLaunch, list[str]]] = []
        self.replayed: list[str] = []
        self.configurations: list[tuple[int, int, list[tuple[int, int]]]] = []
        self.fails = False
        self.cluster = 1
        self.cooperative = False
        self._callbacks = LAUNCH(self._launch), STREAM(self._stream), SIZE(self._size)  # kept: C++ has their addresses

    def addresses(self) -> tuple[int, int, int]:
        first, second, third = (ctypes.cast(each, ctypes.c_void_p).value or 0 for each in self._callbacks)
        return first, second, third

    def describe(self, recorded: RecordedLaunch) -> Any:
        names = recorded.launch.kernel.arg_names
        types = [_type(value) for value in recorded.args]
        self.known.append((recorded, types))
        arguments = [
            (name, kind, None if isinstance(value, Tensor) else value)
            for name, kind, value in zip(names, types, recorded.args, strict=False)
            if kind != "constexpr"
        ]
        first, second, third = (*recorded.launch.grid, 1, 1)[:3]
        warps = recorded.launch.constants["num_warps"]
        return (
            len(self.known),
            (first, second, third),
            32 * warps,
            512,
            self.cluster,
            self.cooperative,
            False,
            arguments,
        )

    def _stream(self, device: int, stream: Any) -> int:
        assert device == -1  # the input is on the CPU
        stream[0] = None
        return 0

    def _size(self, handle: int, index: int, offset: Any, size: Any) -> int:
        types = [kind for kind in self.known[handle - 1][1] if kind != "constexpr"]
        sizes = [4 if kind in ("i32", "fp32") else 8 for kind in types] + [8] * 2
        if index >= len(sizes):
            return 1
        size[0] = sizes[index]
        return 0

    def _launch(self, configuration: Any, handle: int, arguments: Any, extra: Any) -> int:
        if self.fails:
            return 700
        try:
            recorded, types = self.known[handle - 1]
            kernel, content = recorded.launch.kernel, configuration.contents
            listed = [content.attributes[i] for i in range(content.number)]
            attributes = [(each.id, each.values[0]) for each in listed]
            self.configurations.append((content.block[0], content.shared, attributes))
            assert tuple(content.grid) == (*recorded.launch.grid, 1, 1)[:3]
            addresses = iter(range(len(types)))
            args = [
                value if kind == "constexpr" else _read(arguments[next(addresses)], kind, value)
                for kind, value in zip(types, recorded.args, strict=True)
            ]
            kernel[recorded.launch.grid](*args, **recorded.launch.constants)
            self.replayed.append(getattr(kernel, "__name__", kernel.fn.__name__))
        except Exception:
            traceback.print_exc()
            return 999
        return 0


def _type(value: Any) -> str:
    """Return Triton's type of an argument; None and 1 become constants of the compiled kernel."""
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if value is None or (isinstance(value, int) and value == 1):
        return "constexpr"
    return "fp32" if isinstance(value, float) else "i32"


def _read(address: int, kind: str, recorded: Any) -> Any:
    """Read an argument from its address; a tensor is a new one over the memory that the address points to."""
    if kind == "i32":
        return ctypes.c_int32.from_address(address).value
    if kind == "fp32":
        return ctypes.c_float.from_address(address).value
    data = ctypes.c_void_p.from_address(address).value
    assert data is not None
    size = (1 + sum((n - 1) * s for n, s in zip(recorded.shape, recorded.stride(), strict=True))) * recorded.itemsize
    flat = torch.frombuffer((ctypes.c_char * size).from_address(data), dtype=recorded.dtype)
    return flat.as_strided(recorded.shape, recorded.stride())
