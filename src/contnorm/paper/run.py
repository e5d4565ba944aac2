"""Run the missing runs of a recipe, and measure its tables. Needs torch.

All records of a table have one precision: that of the options, otherwise the one with the most records, otherwise the
recipe's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.config.sources import Setting, check_seeds, nest_settings, parse_assignments
from contnorm.bench.data.registry import SOURCES, data_root, location_of
from contnorm.bench.engine.run import RunOptions, list_devices
from contnorm.bench.records import Store
from contnorm.bench.sequential import FIRST_SEED, LOOKS, MARGIN, MAX_SEEDS, check_rule
from contnorm.bench.streams.tasks import find_stream
from contnorm.errors import UserError, unknown
from contnorm.paper.cells import RecipeCell, cells_of, filter_cells, source_of, unmatched_entries, unpaired_claims
from contnorm.paper.claims import FRESH, ClaimResult, StagedRule, decide_claims
from contnorm.paper.comparisons import comparisons_of
from contnorm.paper.measured import MeasuredCell, Numerics, numerics_of, with_numerics
from contnorm.paper.published import RUNS
from contnorm.paper.recipe import Recipe, find_recipe, recipe_names
from contnorm.paper.recipe_runs import (
    Execution,
    RecipeRecords,
    config_of,
    is_present,
    missing_data_message,
    run_jobs,
    runs_folder,
    selection_file,
    selection_of,
    sources_of,
)
from contnorm.paper.selection import covers, with_selection
from contnorm.paper.until_decided import EVERY_FRESH_SEED, StagedRuns, print_line, reach_lines

__all__ = [
    "RATE_CHOICES",
    "RecipeStatus",
    "TableOptions",
    "TableResult",
    "TableVariant",
    "recipe_status",
    "run_table",
]

log = logging.getLogger("contnorm")
RATE_CHOICES = ("one", "best", "both")


@dataclass(frozen=True)
class TableOptions:
    """Options of `run_table`.

    Attributes:
        seeds: Number of seeds, counted from 0; None for 5, the paper's number.
        only: Filters for cells, such as ``"norm=cn"``.
        execution: Options that control how runs are executed.
        max_steps: Number of steps of a smoke test; None for whole runs.
        precision: Precision of the table; None for the one with the most records.
        data_root: Folder of data sets; None for the default one.
        runs: Folder of records.
        lr: One of `RATE_CHOICES`: the recipe's learning rate, those chosen for each norm, or both if any were chosen. A
            table of our own has the chosen ones only.
        selected: File of chosen learning rates; None for the one that `contnorm tune` writes by default.
        settings: Settings that override the recipe's, by dotted key or as ``key=value``.
        until_decided: Whether to add fresh seeds, from 100 on, in stages until each case of each claim is decided or
            ``max_seeds`` is reached. No other seeds are run then.
        margin: Largest difference in points that counts as equivalent.
        max_seeds: Largest number of fresh seeds up to which seeds are added; recorded ones beyond it count.
    """

    seeds: int | None = None
    only: Sequence[str] = ()
    execution: RunOptions = field(default_factory=RunOptions)
    max_steps: int | None = None
    precision: str | None = None
    data_root: Path | None = None
    runs: Path = Path("runs")
    lr: str = "both"
    selected: Path | None = None
    settings: Mapping[str, Any] | Sequence[str] = ()
    until_decided: bool = False
    margin: float = MARGIN
    max_seeds: int = MAX_SEEDS

    @property
    def seed_count(self) -> int:
        """Number of exploratory seeds of a table."""
        return RUNS if self.seeds is None else self.seeds

    @property
    def modified(self) -> bool:
        """Whether the runs differ from the recipe's, so that they can't be compared with the paper."""
        return self.max_steps is not None or bool(self.settings)

    @property
    def assignments(self) -> list[Setting]:
        """The settings that override the recipe's."""
        if not isinstance(self.settings, Mapping):
            return list(parse_assignments(self.settings))
        return [Setting(f"settings[{key!r}]", key, value) for key, value in self.settings.items()]


