"""Optuna: reports after each task, and pruned trials that leave nothing behind."""

import threading
from pathlib import Path

import numpy as np
import pytest

from contnorm import bench

optuna = pytest.importorskip("optuna")

from contnorm.integrations.optuna import PruneByTask, TrialPruned  # noqa: E402

TASKS = 3


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.fixture(scope="module")
def stream() -> bench.Stream:
    rng = np.random.default_rng(0)
    means = 2 * rng.normal(size=(6, 12))
    labels, test_labels = np.repeat(np.arange(6), 40), np.repeat(np.arange(6), 20)
    x, x_test = (means[y] + rng.normal(size=(len(y), 12)) for y in (labels, test_labels))
    return bench.Stream.from_arrays(x, labels, x_test, test_labels, tasks=TASKS)


class PruneOdd(optuna.pruners.BasePruner):
    """Prunes every second trial after its first task."""

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        return trial.number % 2 == 1


def optimize(stream: bench.Stream, runs: Path, trials: int, n_jobs: int = 1, **arguments: object) -> optuna.Study:
    """Trial i trains with lr = 0.01 + i / 1000, so that no two trials have the same runs."""

    def objective(trial: optuna.Trial) -> float:
        trial.set_user_attr("lr", lr := 0.01 + trial.number / 1000)
        result = bench.run(stream, norm="bn", lr=lr, runs=runs, on_task_done=PruneByTask(trial), **arguments)
        return float(result.acc.mean())

    study = optuna.create_study(direction="maximize", pruner=PruneOdd())
    study.optimize(objective, n_trials=trials, n_jobs=n_jobs)
    return study


def check_study(study: optuna.Study, runs: Path, seeds: int) -> None:
    """Odd trials are pruned; the folder has the records of the even ones and nothing else."""
    states = {trial.number: trial.state.name for trial in study.trials}
    assert states == {number: "PRUNED" if number % 2 else "COMPLETE" for number in states}
    recorded = bench.load_runs(runs)
    assert sorted({record.config.train.lr for record in recorded}) == sorted(
        trial.user_attrs["lr"] for trial in study.trials if trial.number % 2 == 0
    )
    expected = {Path(record.hash) / f"{seed}.json" for record in recorded for seed in range(seeds)}
    written = {path.relative_to(runs) for path in runs.rglob("*") if not path.is_dir()}
    assert {path for path in written if path.name != ".index.json"} == expected
    assert {path.name for path in runs.iterdir() if path.is_dir()} == {record.hash for record in recorded}


def test_pruned_trials_leave_nothing_behind(stream: bench.Stream, tmp_path: Path) -> None:
    check_study(optimize(stream, tmp_path, trials=4), tmp_path, seeds=1)


def test_trials_in_threads_leave_nothing_behind(stream: bench.Stream, tmp_path: Path) -> None:
    check_study(optimize(stream, tmp_path, trials=4, n_jobs=2, lanes=1), tmp_path, seeds=1)
    assert threading.active_count() < 10


def test_report_is_the_mean_over_seeds(stream: bench.Stream, tmp_path: Path) -> None:
    study = optimize(stream, tmp_path, trials=1, seeds=2, lanes=1)
    result = bench.Result(bench.load_runs(tmp_path))
    rows = [[np.mean(row[: task + 1]) for task, row in enumerate(run)] for run in result.accuracy]
    assert study.trials[0].intermediate_values == pytest.approx(dict(enumerate(np.mean(rows, axis=0))))


def test_trial_is_not_pruned_after_the_last_task(stream: bench.Stream) -> None:
    trial = optuna.trial.FixedTrial({})
    trial.should_prune = lambda: True
    events: list[bench.Event] = []
    bench.run(stream, norm="bn", on_task_done=events.append)
    PruneByTask(trial)(events[-1])
    with pytest.raises(TrialPruned, match="after task 0"):
        PruneByTask(trial)(events[0])
