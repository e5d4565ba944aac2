"""Runs without a folder of records: the same results, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.engine.checkpoint import weights_path
from contnorm.bench.engine.events import Finished, Stopped
from contnorm.bench.engine.job import Job, RunEnvironment
from contnorm.bench.engine.scheduler import execute
from contnorm.bench.records import Store, make_record
from contnorm.errors import UserError
from tests.datasets import small_mnist

CPU = torch.device("cpu")
VARYING = {"seconds", "seal"}  # times differ between two runs, and so do checksums over them


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_mnist(tmp_path_factory.mktemp("data"), train=400, test=100)


def settings(root: Path, **groups: Any) -> RunConfig:
    stream = {"name": "permuted-mnist", "train_per_task": 20, "tasks": 3}
    return resolve({"stream": stream, "norm": {"name": "cn4"}, **groups}, root)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 2])
def test_results_and_weights_equal_those_of_recorded_runs(root: Path, tmp_path: Path, lanes: int) -> None:
    jobs = [Job(settings(root), seed) for seed in (0, 1)]
    store = Store(tmp_path)
    for event in execute(jobs, RunEnvironment(tmp_path, root, CPU, lanes=lanes, keep_weights=True)):
        assert event.path == store.path(event.job.config, event.job.seed)
        if isinstance(event.what, Finished):
            recorded = store.load_run(event.job.config, event.job.seed)
            assert make_record(event.job.config, event.job.seed, event.what.results) == recorded
    in_memory = RunEnvironment(None, root, CPU, lanes=lanes, keep_weights=True)
    finished = {event.job: event.what for event in execute(jobs, in_memory) if isinstance(event.what, Finished)}
    assert set(finished) == set(jobs)
    for job, what in finished.items():
        record, expected = make_record(job.config, job.seed, what.results), store.load_run(job.config, job.seed)
        assert (record.counted, record.drift, record.path) == (expected.counted, expected.drift, None)
        assert record.raw.keys() == expected.raw.keys()
        for key in record.raw.keys() - VARYING:
            assert record.raw[key] == expected.raw[key], key
        assert expected.path is not None and what.weights is not None
        weights, kept = load(what.weights), load(weights_path(expected.path).read_bytes())
        assert weights.keys() == kept.keys() and all(torch.equal(weights[name], kept[name]) for name in kept)


def test_nothing_is_written(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: object) -> None:
        raise AssertionError("a file is written")

    for module in ("checkpoint", "lock", "run_dir"):
        monkeypatch.setattr(f"contnorm.bench.engine.{module}.write_atomically", forbidden)
    monkeypatch.setattr("contnorm.bench.records.write_atomically", forbidden)
    monkeypatch.chdir(tmp_path)
    *_, last = execute([Job(settings(root), 0)], RunEnvironment(None, root, CPU, checkpoint_every=1))
    assert isinstance(last.what, Finished) and last.path is None and not list(tmp_path.iterdir())


def test_stop_ends_the_run_without_a_checkpoint(root: Path) -> None:
    events = list(execute([Job(settings(root), 0)], RunEnvironment(None, root, CPU), stop=lambda: True))
    assert [type(event.what) for event in events][-1] is Stopped
    assert isinstance(events[-1].what, Stopped) and events[-1].what.saved == 0


def test_error_in_user_code_is_one_line(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from contnorm.bench import Single\nclass Mine(Single):\n    def loss(self, *inputs):\n        return 1 / 0\n"
    )
    job = Job(settings(root, strategy={"name": f"{file}:Mine"}), 0)
    with pytest.raises(UserError, match=r"line 4: ZeroDivisionError.*none are saved") as error:
        list(execute([job], RunEnvironment(None, root, CPU)))
    assert "\n" not in str(error.value)


def test_store_of_an_environment_without_folder_is_an_error(root: Path) -> None:
    with pytest.raises(ValueError, match="in memory"):
        _ = RunEnvironment(None, root, CPU).store
