"""`contnorm paper`: every recipe runs end to end on miniature data, and what is printed is what the records say."""

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from contnorm.bench.data.multilabel import build, list_csv
from contnorm.bench.engine.run import RunOptions
from contnorm.bench.records import Store
from contnorm.bench.streams.tasks import STREAMS
from contnorm.cli.paper import run_recipe, show_recipes
from contnorm.errors import UserError
from contnorm.paper.cells import cells_of
from contnorm.paper.recipe import find_recipe, parse_recipe
from contnorm.paper.run import TableOptions, config_of, run_table
from tests.cli.conftest import printed
from tests.datasets import (
    picture,
    small_cifar10,
    small_cifar100,
    small_long_tail,
    small_mini_imagenet,
    small_mnist,
    small_tiny_imagenet,
)

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "docs" / "records" / "runs"
ALONE = RunOptions()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One test picture a task: a wide network looks at all of them after each."""
    root = small_mnist(tmp_path_factory.mktemp("data"), train=2000, test=20)
    small_cifar10(root, test_labels=range(0, 10, 2))
    small_cifar100(root, per_class=2, test_labels=STREAMS["split-cifar100"].class_order[::5])
    small_mini_imagenet(root, test_labels=range(0, 100, 5))
    return small_tiny_imagenet(root, per_class=1, test_labels=range(0, 200, 20))


ONE_CELL = {
    "table1": ["strategy=er", "norm=bn"],
    "table2": ["stream=split-cifar100", "strategy=derpp", "norm=cn"],
    "table3": ["norm=bn", "norm=cn"],
    "table4": ["stream=split-cifar10", "norm=cn8", "buffer=500"],
    "table8": ["norm=bn_gn", "stream=split-mini-imagenet"],
    "table9": ["norm=bn", "tasks=4"],
    "table10": ["stream=split-mini-imagenet", "norm=gn"],
    "table11": ["stream=split-tiny-imagenet", "norm=in", "buffer=2560"],
    "table12": ["momentum=cumulative"],
    "figure2": ["stream=split-cifar10", "norm=bn"],
    "figure3": [],
}


LONG_TAIL = {
    "table5": (["stream=nus-wideseq", "norm=bn"], r"minority classes\n(.*\n)*bn +mAP +1 +\d"),
    "table6": (["stream=cocoseq", "norm=cn"], r"all classes\n(.*\n)*cn4 +FM mAP +1 +\S"),
    "table13": (["stream=cocoseq", "norm=cn"], r"all classes\n(.*\n)*cn4 +mAP +1 +\S+ +\+- 0\.63"),
    "table14": (["stream=nus-wideseq", "norm=cn"], r"all classes\n(.*\n)*cn4 +FM mAP +1 +\S+ +\+- 3\.08"),
    "table8": (["stream=cocoseq", "norm=cn_tied"], r"all classes\n(.*\n)*cn_tied4 +C-F1 +1 +\d"),
}


@pytest.mark.parametrize("name", LONG_TAIL)
def test_multilabel_recipe_runs(name: str, tmp_path: Path, console: Console) -> None:
    """With a small network from scratch on small pictures: what is typed is told, and there are no verdicts."""
    only, row = LONG_TAIL[name]
    small_long_tail(tmp_path, only[0].partition("=")[2])
    other = ["model.name=resnet34", "model.width=4", "model.weights=none"]
    options = TableOptions(1, only, ALONE, max_steps=3, data_root=tmp_path, runs=tmp_path / "runs", settings=other)
    run_recipe(name, options, console)
    output = printed(console)
    assert re.search(row, output) and "changed from the recipe: model.name=resnet34" in output
    assert "so there are no verdicts" in output and "HOLD" not in output and "published images of" in output
    assert len(list((tmp_path / "runs").rglob("0.json"))) == 1


@pytest.mark.slow
def test_incomplete_data_has_claims_but_no_verdicts(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that are the recipe's in all but the pictures there were; a small network stands for the large one."""
    small_long_tail(tmp_path, "cocoseq")
    recipe = find_recipe("table5")
    small = replace(recipe, runs=(replace(recipe.runs[0], settings={"model": {"name": "mlp", "width": 16}}),))
    monkeypatch.setattr("contnorm.paper.recipe.find_recipe", lambda name: small)
    options = TableOptions(2, ["stream=cocoseq"], ALONE, data_root=tmp_path, runs=tmp_path / "runs")
    run_recipe("table5", options, console)
    output = printed(console)
    assert re.search(r"all classes\n(.*\n)*cn4 +mAP +2 +\S+ \+- \S+ +55\.10 \+- 0\.63 +- +- +-", output)
    assert "Our runs used 64 of the 41,438 published images of cocoseq, so their numbers have no verdict." in output
    assert "of what is run (exploratory: 2 seeds): CN is over BN in mAP of all classes (map)\n" in output
    assert re.search(r"\ncocoseq prs buffer 2000 overall cn4 against bn ", output)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_CELL)
