"""Finds the records of a recipe's runs under a folder, in any precision, and lists the missing runs.

A recorded run is not repeated in another precision unless that precision was typed. Missing seeds of a run are run in
the precision of its recorded seeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.engine.job import Job
from contnorm.bench.records import Store
from contnorm.paper.cells import Cell
from contnorm.paper.diverged import with_lost
from contnorm.paper.precisions import HOWS, How, Seeds, computed, how_of, how_words, measured_cells, taken
from contnorm.paper.series import Measured

__all__ = ["Kept", "hows_of"]


def hows_of(typed: Mapping[str, Any]) -> list[How]:
    """Precisions in which records are accepted, given the typed settings; all if none was typed.

    Example:
        >>> [how for how, exact in hows_of({"train": {"precision": "tf32"}}) if exact], len(hows_of({}))
        (['tf32'], 6)
    """
    train = typed.get("train", {})
    wanted = [train.get(key) for key in ("precision", "deterministic")]
    return [how for how in HOWS if all(want is None or want == one for want, one in zip(wanted, how, strict=True))]


@dataclass(frozen=True)
class Kept:
    """The records of some runs.

    Attributes:
        store: Store of the records.
        seeds: Seeds that are wanted.
        hows: Precisions in which records are accepted.
        problems: Errors of the records that `measured` could not read.
    """

    store: Store
    seeds: range
    hows: Sequence[How]
    problems: list[str] = field(default_factory=list)

    def seeds_of(self, config: RunConfig) -> dict[How, set[int]]:
        """Recorded seeds of a run by precision; reads no record."""
        by_precision = {how: self.store.seeds(computed(config, how), self.seeds) for how in self.hows}
        return {how: seeds for how, seeds in by_precision.items() if seeds}

    def whole(self, config: RunConfig) -> bool:
        return set().union(*self.seeds_of(config).values(), *map(self.lost, self._variants(config))) >= set(self.seeds)

    def lost(self, config: RunConfig) -> dict[int, str]:
        """Diverged seeds of a run, and the reasons; they have no record, and would diverge again."""
        return {seed: why for seed, why in self.store.all_lost(config).items() if seed in self.seeds}

    def count(self, config: RunConfig) -> int:
        """Number of seeds of a run, in its own precision, that are recorded or diverged and need no run."""
        return len(self.store.seeds(config, self.seeds)) + len(self.lost(config))

    def _variants(self, config: RunConfig) -> list[RunConfig]:
        return [computed(config, how) for how in self.hows]

    def jobs(self, configs: Sequence[RunConfig]) -> list[Job]:
        """All wanted jobs: recorded ones as they are, missing ones in the precision of their run's other seeds."""
        runs = [self.seeds_of(config) for config in configs]
        rows = zip(configs, runs, taken(runs), strict=True)
        return list(dict.fromkeys(job for config, run, how in rows for job in self._jobs(config, run, how)))

    def _jobs(self, config: RunConfig, run: Mapping[How, set[int]], begun: How | None) -> Iterator[Job]:
        usual = begun or how_of(config)
        for seed in self.seeds:
            recorded = [how for how in (usual, *run) if seed in run.get(how, ())]
            yield Job(computed(config, recorded[0] if recorded else usual), seed)

    def said_of(self, jobs: Sequence[Job], configs: Sequence[RunConfig]) -> str:
        """Numbers of missing and recorded runs by precision; empty if all are in the recipe's precision."""
        there = {job: self.store.has(job.config, job.seed) for job in jobs}
        counts = Counter((how_of(job.config), done) for job, done in there.items())
        hows = {how for how, _ in counts} | {how_of(config) for config in configs}
        if all(there.values()) or len(hows) == 1:
            return ""
        parts = {False: "to make", True: "there"}
        texts = [
            f"{counts[how, done]} {words} in {how_words(how)}"
            for done, words in parts.items()
            for how in HOWS
            if counts[how, done]
        ]
        return f"Runs: {', '.join(texts)}. --precision says one for all."

    def measured(self, configs: Mapping[Cell, RunConfig]) -> list[Measured]:
        """Cells that have records or diverged seeds."""
        loaded = {config: self._records(config) for config in dict.fromkeys(configs.values())}
        cells = measured_cells(list(configs), [loaded[config] for config in configs.values()])
        measured = [with_lost(one, configs[one.cell], self.lost) for one in cells]
        return [one for one in measured if one.run]

    def _records(self, config: RunConfig) -> dict[How, Seeds]:
        loaded: dict[How, Seeds] = {}
        for how, seeds in self.seeds_of(config).items():
            matches = self.store.load_seeds(computed(config, how), sorted(seeds))
            self.problems.extend(problem for problem in matches.problems if problem not in self.problems)
            loaded[how] = {record.seed: record for record in matches.records}
        return loaded
