"""`contnorm tune`: learning rates are chosen on the validation tasks, and `contnorm paper` shows tables with them."""

import io
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from rich.console import Console

from contnorm.bench.api import run as running
from contnorm.bench.api.progress import RunInterrupted
from contnorm.bench.engine.execute import execute
from contnorm.bench.engine.run import Event, RunOptions
from contnorm.bench.grid import LEARNING_RATES
from contnorm.bench.records import Runs, Store
from contnorm.cli.paper import run_recipe
from contnorm.cli.tune import tune_recipe
from contnorm.errors import UserError
from contnorm.paper import lr_search
from contnorm.paper.cells import RecordIndex, cells_of, matches
from contnorm.paper.lr_search import TuneOptions
from contnorm.paper.recipe import find_recipe, recipe_names
from contnorm.paper.run import TableOptions
from contnorm.paper.selection import RateResult, find_selection, read_selection
from tests.cli.conftest import printed
from tests.datasets import small_cifar100

ALONE = RunOptions()
ROOT = Path(__file__).resolve().parents[2]
TUNED, SELECTED = (
    ROOT / "docs/records/split-cifar100-coarse-grid.jsonl.gz",
    ROOT / "src/contnorm/paper/selected/table2.toml",
)
OWN = """
title = "a small network"
[scores]
acc = "acc"
[settings]
model = { name = "mlp", width = 8 }
train = { lr = 0.03, batch = 10, replay = 10 }
[[runs]]
streams = ["split-cifar100"]
strategies = ["single", "er"]
norms = ["none", "bn"]
[[claims]]
says = "BN is over none"
kind = "above"
score = "acc"
cells = { norm = "bn" }
than = { norm = "none" }
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_cifar100(tmp_path_factory.mktemp("data"), per_class=10)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    return str(path)


def wanted(root: Path, tmp_path: Path, **more: object) -> TuneOptions:
    output = {"seeds": 2, "rates": (0.01, 0.1), "only": ["strategy=er"], **more}
    return TuneOptions(execution=ALONE, data_root=root, runs=tmp_path / "runs", **output)  # type: ignore[arg-type]


def test_highest_mean_is_chosen_and_grid_is_written(root: Path, tmp_path: Path, recipe: str, console: Console) -> None:
    tune_recipe(recipe, wanted(root, tmp_path), console)
    records = list(Store(tmp_path / "runs"))
    assert len(records) == 2 * 2 * 2 and {record.config.stream.part for record in records} == {"validate"}
    assert {len(record.matrix.correct) for record in records} == {3}  # the stream's first three tasks
    found = read_selection(tmp_path / "runs" / "selected" / "own.toml", "own")
    assert [one.where for one in found.selected] == [
        {"stream": "split-cifar100", "strategy": "er", "norm": name} for name in ("none", "bn")
    ]
    for one in found.selected:
        acc = {
            rate: [
                r.score("acc") for r in records if (r.config.norm.name, r.config.train.lr) == (one.where["norm"], rate)
            ]
            for rate in (0.01, 0.1)
        }
        assert one.lr == max(sorted(acc), key=lambda rate: fmean(acc[rate]))
        assert [(tried.lr, tried.seeds, tried.lost) for tried in one.grid] == [(0.01, 2, 0), (0.1, 2, 0)]
        # as it is written, to eight digits
        assert [tried.mean for tried in one.grid] == pytest.approx([fmean(acc[rate]) for rate in (0.01, 0.1)], abs=1e-5)
        mark = rf"er +{one.where['norm']} .*{fmean(acc[one.lr]):.2f} \+- [\d.]+ \*.* {one.lr:g}"
        assert re.search(mark, printed(console))


def test_grid_of_a_recipe_is_extended_and_refined_on_request(
    root: Path, tmp_path: Path, recipe: str, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake score in place of ACC: BN is best at the lowest learning rate tried, no norm at 0.01."""
    real = lr_search._results

    def scored(grid: lr_search.GridResult, index: RecordIndex, seeds: range) -> list[RateResult]:
        score = (lambda lr: -lr) if "bn" in grid.names[2] else (lambda lr: -abs(lr - 0.01))
        return [replace(one, mean=score(one.lr)) for one in real(grid, index, seeds)]

    monkeypatch.setattr(lr_search, "_results", scored)
    options = wanted(root, tmp_path, rates=(0.003, 0.01, 0.03), seeds=1, extensions=2, refine="around")
    tune_recipe(recipe, options, console)
    found = {one.where["norm"]: one for one in read_selection(tmp_path / "runs/selected/own.toml", "own").selected}
    assert [one.lr for one in found["bn"].grid] == [0.0003, 0.0005, 0.001, 0.003, 0.01, 0.03]
    assert [one.lr for one in found["none"].grid] == [0.003, 0.005, 0.01, 0.02, 0.03]
    assert found["bn"].lr == 0.0003 and found["none"].lr == 0.01
    assert re.search(r"er +none +-0.01 +.* 5 +0.01 *$", printed(console), re.MULTILINE), "the number of rates tried"
    assert {record.config.stream.part for record in Store(tmp_path / "runs")} == {"validate"}
    tune_recipe(recipe, replace(options, rates=(0.003, 0.01)), console)  # recorded runs are used


