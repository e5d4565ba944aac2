"""Scores on matrices made by hand, each worked out on paper, and the identities between them."""

from __future__ import annotations

import math
import random

import pytest

from contnorm.bench.metrics.accuracy_matrix import SCORES, AccuracyMatrix, score

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


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("matrix", [FULL, SEEN], ids=["all measured", "seen only"])
def test_scores_by_hand(matrix: AccuracyMatrix, name: str) -> None:
    assert score(matrix, name) == pytest.approx(BY_HAND[name])


def test_scores_that_need_tasks_measured_before_they_are_learned() -> None:
    assert score(FULL, "fm_ctn") == pytest.approx(BY_HAND["fm"])
    assert score(FULL, "fwt") == pytest.approx(((12 - 8) + (15 - 5)) / 2)
    with pytest.raises(ValueError, match="task 1 was not measured after task 0"):
        score(SEEN, "fm_ctn")
    with pytest.raises(ValueError, match=r"needs the accuracies before the first task.*--set evaluate\.ahead=true"):
        score(SEEN, "fwt")


def test_literal_form_differs_where_a_task_was_better_before_it_was_learned() -> None:
    odd = AccuracyMatrix([[50, 99, 0], [50, 40, 0], [50, 40, 50]], [100, 100, 100])
    assert score(odd, "fm") == 0 and score(odd, "fm_ctn") == pytest.approx(59 / 2)


def test_every_task_counts_the_same_whatever_its_size() -> None:
    assert score(AccuracyMatrix([[1, None], [1, 500]], [2, 1000]), "acc") == pytest.approx(50)


def test_one_task_leaves_nothing_to_forget() -> None:
    one = AccuracyMatrix([[7]], [10])
    assert score(one, "acc") == score(one, "la") == 70
    assert math.isnan(score(one, "fm")) and score(one, "fm_raptor") == 0


def test_identities_on_random_matrices() -> None:
    chance = random.Random(0)
    for _ in range(200):
        tasks = chance.randint(2, 8)
        total = [chance.randint(1, 300) for _ in range(tasks)]
        full = [[chance.randint(0, n) for n in total] for _ in range(tasks)]
        m = AccuracyMatrix(full, total)
        # The paper's three scores can't be told independently of each other.
        assert score(m, "la") - score(m, "acc") <= (tasks - 1) / tasks * score(m, "fm") + 1e-9
        assert score(m, "fm_raptor") == pytest.approx((tasks - 1) / tasks * score(m, "fm_mammoth") + _last(m) / tasks)
        assert score(m, "fm_mammoth") >= max(0, score(m, "fm")) - 1e-9
        assert score(m, "fm_first") == pytest.approx(-score(m, "bwt"))


def _last(m: AccuracyMatrix) -> float:
    column = [m.at(i, m.tasks - 1) for i in range(m.tasks)]
    return max(column) - column[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([[1, 2]], [5, 5]), "2 tasks need 2 rows of 2 counts, got 1 rows"),
        (([[6]], [5]), "6 right answers in row 0, task 0, of 5 samples"),
        (([[0]], [0]), r"every task needs test samples, got total=\[0\]"),
    ],
)
def test_what_is_no_matrix_is_named(arguments: tuple[list[list[int]], list[int]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AccuracyMatrix(*arguments)


def test_unknown_score_is_named() -> None:
    with pytest.raises(ValueError, match=r"unknown score 'forgetting'. There are acc, fm, la"):
        score(FULL, "forgetting")
    assert len(SCORES) == 11
