"""The commands `sweep`, and `tune` without a recipe: output, files, exit codes and mistakes."""

from __future__ import annotations

import json
import logging
import re
import shlex
import signal
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from contnorm import bench
from contnorm.bench.engine import runner
from contnorm.bench.records import Store
from contnorm.cli.main import app, main
from contnorm.errors import UserError
from contnorm.paper.lr_search import TuneOptions
from tests.datasets import small_cifar100, small_mnist

SMALL = ["--lanes", "1", "--set", "model.width=8", "--set", "norm.groups=4"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    small_mnist(folder)
    return small_cifar100(folder, per_class=10)


@pytest.fixture
def mnist(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a small stream that has no validation tasks."""
    monkeypatch.chdir(tmp_path)
    options = ["--stream", "split-mnist", "--data-root", str(root), "--allow-missing", "--set", "stream.tasks=2"]
    return [*options, "--set", "stream.train_per_task=60", *SMALL]


@pytest.fixture
def cifar(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a small stream that has validation tasks."""
    monkeypatch.chdir(tmp_path)
    options = ["--stream", "split-cifar100", "--data-root", str(root), "--allow-missing", "--set", "model.name=mlp"]
    return [*options, *SMALL]


def call(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return done.exit_code, done.stdout


def test_sweep_shows_all_settings_then_the_best_of_each_norm(
    mnist: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "contnorm"):
        code, out = call(
            "sweep", *mnist, "--norm", "bn,cn", "--lr", "0.01,0.1", "--grid", "train.passes=1,2", "--seeds", "2",
            "--plot", "figure.svg",
        )  # fmt: skip
    assert code == 0 and "test samples" in caplog.text and "--validation" in caplog.text
    records = list(Store(tmp_path / "runs"))
    assert len(records) == 2 * 2 * 2 * 2
    means: dict[tuple[str, float, int], float] = {}
    for record in records:
        key = (record.config.norm.name, record.config.train.lr, record.config.train.passes)
        means[key] = means.get(key, 0.0) + record.score("acc") / 2
    rows = re.findall(r"^(bn|cn) +([\d.]+) +(\d) +([\d.]+) \+- [\d.]+( \*)? +2 *$", out, re.MULTILINE)
    assert {(norm, float(lr), int(passes)): float(mean) for norm, lr, passes, mean, _ in rows} == {
        key: pytest.approx(mean, abs=0.0051) for key, mean in means.items()
    }
    for norm in ("bn", "cn"):
        (starred,) = [row for row in rows if row[0] == norm and row[4]]
        assert float(starred[3]) == pytest.approx(max(v for k, v in means.items() if k[0] == norm), abs=0.0051)
        last = re.search(rf"^{norm} +{starred[1]} +{starred[2]} +{starred[3]} \+- \S+ +4 +8 *$", out, re.MULTILINE)
        assert last, "the best setting, with the settings tried and the runs"
    assert out.startswith("Rule: highest acc on the test samples, mean over 2 seeds")
    assert (tmp_path / "figure.svg").read_text().startswith("<?xml") and "figure: figure.svg" in out


def test_json_is_the_only_output_and_equals_the_records(mnist: list[str], tmp_path: Path) -> None:
    arguments = ["sweep", *mnist, "--norm", "bn", "--lr", "0.01,0.1", "--seeds", "1", "--json"]
    code, out = call(*arguments)
    values = json.loads(out)
    assert code == 0 and values["chosen_on"] == "test samples" and "test samples" in values["warning"]
    records = {record.config.hash: record for record in Store(tmp_path / "runs")}
    assert {row["hash"]: row["scores"]["0"] for row in values["settings"]} == {
        name: record.score("acc") for name, record in records.items()
    }
    assert values["best"][0]["mean"] == max(record.score("acc") for record in records.values())
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json")}
    assert call(*arguments)[1] == out
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json")}


def test_settings_file_is_for_all_runs_and_options_override_it(mnist: list[str], tmp_path: Path) -> None:
    (tmp_path / "all.toml").write_text('norm = { name = "gn" }\n[train]\nlr = 0.01\nbatch = 20\n')
    code, _ = call("sweep", *mnist, "--config", "all.toml", "--seeds", "1", "--lr", "0.03,0.1", "--json")
    assert code == 0
    configs = [record.config for record in Store(tmp_path / "runs")]
    assert sorted((c.norm.name, c.train.lr, c.train.batch) for c in configs) == [("gn", 0.03, 20), ("gn", 0.1, 20)]


def test_stop_shows_what_is_done_and_the_same_command_continues(
    mnist: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["sweep", *mnist, "--norm", "bn,cn", "--lr", "0.01,0.1", "--seeds", "1"]
    real, calls = runner.train_together, []

    def stop_in_the_third(trainers, *args, **more):  # type: ignore[no-untyped-def]
        calls.append(trainers)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return real(trainers, *args, **more)

    monkeypatch.setattr(runner, "train_together", stop_in_the_third)
    code, out = call(*arguments)
    assert code == 130 and "cn: 2 runs are missing, so nothing is chosen yet." in out
    assert len(re.findall(r"0 of 1, 1 unfinished", out)) == 2 and "Run it again to continue." in out
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    code, out = call(*arguments)
    assert code == 0 and out.count("(recorded before)") == 2 and "unfinished" not in out


def test_diverged_settings_are_shown_and_not_chosen(mnist: list[str]) -> None:
    code, out = call("sweep", *mnist, "--norm", "none", "--lr", "0.01,1e30", "--seeds", "2")
    assert code == 0 and re.search(r"none +1e\+30 +- +0 of 2, 2 diverged", out)
    assert "Such a setting is not chosen" in out and re.search(r"none +0\.01 +\S+ \+- \S+ \*", out)


def test_tune_of_a_stream_extends_and_refines_on_validation_tasks(cifar: list[str], tmp_path: Path) -> None:
    code, out = call("tune", *cifar, "--norm", "bn,none", "--lr", "0.001,0.01", "--seeds", "1", "--json")
    values = json.loads(out)
    assert code == 0 and values["warning"] is None and "validation tasks" in values["chosen_on"]
    assert {record.config.stream.part for record in Store(tmp_path / "runs")} == {"validate"}
    tuned = bench.tune(
        bench.load_stream("split-cifar100", cifar[3], allow_missing=True),
        norm=["bn", "none"],
        lr=[0.001, 0.01],
        settings={"model.name": "mlp", "model.width": 8, "norm.groups": 4},
        seeds=1,
        lanes=1,
    )
    assert [(row["norm"], row["lr"], row["mean"]) for row in values["settings"]] == [
        (trial.setting["norm"], trial.setting["lr"], trial.mean) for trial in tuned.trials
    ]
    assert [best["settings_tried"] for best in values["best"]] == [len(group) for group in tuned.groups.values()]
    code, out = call("tune", *cifar, "--norm", "bn", "--lr", "0.001,0.01", "--seeds", "1", "--extend", "0",
                     "--refine", "none")  # fmt: skip
    assert code == 0 and len(re.findall(r"^bn ", out[out.index("\n\n") : out.index("best setting")], re.M)) == 2


def test_command_for_the_test_samples_runs_the_chosen_setting(cifar: list[str], tmp_path: Path) -> None:
    code, out = call(
        "sweep", *cifar, "--norm", "bn", "--lr", "0.01,0.1", "--grid", "train.passes=1", "--seeds", "1", "--validation"
    )
    assert code == 0
    (command,) = re.findall(r"^contnorm (run .*)$", out, re.MULTILINE)
    chosen = re.search(r"^bn +([\d.]+) +\S+ \*", out, re.MULTILINE)
    assert chosen
    assert call(*shlex.split(command), "--allow-missing", "--lanes", "1", "--runs", "final")[0] == 0
    (record,) = Store(tmp_path / "final")
    assert record.config.stream.part == "learn" and record.config.train.lr == float(chosen[1])
    assert record.config.model.width == 8 and record.config.norm.name == "bn"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep", "--lr", "0.1,,0.2"], "--lr '0.1,,0.2': has an empty value"),
        (["sweep", "--lr", ""], "--lr '': has an empty value"),
        (["sweep", "--grid", "train.batch"], "--grid 'train.batch': expected key=a,b,c"),
        (["sweep", "--grid", "train.bach=1,2"], "unknown key 'train.bach'. Did you mean 'train.batch'"),
        (["sweep", "--grid", "stream.tasks=1,2"], "stream.tasks=[1, 2]: a list here would compare scores"),
        (["sweep", "--lr", "0.1,0.2", "--grid", "train.lr=0.1,0.3"], "contradict each other. Give train.lr once"),
        (["sweep", "--norm", "bn,cm"], "unknown norm 'cm'"),
        (["sweep", "--plot", "figure.txt"], "--plot figure.txt: use a file name that ends in .png"),
        (["sweep", "--seeds", "0"], "--seeds 0: use 1 or more"),
        (["sweep", "--by", "strategy"], "unknown setting in by: 'strategy'"),
        (["tune", "--lr", "0.1"], "over='lr': give at least two values of lr"),
        (["tune", "--lr", "-1,0.1"], "lr=-1,0.1: use numbers above 0"),
        (["tune", "--refine", "twice"], "unknown --refine 'twice'"),
        (["tune", "--extend", "-1"], "extensions=-1"),
        (["tune", "--out", "a.toml"], "--out needs a recipe"),
    ],
)
def test_mistake_is_one_line_and_writes_nothing(
    arguments: list[str],
    message: str,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    stream = ["--stream", "split-cifar100", "--data-root", str(root)]
    monkeypatch.setattr("sys.argv", ["contnorm", arguments[0], *stream, *arguments[1:]])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert ended.value.code == 2 and message in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune"], "give a recipe, such as table2, or --stream"),
        (["tune", "table2", "--grid", "train.batch=5,10"], "--grid can't be used with the recipe table2"),
    ],
)
def test_tune_needs_a_recipe_or_a_stream(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["contnorm", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err


def test_code_is_executed_only_if_it_is_named(
    mnist: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "from contnorm import bench\nclass Mine(bench.ER):\n    pass\n"
    (tmp_path / "mine.py").write_text(code)
    done, _ = call("sweep", *mnist, "--norm", "bn", "--strategy", "er,mine.py:Mine", "--seeds", "1")
    assert done == 0
    (tmp_path / "all.toml").write_text('strategy = { name = "mine.py:Mine" }')
    monkeypatch.setattr("sys.argv", ["contnorm", "sweep", *mnist, "--norm", "bn,gn", "--config", "all.toml"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "not executed because a file names it" in capsys.readouterr().err


def test_recipes_keep_their_fixed_grid_by_default() -> None:
    assert TuneOptions().extensions == 0 and TuneOptions().refine is None


@pytest.mark.parametrize("command", [("sweep", "--norm", "bn,cn"), ("tune", "--norm", "bn", "--lr", "0.01,0.1")])
def test_runs_of_a_sweep_are_logged(cifar: list[str], tmp_path: Path, command: tuple[str, ...]) -> None:
    name, *options = command
    code, _ = call(name, *cifar, *options, "--seeds", "1", "--max-steps", "5", "--log", "csv", "--log-dir", "logs")
    runs = {(path.parent.name, path.stem) for path in (tmp_path / "runs").glob("*/*.json")}
    logged = {(path.parent.name, path.stem) for path in (tmp_path / "logs").rglob("*.csv")}
    assert code == 0 and len(runs) >= 2 and logged == runs


def test_printed_command_has_the_options_of_the_sweep(mnist: list[str], tmp_path: Path) -> None:
    (tmp_path / "held.toml").write_text("[stream]\nholdout = 0.3\n")
    options = ["--norm", "bn", "--lr", "0.01,0.1", "--seeds", "1", "--runs", "my runs", "--config", "held.toml"]
    mnist = [text.replace("per_task=60", "per_task=30") for text in mnist]
    code, out = call("sweep", *mnist, *options, "--threads", "2", "--validation")
    (line,) = [line for line in out.splitlines() if line.startswith("contnorm run ")]
    command = shlex.split(line)[1:]
    assert code == 0 and command[command.index("--threads") + 1] == "2"
    assert call(*command, "--lanes", "1")[0] == 0
    assert sorted({str(record.config.stream.holdout) for record in Store(tmp_path / "my runs")}) == ["0.3", "None"]
    assert not (tmp_path / "runs").exists()


def test_huge_grid_is_rejected_before_it_is_expanded(mnist: list[str], tmp_path: Path) -> None:
    numbers = ",".join(map(str, range(1, 2000)))
    done = CliRunner().invoke(app, ["sweep", *mnist, "--batch", numbers, "--replay", numbers, "--buffer", numbers])
    assert isinstance(done.exception, UserError) and "7,988,005,999 combinations" in str(done.exception)
    assert not (tmp_path / "runs").exists()


def test_sweep_on_data_of_the_user_shows_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng, y = np.random.default_rng(0), np.arange(40) % 4
    np.savez("blobs.npz", x_train=rng.normal(size=(40, 5)), y_train=y, x_test=rng.normal(size=(40, 5)), y_test=y)
    bench.add_dataset("blobs", root="data", npz="blobs.npz", tasks=2)
    code, out = call("sweep", "--stream", "blobs", "--norm", "bn", "--lr", "0.01,0.1", "--seeds", "1", "--lanes", "1")
    assert code == 0 and "\nblobs: acc on the test samples" in out
    code, out = call("run", "--stream", "blobs", "--norm", "cn", "--set", "norm.groups=4", "--lanes", "1")
    assert code == 0 and "blobs er cn seed 0: recorded" in out