@dataclass(frozen=True)
class TableVariant:
    """A recipe's cells with one learning rate for all norms, or with one chosen for each.

    Attributes:
        title: Which learning rates it has; empty if there is only one variant.
        recipe: The recipe, with the chosen learning rates if there are some.
        cells: The cells, with their records once they are run.
        rule: The staged rule that decides the claims, if the records are of fresh seeds; None for exploratory seeds.
        others: With a rule, the cells that are not selected; they are not shown, but count for the claims.
    """

    title: str
    recipe: Recipe
    cells: Sequence[MeasuredCell]
    rule: StagedRule | None = None
    others: Sequence[MeasuredCell] = ()

    @property
    def claims(self) -> tuple[ClaimResult, ...]:
        """The claims of the recipe, decided by the records of the cells."""
        return decide_claims(self.recipe, [*self.cells, *self.others], self.rule)

    @property
    def missing(self) -> list[str]:
        """Labels of the cells that were not run."""
        return [one.cell.label for one in self.cells if not one.run]

    @property
    def complete(self) -> bool:
        """Whether every cell of the recipe was run."""
        return not self.missing and len(self.cells) == len(cells_of(self.recipe))


@dataclass(frozen=True)
class TableResult:
    """The measured cells of a recipe.

    Attributes:
        recipe: The recipe.
        variants: The table once for each choice of learning rates.
        modified: Whether the runs differ from the recipe's, so that they can't be compared with the paper.
        notes: Remarks on the data that the runs used.
        missing_data: A message for each data set that is absent and for which runs are missing.
        problems: Messages on records that can't be read.
    """

    recipe: Recipe
    variants: Sequence[TableVariant]
    modified: bool
    notes: Sequence[str] = ()
    missing_data: Sequence[str] = ()
    problems: Sequence[str] = ()


@dataclass(frozen=True)
class _Plan:
    """The cells of one variant, before they are run, and for fresh seeds those that are not selected."""

    title: str
    recipe: Recipe
    cells: list[RecipeCell]
    others: list[RecipeCell] = field(default_factory=list)


def run_table(
    recipe: str | Recipe, options: TableOptions | None = None, *, console: Console | None = None
) -> TableResult:
    """Run the missing runs of a table or figure of the paper, and measure all its cells.

    Args:
        recipe: Name of a recipe, ``table1`` ... ``table14`` or ``figure3``; a TOML file; or a recipe.
        options: Seeds, filters, device and folders; None for the defaults.
        console: Terminal or notebook to show progress on; None for no output.

    Returns:
        The cells with their records. `contnorm.paper.tables.lines_of` compares them with the published numbers,
        `TableVariant.claims` are the recipe's claims, decided by them. If seeds from 100 on are recorded, the last
        variant has them, and its claims are decided by the staged rule.

    Raises:
        TableError: If runs failed; it has the result of the others.
        TableInterrupted: If a signal stopped the runs, after they were saved; it has the result of the finished ones.
        UserError: If the recipe has no runs, an option is invalid, or no run is recorded.

    Example:
        >>> import logging, tempfile; logging.getLogger("contnorm").setLevel("ERROR")
        >>> only, settings = ["norm=cn", "strategy=er"], {"stream.source": "digits"}
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     result = run_table("table1", TableOptions(1, only, max_steps=2, runs=Path(runs), settings=settings))
        >>> [len(cell.values("acc")) for variant in result.variants for cell in variant.cells]
        [1, 1]
    """
    options = options or TableOptions()
    return _run_table(find_recipe(recipe) if isinstance(recipe, str) else recipe, options, console)


def _check_entries(recipe: Recipe) -> None:
    """Raise a `UserError` for entries of a recipe that have no effect, which are mistakes."""
    unmatched = unmatched_entries(recipe)
    if unmatched:
        more = f" ({len(unmatched) - 1} more entries too)" if len(unmatched) > 1 else ""
        raise UserError(
            f"{recipe.name}: {unmatched[0]} matches no cell of the table{more}. Cells are made of the streams, "
            f"strategies, norms and buffers under [[runs]]."
        )
    if unpaired := unpaired_claims(recipe):
        raise UserError(
            f"{recipe.name}: {unpaired[0]} matches no cell that equals a cell of the claim in all other dimensions, so "
            f"the claim can't be decided. Name the dimensions that differ."
        )


def _run_table(recipe: Recipe, options: TableOptions, console: Console | None) -> TableResult:
    _check_entries(recipe)
    _check_options(options)
    if recipe.kind == "waiting":
        raise UserError(f"{recipe.name} {recipe.note}. The numbers of the paper are in contnorm.paper.published.")
    if recipe.kind in ("drawing", "data"):
        raise UserError(f"{recipe.name}: has no runs. Use `contnorm paper {recipe.name}`.")
    table = _Table.of(recipe, options)
    return _run_stages(table, console) if options.until_decided else _run_seeds(table, console)


def _check_options(options: TableOptions) -> None:
    check_seeds(options.seed_count)
    check_rule(margin=options.margin, max_seeds=options.max_seeds)
    if options.until_decided and options.seeds is not None:
        raise UserError(
            f"--seeds {options.seeds} and --until-decided contradict each other: seeds are added from {FIRST_SEED} on, "
            f"in stages. Limit them with --max-seeds."
        )


