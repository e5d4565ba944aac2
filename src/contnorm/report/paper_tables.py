"""The paper's tables and claims as sheets for Markdown and LaTeX, and as CSV rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from contnorm.bench.records import spread_over_seeds
from contnorm.paper.claims import ClaimCase, ClaimResult
from contnorm.paper.format import case_numbers, claim_criterion, no_interval_reason, paper_number, spread, verdict_text
from contnorm.paper.recipe import DIMENSIONS
from contnorm.paper.scores import score_title
from contnorm.paper.tables import Line
from contnorm.report.lr_grid import GRID_NOTE, grid_rows
from contnorm.report.sections import Part, Section, Unrun, Way, weakest
from contnorm.report.text_tables import Block, Link, Sheet, csv_text

__all__ = ["claims_csv", "claims_sheet", "section_sheet", "tables_csv"]

LINE_HEADS = ("norm", "score", "seeds", "ours", "paper", "difference", "95 % interval", "verdict")
CASE_HEADS = ("case", "difference", "95 % interval (t)", "bootstrap", "effect", "pairs", "outcome")


def section_sheet(section: Section) -> Sheet:
    """Sheet of a table or figure: our results next to the paper's, the missing runs, and the claims."""
    blocks = [block for variant in section.ways for block in _blocks(section, variant)]
    if section.selection is not None and section.selection.rates:
        heads, *rows = grid_rows(section.selection)
        blocks.append(Block("Learning rates tried on the validation tasks", heads, rows, (GRID_NOTE,)))
    return Sheet(section.recipe.name, section.title, blocks, section.notes, section.command)


def _blocks(section: Section, variant: Way) -> Iterator[Block]:
    of = f" ({variant.title.lower()})" if variant.title else ""
    for part in variant.parts:
        if part.run:
            yield (_curves if section.recipe.kind == "curves" else _lines)(section, part, of)
    missing = tuple(f"{part.title}: {', '.join(_norms(part))}" for part in variant.parts if _norms(part))
    if variant.remarks and variant.run:
        judged = any(line.comparison is not None for part in variant.parts for line in part.lines)
        yield Block(f"{'Verdicts' if judged else 'Remarks'}{of}", below=variant.remarks)
    if missing:
        yield Block(f"Not run{of}", below=missing)
    for decided in variant.decided:
        yield _claim(decided, of, variant.whole)


def _norms(part: Part) -> list[str]:
    return [one.cell.norm for one in part.measured if not one.run]


def _lines(section: Section, part: Part, of: str) -> Block:
    if all(line.published is None for line in part.lines):
        return _ours_alone(section, part, of)
    rows = [_line(line, section.row_name(line.measured)) for line in part.lines]
    return Block(f"{part.title}{of}", LINE_HEADS, rows)


def _ours_alone(section: Section, part: Part, of: str) -> Block:
    """Table for parts without published numbers: one row per norm, one column per score."""
    scores = list(dict.fromkeys(line.score for line in part.lines))
    rows = []
    for one in part.measured:
        by_score = {line.score: line.values for line in part.lines if line.measured is one}
        seeds = max(map(len, by_score.values()), default=0)
        cells = [spread(by_score[score]) if by_score.get(score) else one.empty_text for score in scores]
        rows.append([section.row_name(one), str(seeds), *cells])
    return Block(f"{part.title}{of}", ["norm", "seeds", *map(score_title, scores)], rows)


def _line(line: Line, name: str) -> list[str]:
    ours = spread(line.values) if line.values else line.measured.empty_text
    what = [name, score_title(line.score), str(len(line.values)), ours]
    return [*what, paper_number(line.published), *verdict_text(line.comparison)]


def _curves(section: Section, part: Part, of: str) -> Block:
    rows = []
    for one in part.measured:
        for score in section.recipe.scores.values():
            curves = list(one.curves(score).values())
            means = [f"{fmean(values):.2f}" for values in zip(*curves, strict=True)]
            rows.append([section.row_name(one), score_title(score), str(len(curves)), *(means or [one.empty_text])])
    tasks = max(map(len, rows)) - 3
    heads = ["norm", "score", "seeds", *(f"task {i + 1}" for i in range(tasks))]
    return Block(f"{part.title}{of}", heads, [row + [""] * (len(heads) - len(row)) for row in rows])


def _claim(decided: ClaimResult, of: str, whole: bool) -> Block:
    outcome = decided.outcome.upper() + ("" if whole else ", of what is run")
    title = f"{outcome}: {decided.claim.says} ({claim_criterion(decided.claim)}){of}"
    return Block(title, CASE_HEADS, [_case(case) for case in decided.cases])


