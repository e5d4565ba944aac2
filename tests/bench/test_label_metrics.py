"""Multi-label scores beside scikit-learn's and torchmetrics', on random and on degenerate input; forgetting by hand."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from contnorm.bench.label_metrics import (
    LABEL_SCORES,
    LabelMatrix,
    LabelStats,
    average_precision,
    c_f1,
    label_score,
    mean_ap,
    normalized_forgetting,
    o_f1,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "long-tail.md"
Inputs = tuple[NDArray[np.float64], NDArray[np.int64]]


CASES = [
    "random",
    "rare labels",
    "a class without a positive",
    "a class with positives only",
    "nothing predicted",
    "all predicted",
    "one image",
    "ties",
    "one class",
]


def made(name: str) -> Inputs:
    """Scores and targets of one of the cases."""
    chance = np.random.default_rng(sum(map(ord, name)))
    scores, targets = chance.normal(size=(60, 7)), (chance.random((60, 7)) < 0.3).astype(np.int64)
    if name == "rare labels":
        targets = (chance.random((60, 7)) < 0.03).astype(np.int64)
        targets[0, 0] = 1
    if name.startswith("a class"):
        targets[:, 2] = name.endswith("only")
    scores += {"nothing predicted": -100, "all predicted": 100}.get(name, 0)
    if name == "one image":
        scores, targets = scores[:1], np.array([[1, 0, 0, 1, 1, 0, 0]])
    if name == "ties":
        scores = scores.round()
    return (scores[:, :1], targets[:, :1]) if name == "one class" else (scores, targets)


@pytest.mark.slow
@pytest.mark.parametrize("group", [None, [0, 3, 5]], ids=["all classes", "a group"])
@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_scikit_learn(case: str, group: list[int] | None) -> None:
    oracle = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    scores, targets = made(case)
    group = group if group is None or targets.shape[1] > 5 else [0]
    stats = LabelStats.of(scores, targets)
    kept = [c for c in (range(targets.shape[1]) if group is None else group) if targets[:, c].any()]
    t, p = targets[:, kept], (scores[:, kept] > 0).astype(int)
    if len(kept) == 1:  # scikit-learn takes one column for a binary problem with two classes
        precision, recall, micro = (
            getattr(oracle, f"{name}_score")(t[:, 0], p[:, 0], zero_division=0)
            for name in ("precision", "recall", "f1")
        )
    else:
        precision, recall = (
            getattr(oracle, f"{name}_score")(t, p, average="macro", zero_division=0) for name in ("precision", "recall")
        )
        micro = oracle.f1_score(t, p, average="micro", zero_division=0)
    macro = 2 * precision * recall / (precision + recall) if precision + recall else 0
    ap = oracle.average_precision_score(t, scores[:, kept], average="macro")
    assert c_f1(stats, group) == pytest.approx(100 * macro, abs=1e-10)
    assert o_f1(stats, group) == pytest.approx(100 * micro, abs=1e-10)
    assert mean_ap(stats, group) == pytest.approx(100 * ap, abs=1e-6), "kept to eight decimals"


def test_average_precision_of_each_class_has_ties_found_together() -> None:
    """By a plain loop over thresholds, where many scores are the same: how they happen to lie must not matter."""
    chance = np.random.default_rng(1)
    scores, targets = chance.integers(0, 4, (40, 5)).astype(np.float32), chance.random((40, 5)) < 0.4

    def plain(s: NDArray[np.float32], y: NDArray[np.bool_]) -> float:
        total, before = 0.0, 0.0
        for threshold in sorted(set(s.tolist()), reverse=True):
            taken = s >= threshold
            recall = y[taken].sum() / y.sum()
            total += (recall - before) * y[taken].mean()
            before = recall
        return total

    by_hand = [plain(scores[:, c], targets[:, c]) for c in range(5)]
    assert average_precision(scores, targets).tolist() == pytest.approx(by_hand, rel=1e-12)
    shuffled = chance.permutation(40)
    again = average_precision(scores[shuffled], targets[shuffled])
    assert again.tolist() == pytest.approx(by_hand, rel=1e-12)


def test_a_class_that_no_image_has_does_not_count_whatever_is_said_of_it() -> None:
    scores, targets = made("a class without a positive")
    quiet, loud = scores.copy(), scores.copy()
    quiet[:, 2], loud[:, 2] = -5, 5
    a, b = LabelStats.of(quiet, targets), LabelStats.of(loud, targets)
    assert a != b and a.ap[2] is None
    for score in (c_f1, o_f1, mean_ap):
        assert score(a) == score(b)
        assert math.isnan(score(a, [2]))


def test_what_is_counted_reads_back_as_it_was_written() -> None:
    for case in CASES:
        stats = LabelStats.of(*made(case))
        assert LabelStats.from_json(json.loads(json.dumps(stats.to_json()))) == stats
        some = LabelMatrix([[stats, None], [stats, stats]], [stats, stats])
        assert LabelMatrix.from_json(json.loads(json.dumps(some.to_json()))) == some


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tp": "3 0"}, "tp=3, predicted=2, positive=2, .* in 3 images"),
        ({"positive": "2 1"}, "positive=1, ap=None"),
        ({"ap": "nan -"}, "ap=nan"),
        ({"ap": "0.5"}, "shorter"),
        ({"tp": "one 0"}, "invalid literal"),
    ],
)
def test_counts_that_make_no_sense_are_refused(changed: dict[str, str], said: str) -> None:
    raw = LabelStats(3, (1, 0), (2, 1), (2, 0), (0.75, None)).to_json()
    with pytest.raises(ValueError, match=said):
        LabelStats.from_json({**raw, **changed})


def test_forgetting_and_its_special_cases_by_hand() -> None:
    assert normalized_forgetting([60, 80, 20]) == 75, "the best need not be the first"
    assert normalized_forgetting([20, 80]) == -300, "the end is no best"
    assert normalized_forgetting([30, 0]) == 100
    assert normalized_forgetting([0, 0, 0]) == 100, "never known counts as forgotten"
    assert normalized_forgetting([0, 0, 12.5]) == -12.5, "known only at the end counts as gained"
    with pytest.raises(ValueError, match="needs a value before the last"):
        normalized_forgetting([50])


def one(right: int, other: int | None = None) -> LabelStats:
    """Ten images of class 0, so many found; and ten of class 1, or none."""
    second = (0, 0, 0, None) if other is None else (other, 10, 10, other / 10)
    return LabelStats(20, (right, second[0]), (10, second[1]), (10, second[2]), (right / 10, second[3]))


def test_forgetting_of_a_run_leaves_out_the_last_task_and_tasks_without_the_group() -> None:
    own = [
        [one(8), one(9, 9), one(0)],
        [one(9), one(6, 4), one(1)],
        [one(6), one(3, 5), one(2)],
    ]
    seen = [[stats if j <= i else None for j, stats in enumerate(row)] for i, row in enumerate(own)]
    matrix = LabelMatrix(seen, [one(7), one(7, 3), one(7, 4)])
    of_class_0 = (100 * (9 - 6) / 9 + 100 * (6 - 3) / 6) / 2
    for name in ("fm_c_f1", "fm_o_f1", "fm_map"):
        assert label_score(matrix, name, [0]) == pytest.approx(of_class_0)
        assert label_score(matrix, name, [1]) == pytest.approx(100 * (4 - 5) / 4), "only task 1 has it"
        assert label_score(LabelMatrix(own, matrix.tally), name, [0]) == pytest.approx(of_class_0), (
            "from its own row on"
        )
        assert math.isnan(label_score(matrix, name, []))
    assert label_score(matrix, "o_f1") == pytest.approx(100 * 11 / 20)
    assert label_score(matrix, "map", [1]) == pytest.approx(40)
    with pytest.raises(ValueError, match=r"unknown score 'f1'\. There are c_f1, o_f1, map, fm_c_f1"):
        label_score(matrix, "f1")


def test_one_task_leaves_nothing_to_forget() -> None:
    assert math.isnan(label_score(LabelMatrix([[one(5)]], [one(5)]), "fm_map"))


def test_a_matrix_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a tally of 1 needs 1 rows of 1, got 0 rows"):
        LabelMatrix([], [one(1)])
    with pytest.raises(ValueError, match="every task needs to be measured from when it was learned on"):
        LabelMatrix([[one(1), None], [None, one(1)]], [one(1), one(1)])
    with pytest.raises(ValueError, match=r"all must be of the same classes, got \[1, 2\]"):
        LabelMatrix([[one(1)]], [LabelStats(1, (0,), (0,), (1,), (1.0,))])


def test_the_page_shows_the_numbers_that_are_computed() -> None:
    """The code on the page runs in the tests of the docs; here the tables are read and worked out again."""
    page = PAGE.read_text()
    rows = re.findall(r"^\| (\d) \| (-?\d\.\d) (\d) \| (-?\d\.\d) (\d) \| (-?\d\.\d) (\d) \|$", page, re.MULTILINE)
    values = np.array([[float(cell) for cell in row[1:]] for row in rows])
    assert values.shape == (4, 6)
    stats = LabelStats.of(values[:, ::2], values[:, 1::2])
    for name, score in (("C-F1", c_f1), ("O-F1", o_f1), ("mAP", mean_ap)):
        assert re.search(rf"\*\*{name}\*\*.* = {score(stats):.1f}\.", page), f"{name} is {score(stats):.1f}"
    assert all(f"`{name}`" in page for name in LABEL_SCORES)
