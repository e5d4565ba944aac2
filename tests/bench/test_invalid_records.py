"""One invalid record among others: every command reports it, and shows the others."""

from __future__ import annotations

import copy
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from contnorm.bench.config.defaults import complete
from contnorm.bench.config.schema import from_dict
from contnorm.bench.records import Store, seal_of
from contnorm.cli.main import main
from contnorm.errors import UserError
from contnorm.paper.cells import cells_of, source_of
from contnorm.paper.measured import numerics_of
from contnorm.paper.recipe import find_recipe
from contnorm.paper.recipe_runs import RecipeRecords
from tests.committed_records import COCOSEQ, contents_of, copy_run
from tests.report.record_samples import make_records

BN, CN = "ba9df79f047e", "85d5f7c04f8c"
WITH_DRIFT = "7ab8938428eb"
LABELS = "068799b86d97"
Raw = dict[str, Any]


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def put(*keys: Any, value: Any) -> Callable[[Raw], None]:
    def change(raw: Raw) -> None:
        inner: Any = raw
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value

    return change


# A change of a record whose identity and seal are made anew, so that nothing but its content is odd.
ODD: dict[str, Callable[[Raw], None]] = {
    "lr of 400 digits": put("config", "train", "lr", value=10**400),
    "lr is a text": put("config", "train", "lr", value="fast"),
    "lr is infinite": put("config", "train", "lr", value=float("inf")),
    "unknown setting": put("config", "train", "speed", value=3),
    "config is a list": put("config", value=[]),
    "deep config": put("config", "train", value=nested(200)),
    "seed is infinite": put("seed", value=float("inf")),
    "seed is negative": put("seed", value=-1),
    "seed is true": put("seed", value=True),
    "seed of 400 digits": put("seed", value=10**400),
    "drift is a list": put("drift", value=[1]),
    "drift by task is a number": put("drift", "by_task", value=3),
    "a drift is a text": put("drift", "by_task", value=[{"norm1": {"mean": "far", "var": 1.0}}]),
    "a drift lacks its variance": put("drift", "by_task", value=[{"norm1": {"mean": 1.0}}]),
    "drifts of other layers": put(
        "drift", "by_task", value=[{"a": {"mean": 1, "var": 1}}, {"b": {"mean": 1, "var": 1}}]
    ),
    "deep matrix": put("matrix", value=nested(900)),
    "no counts": put("matrix", "correct", value=None),
    "a count is a float": put("matrix", "total", 0, value=1000.0),
    "a count is huge": put("matrix", "total", 0, value=10**400),
    "a count is true": put("matrix", "correct", 0, 0, value=True),
    "a row is a text": put("matrix", "correct", 0, value="0" * 20),
    "a measurement is missing": put("matrix", "correct", -1, 0, value=None),
    "before is a number": put("matrix", "before", value=3),
    "seconds are a list": put("seconds", value=[]),
    "seconds are a text": put("seconds", "train", value="1 s"),
    "seconds by task": put("seconds", "train_by_task", value=[None]),
    "task ends are a number": put("task_ends", value=3),
    "a task ends at a fraction": put("task_ends", value=[1.5]),
    "a task ends before the last": put("task_ends", value=[5, 3]),
    "versions are a text": put("versions", value="1.0"),
    "a version is a list": put("versions", "torch", value=[2, 11]),
    "a device is a list": put("device", value=["cuda"]),
    "a device's name is a number": put("device", "name", value=3),
    "a fingerprint is a list": put("source", "fingerprint", value=["a"]),
    "a source without a name": put("source", value={"images": 3, "published_images": 4}),
    "a commit is a number": put("commit", value=3),
    "a commit is a book": put("commit", value="x" * 10**6),
    "parameters are a text": put("parameters", value="many"),
    "renorm is a number": put("renorm", value=0.5),
}


def written(root: Path, raw: Raw, sealed: bool) -> Path:
    """A record in the folder and under the name that it asks for, or under those it had."""
    with suppress(UserError, ArithmeticError, AttributeError, RecursionError):
        raw["hash"] = from_dict(raw["config"]).hash
    seed = raw["seed"] if type(raw["seed"]) is int and 0 <= raw["seed"] < 10**18 else 99
    path = root / raw["hash"] / f"{seed}.json"
    path.parent.mkdir(exist_ok=True)
    raw = {**raw, "schema": 2} if sealed else raw
    path.write_text(json.dumps({**raw, "seal": seal_of(raw)} if sealed else raw))
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good") / "runs"
    for name in (BN, CN):
        copy_run(name, root, seeds=(0, 1))
    return root


Called = tuple[int, str, str]


