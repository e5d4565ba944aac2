"""The `paper` command: runs the missing runs of a recipe and compares the results with the published numbers.

`contnorm paper --list` lists the recipes, the data that each needs, and how many of its runs are done. All records of a
table have one precision: that of ``--precision``, otherwise the one with the most records, otherwise the recipe's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from contnorm.bench.api.execution import RunInterrupted, RunOptions, run_environment, run_missing
from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig, from_dict, merge_settings
from contnorm.bench.config.sources import Setting, check_seeds, nest_settings, parse_assignments
from contnorm.bench.data.multilabel_store import find_stored
from contnorm.bench.data.registry import ENVIRONMENT, SOURCES, data_root, describe_layouts, find_layout
from contnorm.bench.engine.job import Job, RunEnvironment
from contnorm.bench.records import Store
from contnorm.bench.streams.tasks import find_stream
from contnorm.bench.user_code import code_files, only_trusted
from contnorm.cli.data import location_of
from contnorm.cli.paper_tables import show_claims, show_curves, show_data_table, show_table
from contnorm.cli.tables import needed_width, print_error, print_indented, print_text, safe_text
from contnorm.errors import UserError, unknown
from contnorm.paper.cells import (
    RecipeCell,
    cells_of,
    filter_cells,
    source_of,
    unmatched_entries,
    unpaired_claims,
)
from contnorm.paper.measured import (
    NUMERICS,
    MeasuredCell,
    Numerics,
    Seeds,
    measure_cells,
    numerics_of,
    table_numerics,
    with_numerics,
)
from contnorm.paper.recipe import Recipe, find_recipe, recipe_names
from contnorm.paper.selection import Selection, covers, find_selection, read_selection, with_selection
from contnorm.paper.tables import MOST_NAMED, divergence_remarks
from contnorm.report.cubes import draw_cubes

__all__ = [
    "RATES",
    "PaperOptions",
    "RecipeRecords",
    "config_of",
    "is_present",
    "missing_data_message",
    "run_jobs",
    "run_recipe",
    "runs_folder",
    "selection_file",
    "selection_of",
    "show_recipes",
    "sources_of",
]

RATES = ("one", "best", "both")
LEAST_DATA_WIDTH = 24  # minimum width of the data column of `--list`


@dataclass(frozen=True)
class PaperOptions:
    """Options of the `paper` command.

    Attributes:
        seeds: Number of seeds, counted from 0.
        only: Filters for cells, such as ``"norm=cn"``.
        execution: Options that control how runs are executed.
        max_steps: Number of steps of a smoke test; None for whole runs.
        precision: Precision of the table; None for the one with the most records.
        data_root: Folder of data sets; None for the default one.
        runs: Folder of records.
        lr: One of `RATES`: the recipe's learning rate, those chosen for each norm, or both if any were chosen.
        selected: File of chosen learning rates; None for the one that `contnorm tune` writes by default.
        settings: Settings that override the recipe's, as ``key=value``.
        trusted: Python files that may be executed if the recipe names them.
    """

    seeds: int = 5
    only: Sequence[str] = ()
    execution: RunOptions = field(default_factory=RunOptions)
    max_steps: int | None = None
    precision: str | None = None
    data_root: Path | None = None
    runs: Path = Path("runs")
    lr: str = "both"
    selected: Path | None = None
    settings: Sequence[str] = ()
    trusted: Sequence[Path] = ()

    @property
    def modified(self) -> bool:
        """Whether the runs differ from the recipe's, so that they can't be compared with the paper."""
        return self.max_steps is not None or bool(self.settings)


@dataclass(frozen=True)
class _Variant:
    """A recipe's cells with one learning rate for all norms, or with one chosen for each."""

    title: str
    recipe: Recipe
    cells: list[RecipeCell]


def run_recipe(name: str, options: PaperOptions, console: Console) -> int:
    """Run the missing runs of a recipe, print the results next to the published ones, and return the exit code."""
    with only_trusted([*options.trusted, *code_files(_typed_settings(options))]):
        return _run_recipe(name, options, console)


