"""Memories: which slot a sample of the stream is written to, and which slots are read again. Index arithmetic only.

A policy sees labels, task numbers and its own random generator, never a model or an image. So it can be run through
ahead of training, and the same object serves a live stream: ``memory.offer(labels, task)`` gives the slots.
"""

from contnorm.bench.memories.base import NOT_KEPT, Memory
from contnorm.bench.memories.prs import PartitioningReservoir
from contnorm.bench.memories.reservoir import Reservoir
from contnorm.bench.memories.ring import Ring

__all__ = ["MEMORIES", "NOT_KEPT", "Memory", "PartitioningReservoir", "Reservoir", "Ring"]

# By `memory.kind`: one line each for listings.
MEMORIES: dict[str, str] = {
    "ring": "the newest samples of each task, or of each class (memory.per)",
    "reservoir": "every sample seen so far with the same probability",
    "prs": "a share for each label, by a power of its frequency (memory.rho)",
}
