"""The `paper` command: runs the missing runs of a recipe and compares the results with the published numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from contnorm.bench.api.execution import RunOptions, run_environment
from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig, from_dict, merge_settings
from contnorm.bench.config.sources import Setting, check_seeds, nest_settings, parse_assignments
from contnorm.bench.data.multilabel_store import find_stored
from contnorm.bench.data.registry import SOURCES, data_root, find_layout, looked_for
from contnorm.bench.engine.job import RunEnvironment
from contnorm.bench.records import Store
from contnorm.bench.streams.tasks import find_stream
from contnorm.bench.trust import only_trusted
from contnorm.bench.user_code import code_files
from contnorm.cli.paper_data import show_data_table
from contnorm.cli.paper_records import Kept, hows_of
from contnorm.cli.paper_tables import show_claims, show_curves, show_table
from contnorm.cli.tables import safe_text, say, say_on_stderr
from contnorm.errors import UserError, unknown
from contnorm.paper.cells import Cell, cells_of, source_of, unreached
from contnorm.paper.diverged import lost_remarks
from contnorm.paper.filters import chosen
from contnorm.paper.recipe import Recipe
from contnorm.paper.recipe_file import find_recipe
from contnorm.paper.selection import Selection, covers, find_selection, read_selection, with_selection
from contnorm.paper.series import Measured
from contnorm.report.cubes import draw_cubes

__all__ = [
    "RATES",
    "Asked",
    "config_of",
    "is_found",
    "run_recipe",
    "runs_folder",
    "selection_file",
    "selection_of",
    "sources_of",
    "what_to_put",
]

RATES = ("one", "best", "both")
SOME = 6  # cells to name in one line


@dataclass(frozen=True)
class Asked:
    """Options of the `paper` command.

    ``lr`` is one of `RATES`: the recipe's learning rate, those chosen for each norm, or both if any were chosen.
    """

    seeds: int = 5
    only: Sequence[str] = ()
    hands: RunOptions = field(default_factory=RunOptions)
    max_steps: int | None = None
    precision: str | None = None
    data_root: Path | None = None
    runs: Path = Path("runs")
    lr: str = "both"
    selected: Path | None = None
    settings: Sequence[str] = ()  # key=value, overriding the recipe's
    trusted: Sequence[Path] = ()  # Python files that may be executed if the recipe names them

    @property
    def tried(self) -> bool:
        """Whether the runs differ from the recipe's, so that they can't be compared with the paper."""
        return self.max_steps is not None or bool(self.settings)


@dataclass(frozen=True)
class _Variant:
    """A recipe's cells with one learning rate for all norms, or with one chosen for each."""

    title: str
    recipe: Recipe
    cells: list[Cell]


def run_recipe(name: str, asked: Asked, console: Console) -> int:
    """Run the missing runs of a recipe, print the results next to the published ones, and return the exit code."""
    with only_trusted([*asked.trusted, *code_files(_typed(asked))]):
        return _run_recipe(name, asked, console)


def _run_recipe(name: str, request: Asked, console: Console) -> int:
    recipe = find_recipe(name)
    unused = unreached(recipe)
    if unused:
        more = f" ({len(unused) - 1} more likewise)" if len(unused) > 1 else ""
        raise UserError(
            f"{recipe.name}: {unused[0]} is of no cell of the table{more}. Cells are made of the streams, strategies, "
            f"norms and buffers under [[runs]]."
        )
    check_seeds(request.seeds)
    console.print(safe_text(f"{recipe.name}: {recipe.title}"), style="bold")
    if recipe.kind == "waiting":
        raise UserError(f"{recipe.name} {recipe.note}. The numbers of the paper are in contnorm.paper.published.")
    if recipe.kind == "drawing":
        return _draw(recipe, request, console)
    if recipe.kind == "data":
        show_data_table(recipe, data_root(request.data_root), console, request.hands.allow_missing)
        return 0
    return _run_and_show(recipe, request, console)


