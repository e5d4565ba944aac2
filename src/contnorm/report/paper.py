"""Tables and figures of the paper with recorded runs: our scores beside the published ones, and the claims.

If settings were chosen for some cells, such as a learning rate for each norm, a table has two variants: one with the
same settings for all norms, and one with the chosen settings, from validation tasks or from the recipe's author. Both
are of exploratory seeds. Fresh seeds, from 100 on, are a further variant, which decides claims in stages.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from contnorm.bench.config.defaults import canonical_strategy, complete, resolved_settings
from contnorm.bench.config.schema import RunConfig, flatten_settings, merge_settings
from contnorm.bench.records import Record, Runs, load_runs
from contnorm.bench.sequential import FIRST_SEED, FRESH_SEEDS
from contnorm.bench.text import named, spread
from contnorm.paper.cells import MeasuredCell, RecordIndex, cells_of, place_title
from contnorm.paper.claims import ClaimCase, ClaimResult, StagedRule, comparisons_of, published_values
from contnorm.paper.recipe import RUNS, Recipe, column_title, drift_parts, find_recipe, recipe_names
from contnorm.paper.selection import (
    CHOSEN,
    ONE_FOR_ALL,
    Selection,
    TableVariant,
    find_selection,
    fresh_variant,
    variants_of,
)
from contnorm.paper.tables import Line, forgetting_definitions, lines_of, paper_number, table_remarks, verdict_text
from contnorm.report.tables import MOST_CURVES, Document, Table, curves_over_tasks, paired_differences

OF_ROWS = ("norm", "groups", "momentum", "schedule", "freeze_after", "layers", "moments", "weights")  # dimensions
RATES_TITLE = "Learning rates tried on the validation tasks"
IGNORED = (
    "train.lr",
    "train.precision",
    "train.deterministic",
    "evaluate.ahead",
    "model.weights_hash",
    "stream.source",
)
LINE_HEADS = ("norm", "score", "seeds", "ours", "paper", "difference", "95 % interval", "verdict")
CASE_HEADS = ("case", "difference", "interval", "seeds", "outcome")
GRID_NOTE = (
    "Mean ACC on the validation tasks, which the table leaves out, over seeds; the chosen one in brackets: the "
    "highest, and of several the smallest learning rate. One that lost a seed, because its loss was no longer finite, "
    "does not count, whatever the others have: it would fail in the table too. A dash was not tried."
)
HOW = (
    "Differences are paired over seeds. Staged: decided by fresh seeds, from 100 on, with looks at 16, 24, 32, ... and "
    "128 seeds; all signs of a table on one stream are right with a probability of at least 95 %. A difference is "
    "equivalent if its interval contains zero and lies within 1 point. Exploratory: an ordinary 95 % interval of lower "
    "seeds, which decides nothing. A case holds if its interval lies on the claimed side and does not hold if it lies "
    "on the other; a claim holds if all its cases do, holds in part if the others are equivalent, and does not hold if "
    "any case does not. The last column has the paper's own difference of the case, or its deviations."
)


@dataclass(frozen=True)
class Section:
    """Results of a recipe with at least one run.

    Attributes:
        recipe: The recipe.
        variants: The table for each choice of settings and seeds.
        command: Commands that make the runs.
        selections: Learning rates chosen on validation tasks, by the title of their grid.
    """

    recipe: Recipe
    variants: Sequence[TableVariant]
    command: str
    selections: Mapping[str, Selection] = field(default_factory=dict)

    @property
    def claims(self) -> list[tuple[TableVariant, ClaimResult]]:
        """Each claim once: with the settings that each norm chose, if there are any, and by fresh seeds if they decide.

        The same claims with one choice for all norms are in the variant of the table alone.
        """
        titles = {variant.title for variant in self.variants}
        results = [
            (variant, result)
            for variant in self.variants
            if not (CHOSEN in titles and variant.title == ONE_FOR_ALL)
            for result in variant.claims
            if result.cases
        ]
        fresh = {id(result.claim): (variant, result) for variant, result in results if variant.replaces is not None}
        claims = []
        for variant, result in results:
            other = fresh.get(id(result.claim))
            if variant.replaces is None and other is not None and other[0].replaces == variant.title:
                del fresh[id(result.claim)]
                claims.append(other if other[1].has_interval else (variant, result))
            elif variant.replaces is None:
                claims.append((variant, result))
        return [*claims, *fresh.values()]

    @property
    def records(self) -> list[Record]:
        return [one for variant in self.variants for cell in variant.cells for one in cell.records.values()]

    def row_name(self, one: MeasuredCell) -> str:
        """Name of a row: its norm, and its learning rate if its stream has several."""

        def rate(cell: MeasuredCell) -> float | None:
            lr: float | None = cell.cell.values.get("train", {}).get("lr")
            return lr

        cells = [cell for variant in self.variants for cell in variant.cells]
        rates = {rate(cell) for cell in cells if cell.cell.place["stream"] == one.cell.place["stream"]}
        own = rate(one)
        return f"{one.cell.norm}, lr {own:g}" if own is not None and len(rates) > 1 else one.cell.norm


def table_title(recipe: Recipe) -> str:
    """Name of a table or figure, and its title.

    Example:
        >>> table_title(find_recipe("table3"))
        'Table 3: Running time of ER, over that with batch norm'
    """
    own = recipe.name.replace("-", " ").capitalize() if recipe.ours else recipe.name.replace("figure", "Figure ")
    return f"{f'Table {recipe.table}' if recipe.table else own}: {recipe.title}"


# --- The runs of a recipe --------------------------------------------------------------------------------------------


def sections_of(names: Iterable[str], runs: Runs, roots: Sequence[Path] = ()) -> list[Section]:
    """Sections of the recipes with runs. Recipes of timed runs have them in a subfolder of their name.

    Args:
        names: Tables: names such as ``table2``, or TOML files; none for those of the paper that some runs belong to.
        runs: The runs.
        roots: Folders of the runs, for timed runs and for selected learning rates.
    """
    index, chosen = RecordIndex(runs), list(dict.fromkeys(names))
    configs = list({record.hash: record.config for record in (*runs.records, *runs.diverged)}.values())
    sections = []
    for name in chosen or recipe_names():
        recipe, own = find_recipe(name), index
        if recipe.alone:
            timed = [load_runs(root / recipe.name) for root in roots if (root / recipe.name).is_dir()]
            own = RecordIndex(Runs.of(record for some in timed for record in (*some.records, *some.diverged)))
        elif not (chosen or _may_have(recipe, configs)):
            continue
        section = _section(recipe, name, own, roots)
        if any(variant.run for variant in section.variants):
            sections.append(section)
    return sections


def _may_have(recipe: Recipe, configs: Iterable[RunConfig]) -> bool:
    """Whether some runs may belong to a recipe, by stream, strategy and its settings for all norms."""
    for grid in recipe.runs:
        settings = flatten_settings(merge_settings(recipe.settings, grid.settings))
        wanted = {key: value for key, value in settings.items() if key not in IGNORED and not key.startswith("norm.")}
        strategies = [canonical_strategy(strategy) for strategy in grid.strategies]
        for config in configs:
            if config.stream.name in grid.streams and config.strategy.name in strategies:
                own = resolved_settings(config)
                if all(own.get(key) == value for key, value in wanted.items()):
                    return True
    return False


def _section(recipe: Recipe, name: str, index: RecordIndex, roots: Sequence[Path]) -> Section:
    places = [root / "selected" / f"{recipe.name}.toml" for root in roots]
    selection, refined = (find_selection(recipe.name, places, refined=fine) for fine in (False, True))
    variants = [_measured(one, index) for one in variants_of(recipe, selection)]
    if recipe.ours and selection is not None:
        variants = variants[1:]
    elif len(variants) > 1:  # a variant is left out if none of its differing cells was run
        values = {tuple(one.cell.place.items()): one.cell.values for one in variants[0].cells}
        places_of = {tuple(one.cell.place.items()): one.cell.values for one in variants[1].cells}
        differing = {place for place, own in places_of.items() if own != values[place]}
        some = [
            variant
            for variant in variants
            if any(one.run and tuple(one.cell.place.items()) in differing for one in variant.cells)
        ]
        variants = some or [variants[selection is None]]
    selections = {RATES_TITLE: selection} if selection is not None else {}
    fresh = _measured(fresh_variant(recipe, refined, StagedRule()), index)
    if fresh.run:
        variants = [*(variant for variant in variants if variant.run), fresh]
        if refined is not None and refined != selection:
            selections[f"{RATES_TITLE}, in a refined grid, for the fresh seeds"] = refined
    records = [one for variant in variants for cell in variant.cells for one in cell.records.values()]
    return Section(recipe, variants, _command(name, records), selections)


def _measured(variant: TableVariant, index: RecordIndex) -> TableVariant:
    configs = {one.cell: complete(one.cell.values, one.cell.source) for one in variant.cells}
    return replace(variant, cells=index.measure(configs, range(FIRST_SEED) if variant.rule is None else FRESH_SEEDS))


def _command(name: str, records: Sequence[Record]) -> str:
    """Commands that make the runs of a recipe, with the device and precision of the existing records."""
    typed = ["contnorm paper", shlex.quote(name)]
    typed += ["--device cuda"] if any(record.device.get("kind") == "cuda" for record in records) else []
    precisions = {record.config.train.precision for record in records}
    if len(precisions) == 1 and precisions != {"fp32"}:
        typed.append(f"--precision {precisions.pop()}")
    exploratory = [record.seed for record in records if record.seed < FIRST_SEED]
    seeds = max((seed + 1 for seed in exploratory), default=0)  # seeds count from 0, and some may have diverged
    command = " ".join([*typed, *([f"--seeds {seeds}"] if seeds not in (0, RUNS) else [])])
    if len(exploratory) == len(records):
        return command
    staged = " ".join([*typed, "--until-decided"])
    return f"{command}\n{staged}" if exploratory else staged


# --- Tables ----------------------------------------------------------------------------------------------------------


def section_document(section: Section) -> Document:
    """Document of a table or figure: our results next to the paper's, the missing runs, and the claims."""
    recipe = section.recipe
    tables = [table for variant in section.variants if variant.run for table in tables_of(section, variant)]
    for title, selection in section.selections.items():
        if selection.selected:
            tables.append(Table(title, *_grid_rows(selection), [GRID_NOTE], folded=True))
    notes = [*([recipe.note] if recipe.note else []), *forgetting_definitions(list(recipe.scores.values()))]
    return Document(recipe.name, table_title(recipe), tables, notes, section.command)


