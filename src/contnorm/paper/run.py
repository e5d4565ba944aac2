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

from contnorm.bench.api.run import run_missing
from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig, from_dict, merge_settings, nest_settings, parse_assignments
from contnorm.bench.data.dataset import find_stored
from contnorm.bench.data.registry import SOURCES, data_root, describe_layouts, find_layout, location_of
from contnorm.bench.engine.run import Run, RunOptions, list_devices
from contnorm.bench.records import DIVERGED, Store
from contnorm.bench.rng import check_seeds
from contnorm.bench.sequential import FIRST_SEED, FRESH_SEEDS, LAST_LOOK, LOOKS, MARGIN, check_rule, looks_up_to
from contnorm.bench.streams.tasks import find_stream
from contnorm.errors import UserError, unknown
from contnorm.paper.cells import (
    MeasuredCell,
    RecipeCell,
    RecordIndex,
    cells_of,
    check_entries,
    filter_cells,
    numerics_of,
    with_numerics,
)
from contnorm.paper.claims import CellComparison, StagedRule
from contnorm.paper.recipe import RUNS, Recipe, find_recipe, recipe_names
from contnorm.paper.selection import Selection, TableVariant, find_selection, fresh_variant, read_selection, variants_of

_log = logging.getLogger("contnorm")
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
    max_seeds: int = LAST_LOOK

    @property
    def modified(self) -> bool:
        """Whether the runs differ from the recipe's, so that they can't be compared with the paper."""
        return self.max_steps is not None or bool(self.settings)


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
        RunInterrupted: If a signal stopped the runs, after they were saved; `read_table` has the finished ones.
        UserError: If runs failed, after the others finished; if the recipe has no runs, an option is invalid, or no
            run is recorded.

    Example:
        >>> import logging, tempfile; logging.getLogger("contnorm").setLevel("ERROR")
        >>> only, settings = ["norm=cn", "strategy=er"], {"stream.source": "digits"}
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     result = run_table("table1", TableOptions(1, only, max_steps=2, runs=Path(runs), settings=settings))
        >>> [len(cell.values("acc")) for variant in result.variants for cell in variant.cells]
        [1, 1]
    """
    table = _Table(recipe, options or TableOptions())
    if table.options.until_decided:
        _run_stages(table, console)
    else:
        _run_seeds(table, console)
    return table.result()


def read_table(recipe: str | Recipe, options: TableOptions | None = None) -> TableResult:
    """Measure all cells of a table by the recorded runs alone, as `run_table` does after it has run the others.

    Example:
        >>> read_table("table1", TableOptions(runs=Path("no such folder"), data_root=Path()))
        Traceback (most recent call last):
        contnorm.errors.UserError: table1 needs mnist, which is not under .: put ...
    """
    return _Table(recipe, options or TableOptions()).result()


class _Table:
    """A recipe with its options; reads the records of its runs."""

    def __init__(self, recipe: str | Recipe, options: TableOptions) -> None:
        self.recipe, self.options = find_recipe(recipe) if isinstance(recipe, str) else recipe, options
        if not self.recipe.runs:
            raise UserError(f"{self.recipe.name} has no runs. {self.recipe.note}")
        check_entries(self.recipe)
        check_seeds(RUNS if options.seeds is None else options.seeds)
        check_rule(margin=options.margin, max_seeds=options.max_seeds)
        if options.until_decided and options.seeds is not None:
            raise UserError("--seeds and --until-decided contradict each other. Limit the latter with --max-seeds.")
        if options.lr not in RATE_CHOICES:
            raise UserError(f"--lr: {unknown('choice', options.lr, RATE_CHOICES)}")
        self.seeds = range(RUNS if options.seeds is None else options.seeds)
        selected = filter_cells(cells_of(self.recipe), options.only)
        self._places = {tuple(cell.place.items()) for cell in selected}
        self.folder, self.root = runs_folder(self.recipe, options.runs), data_root(options.data_root)
        flags = {"train.max_steps": options.max_steps, "train.precision": options.precision}
        settings = options.settings
        typed = dict(settings) if isinstance(settings, Mapping) else parse_assignments(settings)
        self.typed = nest_settings({key: value for key, value in flags.items() if value is not None} | typed)
        from_dict(self.typed)

    def run(self, runs: Sequence[Run], console: Console | None) -> None:
        """Execute the missing ones of some runs; timed runs one at a time."""
        execution = self.options.execution
        if self.recipe.alone:
            devices = None if execution.devices is None else list_devices(execution.devices)[:1]
            execution = replace(execution, lanes=1, launcher=None, devices=devices)
        if runs:
            run_missing(runs, replace(execution, runs=self.folder, data_root=self.root), console)

    def read(self) -> RecordIndex:
        """The records so far."""
        return RecordIndex(Store(self.folder).load_all())

    def exploratory(self, index: RecordIndex) -> tuple[list[TableVariant], dict[RecipeCell, RunConfig]]:
        """The variants that the option ``lr`` selects, and the settings of their runs, all in one precision."""
        selection = self._selection()
        variants = variants_of(self.recipe, selection)
        if selection is None:
            variants = variants[-1:]
        elif self.options.lr != "both" or self.recipe.ours:
            variants = variants[:1] if self.options.lr == "one" else variants[1:]
        variants = [replace(one, cells=self.selected(one.cells)) for one in variants]
        configs = self._configs([one.cell for variant in variants for one in variant.cells], index, self.seeds)
        if not configs:
            raise UserError(f"no learning rate is chosen for these cells of {self.recipe.name}. Use --lr one.")
        return variants, configs

    def fresh(self, index: RecordIndex) -> tuple[TableVariant, dict[RecipeCell, RunConfig]]:
        """The variant of fresh seeds, and the settings of the runs of all its cells.

        The precision is that of the recorded fresh seeds, or of lower seeds if there are none.
        """
        selection = None if self.options.lr == "one" else self._selection(refined=True)
        variant = fresh_variant(self.recipe, selection, StagedRule(self.options.margin, self.options.max_seeds))
        cells = [one.cell for one in variant.cells]
        configs = self._configs(cells, index, FRESH_SEEDS)
        if not any(one.run for one in index.measure(configs, FRESH_SEEDS)):
            configs = self._configs(cells, index, range(FIRST_SEED))
        return variant, configs

    def selected(self, cells: Iterable[MeasuredCell]) -> list[MeasuredCell]:
        """The cells that the filters select."""
        return [one for one in cells if tuple(one.cell.place.items()) in self._places]

    def _configs(self, cells: Sequence[RecipeCell], index: RecordIndex, seeds: range) -> dict[RecipeCell, RunConfig]:
        """Settings of the runs of some cells, in the precision of the table."""
        configs = {cell: config_of(cell, self.root, self.typed) for cell in cells}
        if not configs:  # no learning rate is chosen for them
            return {}
        numerics = index.numerics(configs.values(), seeds, self.typed.get("train"))
        return {cell: with_numerics(config, numerics) for cell, config in configs.items()}

    def _selection(self, *, refined: bool = False) -> Selection | None:
        recipe, options = self.recipe, self.options
        selection = selection_of(recipe, options.runs, options.selected, refined=refined)
        if options.lr == "best" and selection is None:
            raise UserError(
                f"--lr best: no learning rates are chosen for {recipe.name}. Choose them with `contnorm tune "
                f"{recipe.name}`, which writes {selection_file(recipe, options.runs)}, or pass a file with --selected."
            )
        return selection

    def measure(
        self, variant: TableVariant, configs: Mapping[RecipeCell, RunConfig], index: RecordIndex
    ) -> TableVariant:
        """A variant with its records; of fresh seeds, the cells that the filters leave out count for the claims."""
        seeds = self.seeds if variant.rule is None else FRESH_SEEDS
        numerics = next((numerics_of(config) for config in configs.values()), None)
        cells = index.measure({one.cell: configs[one.cell] for one in variant.cells}, seeds, numerics)
        shown = self.selected(cells)
        others = [one for one in cells if one not in shown]
        return replace(variant, cells=shown, others=others, filtered=bool(self.options.only))

    def result(self) -> TableResult:
        """The cells with their records.

        Raises:
            UserError: If no run is recorded.
        """
        index, options = self.read(), self.options
        variants, lacking = list[TableVariant](), list[RunConfig]()
        if not options.until_decided:
            plans, configs = self.exploratory(index)
            variants = [self.measure(plan, configs, index) for plan in plans]
            lacking = [one for one in configs.values() if len(index.records(one, self.seeds)) < len(self.seeds)]
        if options.until_decided or not options.modified:
            plan, configs = self.fresh(index)
            fresh = self.measure(plan, configs, index)
            looked = (len(one.records) + len(one.diverged) >= LOOKS[0] for one in (*fresh.cells, *fresh.others))
            if options.until_decided or any(looked):
                variants.append(fresh)
            if options.until_decided:
                seeds = FRESH_SEEDS[: looks_up_to(options.max_seeds)[-1]]
                undecided = [one for one, decided in decidable(fresh) if not decided]
                wanted = [configs[cell] for one in undecided for cell in one.cells]
                lacking = [one for one in wanted if len(index.records(one, seeds)) < len(seeds)]
        missing = [missing_data_message(self.recipe, source, self.root) for source in self.absent(lacking)]
        if not any(variant.run for variant in variants):
            raise UserError(" ".join([*index.problems, *missing]) or f"no run under {self.folder} is of this table.")
        notes, typed = list[str](), self.typed.get("stream", {}).get("source")
        cells = [one.cell for variant in variants for one in variant.cells]
        for source in dict.fromkeys(cell.source for cell in cells if cell.published):
            if typed not in (None, source):
                what = f"Our runs use {typed} instead of the recipe's {source}"
                notes.append(f"{what}, so the published numbers can't be compared with them.")
        return TableResult(self.recipe, variants, options.modified, notes, missing, index.problems)

    def absent(self, configs: Iterable[RunConfig]) -> list[str]:
        """Data sets of some runs that are not present."""
        sources = dict.fromkeys(str(config.stream.source) for config in configs)
        return [source for source in sources if not is_present(source, self.root)]


def decidable(variant: TableVariant) -> list[tuple[CellComparison, bool]]:
    """Comparisons of shown cells that seeds can decide, and whether each is decided."""
    shown = {one.cell for one in variant.cells}
    every = [one for claim in variant.claims for one in claim.decidable]
    return [(one, decided) for one, decided in every if shown.issuperset(one.cells)]


def _run_seeds(table: _Table, console: Console | None) -> None:
    """Run the exploratory seeds of all variants."""
    index = table.read()
    _, by_cell = table.exploratory(index)
    configs = list(dict.fromkeys(by_cell.values()))
    absent = table.absent(configs)
    present = [config for config in configs if config.stream.source not in absent]
    missing = sum(len(table.seeds) - len(index.records(config, table.seeds)) for config in present)
    usual, numerics = numerics_of(config_of(next(iter(by_cell)), table.root, table.typed)), numerics_of(configs[0])
    if missing and numerics != usual:
        _log.warning(
            f"{missing} of {len(present) * len(table.seeds)} runs are missing. They use {numerics}, as most recorded "
            f"runs do; the recipe has {usual}. Use --precision for another one."
        )
    table.run([Run(config, seed) for config in present for seed in table.seeds], console)


def _run_stages(table: _Table, console: Console | None) -> None:
    """Run fresh seeds, look by look, until each case of each claim is decided or the limit is reached.

    Only the cells of undecided cases get the seeds of the next look. A case whose data is absent gets none.
    """
    index = table.read()
    variant, configs = table.fresh(index)
    if not decidable(table.measure(variant, configs, index)):
        raise UserError(
            f"--until-decided: {table.recipe.name} has no claim that compares the selected cells with each other. "
            f"Select both sides of a claim, such as --only norm=cn --only norm=bn, or leave --only out."
        )
    sources, limit = table.absent(configs.values()), table.options.max_seeds

    def state(look: int) -> tuple[int, int, list[RunConfig]]:
        """Number of cases with data and of those that are undecided, and the runs that need the seeds of a look."""

        def lacks(cell: RecipeCell, seeds: int) -> bool:
            config = configs[cell]
            return config.stream.source in sources and len(index.records(config, FRESH_SEEDS[:seeds])) < seeds

        cases = decidable(table.measure(variant, configs, index))
        cases = [case for case in cases if not any(lacks(cell, LOOKS[0]) for cell in case[0].cells)]
        undecided = [one.cells for one, decided in cases if not decided]
        wanted = [cell for cells in undecided if not any(lacks(cell, look) for cell in cells) for cell in cells]
        return len(cases), len(undecided), list(dict.fromkeys(configs[cell] for cell in wanted))

    for look in looks_up_to(limit):
        total, undecided, wanted = state(look)
        seeds = FRESH_SEEDS[:look]
        missing = sum(look - len(index.records(config, seeds)) for config in wanted)
        if missing:
            _print(f"Look at {look} seeds: {_are(undecided, total)} undecided; {missing} runs are missing.", console)
            table.run([Run(config, seed) for config in wanted for seed in seeds], console)
            index = table.read()
            if any(len(index.records(config, seeds)) < look for config in wanted):  # of an archive
                return
    total, undecided, _ = state(LOOKS[0])
    within = f" within the limit of {limit} seeds" if undecided else ""
    _print(f"{_are(total - undecided, total)} decided{within}.", console)


def _are(count: int, total: int) -> str:
    return f"{count} of {total} case{'' if total == 1 else 's'} {'is' if count == 1 else 'are'}"


def _print(text: str, console: Console | None) -> None:
    """Print a line of progress; log it if there is no terminal."""
    if console is None:
        _log.info(text)
    else:
        console.print(text, highlight=False, markup=False, soft_wrap=True)


# --- Settings and data of runs ---------------------------------------------------------------------------------------


def runs_folder(recipe: Recipe, runs: Path) -> Path:
    """Folder of a recipe's records."""
    return runs / recipe.name if recipe.alone else runs