@dataclass(frozen=True)
class _Table:
    """A recipe with its options, the environment of its runs and the store of its records."""

    recipe: Recipe
    options: TableOptions
    environment: RunOptions
    store: Store
    typed: Mapping[str, Any]

    @classmethod
    def of(cls, recipe: Recipe, options: TableOptions) -> _Table:
        store = Store(runs_folder(recipe, options.runs))
        return cls(recipe, options, _environment(recipe, options), store, _typed_settings(options))

    def configs(self, cells: Iterable[RecipeCell]) -> dict[RecipeCell, RunConfig]:
        return {cell: config_of(cell, self.environment.data_root, self.typed) for cell in cells}

    def absent(self, configs: Iterable[RunConfig]) -> list[str]:
        """Data sets that are not present."""
        return [source for source in _sources(configs) if not is_present(source, self.environment.data_root)]

    def missing_data(self, incomplete: Iterable[RunConfig]) -> list[str]:
        """A message for each data set of the runs."""
        return [
            missing_data_message(self.recipe, source, self.environment.data_root) for source in _sources(incomplete)
        ]

    def result(
        self, variants: Sequence[TableVariant], execution: Execution, missing: Sequence[str], problems: Sequence[str]
    ) -> TableResult:
        """Result of the runs.

        Raises:
            TableError, TableInterrupted: If not all runs were executed.
            UserError: If no run is recorded.
        """
        if not any(one.run for variant in variants for one in variant.cells):
            if execution.stopped is not None:
                execution.raise_with(None)
            reasons = filter(None, [*problems, execution.failure, *missing])
            raise UserError(" ".join(reasons) or f"no record under {self.store.root} can be read.")
        cells = [one.cell for variant in variants for one in variant.cells]
        notes = _other_data(cells, self.typed.get("stream", {}).get("source"))
        result = TableResult(self.recipe, variants, self.options.modified, notes, missing, list(problems))
        execution.raise_with(result)
        return result


def _run_seeds(table: _Table, console: Console | None) -> TableResult:
    """Run the exploratory seeds of all variants; recorded fresh seeds are shown in a variant of their own."""
    recipe, options = table.recipe, table.options
    plans = _plans(recipe, options)
    cells = [cell for plan in plans for cell in plan.cells]
    if not cells:
        raise UserError(
            f"--lr {options.lr}: no learning rate is chosen for these cells of {recipe.name}. Use --lr one."
        )
    records = RecipeRecords(table.store, range(options.seed_count))
    configs = table.configs(cells)
    numerics = records.choose_numerics(list(configs.values()), table.typed)
    usual = numerics_of(configs[cells[0]])
    configs = {cell: with_numerics(config, numerics) for cell, config in configs.items()}
    absent = table.absent(configs.values())
    missing = table.missing_data(c for c in configs.values() if c.stream.source in absent and not records.complete(c))
    jobs = records.jobs(config for config in configs.values() if config.stream.source not in absent)
    _warn_of_precision(len(jobs) - records.finished(jobs), len(jobs), numerics, usual)
    execution = run_jobs(jobs, table.environment, console)
    variants = [
        TableVariant(plan.title, plan.recipe, records.measured({cell: configs[cell] for cell in plan.cells}, numerics))
        for plan in plans
    ]
    fresh, problems = _recorded_stages(table)
    return table.result([*variants, *fresh], execution, missing, [*records.problems, *problems])


def _warn_of_precision(missing: int, total: int, numerics: Numerics, usual: Numerics) -> None:
    if missing and numerics != usual:
        log.warning(
            f"{missing} of {total} runs are missing. They use {numerics}, as most recorded runs do; the recipe has "
            f"{usual}. Use --precision for another one."
        )


def _recorded_stages(table: _Table) -> tuple[list[TableVariant], list[str]]:
    """The variant of recorded fresh seeds, if any cell has those of the first look; and errors of their records."""
    plan = _staged_plan(table.recipe, table.options)
    if table.options.modified or not plan.cells:
        return [], []
    staged = _staged_runs(table, plan)
    records = staged.records
    if len(records.seeds) < LOOKS[0]:
        return [], []
    return [_staged_variant(plan, staged, records)], records.problems