def tables_of(section: Section, variant: TableVariant, *, judged: bool = True, claims: bool = True) -> Iterator[Table]:
    """Tables of a variant: scores beside published numbers, remarks, cells that were not run, and claims.

    Args:
        section: The section of the variant.
        variant: A variant with runs.
        judged: False for runs that are not comparable with the paper's, such as smoke tests: without verdicts.
        claims: Whether to include the claims.
    """
    suffix, recipe = f" ({variant.title.lower()})" if variant.title else "", section.recipe
    parts: dict[str, list[MeasuredCell]] = {}  # cells that differ only in the norm or in how they are evaluated
    for one in variant.cells:
        shared = {key: value for key, value in one.cell.place.items() if key not in OF_ROWS}
        parts.setdefault(place_title(shared), []).append(one)
    lines = []
    for title, some in parts.items():
        of_part = [line for one in some for line in lines_of(variant.recipe, one) if recipe.kind == "runs"]
        lines += of_part if judged else []
        if any(one.run for one in some):
            heads, rows = _rows(section, some, of_part)
            if heads == LINE_HEADS and not judged:
                heads, rows = heads[:5], [row[:5] for row in rows]
            scores = list(recipe.scores.values()) if recipe.kind == "curves" else ["acc_so_far"]
            drawn = recipe.kind == "curves" or "acc" in recipe.scores.values()
            figures = _curve_figures(some, scores, f"{title}{suffix}") if drawn else []
            yield Table(f"{title}{suffix}", heads, rows, figures=figures)
    notes = table_remarks(variant.recipe, variant.cells, lines)
    if variant.unchosen:
        notes.append(f"Left out: the {variant.unchosen} cells for which no learning rate was chosen.")
    if notes:
        with_verdicts = any(line.comparison is not None for line in lines)
        yield Table(f"{'Verdicts' if with_verdicts else 'Remarks'}{suffix}", notes=notes)
    missing = {title: [one.cell.norm for one in some if not one.run] for title, some in parts.items()}
    if notes := [f"{title}: {', '.join(norms)}" for title, norms in missing.items() if norms]:
        yield Table(f"Not run{suffix}", notes=notes, folded=True)
    for decided in variant.claims if claims else ():
        if decided.cases:
            pairs = {case.what: list(case.paired.differences) for case in decided.cases if case.paired is not None}
            draw = partial(paired_differences, pairs, decided.claim.says, column_title(decided.claim.score))
            rows = [[case.what, *case.numbers, str(case.seeds or "none"), case.outcome_text] for case in decided.cases]
            title = f"{decided.title(complete=variant.complete)}{suffix}"
            notes = [f"No fresh seeds: {named(decided.not_run, 'cases')}."] if decided.not_run else []
            figures = [draw] if 0 < len(pairs) <= MOST_CURVES else []
            yield Table(title, CASE_HEADS, rows, notes, figures=figures, folded=True)


