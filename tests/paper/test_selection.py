"""Learning rates that were chosen: what is written is read again, and a mistake in the file is told in one line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from contnorm.errors import UserError
from contnorm.paper.cells import cells_of
from contnorm.paper.recipe_file import find_recipe
from contnorm.paper.selection import (
    Chosen,
    Selection,
    Tried,
    covers,
    find_selection,
    parse_selection,
    read_selection,
    selection_text,
    winner,
    with_selection,
)

GRID = (Tried(0.01, 60.25, 1.5, 3), Tried(0.1, 62.5, 0.5, 3), Tried(0.3, 70.0, 0.1, 2, lost=1))
CHOSEN = Chosen({"stream": "split-cifar100", "strategy": "er", "norm": "brn", "schedule": "own"}, 0.1, "tf32", GRID)
TEXT = selection_text(Selection("table2", (CHOSEN,)))


def test_what_is_written_is_read_again() -> None:
    assert parse_selection(TEXT, "table2", "x.toml") == Selection("table2", (CHOSEN,), "x.toml")
    assert parse_selection(selection_text(Selection("table2")), "table2", "x.toml").chosen == ()
    gone = Tried.of(1e-7, [], lost=3)
    (read,) = parse_selection(selection_text(Selection("t", (Chosen({}, 1e-7, "fp32", (gone,)),))), "t", "x").chosen
    assert read.lr == 1e-7 and math.isnan(read.grid[0].mean) and read.grid[0].lost == 3


def test_only_its_cells_get_the_rate() -> None:
    """Batch renormalization with its published schedule, with ER: one cell of 32; the scaled one keeps the table's."""
    selection = Selection("table2", (CHOSEN,))
    cells = cells_of(with_selection(find_recipe("table2"), selection))
    got = [cell for cell in cells if cell.values["train"]["lr"] == 0.1]
    assert got == [cell for cell in cells if covers(selection, cell)]
    assert [(c.place["stream"], c.place["strategy"], c.norm) for c in got] == [("split-cifar100", "er", "brn")]


def test_the_winner_lost_nothing() -> None:
    assert winner(GRID) == GRID[1] and winner(GRID[2:]) is None and winner(()) is None


def test_the_first_place_that_has_one_is_taken(tmp_path: Path) -> None:
    there = tmp_path / "b.toml"
    there.write_text(TEXT)
    found = find_selection("table2", [tmp_path / "a.toml", there])
    assert found is not None and found.path == str(there)
    assert find_selection("no such table", [tmp_path / "a.toml"]) is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"table2"', '"table9"', r"x\.toml: is the selection of 'table9', and 'table2' was asked for"),
        ("precision", "precison", r"x\.toml: selected 1: unknown key 'precison'. Did you mean 'precision'"),
        ('precision = "tf32"\n', "", r"x\.toml: selected 1: the key 'precision' is missing"),
        ("norm =", "nrom =", r"x\.toml: selected 1: where: unknown key 'nrom'. Did you mean 'norm'"),
        ("\nlr = 0.1", "\nlr = 0.2", r"x\.toml: selected 1: lr=0\.2 is not in its grid of 0\.01, 0\.1, 0\.3"),
        ("mean = 60.25", 'mean = "high"', r"x\.toml: selected 1: grid 1: mean: 'high' must be a number"),
        ("[[selected]]", "[selected]", r"x\.toml: selected=.* must be a list of tables"),
        ("recipe =", "recipe", r"x\.toml: is not TOML"),
    ],
)
def test_a_mistake_is_one_line(old: str, new: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        parse_selection(TEXT.replace(old, new, 1), "table2", "x.toml")
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.toml: can't be read .* `contnorm tune` writes such a file"):
        read_selection(tmp_path / "none.toml", "table2")