def test_recipe_runs(name: str, root: Path, tmp_path: Path, console: Console) -> None:
    options = TableOptions(1, ONE_CELL[name], ALONE, max_steps=1, data_root=root, runs=tmp_path)
    run_recipe(name, options, console)
    output, recipe = printed(console), find_recipe(name)
    assert output.startswith(f"{name}: {recipe.title}\n")
    wanted = [cell for cell in cells_of(recipe) if re.search(rf"\n{re.escape(cell.norm)}[ ,]", output)]
    assert wanted
    if recipe.kind == "runs":
        assert "so there are no verdicts" in output and "HOLD" not in output
    if name == "table4":
        assert "class-incremental" in output and "task-incremental" in output and "fm_mammoth" in output
    if name == "table9":
        assert re.search(r"bn\* +ACC", output) and "61.38 +- 2.46" in output
    if name == "table3":
        for norm in ("cn32", "cn32 stock"):
            assert re.search(rf"\n{norm} +time over BN, % +1 +-?\d", output)
        assert (tmp_path / "table3").is_dir()


def test_table_equals_records(tmp_path: Path, console: Console) -> None:
    """Kept records need neither data nor a run."""
    run_recipe("table1", TableOptions(data_root=tmp_path, runs=RECORDS), console)
    output = printed(console)
    (cell,) = [c for c in cells_of(find_recipe("table1")) if c.place["strategy"] == "er" and c.norm == "bn*"]
    store, config = Store(RECORDS), config_of(cell, tmp_path)
    acc = sum(store.load_run(config, seed).score("acc") for seed in range(5)) / 5
    of_er = output.partition("permuted-mnist, er\n")[2]
    row = next(line for line in of_er.splitlines() if re.match(r"bn\* +ACC", line))
    assert f"{acc:.2f} +- " in row and " 81.75 " in row and f"{acc - 81.75:+.2f}" in row and "above (ours alone)" in row
    assert (
        "Of 20 numbers: " in output
        and "the paper has no standard deviation" in output
        and "Forgetting is fm." in output
    )
    assert "? permuted-mnist er bn FM: with this row's ACC and LA" in output
    assert "exact moments give ACC back to BN (acc)" in output


def test_table_in_recorded_precision(tmp_path: Path, console: Console) -> None:
    only = ["stream=split-cifar100", "strategy=er", "norm=bn", "norm=cn32"]
    run_recipe("table2", TableOptions(only=only, data_root=tmp_path, runs=RECORDS), console)
    output = printed(console)
    assert re.search(r"bn, lr 0\.03 +ACC +5 +64\.75 \+- 3\.44 +64\.97 \+- 1\.09 +-0\.22 +\S+ to \S+ +agrees", output)
    assert "\nPrecision: tf32 (the recipe has fp32).\n" in output and "Not run" not in output
    assert "Welch's, with the paper's standard deviation over 5 runs." in output
    assert "UNDECIDED, of what is run (exploratory: 0 to 5 seeds): CN has the best ACC of all norms (acc)" in output
    with pytest.raises(UserError, match="table2 needs cifar100"):
        run_recipe("table2", TableOptions(only=only, data_root=tmp_path, runs=RECORDS, precision="fp32"), console)


PLAIN = """
title = "a small network"
[scores]
acc = "acc"
[settings]
model = { name = "mlp", width = 8 }
[[runs]]
streams = ["split-mnist"]
strategies = ["single"]
norms = ["bn", "none"]
"""


