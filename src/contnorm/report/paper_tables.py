"""The paper's tables and claims as sheets for Markdown and LaTeX, and as CSV rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from contnorm.bench.records import spread_over_seeds
from contnorm.paper.cells import cells_of
from contnorm.paper.claims import ClaimCase, ClaimResult
from contnorm.paper.comparisons import comparisons_of, published_values
from contnorm.paper.format import (
    case_numbers,
    case_outcome_text,
    claim_criterion,
    claim_outcome,
    claim_title,
    no_interval_reason,
    not_run_text,
    paper_number,
    spread,
    verdict_text,
)
from contnorm.paper.recipe import DIMENSIONS, Recipe
from contnorm.paper.scores import score_title
from contnorm.paper.selection import RateResult, Selection
from contnorm.paper.tables import Line
from contnorm.report.sections import Part, Section, UnrunRecipe, Variant, least_favourable
from contnorm.report.text_tables import Link, TextDocument, TextTable, csv_text

__all__ = [
    "GRID_NOTE",
    "HOW",
    "QUESTIONS",
    "case_heads",
    "case_texts",
    "claims_csv",
    "claims_sheet",
    "grid_rows",
    "section_sheet",
    "tables_csv",
    "undecided_text",
]

LINE_HEADS = ("norm", "score", "seeds", "ours", "paper", "difference", "95 % interval", "verdict")
CASE_HEADS = ("case", "difference", "interval", "seeds", "outcome")
GRID_NOTE = (
    "Mean ACC on the validation tasks, which the table leaves out, over seeds; the chosen one in brackets: the "
    "highest, and of several the smallest learning rate. One that lost a seed, because its loss was no longer finite, "
    "does not count, whatever the others have: it would fail in the table too. A dash was not tried."
)


def section_sheet(section: Section) -> TextDocument:
    """TextDocument of a table or figure: our results next to the paper's, the missing runs, and the claims."""
    blocks = [block for variant in section.variants for block in _blocks(section, variant)]
    for title, selection in section.selections.items():
        if selection.rates:
            heads, *rows = grid_rows(selection)
            blocks.append(TextTable(title, heads, rows, (GRID_NOTE,)))
    return TextDocument(section.recipe.name, section.title, blocks, section.notes, section.command)


def _blocks(section: Section, variant: Variant) -> Iterator[TextTable]:
    of = f" ({variant.title.lower()})" if variant.title else ""
    for part in variant.parts:
        if part.run:
            yield (_curves if section.recipe.kind == "curves" else _lines)(section, part, of)
    missing = tuple(f"{part.title}: {', '.join(_norms(part))}" for part in variant.parts if _norms(part))
    if variant.remarks and variant.run:
        judged = any(line.comparison is not None for part in variant.parts for line in part.lines)
        yield TextTable(f"{'Verdicts' if judged else 'Remarks'}{of}", below=variant.remarks)
    if missing:
        yield TextTable(f"Not run{of}", below=missing)
    for decided in variant.decided:
        yield _claim(decided, of, variant.whole)


def _norms(part: Part) -> list[str]:
    return [one.cell.norm for one in part.measured if not one.run]


def _lines(section: Section, part: Part, of: str) -> TextTable:
    if all(line.published is None for line in part.lines):
        return _ours_alone(section, part, of)
    rows = [_line(line, section.row_name(line.measured)) for line in part.lines]
    return TextTable(f"{part.title}{of}", LINE_HEADS, rows)


def _ours_alone(section: Section, part: Part, of: str) -> TextTable:
    """Table for parts without published numbers: one row per norm, one column per score."""
    scores = list(dict.fromkeys(line.score for line in part.lines))
    rows = []
    for one in part.measured:
        by_score = {line.score: line.values for line in part.lines if line.measured is one}
        seeds = max(map(len, by_score.values()), default=0)
        cells = [spread(by_score[score]) if by_score.get(score) else one.empty_text for score in scores]
        rows.append([section.row_name(one), str(seeds), *cells])
    return TextTable(f"{part.title}{of}", ["norm", "seeds", *map(score_title, scores)], rows)


def _line(line: Line, name: str) -> list[str]:
    ours = spread(line.values) if line.values else line.measured.empty_text
    what = [name, score_title(line.score), str(len(line.values)), ours]
    return [*what, paper_number(line.published), *verdict_text(line.comparison)]


