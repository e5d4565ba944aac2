"""The samples in the replay memory at the end of a task, and their weights when moments are estimated from them.

The content of the memory follows from the plan, so a resumed run gets the same samples. Weights are chosen by
``evaluate.weights``:

- ``plain``: every stored sample has the same weight.
- ``task``: every task in the memory has the same weight, divided equally among its samples.
- ``batch``: as in a training batch at the end of the task. The ``train.batch`` samples of the stream are represented by
  the stored samples of the current task, the replayed ones by the samples that the strategy may draw. If the memory
  holds no sample of the current task, the replayed part remains.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.memories import NOT_STORED
from contnorm.bench.plan import Plan

__all__ = ["sample_weights", "stored_items"]

Indices = NDArray[np.int64]


def stored_items(plan: Plan, steps: int) -> Indices:
    """Return the items in the memory after a number of steps, in the order of the slots."""
    content = np.full(plan.slots, -1, dtype=np.int64)
    if steps:
        items = np.concatenate([step.stream for step in plan.steps[:steps]])
        slots = np.concatenate([step.write for step in plan.steps[:steps]])
        stored = slots != NOT_STORED
        content[slots[stored]] = items[stored]  # if items have the same slot, the latest one stays
    return content[content >= 0]


def sample_weights(config: RunConfig, plan: Plan, tasks: Indices, current: int) -> NDArray[np.float64]:
    """Return the weight of each stored sample.

    Args:
        config: The settings of the run.
        plan: The plan of the run.
        tasks: The task of each stored sample.
        current: The task that was learned last.

    Example:
        >>> from contnorm.bench.config.schema import from_dict
        >>> config = from_dict({"evaluate": {"moments": "memory", "weights": "task"}})
        >>> sample_weights(config, Plan((), (), 4), np.array([0, 0, 0, 1]), current=1).round(2).tolist()
        [0.33, 0.33, 0.33, 1.0]
    """
    if config.evaluate.weights == "plain":
        return np.ones(len(tasks))
    if config.evaluate.weights == "task":
        counts: NDArray[np.float64] = 1.0 / np.bincount(tasks)[tasks]
        return counts
    of_stream = tasks == current
    replayed = tasks < current if config.strategy.replay_from == "past" else np.ones(len(tasks), dtype=bool)
    return _shared(of_stream, config.train.batch) + _shared(replayed, _replayed_samples(config, plan, replayed))


def _replayed_samples(config: RunConfig, plan: Plan, replayed: NDArray[np.bool_]) -> int:
    """Return the number of replayed samples in a training batch; an extra draw for a norm is not part of it."""
    draws = len(plan.steps[0].replay) - plan.steps[0].has_extra
    return draws * min(config.train.replay, int(replayed.sum()))


def _shared(members: NDArray[np.bool_], samples: int) -> NDArray[np.float64]:
    """Divide the weight of a number of samples equally among the members."""
    return np.where(members, samples / max(1, int(members.sum())), 0.0)
