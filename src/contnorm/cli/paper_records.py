"""The records of a recipe's runs under a folder, in whatever precision they were made, and what is left to run.

What is recorded is not run again in another precision unless that was typed; a run that lacks some of its seeds gets
them in the precision in which it was begun.
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
    """In which ways records may be computed to serve, by the settings that were typed: in any where nothing was.

    Example:
        >>> [how for how, exact in hows_of({"train": {"precision": "tf32"}}) if exact], len(hows_of({}))
        (['tf32'], 6)
    """
    train = typed.get("train", {})
    wanted = [train.get(key) for key in ("precision", "deterministic")]
    return [how for how in HOWS if all(want is None or want == one for want, one in zip(wanted, how, strict=True))]


@dataclass(frozen=True)
class Kept:
    """What is recorded of some runs.

    Attributes:
        store: Where.
        seeds: Which are wanted.
        hows: In which precisions they may be.
        problems: What is wrong with records that were left out by `measured`.
    """

    store: Store
    seeds: range
    hows: Sequence[How]
    problems: list[str] = field(default_factory=list)

    def seeds_of(self, config: RunConfig) -> dict[How, set[int]]:
        """The seeds that are recorded of a run, by how they were computed; nothing is read."""
        found = {how: self.store.seeds(computed(config, how), self.seeds) for how in self.hows}
        return {how: seeds for how, seeds in found.items() if seeds}

    def whole(self, config: RunConfig) -> bool:
        return set().union(*self.seeds_of(config).values(), *map(self.lost, self._ways(config))) >= set(self.seeds)

    def lost(self, config: RunConfig) -> dict[int, str]:
        """The seeds of a run that have no record because they were lost, and how; they would be lost again."""
        return {seed: why for seed, why in self.store.all_lost(config).items() if seed in self.seeds}

    def count(self, config: RunConfig) -> int:
        """How many seeds of a run, in its own precision, need not be run: recorded, or lost."""
        return len(self.store.seeds(config, self.seeds)) + len(self.lost(config))

    def _ways(self, config: RunConfig) -> list[RunConfig]:
        return [computed(config, how) for how in self.hows]

    def jobs(self, configs: Sequence[RunConfig]) -> list[Job]:
        """All that is wanted; what is recorded, as it is, and what is not, as its run was begun."""
        runs = [self.seeds_of(config) for config in configs]
        found = zip(configs, runs, taken(runs), strict=True)
        return list(dict.fromkeys(job for config, run, how in found for job in self._jobs(config, run, how)))

    def _jobs(self, config: RunConfig, run: Mapping[How, set[int]], begun: How | None) -> Iterator[Job]:
        usual = begun or how_of(config)
        for seed in self.seeds:
            there = [how for how in (usual, *run) if seed in run.get(how, ())]
            yield Job(computed(config, there[0] if there else usual), seed)

    def said_of(self, jobs: Sequence[Job], configs: Sequence[RunConfig]) -> str:
        """How many runs are to be made and are there in which precision; empty where there is but the recipe's."""
        there = {job: self.store.has(job.config, job.seed) for job in jobs}
        counts = Counter((how_of(job.config), done) for job, done in there.items())
        hows = {how for how, _ in counts} | {how_of(config) for config in configs}
        if all(there.values()) or len(hows) == 1:
            return ""
        parts = {False: "to make", True: "there"}
        said = [
            f"{counts[how, done]} {words} in {how_words(how)}"
            for done, words in parts.items()
            for how in HOWS
            if counts[how, done]
        ]
        return f"Runs: {', '.join(said)}. --precision says one for all."

    def measured(self, configs: Mapping[Cell, RunConfig]) -> list[Measured]:
        """The cells of which there are records, or notes that they were lost."""
        loaded = {config: self._records(config) for config in dict.fromkeys(configs.values())}
        cells = measured_cells(list(configs), [loaded[config] for config in configs.values()])
        found = [with_lost(one, configs[one.cell], self.lost) for one in cells]
        return [one for one in found if one.run]

    def _records(self, config: RunConfig) -> dict[How, Seeds]:
        loaded: dict[How, Seeds] = {}
        for how, seeds in self.seeds_of(config).items():
            found = self.store.load_seeds(computed(config, how), sorted(seeds))
            self.problems.extend(problem for problem in found.problems if problem not in self.problems)
            loaded[how] = {record.seed: record for record in found.records}
        return loaded
