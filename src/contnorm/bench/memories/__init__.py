"""Replay memories: policies that choose the slot each sample is written to, and the slots that can be replayed.

A policy computes indices only. It sees labels, task numbers and its random generator, never a model or an image. It can
therefore be simulated before training, and the same object works on a live stream: ``memory.offer(labels, task)``
returns the slots.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np

from contnorm.bench.components import load_component, user_code_errors
from contnorm.bench.config.schema import MemoryConfig, resolve_options
from contnorm.bench.memories.base import NOT_STORED, Memory, StreamInfo
from contnorm.bench.memories.prs import PartitioningReservoir
from contnorm.bench.memories.reservoir import BalancedReservoir, Reservoir
from contnorm.bench.memories.ring import Ring
from contnorm.errors import UserError

__all__ = [
    "MEMORIES",
    "NOT_STORED",
    "BalancedReservoir",
    "Memory",
    "PartitioningReservoir",
    "Reservoir",
    "Ring",
    "StreamInfo",
    "build_memory",
    "resolve_memory",
]

MEMORIES: dict[str, type[Memory]] = {
    memory.name: memory for memory in (Ring, Reservoir, PartitioningReservoir, BalancedReservoir)
}


def build_memory(config: MemoryConfig, stream: StreamInfo, generator: np.random.Generator) -> Memory:
    """Build a memory by name, or from a user's file as ``path/to/file.py:Class``.

    Example:
        >>> build_memory(MemoryConfig("balanced", 20), StreamInfo(10, 5), np.random.default_rng(0)).capacity
        20
    """
    if config.kind in MEMORIES:
        return MEMORIES[config.kind].from_config(config).bind(stream, generator)
    value = load_component("memory", config.kind, config.code)
    with user_code_errors(f"memory {config.kind!r}", "called with its settings"):
        memory = copy.deepcopy(value) if isinstance(value, Memory) else value.from_config(config)
        return memory.bind(stream, generator)


def resolve_memory(config: MemoryConfig) -> MemoryConfig:
    """Check a user's memory and add the defaults of its own settings; built-in memories are returned as they are."""
    if config.kind in MEMORIES:
        return config
    value = load_component("memory", config.kind, config.code)
    if not issubclass(value if isinstance(value, type) else type(value), Memory):
        raise UserError(f"memory {config.kind!r}: is not a subclass of contnorm.bench.Memory.")
    return replace(config, options=resolve_options("memory", config, value))