def _run_stages(table: _Table, console: Console | None) -> TableResult:
    """Run fresh seeds in stages until each case of each claim is decided."""
    plan = _staged_plan(table.recipe, table.options)
    if not plan.recipe.claims:
        raise UserError(f"--until-decided: {table.recipe.name} has no claims to decide. Use --seeds.")
    if not plan.cells:
        raise UserError(
            f"--until-decided: no learning rate is chosen for these cells of {plan.recipe.name}. Use --lr one."
        )
    if not any(one.is_complete for claim in plan.recipe.claims for one in comparisons_of(claim, plan.cells)):
        raise UserError(
            f"--until-decided: no claim of {plan.recipe.name} compares the selected cells with each other. Select both "
            f"sides of a claim, such as --only norm=cn --only norm=bn, or leave --only out."
        )
    staged = _staged_runs(table, plan)
    max_seeds = table.options.max_seeds
    every = RecipeRecords(table.store, range(FIRST_SEED + max_seeds))
    configs = {cell: staged.configs[cell] for cell in plan.cells}
    for line in reach_lines(plan.recipe, every.measured(configs, staged.numerics), staged.rule, max_seeds):
        print_line(line, console)
    execution = staged.run(table.environment, console)
    records = staged.records
    variant = _staged_variant(plan, staged, records)
    missing = table.missing_data(staged.configs[cell] for cell in staged.lacking_data)
    return table.result([variant], execution, missing, records.problems)


def _staged_variant(plan: _Plan, staged: StagedRuns, records: RecipeRecords) -> TableVariant:
    measured = {one.cell: one for one in records.measured(staged.configs, staged.numerics)}
    cells, others = ([measured[cell] for cell in part] for part in (plan.cells, plan.others))
    return TableVariant(plan.title, plan.recipe, cells, staged.rule, others)


def _staged_runs(table: _Table, plan: _Plan) -> StagedRuns:
    """The runs of a plan with fresh seeds."""
    rule = StagedRule.of(plan.recipe, table.options.margin, table.options.max_seeds)
    configs = table.configs([*plan.cells, *plan.others])
    exploratory, fresh = (RecipeRecords(table.store, seeds) for seeds in (range(FIRST_SEED), EVERY_FRESH_SEED))
    runs = list(configs.values())
    numerics = (fresh if fresh.has_any(runs) else exploratory).choose_numerics(runs, table.typed)
    configs = {cell: with_numerics(config, numerics) for cell, config in configs.items()}
    absent = table.absent(configs.values())
    without = [cell for cell, config in configs.items() if config.stream.source in absent]
    return StagedRuns(plan.recipe, configs, frozenset(plan.cells), numerics, without, rule, table.store)


def _staged_plan(recipe: Recipe, options: TableOptions) -> _Plan:
    """The cells that fresh seeds are run of: at the learning rates chosen on validation tasks, if there are some."""
    selection = None
    if _check_rates(recipe, options) != "one":
        selection = selection_of(recipe, options.runs, options.selected, refined=True)
    title, chosen = FRESH, recipe
    if selection is not None:
        title += f", with a learning rate for each norm, chosen on the validation tasks ({selection.path})"
        chosen = with_selection(recipe, selection)
    every = cells_of(chosen)
    selected = filter_cells(every, options.only)
    covered = [cell for cell in every if selection is None or covers(selection, cell)]
    cells, others = ([cell for cell in covered if (cell in selected) is wanted] for wanted in (True, False))
    return _Plan(title, chosen, cells, others)


def _plans(recipe: Recipe, options: TableOptions) -> list[_Plan]:
    """The variants that the option ``lr`` selects, as far as learning rates were chosen."""
    _check_rates(recipe, options)
    selection = selection_of(recipe, options.runs, options.selected)
    plans = []
    if options.lr == "one" or (options.lr == "both" and not (recipe.ours and selection)):
        title = ("The recipe's learning rates" if recipe.selected else "One learning rate for all") if selection else ""
        plans.append(_Plan(title, recipe, filter_cells(cells_of(recipe), options.only)))
    if options.lr != "one" and selection is not None:
        tuned = with_selection(recipe, selection)
        wanted = filter_cells(cells_of(tuned), options.only)
        cells = [cell for cell in wanted if covers(selection, cell)]
        without = len(wanted) - len(cells)
        rest = f"; {without} cells have none, `contnorm tune {recipe.name}` chooses them" if without else ""
        title = f"A learning rate for each norm, chosen on the validation tasks ({selection.path}){rest}"
        plans.append(_Plan(title, tuned, cells))
    return plans


