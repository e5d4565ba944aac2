"""GPUs by index: device="cuda:1", and several GPUs of one machine with a process for each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contnorm.bench.engine.job import Job, RunEnvironment
from contnorm.bench.engine.process_pool import run_in_processes
from contnorm.bench.engine.units import plan_units
from contnorm.bench.launchers.local import LocalLauncher, list_devices
from typer.testing import CliRunner

from contnorm import bench
from contnorm.bench.api.execution import RunOptions, environment_with_data, find_device
from contnorm.bench.config.schema import from_dict
from contnorm.cli.main import app
from contnorm.errors import UserError

CONFIG = from_dict({"norm": {"name": "cn"}})


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def environment(options: RunOptions) -> RunEnvironment:
    return environment_with_data(None, options, Path("data"))


@pytest.mark.usefixtures("four_gpus")
def test_device_by_index() -> None:
    assert find_device("cuda:3") == torch.device("cuda", 3)
    assert environment(RunOptions("cuda:1")).lanes == 8, "it is a GPU as any other"
    with pytest.raises(UserError, match=r"device='cuda:4'.*4 GPUs.*cuda:0 to cuda:3"):
        find_device("cuda:4")
    with pytest.raises(UserError, match=r"device='cuda:1'.*launcher chooses.*Use cuda"):
        find_device("cuda:1", remote=True)
    assert find_device("cuda", remote=True) == torch.device("cuda")


@pytest.mark.parametrize("name", ["cuda:", "cuda:-1", "cuda:x", "gpu", "cuda:1 ", "mps", "cuda:1000"])
def test_unknown_device(name: str) -> None:
    with pytest.raises(UserError, match=r"use cpu, cuda, or a GPU by its index, such as cuda:1"):
        find_device(name)


def test_device_index_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"device='cuda:1': torch sees no GPU here"):
        find_device("cuda:1")


@pytest.mark.parametrize("device", [0, "", False])
def test_device_that_is_no_name_is_not_the_cpu(device: Any) -> None:
    with pytest.raises(UserError, match=r"device=.*use cpu, cuda"):
        environment(RunOptions(device))


@pytest.mark.parametrize("value", ["2", 1.5, True, 0])
@pytest.mark.parametrize("name", ["lanes", "threads"])
def test_lanes_and_threads_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"{name}={value!r}: use 1 or more, a whole number"):
        environment(RunOptions(**{name: value}))


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("devices", "expected"),
    [("0,2", (0, 2)), ([3, 1], (3, 1)), ("all", (0, 1, 2, 3)), (2, (2,)), ("1", (1,)), (" 0 , 1 ", (0, 1))],
)
def test_list_of_devices(devices: Any, expected: tuple[int, ...]) -> None:
    assert list_devices(devices) == expected


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("devices", ["", "0,0", [], [True], [-1], ["a"], "0;1", [0.5], "-1", 1.5, object()])
def test_invalid_list_of_devices(devices: Any) -> None:
    with pytest.raises(UserError, match=r"different indices of GPUs, such as 0,1, or all"):
        list_devices(devices)


@pytest.mark.usefixtures("four_gpus")
def test_devices_that_are_not_there() -> None:
    with pytest.raises(UserError, match=r"devices='2,4': torch sees 4 GPUs here, 0 to 3"):
        list_devices("2,4")


@pytest.mark.parametrize("devices", ["0,1", "all"])
def test_devices_without_a_gpu(devices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match=r"torch sees no GPU here"):
        list_devices(devices)


@pytest.mark.usefixtures("four_gpus")
def test_devices_choose_the_place_of_runs() -> None:
    place = environment(RunOptions(devices="0,2"))
    assert place.device == torch.device("cuda") and isinstance(place.launcher, LocalLauncher)
    assert place.launcher.devices == (0, 2) and place.launcher.processes(1, place) == 2
    single = environment(RunOptions(devices=[2]))
    assert single.device == torch.device("cuda:2") and single.launcher is None, "no process is needed for one GPU"
    named = environment(RunOptions("cuda", launcher=LocalLauncher("1")))
    assert named.device == torch.device("cuda:1")
    with pytest.raises(UserError, match=r"device='cuda:1': use one of them"):
        environment(RunOptions("cuda:1", devices="0,1"))
    with pytest.raises(UserError, match=r"GPUs of this machine. Use them without a launcher"):
        environment(RunOptions(devices="0,1", launcher="local"))


def visible(job: int, stop: Callable[[], bool]) -> Iterator[tuple[int, str, int]]:
    """A job that says which GPUs its process sees; it lasts until every worker has one."""
    yield job, os.environ["CUDA_VISIBLE_DEVICES"], os.getpid()


@pytest.mark.slow
@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(("of_parent", "names"), [(None, {"1", "3"}), ("GPU-a, GPU-b,GPU-c,GPU-d", {"GPU-b", "GPU-d"})])
def test_each_process_sees_one_gpu(of_parent: str | None, names: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if of_parent is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", of_parent)
    variables: list[dict[str, str]] = []

    def record(*arguments: Any) -> Iterator[Any]:
        variables.extend(arguments[4])
        return run_in_processes(*arguments)

    monkeypatch.setattr("contnorm.bench.launchers.local.run_in_processes", record)
    work: Any = visible
    work.environment = SimpleNamespace(device=torch.device("cuda"))
    try:
        events: Any = list(LocalLauncher([1, 3]).launch(work, list(range(6)), lambda: False))  # type: ignore[arg-type]
    finally:
        del work.environment
    assert sorted(job for job, _, _ in events) == list(range(6)), "each unit is executed once"
    assert {next(iter(each.values())) for each in variables} == names
    by_process = {process: name for _, name, process in events}
    assert set(by_process.values()) <= names and len(by_process) <= 2
    assert len({(name, process) for _, name, process in events}) == len(by_process), "a process keeps its GPU"


def test_units_are_small_enough_for_all_workers() -> None:
    jobs = [Job(CONFIG, seed) for seed in range(10)]
    place = RunEnvironment(None, Path("data"), torch.device("cuda"), lanes=8)
    assert [len(unit.jobs) for unit in plan_units(jobs, place)] == [8, 2]
    assert [len(unit.jobs) for unit in plan_units(jobs, place, workers=4)] == [3, 3, 3, 1]
    assert [len(unit.jobs) for unit in plan_units(jobs, place, workers=64)] == [1] * 10
    assert [len(unit.jobs) for unit in plan_units(jobs * 1, place, workers=1)] == [8, 2]
    units = plan_units(jobs, place, workers=4)
    assert sorted(job.seed for unit in units for job in unit.jobs) == list(range(10))


@pytest.mark.parametrize("command", ["run", "sweep", "tune", "paper", "resume"])
def test_commands_have_devices(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    where = {"resume": [str(tmp_path)], "paper": ["table1"]}.get(command, ["--stream", "split-mnist", "--norm", "bn"])
    result = CliRunner().invoke(app, [command, *where, "--devices", "0,7"])
    if command == "resume":
        assert "no stopped run" in str(result.exception)
    else:
        assert "devices='0,7': torch sees 2 GPUs here, 0 to 1" in str(result.exception), result.output
    assert not list(tmp_path.iterdir())


def test_run_takes_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    stream = bench.load_stream("split-mnist", source="digits", tasks=2, train_per_task=50)
    with pytest.raises(UserError, match=r"devices=\[0, 2\]: torch sees 2 GPUs here"):
        bench.run(stream, devices=[0, 2], runs=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_run_on_a_gpu_by_index_and_by_worker_has_the_bits_of_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = bench.load_stream("split-mnist", source="digits", tasks=2, train_per_task=100)
    whole = bench.run(stream, norm="cn", seeds=3, device="cuda", runs=tmp_path / "whole")
    last = torch.cuda.device_count() - 1
    index = bench.run(stream, norm="cn", seeds=3, device=f"cuda:{last}", runs=tmp_path / "index")
    assert [r.raw["matrix"] for r in index.records] == [r.raw["matrix"] for r in whole.records]
    assert index.records[0].raw["device"] == whole.records[0].raw["device"], "the record names the kind of device"
    # Two names of one GPU, for machines with a single one: each of two worker processes sees it as its only GPU.
    name = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{name},{name}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    spread = bench.run(stream, norm="cn", seeds=3, devices=[0, 1], runs=tmp_path / "spread")
    assert [r.raw["matrix"] for r in spread.records] == [r.raw["matrix"] for r in whole.records]