def _curves(section: Section, part: Part, of: str) -> TextTable:
    rows = []
    for one in part.measured:
        for score in section.recipe.scores.values():
            curves = list(one.curves(score).values())
            means = [f"{fmean(values):.2f}" for values in zip(*curves, strict=True)]
            rows.append([section.row_name(one), score_title(score), str(len(curves)), *(means or [one.empty_text])])
    tasks = max(map(len, rows)) - 3
    heads = ["norm", "score", "seeds", *(f"task {i + 1}" for i in range(tasks))]
    return TextTable(f"{part.title}{of}", heads, [row + [""] * (len(heads) - len(row)) for row in rows])


def _claim(decided: ClaimResult, of: str, whole: bool) -> TextTable:
    title = f"{claim_title(decided, complete=whole)}{of}"
    below = (not_run_text(decided),) if decided.not_run else ()
    return TextTable(title, case_heads(decided), [case_texts(decided, case) for case in decided.cases], below)


def case_heads(decided: ClaimResult) -> tuple[str, ...]:
    """Headings of the cases of a claim."""
    return CASE_HEADS


def case_texts(decided: ClaimResult, case: ClaimCase) -> list[str]:
    """Texts of a case of a claim, one for each heading; the last one is the outcome."""
    difference, interval = case_numbers(case)
    return [case.what, difference, interval, str(case.seeds) if case.seeds else "none", case_outcome_text(case)]


def claims_sheet(sections: Sequence[Section], unrun: Sequence[UnrunRecipe], linked: bool = False) -> TextDocument:
    """TextDocument of the claims with runs and their outcomes; ``linked`` adds links to the files of their tables."""
    heads = ("outcome", "claim", "by", "of", "evidence", "cases that hold", "least favourable case", "ours", "paper")
    rows: dict[bool, list[list[str]]] = {False: [], True: []}
    for section in sections:
        name = section.title.partition(":")[0]
        where = Link(name, f"{section.recipe.name}.md") if linked else name
        measured = [(variant, decided) for variant, decided in section.claims if decided.measured]
        rows[section.recipe.ours] += [
            _summed_up(section.recipe, decided, variant, where) for variant, decided in measured
        ]
    missing = tuple(f"{one.title}{f' ({one.why})' if one.why else ''}" for one in unrun)
    blocks = [TextTable("", heads, rows[False])]
    blocks += [TextTable(QUESTIONS, heads, rows[True], (undecided_text(sections, ours=True),))] if rows[True] else []
    blocks += [TextTable("Not run", below=missing)] if missing else []
    notes = (
        (undecided_text(sections), f"{HOW} {PAPER}") if rows[False] else ("No run belongs to a claim of the paper.",)
    )
    return TextDocument("claims", "What the paper claims, and what the runs say", blocks, notes)


QUESTIONS = "Questions of our own"
HOW = (
    "Differences are paired over seeds. Staged: decided by fresh seeds, from 100 on, with looks at 16, 24, 32, ... and "
    "128 seeds; all signs of a table on one stream are right with a probability of at least 95 %. A difference is "
    "equivalent if its interval contains zero and lies within 1 point. Exploratory: an ordinary 95 % interval of lower "
    "seeds, which decides nothing. A case holds if its interval lies on the claimed side and does not hold if it lies "
    "on the other; a claim holds if all its cases do, holds in part if the others are equivalent, and does not hold if "
    "any case does not."
)
PAPER = "The last column has the paper's own difference of the case, or its deviations."


def undecided_text(sections: Sequence[Section], *, ours: bool = False) -> str:
    """Sentence with the number of undecided claims, of those with runs: of the paper, or of our own tables.

    Example:
        >>> undecided_text([])
        '0 of 0 claims are undecided: 0 of 0 by fresh seeds, 0 of 0 by exploratory seeds.'
    """
    results = [result for one in sections if one.recipe.ours == ours for _, result in one.claims if result.measured]
    staged = [result for result in results if result.evidence == "staged"]
    exploratory = [result for result in results if result.evidence == "exploratory"]
    what = "questions" if ours else "claims"
    return (
        f"{_undecided(results)} {what} are undecided: {_undecided(staged)} by fresh seeds, "
        f"{_undecided(exploratory)} by exploratory seeds."
    )


def _undecided(results: Sequence[ClaimResult]) -> str:
    return f"{sum(result.outcome == 'undecided' for result in results)} of {len(results)}"


