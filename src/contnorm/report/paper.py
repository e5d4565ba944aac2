"""Tables and figures of the paper with recorded runs: our scores beside the published ones, and the claims.

If settings were chosen for some cells, such as a learning rate for each norm, a table has two variants: one with the
same settings for all norms, and one with the chosen settings, from validation tasks or from the recipe's author. Both
are of exploratory seeds. Fresh seeds, from 100 on, are a further variant, which decides claims in stages.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from contnorm.bench.config.defaults import canonical_strategy, complete, resolved_settings
from contnorm.bench.config.schema import RunConfig, flatten_settings, merge_settings
from contnorm.bench.records import Record, Runs, load_runs
from contnorm.bench.sequential import FIRST_SEED
from contnorm.paper.cells import cells_of, source_of
from contnorm.paper.claims import FRESH, ClaimCase, ClaimResult, StagedRule, decide_claims
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
    place_title,
    spread,
    verdict_text,
)
from contnorm.paper.measured import NUMERICS, MeasuredCell, Numerics, Seeds, measure_cells, numerics_of, with_numerics
from contnorm.paper.published import RUNS
from contnorm.paper.recipe import Recipe, find_recipe, recipe_names
from contnorm.paper.scores import drift_parts, score_title
from contnorm.paper.selection import Selection, covers, find_selection, with_selection
from contnorm.paper.tables import (
    Line,
    ahead_remarks,
    data_part_remarks,
    divergence_remarks,
    forgetting_definitions,
    lines_of,
    precision_remarks,
    renorm_remarks,
    verdict_remarks,
)
from contnorm.report.figures import MOST_CURVES, curves_over_tasks, paired_differences
from contnorm.report.tables import Document, Table

__all__ = ["Section", "claims_document", "section_document", "sections_of", "table_title"]

OF_ROWS = ("norm", "groups", "momentum", "schedule", "freeze_after", "layers", "moments", "weights")  # dimensions
ONE_FOR_ALL, RECIPES_OWN = "The same settings for all norms", "Each norm with the settings the recipe has for it"
CHOSEN = "Each norm with the settings chosen on the validation tasks"
RATES_TITLE = "Learning rates tried on the validation tasks"
IGNORED = ("train.precision", "train.deterministic", "evaluate.ahead", "model.weights_hash", "stream.source")
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
class Part:
    """Cells that differ only in the norm or in how they are evaluated, and their lines."""

    title: str
    measured: tuple[MeasuredCell, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Variant:
    """Variant of a table with one choice of settings; the title is empty if there is only one variant.

    Attributes:
        title: Which settings and seeds it has.
        cells: Its cells with their records.
        parts: The same by place.
        decided: The claims, decided by the records of the cells.
        remarks: Remarks on the table.
        replaces: Title of the variant with exploratory seeds whose claims this one decides anew with fresh seeds; None
            for a variant with exploratory seeds.
    """

    title: str
    cells: Sequence[MeasuredCell]
    parts: Sequence[Part]
    decided: Sequence[ClaimResult]
    remarks: Sequence[str]
    replaces: str | None = None

    @property
    def run(self) -> bool:
        return any(one.run for one in self.cells)

    @property
    def whole(self) -> bool:
        return all(one.run for one in self.cells)

    @property
    def suffix(self) -> str:
        return f" ({self.title.lower()})" if self.title else ""


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
    variants: Sequence[Variant]
    command: str
    selections: Mapping[str, Selection] = field(default_factory=dict)

    @property
    def claims(self) -> list[tuple[Variant, ClaimResult]]:
        """Each claim once: with the settings that each norm chose, if there are any, and by fresh seeds if they decide.

        The same claims with one choice for all norms are in the variant of the table alone.
        """
        chosen = any(variant.title == CHOSEN for variant in self.variants)
        staged = {
            (variant.replaces, id(result.claim)): (variant, result)
            for variant in self.variants
            if variant.replaces is not None
            for result in variant.decided
        }
        claims = []
        for variant in self.variants:
            if chosen and variant.title == ONE_FOR_ALL:
                continue
            for result in variant.decided if variant.replaces is None else ():
                other = staged.pop((variant.title, id(result.claim)), None)
                claims.append(other if other is not None and other[1].has_interval else (variant, result))
        rest = [one for (title, _), one in staged.items() if not (chosen and title == ONE_FOR_ALL)]
        return [*claims, *rest]

    @property
    def records(self) -> list[Record]:
        return [one for variant in self.variants for cell in variant.cells for one in cell.records.values()]

    def row_name(self, one: MeasuredCell) -> str:
        """Name of a row: its norm, and its learning rate if its stream has several."""
        cells = [cell for variant in self.variants for cell in variant.cells]
        rates = {_rate(cell) for cell in cells if cell.cell.place["stream"] == one.cell.place["stream"]}
        rate = _rate(one)
        return f"{one.cell.norm}, lr {rate:g}" if rate is not None and len(rates) > 1 else one.cell.norm


def _rate(one: MeasuredCell) -> float | None:
    rate: float | None = one.cell.values.get("train", {}).get("lr")
    return rate


def table_title(recipe: Recipe) -> str:
    """Name of a table or figure, and its title.

    Example:
        >>> table_title(find_recipe("table3"))
        'Table 3: Running time of ER, over that with batch norm'
    """
    own = recipe.name.replace("-", " ").capitalize() if recipe.ours else recipe.name.replace("figure", "Figure ")
    return f"{f'Table {recipe.table}' if recipe.table else own}: {recipe.title}"


# --- The runs of a recipe --------------------------------------------------------------------------------------------


class _Index:
    """Records of runs by all settings except the precision."""

    def __init__(self, runs: Runs) -> None:
        self.diverged = runs.diverged
        self._by_run: dict[str, dict[Numerics, dict[int, Record]]] = defaultdict(lambda: defaultdict(dict))
        for one in sorted(runs.records, key=lambda record: record.seed):
            self._by_run[_run_key(one.config)][numerics_of(one.config)].setdefault(one.seed, one)

    def find(self, config: RunConfig, *, fresh: bool) -> dict[Numerics, Seeds]:
        """Records of a run, by precision and seed.

        A run that measures tasks ahead has the records of the same run without them if it has no others: the training
        is the same, and scores that need those tasks are missing or, as `fm_mammoth`, count them as zero.
        """
        records = self._by_run.get(_run_key(config))
        if records is None and config.evaluate.ahead:
            records = self._by_run.get(_run_key(replace(config, evaluate=replace(config.evaluate, ahead=False))))
        return {
            numerics: {seed: record for seed, record in seeds.items() if (seed >= FIRST_SEED) == fresh}
            for numerics, seeds in (records or {}).items()
        }

    def cells(self, recipe: Recipe, *, fresh: bool = False) -> list[MeasuredCell]:
        """Every cell of a recipe with its records, which may be none, of fresh or of exploratory seeds."""
        configs = {cell: complete(cell.values, source_of(cell)) for cell in cells_of(recipe)}

        def diverged(config: RunConfig) -> dict[int, str]:
            own = (run for run in self.diverged if run.hash == config.hash and (run.seed >= FIRST_SEED) == fresh)
            return {run.seed: run.reason for run in own}

        return measure_cells(configs, partial(self.find, fresh=fresh), diverged)


@lru_cache(maxsize=4096)
def _run_key(config: RunConfig) -> str:
    """Hash that identifies a run in any precision; ignores the hash of its weights, which a recipe does not have."""
    return with_numerics(replace(config, model=replace(config.model, weights_hash=None)), NUMERICS[0]).hash


def _may_have(recipe: Recipe, configs: Iterable[RunConfig]) -> bool:
    """Whether some runs may belong to a recipe, by stream, strategy and its settings for all norms."""
    for grid in recipe.runs:
        settings = flatten_settings(merge_settings(recipe.settings, grid.settings))
        wanted = {key: value for key, value in settings.items() if key not in IGNORED and not key.startswith("norm.")}
        for config in configs:
            named = config.stream.name in grid.streams and config.strategy.name in map(
                canonical_strategy, grid.strategies
            )
            if named:
                own = resolved_settings(config)
                if all(own.get(key) == value for key, value in wanted.items() if key != "train.lr"):
                    return True
    return False


def sections_of(names: Iterable[str], runs: Runs, roots: Sequence[Path] = ()) -> list[Section]:
    """Sections of the recipes with runs. Recipes of timed runs have them in a subfolder of their name.

    Args:
        names: Tables: names such as ``table2``, or TOML files; none for those of the paper that some runs belong to.
        runs: The runs.
        roots: Folders of the runs, for timed runs and for selected learning rates.
    """
    every, index = (*runs.records, *runs.diverged), _Index(runs)
    configs, named = list({record.hash: record.config for record in every}.values()), list(dict.fromkeys(names))
    sections = []
    for name in named or recipe_names():
        recipe = find_recipe(name)
        if recipe.kind not in ("runs", "curves"):
            continue
        if recipe.alone:
            timed = [load_runs(root / recipe.name) for root in roots if (root / recipe.name).is_dir()]
            records = Runs.of(record for some in timed for record in (*some.records, *some.diverged))
            section = _section(recipe, name, _Index(records), roots) if records.records else None
        else:
            section = _section(recipe, name, index, roots) if named or _may_have(recipe, configs) else None
        if section is not None and any(variant.run for variant in section.variants):
            sections.append(section)
    return sections


def _section(recipe: Recipe, name: str, index: _Index, roots: Sequence[Path]) -> Section:
    places = [root / "selected" / f"{recipe.name}.toml" for root in roots]
    selection, refined = find_selection(recipe.name, places), find_selection(recipe.name, places, refined=True)
    variants = _variants(recipe, index, selection)
    fresh = _fresh_variant(recipe, index, refined)
    if fresh.run:
        variants = [*(variant for variant in variants if variant.run), fresh]
    selections = {RATES_TITLE: selection} if selection is not None else {}
    if refined is not None and refined != selection and fresh.run:
        selections[f"{RATES_TITLE}, in a refined grid, for the fresh seeds"] = refined
    records = [one for variant in variants for cell in variant.cells for one in cell.records.values()]
    return Section(recipe, variants, _command(name, records), selections)


def _variants(recipe: Recipe, index: _Index, selection: Selection | None) -> list[Variant]:
    """Both variants if settings were chosen; a variant is left out if none of its differing cells was run.

    A table of our own has the chosen settings only.
    """
    if selection is None and not recipe.selected:
        return [_variant("", recipe, index.cells(recipe))]
    same = recipe if selection is not None else replace(recipe, selected=())
    chosen = recipe if selection is None else with_selection(recipe, selection)
    titles = _titles(recipe, selection)
    cells = [index.cells(one) for one in (same, chosen)]
    differing = [pair for pair in zip(*cells, strict=True) if pair[0].cell.values != pair[1].cell.values]
    covered = [one for one in cells[1] if selection is None or covers(selection, one.cell)]
    variants = [
        _variant(titles[0], same, cells[0]),
        _variant(titles[1], chosen, covered, len(cells[1]) - len(covered)),
    ]
    if recipe.ours and selection is not None:
        return variants[1:]
    with_runs = [variant for side, variant in enumerate(variants) if any(pair[side].run for pair in differing)]
    return with_runs or [variants[selection is None]]


def _titles(recipe: Recipe, selection: Selection | None) -> tuple[str, str]:
    """Titles of the variants with the same and with chosen settings; empty if nothing is chosen."""
    if selection is not None:
        return RECIPES_OWN if recipe.selected else ONE_FOR_ALL, CHOSEN
    return (ONE_FOR_ALL, RECIPES_OWN) if recipe.selected else ("", "")


def _fresh_variant(recipe: Recipe, index: _Index, selection: Selection | None) -> Variant:
    """The variant with fresh seeds, at the learning rates chosen on validation tasks if there are some."""
    chosen = recipe if selection is None else with_selection(recipe, selection)
    cells = index.cells(chosen, fresh=True)
    covered = [one for one in cells if selection is None or covers(selection, one.cell)]
    replaces = _titles(recipe, selection)[1]
    title = ", ".join(filter(None, [FRESH, replaces[:1].lower() + replaces[1:]]))
    return _variant(title, chosen, covered, len(cells) - len(covered), replaces, StagedRule.of(chosen))


def _variant(
    title: str,
    recipe: Recipe,
    cells: Sequence[MeasuredCell],
    unchosen: int = 0,
    replaces: str | None = None,
    rule: StagedRule | None = None,
) -> Variant:
    """``unchosen`` is the number of cells left out because no settings were chosen for them."""
    if not any(one.run for one in cells):
        return Variant(title, cells, (), (), (), replaces)
    by_title: dict[str, list[MeasuredCell]] = {}
    for one in cells:
        shared = {key: value for key, value in one.cell.place.items() if key not in OF_ROWS}
        by_title.setdefault(place_title(shared), []).append(one)
    parts = [
        Part(
            name,
            tuple(some),
            tuple(line for one in some for line in lines_of(recipe, one)) if recipe.kind == "runs" else (),
        )
        for name, some in by_title.items()
    ]
    decided = [result for result in decide_claims(recipe, cells, rule) if result.cases]
    remarks = [data_part_remarks, renorm_remarks, ahead_remarks, precision_remarks, divergence_remarks]
    notes = [note for remark in remarks for note in remark(cells)]
    notes += verdict_remarks(recipe, [line for part in parts for line in part.lines])
    notes += [f"Left out: the {unchosen} cells for which no learning rate was chosen."] if unchosen else []
    return Variant(title, cells, parts, decided, notes, replaces)


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
    tables = [table for variant in section.variants for table in _tables(section, variant)]
    for title, selection in section.selections.items():
        if selection.rates:
            tables.append(Table(title, *_grid_rows(selection), [GRID_NOTE], folded=True))
    notes = [*([recipe.note] if recipe.note else []), *forgetting_definitions(list(recipe.scores.values()))]
    return Document(recipe.name, table_title(recipe), tables, notes, section.command)


def _tables(section: Section, variant: Variant) -> Iterator[Table]:
    for part in variant.parts:
        if any(one.run for one in part.measured):
            yield (_curves if section.recipe.kind == "curves" else _lines)(section, part, variant.suffix)
    if variant.remarks and variant.run:
        judged = any(line.comparison is not None for part in variant.parts for line in part.lines)
        yield Table(f"{'Verdicts' if judged else 'Remarks'}{variant.suffix}", notes=variant.remarks)
    missing = {part.title: [one.cell.norm for one in part.measured if not one.run] for part in variant.parts}
    notes = [f"{title}: {', '.join(norms)}" for title, norms in missing.items() if norms]
    if notes:
        yield Table(f"Not run{variant.suffix}", notes=notes, folded=True)
    for decided in variant.decided:
        pairs = {case.what: list(case.paired.differences) for case in decided.cases if case.paired is not None}
        draw = partial(paired_differences, pairs, decided.claim.says, score_title(decided.claim.score))
        yield Table(
            f"{claim_title(decided, complete=variant.whole)}{variant.suffix}",
            CASE_HEADS,
            [_case_row(case) for case in decided.cases],
            [not_run_text(decided)] if decided.not_run else [],
            figures=[draw] if 0 < len(pairs) <= MOST_CURVES else [],
            folded=True,
        )


def _lines(section: Section, part: Part, suffix: str) -> Table:
    curves = "acc" in section.recipe.scores.values()
    figures = _curve_figures(part, ["acc_so_far"], f"{part.title}{suffix}") if curves else []
    if all(line.published is None for line in part.lines):  # one row per norm, one column per score
        scores = list(dict.fromkeys(line.score for line in part.lines))
        rows = []
        for one in part.measured:
            by_score = {line.score: line.values for line in part.lines if line.measured is one}
            seeds = max(map(len, by_score.values()), default=0)
            cells = [spread(by_score[score]) if by_score.get(score) else one.empty_text for score in scores]
            rows.append([section.row_name(one), str(seeds), *cells])
        return Table(f"{part.title}{suffix}", ["norm", "seeds", *map(score_title, scores)], rows, figures=figures)
    rows = []
    for line in part.lines:
        ours = spread(line.values) if line.values else line.measured.empty_text
        what = [section.row_name(line.measured), score_title(line.score), str(len(line.values)), ours]
        rows.append([*what, paper_number(line.published), *verdict_text(line.comparison)])
    return Table(f"{part.title}{suffix}", LINE_HEADS, rows, figures=figures)


def _curves(section: Section, part: Part, suffix: str) -> Table:
    rows = []
    for one in part.measured:
        for score in section.recipe.scores.values():
            curves = list(one.curves(score).values())
            means = [f"{fmean(values):.2f}" for values in zip(*curves, strict=True)]
            rows.append([section.row_name(one), score_title(score), str(len(curves)), *(means or [one.empty_text])])
    tasks = max(map(len, rows)) - 3
    heads = ["norm", "score", "seeds", *(f"task {i + 1}" for i in range(tasks))]
    figures = _curve_figures(part, list(section.recipe.scores.values()), f"{part.title}{suffix}")
    rows = [row + [""] * (len(heads) - len(row)) for row in rows]
    return Table(f"{part.title}{suffix}", heads, rows, figures=figures)


def _curve_figures(part: Part, scores: Sequence[str], title: str) -> list[Any]:
    """Figures of the scores over the tasks."""
    named = {
        f"{one.cell.norm}{f', {score_title(score)}' if len(scores) > 1 else ''}": list(one.curves(score).values())
        for one in part.measured
        for score in scores
    }
    curves = {name: some for name, some in named.items() if some and len(some[0]) > 1}
    what = "L1 distance to exact moments" if drift_parts(scores[0]) else "accuracy on these tasks (percent)"
    chunks = [dict(list(curves.items())[i : i + MOST_CURVES]) for i in range(0, len(curves), MOST_CURVES)]
    return [partial(curves_over_tasks, chunk, title, what) for chunk in chunks]


def _case_row(case: ClaimCase) -> list[str]:
    return [case.what, *case_numbers(case), str(case.seeds or "none"), case_outcome_text(case)]


def claims_document(sections: Sequence[Section]) -> Document:
    """Document of the claims with runs and their outcomes."""
    heads = ("outcome", "claim", "by", "of", "evidence", "cases that hold", "least favourable case", "ours", "paper")
    tables = []
    for ours, title in ((False, ""), (True, "Questions of our own")):
        some = [section for section in sections if section.recipe.ours == ours]
        rows = [
            _claim_row(section.recipe, decided, variant)
            for section in some
            for variant, decided in section.claims
            if decided.measured
        ]
        if rows:
            tables.append(Table(title, heads, rows, [_undecided_text(some, "questions" if ours else "claims")]))
    return Document("claims", "What the paper claims, and what the runs say", tables, [HOW])


def _undecided_text(sections: Sequence[Section], what: str) -> str:
    """Sentence with the number of undecided claims, of those with runs."""
    results = [result for section in sections for _, result in section.claims if result.measured]
    counts = {
        kind: Counter(result.outcome == "undecided" for result in results if kind in ("", result.evidence))
        for kind in ("", "staged", "exploratory")
    }
    texts = {kind: f"{count[True]} of {count.total()}" for kind, count in counts.items()}
    return (
        f"{texts['']} {what} are undecided: {texts['staged']} by fresh seeds, {texts['exploratory']} by exploratory "
        "seeds."
    )


def _claim_row(recipe: Recipe, decided: ClaimResult, variant: Variant) -> list[str]:
    case = _least_favourable(decided)
    numbers = ", ".join([*case_numbers(case), f"{case.seeds} seeds"])
    result = numbers if case.interval else no_interval_reason(case)
    result += f"; {case.note}" if case.note else ""
    held = sum(one.outcome == "holds" for one in decided.cases)
    outcome, where = claim_outcome(decided, complete=variant.whole), table_title(recipe).partition(":")[0]
    by = ", ".join(filter(None, [claim_criterion(decided.claim), variant.title.lower()]))
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
    rates = sorted({tried.lr for one in selection.rates for tried in one.grid})
    rows = []
    for one in selection.rates:
        cells = {}
        for tried in one.grid:
            text = "" if math.isnan(tried.mean) else f"{tried.mean:.2f}"
            text += "" if math.isnan(tried.sd) else f" +- {tried.sd:.2f}"
            text = ", ".join(filter(None, [text, f"{tried.diverged} lost" if tried.diverged else ""])) or "-"
            cells[tried.lr] = f"[{text}]" if tried.lr == one.lr else text
        what = " ".join(str(value) for value in one.where.values() if value != "own")
        rows.append([what, one.precision, *(cells.get(rate, "-") for rate in rates)])
    return ["of", "precision", *(f"lr {rate:g}" for rate in rates)], rows
