"""Public names of a package that are imported on first use, so that importing the package is quick.

Names of modules that were renamed are looked up after an import has failed, and cost nothing before.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["RenamedModules", "lazy_names"]


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


class RenamedModules:
    """The last finder of the import system, which says where a module of an earlier version is now.

    Example:
        >>> import contnorm.catalog
        Traceback (most recent call last):
        ModuleNotFoundError: contnorm.catalog was moved to contnorm.registry in version 0.2. ...
    """

    @classmethod
    def install(cls) -> None:
        """Add the finder after all others, so that it is asked only about modules that do not exist."""
        if cls not in sys.meta_path:
            sys.meta_path.append(cls)

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        """Raise an error if a renamed module is being imported; find nothing otherwise.

        A search that is no import, such as ``importlib.util.find_spec``, finds nothing, as it does for any module that
        does not exist.
        """
        if not name.startswith("contnorm."):
            return
        importing = _calls_of_import()
        if "_find_and_load_unlocked" not in importing[:1]:
            return
        message = importlib.import_module("contnorm.renamed_modules").rename_message(name)
        if message is not None:
            # `from contnorm import catalog` drops the message of an error that has a name.
            raise ModuleNotFoundError(message, name=None if "_handle_fromlist" in importing else name)


def _calls_of_import() -> list[str]:
    """Return the functions of the import system that have led to the search of a finder, from the last to the first."""
    frame = sys._getframe(2).f_back  # of what called `_find_spec` of the import system, which calls the finder
    names = []
    while frame is not None and frame.f_code.co_filename == "<frozen importlib._bootstrap>":
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names
