"""Speed benchmarks of layers, training steps and whole runs, compared with torch's own layers.

Public names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contnorm.benchmarks.measure import describe_environment, measure_speed


__all__ = [
    "describe_environment",
    "measure_speed",
]

_NAMES_BY_MODULE = {
    "contnorm.benchmarks.measure": (
        "describe_environment",
        "measure_speed",
    ),
}
_MODULE_BY_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(
            f"module 'contnorm.benchmarks' has no attribute {name!r}. Public names: {', '.join(__all__)}."
        )
    return getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
