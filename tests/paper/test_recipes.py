"""Recipes: each parses, resolves and finds its numbers; a mistake in one is told in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from contnorm.cli.paper import run_recipe
from contnorm.errors import UserError
from contnorm.paper.cells import cells_of, matches, unmatched_entries, unpaired_claims
from contnorm.paper.published import find
from contnorm.paper.recipe import find_recipe, parse_recipe, recipe_names
from contnorm.paper.recipe_runs import config_of
from contnorm.paper.run import TableOptions

ROOT = Path(__file__).resolve().parents[2]
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


def test_recipe_exists_for_every_table_and_figure() -> None:
    paper = [*(f"table{i}" for i in range(1, 15)), "figure1", "figure2", "figure3"]
    ours = ["panel", "panel-batch", "panel-cifar10", "panel-forward"]
    assert [*paper, *ours] == NAMES and [name for name in NAMES if find_recipe(name).ours] == ours


@pytest.mark.parametrize("name", NAMES)
def test_recipe_settings_resolve(name: str, tmp_path: Path) -> None:
    recipe = find_recipe(name)
    for cell in cells_of(recipe):
        config = config_of(cell, tmp_path)
        assert config.stream.name == cell.place["stream"] and config.norm.name == cell.place["norm"]
        assert config.memory.size == (cell.place["buffer"] or 50)
        if cell.view.matrix == "matrix_running":
            assert config.evaluate.moments == "oracle"  # else there is one matrix alone
        if cell.view.matrix == "matrix_task":
            assert config.stream.scenario == "class"


PUBLISHED = [name for name in NAMES if find_recipe(name).kind == "runs" and not find_recipe(name).ours]


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipe_has_a_cell_for_every_published_number(name: str) -> None:
    recipe = find_recipe(name)
    seen = {number for cell in cells_of(recipe) for number in cell.published.values()}
    assert seen == set(find(table=recipe.table))
    assert {number.metric for number in seen} - {"seconds"} == recipe.scores.keys()


def test_multilabel_table_settings(tmp_path: Path) -> None:
    """As the code of PRS has them, where it and the paper that ran it differ."""
    cells = cells_of(find_recipe("table5"))
    assert len(cells) == 2 * 2 * 4 and len({config_of(cell, tmp_path).hash for cell in cells}) == 4
    for cell in cells:
        config = config_of(cell, tmp_path)
        train, memory = config.train, config.memory
        assert (train.optimizer, train.lr, train.clip_value, train.batch, train.replay) == ("adam", 1e-4, 5.0, 10, 10)
        assert (train.partial, train.passes, config.stream.scenario) == ("drop", 1, "free")
        rho = {"cocoseq": -0.03, "nus-wideseq": 0.02}[config.stream.name]
        assert (memory.kind, memory.size, memory.rho, memory.quirk) == ("prs", 2000, rho, True)
        assert config.strategy.forward == "joint" and config.strategy.replay_from == "all"
        assert (config.model.name, config.model.weights) == ("resnet101", "torchvision:IMAGENET1K_V1")


def test_example_recipe_compares_memories(tmp_path: Path) -> None:
    recipe = find_recipe(str(ROOT / "examples" / "cocoseq_mini.toml"))
    configs = {config_of(cell, tmp_path): cell for cell in cells_of(recipe)}
    assert len(configs) == 2 * 5 and not any(cell.published for cell in configs.values())
    for config, cell in configs.items():
        kind = {"prs": "prs", "crs": "reservoir"}[cell.place["strategy"]]
        assert (config.memory.kind, config.memory.size, config.train.passes) == (kind, 100, 20)
        assert (config.model.name, config.model.weights, config.train.optimizer) == ("resnet34", None, "adam")


def test_waiting_recipe_has_a_note() -> None:
    recipe = parse_recipe("x", 'title = "later"\nkind = "waiting"\nnote = "needs more"', "x.toml")
    assert recipe.kind == "waiting" and not cells_of(recipe)


def test_class_incremental_table_settings(tmp_path: Path) -> None:
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


def test_recipes_share_runs(tmp_path: Path) -> None:
    def hashes(name: str, **wanted: Any) -> set[str]:
        return {config_of(c, tmp_path).hash for c in cells_of(find_recipe(name)) if matches(c.place, wanted)}

    assert hashes("table4") < hashes("table11") and hashes("figure2") < hashes("table4")
    assert hashes("table12", momentum="own") < hashes("table2", norm="bn")
    assert hashes("figure3") < hashes("table1") and hashes("table3", layers="own") < hashes("table2")
    one_label = hashes("table8", norm="cn") - hashes("table8", stream="cocoseq")
    assert one_label == hashes("table2", norm="cn", strategy="er")
    assert hashes("table5") == hashes("table6") == hashes("table13") == hashes("table14")
    assert hashes("table8", norm="cn", stream="cocoseq") < hashes("table5", norm="cn")


def test_selected_settings_apply_to_matching_cells(tmp_path: Path) -> None:
    more = '\n[[selected]]\nwhere = { norm = "gn" }\nsettings = { train = { lr = 0.1 } }\n'
    text = SMALL.replace('"bn"', '"bn", "gn"')
    rates = {c.norm: config_of(c, tmp_path).train.lr for c in cells_of(parse_recipe("x", text + more, "x.toml"))}
    assert rates == {"bn": 0.03, "gn": 0.1}


def test_recipe_with_published_numbers() -> None:
    more = '[[published]]\ndataset = "split-mnist"\nstrategy = "er"\nnorm = "bn"\nvalues = { acc = [91.0, 0.5] }\n'
    (cell,) = cells_of(parse_recipe("x", SMALL + more, "x.toml"))
    assert (cell.published["acc"].mean, cell.published["acc"].std) == (91.0, 0.5)


@pytest.mark.parametrize(
    ("old", "new", "message"),
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
        ('norms = ["bn"]', 'norms = ["bn"]\nforwards = ["both"]', r"runs 1: forwards: unknown name 'both'"),
        ('norms = ["bn"]', 'norms = ["bn"]\nbatches = [1.5]', r"runs 1: batches: 1\.5 must be a whole number"),
        (
            'norms = ["bn"]',
            'norms = ["bn"]\n[[claims]]\nsays = "{norm}"\nkind = "above"\nscore = "acc"\neach_norm_but = ["bm"]',
            r"claims 1: each_norm_but: unknown norm of \[\[runs\]\] 'bm'",
        ),
        (
            'norms = ["bn"]',
            'norms = ["bn"]\n[[claims]]\nsays = "x"\nkind = "above"\nscore = "acc"\neach_norm_but = ["bn"]',
            r"claims 1: says='?x'? must contain \{norm\}",
        ),
        ('["bn"]', "[]", r"runs 1: norms is empty"),
        ('["er"]', "[]", r"runs 1: strategies is empty"),
        *[
            (
                'norms = ["bn"]',
                f'norms = ["bn"]\n[[claims]]\nsays = "x"\nkind = "{kind}"\nscore = "acc"\n'
                f'than = {{ norm = "bn" }}\n{bound}',
                f"claims 1: .*{message}",
            )
            for kind, bound, message in [
                ("near", "", "needs `margin`"),
                ("under", "", "needs `limit`"),
                ("near", "margin = nan", "finite"),
                ("near", "margin = -1.0", "0 or more"),
                ("under", "limit = inf", "finite"),
            ]
        ],
        *[
            (
                'norms = ["bn"]',
                'norms = ["bn"]\n[[published]]\ndataset = "split-mnist"\nstrategy = "er"\nnorm = "bn"\n'
                f"values = {{ {values} }}",
                f"published 1: .*{message}",
            )
            for values, message in [
                ("acc = [nan]", "at most"),
                ("acc = [90.0, -1.0]", "standard deviation of 0 or more"),
                ("acc = [90.0, 1e300]", "at most"),
                ("acc = [90.0, inf]", "at most"),
                ("acc = [90.0, 1.0, 3]", "doubt"),
                ('acc = [90.0, 1.0, "a", "b"]', "doubt"),
                ("ac = [90.0]", "unknown metric .*Did you mean 'acc'"),
            ]
        ],
    ],
)
def test_mistake_in_recipe_is_a_one_line_error(old: str, new: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse_recipe("x", SMALL.replace(old, new, 1), "x.toml")
    assert "\n" not in str(error.value)


def test_unknown_recipe() -> None:
    with pytest.raises(UserError, match=r"unknown recipe 'tabel1'\. Did you mean 'table1'"):
        find_recipe("tabel1")
    with pytest.raises(UserError, match=r"nowhere\.toml: can't be read"):
        find_recipe("nowhere.toml")


OWN = """
title = "Two norms"
[scores]
acc = "acc"
[[runs]]
streams = ["split-mnist"]
strategies = ["er"]
norms = ["bn", { name = "cn", groups = 4 }]
buffers = [50]
"""
SLIPS = {
    "[[published]] split-mnist er cn 51 running": (
        '[[published]]\ndataset = "split-mnist"\nstrategy = "er"\nnorm = "cn"\nbuffer = 51\nvalues = { acc = [97.1] }'
    ),
    "[[selected]] where = { norm = 'gn' }": (
        '[[selected]]\nwhere = { norm = "gn" }\nsettings = { train = { lr = 0.1 } }'
    ),
    "[[claims]] 'CN is over GN': { norm = 'gn' }": (
        '[[claims]]\nsays = "CN is over GN"\nkind = "above"\nscore = "acc"\ncells = { norm = "cn" }\n'
        'than = { norm = "gn" }'
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_entries_that_match_no_cell_are_rejected(tmp_path: Path, slip: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OWN)
    assert unmatched_entries(find_recipe(str(path))) == []
    path.write_text(f"{OWN}\n{SLIPS[slip]}\n")
    assert unmatched_entries(find_recipe(str(path))) == [slip]
    with pytest.raises(UserError, match=r"mine: .* matches no cell of the table\. Cells are made of"):
        run_recipe(str(path), TableOptions(), Console(quiet=True))


@pytest.mark.parametrize("name", recipe_names())
def test_package_recipes_have_no_unmatched_entries(name: str) -> None:
    assert unmatched_entries(find_recipe(name)) == [] and unpaired_claims(find_recipe(name)) == []


GRID = """
title = "sizes"
[scores]
acc = "acc"
[[runs]]
streams = ["split-cifar100"]
strategies = ["er"]
norms = ["bn"]
forwards = ["joint", "separate"]
batches = [1, 16]
replays = [4]
[[runs]]
streams = ["split-cifar100"]
strategies = ["er"]
norms = ["bn", { name = "bn", freeze_after = 1 }]
settings = { evaluate = { moments = "memory", weights = "task" } }
"""


def test_grid_of_forward_passes_and_batch_sizes(tmp_path: Path) -> None:
    cells = cells_of(parse_recipe("sizes", GRID, "sizes.toml"))
    configs = [config_of(cell, tmp_path) for cell in cells]
    sizes = [(c.strategy.forward, c.train.batch, c.train.replay) for c in configs[:4]]
    assert sizes == [("joint", 1, 4), ("joint", 16, 4), ("separate", 1, 4), ("separate", 16, 4)]
    assert cells[3].label == "split-cifar100 er forward separate batch 16 replay 4 bn"
    assert [cell.norm for cell in cells[4:]] == ["bn memory (task weights)", "bn frozen memory (task weights)"]
    assert {(c.evaluate.moments, c.evaluate.weights) for c in configs[4:]} == {("memory", "task")}


def test_panel_shares_the_runs_of_the_paper(tmp_path: Path) -> None:
    """Cells with the settings of Table 2 and Table 11 are the same runs."""
    configs = {name: [config_of(cell, tmp_path) for cell in cells_of(find_recipe(name))] for name in NAMES}
    table2 = [config for config in configs["table2"] if config.stream.name == "split-cifar100"]
    assert set(table2) <= set(configs["panel"])
    assert set(configs["panel-cifar10"]) & set(configs["table11"])
    assert not any(cell.published for name in NAMES if find_recipe(name).ours for cell in cells_of(find_recipe(name)))