def test_table_has_one_precision(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "own.toml").write_text(PLAIN)
    small_mnist(tmp_path, train=100, test=50)

    def paper_output(seeds: int, norms: list[str], precision: str | None = None) -> str:
        console = Console(file=io.StringIO(), width=200)
        only = [f"norm={norm}" for norm in norms]
        options = TableOptions(seeds, only, ALONE, precision=precision, data_root=tmp_path, runs=tmp_path / "runs")
        run_recipe(str(tmp_path / "own.toml"), options, console)
        return printed(console)

    def recorded_seeds() -> dict[tuple[str, str], list[int]]:
        seeds: dict[tuple[str, str], list[int]] = {}
        for record in Store(tmp_path / "runs"):
            seeds.setdefault((record.config.norm.name, record.config.train.precision), []).append(record.seed)
        return seeds

    assert "missing" not in paper_output(2, ["bn"], "tf32")
    output = paper_output(3, ["bn", "none"])
    assert recorded_seeds() == {("bn", "tf32"): [0, 1, 2], ("none", "tf32"): [0, 1, 2]}, "all as the recorded ones"
    assert "4 of 6 runs are missing. They use tf32" in caplog.text and "--precision" in caplog.text
    assert "Precision: tf32 (the recipe has fp32)." in output
    output = paper_output(2, ["bn"], "fp32")
    assert recorded_seeds()["bn", "fp32"] == [0, 1] and "Precision: fp32." in output
    assert "Left out, recorded in tf32: split-mnist single bn (2 seeds)" in output and "--precision tf32`" in output
    output = paper_output(3, ["bn", "none"])
    assert "missing" not in output and recorded_seeds()["bn", "fp32"] == [0, 1], "the table in tf32 is complete"
    assert re.search(r"split-mnist, single\nnorm .*\nbn +3 ", output) and "Precision: tf32" in output
    assert "Left out, recorded in fp32: split-mnist single bn (2 seeds)" in output


