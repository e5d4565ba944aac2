"""`contnorm paper --list`: the recipes, the data that each needs, and how many of its runs are done."""

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

LEAST_OF_DATA = 24  # minimum width of the data column


def show_recipes(seeds: int, given: Path | None, runs: Path, console: Console, only: str = "") -> None:
    """Print one line per recipe: name and title, the data it needs and where that is, runs done and in total.

    ``only`` is the name or file of a single recipe; empty for all of the paper's.
    """
    root = data_root(given)
    console.print(safe_text(f"data under {root} (--data-root or {ENVIRONMENT} says where else), runs under {runs}"))
    recipes = [(name, find_recipe(name)) for name in ([only] if only else recipe_names())]
    rows = [(name, _done(one, seeds, root, runs), one.title, _data(one, root)) for name, one in recipes]
    table = _table(rows, ("recipe", "runs done", "what it is"))
    if needed_width(table, console) + LEAST_OF_DATA <= console.width:
        console.print(_table(rows, ("recipe", "runs done", "what it is", "data")))
        return
    for name, done, *rest in rows:
        console.print(safe_text(f"{name}  {done}"))
        for line in rest:
            indented(line, console)


def _table(rows: Sequence[tuple[str, ...]], heads: Sequence[str]) -> Table:
    """Table of the columns in ``heads``; only the data column may wrap."""
    table = Table(*(Column(head, no_wrap=head != "data") for head in heads), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(safe_text, row[: len(heads)]))
    return table


def _done(recipe: Recipe, seeds: int, root: Path, runs: Path) -> str:
    selection = selection_of(recipe, runs)
    cells = cells_of(recipe)
    if selection is not None:
        cells += [cell for cell in cells_of(with_selection(recipe, selection)) if covers(selection, cell)]
    configs = dict.fromkeys(config_of(cell, root) for cell in cells)
    if not configs:
        return "none to do" if recipe.kind != "waiting" else "waits"
    records = Kept(Store(runs_folder(recipe, runs)), range(seeds), HOWS)
    jobs = records.jobs(list(configs))
    done = [job for job in jobs if records.store.has(job.config, job.seed)]
    usual = {how_of(config) for config in configs}
    others = Counter(how_words(how) for job in done if (how := how_of(job.config)) not in usual)
    precisions = "".join(f", {count if count < len(done) else 'all'} in {how}" for how, count in others.items())
    diverged = sum(records.store.lost(job.config, job.seed) for job in jobs)
    return f"{len(done)} of {len(jobs)}{precisions}{f', {diverged} lost' if diverged else ''}"


def _data(recipe: Recipe, root: Path) -> str:
    if recipe.kind == "waiting":
        return "multi-label streams, not there yet"
    needed = sources_of(cells_of(recipe)) or [find_stream(stream).sources[0] for stream in recipe.streams]
    places = {source: place_of(SOURCES[source], root) for source in needed}
    return ", ".join(f"{source}: {place or 'not found'}" for source, place in places.items()) or "none"
