"""Optuna: reports after each task, and pruned trials that leave nothing behind."""

from __future__ import annotations

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


@pytest.mark.feature("optuna", "pruned trials leave nothing behind")
def test_pruned_trials_leave_nothing_behind(stream: bench.Stream, tmp_path: Path) -> None:
    check_study(optimize(stream, tmp_path, trials=4), tmp_path, seeds=1)


@pytest.mark.slow
@pytest.mark.feature("optuna", "pruning of runs in worker processes")
def test_pruned_trials_of_worker_processes_leave_nothing_behind(stream: bench.Stream, tmp_path: Path) -> None:
    check_study(optimize(stream, tmp_path, trials=2, seeds=2, lanes=2), tmp_path, seeds=2)


@pytest.mark.feature("optuna", "trials in threads (n_jobs)")
def test_trials_in_threads_leave_nothing_behind(stream: bench.Stream, tmp_path: Path) -> None:
    check_study(optimize(stream, tmp_path, trials=4, n_jobs=2, lanes=1), tmp_path, seeds=1)
    assert threading.active_count() < 10


@pytest.mark.feature("optuna", "mean over seeds reported after each task")
def test_report_is_the_mean_over_seeds(stream: bench.Stream, tmp_path: Path) -> None:
    study = optimize(stream, tmp_path, trials=1, seeds=2, lanes=1)
    result = bench.Result(bench.load_runs(tmp_path))
    rows = [[np.mean(row[: task + 1]) for task, row in enumerate(run)] for run in result.accuracy]
    assert study.trials[0].intermediate_values == pytest.approx(dict(enumerate(np.mean(rows, axis=0))))


def test_recorded_seeds_count_in_the_report(stream: bench.Stream, tmp_path: Path) -> None:
    bench.run(stream, norm="bn", lr=0.01, seeds=1, runs=tmp_path)
    study = optimize(stream, tmp_path, trials=1, seeds=2, lanes=1)
    assert list(study.trials[0].intermediate_values) == list(range(TASKS))


def test_pruning_keeps_records_of_earlier_calls(stream: bench.Stream, tmp_path: Path) -> None:
    before = bench.run(stream, norm="bn", lr=0.011, seeds=1, runs=tmp_path)
    study = optimize(stream, tmp_path, trials=2, seeds=2, lanes=1)
    assert study.trials[1].state.name == "PRUNED"
    assert [record.seed for record in bench.load_runs(tmp_path).where(hash=before.config.hash)] == [0]


def test_trial_is_not_pruned_after_the_last_task(stream: bench.Stream) -> None:
    trial = optuna.trial.FixedTrial({})
    trial.should_prune = lambda: True
    events: list[bench.Event] = []
    bench.run(stream, norm="bn", on_task_done=events.append)
    PruneByTask(trial)(events[-1])
    with pytest.raises(TrialPruned, match="after task 0"):
        PruneByTask(trial)(events[0])


def test_two_experiments_in_one_trial_are_refused(stream: bench.Stream) -> None:
    callback = PruneByTask(optuna.trial.FixedTrial({}))
    with pytest.raises(bench.UserError, match=r"two experiments.*bench\.run"):
        bench.run_all(stream, [{"norm": "bn"}, {"norm": "gn"}], lanes=1, on_task_done=callback)


def test_unknown_score_names_those_of_the_runs(stream: bench.Stream) -> None:
    with pytest.raises(bench.UserError, match=r"score='map'.*accuracy"):
        bench.run(stream, norm="bn", on_task_done=PruneByTask(optuna.trial.FixedTrial({}), score="map"))
