"""`decide`: a verdict on the difference of two experiments, with as many seeds as it takes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from contnorm.bench.api.arguments import resolve_run
from contnorm.bench.api.result import Result
from contnorm.bench.api.run import run_experiments
from contnorm.bench.api.stream import Stream, load_stream
from contnorm.bench.api.sweep import check_score
from contnorm.bench.comparison import HasRecords, check_streams, experiment_names
from contnorm.bench.decision import PairedDecision, check_different, decide_records
from contnorm.bench.engine.run import Event, Run
from contnorm.bench.escape import escape_terminal
from contnorm.bench.records import Record, Store
from contnorm.bench.sequential import ALPHA, FIRST_SEED, MARGIN, MAX_SEEDS, check_rule, looks_up_to
from contnorm.errors import UserError

__all__ = ["decide"]

log = logging.getLogger("contnorm")


def decide(
    a: Mapping[str, Any] | HasRecords | Iterable[Record],
    b: Mapping[str, Any] | HasRecords | Iterable[Record],
    score: str | None = None,
    *,
    margin: float = MARGIN,
    cases: int = 1,
    alpha: float = ALPHA,
    max_seeds: int = MAX_SEEDS,
    first_seed: int = FIRST_SEED,
    stream: Stream | str | None = None,
    runs: str | Path | None = None,
    add_seeds: bool = True,
    device: str = "cpu",
    lanes: int | None = None,
    threads: int = 1,
    progress: bool | Console = False,
) -> PairedDecision:
    """Decide whether the score of ``a`` is higher than, lower than or equivalent to that of ``b``, over paired seeds.

    Results of `bench.run`, and experiments that are described by their arguments, are run with further seeds until
    the comparison is decided or the limit is reached, with looks at 16, 24, 32, ... and 128 seeds. Recorded runs are
    decided by the seeds that they have. All these looks are allowed for: the probability of a wrong verdict is at most
    ``alpha``, if the differences are normally distributed (see `contnorm.bench.sequential`).

    The seeds 100, 101, ... count. Those below are exploratory, since settings may have been chosen with them; they tell
    whether the margin can be reached, and nothing else.

    Args:
        a, b: The experiments: results of `bench.run`; dictionaries of the arguments of `run`, as in `run_all`, such as
            ``{"norm": "cn"}``; or, to run nothing, selections of `bench.load_runs` or records.
        score: Name of the score, such as ``"acc"``; by default the first one.
        margin: Largest absolute difference that counts as equivalent, in percentage points.
        cases: Number of comparisons that are decided together; alpha is divided among them.
        alpha: Probability of any wrong verdict in all these comparisons.
        max_seeds: Largest number of seeds.
        first_seed: First seed that counts.
        stream: The stream, or the name of one; by default that of the results.
        runs: Folder of records and checkpoints. Recorded runs are not repeated, and after a stop the same call
            continues. None to keep the results in memory only.
        add_seeds: Whether to run further seeds of results; False to decide by the seeds that they have.
        device, lanes, threads: As in `run`.
        progress: Whether to show progress and a line for each look; or the rich console to show them on.

    Returns:
        The verdict, the interval and all looks, with the records of a and b.

    Raises:
        UserError: If an argument is invalid, the experiments can't be compared, or all first runs diverged.
        KeyboardInterrupt: After Ctrl-C, when the runs are saved.

    Example:
        >>> logging.getLogger("contnorm").setLevel("ERROR")
        >>> stream = load_stream("split-mnist", source="digits", tasks=2, train_per_task=40)
        >>> decision = decide({"norm": "bn"}, {"norm": "bn", "lr": 1e-5}, stream=stream, max_seeds=16, lanes=1)
        >>> decision.verdict, decision.seeds
        ('higher', 16)
    """
    check_rule(margin=margin, cases=cases, alpha=alpha, max_seeds=max_seeds)
    if not isinstance(first_seed, int) or first_seed < 0:
        raise UserError(f"first_seed={first_seed!r}: use an integer, 0 or more.")
    rule: dict[str, Any] = {"margin": margin, "cases": cases, "alpha": alpha}
    rule |= {"max_seeds": max_seeds, "first_seed": first_seed}
    sides = {"a": a, "b": b}
    described = [name for name, side in sides.items() if isinstance(side, Mapping)]
    fixed = [name for name, side in sides.items() if name not in described and not _can_continue(side)]
    if described and fixed:
        raise UserError(
            f"{described[0]} is to be run, but {fixed[0]} has records only, which get no further seeds. Describe "
            f"{fixed[0]} by its arguments of bench.run too."
        )
    if not described and (fixed or not add_seeds):
        assert not isinstance(a, Mapping) and not isinstance(b, Mapping)
        return decide_records(a, b, score, **rule)
    if not add_seeds:
        raise UserError(f"add_seeds=False: {described[0]} has no results yet. Use results or recorded runs.")
    stream = _find_stream(stream, a, b)
    console = progress if isinstance(progress, Console) else Console(stderr=True) if progress else None
    first, second = (_Side.of(side, name, stream, runs, first_seed + max_seeds) for name, side in sides.items())
    rule["score"] = check_score(score, stream)
    looks = _Looks(stream, (first, second), rule, console)
    looks.check()
    looks.print_reach()
    decision = None
    for size in looks_up_to(max_seeds):
        if decision is not None and decision.seeds >= size:  # all its seeds were recorded before
            continue
        seeds = range(first_seed, first_seed + size)
        looks.run(seeds, runs=runs, device=device, lanes=lanes, threads=threads)
        decision = looks.decide()
        looks.report(decision)
        if decision.is_decided:
            break
        looks.print_reach()
    assert decision is not None  # there is at least one look
    return decision


def _can_continue(side: object) -> bool:
    """Whether further seeds of an experiment can be run: a result that was not made of records alone."""
    return isinstance(side, Result) and side.stream is not None


def _find_stream(stream: Stream | str | None, *sides: object) -> Stream:
    streams = [side.stream for side in sides if isinstance(side, Result) and side.stream is not None]
    if streams and stream is not None:
        raise UserError(f"stream={stream!r}: a result has its stream. Pass stream only with experiments to be run.")
    if not streams and stream is None:
        raise UserError("stream=None: name the stream that the experiments are to be run on.")
    chosen = streams[0] if streams else stream
    chosen = load_stream(chosen) if isinstance(chosen, str) else chosen
    if not isinstance(chosen, Stream):
        raise UserError(f"stream={chosen!r}: use a name, or a stream of load_stream or Stream.from_arrays.")
    return chosen


@dataclass
class _Side:
    """One of the two experiments: its settings, and the seeds that are known.

    Attributes:
        experiment: The settings.
        records: Records of finished seeds.
        diverged: Reasons of diverged seeds.
    """

    experiment: Run
    records: dict[int, Record] = field(default_factory=dict)
    diverged: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, side: Any, name: str, stream: Stream, runs: str | Path | None, limit: int) -> _Side:
        """Resolve an experiment, with the seeds below a limit that its result or the folder of records has."""
        if isinstance(side, Mapping):
            known = cls(resolve_run(stream, side, recorded=runs is not None))
        else:
            known = cls(Run(side.config, 0, side.objects), {r.seed: r for r in side.records}, dict(side.diverged))
            if runs is not None and side.objects and any(record.path is None for record in side.records):
                raise UserError(
                    f"{name} was run in memory with Python objects, so it can't be continued in the folder {runs}. "
                    f"Describe it by its arguments of bench.run."
                )
        if isinstance(runs, str | Path) and Path(runs).expanduser().exists():  # others are rejected before they run
            store, config = Store(Path(runs).expanduser()), known.experiment.config
            recorded = store.load_seeds(config, sorted(store.seeds(config, range(limit))))
            known.records |= {record.seed: record for record in recorded.records}
            known.diverged |= store.diverged_seeds(config)
        return known

    def add(self, outcome: Result | UserError, seeds: Iterable[int]) -> None:
        """Add the outcome of running some seeds; it is an error if all of them diverged."""
        if not isinstance(outcome, UserError):
            self.records |= {record.seed: record for record in outcome.records}
            self.diverged |= outcome.diverged
        elif self.records:
            self.diverged |= dict.fromkeys(seeds, str(outcome))
        else:
            raise outcome

    def knows(self, seed: int) -> bool:
        return seed in self.records or seed in self.diverged


class _Looks:
    """Runs two experiments look by look, and reports each look. It is the `RunMonitor` of these runs.

    Args:
        stream: Stream of both experiments.
        sides: The experiments.
        rule: Arguments of `decide_records`.
        console: Terminal or notebook to print to; None for no output.
    """

    def __init__(self, stream: Stream, sides: tuple[_Side, _Side], rule: Mapping[str, Any], console: Console | None):
        self._stream, self._sides, self._rule, self._console = stream, sides, rule, console
        self._configs = sides[0].experiment.config, sides[1].experiment.config
        self._names = experiment_names(*self._configs)
        self._has_reach = False
        self._line = ""

    def check(self) -> None:
        """Reject experiments that can't be compared, before anything is run."""
        check_streams(*self._configs)
        check_different(*self._configs, *(side.experiment.objects for side in self._sides))

    def print_reach(self) -> None:
        """Say whether the margin can be reached, as soon as two seeds of both are known."""
        if not self._has_reach and len(self._sides[0].records.keys() & self._sides[1].records.keys()) > 1:
            decision = self.decide()
            assert decision.reach is not None
            self._has_reach = True
            text = f"Equivalence: {decision.reach}, if the spread of the differences stays as it is."
            if not decision.reach.is_reachable:
                log.warning(text)
            else:
                self._print(text)

    def run(self, seeds: range, **options: Any) -> None:
        """Run those seeds of a look that are not known for both."""
        missing = [seed for seed in seeds if not all(side.knows(seed) for side in self._sides)]
        if not missing:
            return
        experiments = [side.experiment for side in self._sides]
        progress = self._console or False
        outcomes = run_experiments(self._stream, experiments, seeds=missing, progress=progress, monitor=self, **options)
        for side, outcome in zip(self._sides, outcomes, strict=True):
            side.add(outcome, missing)

    def decide(self) -> PairedDecision:
        """Decide by the seeds that are known."""
        a, b = (
            Result(side.records.values(), diverged=side.diverged, stream=self._stream, objects=side.experiment.objects)
            for side in self._sides
        )
        return decide_records(a, b, **self._rule)

    def report(self, decision: PairedDecision) -> None:
        """Print a line for a look, and keep it above the progress bars of the next one."""
        self._line = decision.sentence
        self._print(self._line)

    def _print(self, text: str) -> None:
        if self._console is not None:
            self._console.print(Text(escape_terminal(text)), soft_wrap=True)

    def start(self, runs: Sequence[Run]) -> None:
        pass

    def label(self, run: Run) -> str:
        """Return the name of a run on progress bars."""
        return f"{self._names[self._configs.index(run.config)]}, seed {run.seed}"

    def update(self, event: Event) -> None:
        pass

    def __rich__(self) -> RenderableType:
        return Text(self._line)
