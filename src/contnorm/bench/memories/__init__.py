"""Replay memories: policies that choose the slot each sample is written to, and the slots that can be replayed.

A policy computes indices only. It sees labels, task numbers and its random generator, never a model or an image. It can
therefore be simulated before training, and the same object works on a live stream: ``memory.offer(labels, task)``
returns the slots.
"""

from __future__ import annotations

from contnorm.bench.memories.balanced import BalancedReservoir
from contnorm.bench.memories.base import NOT_STORED, Memory, StreamInfo
from contnorm.bench.memories.prs import PartitioningReservoir
from contnorm.bench.memories.reservoir import Reservoir
from contnorm.bench.memories.ring import Ring

__all__ = [
    "MEMORIES",
    "NOT_STORED",
    "BalancedReservoir",
    "Memory",
    "PartitioningReservoir",
    "Reservoir",
    "Ring",
    "StreamInfo",
]

MEMORIES: dict[str, type[Memory]] = {
    memory.name: memory for memory in (Ring, Reservoir, PartitioningReservoir, BalancedReservoir)
}