def _draw(recipe: Recipe, request: Asked, console: Console) -> int:
    path = request.runs / f"{recipe.name}.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_cubes(path)
    console.print(safe_text(f"drawn: {path}"), soft_wrap=True)
    return 0


def _run_and_show(recipe: Recipe, request: Asked, console: Console) -> int:
    place = _place(recipe, request)
    variants = _variants(recipe, request)
    overrides = _typed(request)
    configs = {cell: config_of(cell, place.data_root, overrides) for variant in variants for cell in variant.cells}
    records = Kept(Store(place.runs), range(request.seeds), hows_of(overrides))
    absent = [source for source in _sources(configs.values()) if not is_found(source, place.data_root)]
    with_data = [config for config in configs.values() if config.stream.source not in absent]
    without = [config for config in configs.values() if config.stream.source in absent and not records.whole(config)]
    missing_data = [what_to_put(recipe, source, place.data_root) for source in _sources(without)]
    jobs = records.jobs(with_data)
    if message := records.said_of(jobs, with_data):
        say(message, console)
    code, failed = 0, ""
    try:
        code = recorded(jobs, place, console) if jobs else 0
    except UserError as error:  # the results of the other runs are still shown
        failed = str(error)
    results = [records.measured({cell: configs[cell] for cell in variant.cells}) for variant in variants]
    for problem in records.problems:
        say_on_stderr(problem)
    if not any(results):
        return _without_records(code, [failed, *missing_data], place.runs)
    if request.settings:
        console.print(safe_text(f"with other settings than the recipe's: {' '.join(request.settings)}"), soft_wrap=True)
    for line in _other_data(configs, overrides.get("stream", {}).get("source")):
        say(line, console)
    for variant, measured in zip(variants, results, strict=True):
        _show_variant(variant, measured, console, request.tried)
    for line in missing_data:
        say_on_stderr(line)
    if failed:
        raise UserError(failed)
    return code


def _without_records(code: int, reasons: Sequence[str], runs: Path) -> int:
    """Return the exit code of a stop before the first record; raise a `UserError` with the reasons otherwise."""
    if code:
        return code
    raise UserError(" ".join(filter(None, reasons)) or f"no record under {runs} can be read.")


def _variants(recipe: Recipe, request: Asked) -> list[_Variant]:
    """The variants that ``--lr`` selects, as far as learning rates were chosen."""
    if request.lr not in RATES:
        raise UserError(f"--lr: {unknown('way', request.lr, RATES)}")
    selection = selection_of(recipe, request.runs, request.selected)
    if request.lr == "best" and selection is None:
        path = selection_file(recipe, request.runs)
        raise UserError(
            f"--lr best: no learning rates are chosen for {recipe.name}. Choose them with `contnorm tune "
            f"{recipe.name}`, which writes {path}, or say with --selected where they are."
        )
    variants = []
    if request.lr != "best":
        title = ("The recipe's learning rates" if recipe.selected else "One learning rate for all") if selection else ""
        variants.append(_Variant(title, recipe, chosen(cells_of(recipe), request.only)))
    if request.lr != "one" and selection is not None:
        tuned = with_selection(recipe, selection)
        wanted = chosen(cells_of(tuned), request.only)
        cells = [cell for cell in wanted if covers(selection, cell)]
        without = len(wanted) - len(cells)
        rest = f"; {without} cells have none: `contnorm tune {recipe.name}` chooses" if without else ""
        title = f"Each with its own learning rate, chosen on the validation tasks ({selection.path}){rest}"
        variants.append(_Variant(title, tuned, cells))
    return variants


def selection_file(recipe: Recipe, runs: Path) -> Path:
    """File that `contnorm tune` writes and `contnorm paper` reads first."""
    return runs / "selected" / f"{recipe.name}.toml"


def selection_of(recipe: Recipe, runs: Path, given: Path | None = None) -> Selection | None:
    """Learning rates chosen for a recipe: from the typed file, the runs' folder or the package, in this order."""
    if given is not None:
        return read_selection(given, recipe.name)
    return find_selection(recipe.name, [selection_file(recipe, runs)])