def _case(case: ClaimCase) -> list[str]:
    return [case.what, *case_numbers(case), str(case.seeds) if case.seeds else "none", case.outcome]


def claims_sheet(sections: Sequence[Section], unrun: Sequence[Unrun], linked: bool = False) -> Sheet:
    """Sheet of all claims and their outcomes; ``linked`` adds links to the files of their tables."""
    rows = []
    for section in sections:
        name = section.title.partition(":")[0]
        where = Link(name, f"{section.recipe.name}.md") if linked else name
        for variant in section.ways:
            rows += [_summed_up(decided, variant, where) for decided in variant.decided]
    heads = ("outcome", "claim", "by", "of", "cases that hold", "least favourable case")
    missing = tuple(f"{one.title}{f' ({one.why})' if one.why else ''}" for one in unrun)
    blocks = [Block("", heads, rows), *([Block("Not run", below=missing)] if missing else [])]
    return Sheet("claims", "What the paper claims, and what the runs say", blocks, (HOW,))


HOW = (
    "Differences are paired over seeds. A case holds where Student's 95 % interval of their mean lies on the claimed "
    "side, does not hold where it lies on the other, and is undecided otherwise; a claim holds where all its cases do, "
    "and does not where any does not. The effect is the mean of the differences over their deviation."
)


def _summed_up(decided: ClaimResult, variant: Way, where: str) -> list[str]:
    case = weakest(decided)
    difference, interval, _, effect = case_numbers(case)
    result = (
        f"{difference}, {interval}, effect {effect}, {case.seeds} pairs" if case.interval else no_interval_reason(case)
    )
    held = sum(one.outcome == "holds" for one in decided.cases)
    outcome = decided.outcome + ("" if variant.whole else ", of what is run")
    by = ", ".join(filter(None, [claim_criterion(decided.claim), variant.title.lower()]))
    return [outcome, decided.claim.says, by, where, f"{held} of {len(decided.cases)}", f"{case.what}: {result}"]


def tables_csv(sections: Sequence[Section]) -> str:
    """CSV with one line per score of a cell; values are not rounded."""
    heads = [
        "recipe", "settings", *DIMENSIONS, "score", "seeds", "mean", "std", "paper_mean", "paper_std", "doubt",
        "difference", "low", "high", "verdict", "interval_of", "source",
    ]  # fmt: skip
    variants = [(section, variant) for section in sections for variant in section.ways]
    rows = [
        [s.recipe.name, variant.title, *_values(line)]
        for s, variant in variants
        for part in variant.parts
        for line in part.lines
    ]
    return csv_text(heads, rows)


def _values(line: Line) -> list[object]:
    mean, std = spread_over_seeds(line.values) if line.values else (None, None)
    number, comparison = line.published, line.comparison
    paper = [None, None, None] if number is None else [number.mean, number.std, number.flag]
    verdict: list[object] = [None] * 5
    if comparison is not None:
        interval = comparison.interval or (None, None)
        verdict = [comparison.difference, *interval, comparison.verdict, comparison.how]
    place = [line.measured.cell.place[key] for key in DIMENSIONS]
    sources = dict.fromkeys(record.config.stream.source for record in line.measured.records.values())
    source = ", ".join(map(str, sources)) or None
    return [*place, line.score, len(line.values), mean, std, *paper, *verdict, source]


def claims_csv(sections: Sequence[Section]) -> str:
    """CSV with one line per case of a claim; values are not rounded."""
    heads = [
        "recipe", "settings", "claim", "score", "outcome", "case", "pairs", "difference", "low", "high",
        "bootstrap_low", "bootstrap_high", "effect", "case_outcome",
    ]  # fmt: skip
    claims = [
        (s.recipe.name, variant.title, decided) for s in sections for variant in s.ways for decided in variant.decided
    ]
    return csv_text(heads, [[name, title, *row] for name, title, decided in claims for row in _case_values(decided)])


def _case_values(decided: ClaimResult) -> Iterator[list[object]]:
    claim = decided.claim
    for case in decided.cases:
        pair = case.paired
        drawn = [None, None, None] if pair is None else [*(pair.bootstrap or (None, None)), pair.effect]
        mean = None if pair is None else pair.mean
        numbers_ = [case.seeds, mean, *(case.interval or (None, None)), *drawn]
        yield [claim.says, claim.score, decided.outcome, case.what, *numbers_, case.outcome]