def _rows(
    section: Section, cells: Sequence[MeasuredCell], lines: Sequence[Line]
) -> tuple[Sequence[str], list[list[str]]]:
    """Headings and rows: by task for curves, one row per score beside published numbers, else one row per norm."""
    scores, rows = list(section.recipe.scores.values()), list[list[str]]()
    if section.recipe.kind == "curves":
        for one in cells:
            for score in scores:
                curves = list(one.curves(score).values())
                means = [f"{fmean(values):.2f}" for values in zip(*curves, strict=True)] or [one.empty_text]
                rows.append([section.row_name(one), column_title(score), str(len(curves)), *means])
        heads = ["norm", "score", "seeds", *(f"task {i + 1}" for i in range(max(map(len, rows)) - 3))]
        return heads, [row + [""] * (len(heads) - len(row)) for row in rows]
    if all(line.published is None for line in lines):
        scores = list(dict.fromkeys(line.score for line in lines))
        for one in cells:
            by_score = {line.score: line.values for line in lines if line.measured is one}
            shown = [spread(by_score[score]) if by_score.get(score) else one.empty_text for score in scores]
            rows.append([section.row_name(one), str(max(map(len, by_score.values()), default=0)), *shown])
        return ["norm", "seeds", *map(column_title, scores)], rows
    for line in lines:
        ours = spread(line.values) if line.values else line.measured.empty_text
        what = [section.row_name(line.measured), column_title(line.score), str(len(line.values)), ours]
        rows.append([*what, paper_number(line.published), *verdict_text(line.comparison)])
    return LINE_HEADS, rows