def test_other_data_has_no_verdict(tmp_path: Path, console: Console) -> None:
    """What a reader without MNIST is told to try, and gets."""
    only = ["strategy=single", "norm=bn"]
    with pytest.raises(UserError, match=r"other data with --set stream\.source=digits\. See `contnorm data"):
        run_recipe("table1", TableOptions(1, only, ALONE, data_root=tmp_path, runs=tmp_path / "runs"), console)
    other = ["stream.source=digits"]
    options = TableOptions(1, only, ALONE, max_steps=1, data_root=tmp_path, runs=tmp_path / "runs", settings=other)
    run_recipe("table1", options, console)
    output = printed(console)
    assert "Our runs use digits instead of the recipe's mnist, so the published numbers can't be compared" in output
    assert re.search(r"bn +ACC +1 +\d+\.\d\d +72\.81", output) and "verdict " not in output and "HOLD" not in output
    assert {record.config.stream.source for record in Store(tmp_path / "runs")} == {"digits"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("table2", TableOptions(), "table2 needs cifar100, which is not under .*: put cifar-100-python/train .* there"),
        ("table1", TableOptions(seeds=0), "--seeds 0: use 1 or more"),
        ("table1", TableOptions(only=["nrom=cn"]), "--only 'nrom=cn': unknown dimension 'nrom'. Did you mean 'norm'"),
        ("table1", TableOptions(only=["norm=sn"]), r"--only norm=sn: .* norm is one of bn, bn\*, cn, cn4, cn4\*"),
        ("figure1", TableOptions(), "has no runs"),
    ],
)
def test_mistake_is_a_one_line_error(name: str, options: TableOptions, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as error:
        run_table(name, replace(options, data_root=tmp_path, runs=tmp_path / "runs"))
    assert "\n" not in str(error.value)


def test_table_runs_with_some_data_missing(
    tmp_path: Path, console: Console, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
title = "two data sets"
[scores]
acc = "acc"
[[runs]]
streams = ["split-mnist", "split-fashion-mnist"]
strategies = ["single"]
norms = ["bn"]
[[published]]
dataset = "split-mnist"
strategy = "single"
norm = "bn"
values = { acc = [50.0, 1.0] }
"""
    monkeypatch.setattr("contnorm.paper.recipe.find_recipe", lambda name: parse_recipe(name, text, f"{name}.toml"))
    small_mnist(tmp_path, train=100, test=50)
    run_recipe("own", TableOptions(2, [], ALONE, data_root=tmp_path, runs=tmp_path / "runs"), console)
    assert re.search(r"\nsplit-mnist, single\nnorm .*\nbn +ACC +2 ", printed(console))
    assert "Not run\nsplit-fashion-mnist, single: bn\n" in printed(console)
    assert "50.00 +- 1.00" in printed(console)
    assert "own needs fashion-mnist, which is not under" in capsys.readouterr().err


def test_diverged_run_is_reported_and_not_repeated(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
title = "one that blows up"
[scores]
acc = "acc"
[[runs]]
streams = ["split-mnist"]
strategies = ["single"]
norms = ["bn", "none"]
[[selected]]
where = { norm = "none" }
settings = { train = { lr = 1e30 } }
"""
    monkeypatch.setattr("contnorm.paper.recipe.find_recipe", lambda name: parse_recipe(name, text, f"{name}.toml"))
    small_mnist(tmp_path, train=100, test=50)
    options, seen = TableOptions(2, [], ALONE, data_root=tmp_path, runs=tmp_path / "runs"), []
    for _ in range(2):
        run_recipe("own", options, console)
        output = printed(console)
        assert re.search(r"\nbn +2 ", output)
        assert re.search(r"split-mnist single none: both seeds diverged\. seed 0: the loss is .* seed 1: ", output)
        assert "Not run" not in output and re.search(r"\nnone, lr 1e\+30 +0 +diverged", output)
        seen.append({path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json")})
    assert len(Store(tmp_path / "runs").load_all().diverged) == 2
    assert len(seen[0]) == 4 and seen[0] == seen[1]


def test_list_counts_runs_and_names_data(tmp_path: Path, console: Console) -> None:
    small_mnist(tmp_path)
    show_recipes(5, tmp_path, RECORDS, console)
    rows = {line.split()[0]: line for line in printed(console).splitlines()}
    assert "20 of 20" in rows["table1"] and "mnist: mnist" in rows["table1"]
    assert " 5 of 5 " in rows["figure3"] and "cifar100: not found" in rows["table2"]
    made = re.search(r" (\d+) of 235 in tf32, 1 diverged ", rows["table2"])
    assert made and int(made[1]) == 164, "one rate for all, each norm with its own; a seed of BRN's was lost"
    assert (
        "0 of 20" in rows["table5"] and "cocoseq: not found" in rows["table5"] and "nothing to run" in rows["figure1"]
    )


def test_stages_of_an_archive_are_shown(tmp_path: Path, console: Console) -> None:
    """An archive of fresh seeds has all that a table needs, nothing is run, and all recorded seeds count."""
    archive = RECORDS / "split-cifar100-fresh-seeds.jsonl.gz"
    only = ["stream=split-cifar100", "norm=bn", "norm=gn"]
    options = TableOptions(only=only, data_root=tmp_path, runs=archive, until_decided=True, max_seeds=16)
    run_recipe("table2", options, console)
    output = printed(console)
    assert re.search(
        r"HOLDS, of what is run \(staged: [^)]+\): BN learns new tasks better than GN \(LA\) \(la\)", output
    )
    case = re.search(r"split-cifar100 er bn against gn32 +\+.* (\d+) +holds \(higher\)", output)
    assert case is not None and int(case[1]) > 16
    assert output.count("The claims are decided by all recorded cells, also those that --only leaves out.\n") == 1


def test_list_needs_no_data_folder(
    tmp_path: Path, contnorm: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CONTNORM_DATA", raising=False)
    code, output, _ = contnorm("paper", "table1", "--list")
    assert code == 0 and "0 of 20" in output and "mnist: not found" in output
    code, _, errors = contnorm("paper", "table1", "--list", "--data-root", "elsewhere")
    assert code == 2 and "elsewhere: does not exist" in errors


def test_recipe_with_user_data_set(tmp_path: Path, console: Console) -> None:
    rows = ["image,split,task,labels"]
    for number in range(24):
        picture(tmp_path / "pictures" / f"{number}.jpg", 16, 7 * number)
        rows.append(f"{number}.jpg,{'test' if number % 4 == 3 else 'train'},0,{'wren' if number % 2 else 'owl;wren'}")
    (tmp_path / "birds.csv").write_text("\n".join(rows))
    build(list_csv("birds", tmp_path / "birds.csv", tmp_path / "pictures"), tmp_path / "birds", 16)
    recipe = """
    title = "Birds"
    [scores]
    map = "map"
    [[runs]]
    streams = ["multi-label"]
    strategies = ["prs"]
    norms = ["bn"]
    buffers = [10]
    views = ["overall"]
    published = false
    settings = { stream = { source = "birds" }, model = { name = "mlp", width = 8 } }
    """
    (tmp_path / "birds.toml").write_text(recipe)
    options = TableOptions(seeds=1, execution=ALONE, data_root=tmp_path, runs=tmp_path / "runs")
    run_recipe(str(tmp_path / "birds.toml"), options, console)
    (record,) = Store(tmp_path / "runs")
    assert f"{record.score('map'):.2f}" in printed(console)
    (tmp_path / "birds.toml").write_text(recipe.replace('stream = { source = "birds" }, ', ""))
    with pytest.raises(UserError, match=r"stream multi-label: no data set.* settings = \{ stream = \{ source"):
        run_recipe(str(tmp_path / "birds.toml"), options, console)
