"""Add fresh seeds to the runs of a recipe, look by look, until its claims are decided. Needs torch.

Only the cells of undecided cases get the seeds of the next look. A case whose data is absent gets none.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.bench.records import Store, spread_over_seeds
from contnorm.bench.sequential import FIRST_SEED, LOOKS, Reach, looks_up_to, reach
from contnorm.paper.cells import RecipeCell
from contnorm.paper.claims import StagedRule, decided_comparisons, differences_of, has_margin
from contnorm.paper.comparisons import DETERMINISTIC, CellComparison, comparisons_of, count_comparisons
from contnorm.paper.measured import MeasuredCell, Numerics
from contnorm.paper.recipe import Claim, Recipe
from contnorm.paper.recipe_runs import Execution, RecipeRecords, run_jobs
from contnorm.paper.tables import MOST_NAMED

__all__ = ["EVERY_FRESH_SEED", "StagedRuns", "fresh_seeds", "print_line", "reach_lines", "recorded_fresh_seeds"]

log = logging.getLogger("contnorm")
EVERY_FRESH_SEED = range(FIRST_SEED, sys.maxsize)
LEAST_PAIRS = 3  # shared seeds from which a spread is taken


def fresh_seeds(count: int) -> range:
    """The first fresh seeds.

    Example:
        >>> list(fresh_seeds(3))
        [100, 101, 102]
    """
    return range(FIRST_SEED, FIRST_SEED + count)


@dataclass(frozen=True)
class StagedRuns:
    """The runs of a recipe with fresh seeds.

    Attributes:
        recipe: The recipe, with the learning rates that the fresh seeds use.
        configs: Settings of the run of each cell.
        selected: The cells to run; comparisons with others are not run.
        numerics: Precision of the runs.
        absent: Cells whose data is absent; they may have records.
        rule: The rule of the table.
        store: Store of the records.
    """

    recipe: Recipe
    configs: Mapping[RecipeCell, RunConfig]
    selected: Collection[RecipeCell]
    numerics: Numerics
    absent: Collection[RecipeCell]
    rule: StagedRule
    store: Store

    def run(self, environment: RunOptions, console: Console | None) -> Execution:
        """Run seeds, look by look, until all cases are decided, the limit is reached, or runs fail or are stopped."""
        for seeds in self._looks:
            undecided, total = self._undecided()
            records = RecipeRecords(self.store, fresh_seeds(seeds))
            cells = self._cells(undecided, records)
            if not cells:
                return self._finish(console)
            jobs = [Run(config, seed) for config in self._distinct(cells) for seed in records.seeds]
            missing = len(jobs) - records.finished(jobs)
            if not missing:
                continue
            left = f"{_are(len(undecided), total)} undecided"
            print_line(f"Look at {seeds} seeds: {left}; {missing} runs are missing.", console)
            execution = run_jobs(jobs, environment, console)
            if execution.failure or execution.stopped is not None or records.finished(jobs) < len(jobs):
                return execution
        return self._finish(console)

    def measured(self) -> list[MeasuredCell]:
        """All cells with the records of their fresh seeds."""
        return self.records.measured(self.configs, self.numerics)

    @property
    def records(self) -> RecipeRecords:
        """Records of all fresh seeds that the rule may use."""
        return RecipeRecords(self.store, recorded_fresh_seeds(self.store, self.configs.values()))

    @property
    def lacking_data(self) -> list[RecipeCell]:
        """Cells that would get further seeds if their data were present."""
        undecided = {cell for one, done in self._decided() if not done for cell in one.cells}
        limit = RecipeRecords(self.store, fresh_seeds(self._looks[-1]))
        return [cell for cell in self.absent if cell in undecided and not limit.complete(self.configs[cell])]

    @property
    def _looks(self) -> tuple[int, ...]:
        return looks_up_to(self.rule.max_seeds)

    def _cells(self, undecided: Sequence[CellComparison], records: RecipeRecords) -> list[RecipeCell]:
        """Cells of the comparisons that have, or can be given, all seeds of a look."""
        lacking = {cell for cell in self.absent if not records.complete(self.configs[cell])}
        return list(dict.fromkeys(cell for one in undecided if lacking.isdisjoint(one.cells) for cell in one.cells))

    def _decided(self) -> list[tuple[CellComparison, bool]]:
        decided = decided_comparisons(self.recipe, self.measured(), self.rule)
        return [(one, done) for one, done in decided if all(cell in self.selected for cell in one.cells)]

    def _distinct(self, cells: Sequence[RecipeCell]) -> list[RunConfig]:
        return list(dict.fromkeys(self.configs[cell] for cell in cells))

    def _undecided(self) -> tuple[list[CellComparison], int]:
        """Comparisons that could be decided by more seeds, and the number of all cases with data."""
        first = RecipeRecords(self.store, fresh_seeds(LOOKS[0]))
        without = {cell for cell in self.absent if not first.complete(self.configs[cell])}
        with_data = [(one, done) for one, done in self._decided() if without.isdisjoint(one.cells)]
        return [one for one, done in with_data if not done], len(with_data)

    def _finish(self, console: Console | None) -> Execution:
        undecided, total = self._undecided()
        limit = f" within the limit of {self.rule.max_seeds} seeds" if undecided else ""
        print_line(f"{_are(total - len(undecided), total)} decided{limit}.", console)
        return Execution()


def _are(count: int, total: int) -> str:
    return f"{count} of {total} case{'' if total == 1 else 's'} {'is' if count == 1 else 'are'}"


def print_line(text: str, console: Console | None) -> None:
    """Print a line of progress; log it if there is no terminal."""
    if console is None:
        log.info(text)
    else:
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def recorded_fresh_seeds(store: Store, configs: Collection[RunConfig]) -> range:
    """The fresh seeds up to the last one recorded without a gap."""
    count = 0
    for config in dict.fromkeys(configs):
        while store.has(config, FIRST_SEED + count) or store.is_diverged(config, FIRST_SEED + count):
            count += 1
    return fresh_seeds(count)


def reach_lines(recipe: Recipe, measured: Sequence[MeasuredCell], rule: StagedRule, max_seeds: int) -> list[str]:
    """Lines that say whether the allowed seeds reach the margin of each case, from the spread of recorded runs.

    Args:
        recipe: The recipe.
        measured: Cells with all recorded seeds, exploratory ones included.
        rule: The rule of the table.
        max_seeds: Largest number of seeds allowed.
    """
    looks = looks_up_to(max_seeds)
    counts = count_comparisons(recipe, [one.cell for one in measured])
    families = ", ".join(f"{count} on {stream}" for stream, count in counts.items())
    lines = [
        f"Comparisons, with an error rate of 5 % on each stream: {families}. Looks at {', '.join(map(str, looks))} "
        f"seeds from seed {FIRST_SEED} on."
    ]
    reaches = dict(_reaches(recipe, measured, rule, max_seeds))
    known = {what: one for what, one in reaches.items() if one is not None}
    unknown = f" Cases without a recorded spread: {len(reaches) - len(known)}." if len(known) < len(reaches) else ""
    if not known:
        return [*lines, f"Whether the margin can be reached is not known.{unknown}"] if reaches else lines
    within = sum(one.is_possible for one in known.values())
    lines.append(
        f"Margin {rule.margin:g}: by the recorded spread it is reachable with {looks[-1]} seeds in {within} of "
        f"{len(known)} case{'' if len(known) == 1 else 's'}.{unknown}"
    )
    worst = max(known, key=lambda what: known[what].half_width / known[what].margin)
    lines.append(f"Widest interval: {worst}, {known[worst]}.")
    others = [what for what, one in known.items() if not one.is_possible and what != worst]
    if others:
        more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        lines.append(f"Not reachable either: {', '.join(others[:MOST_NAMED])}{more}.")
    return lines


def _reaches(
    recipe: Recipe, measured: Sequence[MeasuredCell], rule: StagedRule, max_seeds: int
) -> Iterator[tuple[str, Reach | None]]:
    """Each comparison of claims with a margin, and what the last look can show of it; None without a spread."""
    by_cell = {one.cell: one for one in measured}
    counts = count_comparisons(recipe, list(by_cell))
    for claim in recipe.claims:
        margin = _margin(claim, rule)
        if margin is None:
            continue
        for one in comparisons_of(claim, list(by_cell)):
            differences = list(differences_of(claim, one, by_cell).values())
            std = spread_over_seeds(differences)[1] if len(differences) >= LEAST_PAIRS else math.nan
            what = f"{one.label} ({claim.score})"
            yield what, None if math.isnan(std) else reach(std, margin, counts[one.stream], max_seeds)


def _margin(claim: Claim, rule: StagedRule) -> float | None:
    """Margin of a claim's cases; None if no margin decides them."""
    if claim.score in DETERMINISTIC or claim.kind in ("under", "steadier"):
        return None
    return rule.margin if has_margin(claim) else claim.margin or None
