"""Decide a comparison of two experiments from their records, by the rule of `bench.sequential`. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from contnorm.bench.comparison import HasRecords, experiment_names, paired_scores, score_title
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.escape import escape_html, html_table
from contnorm.bench.records import Record, spread_over_seeds
from contnorm.bench.sequential import (
    ALPHA,
    FIRST_SEED,
    MARGIN,
    MAX_SEEDS,
    Decision,
    Reach,
    check_rule,
    decide_differences,
    reachable,
)
from contnorm.errors import UserError

__all__ = ["PairedDecision", "check_different", "decide_records", "decision_sentence", "diverged_seeds"]


@dataclass(frozen=True)
class PairedDecision(Decision):
    """A verdict on the difference of a score between two experiments, a minus b.

    Attributes:
        verdict: ``"higher"`` or ``"lower"``, also followed by ``", within the margin"``; ``"equivalent"``; or
            ``"undecided"``.
        seeds: Number of seeds of the last look; 0 before the first.
        pairs: Number of pairs among them; fewer if runs diverged.
        mean: Mean difference over these pairs, in percentage points.
        interval: Intersection of the intervals of all looks; None before the first.
        looks: The looks.
        margin, cases, alpha: The arguments of `decide`.
        conflict: Whether the intervals of two looks do not overlap.
        score: Name of the score.
        names: Names of a and b: what their settings differ in.
        reach: What the last allowed look can show, from the standard deviation of the differences of all shared seeds;
            None for fewer than two shared seeds.
        exploratory: Shared seeds below the first one that counts; they are not used for the verdict.
        a, b: The records.

    Example:
        >>> PairedDecision(**vars(decide_differences([2.0, 2.5] * 8)), names=("cn", "bn")).sentence
        'cn is higher than bn in ACC by 2.25 points (interval +2.04 to +2.46, 16 seeds).'
    """

    score: str = "acc"
    names: tuple[str, str] = ("a", "b")
    reach: Reach | None = None
    exploratory: tuple[int, ...] = ()
    a: Sequence[Record] = field(default=(), repr=False)
    b: Sequence[Record] = field(default=(), repr=False)

    @property
    def sentence(self) -> str:
        """The verdict in a sentence."""
        return decision_sentence(self, self.names, self.score)

    def __str__(self) -> str:
        return self.sentence

    def _repr_html_(self) -> str:
        """Show the verdict and, as a table, the looks."""
        rows = [(look.seeds, f"{round(look.mean, 2) + 0.0:+.2f}", look.interval) for look in self.looks]
        table = html_table(("seeds", "mean difference", "interval of the look"), rows) if rows else ""
        return f"<p>{escape_html(self.sentence)}</p>{table}"


def decision_sentence(decision: Decision, names: tuple[str, str], score: str) -> str:
    """A verdict in a sentence.

    Args:
        decision: The verdict.
        names: Names of the first and the second experiment.
        score: Name of the score.

    Example:
        >>> decision_sentence(decide_differences([2.0, 2.5] * 8), ("cn", "bn"), "acc")
        'cn is higher than bn in ACC by 2.25 points (interval +2.04 to +2.46, 16 seeds).'
    """
    (a, b), text, title = names, Decision.__str__(decision), score_title(score)
    word = decision.verdict.partition(",")[0]
    if word == "undecided":
        reason = text.removeprefix(word).strip(" ,") if decision.interval else text.removeprefix(word).strip(" ()")
        return f"Undecided whether {a} or {b} is higher in {title}: {reason}."
    if word == "equivalent":
        return f"{a} and {b} are {text.replace(word, f'{word} in {title}', 1)}."
    return f"{a} is {text.replace(word, f'{word} than {b} in {title}', 1)}."


def decide_records(
    a: HasRecords | Iterable[Record],
    b: HasRecords | Iterable[Record],
    score: str | None = None,
    *,
    margin: float = MARGIN,
    cases: int = 1,
    alpha: float = ALPHA,
    max_seeds: int = MAX_SEEDS,
    first_seed: int = FIRST_SEED,
) -> PairedDecision:
    """Decide a comparison from the recorded seeds of two experiments.

    Args:
        a, b: Results of `bench.run`, selections of `bench.load_runs`, or records; each of one experiment.
        score: Name of the score; by default the first one.
        margin: Largest absolute difference that counts as equivalent, in percentage points.
        cases: Number of comparisons among which alpha is divided.
        alpha: Probability of any wrong verdict in all these comparisons.
        max_seeds: Limit of the looks.
        first_seed: First seed that counts. Lower ones are exploratory: settings may have been chosen with them.

    Raises:
        UserError: As in `bench.compare`, or if a and b are the same experiment.

    Example:
        >>> runs = load_runs("runs")  # doctest: +SKIP
        >>> print(decide_records(runs.where(norm="cn"), runs.where(norm="bn")))  # doctest: +SKIP
    """
    check_rule(cases=cases, margin=margin, alpha=alpha, max_seeds=max_seeds)
    a, b = (list(runs) if isinstance(runs, Iterator) else runs for runs in (a, b))
    scores = paired_scores(a, b, score, defined=True)
    first, second = scores.configs
    check_different(first, second, _objects(a), _objects(b))
    differences = {seed: scores.a[seed] - scores.b[seed] for seed in sorted(scores.a)}
    diverged = diverged_seeds(a, first.hash) | diverged_seeds(b, second.hash)
    decision = decide_differences(
        differences,
        cases=cases,
        margin=margin,
        alpha=alpha,
        max_seeds=max_seeds,
        diverged=diverged,
        first_seed=first_seed,
    )
    _, std = spread_over_seeds(list(differences.values()))
    of_rule: dict[str, Any] = {item.name: getattr(decision, item.name) for item in fields(Decision)}
    return PairedDecision(
        **of_rule,
        score=scores.name,
        names=experiment_names(*scores.configs),
        reach=reachable(std, margin, cases, max_seeds, alpha) if len(differences) > 1 else None,
        exploratory=tuple(seed for seed in differences if seed < first_seed),
        a=_records(a),
        b=_records(b),
    )


def check_different(a: RunConfig, b: RunConfig, *objects: Mapping[str, Any]) -> None:
    """Reject two experiments that are the same one.

    Args:
        a, b: Their settings.
        objects: Their Python objects. Two objects without a tag may have the same name, so the same hash.

    Raises:
        UserError: If the settings are equal and there are no objects that may differ.
    """
    if a.hash == b.hash and not any(objects):
        raise UserError(f"a and b are the same experiment ({a.hash}). Decide between experiments that differ.")


def diverged_seeds(runs: Any, hash: str) -> set[int]:
    """Seeds of a result, or of the runs with a hash in a selection, that diverged; none of records alone.

    Example:
        >>> diverged_seeds([], "75cc28")
        set()
    """
    diverged = getattr(runs, "diverged", ())
    return set(diverged) if isinstance(diverged, Mapping) else {run.seed for run in diverged if run.hash == hash}


def _objects(runs: Any) -> Mapping[str, Any]:
    """Python objects of a result."""
    objects: Mapping[str, Any] = getattr(runs, "objects", {})
    return objects


def _records(runs: Any) -> tuple[Record, ...]:
    records = getattr(runs, "records", None)
    return tuple(runs if records is None else records)
