"""Build the memory of a run by name: a built-in one or a user's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from contnorm.bench.components import components, find_component, is_user_code, load_component, user_code_error
from contnorm.bench.config.schema import MemoryConfig, resolve_options
from contnorm.bench.memories import MEMORIES, Memory, StreamInfo
from contnorm.bench.memories.base import SlotError
from contnorm.errors import UserCodeError, UserError, unknown

__all__ = ["build_memory", "memory_errors", "resolve_memory", "unknown_memory"]


def build_memory(config: MemoryConfig, stream: StreamInfo, generator: np.random.Generator) -> Memory:
    """Build a memory by name, or from a user's file as ``path/to/file.py:Class``.

    Example:
        >>> build_memory(MemoryConfig("balanced", 20), StreamInfo(10, 5), np.random.default_rng(0)).capacity
        20
    """
    if config.kind in MEMORIES:
        return MEMORIES[config.kind].from_config(config).bind(stream, generator)
    value = _load(config)
    with memory_errors(config.kind):  # an object describes the memory: every run gets a copy of it
        memory = copy.deepcopy(value) if isinstance(value, Memory) else value.from_config(config)
        return memory.bind(stream, generator)


def resolve_memory(config: MemoryConfig) -> MemoryConfig:
    """Check a user's memory and add the defaults of its own settings; built-in memories are returned as they are."""
    if config.kind in MEMORIES:
        return config
    return replace(config, options=resolve_options("memory", config, _load(config)))


def unknown_memory(name: str) -> UserError:
    """Return the error for an unknown name of a memory."""
    known = [component.name for component in components("memory")]
    return unknown("memory.kind", name, [*MEMORIES, *known, "path/to/file.py:Class"])


def _load(config: MemoryConfig) -> Any:
    """Return the class or object of a user's memory."""
    if not is_user_code(config.kind) and find_component("memory", config.kind) is None:
        raise unknown_memory(config.kind)
    value = load_component("memory", config.kind, config.code)
    if not issubclass(value if isinstance(value, type) else type(value), Memory):
        raise UserError(f"memory {config.kind!r}: is not a subclass of contnorm.bench.Memory.")
    return value


@contextmanager
def memory_errors(name: str) -> Iterator[None]:
    """Turn errors of a user's memory into one line."""
    try:
        yield
    except SlotError as error:
        raise UserCodeError(f"memory {name!r}: {error}") from error
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise user_code_error(error, f"memory {name!r}", "while the plan of the run was made") from error
