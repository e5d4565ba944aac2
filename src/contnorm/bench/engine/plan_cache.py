"""Plans that runs share: those that differ in what learns, and not in what it is shown, have one and the same."""

from __future__ import annotations

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.registry import Source
from contnorm.bench.plan import Plan, make_plan
from contnorm.bench.streams.tasks import Stream, build_stream

__all__ = ["Plans"]


class Plans:
    """Streams and plans over one data set, each made when it is first asked for.

    Args:
        source: The data set.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._made: dict[tuple[object, ...], tuple[Stream, Plan]] = {}

    def of(self, config: RunConfig, seed: int, draws: int) -> tuple[Stream, Plan]:
        """What a run is shown: with so many replay draws a step."""
        train = config.train
        cut = train.batch, train.replay, train.partial, train.passes, train.max_steps
        key = config.stream, config.memory, config.strategy.replay_from, cut, seed, draws
        if key not in self._made:
            stream = build_stream(config.stream, self.source, seed)
            self._made[key] = stream, make_plan(config, stream, seed, draws)
        return self._made[key]
