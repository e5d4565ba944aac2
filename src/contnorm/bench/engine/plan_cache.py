"""A cache of plans: runs that see the same samples, such as runs of different norms, share one plan."""

from __future__ import annotations

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.registry import Source
from contnorm.bench.plan import Plan, make_plan
from contnorm.bench.streams.tasks import TaskSequence, build_stream

__all__ = ["PlanCache"]


class PlanCache:
    """Streams and plans of one data set, made on first use.

    Args:
        source: The data set.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._plans: dict[tuple[object, ...], tuple[TaskSequence, Plan]] = {}

    def of(self, config: RunConfig, seed: int, draws: int) -> tuple[TaskSequence, Plan]:
        """Return the stream and the plan of a run.

        Args:
            config: The settings of the run.
            seed: The seed of the run.
            draws: Number of replay draws per step.
        """
        train = config.train
        batching = train.batch, train.replay, train.partial, train.passes, train.max_steps
        key = config.stream, config.memory, config.strategy.replay_from, batching, seed, draws
        if key not in self._plans:
            stream = build_stream(config.stream, self.source, seed)
            self._plans[key] = stream, make_plan(config, stream, seed, draws)
        return self._plans[key]
