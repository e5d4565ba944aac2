"""The worker of another machine, in this process: with and without the folder of runs, the data and the code."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from contnorm.bench.components import Component, code_hash, load_component
from contnorm.bench.engine.events import Finished, Started, Stopped, TaskDone
from contnorm.bench.engine.job_events import Event, Waiting
from contnorm.bench.engine.process_pool import pickle_objects
from contnorm.bench.engine.run_dir import RunDir
from contnorm.bench.engine.scheduler import Job, RunEnvironment, execute, resolve
from contnorm.bench.engine.units import Unit
from contnorm.bench.engine.work import UnitWork
from contnorm.bench.launchers.remote_worker import (
    Checkpoint,
    Ended,
    Events,
    MissingData,
    RemoteWorker,
    WorkerError,
    WorkerSetup,
)
from contnorm.bench.launchers.run_files import CheckpointUrl, HeldRuns, RunFiles, read_run
from contnorm.bench.records import Store
from contnorm.errors import UserError
from tests.datasets import small_mnist

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_mnist(tmp_path_factory.mktemp("data"), train=200, test=50)


@pytest.fixture(autouse=True)
def _own_process() -> Iterator[None]:
    """Restore what a worker changes in its process."""
    folder, logger = Path.cwd(), logging.getLogger("contnorm")
    handlers, propagate = list(logger.handlers), logger.propagate
    yield
    os.chdir(folder)
    logger.handlers[:], logger.propagate = handlers, propagate


def job_of(root: Path, seed: int = 0, **groups: Any) -> Job:
    stream = {"name": "permuted-mnist", "train_per_task": 40, "test_per_task": 20, "tasks": 3}
    return Job(resolve({"stream": stream, "norm": {"name": "cn"}, "strategy": {"name": "er"}, **groups}, root), seed)


def started(job: Job, environment: RunEnvironment, **setup: Any) -> RemoteWorker:
    work = UnitWork.of([job], environment)
    worker = RemoteWorker()
    worker.setup(cloudpickle.dumps(WorkerSetup(pickle_objects(work), str(Path.cwd()), upload_every=0.0, **setup)))
    return worker


def messages(worker: RemoteWorker, job: Job, files: RunFiles | None = None, *data: bytes) -> Iterator[Any]:
    content = cloudpickle.dumps((Unit((job,)), {job: files or RunFiles(None, {})}))
    yield from map(cloudpickle.loads, worker.run(content, *data))


def has_task_done(message: object) -> bool:
    return isinstance(message, Events) and any(isinstance(event.what, TaskDone) for event in message.events)


def result(record: bytes) -> dict[str, Any]:
    """The content of a record without times and its seal."""
    raw = json.loads(record)
    return {key: value for key, value in raw.items() if key not in ("seconds", "seal", "commit")}


def local_record(job: Job, root: Path, folder: Path) -> dict[str, Any]:
    list(execute([job], RunEnvironment(folder, root, CPU)))
    return result(Store(folder).path(job.config, job.seed).read_bytes())


def test_worker_records_in_a_folder_that_it_sees(root: Path, tmp_path: Path) -> None:
    job, runs = job_of(root), tmp_path / "runs"
    runs.mkdir()
    (runs / "token").write_text("abc")
    worker = started(job, RunEnvironment(runs, root, CPU), token=("token", "abc"))
    events = [event.what for message in messages(worker, job) for event in message.events]
    assert isinstance(events[-1], Finished)
    record = Store(runs).path(job.config, 0).read_bytes()
    assert result(record) == local_record(job, root, tmp_path / "local")


def test_worker_without_the_folder_sends_checkpoints_and_the_record(root: Path, tmp_path: Path) -> None:
    job, runs = job_of(root), tmp_path / "runs"
    worker = started(job, RunEnvironment(runs, root, CPU), token=("token", "abc"))
    held = HeldRuns(Store(runs))
    assert held.acquire([job]) == ([job], [])
    saved: list[int] = []
    for message in messages(worker, job):
        if isinstance(message, Checkpoint):
            held.save_checkpoint(job, message.files)
            saved.append(RunDir.of(job, Store(runs)).checkpoints.latest_step())
        if isinstance(message, Ended):
            event = held.end(message.event, message.files)
    assert saved and saved == sorted(saved)
    assert event.path == Store(runs).path(job.config, 0) and isinstance(event.what, Finished)
    assert result(event.path.read_bytes()) == local_record(job, root, tmp_path / "local")
    assert not RunDir.of(job, Store(runs)).folder.exists()


def test_run_continues_from_a_checkpoint_that_another_worker_sent(root: Path, tmp_path: Path) -> None:
    job, runs = job_of(root), tmp_path / "runs"
    held = HeldRuns(Store(runs))
    held.acquire([job])
    first = started(job, RunEnvironment(runs, root, CPU), token=("token", "abc"))
    for message in messages(first, job):
        if has_task_done(message):
            first.stop()
        if isinstance(message, Checkpoint):
            held.save_checkpoint(job, message.files)
        if isinstance(message, Ended):
            assert isinstance(message.event.what, Stopped)
    steps = RunDir.of(job, Store(runs)).checkpoints.latest_step()
    second = started(job, RunEnvironment(runs, root, CPU), token=("token", "abc"))
    for message in messages(second, job, held.read(job)):
        if isinstance(message, Events) and isinstance(message.events[0].what, Started):
            assert message.events[0].what.done == steps > 0
        if isinstance(message, Ended):
            event = held.end(message.event, message.files)
    assert event.path is not None
    assert result(event.path.read_bytes()) == local_record(job, root, tmp_path / "local")


def test_checkpoints_at_a_url_are_found_by_another_worker_and_deleted(root: Path, tmp_path: Path) -> None:
    job, url = job_of(root), f"file://{tmp_path}/store"
    options = {"token": ("token", "abc"), "checkpoints": url}
    first = started(job, RunEnvironment(tmp_path / "runs", root, CPU), **options)
    for message in messages(first, job):
        if has_task_done(message):
            first.stop()
        if isinstance(message, Checkpoint):
            assert not message.files.checkpoint  # it is at the URL
    stored = CheckpointUrl(url).read(job)
    assert {name.partition(".")[2] for name in stored} == {"json", "safetensors"}
    second = started(job, RunEnvironment(tmp_path / "runs", root, CPU), **options)
    received = list(messages(second, job))
    begin = next(message.events[0].what for message in received if isinstance(message, Events))
    assert isinstance(begin, Started) and begin.done > 0
    assert isinstance(received[-1], Ended) and isinstance(received[-1].event.what, Finished)
    assert received[-1].files.record is not None
    assert result(received[-1].files.record) == local_record(job, root, tmp_path / "local")
    assert CheckpointUrl(url).read(job) == {}


def test_data_that_the_machine_lacks_is_requested_and_used(root: Path, tmp_path: Path) -> None:
    job = job_of(root)
    environment = RunEnvironment(None, tmp_path / "no data", CPU)
    worker = started(job, environment)
    assert list(messages(worker, job)) == [MissingData("mnist")]
    source = RunEnvironment(None, root, CPU).load("mnist")
    received = list(messages(worker, job, None, cloudpickle.dumps(source)))
    assert isinstance(received[-1].events[-1].what, Finished)
    local = list(execute([job], RunEnvironment(None, root, CPU)))[-1].what
    assert isinstance(local, Finished)
    assert received[-1].events[-1].what.results["matrix"] == local.results["matrix"]


def test_other_data_of_the_same_name_is_not_used(root: Path, tmp_path: Path) -> None:
    job = job_of(root)
    other = small_mnist(tmp_path / "other", train=100, test=50)
    work = replace(UnitWork.of([job], RunEnvironment(None, other, CPU)), fingerprints={"mnist": "of the driver"})
    worker = RemoteWorker()
    worker.setup(cloudpickle.dumps(WorkerSetup(pickle_objects(work), str(tmp_path))))
    assert list(messages(worker, job)) == [MissingData("mnist")]


NETWORK = """
from torch import nn