def _run_recipe(name: str, options: PaperOptions, console: Console) -> int:
    recipe = find_recipe(name)
    _check_entries(recipe)
    check_seeds(options.seeds)
    console.print(safe_text(f"{recipe.name}: {recipe.title}"), style="bold")
    if recipe.kind == "waiting":
        raise UserError(f"{recipe.name} {recipe.note}. The numbers of the paper are in contnorm.paper.published.")
    if recipe.kind == "drawing":
        return _draw(recipe, options, console)
    if recipe.kind == "data":
        show_data_table(recipe, data_root(options.data_root), console, options.execution.allow_missing)
        return 0
    return _run_and_show(recipe, options, console)


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


def _draw(recipe: Recipe, options: PaperOptions, console: Console) -> int:
    Store(options.runs).check_writable()
    path = options.runs / f"{recipe.name}.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_cubes(path)
    console.print(safe_text(f"Figure written to {path}"), soft_wrap=True)
    return 0


def _run_and_show(recipe: Recipe, options: PaperOptions, console: Console) -> int:
    environment = _environment(recipe, options)
    variants = _variants(recipe, options)
    typed = _typed_settings(options)
    cells = [cell for variant in variants for cell in variant.cells]
    if not cells:
        raise UserError(
            f"--lr {options.lr}: no learning rate is chosen for these cells of {recipe.name}. Use --lr one."
        )
    configs = {cell: config_of(cell, environment.data_root, typed) for cell in cells}
    records = RecipeRecords(environment.store, range(options.seeds))
    numerics = records.choose_numerics(list(configs.values()), typed)
    usual = numerics_of(configs[cells[0]])
    configs = {cell: with_numerics(config, numerics) for cell, config in configs.items()}
    absent = [source for source in _sources(configs.values()) if not is_present(source, environment.data_root)]
    incomplete = [c for c in configs.values() if c.stream.source in absent and not records.complete(c)]
    missing_data = [missing_data_message(recipe, source, environment.data_root) for source in _sources(incomplete)]
    jobs = records.jobs(config for config in configs.values() if config.stream.source not in absent)
    missing = len(jobs) - records.finished(jobs)
    if missing and numerics != usual:
        print_text(
            f"{missing} of {len(jobs)} runs are missing. They use {numerics}, as most recorded runs do; the recipe has "
            f"{usual}. Use --precision for another one.",
            console,
        )
    code, failed = run_jobs(jobs, environment, console)
    results = [records.measured({cell: configs[cell] for cell in variant.cells}, numerics) for variant in variants]
    for problem in records.problems:
        print_error(problem)
    if not any(one.run for measured in results for one in measured):
        return _without_records(code, [failed, *missing_data], environment.store.root)
    if options.settings:
        console.print(safe_text(f"changed from the recipe: {' '.join(options.settings)}"), soft_wrap=True)
    for line in _other_data(configs, typed.get("stream", {}).get("source")):
        print_text(line, console)
    for variant, measured in zip(variants, results, strict=True):
        _show_variant(variant, measured, console, options.modified)
    for line in missing_data:
        print_error(line)
    if failed:
        raise UserError(failed)
    return code


def run_jobs(jobs: list[Job], environment: RunEnvironment, console: Console) -> tuple[int, str]:
    """Execute the missing jobs. Returns the exit code, and the message of a failure: other results are still shown."""
    try:
        if jobs:
            run_missing(jobs, environment, console)
    except RunInterrupted as stopped:
        return 128 + stopped.signal, ""
    except UserError as error:
        return 0, str(error)
    return 0, ""


def _without_records(code: int, reasons: Sequence[str], runs: Path) -> int:
    """Return the exit code of a stop before the first record; raise a `UserError` with the reasons otherwise."""
    if code:
        return code
    raise UserError(" ".join(filter(None, reasons)) or f"no record under {runs} can be read.")


def _variants(recipe: Recipe, options: PaperOptions) -> list[_Variant]:
    """The variants that ``--lr`` selects, as far as learning rates were chosen."""
    if options.lr not in RATES:
        raise UserError(f"--lr: {unknown('choice', options.lr, RATES)}")
    selection = selection_of(recipe, options.runs, options.selected)
    if options.lr == "best" and selection is None:
        path = selection_file(recipe, options.runs)
        raise UserError(
            f"--lr best: no learning rates are chosen for {recipe.name}. Choose them with `contnorm tune "
            f"{recipe.name}`, which writes {path}, or pass a file with --selected."
        )
    variants = []
    if options.lr != "best":
        title = ("The recipe's learning rates" if recipe.selected else "One learning rate for all") if selection else ""
        variants.append(_Variant(title, recipe, filter_cells(cells_of(recipe), options.only)))
    if options.lr != "one" and selection is not None:
        tuned = with_selection(recipe, selection)
        wanted = filter_cells(cells_of(tuned), options.only)
        cells = [cell for cell in wanted if covers(selection, cell)]
        without = len(wanted) - len(cells)
        rest = f"; {without} cells have none, `contnorm tune {recipe.name}` chooses them" if without else ""
        title = f"A learning rate for each norm, chosen on the validation tasks ({selection.path}){rest}"
        variants.append(_Variant(title, tuned, cells))
    return variants


