"""The stages of the runs that are still missing: valid settings, selection of rates, and continuing."""

from pathlib import Path

import numpy as np
import pytest
from tools.evidence_runs import CIFAR100, Stage, experiment, hash_of, load_stream, run, stages

from contnorm import bench
from tests.datasets import small_cifar100

SMALL = {"model.name": "mlp", "model.width": 16, "norm.groups": 4}


@pytest.mark.parametrize("name", [name for name, stage in stages().items() if stage.stream != "cocoseq"])
def test_experiments_of_stage_are_valid_and_distinct(name: str, tmp_path: Path) -> None:
    stage = stages()[name]
    stream = load_stream(stage, tmp_path)
    experiments = [*stage.all_trials(), *(one for one in stage.experiments if "lr" in one)]
    hashes = [hash_of(stream, one) for one in experiments]
    assert len(set(hashes)) == len(hashes) > 0


@pytest.mark.parametrize("moments", ["running", "memory"])
def test_stage_runs_trials_and_then_the_selected_rate(moments: str, tmp_path: Path) -> None:
    stage = Stage(
        "", CIFAR100, [experiment("bn", "er", **SMALL)], range(100, 102), (1e-6, 0.1), range(2), moments=moments
    )
    stream = load_stream(stage, small_cifar100(tmp_path / "data"))
    run(stage, stream, tmp_path / "runs", lanes=1)
    runs = bench.load_runs(tmp_path / "runs")
    trials = runs.where(part="validate")
    means = {
        rate: np.mean([record.evaluated[moments].scores()["acc"] for record in trials.where(lr=rate)])
        for rate in (1e-6, 0.1)
    }
    assert len(trials) == 4 and means[1e-6] != means[0.1]
    fresh = runs.where(part="learn")
    assert [record.seed for record in fresh] == [100, 101]
    assert {record.config.train.lr for record in fresh} == {max(means, key=means.__getitem__)}
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json")}
    run(stage, stream, tmp_path / "runs", lanes=1)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json")} == times
