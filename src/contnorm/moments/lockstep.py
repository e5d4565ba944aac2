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

from contnorm.moments.pooling import NoLockstepError, PooledMoments, WeightGroups

# Each forward pass has a thread, and on a CPU each such thread has a team of OpenMP threads.
MOST_THREADS = 1024
# Activations alive at a norm layer, in multiples of its input: input, output, residual and the next layer's output.
ALIVE = 4


class StopForward(BaseException):
    """Ends a forward pass. A BaseException, so that no ``except Exception`` in the model catches it."""


def fits_lockstep(batches: int) -> bool:
    """Whether the number of batches is small enough for a thread each."""
    return batches * (1 if batches == 1 else torch.get_num_threads()) <= MOST_THREADS


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
        run: Callable[[nn.Module, Any], object],
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
        device = next((t.device for t in (*self.model.parameters(), *self.model.buffers())), torch.device("cpu"))
        self.room = _free_memory(device, self.processes) // 2
        with ExitStack() as hooks:
            for name, layer in self.layers.items():
                hooks.callback(layer.register_forward_pre_hook(self._hook(name), with_kwargs=True).remove)
            if self.count == 1:
                self.run(self.model, batches[0])
            else:
                self._run_all(batches, device)

    def _run_all(self, batches: Sequence[Any], device: torch.device) -> None:
        self.batons = [threading.Semaphore(0) for _ in range(self.count + 1)]  # the last one wakes this thread
        enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

        def run_one(index: int) -> None:
            self.batons[index].acquire()
            try:
                if self.error is None:
                    self.index = index
                    # A thread starts without this thread's gradient mode, autocast and CUDA stream.
                    with torch.no_grad(), torch.autocast(device.type, dtype, enabled), torch.cuda.stream(stream):
                        self.run(self.model, batches[index])
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

        threads = [threading.Thread(target=run_one, args=(index,), daemon=True) for index in range(self.count)]
        for thread in threads:
            thread.start()
        try:
            self.batons[0].release()
            self.batons[-1].acquire()
        except BaseException as error:  # an interrupt: the passes end at their next norm layer
            self.error = error
        finally:
            for baton in self.batons if self.error is not None else ():
                baton.release()
            for thread in threads:
                thread.join()
        if self.error is not None:
            raise self.error

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

        untraced: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
        return untraced


def _free_memory(device: torch.device, processes: int) -> int:
    """Return the free memory of a device, in bytes; 4 GiB where it is not known; of a CPU, the share."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", ()):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // processes
    return 4 << 30
