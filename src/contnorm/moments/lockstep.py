"""Exact moments in one sweep: all batches advance together, from norm layer to norm layer.

Each batch has a forward pass of its own, in a thread of its own, and one of them runs at a time. At a norm layer a pass
stops until all batches have arrived and their pooled moments are written, so that every layer normalizes with the exact
moments of all batches. The arithmetic is that of one pass over the data for each layer, and so are the bits.

All batches are in memory at once, with the activations between two norm layers. Where that is too much, or where the
batches do not call the same layers once each in the same order, the sweep ends with `NoLockstepError`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from contnorm.moments.batches import Call, WeightGroups
from contnorm.moments.pooling import NoLockstepError, PooledMoments

__all__ = ["Lockstep", "StopForward", "first_input", "fits_lockstep"]

# Each forward pass has a thread, and on a CPU each such thread has a team of OpenMP threads.
MOST_THREADS = 1024
# Activations alive at a norm layer, in multiples of its input: input, output, residual and the next layer's output.
ALIVE = 4


class StopForward(BaseException):
    """Ends a forward pass. A BaseException, so that no ``except Exception`` in the model catches it."""


def fits_lockstep(batches: int | None) -> bool:
    """Whether the number of batches is known, and small enough for a thread each."""
    return batches is not None and batches * (1 if batches == 1 else torch.get_num_threads()) <= MOST_THREADS


def first_input(args: Any, kwargs: Any) -> Tensor:
    """Return the input of a layer, from the arguments of its call."""
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    return x


class Lockstep:
    """One sweep over batches, which measures the moments of all layers.

    Args:
        model: The model, in evaluation mode.
        layers: The layers to measure.
        run: A function that runs the model on a batch.
        settle: Called with the name and the pooled moments of a layer, which it writes.
        processes: The number of processes, which may share the memory of this machine.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: dict[str, nn.Module],
        run: Call,
        settle: Callable[[str, PooledMoments], None],
        processes: int = 1,
    ) -> None:
        self.model, self.layers, self.run, self.settle, self.processes = model, layers, run, settle, processes
        self.settled: set[str] = set()
        self.current: str | None = None  # the layer at which the batches gather
        self.pool = PooledMoments()
        self.index = 0  # of the batch whose forward pass runs
        self.error: BaseException | None = None
        self.batons: list[threading.Semaphore] = []

    def measure(self, batches: Sequence[Any], groups: Sequence[WeightGroups | None]) -> None:
        """Run all batches.

        Args:
            batches: The batches.
            groups: The samples of each batch by weight; None for a batch without weights.

        Raises:
            NoLockstepError: If the batches can't advance together. Moments may have been written.
        """
        self.groups, self.count = groups, len(batches)
        self.room = _free_memory(self.model, self.processes) // 2
        with ExitStack() as hooks:
            for name, layer in self.layers.items():
                hooks.callback(layer.register_forward_pre_hook(self._hook(name), with_kwargs=True).remove)
            if self.count == 1:
                self.run(self.model, batches[0])
            else:
                self._run_all(batches)

    def _run_all(self, batches: Sequence[Any]) -> None:
        self.batons = [threading.Semaphore(0) for _ in range(self.count + 1)]  # the last one wakes this thread
        state = _thread_state(self.model)
        threads = [
            threading.Thread(target=self._run_one, args=(index, batch, state), daemon=True)
            for index, batch in enumerate(batches)
        ]
        for thread in threads:
            thread.start()
        try:
            self.batons[0].release()
            self.batons[-1].acquire()
        except BaseException as error:  # an interrupt: the passes end at their next norm layer
            self.error = error
        finally:
            if self.error is not None:
                for baton in self.batons:
                    baton.release()
            for thread in threads:
                thread.join()
        if self.error is not None:
            raise self.error

    def _run_one(self, index: int, batch: Any, state: Callable[[], ExitStack]) -> None:
        self.batons[index].acquire()
        try:
            if self.error is None:
                self.index = index
                with state():
                    self.run(self.model, batch)
                if index == 0:
                    self.current = None
                elif self.current is not None:
                    raise NoLockstepError
        except StopForward:
            pass
        except BaseException as error:  # raised again by the thread that waits
            self.error = self.error or error
        finally:
            self.batons[index + 1 if self.error is None else -1].release()

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: Any, kwargs: Any) -> None:
            index = self.index
            x = first_input(args, kwargs)
            if index == 0:
                if name in self.settled or (self.count > 1 and ALIVE * x.nbytes * self.count > self.room):
                    raise NoLockstepError
                self.pool, self.current = PooledMoments(), name
            elif name != self.current:
                raise NoLockstepError
            self.pool.add_input(layer, x, self.groups[index])
            if index == self.count - 1:
                self.settle(name, self.pool)
                self.settled.add(name)
            if self.count > 1:
                self.batons[(index + 1) % self.count].release()
                self.batons[index].acquire()
                if self.error is not None:
                    raise StopForward
                self.index = index

        return hook


def _free_memory(model: nn.Module, processes: int) -> int:
    """Return the free memory of the model's device, in bytes; 4 GiB where it is not known; of a CPU, the share."""
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", ()):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // processes
    return 4 << 30


def _thread_state(model: nn.Module) -> Callable[[], ExitStack]:
    """Return a function that enters, in another thread, this thread's gradient mode, autocast and CUDA stream."""
    devices = {"cpu", *(t.device.type for t in (*model.parameters(), *model.buffers()))}
    casts = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices if d != "meta"}
    stream = torch.cuda.current_stream() if "cuda" in devices else None

    def enter() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.no_grad())
        for device, (enabled, dtype) in casts.items():
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        if stream is not None:
            stack.enter_context(torch.cuda.device(stream.device))
            stack.enter_context(torch.cuda.stream(stream))
        return stack

    return enter
