"""Launchers: their table, units of work, and the options of commands and of the API."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from contnorm.bench.engine.events import Finished
from contnorm.bench.engine.job_events import Event
from contnorm.bench.engine.scheduler import Job, RunEnvironment, execute, resolve
from contnorm.bench.engine.units import Unit, plan_units
from contnorm.bench.launchers.local import LocalLauncher
from contnorm.bench.launchers.registry import create_launcher

from contnorm import bench
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.cost import CostModel
from contnorm.bench.launchers import registry
from contnorm.cli.main import load_command
from contnorm.errors import UserError

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "many-machines.md"
STREAM = {"name": "split-mnist", "source": "digits", "tasks": 2, "train_per_task": 40, "test_per_task": 20}


def settings(**groups: Any) -> RunConfig:
    return resolve({"stream": STREAM, "norm": {"name": "bn"}, "strategy": {"name": "er"}, **groups}, Path("data"))


class Recorder(bench.Launcher):
    """Executes units in this process, and notes them."""

    def __init__(self, least: int = 0) -> None:
        self.least = least
        self.units: list[Unit] = []

    def launch(self, work: Any, units: Sequence[Unit], stop: Callable[[], bool]) -> Iterator[Event]:
        self.units += units
        for unit in units:
            yield from work(unit, stop)


def test_launcher_gets_the_missing_runs_longest_first(tmp_path: Path) -> None:
    short, long = settings(), settings(stream={**STREAM, "train_per_task": 80})
    jobs = [Job(short, 0), Job(long, 0), Job(short, 1)]
    launcher = Recorder()
    environment = RunEnvironment(tmp_path, Path("data"), torch.device("cpu"), launcher=launcher)
    list(execute(jobs[:1], environment))
    launcher.units.clear()
    events = list(execute(jobs, environment))
    assert [unit.jobs for unit in launcher.units] == [(Job(long, 0),), (Job(short, 1),)]
    assert events[0].what == "recorded"
    assert [event.job for event in events if isinstance(event.what, Finished)] == [Job(long, 0), Job(short, 1)]


class Costs(CostModel):
    """Runs with batches of 5 take three seconds, others one."""

    def __init__(self) -> None:
        super().__init__([], "cuda")

    def group_seconds(self, configs: Sequence[RunConfig]) -> float:
        return sum(3.0 if config.train.batch == 5 else 1.0 for config in configs)


def test_units_of_a_gpu_are_groups_of_lanes() -> None:
    configs = [settings(norm={"name": norm}, train={"lr": lr}) for norm in ("bn", "cn") for lr in (0.01, 0.1)]
    other = settings(train={"batch": 5})  # batches of another shape
    jobs = [Job(config, seed) for config in (*configs, other) for seed in range(2)]
    environment = RunEnvironment(None, Path("data"), torch.device("cuda"), lanes=4)
    units = plan_units(jobs, environment, costs=Costs())
    assert [(len(unit.jobs), unit.seconds) for unit in units] == [(2, 6.0), (4, 4.0), (4, 4.0)]
    assert units[0].jobs == (Job(other, 0), Job(other, 1))
    assert {job for unit in units for job in unit.jobs} == set(jobs)
    on_cpu = RunEnvironment(None, Path(), torch.device("cpu"))
    assert all(len(unit.jobs) == 1 for unit in plan_units(jobs, on_cpu, costs=Costs()))


def test_device_of_another_machine_is_not_needed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    class Elsewhere(bench.Launcher):
        def launch(self, work: Any, units: Sequence[Unit], stop: Callable[[], bool]) -> Iterator[Event]:
            assert work.environment.device.type == "cuda" and len(units[0].jobs) == 3
            raise UserError("launched")
            yield

    stream = bench.load_stream(**STREAM)
    with pytest.raises(UserError, match="launched"):
        bench.run(stream, seeds=3, device="cuda", launcher=Elsewhere())
    with pytest.raises(UserError, match="torch sees no GPU here"):
        bench.run(stream, device="cuda")


def test_invalid_settings_fail_before_anything_is_launched(tmp_path: Path) -> None:
    launcher = Recorder()
    with pytest.raises(UserError, match="does not divide"):
        bench.run(bench.load_stream(**STREAM), norm="cn", settings={"norm.groups": 7}, runs=tmp_path, launcher=launcher)
    assert launcher.units == [] and not list(tmp_path.iterdir())


def test_launcher_that_cannot_connect_leaves_nothing(tmp_path: Path) -> None:
    class Unreachable(Recorder):
        def workers(self) -> int | None:
            raise UserError("no connection")

    with pytest.raises(UserError, match="no connection"):
        bench.run(bench.load_stream(**STREAM), runs=tmp_path / "runs", launcher=Unreachable())
    assert not (tmp_path / "runs").exists()


def test_objects_that_cannot_be_sent_are_an_error(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file:

        def make(shape: Any, outputs: int) -> torch.nn.Module:
            print(file.closed)
            return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, outputs))

        with pytest.raises(UserError, match="can't be sent to another process"):
            bench.run(bench.load_stream(**STREAM), model=make, norm="none", launcher=Recorder())


def test_installed_launcher_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [EntryPoint(name, f"{__name__}:Recorder", registry.GROUP) for name in ("mine", "local")]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == "contnorm.launchers" else [])
    assert type(create_launcher("local")) is LocalLauncher  # can't be replaced
    assert create_launcher("mine", {"least": 3}).least == 3
    assert "Recorder" in bench.available()["launchers"]["mine"].summary
    with pytest.raises(UserError, match=r"unknown option of launcher mine: 'most'. .*There are: least"):
        create_launcher("mine", {"most": 1})


def test_launcher_that_cannot_be_imported_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = registry.LauncherSpec("no_such_module:Launcher", "broken")
    monkeypatch.setattr(registry, "launchers", lambda: {"broken": broken})
    with pytest.raises(UserError, match=r"'broken' of contnorm: can't be created .*no_such_module"):
        create_launcher("broken")


def test_missing_ray_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=re.escape('Install it with: pip install "contnorm[ray]"')):
        bench.run(bench.load_stream(**STREAM), launcher="ray")


def test_something_else_is_no_launcher() -> None:
    wrong: Any = 3
    with pytest.raises(UserError, match="launcher is of class int: use a name"):
        bench.run(bench.load_stream(**STREAM), launcher=wrong)


@pytest.mark.parametrize("command", ["run", "resume", "sweep", "tune", "paper"])
def test_commands_have_the_options(command: str) -> None:
    options = {option for parameter in load_command(command).params for option in parameter.opts}
    assert {"--launcher", "--address", "--launcher-set"} <= options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--address", "auto"], "--address: needs --launcher"),
        (["--launcher-set", "retries=2"], "--launcher-set: needs --launcher"),
        (["--launcher", "loca"], "unknown launcher 'loca'. Did you mean 'local'"),
        (["--launcher", "local", "--launcher-set", "speed=2"], "unknown option of launcher local: 'speed'"),
    ],
)
def test_wrong_options_are_refused_and_nothing_is_written(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(message)):
        load_command("run").main(["--stream", "split-mnist", *options], standalone_mode=False)
    assert not list(tmp_path.iterdir())


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_yaml_of_the_page_is_a_ray_job() -> None:
    (text,) = blocks("yaml")
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    words = shlex.split(job["spec"]["entrypoint"])
    options = {option for parameter in load_command(words[1]).params for option in parameter.opts}
    assert words[0] == "contnorm" and {word for word in words if word.startswith("--")} <= options
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for box in pod["containers"] for mount in box["volumeMounts"]} <= volumes
    assert all(isinstance(value, str) for value in cluster["headGroupSpec"]["rayStartParams"].values())


def test_batch_script_of_the_page_is_valid() -> None:
    (script,) = blocks("bash")
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=True).stderr == ""
