"""Registry of memories: names, classes and one-line summaries. It imports no memory, so that listing them is fast."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MEMORIES", "MemorySpec"]


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """Registry entry of a memory.

    Attributes:
        name: Name for ``--memory``: the setting ``memory.kind``.
        target: ``"module:Class"``.
        summary: One-line description for listings.
    """

    name: str
    target: str
    summary: str


MEMORIES: dict[str, MemorySpec] = {
    spec.name: spec
    for spec in (
        MemorySpec(
            "ring",
            "contnorm.bench.memories.ring:Ring",
            "the newest samples of each task, or of each class (memory.per)",
        ),
        MemorySpec(
            "reservoir",
            "contnorm.bench.memories.reservoir:Reservoir",
            "every sample seen so far with the same probability",
        ),
        MemorySpec(
            "prs",
            "contnorm.bench.memories.prs:PartitioningReservoir",
            "a share for each label, by a power of its frequency (memory.rho)",
        ),
        MemorySpec(
            "balanced",
            "contnorm.bench.memories.balanced:BalancedReservoir",
            "an equal share for each class, and a uniform sample of each",
        ),
    )
}
