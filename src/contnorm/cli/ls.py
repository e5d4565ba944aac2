"""The `ls` command: names and summaries from the registries. Needs no torch."""

from __future__ import annotations

from contnorm.bench.memories import MEMORIES
from contnorm.bench.models import NETWORKS
from contnorm.bench.strategies.registry import STRATEGIES
from contnorm.bench.streams.tasks import STREAMS
from contnorm.paper.recipe import find_recipe, recipe_names
from contnorm.registry import NORMS

__all__ = ["listings"]

Rows = list[tuple[str, str]]


def listings() -> dict[str, Rows]:
    """Names and summaries of everything registered, by kind.

    Example:
        >>> list(listings())
        ['norms', 'streams', 'strategies', 'memories', 'models', 'tables']
    """
    return {
        "norms": [(spec.name, spec.summary) for spec in NORMS.values()],
        "streams": [(spec.name, spec.summary) for spec in STREAMS.values()],
        "strategies": [
            *((spec.name, spec.summary) for spec in STRATEGIES.values()),
            ("path/to/file.py:ClassName", "one of your own"),
        ],
        "memories": list(MEMORIES.items()),
        "models": [*NETWORKS.items(), ("path/to/file.py:make", "one of your own")],
        "tables": [(name, find_recipe(name).title) for name in recipe_names()],
    }
