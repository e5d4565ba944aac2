"""Replay memories: policies that choose the slot each sample is written to, and the slots that can be replayed.

A policy computes indices only. It sees labels, task numbers and its random generator, never a model or an image. It can
therefore be simulated before training, and the same object works on a live stream: ``memory.offer(labels, task)``
returns the slots.

Public names are imported on first use, so that `contnorm ls` and the reading of records import no memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from contnorm.lazy_names import lazy_names

if TYPE_CHECKING:
    from contnorm.bench.memories.balanced import BalancedReservoir
    from contnorm.bench.memories.base import NOT_STORED, Memory, StreamInfo
    from contnorm.bench.memories.prs import PartitioningReservoir
    from contnorm.bench.memories.registry import MEMORIES, MemorySpec
    from contnorm.bench.memories.reservoir import Reservoir
    from contnorm.bench.memories.ring import Ring

__all__ = [
    "MEMORIES",
    "NOT_STORED",
    "BalancedReservoir",
    "Memory",
    "MemorySpec",
    "PartitioningReservoir",
    "Reservoir",
    "Ring",
    "StreamInfo",
]

_NAMES_BY_MODULE = {
    "contnorm.bench.memories.balanced": ("BalancedReservoir",),
    "contnorm.bench.memories.base": ("NOT_STORED", "Memory", "StreamInfo"),
    "contnorm.bench.memories.prs": ("PartitioningReservoir",),
    "contnorm.bench.memories.registry": ("MEMORIES", "MemorySpec"),
    "contnorm.bench.memories.reservoir": ("Reservoir",),
    "contnorm.bench.memories.ring": ("Ring",),
}
__getattr__, __dir__ = lazy_names(__name__, _NAMES_BY_MODULE)
