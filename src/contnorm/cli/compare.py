"""The `compare` command: differences between two runs in settings and scores, and a verdict. Needs no torch.

A run here has all its seeds. Scores are paired over the shared seeds. Runs that share no seed, or did not see the same
samples, are compared unpaired.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from contnorm.bench.comparison import (
    differing_keys,
    experiment_names,
    list_variations,
    paired_verdict,
    score_title,
    short_key,
    unpaired_verdict,
)
from contnorm.bench.config.defaults import differences, run_names
from contnorm.bench.config.sources import format_value
from contnorm.bench.decision import decision_sentence
from contnorm.bench.fingerprint import Match, compare_fingerprints, not_comparable
from contnorm.bench.metrics.accuracy_matrix import SCORES
from contnorm.bench.metrics.accuracy_matrix import score as score_of_matrix
from contnorm.bench.metrics.multilabel import LABEL_SCORES
from contnorm.bench.records import Record, Runs, Store, group_by_run, spread_over_seeds
from contnorm.bench.selection import has_operator, parse_selection, setting_keys, value_of
from contnorm.bench.sequential import FIRST_SEED, decide_differences
from contnorm.bench.spread import spread_ratio
from contnorm.bench.stats import (
    bootstrap_difference,
    bootstrap_interval,
    cohens_d,
    effect_size,
    t_interval,
    welch_interval,
)
from contnorm.cli.common import RunsFolder, Where, console, is_explicit
from contnorm.cli.examples import Example, examples
from contnorm.cli.show import load_selection
from contnorm.cli.tables import print_error, print_text, safe_text, show_rows
from contnorm.errors import UserError, unknown
from contnorm.paper.format import spread
from contnorm.paper.record_remarks import digits_remarks
from contnorm.paper.scores import score_title as column_title
from contnorm.report.runs import GROUPS_SHOWN, LABEL_SCORES_SHOWN, SCORES_SHOWN, divergence_lines, unknown_names

__all__ = ["SelectedRun", "TwoRuns", "compare", "different_samples", "select_run", "show_comparison", "split_sides"]

TwoRuns = Annotated[
    list[str],
    typer.Argument(
        metavar="[RUNS] A B",
        help="Two runs, each a selection (norm=cn, or norm=cn,lr=0.01), a path, or a prefix of the run hash; before "
        "them, optionally, the folder or archive of records.",
    ),
]

# Settings that determine which samples are trained and tested on; the others do not change them.
SAMPLES = {
    "stream.name",
    "stream.source",
    "stream.tasks",
    "stream.train_per_task",
    "stream.test_per_task",
    "stream.class_order",
    "stream.part",
    "stream.holdout",
    "train.partial",
    "train.passes",
}


@dataclass(frozen=True)
class _Sides:
    """Records to compare: those of the shared seeds, in the same order, or all records if nothing can be paired."""

    a: list[Record]
    b: list[Record]
    paired: bool


@dataclass(frozen=True)
class SelectedRun:
    """Records of one run, and the keys by which it was selected; None if it was named by a path or a hash."""

    records: list[Record]
    diverged: Sequence[Record]
    problems: Sequence[str]
    keys: set[str] | None


@examples(
    Example("Compare two norms over their shared seeds.", "contnorm compare norm=bn norm=cn"),
    Example(
        "Compare their forgetting, from the records of an archive.",
        "contnorm compare records.jsonl.gz norm=bn norm=cn --score fm",
    ),
)
def compare(
    context: typer.Context,
    sides: TwoRuns,
    runs: RunsFolder = Path("runs"),
    where: Where = None,
    score: Annotated[str | None, typer.Option(help="Score of the verdict, such as fm; default: acc.")] = None,
) -> None:
    """Compare two runs: differing settings, score differences paired over shared seeds, and a verdict."""
    root, first, second = split_sides("compare", sides, runs, is_explicit(context, "runs"))
    store = Store(root)
    a, b = (select_run(text, store, where or ()) for text in (first, second))
    unknown_here = unknown_names([*a.records, *b.records])
    for problem in dict.fromkeys([*a.problems, *b.problems, *unknown_here]):
        print_error(problem)
    every = Runs([*a.records, *b.records], [*a.diverged, *b.diverged])
    notes = [*_unselected(a, b), *divergence_lines(every)]
    show_comparison(a.records, b.records, console, notes, score)


def split_sides(command: str, sides: Sequence[str], runs: Path, has_runs: bool) -> tuple[Path, str, str]:
    """Folder of records, and the two runs, from the arguments of a command."""
    if len(sides) == 2:
        return runs, sides[0], sides[1]
    if len(sides) != 3:
        raise UserError(
            f"{command}: expected two runs, got {len(sides)}. For example: contnorm {command} norm=bn norm=cn"
        )
    root = Path(sides[0])
    if not root.exists():
        raise UserError(f"{root}: there is no such folder or archive of records. Expected: {command} RUNS A B")
    if has_runs:
        raise UserError(f"{root} and --runs {runs}: name the records once.")
    return root, sides[1], sides[2]


def select_run(text: str, store: Store, where: Sequence[str]) -> SelectedRun:
    """Find one run by a selection, a path or a hash.

    Raises:
        UserError: If there is none, or if there are several; the message names what they differ in.
    """
    if has_operator(text) and not Path(text).exists():
        runs, _ = load_selection(store, None, [*where, text])
        keys = {condition.key for condition in parse_selection(text, setting_keys(runs.records))}
        if not runs.records:
            raise UserError(f"all runs with {' '.join([*where, text])} diverged, so they have no scores.")
    else:
        runs, keys = load_selection(store, [text], where)[0], None
        if not runs.records:
            raise UserError(f"{text}: no finished run of it has {' '.join(where)}.")
    configs = [group[0].config for group in group_by_run(runs.records).values()]
    if len(configs) > 1:
        key = next(iter(differing_keys(configs[0], configs[1])), "hash")
        value = configs[0].hash if key == "hash" else format_value(value_of(runs.records[0], key))
        raise UserError(
            f"{text}: selects {len(configs)} runs, which differ in {list_variations(configs)}. Narrow it down, such as "
            f"{text},{short_key(key)}={value}."
        )
    records = sorted(runs.records, key=lambda record: record.seed)
    return SelectedRun(records, [run for run in runs.diverged if run.hash == configs[0].hash], runs.problems, keys)


def _unselected(a: SelectedRun, b: SelectedRun) -> list[str]:
    """Warning about settings that differ although neither selection names them."""
    if a.keys is None or b.keys is None:
        return []
    selected = a.keys | b.keys
    selected |= {"norm.groups", "norm.auto_channels"} if "norm.name" in selected else set()
    differing = [key for key in differing_keys(a.records[0].config, b.records[0].config) if key not in selected]
    if not differing:
        return []
    values = [
        f"{key} ({format_value(value_of(a.records[0], key))} and {format_value(value_of(b.records[0], key))})"
        for key in differing
    ]
    return [f"warning: A and B also differ in {', '.join(values)}, which the selections do not name."]


def show_comparison(
    a: list[Record], b: list[Record], console: Console, notes: Sequence[str] = (), score: str | None = None
) -> None:
    """Print the differing settings, the scores with the 95 % interval of the mean difference, and a verdict.

    Args:
        a: Records of the first run.
        b: Records of the second run.
        console: Terminal to print to.
        notes: Lines to print before the verdict.
        score: Name of the score of the verdict; None for the first one.
    """
    if a[0].multi_label != b[0].multi_label:
        raise UserError("one run is multi-label and the other is not: they share no score. Compare runs of one kind.")
    different = different_samples(a, b)
    unknown_data = "" if different else not_comparable(*(_fingerprint(side[0]) for side in (a, b)))
    sides = _sides(a, b, bool(different))
    verdict = _verdict(sides, score)
    _show_settings(a[0], b[0], console)
    if different:
        console.print(safe_text(f"warning: A and B did not use the same samples ({different}), so they are unpaired."))
    if unknown_data:
        print_text(f"warning: A and B may have used different data: {unknown_data}.", console)
    if not different and (tasks := _different_tasks(sides)):
        print_text(
            f"warning: A and B were evaluated on different tasks ({tasks}), so their scores are not comparable.",
            console,
        )
    if not different and not sides.paired:
        console.print(safe_text(f"A and B share no seed ({_seeds(a)}; {_seeds(b)}), so seeds are not paired."))
    console.print()
    show_rows(HEADS, _rows(sides), console)
    print_text(_footer(sides, len(a), len(b)), console)
    for line in [*digits_remarks([*a, *b]), *notes]:
        print_text(line, console)
    console.print()
    for line in [*_evidence(sides, score), verdict]:
        print_text(line, console)


def _verdict(sides: _Sides, score: str | None) -> str:
    """Sentence on which run has the higher score."""
    a, b = sides.a[0], sides.b[0]
    title, value = _verdict_score(a, b, score)
    if a.config.stream.name != b.config.stream.name:
        return "No verdict: A and B have different streams, so their scores are not comparable."
    if _different_tasks(sides):
        return "No verdict: A and B were evaluated on different tasks, so their scores are not comparable."
    first, second = experiment_names(a.config, b.config)
    names = ("B", "A") if (first, second) == ("a", "b") else (second, first)
    try:
        values, others = ([value(record) for record in side] for side in (sides.b, sides.a))
    except ValueError as error:
        raise UserError(f"--score {score}: {error}") from error
    if sides.paired:
        return paired_verdict(title, names, [y - x for x, y in zip(others, values, strict=True)])
    return unpaired_verdict(title, names, values, others)


def _evidence(sides: _Sides, score: str | None) -> list[str]:
    """Verdict of the staged rule if there are enough fresh seeds, and the spread over seeds; none if unpaired."""
    a, b = sides.a[0], sides.b[0]
    if not sides.paired or a.hash == b.hash or _different_tasks(sides):
        return []
    _, value = _verdict_score(a, b, score)
    title = score or (LABEL_SCORES if a.multi_label else list(SCORES))[0]
    values, others = ({record.seed: value(record) for record in side} for side in (sides.b, sides.a))
    first, second = experiment_names(a.config, b.config)
    names = ("B", "A") if (first, second) == ("a", "b") else (second, first)
    lines = []
    decision = decide_differences({seed: values[seed] - others[seed] for seed in values})
    if decision.looks:
        lines.append(f"In stages, seeds from {FIRST_SEED} on: {decision_sentence(decision, names, title)}")
    with suppress(UserError):  # too few seeds, or all scores are equal
        spread_over = spread_ratio(values, others)
        lines.append(replace(spread_over, score=score_title(title), names=names).sentence)
    return lines


def _verdict_score(a: Record, b: Record, score: str | None) -> tuple[str, Callable[[Record], float]]:
    """Title and function of the score of the verdict; with running moments if both runs were evaluated with them."""
    known: Sequence[str] = LABEL_SCORES if a.multi_label else list(SCORES)
    name = known[0] if score is None else score
    if name not in known:
        raise unknown("score", name, known)
    title = column_title(name)
    shared = [] if a.multi_label else _shared_moments(a, b)
    if not shared:
        return title, partial(Record.score, name=name)
    return title, partial(_score_of, moments=shared[0], name=name)


def _sides(a: list[Record], b: list[Record], different: bool) -> _Sides:
    """``different``: the runs did not use the same samples, so that equal seeds do not pair them."""
    first, second = ({record.seed: record for record in records} for records in (a, b))
    seeds = sorted(first.keys() & second.keys())
    if different or not seeds:
        return _Sides(a, b, paired=False)
    return _Sides([first[seed] for seed in seeds], [second[seed] for seed in seeds], paired=True)


def _seeds(records: list[Record]) -> str:
    return ", ".join(str(record.seed) for record in records)


def _footer(sides: _Sides, seeds_a: int, seeds_b: int) -> str:
    """Sentences that say how the differences were computed."""
    count = len(sides.a) if sides.paired else max(len(sides.a), len(sides.b))
    if sides.paired:
        pairing = f"{count} seed{'s' if count > 1 else ''}, paired; differences are B minus A."
        unpaired = [f"{n - count} of {side}" for n, side in ((seeds_a, "A"), (seeds_b, "B")) if n > count]
        if unpaired:
            pairing += f" Seeds that only one run has are left out: {', '.join(unpaired)}."
        how = (
            "95 % interval: Student's t, two-sided. Bootstrap: 95 % interval by resampling the differences (too narrow "
            "with few seeds). Effect: mean of the differences divided by their standard deviation."
        )
    else:
        pairing = f"Unpaired: {len(sides.a)} seeds of A, {len(sides.b)} of B; differences are B minus A."
        how = (
            "95 % interval: Welch's, two-sided. Bootstrap: 95 % interval by resampling each side (too narrow with few "
            "seeds). Effect: difference of the means divided by the pooled standard deviation."
        )
    return pairing if count == 1 else f"{pairing} {how}"


def _show_settings(a: Record, b: Record, console: Console) -> None:
    for letter, record in (("A", a), ("B", b)):
        console.print(safe_text(f"{letter}  {record.config.hash}  {' '.join(run_names(record.config))}"))
    differing = differences(a.config, b.config)
    console.print(safe_text("differing settings:" if differing else "no differing settings"))
    for key, (old, new) in differing.items():
        console.print(safe_text(f"  {key}: {format_value(old)} -> {format_value(new)}"))


def different_samples(a: Sequence[Record], b: Sequence[Record]) -> str:
    """Why two runs did not use the same samples; empty if they did."""
    keys = differences(a[0].config, b[0].config).keys() & SAMPLES
    if keys:
        return ", ".join(sorted(keys))
    seeds = {record.seed for record in a} & {record.seed for record in b}
    pairs = {
        (_fingerprint(one), _fingerprint(other))
        for one, other in product(a, b)
        if not seeds or (one.seed == other.seed and one.seed in seeds)
    }
    other_data = any(compare_fingerprints(*pair) is Match.DIFFERENT for pair in pairs)
    return f"{a[0].config.stream.source} has different content" if other_data else ""


def _different_tasks(sides: _Sides) -> str:
    """Number of tasks that each side was evaluated on; empty if equal. Runs with --max-steps reach only some tasks."""
    tasks = [[record.counted.tasks for record in side] for side in (sides.a, sides.b)]
    same = tasks[0] == tasks[1] if sides.paired else set(tasks[0]) == set(tasks[1])
    if same:
        return ""
    counts = (" or ".join(map(str, sorted(set(some)))) for some in tasks)
    return "; ".join(f"{letter}: the first {many}" for letter, many in zip("AB", counts, strict=True))


def _fingerprint(record: Record) -> object:
    return (record.raw.get("source") or {}).get("fingerprint")


HEADS = ("score", "A", "B", "B - A", "95 % interval", "bootstrap", "effect")


def _rows(sides: _Sides) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for title, value in _scores(sides.a[0], sides.b[0]).items():
        a, b = ([value(record) for record in side] for side in (sides.a, sides.b))
        rows.append((title, spread(a), spread(b), *(_paired(a, b) if sides.paired else _unpaired(a, b))))
    return rows


def _paired(a: list[float], b: list[float]) -> tuple[str, str, str, str]:
    """Difference, intervals and effect size of scores that are paired by seed."""
    differences = [y - x for x, y in zip(a, b, strict=True)]
    text = spread(differences)
    signed = text if text.startswith("-") else f"+{text}"
    return signed, interval(differences), str(bootstrap_interval(differences) or "-"), effect(differences)


def _unpaired(a: list[float], b: list[float]) -> tuple[str, str, str, str]:
    """Difference, intervals and effect size of scores that can't be paired.

    Example:
        >>> _unpaired([1.0, 2.0, 3.0], [3.0, 4.0, 5.0])[:2], _unpaired([1.0], [3.0, 4.0])[1]
        (('+2.00', '-0.27 to +4.27'), 'none: one seed')
    """
    (mean, _), (other, std) = spread_over_seeds(b), spread_over_seeds(a)
    welch = welch_interval(b, other, std, len(a))
    none = "none: one seed" if min(len(a), len(b)) < 2 else "-"
    return _signed(mean - other), str(welch or none), str(bootstrap_difference(b, a) or "-"), _signed(cohens_d(b, a))


def _signed(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:+.2f}"


def _scores(a: Record, b: Record) -> dict[str, Callable[[Record], float]]:
    """Scores to compare, by title: running moments with running moments, exact moments with exact moments.

    For multi-label streams, the scores of all labels and of each group of labels.
    """
    if not a.multi_label:
        shared = _shared_moments(a, b)
        if not shared:  # such as running against exact moments: the listed differences say so
            return {column_title(name): partial(Record.score, name=name) for name in SCORES_SHOWN}
        return {
            title if moments == "running" else f"{title}, exact moments": partial(_score_of, moments=moments, name=name)
            for moments in ("running", "oracle")
            if moments in shared
            for name, title in ((name, column_title(name)) for name in SCORES_SHOWN)
        }
    return {
        title if labels == "overall" else f"{title}, {labels}": partial(Record.score, name=name, group=labels)
        for name, title in ((name, column_title(name)) for name in LABEL_SCORES_SHOWN)
        for labels in GROUPS_SHOWN
    }


def _shared_moments(a: Record, b: Record) -> list[str]:
    """Moments that both networks were evaluated with; none if the settings of one are such that it is compared as set.

    Exact moments are not available in practice, so that runs with them are compared with running moments too. Moments
    of the memory and of tasks are: there the scores with running moments are only an addition.
    """
    if {a.config.evaluate.moments, b.config.evaluate.moments} & {"memory", "task"}:
        return []
    return [moments for moments in a.evaluated if moments in b.evaluated]


def _score_of(record: Record, moments: str, name: str) -> float:
    return score_of_matrix(record.evaluated[moments], name)


def interval(differences: list[float]) -> str:
    """95 % interval of the mean difference; there is none for one seed or if all differences are equal.

    Example:
        >>> interval([1.0, 2.0, 3.0]), interval([1.0]), interval([2.0, 2.0])
        ('-0.48 to +4.48', 'none: one seed', '-')
    """
    if len(differences) < 2:
        return "none: one seed"
    return "-" if math.isnan(effect_size(differences)) else str(t_interval(differences))


def effect(differences: list[float]) -> str:
    """Mean of the differences divided by their standard deviation; none for one seed or if all are equal.

    Example:
        >>> effect([1.0, 2.0, 3.0]), effect([1.0]), effect([2.0, 2.0])
        ('+2.00', '-', '-')
    """
    return _signed(effect_size(differences))