@pytest.fixture
def contnorm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Called]:
    def call(*arguments: object) -> Called:
        monkeypatch.setattr(sys, "argv", ["contnorm", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


@pytest.mark.parametrize("name", ODD)
def test_invalid_record_is_reported_once_and_others_are_read(name: str, good: Path, tmp_path: Path) -> None:
    root = shutil.copytree(good, tmp_path / "runs")
    raw = contents_of(BN)[2]
    ODD[name](raw)
    path = written(root, raw, sealed=True)
    loaded = Store(root).load_all()
    assert [(record.config.hash, record.seed) for record in loaded.records] == [(CN, 0), (CN, 1), (BN, 0), (BN, 1)]
    (message,) = loaded.problems
    assert message.startswith(f"{path}: is not a valid record (") and message.isprintable() and len(message) < 600


def commands(root: Path, out: Path, odd: str) -> Iterator[tuple[object, ...]]:
    yield "show", "--runs", root
    yield "show", "--by-task", "--runs", root
    yield "compare", odd, CN, "--runs", root
    yield "report", "--runs", root, "--table", "table1", "-o", out / "page.html"
    for form in ("md", "latex", "csv"):
        yield "report", "--runs", root, "--table", "table1", "--format", form


@pytest.mark.parametrize("name", ["drift is a list", "seed is infinite"])
def test_commands_continue_after_an_invalid_record(
    name: str, good: Path, tmp_path: Path, contnorm: Callable[..., Called]
) -> None:
    root = shutil.copytree(good, tmp_path / "runs")
    raw = contents_of(BN)[2]
    ODD[name](raw)
    path = written(root, raw, sealed=False)
    (root / CN / "7.json").write_text("[" * 100_000)
    for arguments in commands(root, tmp_path, path.parent.name):
        code, out, err = contnorm(*arguments)
        assert code == 0, (arguments, err)
        assert out
        assert sorted(line.split(": ")[1] for line in err.splitlines()) == sorted(
            [str(path), str(root / CN / "7.json")]
        )


def test_unknown_names_are_shown_and_reported(good: Path, tmp_path: Path, contnorm: Callable[..., Called]) -> None:
    root = shutil.copytree(good, tmp_path / "runs")
    raw = contents_of(BN)[2]
    raw["config"]["norm"]["name"], raw["config"]["stream"]["name"] = "xn", "split-x"
    run = written(root, raw, sealed=True).parent.name
    for arguments in commands(root, tmp_path, run):
        code, out, err = contnorm(*arguments)
        assert code == 0 and out and [line.split(": ")[1] for line in err.splitlines()] == [run] * 2, arguments
    assert "split-x" in (tmp_path / "page.html").read_text()


def test_paper_table_leaves_out_an_invalid_record(tmp_path: Path) -> None:
    recipe = find_recipe("table1")
    make_records(recipe, tmp_path, seeds=3)
    configs = {cell: complete(cell.values, source_of(cell)) for cell in cells_of(recipe)}
    first = next(iter(configs.values()))
    broken = Store(tmp_path).path(first, 1)
    broken.write_text(broken.read_text().replace("c0ffee", "other"))
    records = RecipeRecords(Store(tmp_path), range(3))
    measured = records.measured(configs, numerics_of(first))
    assert len(measured) == len(configs)
    assert {tuple(one.records) for one in measured} == {(0, 2), (0, 1, 2)}
    assert len(records.problems) == 1 and records.problems[0].startswith(str(broken))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


VALUES = (
    None, True, -1, 0, 2, 10**20, 10**400, 1.5, 1e308, float("inf"), float("nan"), "", "x", "1 2", [], [[]], [None], {},
    {"by_task": [{}]}, nested(60), "\x1b[31m\n<b>", "0" * 5000,
)  # fmt: skip


def mutated(raw: Raw, chance: random.Random) -> Raw:
    """One to three values of a record replaced or removed, anywhere in it."""
    raw = copy.deepcopy(raw)
    for _ in range(chance.choice((1, 1, 2, 3))):
        top = chance.choice([key for key in raw if key != "hash"])
        *keys, last = chance.choice([(top, *path) for path in list(places(raw[top]))[:60]])
        inner = raw
        for key in keys:
            inner = inner[key]
        if chance.random() < 0.8 or (not keys and last in ("schema", "config", "seed")):
            inner[last] = copy.deepcopy(chance.choice(VALUES))
        else:
            del inner[last]
    return raw


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_changes_of_records_break_no_command(
    seed: int, good: Path, tmp_path: Path, contnorm: Callable[..., Called]
) -> None:
    chance = random.Random(seed)
    root = shutil.copytree(good, tmp_path / "runs")
    for contents in (contents_of(BN), contents_of(WITH_DRIFT), contents_of(LABELS, COCOSEQ)):
        for number in (2, 3, 4):
            raw = mutated(contents[number], chance)
            raw["schema"] = raw["schema"] if type(raw["schema"]) is int and raw["schema"] == 1 else 2
            written(root, raw, sealed=raw["schema"] == 2 or chance.random() < 0.5)
    for arguments in commands(root, tmp_path, BN):
        code, out, err = contnorm(*arguments)
        assert code == 0 and out, (arguments, err)
        assert all(line.startswith("contnorm: ") for line in err.splitlines())
