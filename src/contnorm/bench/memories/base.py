"""Base class of memories, and draws of slots without replacement."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.config.schema import MemoryConfig

NOT_STORED = -1  # slot of a sample that is not stored

Slots: TypeAlias = "NDArray[np.int64]"


@dataclass(frozen=True)
class StreamInfo:
    """What a memory may know of its stream.

    Attributes:
        outputs: Number of outputs of the network. Labels are 0 to ``outputs - 1``.
        tasks: Number of tasks.
        multi_label: Whether labels are rows of 0 and 1.

    Example:
        >>> StreamInfo(outputs=10, tasks=5).multi_label
        False
    """

    outputs: int
    tasks: int
    multi_label: bool = False


class Memory:
    """A policy over ``capacity`` slots. A subclass defines ``offer``, and ``setup`` if it has state.

    ``offer`` receives samples in the order of their arrival and returns the slot of each. A later sample overwrites an
    earlier one in the same slot, also within one call. ``readable`` returns the slots that can be replayed now. This
    class checks the slots that ``offer`` returns and records which of them are filled.

    An object that is built with its size alone, such as ``Ring(50)``, describes the memory of a run: `bench.run` makes
    a copy for each seed and calls ``bind``. An object that is used directly needs no ``bind`` if its arguments say all.

    A built-in memory names the settings of `MemoryConfig` that it takes beside its size in ``keys``.

    Args:
        size: The setting ``memory.size``: the number of slots, unless ``setup`` sets ``capacity`` to another one.
        settings: Values of the class's own settings: fields of a dataclass ``Settings`` in the class.

    Attributes:
        name: Name of a memory of this package; empty for others.
        summary: Its one-line description for listings.
        multi_hot: Whether ``offer`` gets rows of 0 and 1, also on streams with one label per sample.
        supports_multi_label: Whether the memory works on streams whose samples have several labels.
        size: The setting ``memory.size``.
        capacity: Number of slots.
        settings: The object of ``Settings``; None if the class has no own settings.
        stream: Numbers of outputs and tasks of the stream; None before ``bind``.
        generator: Random generator. Draw from no other: runs with the same seed then have the same memory.

    Example:
        >>> class FirstIn(Memory):
        ...     def setup(self):
        ...         self.seen = 0
        ...     def offer(self, labels, task):
        ...         slots = np.arange(self.seen, self.seen + len(labels))
        ...         self.seen += len(labels)
        ...         return np.where(slots < self.capacity, slots, NOT_STORED)
        >>> memory = FirstIn(2)
        >>> memory.offer(np.array([5, 5, 7]), task=0).tolist(), memory.readable().tolist()
        ([0, 1, -1], [0, 1])
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    multi_hot: ClassVar[bool] = False
    supports_multi_label: ClassVar[bool] = True
    keys: ClassVar[tuple[str, ...]] = ()

    capacity: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls.offer, _RECORDED):  # its own, or of a mixin
            cls.offer = _recorded(cls.offer)  # type: ignore[method-assign]

    def __init__(self, size: int, **settings: Any) -> None:
        declared = getattr(type(self), "Settings", None)
        if declared is None and settings:
            raise TypeError(f"{type(self).__name__}() got an unexpected setting {next(iter(settings))!r}.")
        self.size = self.capacity = size
        self.settings = None if declared is None else declared(**settings)
        self.stream: StreamInfo | None = None
        self.generator: np.random.Generator = np.random.default_rng()
        self._own = settings
        self._task: Slots | None = None  # task of the sample in each slot, -1 if it is empty; None before ``setup``
        self._is_offering = False

    @classmethod
    def from_config(cls, config: MemoryConfig) -> Self:
        """Build a memory from the settings of a run."""
        return cls(config.size, **{key: getattr(config, key) for key in cls.keys}, **dict(config.options))

    @property
    def overrides(self) -> Mapping[str, object]:
        """The settings of a run with this memory, by dotted key."""
        named = {"memory.kind": self.name} if self.name else {}
        own = {key: getattr(self, key) for key in self.keys} | self._own
        return {**named, "memory.size": self.size, **{f"memory.{key}": value for key, value in own.items()}}

    def __repr__(self) -> str:
        """Return the call that makes this memory.

        Example:
            >>> Memory(50)
            Memory(50)
        """
        own = {key: getattr(self, key) for key in self.keys} | self._own
        settings = [f"{key}={value!r}" for key, value in own.items()]
        return f"{type(self).__name__}({', '.join([repr(self.size), *settings])})"

    def bind(self, stream: StreamInfo, generator: np.random.Generator) -> Self:
        """Set the stream and the random generator, call ``setup``, and return the memory."""
        self.stream, self.generator = stream, generator
        self._prepare()
        return self

    def setup(self) -> None:
        """Create the state of the memory. Called once, before the first sample; may set ``capacity``."""

    def offer(self, labels: NDArray[np.int64], task: int) -> Slots:
        """Return the slot of each sample, or ``NOT_STORED`` (-1). Labels are (B,) classes, or multi-hot (B, C)."""
        raise NotImplementedError(f"{type(self).__name__} does not define offer(labels, task).")

    def readable(self, before_task: int | None = None) -> Slots:
        """Return the filled slots; with ``before_task``, only those that hold samples of earlier tasks."""
        task = self._prepare() if self._task is None else self._task
        return np.flatnonzero(task >= 0 if before_task is None else (task >= 0) & (task < before_task))

    def _prepare(self) -> Slots:
        self.setup()
        self._task = np.full(self.capacity, -1, dtype=np.int64)
        return self._task


_RECORDED = "records_slots"  # attribute of a wrapped offer


def _recorded(offer: Callable[[Any, NDArray[np.int64], int], Slots]) -> Callable[..., Slots]:
    """Wrap the ``offer`` of a subclass: check its slots and record that they are filled."""

    @functools.wraps(offer)
    def checked_offer(self: Memory, labels: NDArray[np.int64], task: int) -> Slots:
        if self._is_offering:  # a subclass calls the offer of its base class
            return offer(self, labels, task)
        task_of = self._prepare() if self._task is None else self._task
        self._is_offering = True
        try:
            slots = np.array(offer(self, labels, task))  # a copy: the memory may change its array later
        finally:
            self._is_offering = False
        valid = slots.shape == (len(labels),) and (slots.dtype.kind in "iu" or len(slots) == 0)
        if not valid or ((slots < NOT_STORED) | (slots >= len(task_of))).any():
            raise ValueError(
                f"offer() returned {slots.tolist()} for {len(labels)} samples. Return the slot of each, an integer "
                f"from 0 to {len(task_of) - 1}, or {NOT_STORED} for a sample that is not stored."
            )
        task_of[slots[slots != NOT_STORED]] = task
        return slots

    vars(checked_offer)[_RECORDED] = True
    return checked_offer


def draw_slots(slots: Slots, size: int, generator: np.random.Generator) -> Slots:
    """Draw up to ``size`` of the slots, uniformly and without replacement.

    Example:
        >>> sorted(draw_slots(np.array([3, 5, 9]), 7, np.random.default_rng(0)).tolist())
        [3, 5, 9]
    """
    return generator.choice(slots, size=min(size, len(slots)), replace=False, shuffle=True)
