"""Public names of a package that are imported on first use, so that importing the package is quick."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    package: str, names_by_module: Mapping[str, Sequence[str]], submodules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that imports its public names on first use.

    Args:
        package: Name of the package.
        names_by_module: The public names of each module.
        submodules: Submodules that are public themselves.

    Example:
        >>> getattr_, dir_ = lazy_names("json", {"json.decoder": ["JSONDecoder"]}, ["scanner"])
        >>> getattr_("JSONDecoder").__name__, dir_()
        ('JSONDecoder', ['JSONDecoder', 'scanner'])
    """
    module_of = {name: module for module, names in names_by_module.items() for name in names}
    public = sorted([*module_of, *submodules])

    def get(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}. Public names: {', '.join(public)}.")
        return getattr(importlib.import_module(module_of[name]), name)

    return get, lambda: public
