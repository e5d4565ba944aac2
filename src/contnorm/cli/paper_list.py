"""Which recipes there are, what data each needs, and how much of it is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from contnorm.bench.data.registry import ENVIRONMENT, SOURCES, data_root
from contnorm.bench.records import Store
from contnorm.bench.streams.tasks import find_stream
from contnorm.cli.data import place_of
from contnorm.cli.paper import config_of, runs_folder, selection_of, sources_of
from contnorm.cli.paper_records import Kept
from contnorm.cli.tables import indented, needed_width, safe_text
from contnorm.paper.cells import cells_of
from contnorm.paper.precisions import HOWS, how_of, how_words
from contnorm.paper.recipe import Recipe
from contnorm.paper.recipe_file import find_recipe, recipe_names
from contnorm.paper.selection import covers, with_selection

__all__ = ["show_recipes"]

LEAST_OF_DATA = 24  # columns


def show_recipes(seeds: int, given: Path | None, runs: Path, console: Console, only: str = "") -> None:
    """A line each: its name and title, the data it needs and where that is, and the runs done of those wanted.

    ``only`` one of them, which may be a file, or all of the paper's.
    """
    root = data_root(given)
    console.print(safe_text(f"data under {root} (--data-root or {ENVIRONMENT} says where else), runs under {runs}"))
    found = [(name, find_recipe(name)) for name in ([only] if only else recipe_names())]
    rows = [(name, _done(one, seeds, root, runs), one.title, _data(one, root)) for name, one in found]
    table = _table(rows, ("recipe", "runs done", "what it is"))
    if needed_width(table, console) + LEAST_OF_DATA <= console.width:
        console.print(_table(rows, ("recipe", "runs done", "what it is", "data")))
        return
    for name, done, *rest in rows:
        console.print(safe_text(f"{name}  {done}"))
        for line in rest:
            indented(line, console)


def _table(rows: Sequence[tuple[str, ...]], heads: Sequence[str]) -> Table:
    """Of so many columns; what is said of data may wrap."""
    table = Table(*(Column(head, no_wrap=head != "data") for head in heads), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(safe_text, row[: len(heads)]))
    return table


def _done(recipe: Recipe, seeds: int, root: Path, runs: Path) -> str:
    found = selection_of(recipe, runs)
    cells = cells_of(recipe)
    if found is not None:
        cells += [cell for cell in cells_of(with_selection(recipe, found)) if covers(found, cell)]
    configs = dict.fromkeys(config_of(cell, root) for cell in cells)
    if not configs:
        return "none to do" if recipe.kind != "waiting" else "waits"
    kept = Kept(Store(runs_folder(recipe, runs)), range(seeds), HOWS)
    jobs = kept.jobs(list(configs))
    done = [job for job in jobs if kept.store.has(job.config, job.seed)]
    usual = {how_of(config) for config in configs}
    others = Counter(how_words(how) for job in done if (how := how_of(job.config)) not in usual)
    said = "".join(f", {count if count < len(done) else 'all'} in {how}" for how, count in others.items())
    lost = sum(kept.store.lost(job.config, job.seed) for job in jobs)
    return f"{len(done)} of {len(jobs)}{said}{f', {lost} lost' if lost else ''}"


def _data(recipe: Recipe, root: Path) -> str:
    if recipe.kind == "waiting":
        return "multi-label streams, not there yet"
    needed = sources_of(cells_of(recipe)) or [find_stream(stream).sources[0] for stream in recipe.streams]
    found = {source: place_of(SOURCES[source], root) for source in needed}
    return ", ".join(f"{source}: {place or 'not found'}" for source, place in found.items()) or "none"