def test_rate_with_diverged_run_is_not_chosen(root: Path, tmp_path: Path, recipe: str, console: Console) -> None:
    """A step of 1e30 puts weights out of range; the others of the grid go on."""
    options = wanted(root, tmp_path, only=["strategy=er", "norm=none"], rates=(0.01, 1e30))
    tune_recipe(recipe, options, console)
    assert "2 of 2 diverged" in printed(console) and "the highest mean without a diverged run" in printed(console)
    (one,) = read_selection(tmp_path / "runs" / "selected" / "own.toml", "own").selected
    assert one.lr == 0.01 and [(tried.seeds, tried.lost) for tried in one.grid] == [(2, 0), (0, 2)]
    stored = Store(tmp_path / "runs").load_all()
    assert len(stored.records) == 2 and len(stored.diverged) == 2


def test_stop_keeps_runs_and_chooses_nothing(
    root: Path, tmp_path: Path, recipe: str, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = wanted(root, tmp_path, only=["norm=bn", "strategy=er"])

    def stopped_in_the_second(*given: Any) -> Iterator[Event]:
        finished = 0
        for event in execute(*given):
            yield event
            finished += event.kind == "finished"
            if finished == 1 and event.kind == "started":
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(running, "execute", stopped_in_the_second)
    with pytest.raises(RunInterrupted) as stopped:
        tune_recipe(recipe, options, console)
    assert stopped.value.signal == signal.SIGINT
    assert not (tmp_path / "runs" / "selected").exists()
    monkeypatch.undo()
    (first,) = (tmp_path / "runs").rglob("[01].json")
    written = first.stat().st_mtime_ns
    tune_recipe(recipe, options, console)
    assert first.stat().st_mtime_ns == written and (tmp_path / "runs" / "selected" / "own.toml").is_file()


@pytest.mark.slow
def test_paper_shows_one_and_best_learning_rates(root: Path, tmp_path: Path, recipe: str, console: Console) -> None:
    out = tmp_path / "mine.toml"
    options = wanted(root, tmp_path, only=["norm=bn"], rates=(0.1,), out=out)
    tune_recipe(recipe, options, console)

    def shown(lr: str, **more: object) -> str:
        console = Console(file=io.StringIO(), width=200)
        run_recipe(recipe, TableOptions(2, [], ALONE, data_root=root, runs=tmp_path / "runs", lr=lr, **more), console)  # type: ignore[arg-type]
        return printed(console)

    both, one, best = shown("both", selected=out), shown("one", selected=out), shown("best", selected=out)
    assert both.index("(the same settings for all norms)") < both.index("(each norm with the settings chosen on")
    assert "Left out: the 2 cells for which no learning rate was chosen" in best
    rows = {name: re.findall(r"\n(none|bn)(?:, lr [\d.]+)? +2 ", text) for name, text in (("one", one), ("best", best))}
    assert rows == {"one": ["none", "bn"] * 2, "best": ["bn"] * 2}
    assert "each norm with" not in shown("both")  # nothing is chosen there
    records = [r for r in Store(tmp_path / "runs") if r.config.stream.part == "learn"]
    assert sorted({(r.config.norm.name, r.config.train.lr) for r in records}) == [
        ("bn", 0.03),
        ("bn", 0.1),
        ("none", 0.03),
    ]
    own = fmean(r.score("acc") for r in records if r.config.train.lr == 0.1 and r.config.strategy.name == "er")
    assert re.search(rf", er .*\nnorm .*\nbn +2 +{own:.2f}", best)
    with pytest.raises(UserError, match=r"--lr best: no learning rates are chosen for own. Choose them with `contnorm"):
        shown("best")
    with pytest.raises(UserError, match=r"--lr: unknown choice 'bets'. Did you mean 'best'"):
        shown("bets")


def test_later_selection_keeps_other_cells(root: Path, tmp_path: Path, recipe: str, console: Console) -> None:
    for norm, rate in (("bn", 0.1), ("none", 0.1), ("bn", 0.01)):
        options = wanted(root, tmp_path, only=["strategy=er", f"norm={norm}"], rates=(rate,), seeds=1)
        tune_recipe(recipe, options, console)
    found = read_selection(tmp_path / "runs" / "selected" / "own.toml", "own")
    assert [(one.where["norm"], one.lr) for one in found.selected] == [("none", 0.1), ("bn", 0.01)]


@pytest.mark.parametrize("name", ["table2", "table8", "table9", "table10", "table12"])
def test_grids_use_validation_tasks(name: str, root: Path, tmp_path: Path) -> None:
    """The protocol's grid: five learning rates of one norm and strategy; all else is the table's own."""
    recipe = find_recipe(name)
    options = TuneOptions(only=["stream=split-cifar100"], data_root=root, runs=tmp_path)
    grids = lr_search._grids(recipe, options, root, RecordIndex(Runs([])))
    for grid in grids:
        assert tuple(grid.configs) == LEARNING_RATES and len(set(grid.configs.values())) == len(LEARNING_RATES)
        assert {(config.stream.part, config.stream.tasks) for config in grid.configs.values()} == {("validate", None)}
        (config,) = {replace(config, train=replace(config.train, lr=1.0)) for config in grid.configs.values()}
        sizes = config.train.batch, config.train.replay, config.strategy.alpha, config.strategy.beta
        assert sizes == (10, 10, 0.2, 0.5)
    cells = [cell for cell in cells_of(recipe) if cell.place["stream"] == "split-cifar100"]
    assert len(grids) == len({(cell.place["strategy"], cell.norm.strip("*")) for cell in cells}), "schedules too"


def test_grid_continues_in_recorded_precision(root: Path, tmp_path: Path, recipe: str, console: Console) -> None:
    begun = wanted(root, tmp_path, only=["strategy=er", "norm=bn"], rates=(0.1,), seeds=1, precision="tf32")
    tune_recipe(recipe, begun, console)
    tune_recipe(recipe, replace(begun, rates=(0.01, 0.1), seeds=2, precision=None), console)
    assert [record.config.train.precision for record in Store(tmp_path / "runs")] == ["tf32"] * 4
    tune_recipe(recipe, replace(begun, precision="fp32"), console)
    assert sorted(r.config.train.precision for r in Store(tmp_path / "runs")) == ["fp32"] + ["tf32"] * 4


def test_package_selection_equals_its_records(tmp_path: Path, console: Console) -> None:
    """From the records alone: no data set is there."""
    out = tmp_path / "table2.toml"
    options = TuneOptions(only=["stream=split-cifar100"], execution=ALONE, data_root=tmp_path, runs=TUNED, out=out)
    tune_recipe("table2", options, console)
    assert out.read_text() == SELECTED.read_text()
    assert "split-cifar100 derpp brn scaled" in printed(console) and "3 of 3 diverged" in printed(console)


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("table1", {"only": []}, r"^tune table1: permuted-mnist has no validation tasks"),
        ("figure1", {"only": []}, "tune figure1: it has no runs"),
        ("table2", {"only": ["norm=bm"]}, "--only norm=bm: .* norm is one of bn, brn"),
        ("table2", {"rates": (0.1, -1.0)}, "rates 0.1,-1.0: use learning rates above 0"),
    ],
)
def test_mistake_is_a_one_line_error(
    name: str, more: dict[str, object], message: str, root: Path, tmp_path: Path, console: Console
) -> None:
    with pytest.raises(UserError, match=message) as error:
        tune_recipe(name, wanted(root, tmp_path, **more), console)
    assert "\n" not in str(error.value) and not (tmp_path / "runs").exists() and not printed(console)


def test_package_selections_match_recipes() -> None:
    for name in recipe_names():
        found = find_selection(name)
        for one in found.selected if found else ():
            rates = [tried.lr for tried in one.grid]
            if find_recipe(name).ours:  # refined around the best of a grid, which may begin at a lower rate
                assert len(rates) >= len(LEARNING_RATES) and one.lr in rates
            else:
                assert rates == list(LEARNING_RATES)
            assert any(matches(cell.place, one.where) for cell in cells_of(find_recipe(name)))