def _typed(request: Asked) -> dict[str, Any]:
    """Typed settings that override the recipe's."""
    flags = [Setting("--max-steps", "train.max_steps", request.max_steps)]
    flags.append(Setting("--precision", "train.precision", request.precision))
    typed = nest_settings([*(flag for flag in flags if flag.value is not None), *parse_assignments(request.settings)])
    from_dict(typed)
    if request.lr == "best" and "lr" in typed.get("train", {}):
        raise UserError(f"--lr best and --set train.lr={typed['train']['lr']} contradict each other. Use one of them.")
    return typed


def _place(recipe: Recipe, request: Asked) -> RunEnvironment:
    """Environment of the runs. Runs that are timed run one at a time and have a folder of their own."""
    options = replace(request.hands, lanes=1) if recipe.alone else request.hands
    return run_environment(runs_folder(recipe, request.runs), options, request.data_root)


def runs_folder(recipe: Recipe, runs: Path) -> Path:
    return runs / recipe.name if recipe.alone else runs


def what_to_put(recipe: Recipe, source: str, root: Path) -> str:
    """Message for a data set that is absent: what to put where."""
    spec = SOURCES[source]
    how = f"build it with {spec.built_with}" if spec.built_with else f"put {looked_for(spec)} there"
    streams = [find_stream(stream) for block in recipe.runs for stream in block.streams]
    others = [one for spec in streams if source in spec.sources for one in spec.sources if one != source]
    other = f", or try it on other data with --set stream.source={others[0]}" if others else ""
    return (
        f"{recipe.name} needs {source}, which is not under {root}: {how}, or say with --data-root where it is{other}; "
        f"`contnorm data {source}` says more."
    )


def is_found(source: str, root: Path) -> bool:
    """Whether a data set is present; one that comes with a package always is."""
    if source not in SOURCES:  # a user's data set
        return find_stored(source, root) is not None
    return not SOURCES[source].layouts or find_layout(SOURCES[source], root) is not None


def sources_of(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(source_of(cell) for cell in cells))


def _sources(configs: Iterable[RunConfig]) -> list[str]:
    return list(dict.fromkeys(str(config.stream.source) for config in configs))


def config_of(cell: Cell, root: Path, own: Mapping[str, Any] | None = None) -> RunConfig:
    """Configuration of a cell's run; typed settings override the cell's."""
    typed = own or {}
    source = typed.get("stream", {}).get("source") or source_of(cell)
    return resolve(merge_settings(merge_settings(cell.values, typed), {"stream": {"source": source}}), root)


def _other_data(cells: Iterable[Cell], typed: str | None) -> list[str]:
    """Warnings that the published numbers are of other data, if another data set than the recipe's was typed."""
    usual = dict.fromkeys(source_of(cell) for cell in cells if typed is not None and cell.published)
    return [
        f"Ours is on {typed}, where the recipe has {source}: other data, with which the published numbers can't be "
        f"compared."
        for source in usual
        if source != typed
    ]


def _show_variant(variant: _Variant, measured: Sequence[Measured], console: Console, tried: bool) -> None:
    if variant.title:
        console.print()
        say(f"{variant.title}:", console, style="bold")
    recorded_cells = [one for one in measured if one.records]
    if recorded_cells:
        _show(variant.recipe, recorded_cells, console, tried)
    for line in lost_remarks(measured):
        say(line, console)
    if not measured:
        console.print(safe_text("none of it is run"))
        return
    done = {id(one.cell) for one in measured}
    missing = [cell.words for cell in variant.cells if id(cell) not in done]
    if missing:
        more = f" and {len(missing) - SOME} more" if len(missing) > SOME else ""
        say(f"Not run: {', '.join(missing[:SOME])}{more}.", console)
    if not tried:
        show_claims(variant.recipe, recorded_cells, console, whole=len(measured) == len(cells_of(variant.recipe)))


def _show(recipe: Recipe, measured: Sequence[Measured], console: Console, tried: bool) -> None:
    if recipe.kind == "curves":
        show_curves(recipe, measured, console)
    else:
        show_table(recipe, measured, console, verdicts=not tried)
