"""`decide`: a verdict on the difference of two experiments, with as many seeds as it takes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import stdev
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.text import Text

from contnorm.bench.api.arguments import resolve_run
from contnorm.bench.api.result import Result
from contnorm.bench.api.run import run_experiments
from contnorm.bench.api.stream import Stream, load_stream
from contnorm.bench.api.sweep import check_score
from contnorm.bench.comparison import Experiment, check_experiments, compare, experiment_names
from contnorm.bench.engine.run import Event, Run
from contnorm.bench.escape import escape_terminal
from contnorm.bench.records import Record, Store
from contnorm.bench.sequential import ALPHA, FIRST_SEED, MARGIN, MAX_SEEDS, Verdict, check_rule, looks_up_to, reach
from contnorm.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["decide"]

log = logging.getLogger("contnorm")


def decide(
    a: Mapping[str, Any] | Experiment | pd.DataFrame,
    b: Mapping[str, Any] | Experiment | None = None,
    score: str | None = None,
    *,
    by: str | None = None,
    seed: str = "seed",
    margin: float = MARGIN,
    cases: int = 1,
    alpha: float = ALPHA,
    max_seeds: int = MAX_SEEDS,
    first_seed: int | None = None,
    stream: Stream | str | None = None,
    runs: str | Path | None = None,
    add_seeds: bool = True,
    device: str = "cpu",
    lanes: int | None = None,
    threads: int = 1,
    progress: bool | Console = False,
) -> Verdict:
    """Decide whether the score of ``a`` is higher than, lower than or equivalent to that of ``b``, over paired seeds.

    Results of `bench.run`, and experiments that are described by their arguments, are run with further seeds until
    the comparison is decided or the limit is reached, with looks at 16, 24, 32, ... and 128 seeds. Recorded runs and
    plain numbers are decided by the seeds that they have, as by `bench.compare`. All these looks are allowed for: the
    probability of a wrong verdict is at most ``alpha``, if the differences are normally distributed (see
    `contnorm.bench.sequential`).

    Args:
        a, b: The experiments: results of `bench.run`, or dictionaries of the arguments of `run`, as in `run_all`, such
            as ``{"norm": "cn"}``; or, to run nothing, recorded runs or numbers as `bench.compare` takes them.
        score: Name of the score, such as ``"acc"`` or ``"aia"``; by default the first one.
        by, seed, margin, cases, alpha, max_seeds, first_seed: As in `bench.compare`.
        stream: The stream, or the name of one; by default that of the results.
        runs: Folder of records and checkpoints. Recorded runs are not repeated, and after a stop the same call
            continues. None to keep the results in memory only.
        add_seeds: Whether to run further seeds of results; False to decide by the seeds that they have.
        device, lanes, threads: As in `run`.
        progress: Whether to show progress and a line for each look; or the rich console to show them on.

    Returns:
        The verdict, with the records of a and b.

    Raises:
        UserError: If an argument is invalid, the experiments can't be compared, or all first runs diverged.
        KeyboardInterrupt: After Ctrl-C, when the runs are saved.

    Example:
        >>> logging.getLogger("contnorm").setLevel("ERROR")
        >>> stream = load_stream("split-mnist", source="digits", tasks=2, train_per_task=40)
        >>> verdict = decide({"norm": "bn"}, {"norm": "bn", "lr": 1e-5}, stream=stream, max_seeds=16, lanes=1)
        >>> verdict.outcome, verdict.seeds
        ('higher', 16)
    """
    check_rule(margin=margin, cases=cases, alpha=alpha, max_seeds=max_seeds)
    rule: dict[str, Any] = {"margin": margin, "cases": cases, "alpha": alpha, "max_seeds": max_seeds}
    sides = {"a": a, "b": b}
    described = [name for name, side in sides.items() if isinstance(side, Mapping) and not _is_numbers(side)]
    fixed = [name for name, side in sides.items() if name not in described and not _can_continue(side)]
    if described and fixed:
        raise UserError(
            f"{described[0]} is to be run, but {fixed[0]} has records only, which get no further seeds. Describe "
            f"{fixed[0]} by its arguments of bench.run too."
        )
    if not described and (fixed or not add_seeds):
        first_side: Any = a
        second_side: Any = b
        return compare(first_side, second_side, score, by=by, seed=seed, first_seed=first_seed, **rule)
    if not add_seeds:
        raise UserError(f"add_seeds=False: {described[0]} has no results yet. Use results or recorded runs.")
    first = FIRST_SEED if first_seed is None else first_seed
    stream = _find_stream(stream, a, b)
    console = progress if isinstance(progress, Console) else Console(stderr=True) if progress else None
    both = _Side.of(a, "a", stream, runs, first + max_seeds), _Side.of(b, "b", stream, runs, first + max_seeds)
    looks = _Looks(stream, both, {**rule, "first_seed": first, "score": check_score(score, stream)}, console)
    check_experiments(*looks.configs, *(side.experiment.objects for side in both))
    looks.print_reach()
    for size in looks_up_to(max_seeds):
        verdict = looks.run(range(first, first + size), runs=runs, device=device, lanes=lanes, threads=threads)
        if verdict.is_decided:
            break
    return verdict


def _is_numbers(side: Mapping[Any, Any]) -> bool:
    """Whether a mapping has scores by seed, and not arguments of `run` by name."""
    return not any(isinstance(key, str) for key in side)


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
        rule: Arguments of `compare`.
        console: Terminal or notebook to print to; None for no output.
    """

    def __init__(self, stream: Stream, sides: tuple[_Side, _Side], rule: Mapping[str, Any], console: Console | None):
        self._stream, self._sides, self._rule, self._console = stream, sides, rule, console
        self.configs = sides[0].experiment.config, sides[1].experiment.config
        self._names = experiment_names(*self.configs)
        self._has_reach = False
        self._line = ""

    def print_reach(self) -> None:
        """Say whether the margin can be reached, as soon as two seeds of both are known."""
        if self._has_reach or len(self._sides[0].records.keys() & self._sides[1].records.keys()) < 2:
            return
        self._has_reach = True
        values = list(self._verdict().differences.values())
        std = stdev(values) if len(values) > 1 else 0.0
        last = reach(std, *(self._rule[key] for key in ("margin", "cases", "max_seeds", "alpha")))
        text = f"Equivalence: {last}, if the spread of the differences stays as it is."
        if last.is_possible:
            self._print(text)
        else:
            log.warning(text)

    def run(self, seeds: range, **options: Any) -> Verdict:
        """Run those seeds of a look that are not known for both, and decide."""
        missing = [seed for seed in seeds if not all(side.knows(seed) for side in self._sides)]
        if missing:
            experiments = [side.experiment for side in self._sides]
            progress = self._console or False
            outcomes = run_experiments(
                self._stream, experiments, seeds=missing, progress=progress, monitor=self, **options
            )
            for side, outcome in zip(self._sides, outcomes, strict=True):
                side.add(outcome, missing)
        verdict = self._verdict()
        self._line = verdict.sentence
        if missing or verdict.is_decided:
            self._print(self._line)
            self.print_reach()
        return verdict

    def _verdict(self) -> Verdict:
        """Decide by the seeds that are known."""
        a, b = (
            Result(side.records.values(), diverged=side.diverged, stream=self._stream, objects=side.experiment.objects)
            for side in self._sides
        )
        return compare(a, b, **self._rule)

    def _print(self, text: str) -> None:
        if self._console is not None:
            self._console.print(Text(escape_terminal(text)), soft_wrap=True)

    def start(self, runs: Sequence[Run]) -> None:
        pass

    def label(self, run: Run) -> str:
        """Return the name of a run on progress bars."""
        return f"{self._names[self.configs.index(run.config)]}, seed {run.seed}"

    def update(self, event: Event) -> None:
        pass

    def __rich__(self) -> RenderableType:
        return Text(self._line)
