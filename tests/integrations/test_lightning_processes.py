"""Lightning on two processes: synchronized norms and pooled moments give the numbers of one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")
from tests.integrations.lightning_training import train

pytestmark = [pytest.mark.slow, pytest.mark.ddp]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Results of one process, and of each of two processes that split its batches."""
    folder = tmp_path_factory.mktemp("processes")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.integrations.lightning_training", str(folder), "2"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [train(1), *(torch.load(folder / f"{rank}.pt") for rank in (0, 1))]


# Both add up the same numbers in float64, in different orders, over 8 steps: far below 1e-9. Without synchronization,
# losses and moments differ in the second digit.
def close(a: object, b: object) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.feature("lightning", "synchronized norms (`SyncNorms`)")
def test_two_processes_train_as_one(results: list[dict]) -> None:
    one, *two = results
    assert len(one["losses"]) == 8
    for process in two:
        assert process["classes"] == ["SyncContinualNorm"] * 2
        assert process["classes_after"] == ["ContinualNorm2d"] * 2
        close(process["losses"], one["losses"])
        close(process["state"], one["state"])
        close(process["val_loss"], one["val_loss"])


@pytest.mark.feature("lightning", "moments pooled over processes")
def test_moments_are_pooled_over_processes(results: list[dict]) -> None:
    one, *two = results
    assert len(one["moments"]) == 2 and len(one["moments"][0]) == 4
    for process in two:
        close(process["moments"], one["moments"])
    for first, second in zip(*(process["moments"] for process in two), strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)
