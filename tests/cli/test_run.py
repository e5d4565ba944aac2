"""`contnorm run`, also of several settings, `tune` of a stream, and `resume`: output, files, signals, exit codes."""

import json
import logging
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from contnorm import bench
from contnorm.bench.api import run as running
from contnorm.bench.engine.execute import execute
from contnorm.bench.engine.run import Event
from contnorm.bench.records import Store
from contnorm.bench.unfinished import unfinished_runs
from contnorm.cli.main import app
from contnorm.errors import UserError
from tests.datasets import small_cifar100, small_mnist

SMALL = ["--set", "model.width=8", "--set", "norm.groups=4"]


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


def test_one_setting_is_a_run(mnist: list[str], tmp_path: Path) -> None:
    code, out = call("run", *mnist, "--norm", "bn", "--seeds", "2", "--keep-weights")
    assert code == 0 and out.count("recorded in runs/") == 2 and len(list(tmp_path.rglob("*.safetensors"))) == 2
    code, out = call("run", *mnist, "--norm", "bn", "--seed", "1")
    assert code == 0 and "not run again; its record is" in out and "Rule" not in out


def test_several_settings_are_a_sweep(mnist: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "contnorm"):
        code, out = call(
            "run", *mnist, "--norm", "bn,cn", "--lr", "0.01,0.1", "--set", "train.passes=1,2", "--seeds", "2",
            "--plot", "figure.svg",
        )  # fmt: skip
    assert code == 0 and "test samples" in caplog.text and "--validation" in caplog.text
    records = list(Store(tmp_path / "runs"))
    assert len(records) == 2 * 2 * 2 * 2
    means: dict[tuple[str, float, int], float] = {}
    for record in records:
        key = (record.config.norm.name, record.config.train.lr, record.config.train.passes)
        means[key] = means.get(key, 0.0) + record.score("acc") / 2
    rows = re.findall(r"^(bn|cn) +([\d.]+) +(\d) +([\d.]+) \+- [\d.]+( \*)? +2 *(?:4 *)?$", out, re.MULTILINE)
    assert {(norm, float(lr), int(passes)): float(mean) for norm, lr, passes, mean, _ in rows} == {
        key: pytest.approx(mean, abs=0.0051) for key, mean in means.items()
    }
    for norm in ("bn", "cn"):
        (starred,) = [row for row in rows if row[0] == norm and row[4]]
        assert float(starred[3]) == pytest.approx(max(v for k, v in means.items() if k[0] == norm), abs=0.0051)
    assert "\nRule: highest mean acc on the test samples over 2 seeds" in out
    assert (tmp_path / "figure.svg").read_text().startswith("<?xml") and "figure: figure.svg" in out


def test_json_is_the_only_output_and_equals_the_records(mnist: list[str], tmp_path: Path) -> None:
    arguments = ["run", *mnist, "--norm", "bn", "--lr", "0.01,0.1", "--seeds", "1", "--json"]
    code, out = call(*arguments)
    values = json.loads(out)
    assert code == 0 and values["chosen_on"] == "test samples" and "test samples" in values["warning"]
    records = {record.config.hash: record for record in Store(tmp_path / "runs")}
    assert {row["hash"]: row["mean"] for row in values["settings"]} == {
        name: pytest.approx(record.score("acc")) for name, record in records.items()
    }
    assert call(*arguments)[1] == out


def test_stopped_sweep_shows_what_is_done_and_the_same_command_continues(
    mnist: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["run", *mnist, "--norm", "bn,cn", "--lr", "0.01,0.1", "--seeds", "1"]

    def stopped_in_the_third(*given: Any) -> Iterator[Event]:
        finished = 0
        for event in execute(*given):
            yield event
            finished += event.kind == "finished"
            if finished == 2 and event.kind == "steps":
                signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(running, "execute", stopped_in_the_third)
        code, out = call(*arguments)
    assert code == 130 and "cn: nothing is chosen yet; unfinished runs: 2." in out
    assert len(re.findall(r"0 of 1, 1 unfinished", out)) == 2 and "Run it again to continue." in out
    code, out = call(*arguments)
    assert code == 0 and out.count("not run again") == 2 and "unfinished" not in out


def test_tune_of_a_stream_extends_and_refines_on_validation_tasks(cifar: list[str], tmp_path: Path) -> None:
    code, out = call("tune", *cifar, "--norm", "bn,none", "--lr", "0.001,0.01", "--seeds", "1", "--json")
    values = json.loads(out)
    assert code == 0 and values["warning"] is None and "validation tasks" in values["chosen_on"]
    assert {record.config.stream.part for record in Store(tmp_path / "runs")} == {"validate"}
    tuned = bench.tune(
        bench.load_stream("split-cifar100", cifar[3], allow_missing=True),
        norm=["bn", "none"],
        lr=[0.001, 0.01],
        settings={"model.name": "mlp", "model.width": 8, "norm.groups": 4, "strategy.name": "er"},
        seeds=1,
    )
    assert [(row["norm"], row["lr"], row["mean"]) for row in values["settings"]] == [
        (trial.setting["norm"], trial.setting["lr"], pytest.approx(trial.mean)) for trial in tuned.trials
    ]


def test_chosen_setting_is_shown_as_options(cifar: list[str], tmp_path: Path) -> None:
    options = ["--norm", "bn", "--lr", "0.01,0.1", "--seeds", "1", "--validation", "--runs", "my runs"]
    code, out = call("run", *cifar, *options)
    assert code == 0
    (best,) = re.findall(r"^    (--norm .*)$", out, re.MULTILINE)
    chosen = re.search(r"^bn +([\d.]+) +\S+ \*", out, re.MULTILINE)
    assert chosen and best == f"--norm bn --lr {chosen[1]}"
    assert call("run", *cifar, *shlex.split(best), "--seeds", "1", "--runs", "my runs")[0] == 0
    assert not (tmp_path / "runs").exists()


def test_failed_seeds_are_reported_and_others_shown(mnist: list[str], tmp_path: Path) -> None:
    for options in (["--lr", "0.1"], ["--lr", "1e30"]):
        typed = ["run", *mnist, "--norm", "none", "--seeds", "2", *options]
        done = CliRunner().invoke(app, typed)
    assert isinstance(done.exception, UserError) and str(done.exception).count("the loss is") == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_stops_and_saves_and_resume_finishes(
    mnist: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    def stopped(*given: Any) -> Iterator[Event]:
        for event in execute(*given):
            yield event
            if event.kind == "steps":
                signal.raise_signal(number)

    with monkeypatch.context() as patched:
        patched.setattr(running, "execute", stopped)
        found, out = call("run", *mnist, "--norm", "bn", "--seeds", "2")
    assert found == code and "stopped after 6 of 12 steps. Run it again to continue." in out
    assert "2 of 2 runs unfinished" in out and len(unfinished_runs(Path("runs"))) == 1
    found, out = call("resume", "--data-root", mnist[3])
    assert found == 0 and len(list(Store(tmp_path / "runs"))) == 1 and not unfinished_runs(Path("runs"))


def test_incomplete_data_is_refused_or_recorded_and_resume_remembers_it(
    mnist: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CONTNORM_ALLOW_MISSING")
    typed = ["run", *mnist, "--norm", "bn"]
    done = CliRunner().invoke(app, [one for one in typed if one != "--allow-missing"])
    assert isinstance(done.exception, UserError) and "images are missing" in str(done.exception)
    assert not (tmp_path / "runs").exists(), "nothing is left of a run that was refused"
    assert call(*typed)[0] == 0
    (record,) = Store(tmp_path / "runs")
    assert record.raw["source"]["missing_images"] > 0