def _curve_figures(cells: Sequence[MeasuredCell], scores: Sequence[str], title: str) -> list[Any]:
    """Figures of the scores over the tasks."""
    by_name = {
        f"{one.cell.norm}{f', {column_title(score)}' if len(scores) > 1 else ''}": list(one.curves(score).values())
        for one in cells
        for score in scores
    }
    curves = {name: some for name, some in by_name.items() if some and len(some[0]) > 1}
    what = "L1 distance to exact moments" if drift_parts(scores[0]) else "accuracy on these tasks (percent)"
    chunks = [dict(list(curves.items())[i : i + MOST_CURVES]) for i in range(0, len(curves), MOST_CURVES)]
    return [partial(curves_over_tasks, chunk, title, what) for chunk in chunks]


def claims_document(sections: Sequence[Section]) -> Document:
    """Document of the claims with runs and their outcomes."""
    heads = ("outcome", "claim", "by", "of", "evidence", "cases that hold", "least favourable case", "ours", "paper")
    tables = []
    for ours, title, what in ((False, "", "claims"), (True, "Questions of our own", "questions")):
        results = [
            (section.recipe, variant, result)
            for section in sections
            for variant, result in section.claims
            if result.measured and section.recipe.ours == ours
        ]
        if results:
            total = Counter(result.evidence for _, _, result in results)
            open_ = Counter(result.evidence for _, _, result in results if result.outcome == "undecided")
            note = (
                f"{open_.total()} of {total.total()} {what} are undecided: {open_['staged']} of {total['staged']} by "
                f"fresh seeds, {open_['exploratory']} of {total['exploratory']} by exploratory seeds."
            )
            tables.append(Table(title, heads, [_claim_row(*one) for one in results], [note]))
    return Document("claims", "What the paper claims, and what the runs say", tables, [HOW])


