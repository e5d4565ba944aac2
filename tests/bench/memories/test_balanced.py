"""The class-balanced reservoir: counts of classes, and uniform samples within a class, over many seeds."""

import random
from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from contnorm import bench
from contnorm.bench.memories import NOT_STORED, BalancedReservoir, StreamInfo
from contnorm.bench.plan import make_plan, take_census


def content(memory: BalancedReservoir, labels: NDArray[np.int64]) -> list[int]:
    """Offer a stream and return the index of the sample in each slot."""
    held: dict[int, int] = {}
    for start in range(0, len(labels), 7):
        for offset, slot in enumerate(memory.offer(labels[start : start + 7], task=0).tolist()):
            if slot != NOT_STORED:
                held[slot] = start + offset
    return [held[slot] for slot in sorted(held)]


def make(size: int, seed: int) -> BalancedReservoir:
    return BalancedReservoir(size).bind(StreamInfo(outputs=10, tasks=1), np.random.default_rng(seed))


def simulate(labels: list[int], size: int, chance: random.Random) -> list[int]:
    """The published algorithm with lists and another generator; returns the indices of the stored samples."""
    stored: list[int] = []
    full: set[int] = set()
    for index, label in enumerate(labels):
        if len(stored) < size:
            stored.append(index)
            continue
        counts = Counter(labels[held] for held in stored)
        most = max(counts.values())
        full |= {known for known, count in counts.items() if count == most}
        if label not in full:
            candidates = [held for held in stored if counts[labels[held]] == most]
        elif chance.random() <= counts[label] / labels[: index + 1].count(label):
            candidates = [held for held in stored if labels[held] == label]
        else:
            continue
        stored[stored.index(chance.choice(candidates))] = index
    return stored


def test_classes_have_equal_shares_and_rare_classes_are_kept() -> None:
    """Water-filling: of 30 slots, the classes of 3 and 5 samples keep all, and the others share the remaining 22."""
    labels = np.repeat([0, 1, 2, 3], [300, 3, 5, 90])
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(len(labels))
        held = Counter(labels[order][content(make(30, seed), labels[order])].tolist())
        assert (held[1], held[2]) == (3, 5)
        assert held[0] + held[3] == 22 and abs(held[0] - held[3]) <= 1


def test_content_has_the_distribution_of_a_simple_simulation() -> None:
    labels = np.array([0, 0, 1, 0, 2, 0, 1, 1, 0, 2, 0, 0, 3, 1, 0, 1])
    runs = 1200
    ours, simple = np.zeros(len(labels)), np.zeros(len(labels))
    for seed in range(runs):
        ours[content(make(5, seed), labels)] += 1
        simple[simulate(labels.tolist(), 5, random.Random(seed))] += 1
    assert ours.sum() == simple.sum() == 5 * runs
    spread = np.sqrt((ours + simple).clip(1))
    assert np.abs((ours - simple) / spread).max() < 4, "each a difference of two binomial counts"
    assert ours[12] == simple[12] == runs, "class 3 is never the largest"


def test_balanced_memory_of_a_run_holds_equal_classes(arrays_of_two_sizes: bench.Stream) -> None:
    by_object = bench.run(arrays_of_two_sizes, memory=bench.BalancedReservoir(12), strategy="er", replay=4).config
    by_name = bench.run(arrays_of_two_sizes, memory="balanced", settings={"memory.size": 12}, replay=4).config
    by_class = bench.run(arrays_of_two_sizes, memory=bench.BalancedReservoir, settings={"memory.size": 12}, replay=4)
    assert by_object == by_name == by_class.config and by_name.memory.kind == "balanced"
    sequence = arrays_of_two_sizes.sequence()
    assert take_census(make_plan(by_name, sequence, 0, draws=1), sequence)["held"] == ["6 6 0 0", "3 3 3 3"]


@pytest.fixture
def arrays_of_two_sizes() -> bench.Stream:
    """Two tasks of two classes: one of 60 samples and one of 6."""
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1, 2, 3], [60, 6, 60, 6])
    x = rng.normal(size=(len(y), 5)) + y[:, None]
    return bench.Stream.from_arrays(x, y, x, y, tasks=2)