def _published(recipe: Recipe, decided: ClaimResult, case: ClaimCase) -> str:
    """Published difference of a case, of a claim that one score is above another; the published value of others."""
    for one in comparisons_of(decided.claim, cells_of(recipe)):
        if one.label == case.what and (numbers := published_values(recipe, decided.claim, one)):
            if decided.claim.kind == "steadier":
                return " and ".join(f"{number.std:g}" for number in numbers)
            first, *others = (number.mean or 0.0 for number in numbers)
            return f"{first - others[0]:+.2f}" if others else f"{first:.2f}"
    return "-"


def _summed_up(recipe: Recipe, decided: ClaimResult, variant: Variant, where: str) -> list[str]:
    case = least_favourable(decided)
    numbers = ", ".join([*case_numbers(case), f"{case.seeds} seeds"])
    result = numbers if case.interval else no_interval_reason(case)
    result += f"; {case.note}" if case.note else ""
    held = sum(one.outcome == "holds" for one in decided.cases)
    outcome = claim_outcome(decided, complete=variant.whole)
    by = ", ".join(filter(None, [claim_criterion(decided.claim), variant.title.lower()]))
    cases = f"{held} of {len(decided.cases)}"
    says = decided.claim.says
    return [
        outcome,
        says,
        by,
        where,
        decided.evidence_text,
        cases,
        case.what,
        result,
        _published(recipe, decided, case),
    ]


def tables_csv(sections: Sequence[Section]) -> str:
    """CSV with one line per score of a cell; values are not rounded."""
    heads = [
        "recipe", "settings", *DIMENSIONS, "score", "seeds", "mean", "std", "paper_mean", "paper_std", "doubt",
        "difference", "low", "high", "verdict", "interval_of", "source",
    ]  # fmt: skip
    variants = [(section, variant) for section in sections for variant in section.variants]
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
        "case_outcome", "evidence", "verdict", "note",
    ]  # fmt: skip
    claims = [
        (s.recipe.name, variant.title, decided)
        for s in sections
        for variant in s.variants
        for decided in variant.decided
    ]
    return csv_text(heads, [[name, title, *row] for name, title, decided in claims for row in _case_values(decided)])


def _case_values(decided: ClaimResult) -> Iterator[list[object]]:
    claim = decided.claim
    for case in decided.cases:
        pair = case.paired
        mean = None if pair is None else pair.mean
        numbers_ = [case.seeds, mean, *(case.interval or (None, None))]
        rest = [case.outcome, decided.evidence, case.verdict, case.note]
        yield [claim.says, claim.score, decided.outcome, case.what, *numbers_, *rest]


def grid_rows(selection: Selection) -> list[list[str]]:
    """Headings and rows: one row per chosen learning rate, one column per rate that was tried.

    Example:
        >>> from contnorm.paper.selection import SelectedRate
        >>> grid = (RateResult(0.03, 61.0, 1.5, 3), RateResult(0.1, 64.0, 1.0, 3), RateResult(0.3, 66.0, 2.0, 2, 1))
        >>> for row in grid_rows(Selection("x", (SelectedRate({"norm": "cn", "momentum": "own"}, 0.1, "fp32", grid),))):
        ...     print(row)
        ['of', 'precision', 'lr 0.03', 'lr 0.1', 'lr 0.3']
        ['cn', 'fp32', '61.00 +- 1.50', '[64.00 +- 1.00]', '66.00 +- 2.00, 1 lost']
    """
    rates = sorted({tried.lr for one in selection.rates for tried in one.grid})
    rows = [["of", "precision", *(f"lr {rate:g}" for rate in rates)]]
    for one in selection.rates:
        by_rate = {tried.lr: _rate_words(tried, tried.lr == one.lr) for tried in one.grid}
        what = " ".join(str(value) for value in one.where.values() if value != "own")
        rows.append([what, one.precision, *(by_rate.get(rate, "-") for rate in rates)])
    return rows


def _rate_words(tried: RateResult, chosen: bool) -> str:
    words = [] if math.isnan(tried.mean) else [f"{tried.mean:.2f}"]
    words += [] if math.isnan(tried.sd) else [f"+- {tried.sd:.2f}"]
    diverged = [f"{tried.diverged} lost"] if tried.diverged else []
    text = ", ".join([*([" ".join(words)] if words else []), *diverged]) or "-"
    return f"[{text}]" if chosen else text
