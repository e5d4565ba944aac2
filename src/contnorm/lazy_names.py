"""Public names of a package that are imported on first use, so that importing the package is quick."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str,
    names_by_module: Mapping[str, Sequence[str]],
    submodules: Sequence[str] = (),
    extra: str | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that imports its public names on first use.

    Args:
        package: Name of the package.
        names_by_module: The public names of each module.
        submodules: Submodules that are public themselves.
        extra: The optional dependencies that the package needs, which an error about a missing library names.

    Example:
        >>> getattr_, dir_ = lazy_names("json", {"json.decoder": ["JSONDecoder"]}, ["scanner"])
        >>> getattr_("JSONDecoder").__name__, dir_()
        ('JSONDecoder', ['JSONDecoder', 'scanner'])
    """
    module_of = {name: module for module, names in names_by_module.items() for name in names}
    public = sorted([*module_of, *submodules])

    def get(name: str) -> Any:
        if name not in public:
            raise AttributeError(f"module {package!r} has no attribute {name!r}. Public names: {', '.join(public)}.")
        try:
            module = importlib.import_module(module_of.get(name, f"{package}.{name}"))
        except ModuleNotFoundError as error:
            if extra is None or error.name is None or error.name.partition(".")[0] == "contnorm":
                raise
            message = f'{package}.{name} needs {error.name}. Install it with: pip install "contnorm[{extra}]"'
            raise ImportError(message, name=error.name) from error
        return module if name in submodules else getattr(module, name)

    return get, lambda: public
