"""Base class of memories, the table of filled slots, and draws of slots without replacement."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.config.schema import MemoryConfig

__all__ = [
    "NOT_STORED",
    "Memory",
    "SlotError",
    "SlotTable",
    "Slots",
    "StreamInfo",
    "checked_slots",
    "draw_slots",
    "draw_slots_batched",
]

NOT_STORED = -1  # slot of a sample that is not stored
MAX_CAPACITY = 10**9  # as of the setting memory.size

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


class SlotError(ValueError):
    """A memory returned slots that can't be used."""


class Memory:
    """A policy over ``capacity`` slots. A subclass defines ``offer``, and ``setup`` if it has state.

    ``offer`` receives samples in the order of their arrival and returns the slot of each. A later sample overwrites an
    earlier one in the same slot, also within one call. ``readable`` returns the slots that can be replayed now. This
    class checks the slots that ``offer`` returns and records which are filled.

    An object that is built with its size alone, such as ``Ring(50)``, describes the memory of a run: `bench.run` makes
    a copy for each seed and calls ``bind``. An object that is used directly needs no ``bind`` if its arguments say all.

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
    _is_of_package: ClassVar[bool] = False  # its ``offer`` returns new and valid slots

    capacity: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._is_of_package = cls.__module__.rpartition(".")[0] == __package__
        if cls.offer is not Memory.offer and _RECORDED not in vars(cls.offer):  # its own, or of a mixin
            cls.offer = _recorded(cls.offer)  # type: ignore[method-assign, assignment]
        if "readable" in vars(cls):
            cls.readable = _checked(cls.readable)  # type: ignore[method-assign]

    def __init__(self, size: int, **settings: Any) -> None:
        declared = getattr(type(self), "Settings", None)
        if declared is None and settings:
            raise TypeError(f"{type(self).__name__}() got an unexpected setting {next(iter(settings))!r}.")
        self.size = self.capacity = size
        self.settings = None if declared is None else declared(**settings)
        self.stream: StreamInfo | None = None
        self.generator: np.random.Generator = np.random.default_rng()
        self._own_overrides = {f"memory.{name}": value for name, value in settings.items()}
        self._table: SlotTable | None = None  # None until the first use
        self._is_offering = False

    @classmethod
    def from_config(cls, config: MemoryConfig) -> Self:
        """Build a memory from the settings of a run."""
        return cls(config.size, **dict(config.options))

    @property
    def overrides(self) -> Mapping[str, object]:
        """The settings of a run with this memory, by dotted key."""
        return {**({"memory.kind": self.name} if self.name else {}), "memory.size": self.size, **self._own_overrides}

    def __repr__(self) -> str:
        """Return the call that makes this memory; the class alone if a subclass has not called ``__init__``.

        Example:
            >>> Memory(50)
            Memory(50)
        """
        if "_own_overrides" not in self.__dict__:
            return f"{type(self).__name__}()"
        own = {key: value for key, value in self.overrides.items() if key not in ("memory.kind", "memory.size")}
        settings = [f"{key.removeprefix('memory.')}={value!r}" for key, value in own.items()]
        return f"{type(self).__name__}({', '.join([repr(self.size), *settings])})"

    def bind(self, stream: StreamInfo, generator: np.random.Generator) -> Self:
        """Set the stream and the random generator, call ``setup``, and return the memory."""
        if self._table is not None:
            raise ValueError(f"{type(self).__name__}: is in use already, so it can't be bound. Build a new one.")
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
        return self._prepare().readable(before_task)

    def _prepare(self) -> SlotTable:
        """Return the table of filled slots; on the first call, after ``setup``."""
        if self._table is None:
            self.setup()
            if type(self.capacity) is not int or not 1 <= self.capacity <= MAX_CAPACITY:
                raise SlotError(
                    f"its capacity is {self.capacity!r}. Set it to an int from 1 to {MAX_CAPACITY:,}, the number of "
                    f"slots."
                )
            self._table = SlotTable(self.capacity)
        return self._table


_RECORDED = "records_slots"  # attribute of a wrapped offer
Offer: TypeAlias = "Callable[[Any, NDArray[np.int64], int], Slots]"


def _recorded(offer: Offer) -> Offer:
    """Wrap the ``offer`` of a subclass: check its slots and record that they are filled."""

    @functools.wraps(offer)
    def checked_offer(self: Memory, labels: NDArray[np.int64], task: int) -> Slots:
        if self._is_offering:  # a subclass calls the offer of its base class
            return offer(self, labels, task)
        table = self._prepare()
        self._is_offering = True
        try:
            returned = offer(self, labels, task)
        finally:
            self._is_offering = False
        slots = returned
        if not self._is_of_package:  # those need no checks, which take half of the time of a plan
            slots = checked_slots(returned, table.capacity, "offer()", NOT_STORED)  # setup alone sets the capacity
            if len(slots) != len(labels):
                raise SlotError(f"offer() returned {len(slots)} slots for {len(labels)} samples. Return one for each.")
        table.write(slots[slots != NOT_STORED], task)
        return slots

    vars(checked_offer)[_RECORDED] = True
    return checked_offer


def _checked(readable: Callable[..., Slots]) -> Callable[..., Slots]:
    """Wrap the ``readable`` of a subclass: check that the slots can be replayed."""

    @functools.wraps(readable)
    def checked_readable(self: Memory, before_task: int | None = None) -> Slots:
        slots = checked_slots(readable(self, before_task), self.capacity, "readable()", 0)
        if not np.isin(slots, Memory.readable(self, before_task)).all() or len(np.unique(slots)) < len(slots):
            raise SlotError(
                f"readable(before_task={before_task}) returned {slots.tolist()}. Return each slot once, and only slots "
                f"of super().readable(before_task)."
            )
        return slots

    return checked_readable


def checked_slots(returned: object, capacity: int, call: str, lowest: int) -> Slots:
    """Return the slots that a method of a memory returned, as a new int64 array.

    Raises:
        SlotError: If they are no integers in one dimension from ``lowest`` to ``capacity - 1``.

    Example:
        >>> checked_slots([3, -1], capacity=3, call="offer()", lowest=-1)
        Traceback (most recent call last):
        contnorm.bench.memories.base.SlotError: offer() returned slot 3. Slots are 0 to 2, or -1 for a sample that ...
    """
    try:
        slots = np.asarray(returned)
    except ValueError:  # rows of different lengths
        slots = np.empty((0, 0))
    if slots.ndim != 1 or (len(slots) and slots.dtype.kind not in "iu"):
        shown = f"an array of {slots.dtype} of shape {slots.shape}" if isinstance(returned, np.ndarray) else None
        raise SlotError(
            f"{call} returned {shown or f'an object of type {type(returned).__name__}'}. Return one integer per slot, "
            f"such as a NumPy array of int64."
        )
    if len(slots) and not (slots.min() >= lowest and slots.max() < capacity):
        wrong = next(slot for slot in slots.tolist() if not lowest <= slot < capacity)
        not_stored = "" if lowest == 0 else f", or {NOT_STORED} for a sample that is not stored"
        raise SlotError(f"{call} returned slot {wrong}. Slots are 0 to {capacity - 1}{not_stored}.")
    return slots.astype(np.int64)  # a copy: the memory may change its array later


class SlotTable:
    """Track which slots hold a sample, and the task of each sample.

    The results of `readable` are cached: a plan calls it at every step, and most steps change no slot's task.

    Args:
        capacity: Number of slots.

    Example:
        >>> filled = SlotTable(4)
        >>> filled.write(np.array([0, 3]), task=1)
        >>> filled.write(np.array([2]), task=2)
        >>> filled.readable().tolist(), filled.readable(before_task=2).tolist()
        ([0, 2, 3], [0, 3])
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._task = np.full(capacity, -1, dtype=np.int64)  # -1: empty
        self._cache: dict[int | None, Slots] = {}

    def write(self, slots: Slots | int, task: int) -> None:
        """Record that samples of a task were written to these slots."""
        previous = self._task[slots]
        if (previous != task).any():
            # Overwriting filled slots does not change the list of all filled slots, only the lists by task.
            all_filled = self._cache.get(None) if (previous >= 0).all() else None
            self._task[slots] = task
            self._cache = {} if all_filled is None else {None: all_filled}

    def tasks_of(self, slots: Slots) -> Slots:
        """Return the task of the sample in each of these slots; -1 for empty slots."""
        return self._task[slots]

    def readable(self, before_task: int | None = None) -> Slots:
        """Return the filled slots; with ``before_task``, only those of earlier tasks.

        The array is cached, and therefore read-only.
        """
        if before_task not in self._cache:
            filled = self._task >= 0
            if before_task is not None:
                filled &= self._task < before_task
            self._cache[before_task] = np.flatnonzero(filled)
            self._cache[before_task].flags.writeable = False
        return self._cache[before_task]


