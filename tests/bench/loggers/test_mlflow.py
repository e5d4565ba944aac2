"""MLflow's client finds what the record has, on a file store."""

from pathlib import Path

import pytest

from contnorm import bench
from tests.bench.loggers.conftest import Memo, StopAt

pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")

from mlflow import MlflowClient
from mlflow.entities import Run


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return MlflowClient(tracking_uri=(tmp_path / "runs-logs" / "mlflow").as_uri())


def runs_of(client: MlflowClient) -> list[Run]:
    experiment = client.get_experiment_by_name("contnorm")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def series(client: MlflowClient, run: Run, name: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]


def test_metrics_are_those_of_the_run(stream: bench.Stream, tmp_path: Path, client: MlflowClient) -> None:
    memo = Memo()
    result = bench.run(stream, norm="cn4", runs=tmp_path / "runs", log=["mlflow", memo], log_every=5)
    (run,) = runs_of(client)
    names = {name for _, _, name, _ in memo.rows}
    assert set(run.data.metrics) == names
    for name in names:
        assert series(client, run, name) == list(memo.series(name).items())
    assert run.data.metrics["score/acc"] == result.records[0].score("acc")
    assert run.data.params["train.batch"] == "10" and run.data.params["seed"] == "0"
    assert run.data.tags["contnorm.hash"] == result.hash
    assert run.data.tags["contnorm.versions.torch"] == result.records[0].raw["versions"]["torch"]
    assert run.info.status == "FINISHED" and run.info.run_name == memo.runs[0].name


def test_stopped_and_resumed_run_is_one_run(stream: bench.Stream, tmp_path: Path, client: MlflowClient) -> None:
    memo = Memo()
    bench.run(stream, log=memo, log_every=1)
    with pytest.raises(KeyboardInterrupt):
        bench.run(stream, runs=tmp_path / "runs", log=["mlflow", StopAt(13)], log_every=1)
    assert [run.info.status for run in runs_of(client)] == ["KILLED"]
    bench.run(stream, runs=tmp_path / "runs", log="mlflow", log_every=1)
    (run,) = runs_of(client)
    assert run.info.status == "FINISHED"
    for name in ("loss", "accuracy/task_0", "score/acc"):
        assert series(client, run, name) == list(memo.series(name).items())