def selection_file(recipe: Recipe, runs: Path) -> Path:
    """File that `contnorm tune` writes and `contnorm paper` reads first."""
    return runs / "selected" / f"{recipe.name}.toml"


def selection_of(recipe: Recipe, runs: Path, file: Path | None = None, *, refined: bool = False) -> Selection | None:
    """Learning rates chosen for a recipe: from the typed file, the runs' folder or the package, in this order.

    ``refined`` prefers the package's selection from a refined grid, which fresh seeds use.
    """
    if file is not None:
        return read_selection(file, recipe.name)
    return find_selection(recipe.name, [selection_file(recipe, runs)], refined=refined)


def config_of(cell: RecipeCell, root: Path, typed: Mapping[str, Any] | None = None) -> RunConfig:
    """Settings of a cell's run; typed settings override the cell's."""
    values = merge_settings(cell.values, typed or {})
    source = (typed or {}).get("stream", {}).get("source") or cell.source
    return resolve(merge_settings(values, {"stream": {"source": source}}), root)


def is_present(source: str, root: Path) -> bool:
    """Whether a data set is present; one that comes with a package always is."""
    if source not in SOURCES:  # a user's data set
        return find_stored(source, root) is not None
    return not SOURCES[source].layouts or find_layout(SOURCES[source], root) is not None


