"""NumPy, imported on first use, since commands that only read records do not use it.

Modules that such commands import write ``from contnorm.bench.lazy_numpy import NDArray, np``. A type alias made of
``np`` is a string there, since its evaluation would be a use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["NDArray", "np"]


class _LazyModule:
    """Stands for a module. The first access of an attribute imports the module; the attribute is then copied here."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), attribute)
        setattr(self, attribute, value)  # later accesses are as fast as those of the module
        return value


if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    np = _LazyModule("numpy")

    class NDArray:
        """Stands for `numpy.typing.NDArray` in annotations, which are not evaluated in general."""

        def __class_getitem__(cls, dtype: Any) -> Any:
            return Any
