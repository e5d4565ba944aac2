"""The laws of the memories: capacity, inclusion, exact content, shares; and live use equal to planned use."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from contnorm.bench.memories import NOT_STORED, Memory, PartitioningReservoir, Reservoir, Ring
from tests.datasets import long_tailed_labels

LABELS = 6


def one_hot(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.eye(LABELS, dtype=np.int64)[labels]


MAKERS: dict[str, Callable[[], Memory]] = {
    "ring per task": lambda: Ring(7, 4),
    "ring per class": lambda: Ring(5, LABELS, per="class"),
    "reservoir": lambda: Reservoir(20, np.random.default_rng(3)),
    "prs": lambda: PartitioningReservoir(20, LABELS, 0.1, np.random.default_rng(3)),
    "prs, with its quirk": lambda: PartitioningReservoir(20, LABELS, 0.1, np.random.default_rng(3), quirk=True),
}
every_memory = pytest.mark.parametrize("name", MAKERS)


def stream(samples: int = 300, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, LABELS, samples)


def feed(memory: Memory, labels: NDArray[np.int64], sizes: list[int], per_task: int = 80) -> NDArray[np.int64]:
    """Offer a stream in pieces of these sizes, over and over; the slots of all samples."""
    given = one_hot(labels) if isinstance(memory, PartitioningReservoir) else labels
    slots, at, turn = [], 0, 0
    while at < len(labels):
        end = min(len(labels), at + sizes[turn % len(sizes)], (at // per_task + 1) * per_task)
        slots.append(memory.offer(given[at:end], task=at // per_task))
        at, turn = end, turn + 1
    return np.concatenate(slots)


@every_memory
def test_offers_by_sample_equal_offers_by_batch(name: str) -> None:
    live, planned = (feed(MAKERS[name](), stream(), sizes) for sizes in ([1], [10, 3, 17]))
    np.testing.assert_array_equal(live, planned)


@every_memory
def test_slots_are_within_capacity_and_readable_slots_were_written(name: str) -> None:
    memory = MAKERS[name]()
    slots = feed(memory, stream(), [10])
    kept = set(slots.tolist()) - {NOT_STORED}
    assert kept <= set(range(memory.capacity))
    assert set(memory.readable().tolist()) == kept
    task_of = {int(slot): i // 80 for i, slot in enumerate(slots) if slot != NOT_STORED}  # the last writer wins
    assert set(memory.readable(before_task=2).tolist()) == {slot for slot, task in task_of.items() if task < 2}


def test_ring_per_task_holds_the_last_samples() -> None:
    memory = Ring(7, 4)
    slots = feed(memory, stream(), [10, 3])
    content = {int(slot): i for i, slot in enumerate(slots)}
    for task in range(3):
        assert sorted(content[s] for s in range(task * 7, task * 7 + 7)) == list(range(task * 80 + 73, task * 80 + 80))


def test_ring_per_class_holds_the_last_samples() -> None:
    memory, labels = Ring(5, LABELS, per="class"), stream()
    content = {int(slot): i for i, slot in enumerate(feed(memory, labels, [10]))}
    for label in range(LABELS):
        assert (
            sorted(content[s] for s in range(label * 5, label * 5 + 5)) == np.flatnonzero(labels == label)[-5:].tolist()
        )


def test_reservoir_stores_samples_with_equal_probability() -> None:
    """Over many seeds each of 60 samples is kept capacity / 60 of the time: chi-square, one test at 1 in 1,000."""
    kept = np.zeros(60)
    runs = 4000
    for seed in range(runs):
        slots = Reservoir(12, np.random.default_rng(seed)).offer(np.zeros(60, dtype=np.int64), 0)
        last = {int(slot): i for i, slot in enumerate(slots) if slot != NOT_STORED}
        kept[list(last.values())] += 1
    expected = runs * 12 / 60
    assert kept.sum() == runs * 12
    # Kept or not, without replacement: the statistic is scaled by the finite population.
    statistic = ((kept - expected) ** 2 / expected).sum() / (1 - 12 / 60) * (59 / 60)
    assert stats.chi2.sf(statistic, 59) > 1e-3


class PlainPRS:
    """The algorithm once more, sample by sample in loops, as the protocol words it."""

    def __init__(self, capacity: int, rho: float, seed: int, quirk: bool) -> None:
        self.capacity, self.rho, self.quirk = capacity, rho, quirk
        self.chance = np.random.default_rng(seed)
        self.memory: list[set[int]] = []
        self.held: Counter[int] = Counter()
        self.n: dict[int, int] = {}
        self.p: dict[int, float] = {}
        self.seen = 0
        self.evicted = 0

    def offer(self, sample: set[int]) -> int:
        slot = NOT_STORED
        if self.seen < self.capacity:
            slot = len(self.memory)
            self.memory.append(sample)
        elif self.chance.random() < self.admission(sample):
            slot = self.displaced()
            self.held -= Counter(self.memory[slot])  # labels of which none is left go with it
            self.memory[slot] = sample
            self.evicted += 1
        if slot != NOT_STORED:
            self.held += Counter(sample)
        self.seen += 1
        for i in sample:
            self.n[i] = self.n.get(i, 0) + 1
        norm = sum(self.n[j] ** self.rho for j in sorted(self.held))
        self.p.update({i: self.n[i] ** self.rho / norm for i in self.held})
        return slot

    def admission(self, sample: set[int]) -> float:
        counts = {i: self.n.get(i, 0) for i in sample}
        least = min(counts.values())
        weights = {i: np.exp(-(c - least)) for i, c in counts.items()}
        q = {i: 1.0 if c == 0 else min(1.0, self.capacity * self.p[i] / c) for i, c in counts.items()}
        return float(sum(weights[i] * q[i] for i in sample) / sum(weights.values()))

    def displaced(self) -> int:
        held = dict(sorted(self.held.items()))
        total = sum(held.values())
        delta = {i: held[i] - self.p[i] * total for i in held}
        top = max(delta.values())
        raised = np.array([np.exp(delta[i] - top) for i in held])
        label = self.chance.choice(list(held), p=raised / raised.sum())
        query = {i for i in held if delta[i] <= 0}
        carriers = [s for s, item in enumerate(self.memory) if label in item]
        fewest = min(len(self.memory[s] & query) for s in carriers)
        best, best_cost = None, float(self.capacity) if self.quirk else float("inf")
        candidates = [s for s in carriers if len(self.memory[s] & query) == fewest]
        for s in candidates:
            left = {i: held[i] - (i in self.memory[s]) for i in held}
            rest = sum(left.values())
            cost = sum(abs(left[i] - self.p[i] * rest) for i in left if left[i] > 0)
            if cost < best_cost - 1e-9:
                best, best_cost = s, cost
        return candidates[0] if best is None else best


@pytest.mark.parametrize(("rho", "quirk"), [(-0.03, True), (0.02, False)])
def test_prs_equals_plain_reference(rho: float, quirk: bool) -> None:
    """Over a stream on which hundreds of samples are displaced, each the one the plain version chooses."""
    rows = long_tailed_labels(2500, 30, tasks=5, seed=5)
    fast = PartitioningReservoir(150, 30, rho, np.random.default_rng(9), quirk=quirk)
    plain = PlainPRS(150, rho, 9, quirk)
    expected = [plain.offer(set(np.flatnonzero(row).tolist())) for row in rows]
    assert plain.evicted > 300
    np.testing.assert_array_equal(fast.offer(rows, 0), expected)


def test_slots_of_a_subclass_of_the_user_are_checked() -> None:
    class Wrong(Ring):
        def offer(self, labels: NDArray[np.int64], task: int) -> NDArray[np.int64]:
            return super().offer(labels, task) + 10

    assert Ring(2, rings=3).offer(np.zeros(2, dtype=np.int64), task=1).tolist() == [2, 3]
    with pytest.raises(ValueError, match=r"returned \[12, 13\]"):
        Wrong(2, rings=3).offer(np.zeros(2, dtype=np.int64), task=1)
