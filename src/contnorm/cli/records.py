"""Commands that read records: `show` prints scores, `compare` gives a verdict, `report` writes pages. No torch needed.

A run here has all its seeds. `compare` pairs the scores of two runs over the seeds that both have.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from contnorm.atomic_files import write_atomically
from contnorm.bench import comparison
from contnorm.bench.config.defaults import differences, run_names
from contnorm.bench.config.schema import format_value
from contnorm.bench.data.dataset import not_comparable
from contnorm.bench.label_metrics import LABEL_SCORES
from contnorm.bench.metrics import MAIN_SCORES, score_title
from contnorm.bench.records import Record, Runs, Store, group_by_run
from contnorm.bench.selection import has_operator, no_match, resolve_key, value_of
from contnorm.bench.sequential import MARGIN, Verdict
from contnorm.bench.stats import t_interval
from contnorm.bench.text import digits_remarks, spread
from contnorm.bench.unfinished import unfinished_runs
from contnorm.cli.common import RunsFolder, Where, console, print_error, print_lines, print_text, show_rows
from contnorm.errors import UserError
from contnorm.report import collect_report, write_report
from contnorm.report.runs import accuracy_tables, divergence_lines, score_tables
from contnorm.report.tables import Document, Table, markdown

if TYPE_CHECKING:
    from pandas import DataFrame

COLUMNS = "run,stream,strategy,norm,lr,seeds,acc,fm,la,aia"
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


def show(
    run: Annotated[
        list[str] | None,
        typer.Argument(help="Runs to show: paths of runs or folders, or prefixes of run hashes; default: all."),
    ] = None,
    runs: RunsFolder = Path("runs"),
    where: Where = None,
    sort: Annotated[
        str | None,
        typer.Option(help="Scores or settings to sort by, such as acc or norm,acc: best score or lowest value first."),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(help="Settings and scores to show, such as norm,lr,acc,bwt; also run, seeds, seconds, device."),
    ] = None,
    by_task: Annotated[bool, typer.Option("--by-task", help="Show the full accuracy matrix of each run.")] = False,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            help="File to write: .csv, .json or .parquet with one row per seed and a column per setting, .md or .tex "
            "with the table that is shown, .jsonl.gz with the records themselves.",
        ),
    ] = None,
) -> None:
    """Show the scores of finished runs, averaged over seeds, or write them to a file.

    Examples:
        # Show the mean scores of all runs.
        contnorm show
        # Show chosen columns of the runs with CN, best accuracy first.
        contnorm show --where norm=cn --columns norm,lr,acc,fm --sort acc
        # Write a table with one row per run and seed.
        contnorm show --to runs.csv
        # Write all records to one file, which every command reads.
        contnorm show --to records.jsonl.gz
    """
    store = Store(runs)
    selected = load_selection(store, run, where or ())
    if not selected.records and not (to and selected.diverged):
        raise UserError(f"all runs with {' '.join(where or ())} diverged, so they have no scores.")
    for problem in selected.problems:
        print_error(problem)
    if to is not None and to.suffix not in (".md", ".tex"):
        selected.save(to, by_task)
        counts = f"{len(selected.records)} finished and {len(selected.diverged)} diverged runs"
        print_lines([f"{counts} written to {to}"])
        raise typer.Exit(2 if selected.problems else 0)
    if by_task:
        tables = list(accuracy_tables(selected.records))
    elif columns or sort:
        tables = [column_table(selected, columns or COLUMNS, sort or "stream,strategy")]
    else:
        tables = score_tables(selected)
    if to is not None:
        text = markdown(Document("runs", "Runs", tables)) if to.suffix == ".md" else _latex(tables)
        write_atomically(to, text.encode())
        return
    _print(tables, console)
    for line in [*divergence_lines(selected), *unfinished_lines(store)]:
        print_text(line, console)


def load_selection(store: Store, names: Sequence[str] | None, where: Sequence[str]) -> Runs:
    """Load the records with some names, or all, that meet all conditions.

    Raises:
        UserError: If there is no such run, with the reason.
    """
    parts = [store.find(name) for name in names] if names else [store.load_all()]
    records = [record for part in parts for record in (*part.records, *part.diverged)]
    every = Runs.of(records, [problem for part in parts for problem in part.problems])
    if not records:
        hint = "".join(unfinished_lines(store)) or "Make one: contnorm run --norm cn"
        raise UserError("; ".join(every.problems) or f"no finished runs under {store.root}. {hint}")
    selected = every.where(*where)
    if not selected.records and not selected.diverged:
        raise UserError(no_match(records, where))
    return selected


def unfinished_lines(store: Store) -> list[str]:
    """One line that counts unfinished runs and names the command that resumes them; none without such runs."""
    unfinished = [] if store.read_only else unfinished_runs(store.root)
    if not unfinished:
        return []
    stopped = sum(not run.running for run in unfinished)
    resume = f" Resume with: contnorm resume --runs {shlex.quote(str(store.root))}" if stopped else ""
    return [f"Unfinished runs: {stopped} stopped, {len(unfinished) - stopped} in progress.{resume}"]


def show_scores(records: Sequence[Record], console: Console) -> None:
    """Print one row per run, with mean and standard deviation over its seeds; multi-label runs in a table below."""
    _print(score_tables(Runs(records)), console)


def show_matrices(records: Sequence[Record], console: Console) -> None:
    """Print the accuracy matrix of each run; for multi-label streams, the matrix of mAP."""
    _print(list(accuracy_tables(records)), console)


def _print(tables: Sequence[Table], console: Console) -> None:
    for table in tables:
        if table.title:
            print_text(table.title, console, "bold")
        show_rows(table.heads, table.rows, console, named=4, wrap_last=table.heads[-1] == "settings")
        for note in table.notes:
            if not note.startswith("Percent,"):  # what the scores are is in `contnorm show --help` and on pages
                print_text(note, console)


def _latex(tables: Sequence[Table]) -> str:
    """Tables for the LaTeX package booktabs."""
    texts = [table.frame.map(lambda cell: cell.replace("+-", "±")).style for table in tables]
    escaped = [style.format(escape="latex").hide(axis="index").to_latex(hrules=True) for style in texts]
    return "\n".join(escaped).replace("±", r"$\pm$")


def column_table(runs: Runs, columns: str, sort: str) -> Table:
    """Table of chosen columns with one row per run, sorted by chosen columns.

    Scores and times are mean and standard deviation over seeds. The best score comes first, of other columns the lowest
    value; missing values are last.
    """
    frame = runs.to_frame()
    frame = frame[frame["status"] == "finished"]
    shown = {name: _column(name, frame) for name in map(str.strip, columns.split(","))}
    numbers = list(frame.columns[frame.columns.get_loc("acc" if "acc" in frame else "c_f1") :])
    numbers = [key for key in numbers if key not in ("device", "torch")]
    groups = frame.groupby("hash", sort=False)
    values = groups.first()
    values[numbers] = groups[numbers].mean()
    values["hash"], values["seeds"] = values.index, groups.size()
    for name in reversed([one for one in sort.split(",") if one]):
        key = _column(name.strip(), frame)
        higher_first = key in numbers and not key.startswith("fm") and key != "seconds"
        values = values.sort_values(key, ascending=not higher_first, kind="stable", na_position="last")
    labels = {
        record.hash: dict(zip(("stream", "strategy", "norm"), run_names(record.config), strict=True)) for record in runs
    }
    rows = []
    for run in values.index:
        seeds = groups.get_group(run)
        cells = [
            labels[run].get(name)
            or (spread(seeds[key].tolist()) if key in numbers else format_value(values.at[run, key]))
            for name, key in shown.items()
        ]
        rows.append(cells)
    return Table("", list(shown), rows)


def _column(name: str, frame: DataFrame) -> str:
    """Column of `Runs.to_frame` of a typed name: a score, a setting, or a part of a run's identity."""
    if name in frame or name == "seeds":
        return name
    if name == "run":
        return "hash"
    return resolve_key(name, ["seeds", *frame.columns])


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
    return [*lines, verdict.seeds_needed] if verdict.seeds_needed else lines


def report(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File in .html or .md, or folder for Markdown files.")
    ] = Path("report.html"),
    table: Annotated[
        list[str] | None,
        typer.Option(
            help="Table of the paper to include: table2, ... or a TOML file; repeatable; default: all that the runs "
            "belong to."
        ),
    ] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option("--runs", help="Folder or archive of records; repeatable, for one report over several."),
    ] = None,
) -> None:
    """Write a report that compares the norms in your runs: an HTML page or Markdown.

    Examples:
        # Write report.html, which compares the norms of your runs.
        contnorm report
        # Write the tables as Markdown.
        contnorm report --out report.md
    """
    with Console(stderr=True).status("reading records and drawing figures"):
        content = collect_report(runs or [Path("runs")], table or ())
        files = write_report(content, out)
    for problem in content.runs.problems:
        print_error(problem)
    where = str(files[0]) if len(files) == 1 else f"{len(files)} files under {out}"
    print_lines([f"{content.lead[0]} See {where}"])
