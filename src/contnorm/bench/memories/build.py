"""Build the memory of a run by name: a built-in one or a user's, which is checked here and at each step."""

from __future__ import annotations

import copy
import importlib
import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from contnorm.bench.components import components, find_component
from contnorm.bench.config.own_settings import resolve_options
from contnorm.bench.config.schema import MemoryConfig
from contnorm.bench.lazy_numpy import NDArray, np
from contnorm.bench.memories.base import Memory, SlotError, Slots, StreamInfo, checked_slots
from contnorm.bench.memories.registry import MEMORIES
from contnorm.bench.user_code import is_user_code, load_user_code, user_code_error
from contnorm.errors import UserCodeError, UserError, unknown

__all__ = ["CheckedMemory", "build_memory", "global_generators", "resolve_memory", "unknown_memory"]


def build_memory(config: MemoryConfig, stream: StreamInfo, generator: np.random.Generator) -> Memory:
    """Build a memory by name, or from a user's file as ``path/to/file.py:Class``.

    Example:
        >>> build_memory(MemoryConfig("balanced", 20), StreamInfo(10, 5), np.random.default_rng(0)).capacity
        20
    """
    if config.kind in MEMORIES:
        memory = _import_target(MEMORIES[config.kind].target).from_config(config)
        return memory.bind(stream, generator)
    name, value = config.kind, _load(config.kind)
    try:
        # An object of the Python API describes the memory: every run gets a copy of it.
        memory = copy.deepcopy(value) if isinstance(value, Memory) else value.from_config(config)
        if not hasattr(memory, "_table"):
            raise UserError(f"memory {name!r}: its __init__ does not call super().__init__(size, **settings).")
        return memory.bind(stream, generator)
    except SlotError as error:
        raise UserCodeError(f"memory {name!r}: {error}") from error
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise user_code_error(error, "memory", name, "built with its settings") from error


def resolve_memory(config: MemoryConfig) -> MemoryConfig:
    """Check a user's memory and add the defaults of its own settings; built-in memories are returned as they are.

    Raises:
        UserError: If `build_memory` can't build it.
    """
    if config.kind in MEMORIES:
        return config
    return replace(config, options=resolve_options("memory", config, _load(config.kind)))


def unknown_memory(name: str) -> UserError:
    """Return the error for an unknown name of a memory."""
    known = [component.name for component in components("memory")]
    return unknown("memory.kind", name, [*MEMORIES, *known, "path/to/file.py:Class"])


def _import_target(target: str) -> type[Memory]:
    module, _, name = target.partition(":")
    memory: type[Memory] = getattr(importlib.import_module(module), name)
    return memory


def _load(name: str) -> Memory | type[Memory]:
    """Load a user's memory and check its class."""
    if not is_user_code(name) and find_component("memory", name) is None:
        raise unknown_memory(name)
    value = load_user_code(name, "memory")
    cls = value if isinstance(value, type) else type(value)
    if not issubclass(cls, Memory):
        raise UserError(f"memory {name!r}: is not a subclass of contnorm.bench.Memory.")
    if cls.offer is Memory.offer:
        raise UserError(f"memory {name!r}: does not define offer. Define offer(self, labels, task).")
    for method, arguments in (("offer", ("labels", "task")), ("readable", ("before_task",)), ("setup", ())):
        try:
            inspect.signature(getattr(cls, method)).bind("self", *arguments)
        except TypeError as error:
            call = f"{method}({', '.join(arguments)})"
            raise UserError(
                f"memory {name!r}: its {method} can't be called as {call}: {error}. Define "
                f"{method}({', '.join(('self', *arguments))})."
            ) from error
    for attribute in ("multi_hot", "supports_multi_label"):
        if type(getattr(cls, attribute)) is not bool:
            raise UserError(f"memory {name!r}: {attribute} = {getattr(cls, attribute)!r}. Use True or False.")
    if isinstance(value, Memory) and getattr(value, "_table", None) is not None:
        raise UserError(f"memory {name!r}: the object is in use already. Pass a new one, or its class.")
    return value  # type: ignore[return-value]


class CheckedMemory:
    """A user's memory, whose results are checked at each step.

    Args:
        memory: The memory, bound to its stream.
        name: Its name in the settings, for messages.

    Raises:
        UserCodeError: By its methods, for results that can't be used and for errors of the user's code.
    """

    def __init__(self, memory: Memory, name: str) -> None:
        self.memory, self.name = memory, name
        self.multi_hot, self.supports_multi_label = memory.multi_hot, memory.supports_multi_label
        self.capacity = memory.capacity
        self._step = -1
        self._samples = self._stored = 0
        self._has_readable = self._has_read = False

    def readable(self, before_task: int | None = None) -> Slots:
        """Return the slots that can be replayed at the next step."""
        self._step += 1
        call = "readable()" if before_task is None else f"readable(before_task={before_task})"
        with self._errors_at_step():
            slots = checked_slots(self.memory.readable(before_task), self.capacity, call, 0)
            self._check_filled(slots, call, before_task)
        self._has_readable = self._has_readable or len(Memory.readable(self.memory, before_task)) > 0
        self._has_read = self._has_read or len(slots) > 0
        return slots

    def offer(self, labels: NDArray[np.int64], task: int) -> Slots:
        """Return the slots of the samples of this step."""
        with self._errors_at_step():
            slots = self.memory.offer(labels, task)
        self._samples += len(slots)
        self._stored += int((slots >= 0).sum())
        return slots

    def check_replay(self) -> None:
        """Raise an error if nothing was stored, or nothing could be replayed, over the whole stream."""
        reason = ""
        if self._samples and not self._stored:
            reason = f"offer() returned -1 for all {self._samples} samples, so none is stored"
        elif self._has_readable and not self._has_read:
            reason = "readable() returned no slots at every step, so none is replayed"
        if reason:
            raise UserCodeError(f"memory {self.name!r}: {reason}. Use a strategy without replay for that.")

    def _check_filled(self, slots: Slots, call: str, before_task: int | None) -> None:
        tasks = self.memory._prepare().tasks_of(slots)
        if (tasks < 0).any():
            raise SlotError(f"{call} returned slot {slots[tasks < 0][0]}, which holds no sample.")
        if before_task is not None and (tasks >= before_task).any():
            late = int(np.argmax(tasks >= before_task))
            raise SlotError(f"{call} returned slot {slots[late]}, which holds a sample of task {tasks[late]}.")
        if len(slots) and np.bincount(slots).max() > 1:
            raise SlotError(f"{call} returned slot {np.bincount(slots).argmax()} more than once.")

    @contextmanager
    def _errors_at_step(self) -> Iterator[None]:
        try:
            yield
        except SlotError as error:
            raise UserCodeError(f"memory {self.name!r}: at step {self._step}, {error}") from error
        except (Exception, SystemExit) as error:
            raise user_code_error(error, "memory", self.name, f"at step {self._step}") from error


@contextmanager
def global_generators(seed: int) -> Iterator[None]:
    """Seed the global generators of Python and NumPy, which a user's memory may draw from; restores them at the end."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