def selection_file(recipe: Recipe, runs: Path) -> Path:
    """File that `contnorm tune` writes and `contnorm paper` reads first."""
    return runs / "selected" / f"{recipe.name}.toml"


def selection_of(recipe: Recipe, runs: Path, file: Path | None = None) -> Selection | None:
    """Learning rates chosen for a recipe: from the typed file, the runs' folder or the package, in this order."""
    if file is not None:
        return read_selection(file, recipe.name)
    return find_selection(recipe.name, [selection_file(recipe, runs)])


def _typed_settings(options: PaperOptions) -> dict[str, Any]:
    """Typed settings that override the recipe's."""
    flags = [Setting("--max-steps", "train.max_steps", options.max_steps)]
    flags.append(Setting("--precision", "train.precision", options.precision))
    typed = nest_settings([*(flag for flag in flags if flag.value is not None), *parse_assignments(options.settings)])
    from_dict(typed)
    if options.lr == "best" and "lr" in typed.get("train", {}):
        raise UserError(f"--lr best and --set train.lr={typed['train']['lr']} contradict each other. Use one of them.")
    return typed


def _environment(recipe: Recipe, options: PaperOptions) -> RunEnvironment:
    """Environment of the runs. Runs that are timed run one at a time and have a folder of their own."""
    execution = replace(options.execution, lanes=1) if recipe.alone else options.execution
    return run_environment(runs_folder(recipe, options.runs), execution, options.data_root)


def runs_folder(recipe: Recipe, runs: Path) -> Path:
    """Folder of a recipe's records."""
    return runs / recipe.name if recipe.alone else runs


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


def is_present(source: str, root: Path) -> bool:
    """Whether a data set is present; one that comes with a package always is."""
    if source not in SOURCES:  # a user's data set
        return find_stored(source, root) is not None
    return not SOURCES[source].layouts or find_layout(SOURCES[source], root) is not None


def sources_of(cells: Sequence[RecipeCell]) -> list[str]:
    """Data sets of some cells, each once."""
    return list(dict.fromkeys(source_of(cell) for cell in cells))


def _sources(configs: Iterable[RunConfig]) -> list[str]:
    return list(dict.fromkeys(str(config.stream.source) for config in configs))


def config_of(cell: RecipeCell, root: Path, typed: Mapping[str, Any] | None = None) -> RunConfig:
    """Configuration of a cell's run; typed settings override the cell's."""
    overrides = typed or {}
    source = overrides.get("stream", {}).get("source") or source_of(cell)
    return resolve(merge_settings(merge_settings(cell.values, overrides), {"stream": {"source": source}}), root)


def _other_data(cells: Iterable[RecipeCell], typed: str | None) -> list[str]:
    """Warnings that the published numbers are of other data, if another data set than the recipe's was typed."""
    sources = dict.fromkeys(source_of(cell) for cell in cells if typed is not None and cell.published)
    return [
        f"Our runs use {typed} instead of the recipe's {source}, so the published numbers can't be compared with them."
        for source in sources
        if source != typed
    ]


def _show_variant(variant: _Variant, measured: Sequence[MeasuredCell], console: Console, modified: bool) -> None:
    if variant.title:
        console.print()
        print_text(f"{variant.title}:", console, style="bold")
    if any(one.records for one in measured):
        if variant.recipe.kind == "curves":
            show_curves(variant.recipe, measured, console)
        else:
            show_table(variant.recipe, measured, console, verdicts=not modified)
    for line in divergence_remarks(measured):
        print_text(line, console)
    missing = [one.cell.label for one in measured if not one.run]
    if len(missing) == len(measured):
        console.print(safe_text("No run of this table is done."))
        return
    if missing:
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        print_text(f"Not run: {', '.join(missing[:MOST_NAMED])}{more}.", console)
    if not modified:
        complete = not missing and len(measured) == len(cells_of(variant.recipe))
        show_claims(variant.recipe, [one for one in measured if one.records], console, complete)


