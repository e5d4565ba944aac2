"""The depth of norm layers, found by tracing the data flow of one forward pass.

The depth of a call of a layer is the number of norm layers on the longest path from the input to it, so that layers on
parallel branches have the same depth.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from contnorm.moments.batches import Call
from contnorm.moments.buffers import moment_buffers

__all__ = ["trace_depths"]


def trace_depths(model: nn.Module, layers: dict[str, nn.Module], batch: Any, run: Call) -> dict[str, list[int]]:
    """Run one forward pass, and return the depth of each call of each layer."""
    calls: dict[str, list[int]] = {name: [] for name in layers}
    flow = _UncompiledDepthFlow() if "torch._dynamo" in sys.modules else _DepthFlow()
    moments = {name: {_address(buffer) for buffer in moment_buffers(layer)} for name, layer in layers.items()}
    flow.watched = set().union(*moments.values())
    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.register_forward_hook(_depth_hook(flow, calls[name]), with_kwargs=True).remove)
        stack.enter_context(flow)
        run(model, batch)
    for name, addresses in moments.items():
        if not calls[name] and addresses & flow.read:
            raise ValueError(
                f"reestimate: the moments of layer {name!r} ({type(layers[name]).__name__}) are used without a call of "
                f"the layer, so its input can't be measured. Call layer(x) in place of layer.forward(x) or "
                f"torch.nn.functional.batch_norm."
            )
    if not any(calls.values()):
        raise ValueError("reestimate: a forward pass reached no norm layer with running moments.")
    return calls


def _depth_hook(flow: _DepthFlow, depths: list[int]) -> Callable[..., None]:
    def hook(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        depth = flow.of((args, kwargs))
        depths.append(depth)
        flow.deepen(output, depth + 1)

    return hook


class _DepthFlow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that tracks, for each storage, how many norm layers its data has passed through."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.depth: dict[int, int] = {}
        self.alive: list[Tensor] = []  # keeps tensors alive, so that no storage address is reused
        self.watched: set[int] = set()  # addresses of running moments
        self.read: set[int] = set()  # the watched addresses that an operation has used

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Skip torch's default, which imports the compiler only to disable it here and takes seconds at first use."""
        return cls.__name__ != "_DepthFlow"

    def of(self, values: object) -> int:
        return max((self.depth.get(_address(t), 0) for t in tree_leaves(values) if isinstance(t, Tensor)), default=0)

    def deepen(self, values: object, depth: int) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and depth > self.depth.get(_address(tensor), 0):
                self.depth[_address(tensor)] = depth
                self.alive.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.read |= self.watched & {_address(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        depth = self.of((args, kwargs))
        if depth:
            self.deepen(result, depth)
            formal = func._schema.arguments
            written = [a for a, f in zip(args, formal, strict=False) if f.alias_info and f.alias_info.is_write]
            self.deepen(written, depth)
        return result


class _UncompiledDepthFlow(_DepthFlow):  # type: ignore[no-untyped-call]
    """The same mode for use when the compiler is already imported, which must not compile it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


def _address(tensor: Tensor) -> int:
    """Return a key that is equal for tensors with the same storage; for a sparse tensor, which has none, its id."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)
