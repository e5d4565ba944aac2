"""Speed benchmarks of layers, training steps and whole runs, compared with torch's own layers.

Public names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from contnorm.lazy_names import lazy_names

if TYPE_CHECKING:
    from contnorm.benchmarks.convolutions import NetworkShape
    from contnorm.benchmarks.measure import describe_environment, measure_speed


__all__ = [
    "NetworkShape",
    "describe_environment",
    "measure_speed",
]

_NAMES_BY_MODULE = {
    "contnorm.benchmarks.convolutions": ("NetworkShape",),
    "contnorm.benchmarks.measure": (
        "describe_environment",
        "measure_speed",
    ),
}
__getattr__, __dir__ = lazy_names(__name__, _NAMES_BY_MODULE, extra="bench")
