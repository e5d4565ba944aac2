"""Recipes: each parses, resolves and finds its numbers; a mistake in one is told in one line."""

from pathlib import Path
from typing import Any

import pytest

from contnorm.errors import UserError
from contnorm.paper.cells import cells_of, check_entries, matches
from contnorm.paper.recipe import find_published, find_recipe, parse_recipe, recipe_names
from contnorm.paper.run import config_of

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


PUBLISHED = [name for name in NAMES if find_recipe(name).scores and find_recipe(name).table]


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipe_has_a_cell_for_every_published_number(name: str) -> None:
    recipe = find_recipe(name)
    seen = {number for cell in cells_of(recipe) for number in cell.published.values()}
    assert seen == set(find_published(table=recipe.table))
    assert {number.metric for number in seen} - {"seconds"} == recipe.scores.keys() - {
        "aia"
    }  # the paper has no such mean


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


CLAIM = 'norms = ["bn"]\n[[claims]]\nsays = "x"\nscore = "acc"\n'
ROW = 'norms = ["bn"]\n[[published]]\ndataset = "split-mnist"\nstrategy = "er"\nnorm = "bn"\n'


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("title", "titel", "titel"),
        ('"acc"', '"accuracy"', "unknown score 'accuracy'"),
        ('["bn"]', '["bm"]', r"runs 1 norms 1='bm': .*unknown norm 'bm'"),
        ('["bn"]', '[{ name = "bn", group = 3 }]', r"norm\.group"),
        ('["er"]', '["erx"]', "unknown strategy 'erx'"),
        ('["er"]', '["mine.py:ER"]', "is code"),
        ('["er"]', "[]", "runs 1 strategies"),
        ('["bn"]', '["bn"]\nviews = ["al"]', "runs 1 views 1='al'"),
        ('["bn"]', '["bn"]\nbuffers = [true]', "runs 1 buffers 1=True"),
        ('["bn"]', '["bn"]\nsettings = { train = { rl = 1 } }', r"train\.rl"),
        ('["bn"]', '["bn"]\nsettings = { train = { precision = "tf32" } }', "precision"),
        ('title = "one run"', 'title = "a"\nkind = "curves"', "'acc' has no value after each task"),
        ('norms = ["bn"]', CLAIM + 'kind = "over"', "claims 1 kind='over'"),
        ('norms = ["bn"]', CLAIM + 'kind = "above"', "needs `than`"),
        ('norms = ["bn"]', CLAIM + 'kind = "flat"', "'acc' has no value after each task"),
        ('norms = ["bn"]', CLAIM + 'kind = "under"\nlimit = inf', "claims 1 limit"),
        ('norms = ["bn"]', CLAIM + 'kind = "under"\ncells = { nrom = "bn" }', "claims 1 cells nrom"),
        ('norms = ["bn"]', ROW + "values = { acc = [90.0, -1.0] }", "published 1 values acc"),
        ('norms = ["bn"]', ROW + "values = { ac = [90.0] }", "unknown metric .*Did you mean 'acc'"),
        ("[scores]", "[scores", "is not TOML"),
    ],
)
def test_mistake_in_recipe_is_found(old: str, new: str, place: str) -> None:
    with pytest.raises(UserError, match=rf"x\.toml: .*{place}"):
        parse_recipe("x", SMALL.replace(old, new, 1), "x.toml")


@pytest.mark.parametrize(
    "entry",
    [
        '[[published]]\ndataset = "split-mnist"\nstrategy = "er"\nnorm = "gn"\nvalues = { acc = [97.1] }',
        '[[selected]]\nwhere = { norm = "gn" }\nsettings = { train = { lr = 0.1 } }',
        '[[claims]]\nsays = "over GN"\nkind = "above"\nscore = "acc"\ncells = { norm = "bn" }\nthan = { norm = "gn" }',
        '[[claims]]\nsays = "x"\nkind = "above"\nscore = "acc"\ncells = { norm = "bn" }\nthan = { strategy = "er" }',
    ],
)
def test_entry_that_matches_no_cell_is_rejected(entry: str) -> None:
    check_entries(parse_recipe("mine", SMALL, "mine.toml"))
    with pytest.raises(UserError, match="matches no cell of the table"):
        check_entries(parse_recipe("mine", f"{SMALL}\n{entry}\n", "mine.toml"))


@pytest.mark.parametrize("name", NAMES)
def test_entries_of_package_recipe_match_cells(name: str) -> None:
    check_entries(find_recipe(name))


def test_claim_for_each_norm() -> None:
    each = '[[claims]]\nsays = "Is {norm} over BN?"\nkind = "above"\nscore = "acc"\neach_norm_but = ["bn", "cn"]\n'
    text = SMALL.replace('["bn"]', '["bn", "in", "cn4", "gn4"]') + each + 'than = { norm = "bn" }\n'
    claims = parse_recipe("own", text, "own.toml").claims
    expected = [("Is in over BN?", {"norm": "in"}), ("Is gn over BN?", {"norm": "gn"})]
    assert [(claim.says, claim.cells) for claim in claims] == expected


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
