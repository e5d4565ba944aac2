"""Draws of initial weights, made once for networks that start from the same seed.

Runs that differ in their norm only start from the same weights. Drawing those of a ResNet-18 takes 0.1 seconds: most of
the time between two units of work on a GPU. A draw is a function of the state of the generator, the shape and
the bounds: with the same ones, a copy of the earlier result is the same to the bit, and the generator gets the state
that it had after that draw.

Networks that differ in their seed draw the same shapes in the same order. So the draws of further seeds can be made in
the background while the first network is checked and copied to a GPU. If the guess of what they draw is wrong, the
state of the generator differs, and they draw themselves.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["WeightDraws"]

LIMIT = 2**29  # bytes of all weights: those of eleven ResNet-18 of width 64
SMALL = 2**14  # values; fewer are drawn faster than looked up
# Torch asks the mode about the first of them that is called; older versions call the second directly.
DRAWING = (nn.init.kaiming_uniform_, Tensor.uniform_)


@dataclass(frozen=True)
class _Draw:
    """A call that draws one tensor."""

    function: Callable[..., Any]
    args: tuple[Any, ...]  # without the tensor, which is the first
    options: dict[str, Any]
    shape: torch.Size
    dtype: torch.dtype

    def key(self, state: Tensor) -> tuple[Any, ...]:
        """Return what the result is a function of, with a state of the generator."""
        options = (repr(option) for option in sorted(self.options.items()))
        return self.function.__name__, repr(self.args), *options, self.shape, self.dtype, state.numpy().tobytes()


class WeightDraws(TorchFunctionMode):
    """Context manager in which draws of weights from torch's global generator are remembered; can be entered again.

    Args:
        seeds: Seeds of the generator for which the draws of the first network are made in the background as well.

    Example:
        >>> draws, layers = WeightDraws(), []
        >>> for _ in range(2):
        ...     with draws, torch.random.fork_rng():
        ...         _ = torch.manual_seed(0)
        ...         layers.append(nn.Linear(128, 128))
        >>> torch.equal(layers[0].weight, layers[1].weight), torch.equal(layers[0].bias, layers[1].bias), len(draws)
        (True, True, 1)
    """

    def __init__(self, seeds: Iterable[int] = ()) -> None:
        super().__init__()
        self.seeds = set(seeds)
        self._results: OrderedDict[tuple[Any, ...], tuple[Tensor, Tensor]] = OrderedDict()  # oldest first
        self._bytes = 0
        self._lock = threading.Lock()  # of the results
        self._last: list[_Draw] = []  # draws since the context was entered, in order
        self._ahead: dict[int, Future[None]] = {}  # by seed of the generator

    def __len__(self) -> int:
        return len(self._results)

    def __enter__(self) -> Self:
        ahead = self._ahead.get(torch.initial_seed())
        if ahead is not None:
            ahead.exception()  # waits; after an error the network makes its own draws
        self._last = []
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        seeds, self.seeds = self.seeds - {torch.initial_seed()}, set()
        if seeds and self._last and error[0] is None:
            workers = ThreadPoolExecutor(max_workers=len(seeds))  # torch draws without the interpreter's lock
            self._ahead = {seed: workers.submit(self._draw_all, seed, self._last) for seed in sorted(seeds)}
            workers.shutdown(wait=False)

    def _draw_all(self, seed: int, draws: Sequence[_Draw]) -> None:
        generator = torch.Generator().manual_seed(seed)
        for draw in draws:
            key, tensor = draw.key(generator.get_state()), torch.empty(draw.shape, dtype=draw.dtype)
            with torch.no_grad():
                draw.function(tensor, *draw.args, **draw.options, generator=generator)
            if tensor.numel() >= SMALL:
                self._remember(key, tensor, generator.get_state())

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        tensor, draw = _draw_of(func, args, kwargs or {})
        if draw is None:
            return func(*args, **(kwargs or {}))
        self._last.append(draw)
        if tensor.numel() < SMALL:
            return func(*args, **(kwargs or {}))
        key = draw.key(torch.random.get_rng_state())
        known = self._recall(key)
        if known is None:
            func(*args, **(kwargs or {}))
            self._remember(key, tensor.detach().clone(), torch.random.get_rng_state())
            return tensor
        result, after = known
        with torch.no_grad():
            tensor.copy_(result)
        torch.random.set_rng_state(after)
        return tensor

    def _recall(self, key: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
            return self._results.get(key)

    def _remember(self, key: tuple[Any, ...], result: Tensor, after: Tensor) -> None:
        with self._lock:
            if key not in self._results:
                self._bytes += result.nbytes
            self._results[key] = result, after
            while self._bytes > LIMIT:
                self._bytes -= self._results.popitem(last=False)[1][0].nbytes


def _draw_of(function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> tuple[Any, _Draw | None]:
    """Return the tensor and the call, if it draws a tensor on the CPU from the global generator; otherwise None."""
    others = dict(options)
    tensor = others.pop("tensor", None) if not args else args[0]
    if (
        function not in DRAWING
        or not isinstance(tensor, Tensor)
        or tensor.device.type != "cpu"
        or not tensor.is_contiguous()
        or others.pop("generator", None) is not None
    ):
        return tensor, None
    return tensor, _Draw(function, tuple(args[1:]), others, tensor.shape, tensor.dtype)