@dataclass(frozen=True)
class RecipeRecords:
    """The records of a recipe's runs under a folder.

    Attributes:
        store: Store of the records.
        seeds: Seeds that are wanted.
        problems: Errors of the records that `measured` could not read.
    """

    store: Store
    seeds: range
    problems: list[str] = field(default_factory=list)

    def diverged(self, config: RunConfig) -> dict[int, str]:
        """Diverged seeds of a run, and the reasons; they have no record, and would diverge again."""
        return {seed: reason for seed, reason in self.store.diverged_seeds(config).items() if seed in self.seeds}

    def count(self, config: RunConfig) -> int:
        """Number of seeds of a run that are recorded or diverged and need no run."""
        return len(self.store.seeds(config, self.seeds)) + len(self.diverged(config))

    def complete(self, config: RunConfig) -> bool:
        """Whether no seed of a run is missing."""
        return self.count(config) == len(self.seeds)

    def choose_numerics(self, configs: Sequence[RunConfig], typed: Mapping[str, Any]) -> Numerics:
        """Precision of the table: the one with the most seeds among those that the typed settings allow.

        Without records it is the precision of ``configs``.
        """
        train = typed.get("train", {})
        allowed = [one for one in NUMERICS if all(train.get(k) in (None, v) for k, v in one._asdict().items())]
        counts = ({one: self.count(with_numerics(c, one)) for one in allowed} for c in dict.fromkeys(configs))
        return table_numerics(counts, numerics_of(configs[0]))

    def jobs(self, configs: Iterable[RunConfig]) -> list[Job]:
        """All jobs of some runs, finished ones included."""
        return [Job(config, seed) for config in dict.fromkeys(configs) for seed in self.seeds]

    def finished(self, jobs: Sequence[Job]) -> int:
        """Number of jobs that are recorded or diverged."""
        return sum(self.count(config) for config in dict.fromkeys(job.config for job in jobs))

    def measured(self, configs: Mapping[RecipeCell, RunConfig], numerics: Numerics) -> list[MeasuredCell]:
        """Cells with their records in one precision, which may be none."""
        return measure_cells(configs, self._load, self.diverged, numerics)

    def _load(self, config: RunConfig) -> dict[Numerics, Seeds]:
        """Records of a run by precision and seed."""
        loaded: dict[Numerics, Seeds] = {}
        for numerics in NUMERICS:
            run = with_numerics(config, numerics)
            matches = self.store.load_seeds(run, sorted(self.store.seeds(run, self.seeds)))
            self.problems.extend(problem for problem in matches.problems if problem not in self.problems)
            loaded[numerics] = {record.seed: record for record in matches.records}
        return loaded


def show_recipes(seeds: int, folder: Path | None, runs: Path, console: Console, only: str = "") -> None:
    """Print one line per recipe: name and title, the data it needs and where that is, runs done and in total.

    Args:
        seeds: Number of seeds of each run.
        folder: Folder of data sets; None for the default one.
        runs: Folder of records.
        console: Terminal to print to.
        only: Name or file of a single recipe; empty for all of the paper's.
    """
    root = data_root(folder)
    console.print(safe_text(f"Data: {root} (set --data-root or {ENVIRONMENT} for another folder). Runs: {runs}."))
    recipes = [(name, find_recipe(name)) for name in ([only] if only else recipe_names())]
    rows = [(name, _done(one, seeds, root, runs), one.title, _data(one, root)) for name, one in recipes]
    table = _table(rows, ("recipe", "runs done", "title"))
    if needed_width(table, console) + LEAST_DATA_WIDTH <= console.width:
        console.print(_table(rows, ("recipe", "runs done", "title", "data")))
        return
    for name, done, *rest in rows:
        console.print(safe_text(f"{name}  {done}"))
        for line in rest:
            print_indented(line, console)


def _table(rows: Sequence[tuple[str, ...]], heads: Sequence[str]) -> Table:
    """Table of the columns in ``heads``; only the data column may wrap."""
    table = Table(*(Column(head, no_wrap=head != "data") for head in heads), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(safe_text, row[: len(heads)]))
    return table


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
