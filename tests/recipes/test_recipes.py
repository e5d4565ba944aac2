"""Recipes: each parses, resolves and finds its numbers; a mistake in one is told in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contnorm.cli.paper import config_of
from contnorm.errors import UserError
from contnorm.recipes.grid import cells_of, matches
from contnorm.recipes.published import find
from contnorm.recipes.reading import find_recipe, parse_recipe, recipe_names

NAMES = recipe_names()
SMALL = """
title = "one run"
[scores]
acc = "acc"
[[runs]]
streams = ["split-mnist"]
strategies = ["er"]
norms = ["bn"]
"""


def test_every_table_and_figure_has_one() -> None:
    assert [*(f"table{i}" for i in range(1, 15)), "figure1", "figure2", "figure3"] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_resolves(name: str, tmp_path: Path) -> None:
    recipe = find_recipe(name)
    for cell in cells_of(recipe):
        config = config_of(cell, tmp_path)
        assert config.stream.name == cell.place["stream"] and config.norm.name == cell.place["norm"]
        assert config.memory.size == (cell.place["buffer"] or 50)
        if cell.view.matrix == "matrix_running":
            assert config.evaluate.moments == "oracle"  # else there is one matrix alone
        if cell.view.matrix == "matrix_task":
            assert config.stream.scenario == "class"


@pytest.mark.parametrize("name", [name for name in NAMES if find_recipe(name).kind == "runs"])
def test_every_number_of_a_table_has_a_cell(name: str) -> None:
    recipe = find_recipe(name)
    seen = {number for cell in cells_of(recipe) for number in cell.published.values()}
    wanted = {number for number in find(table=recipe.table) if number.dataset != "cocoseq"}
    assert seen == wanted
    assert {number.metric for number in seen} - {"seconds"} == recipe.scores.keys()


@pytest.mark.parametrize("name", ["table5", "table6", "table13", "table14"])
def test_what_waits_says_for_what(name: str) -> None:
    recipe = find_recipe(name)
    assert recipe.kind == "waiting" and "multi-label" in recipe.note


def test_settings_of_the_class_incremental_tables(tmp_path: Path) -> None:
    """As the table of the code they were made with has them."""
    alpha_beta = {
        ("split-cifar10", 500): (0.2, 0.5), ("split-cifar10", 2560): (0.1, 1.0), ("split-cifar10", 5120): (0.1, 1.0),
        ("split-tiny-imagenet", 500): (0.2, 0.5), ("split-tiny-imagenet", 2560): (0.1, 0.5),
        ("split-tiny-imagenet", 5120): (0.1, 0.5),
    }  # fmt: skip
    cells = cells_of(find_recipe("table11"))
    assert len(cells) == 2 * 3 * 6 * 2
    for cell in cells:
        config = config_of(cell, tmp_path)
        strategy = config.strategy
        assert (strategy.alpha, strategy.beta) == alpha_beta[cell.place["stream"], cell.place["buffer"]]
        assert (config.train.lr, config.train.batch, config.train.replay, strategy.forward) == (
            0.03,
            32,
            32,
            "separate",
        )
        assert config.memory.kind == "reservoir" and config.evaluate.ahead and config.model.stem == "plain"


def test_tables_share_their_runs(tmp_path: Path) -> None:
    def hashes(name: str, **wanted: Any) -> set[str]:
        return {config_of(c, tmp_path).hash for c in cells_of(find_recipe(name)) if matches(c.place, wanted)}

    assert hashes("table4") < hashes("table11") and hashes("figure2") < hashes("table4")
    assert hashes("table12", momentum="own") < hashes("table2", norm="bn")
    assert hashes("figure3") < hashes("table1") and hashes("table3", layers="own") < hashes("table2")
    assert hashes("table8", norm="cn") == hashes("table2", norm="cn", strategy="er")


def test_a_selected_learning_rate_is_that_of_its_cells_alone(tmp_path: Path) -> None:
    more = '\n[[selected]]\nwhere = { norm = "gn" }\nsettings = { train = { lr = 0.1 } }\n'
    text = SMALL.replace('"bn"', '"bn", "gn"')
    rates = {c.norm: config_of(c, tmp_path).train.lr for c in cells_of(parse_recipe("x", text + more, "x.toml"))}
    assert rates == {"bn": 0.03, "gn": 0.1}


def test_numbers_of_ones_own() -> None:
    more = '[[published]]\ndataset = "split-mnist"\nstrategy = "er"\nnorm = "bn"\nvalues = { acc = [91.0, 0.5] }\n'
    (cell,) = cells_of(parse_recipe("x", SMALL + more, "x.toml"))
    assert (cell.published["acc"].mean, cell.published["acc"].std) == (91.0, 0.5)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("title", "titel", r"x\.toml: unknown key 'titel'. Did you mean 'title'"),
        ('"one run"', "3", r"x\.toml: title: 3 must be text"),
        ('"acc"', '"accuracy"', r"x\.toml: scores: unknown score 'accuracy'"),
        ("norms", "norm", r"x\.toml: runs 1: unknown key 'norm'. Did you mean 'norms'"),
        ('["bn"]', '["bm"]', r"x\.toml: runs 1: norms: .*unknown norm 'bm'"),
        ('["bn"]', "[3]", r"runs 1: norms: 3 is no norm. Write a name, or \{ name = \"cn\", groups = 32 \}"),
        ('["bn"]', '[{ name = "bn", group = 3 }]', r"runs 1: norms: unknown key 'norm\.group'"),
        ('["er"]', '["erx"]', r"runs 1: strategies: unknown name 'erx'"),
        ('norms = ["bn"]', 'norms = ["bn"]\nviews = ["al"]', r"runs 1: views: unknown name 'al'"),
        ('norms = ["bn"]', 'norms = ["bn"]\nbuffers = [true]', r"runs 1: buffers: True must be a whole number"),
        (
            'norms = ["bn"]',
            'norms = ["bn"]\nsettings = { train = { rl = 1 } }',
            r"runs 1: settings: unknown key 'train\.rl'",
        ),
        (
            'norms = ["bn"]',
            'norms = ["bn"]\n[[claims]]\nsays = "x"\nkind = "above"',
            r"claims 1: the key 'score' is missing",
        ),
        (
            'norms = ["bn"]',
            'norms = ["bn"]\n[[claims]]\nsays = "x"\nkind = "above"\nscore = "acc"',
            r"claims 1: a claim of kind 'above' needs `than`",
        ),
        (
            'norms = ["bn"]',
            'norms = ["bn"]\n[[selected]]\nwhere = { nrom = "bn" }\nsettings = {}',
            r"selected 1: where: unknown key 'nrom'. Did you mean 'norm'",
        ),
        ('title = "one run"', 'title = "a"\nkind = "curves"', r"scores: 'acc' has no value after each task"),
        ('title = "one run"', 'title = "a"\npublished_runs = 1', r"published_runs: 1 must be 2 or more"),
        (
            'norms = ["bn"]',
            'norms = ["bn"]\n[[claims]]\nsays = "x"\nkind = "flat"\nscore = "fm"',
            r"claims 1: score: 'fm' has no value after each task",
        ),
        ("[scores]", "[scores", r"x\.toml: is not TOML"),
    ],
)
def test_a_mistake_in_a_recipe_is_one_line(old: str, new: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        parse_recipe("x", SMALL.replace(old, new, 1), "x.toml")
    assert "\n" not in str(error.value)


def test_a_recipe_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"unknown recipe 'tabel1'\. Did you mean 'table1'"):
        find_recipe("tabel1")
    with pytest.raises(UserError, match=r"nowhere\.toml: can't be read"):
        find_recipe("nowhere.toml")