def missing_data_message(recipe: Recipe, source: str, root: Path) -> str:
    """Message for a data set that is absent: what to put where."""
    spec = SOURCES[source]
    how = f"build it with {spec.built_with}" if spec.built_with else f"put {describe_layouts(spec)} there"
    streams = [find_stream(stream) for grid in recipe.runs for stream in grid.streams]
    others = [one for spec in streams if source in spec.sources for one in spec.sources if one != source]
    other = f", or use other data with --set stream.source={others[0]}" if others else ""
    return (
        f"{recipe.name} needs {source}, which is not under {root}: {how}, or set --data-root{other}. See "
        f"`contnorm data {source}`."
    )


# --- The list of recipes ---------------------------------------------------------------------------------------------


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
    root, index = data_root(data), RecordIndex(Store(runs).load_all())
    statuses = []
    for name in names or recipe_names():
        recipe = find_recipe(name)
        records = RecordIndex(Store(runs_folder(recipe, runs)).load_all()) if recipe.alone else index
        sources = dict.fromkeys(cell.source for cell in cells_of(recipe))
        places = {
            source: location_of(SOURCES[source], root) if source in SOURCES else find_stored(source, root)
            for source in sources
        }
        text = ", ".join(f"{source}: {place or 'not found'}" for source, place in places.items())
        variants = variants_of(recipe, selection := selection_of(recipe, runs))
        cells = [one.cell for variant in (variants if selection else variants[-1:]) for one in variant.cells]
        done, configs = "nothing to run", list(dict.fromkeys(config_of(cell, root) for cell in cells))
        if configs:
            numerics = records.numerics(configs, range(seeds))
            wanted = [with_numerics(config, numerics) for config in configs]
            found = [one for config in wanted for one in records.records(config, range(seeds)).values()]
            diverged = sum(one.status == DIVERGED for one in found)
            done = f"{len(found) - diverged} of {len(configs) * seeds}"
            done += f" in {numerics}" if numerics != numerics_of(configs[0]) else ""
            done += f", {diverged} diverged" if diverged else ""
        statuses.append(RecipeStatus(name, recipe.title, done, text or "none"))
    return statuses