def _claim_row(recipe: Recipe, variant: TableVariant, decided: ClaimResult) -> list[str]:
    case = _least_favourable(decided)
    numbers = ", ".join([*case.numbers, f"{case.seeds} seeds"])
    result = numbers if case.interval else case.no_interval_reason
    result += f"; {case.note}" if case.note else ""
    held = sum(one.outcome == "holds" for one in decided.cases)
    outcome = decided.outcome_text(complete=variant.complete)
    where = table_title(recipe).partition(":")[0]
    by = ", ".join(filter(None, [decided.claim.criterion, variant.title.lower()]))
    cases = f"{held} of {len(decided.cases)}"
    paper = _published(recipe, decided, case)
    return [outcome, decided.claim.says, by, where, decided.evidence_text, cases, case.what, result, paper]


def _published(recipe: Recipe, decided: ClaimResult, case: ClaimCase) -> str:
    """Published difference of a case, of a claim that one score is above another; the published value of others."""
    for one in comparisons_of(decided.claim, cells_of(recipe)):
        if one.label == case.what and (numbers := published_values(recipe, decided.claim, one)):
            if decided.claim.kind == "steadier":
                return " and ".join(f"{number.std:g}" for number in numbers)
            first, *others = (number.mean or 0.0 for number in numbers)
            return f"{first - others[0]:+.2f}" if others else f"{first:.2f}"
    return "-"


def _least_favourable(decided: ClaimResult) -> ClaimCase:
    """The case with the worst outcome and, among those, the worst numbers; those without a measurement come last."""
    order = ("does not hold", "undecided", "equivalent", "holds")

    def support(case: ClaimCase) -> float:
        if case.interval is None:
            return math.inf
        if case.paired is None:
            return -case.interval.high
        return {"above": case.paired.mean, "under": -case.paired.mean}.get(decided.claim.kind, -abs(case.paired.mean))

    return min(decided.cases, key=lambda case: (order.index(case.outcome), support(case)))


def _grid_rows(selection: Selection) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: one row per chosen learning rate, one column per rate that was tried."""
    rates = sorted({tried.lr for one in selection.selected for tried in one.grid})
    rows = []
    for one in selection.selected:
        cells = {}
        for tried in one.grid:
            text = "" if math.isnan(tried.mean) else f"{tried.mean:.2f}"
            text += "" if math.isnan(tried.sd) else f" +- {tried.sd:.2f}"
            text = ", ".join(filter(None, [text, f"{tried.lost} lost" if tried.lost else ""])) or "-"
            cells[tried.lr] = f"[{text}]" if tried.lr == one.lr else text
        what = " ".join(str(value) for value in one.where.values() if value != "own")
        rows.append([what, one.precision, *(cells.get(rate, "-") for rate in rates)])
    return ["of", "precision", *(f"lr {rate:g}" for rate in rates)], rows
