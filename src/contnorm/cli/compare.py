"""The `compare` command: differences between two runs in settings and scores, and a verdict. Needs no torch.

A run here has all its seeds. Scores are paired over the shared seeds. Runs that share no seed, or did not see the same
samples, are shown unpaired, without a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from contnorm.bench.comparison import (
    check_experiments,
    data_difference,
    differing_keys,
    list_variations,
    scores_of,
    short_key,
)
from contnorm.bench.comparison import (
    compare as compare_records,
)
from contnorm.bench.config.defaults import differences, run_names
from contnorm.bench.config.sources import format_value
from contnorm.bench.fingerprint import not_comparable
from contnorm.bench.label_metrics import LABEL_SCORES, LabelMatrix, label_score
from contnorm.bench.metrics import MAIN_SCORES
from contnorm.bench.records import Record, Runs, Store, group_by_run, spread_over_seeds
from contnorm.bench.selection import has_operator, parse_selection, setting_keys, value_of
from contnorm.bench.sequential import MARGIN, Verdict, score_title
from contnorm.bench.stats import t_interval, welch_interval
from contnorm.cli.common import (
    RunsFolder,
    Where,
    console,
    print_error,
    print_lines,
    print_text,
    show_rows,
)
from contnorm.cli.show import load_selection
from contnorm.errors import UserError
from contnorm.paper.text import digits_remarks, spread
from contnorm.report.runs import GROUPS_SHOWN, divergence_lines, unknown_names

HEADS = ("score", "A", "B", "B - A", "95 % interval")
HOW = (
    "95 % interval: {kind}, of one comparison that is looked at once. The verdict allows for looks at 16, 24, 32, ... "
    "and 128 seeds, from seed 100 on, so that its interval is wider."
)

TwoRuns = Annotated[
    list[str],
    typer.Argument(
        metavar="[RUNS] A B",
        help="Two runs, each a selection (norm=cn, or norm=cn,lr=0.01), a path, or a prefix of the run hash; before "
        "them, optionally, the folder or archive of records.",
    ),
]


@dataclass(frozen=True)
class SelectedRun:
    """Records of one run, and the keys by which it was selected; None if it was named by a path or a hash."""

    records: list[Record]
    diverged: Sequence[Record]
    problems: Sequence[str]
    keys: set[str] | None


def compare(
    sides: TwoRuns,
    runs: RunsFolder = Path("runs"),
    where: Where = None,
    score: Annotated[
        str | None, typer.Option(help="Score of the verdict, such as aia, the mean over the stream; default: acc.")
    ] = None,
    moments: Annotated[
        str | None, typer.Option(help="Evaluation to compare, such as running or memory, or one for each run: A,B.")
    ] = None,
    margin: Annotated[float, typer.Option(help="Largest difference in points that counts as equivalent.")] = MARGIN,
    cases: Annotated[int, typer.Option(help="Number of comparisons that are decided together.")] = 1,
) -> None:
    """Compare two runs: differing settings, scores paired over shared seeds, a verdict, and the seeds it needs.

    Examples:
        # Compare two norms over their shared seeds.
        contnorm compare norm=bn norm=cn
        # Compare their mean over the stream, from the records of an archive.
        contnorm compare records.jsonl.gz norm=bn norm=cn --score aia
    """
    if len(sides) not in (2, 3):
        raise UserError(f"compare: expected two runs, got {len(sides)}. For example: contnorm compare norm=bn norm=cn")
    store = Store(Path(sides[0]) if len(sides) == 3 else runs)
    a, b = (select_run(text, store, where or ()) for text in sides[-2:])
    unknown_here = unknown_names([*a.records, *b.records])
    for problem in dict.fromkeys([*a.problems, *b.problems, *unknown_here]):
        print_error(problem)
    every = Runs([*a.records, *b.records], [*a.diverged, *b.diverged])
    notes = [*_unselected(a, b), *divergence_lines(every)]
    kinds = [*moments.split(","), *moments.split(",")] if moments else [None, None]
    show_comparison(a, b, console, notes, score, (kinds[0], kinds[1]), margin=margin, cases=cases)


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
    a: SelectedRun | Runs,
    b: SelectedRun | Runs,
    console: Console,
    notes: Sequence[str] = (),
    score: str | None = None,
    moments: tuple[str | None, str | None] = (None, None),
    *,
    margin: float = MARGIN,
    cases: int = 1,
) -> None:
    """Print the differing settings, the scores with ordinary intervals of the mean differences, and the verdict.

    Args:
        a, b: The runs.
        console: Terminal to print to.
        notes: Lines to print before the verdict.
        score: Name of the score of the verdict; None for the first one.
        moments: Evaluation of each run to compare; None for that of its settings.
        margin, cases: As in `bench.compare`.
    """
    first, second = list(a.records), list(b.records)
    if first[0].multi_label != second[0].multi_label:
        raise UserError("one run is multi-label and the other is not: they share no score. Compare runs of one kind.")
    different = data_difference(first, second)
    paired = not different and bool({r.seed for r in first} & {r.seed for r in second})
    verdict = None
    if paired:
        check_experiments(first[0].config, second[0].config, evaluations=moments)
        both = moments if moments[0] != moments[1] else moments[0]
        swapped = (both[1], both[0]) if isinstance(both, tuple) else both
        verdict = compare_records(
            Runs(second, b.diverged), Runs(first, a.diverged), score, moments=swapped, margin=margin, cases=cases
        )
    _show_settings(first[0], second[0], console)
    prints = [(side[0].raw.get("source") or {}).get("fingerprint") for side in (first, second)]
    unknown_data = "" if different else not_comparable(*prints)
    if unknown_data:
        print_text(f"warning: A and B may have used different data: {unknown_data}.", console)
    console.print()
    values = [_values(side, kind) for side, kind in zip((first, second), moments, strict=True)]
    show_rows(HEADS, [_row(title, values[0][title], values[1][title], paired) for title in values[0]], console)
    print_text(_footer(first, second, paired), console)
    for line in [*digits_remarks([*first, *second]), *notes]:
        print_text(line, console)
    console.print()
    why = f"A and B did not use the same data: {different}" if different else "A and B share no seed"
    for line in [f"No verdict: {why}."] if verdict is None else _verdict_lines(verdict):
        print_text(line, console)


def _verdict_lines(verdict: Verdict) -> list[str]:
    """Verdict, the same with diverged runs at chance, the spread over seeds, and the seeds needed."""
    lines = [verdict.sentence]
    if verdict.at_chance is not None:
        lines.append(f"With diverged runs as chance accuracy: {verdict.at_chance.sentence}")
    if spread_over := verdict.spread:
        (a, b), title = verdict.names, score_title(verdict.score)
        unclear = f"Undecided whether the spread of {title} over seeds differs between {a} and {b}"
        clear = f"{a} has a {spread_over.outcome} spread of {title} over seeds than {b}"
        lines.append(f"{unclear if spread_over.outcome == 'undecided' else clear}: {spread_over}.")
    return [*lines, verdict.plan] if verdict.plan else lines


def _values(records: Sequence[Record], moments: str | None) -> dict[str, dict[int, float]]:
    """Values by seed of each score to show, by its title; of multi-label runs also for groups of labels."""
    if not records[0].multi_label:
        scores = {record.seed: scores_of(record, moments) for record in records}
        return {score_title(name): {seed: one[name] for seed, one in scores.items()} for name in MAIN_SCORES}
    values: dict[str, dict[int, float]] = {}
    for name in LABEL_SCORES:
        for group in GROUPS_SHOWN:
            title = score_title(name) if group == "overall" else f"{score_title(name)}, {group}"
            for record in records:
                counts = record.counted if moments is None else record.evaluated[moments]
                assert isinstance(counts, LabelMatrix)
                values.setdefault(title, {})[record.seed] = label_score(counts, name, record.classes_of(group))
    return values


def _row(title: str, a: Mapping[int, float], b: Mapping[int, float], paired: bool) -> tuple[str, ...]:
    if not paired:
        (mean, _), (other, std) = spread_over_seeds(list(b.values())), spread_over_seeds(list(a.values()))
        difference = "-" if math.isnan(mean - other) else f"{mean - other:+.2f}"
        interval = welch_interval(list(b.values()), other, std, len(a))
        return title, spread(list(a.values())), spread(list(b.values())), difference, str(interval or "-")
    seeds = sorted(a.keys() & b.keys())
    ours, theirs = [b[seed] for seed in seeds], [a[seed] for seed in seeds]
    values = [y - x for x, y in zip(theirs, ours, strict=True)]
    text = spread(values)
    signed = text if text.startswith("-") else f"+{text}"
    return title, spread(theirs), spread(ours), signed, str(t_interval(values) or "-")


def _footer(a: Sequence[Record], b: Sequence[Record], paired: bool) -> str:
    """Sentences that say how the differences were computed."""
    if not paired:
        how = HOW.format(kind="Welch's, two-sided")
        return f"Unpaired: {len(a)} seeds of A, {len(b)} of B; differences are B minus A. {how}"
    count = len({record.seed for record in a} & {record.seed for record in b})
    text = f"{count} seed{'s' if count > 1 else ''}, paired; differences are B minus A."
    left_out = [f"{len(side) - count} of {name}" for side, name in ((a, "A"), (b, "B")) if len(side) > count]
    text += f" Seeds that only one run has are left out: {', '.join(left_out)}." if left_out else ""
    return f"{text} {HOW.format(kind='Student' + chr(39) + 's t, two-sided')}"


def _show_settings(a: Record, b: Record, console: Console) -> None:
    differing = differences(a.config, b.config)
    lines = [f"{side}  {one.config.hash}  {' '.join(run_names(one.config))}" for side, one in (("A", a), ("B", b))]
    lines.append("differing settings:" if differing else "no differing settings")
    lines += [f"  {key}: {format_value(old)} -> {format_value(new)}" for key, (old, new) in differing.items()]
    print_lines(lines, console)
