"""Names and summaries of everything that a run can be made of. Needs no torch."""

from __future__ import annotations

from contnorm.bench.memories import MEMORIES
from contnorm.bench.models import NETWORKS
from contnorm.bench.strategies.registry import STRATEGIES
from contnorm.bench.streams.tasks import STREAMS
from contnorm.registry import NORMS

__all__ = ["available", "streams_of_source"]

USER_CODE = "your own"


def available() -> dict[str, dict[str, str]]:
    """Return the names and summaries of the norms, streams, strategies, memories and models.

    Example:
        >>> list(available()), available()["memories"]["ring"]
        (['norms', 'streams', 'strategies', 'memories', 'models'], ...)
    """
    return {
        "norms": {spec.name: spec.summary for spec in NORMS.values()},
        "streams": {spec.name: spec.summary for spec in STREAMS.values()},
        "strategies": {spec.name: spec.summary for spec in STRATEGIES.values()} | {"path/to/file.py:Class": USER_CODE},
        "memories": dict(MEMORIES),
        "models": {**NETWORKS, "path/to/file.py:make": USER_CODE},
    }


def streams_of_source(source: str) -> list[str]:
    """Return the names of the streams that can be made of a data set.

    Example:
        >>> streams_of_source("cifar10")
        ['split-cifar10']
    """
    return [stream.name for stream in STREAMS.values() if source in stream.sources]
