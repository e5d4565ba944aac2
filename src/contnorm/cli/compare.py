"""The `compare` command: differences between two runs in settings and scores, and a verdict. Needs no torch.

A run here has all its seeds. Scores are paired over the shared seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from contnorm.bench import comparison
from contnorm.bench.config.defaults import differences, run_names
from contnorm.bench.config.schema import format_value
from contnorm.bench.data.dataset import not_comparable
from contnorm.bench.label_metrics import LABEL_SCORES
from contnorm.bench.metrics import MAIN_SCORES, score_title
from contnorm.bench.records import Runs, Store, group_by_run
from contnorm.bench.selection import has_operator, value_of
from contnorm.bench.sequential import MARGIN, Verdict
from contnorm.bench.stats import t_interval
from contnorm.bench.text import digits_remarks, spread
from contnorm.cli.common import RunsFolder, Where, print_error, print_lines, print_text, show_rows
from contnorm.cli.show import load_selection
from contnorm.errors import UserError
from contnorm.report.runs import divergence_lines

HOW = (
    "differences are B minus A. 95 % interval: Student's t, two-sided, of one comparison that is looked at once. The "
    "verdict allows for looks at 16, 24, 32, ... and 128 seeds, from seed 100 on, so that its interval is wider."
)

TwoRuns = Annotated[
    list[str],
    typer.Argument(
        metavar="[RUNS] A B",
        help="Two runs, each a selection (norm=cn, or norm=cn,lr=0.01), a path, or a prefix of the run hash; before "
        "them, optionally, the folder or archive of records.",
    ),
]


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
    every = [*a.records, *b.records]
    for problem in dict.fromkeys([*a.problems, *b.problems]):
        print_error(problem)
    kinds = (*moments.split(","), *moments.split(","))[:2] if moments else (None, None)
    evaluations = (kinds[1], kinds[0]) if kinds[0] != kinds[1] else kinds[0]
    verdict = comparison.compare(b, a, score, moments=evaluations, margin=margin, cases=cases)
    first, second = a.records[0], b.records[0]
    lines = [f"{side}  {one.hash}  {' '.join(run_names(one.config))}" for side, one in (("A", first), ("B", second))]
    differing = differences(first.config, second.config)
    lines.append("differing settings:" if differing else "no differing settings")
    print_lines(
        [*lines, *(f"  {key}: {format_value(x)} -> {format_value(y)}" for key, (x, y) in differing.items()), ""]
    )
    rows, shared = [], sorted({one.seed for one in a.records} & {one.seed for one in b.records})
    scores = [
        {one.seed: comparison.scores_of(one, kind) for one in side.records}
        for side, kind in zip((a, b), kinds, strict=True)
    ]
    for name in LABEL_SCORES if first.multi_label else MAIN_SCORES:
        ours, theirs = ([by_seed[seed][name] for seed in shared] for by_seed in scores)
        values = [y - x for x, y in zip(ours, theirs, strict=True)]
        text = spread(values)
        signed = text if text.startswith("-") else f"+{text}"
        rows.append([score_title(name), spread(ours), spread(theirs), signed, str(t_interval(values) or "-")])
    show_rows(("score", "A", "B", "B - A", "95 % interval"), rows)
    left_out = [f"{len(one) - len(shared)} of {name}" for one, name in ((a, "A"), (b, "B")) if len(one) > len(shared)]
    rest = f" Seeds that only one run has are left out: {', '.join(left_out)}." if left_out else ""
    print_text(f"{len(shared)} seed{'s' if len(shared) > 1 else ''}, paired; {HOW}{rest}")
    prints = [(one.raw.get("source") or {}).get("fingerprint") for one in (first, second)]
    if unknown := not_comparable(*prints):
        print_text(f"warning: A and B may have used different data: {unknown}.")
    both = Runs(every, [*a.diverged, *b.diverged])
    for line in [*digits_remarks(every), *divergence_lines(both), *_verdict_lines(verdict)]:
        print_text(line)


def select_run(text: str, store: Store, where: Sequence[str]) -> Runs:
    """Find one run by a selection, a path or a hash.

    Raises:
        UserError: If there is none, or if there are several; the message names what they differ in.
    """
    is_selection = has_operator(text) and not Path(text).exists()
    runs = load_selection(store, None, [*where, text]) if is_selection else load_selection(store, [text], where)
    if not runs.records:
        raise UserError(f"all runs with {' '.join([*where, text])} diverged, so they have no scores.")
    configs = [group[0].config for group in group_by_run(runs.records).values()]
    if len(configs) > 1:
        key = next(iter(comparison.differing_keys(configs[0], configs[1])), "hash")
        value = configs[0].hash if key == "hash" else format_value(value_of(runs.records[0], key))
        raise UserError(
            f"{text}: selects {len(configs)} runs, which differ in {comparison.list_variations(configs)}. Narrow it "
            f"down, such as {text},{comparison.short_key(key)}={value}."
        )
    diverged = [run for run in runs.diverged if run.hash == configs[0].hash]
    return Runs(sorted(runs.records, key=lambda record: record.seed), diverged, runs.problems)


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