def make(input_shape, num_outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Linear(8, num_outputs))
"""


def test_code_whose_file_is_missing_comes_with_the_work(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK)
    job = job_of(root, model={"name": "net.py:make"}, norm={"name": "bn"})
    code = pickle_objects(
        [
            Component(
                "model", "net.py:make", load_component("model", "net.py:make"), code=code_hash("model", "net.py:make")
            )
        ]
    )
    local = local_record(job, root, tmp_path / "local")
    Path("net.py").unlink()
    alone = list(messages(started(job, RunEnvironment(None, root, CPU)), job))
    assert "there is no file net.py" in alone[-1].events[-1].what.why
    received = list(messages(started(job, RunEnvironment(None, root, CPU), code=code), job))
    assert received[-1].events[-1].what.results["matrix"] == local["matrix"]


def test_error_of_the_work_is_sent(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(root)
    monkeypatch.setattr(
        "contnorm.bench.engine.runner.train_together", lambda *a, **k: (_ for _ in ()).throw(UserError("no memory"))
    )
    received = list(messages(started(job, RunEnvironment(None, root, CPU)), job))
    assert isinstance(received[-1], WorkerError) and str(received[-1].error) == "no memory"


def test_run_that_another_process_holds_or_recorded_is_not_sent(root: Path, tmp_path: Path) -> None:
    first, second, third = (job_of(root, seed) for seed in range(3))
    store = Store(tmp_path)
    other = RunDir.of(first, store)
    assert other.acquire()
    list(execute([second], RunEnvironment(tmp_path, root, CPU)))
    free, events = HeldRuns(store).acquire([first, second, third])
    assert free == [third]
    assert [(event.job, type(event.what)) for event in events] == [(first, Waiting), (second, str)]
    other.lock.release()


def test_held_runs_are_free_after_close(root: Path, tmp_path: Path) -> None:
    job, store = job_of(root), Store(tmp_path)
    held = HeldRuns(store)
    held.acquire([job])
    assert HeldRuns(store).acquire([job])[0] == []
    held.close()
    assert HeldRuns(store).acquire([job]) == ([job], [])


def test_url_keeps_two_checkpoints_and_a_cut_one_is_not_used(root: Path, tmp_path: Path) -> None:
    job, url = job_of(root), CheckpointUrl(f"file://{tmp_path}/store")
    for step in (5, 10, 15):
        url.save(job, {f"{step}.json": b"{}", f"{step}.safetensors": b"-"})
    assert sorted(url.read(job)) == ["10.json", "10.safetensors", "15.json", "15.safetensors"]
    run_dir = RunDir.of(job, Store(tmp_path / "runs"))
    run_dir.checkpoints.add_files(url.read(job))
    assert read_run(run_dir) == RunFiles(None, {})


def test_event_of_a_worker_has_the_path_of_this_machine(root: Path, tmp_path: Path) -> None:
    job = job_of(root)
    event = HeldRuns(Store(tmp_path)).located(Event(job, "recorded", Path("/tmp/elsewhere/0.json")))
    assert event.path == tmp_path / job.config.hash / "0.json"
