"""Optuna: prune trials by the accuracy after each task."""

from __future__ import annotations

from statistics import fmean

import optuna

from contnorm import bench

__all__ = ["PruneByTask", "TrialPruned"]


class TrialPruned(optuna.TrialPruned, bench.StopRun):
    """A trial was pruned after a task. Its runs are stopped, and nothing of them stays in the folder of runs.

    Optuna handles it as its own exception of this name.

    Example:
        >>> issubclass(TrialPruned, optuna.TrialPruned), TrialPruned("after task 0").discard
        (True, True)
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.discard = True


class PruneByTask:
    """An ``on_task_done`` callback of `bench.run` that reports the score after each task and prunes the trial.

    The step of a report is the index of the task, and its value the mean over all seeds of the call, once each of them
    has learned the task. Seeds that run one after the other (``lanes=1``) can therefore be pruned only while the last
    one runs. A trial is not pruned after the last task, since it is complete then. A trial is one call of `bench.run`.

    Args:
        trial: The trial of Optuna.
        score: Name of the score: ``"accuracy"``, or ``"c_f1"``, ``"o_f1"`` or ``"map"`` of a multi-label stream. None
            for the first of them.

    Example:
        >>> optuna.logging.set_verbosity(optuna.logging.ERROR)
        >>> stream = bench.load_stream("split-mnist", source="digits", tasks=2, train_per_task=50)
        >>> def objective(trial):
        ...     lr = trial.suggest_float("lr", 0.01, 0.1, log=True)
        ...     result = bench.run(stream, norm="bn", lr=lr, on_task_done=PruneByTask(trial))
        ...     return float(result.acc.mean())
        >>> study = optuna.create_study(direction="maximize")
        >>> study.optimize(objective, n_trials=1)
        >>> list(study.trials[0].intermediate_values)
        [0, 1]
    """

    def __init__(self, trial: optuna.trial.BaseTrial, *, score: str | None = None) -> None:
        self._trial, self._score = trial, score
        self._values: dict[int, dict[int, float]] = {}  # values by task and seed

    def __call__(self, event: bench.Event) -> None:
        """Report and prune; see the class."""
        values = self._values.setdefault(event.task, {})
        values[event.seed] = event.average if self._score is None else event.scores.so_far[self._score]
        if set(values) != set(event.seeds):
            return
        self._trial.report(fmean(values.values()), event.task)
        if not event.last and self._trial.should_prune():
            raise TrialPruned(f"pruned after task {event.task}")