def draw_slots(slots: Slots, size: int, generator: np.random.Generator) -> Slots:
    """Draw up to ``size`` of the slots, uniformly and without replacement.

    Example:
        >>> sorted(draw_slots(np.array([3, 5, 9]), 7, np.random.default_rng(0)).tolist())
        [3, 5, 9]
    """
    return generator.choice(slots, size=min(size, len(slots)), replace=False, shuffle=True)


# `draw_slots_batched` draws for many steps at once, bit-identical to calling `draw_slots` once per step. NumPy's
# ``Generator.choice`` uses Floyd's algorithm (Bentley & Floyd, 1987) followed by a shuffle. The number and the bounds
# of its random integers depend only on the number of slots. The integers of all steps are therefore drawn in one call,
# and each iteration of the algorithm is vectorized over the steps. For 2,500 steps of 10 draws, this is 5 to 8 times as
# fast on a CPU as one call per step.
#
# NumPy uses another algorithm to draw more than 1 / PART of more than MANY slots.
MANY = 10_000
PART = 50


def draw_slots_batched(slots: Sequence[Slots], size: int, generator: np.random.Generator) -> list[Slots]:
    """Draw up to ``size`` slots from each array, uniformly and without replacement.

    Example:
        >>> generator = np.random.default_rng(0)
        >>> [sorted(draw.tolist()) for draw in draw_slots_batched([np.arange(2), np.array([7])], 3, generator)]
        [[0, 1], [7]]
    """
    available = np.array([len(each) for each in slots], dtype=np.int64)
    taken = np.minimum(available, size)
    if ((available > MANY) & (taken > available // PART)).any():
        return [draw_slots(each, size, generator) for each in slots]
    positions = _draw_positions(available, taken, generator)
    return [each[row[:count]] for each, row, count in zip(slots, positions, taken.tolist(), strict=True)]


def _draw_positions(available: Slots, taken: Slots, generator: np.random.Generator) -> Slots:
    """Draw ``taken[i]`` of ``range(available[i])`` for each row i.

    Returns:
        (draws, max(taken)); in each row, the values after the first ``taken[i]`` are undefined.
    """
    max_taken = int(taken.max(initial=0))
    column = np.arange(max_taken)
    highest = (available - taken)[:, None] + column  # upper bound of each draw in Floyd's algorithm
    swaps = column[:0:-1]  # Fisher-Yates shuffle, from the last position to the second
    bounds = np.concatenate([highest, np.broadcast_to(swaps, (len(available), len(swaps)))], axis=1)
    is_used = np.concatenate([column, swaps]) < taken[:, None]
    draws = np.zeros(bounds.shape, dtype=np.int64)
    draws[is_used] = generator.integers(0, bounds[is_used], endpoint=True)
    positions = _floyd(draws[:, :max_taken], highest)
    row = np.arange(len(available))
    for step, last in enumerate(swaps.tolist(), max_taken):
        other = np.where(is_used[:, step], draws[:, step], last)
        positions[:, last], positions[row, other] = positions[row, other], positions[:, last].copy()
    return positions


def _floyd(draws: Slots, highest: Slots) -> Slots:
    """Replace each draw that repeats an earlier one of its row by its upper bound."""
    positions = np.empty_like(draws)
    for step in range(draws.shape[1]):
        is_repeated: NDArray[np.bool_] = (positions[:, :step] == draws[:, step, None]).any(axis=1)
        positions[:, step] = np.where(is_repeated, highest[:, step], draws[:, step])
    return positions
