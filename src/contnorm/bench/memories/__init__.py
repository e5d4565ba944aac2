"""Replay memories: policies that choose the slot each sample is written to, and the slots that can be replayed.

A policy computes indices only. It sees labels, task numbers and its random generator, never a model or an image. It can
therefore be simulated before training, and the same object works on a live stream: ``memory.offer(labels, task)``
returns the slots.
"""

from contnorm.bench.memories.base import NOT_STORED, Memory
from contnorm.bench.memories.prs import PartitioningReservoir
from contnorm.bench.memories.reservoir import Reservoir
from contnorm.bench.memories.ring import Ring

__all__ = ["MEMORIES", "NOT_STORED", "Memory", "PartitioningReservoir", "Reservoir", "Ring"]

# One-line summaries by `memory.kind`, shown in listings.
MEMORIES: dict[str, str] = {
    "ring": "the newest samples of each task, or of each class (memory.per)",
    "reservoir": "every sample seen so far with the same probability",
    "prs": "a share for each label, by a power of its frequency (memory.rho)",
}
