"""The rule of choice, and the search along one setting with functions in place of runs."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from contnorm.bench.grid import LineSearch, best_candidate, midpoint, next_value
from contnorm.errors import UserError


@dataclass(frozen=True)
class Candidate:
    lr: float
    mean: float
    eligible: bool = True


def choose(*candidates: Candidate, lower: bool = False) -> float | None:
    best = best_candidate(candidates, lambda candidate: candidate.lr, lower)
    return None if best is None else best.lr


def test_highest_mean_is_chosen_and_ties_take_the_first() -> None:
    assert choose(Candidate(0.3, 60.0), Candidate(0.1, 61.0), Candidate(0.2, 61.0)) == 0.1
    assert choose(Candidate(0.2, 61.0), Candidate(0.1, 61.0)) == 0.1
    assert choose(Candidate(0.3, 5.0), Candidate(0.1, 6.0), lower=True) == 0.3


def test_diverged_and_undefined_settings_never_win() -> None:
    assert choose(Candidate(0.3, 99.0, eligible=False), Candidate(0.1, 1.0), Candidate(0.2, math.nan)) == 0.1
    assert choose(Candidate(0.3, 99.0, eligible=False)) is None
    assert choose() is None


def search(
    objective: Callable[[float], float | None], values: list[float], **options: object
) -> tuple[LineSearch, list[list[float]]]:
    line = LineSearch(values, **options)  # type: ignore[arg-type]
    rounds = []
    while proposed := line.propose():
        rounds.append(proposed)
        for value in proposed:
            line.record(value, objective(value))
        assert len(rounds) < 20
    return line, rounds


def near(optimum: float) -> Callable[[float], float]:
    return lambda value: -abs(math.log(value / optimum))


def test_interior_best_is_only_refined() -> None:
    line, rounds = search(near(0.012), [0.003, 0.01, 0.03])
    assert rounds == [[0.003, 0.01, 0.03], [0.02]]  # 0.01 is the best, and 0.03 is nearer than 0.003
    assert line.best == 0.01 and not line.at_edge and line.extended == 0


def test_grid_is_extended_while_the_best_is_at_an_edge() -> None:
    _, rounds = search(near(0.32), [0.003, 0.01, 0.03])
    assert rounds[1:] == [[0.1], [0.3], [1.0], [0.5]]
    line, rounds = search(near(0.0001), [0.003, 0.01, 0.03], refine=None)
    assert rounds[1:] == [[0.001], [0.0003], [0.0001]] and line.best == 0.0001


def test_number_of_extensions_is_limited() -> None:
    line, rounds = search(lambda value: value, [1.0, 2.0], extensions=2, refine=None)
    assert rounds == [[1.0, 2.0], [4.0], [8.0]] and line.at_edge and line.extended == 2
    _, rounds = search(lambda value: value, [1.0, 2.0], extensions=0, refine=None)
    assert rounds == [[1.0, 2.0]]


def test_refinement_around_the_best_has_both_half_steps() -> None:
    _, rounds = search(near(0.01), [0.001, 0.01, 0.1], refine="around")
    assert rounds[1:] == [[0.003, 0.03]]


def test_diverged_values_are_no_edge_and_no_choice() -> None:
    """0.3 diverges, so 0.1 is not at the edge; the refinement takes the neighbor that has a score."""
    line, rounds = search(lambda value: None if value > 0.2 else value, [0.03, 0.1, 0.3])
    assert rounds == [[0.03, 0.1, 0.3], [0.05]] and line.best == 0.1


def test_smaller_values_are_tried_if_all_diverge() -> None:
    diverging = search(lambda value: None if value > 0.02 else value, [0.1, 1.0])
    assert diverging[1][1] == [0.01] and diverging[0].best == 0.01
    assert len(search(lambda value: None, [0.1, 1.0])[1]) == 4  # three extensions, and nothing to refine


def test_ties_take_the_smallest_and_do_not_extend() -> None:
    line, rounds = search(lambda value: 1.0 if value < 0.2 else 0.0, [0.03, 0.1, 0.3], refine=None)
    assert line.best == 0.03 and rounds == [[0.03, 0.1, 0.3]]  # 0.1 is as good, so nothing better is expected below


def test_lowest_score_can_be_the_best() -> None:
    line, rounds = search(lambda value: value, [0.1, 0.2, 0.4], lower_is_better=True, extensions=1, refine=None)
    assert rounds[1:] == [[0.05]] and line.best == 0.05


def test_whole_numbers_stay_whole() -> None:
    line, rounds = search(lambda value: -abs(value - 33), [10, 20])
    assert rounds == [[10, 20], [40], [80], [28]]  # 20 is better than 80
    assert all(isinstance(value, int) for value in line.tried)
    assert next_value([3, 2, 1], whole=True) is None and midpoint(1, 2, whole=True) is None


@pytest.mark.parametrize("seed", range(5))
def test_search_finds_an_optimum_near_the_grid(seed: int) -> None:
    """For a function with one maximum, the best value is within half a step of it, in ratio."""
    rng = random.Random(seed)
    optimum = 10 ** rng.uniform(-3.5, 0.5)
    line, _ = search(near(optimum), [0.01, 0.03, 0.1])
    assert line.best is not None and abs(math.log10(line.best / optimum)) < 0.3
    assert all(f"{value:.1g}" == f"{value:.6g}" for value in line.tried), "values have one digit"


@pytest.mark.parametrize("values", [[], [0.1, 0.0], [0.1, math.inf], [0.1]])
def test_invalid_search_is_refused(values: list[float]) -> None:
    with pytest.raises(UserError):
        LineSearch(values)