def _check_rates(recipe: Recipe, options: TableOptions) -> str:
    """Check and return the option ``lr``."""
    if options.lr not in RATE_CHOICES:
        raise UserError(f"--lr: {unknown('choice', options.lr, RATE_CHOICES)}")
    if options.lr == "best" and selection_of(recipe, options.runs, options.selected) is None:
        path = selection_file(recipe, options.runs)
        raise UserError(
            f"--lr best: no learning rates are chosen for {recipe.name}. Choose them with `contnorm tune "
            f"{recipe.name}`, which writes {path}, or pass a file with --selected."
        )
    return options.lr


def _typed_settings(options: TableOptions) -> dict[str, Any]:
    """Typed settings that override the recipe's."""
    flags = [Setting("--max-steps", "train.max_steps", options.max_steps)]
    flags.append(Setting("--precision", "train.precision", options.precision))
    typed = nest_settings([*(flag for flag in flags if flag.value is not None), *options.assignments])
    from_dict(typed)
    if options.lr == "best" and "lr" in typed.get("train", {}):
        raise UserError(f"--lr best and --set train.lr={typed['train']['lr']} contradict each other. Use one of them.")
    return typed


def _environment(recipe: Recipe, options: TableOptions) -> RunOptions:
    """Environment of the runs. Runs that are timed run one at a time and have a folder of their own."""
    execution = options.execution
    if recipe.alone:
        devices = None if execution.devices is None else list_devices(execution.devices)[:1]
        execution = replace(execution, lanes=1, launcher=None, devices=devices)
    return replace(execution, runs=runs_folder(recipe, options.runs), data_root=data_root(options.data_root))


def _sources(configs: Iterable[RunConfig]) -> list[str]:
    return list(dict.fromkeys(str(config.stream.source) for config in configs))


def _other_data(cells: Iterable[RecipeCell], typed: str | None) -> list[str]:
    """Warnings that the published numbers are of other data, if another data set than the recipe's was typed."""
    sources = dict.fromkeys(source_of(cell) for cell in cells if typed is not None and cell.published)
    return [
        f"Our runs use {typed} instead of the recipe's {source}, so the published numbers can't be compared with them."
        for source in sources
        if source != typed
    ]


@dataclass(frozen=True)
class RecipeStatus:
    """A recipe, the data that it needs, and how many of its runs are recorded.

    Attributes:
        name: Name or file of the recipe.
        title: Title of the table or figure.
        done: Number of recorded runs in the precision of the table, of all runs, and of diverged runs, as text.
        data: Data sets with their folders, as text.
    """

    name: str
    title: str
    done: str
    data: str


def recipe_status(
    names: Sequence[str] = (), *, seeds: int = 5, data: Path | None = None, runs: Path = Path("runs")
) -> list[RecipeStatus]:
    """Return what recipes need and how many of their runs are done.

    Args:
        names: Names or files of recipes; default: all of the paper's.
        seeds: Number of seeds of each run.
        data: Folder of data sets; None for the default one.
        runs: Folder of records.

    Example:
        >>> recipe_status(["figure1"])[0].done
        'nothing to run'
    """
    root = data_root(data)
    recipes = [(name, find_recipe(name)) for name in (names or recipe_names())]
    return [RecipeStatus(name, one.title, _done(one, seeds, root, runs), _data(one, root)) for name, one in recipes]


def _done(recipe: Recipe, seeds: int, root: Path, runs: Path) -> str:
    """Number of recorded runs in the precision of the table, of all, and of diverged runs."""
    selection = selection_of(recipe, runs)
    cells = cells_of(recipe)
    if selection is not None:
        cells += [cell for cell in cells_of(with_selection(recipe, selection)) if covers(selection, cell)]
    configs = list(dict.fromkeys(config_of(cell, root) for cell in cells))
    if not configs:
        return "nothing to run" if recipe.kind != "waiting" else "not available"
    records = RecipeRecords(Store(runs_folder(recipe, runs)), range(seeds))
    numerics = records.choose_numerics(configs, {})
    in_table = [with_numerics(config, numerics) for config in configs]
    done = sum(len(records.store.seeds(config, records.seeds)) for config in in_table)
    diverged = sum(len(records.diverged(config)) for config in in_table)
    precision = f" in {numerics}" if numerics != numerics_of(configs[0]) else ""
    return f"{done} of {len(configs) * seeds}{precision}{f', {diverged} diverged' if diverged else ''}"


def _data(recipe: Recipe, root: Path) -> str:
    if recipe.kind == "waiting":
        return "multi-label streams, not available yet"
    needed = sources_of(cells_of(recipe)) or [find_stream(stream).sources[0] for stream in recipe.streams]
    places = {source: location_of(SOURCES[source], root) for source in needed}
    return ", ".join(f"{source}: {place or 'not found'}" for source, place in places.items()) or "none"
