"""Scores of hand-worked matrices, and the identities between them."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from contnorm.bench import metrics
from contnorm.bench.metrics import AccuracyMatrix, score

# Three tasks of 100. Task 0 is best in row 1 and gains at the end over row 0; task 1 ends above its own start.
FULL = AccuracyMatrix(correct=[[80, 12, 10], [90, 70, 15], [60, 75, 85]], total=[100, 100, 100], before=[10, 8, 5])
SEEN = AccuracyMatrix(correct=[[80, None, None], [90, 70, None], [60, 75, 85]], total=[100, 100, 100])
BY_HAND = {
    "acc": (60 + 75 + 85) / 3,
    "la": (80 + 70 + 85) / 3,
    "fm": ((90 - 60) + (70 - 75)) / 2,
    "fm_facil": ((90 - 60) + (70 - 75)) / 2,
    "fm_mammoth": ((90 - 60) + (75 - 75)) / 2,
    "fm_raptor": ((90 - 60) + 0 + 0) / 3,
    "fm_first": ((80 - 60) + (70 - 75)) / 2,
    "bwt": ((60 - 80) + (75 - 70)) / 2,
    "aia": (80 + (90 + 70) / 2 + (60 + 75 + 85) / 3) / 3,
}


def test_fm_ctn_differs_if_a_task_was_better_before_it_was_learned() -> None:
    odd = AccuracyMatrix([[50, 99, 0], [50, 40, 0], [50, 40, 50]], [100, 100, 100])
    assert score(odd, "fm") == 0 and score(odd, "fm_ctn") == pytest.approx(59 / 2)


def test_acc_weights_tasks_equally() -> None:
    assert score(AccuracyMatrix([[1, None], [1, 500]], [2, 1000]), "acc") == pytest.approx(50)


def test_forgetting_of_one_task_is_nan() -> None:
    one = AccuracyMatrix([[7]], [10])
    assert score(one, "acc") == score(one, "la") == 70
    assert math.isnan(score(one, "fm")) and score(one, "fm_raptor") == 0


def test_score_identities_on_random_matrices() -> None:
    rng = random.Random(0)
    for _ in range(200):
        tasks = rng.randint(2, 8)
        total = [rng.randint(1, 300) for _ in range(tasks)]
        full = [[rng.randint(0, n) for n in total] for _ in range(tasks)]
        m = AccuracyMatrix(full, total)
        # The paper's three scores are not independent.
        assert score(m, "la") - score(m, "acc") <= (tasks - 1) / tasks * score(m, "fm") + 1e-9
        assert score(m, "fm_raptor") == pytest.approx((tasks - 1) / tasks * score(m, "fm_mammoth") + _last(m) / tasks)
        assert score(m, "fm_mammoth") >= max(0, score(m, "fm")) - 1e-9
        assert score(m, "fm_first") == pytest.approx(-score(m, "bwt"))


def _last(m: AccuracyMatrix) -> float:
    column = [m.at(i, m.tasks - 1) for i in range(m.tasks)]
    return max(column) - column[-1]


PLAIN = [[80, None, None], [90, 70], [60, 75, 85]]
ROWS_OF_FULL = [[80, 12, 10], [90, 70, 15], [60, 75, 85]]
FUNCTIONS: dict[str, Callable[..., float]] = {
    "acc": metrics.average_accuracy,
    "la": metrics.learning_accuracy,
    "aia": metrics.average_incremental_accuracy,
    "bwt": metrics.backward_transfer,
    "fm": metrics.forgetting,
    "fm_facil": lambda matrix: metrics.forgetting(matrix, "facil"),
    "fm_mammoth": lambda matrix: metrics.forgetting(matrix, "max"),
    "fm_raptor": lambda matrix: metrics.forgetting(matrix, definition="max_all_tasks"),
    "fm_first": lambda matrix: metrics.forgetting(matrix, "after_learning"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "matrix",
    [PLAIN, ROWS_OF_FULL, np.array([[80, np.nan, np.nan], [90, 70, np.nan], [60, 75, 85]]), SEEN, FULL],
    ids=["lists", "full lists", "array", "counts", "full counts"],
)
def test_scores_by_hand(matrix: Any, name: str) -> None:
    assert FUNCTIONS[name](matrix) == pytest.approx(BY_HAND[name])
    if isinstance(matrix, AccuracyMatrix):
        assert score(matrix, name) == FUNCTIONS[name](matrix)
    if isinstance(matrix, np.ndarray):
        assert FUNCTIONS[name](matrix / 100) == pytest.approx(BY_HAND[name] / 100)


def test_scores_of_unlearned_tasks_need_measurements() -> None:
    fwt = ((12 - 8) + (15 - 5)) / 2
    for matrix in (FULL, ROWS_OF_FULL):
        assert metrics.forgetting(matrix, "literal") == pytest.approx(BY_HAND["fm"])
        assert metrics.forward_transfer(matrix, [10, 8, 5]) == pytest.approx(fwt)
    assert score(FULL, "fm_ctn") == pytest.approx(BY_HAND["fm"]) and score(FULL, "fwt") == pytest.approx(fwt)
    for seen in (SEEN, PLAIN):
        with pytest.raises(ValueError, match=r"task 1 after task 0 is missing.*evaluate\.ahead=true"):
            metrics.forgetting(seen, "literal")
    for untrained in (None, [1, 2]):
        with pytest.raises(ValueError, match="untrained network on every task"):
            metrics.forward_transfer(ROWS_OF_FULL, untrained)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([], "expected a .tasks, tasks. matrix"),
        ([[1.0, 2.0]], r"got rows of \[2\]"),
        ([[101.0]], "101.0 is not from 0 to 100"),
        ([[90.0], [60.0]], "task 1 after task 1 is missing"),
    ],
)
def test_invalid_accuracies_are_refused(matrix: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.average_accuracy(matrix)


@pytest.mark.parametrize("counts", [([[1, 2]], [5, 5]), ([[6]], [5]), ([[0]], [0])])
def test_invalid_counts_are_refused(counts: tuple[list[list[int]], list[int]]) -> None:
    with pytest.raises(ValueError, match="AccuracyMatrix: "):
        AccuracyMatrix(*counts)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'mean'.*paper, literal, facil, max"):
        metrics.forgetting(PLAIN, "mean")
    with pytest.raises(ValueError, match=r"unknown score 'forgetting'. There are acc, aia, fm, la"):
        score(FULL, "forgetting")
