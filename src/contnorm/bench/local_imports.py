"""The local modules that a file of Python code imports, directly or through each other, from its text alone.

Nothing is executed or imported. A module is local where it is found in the folder of the file or on the module search
path, outside the standard library, installed packages and this package.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

__all__ = ["imported_files", "is_installed", "is_local", "search_path", "use_search_path"]

_PACKAGE = __name__.partition(".")[0]
_INSTALLED = {"site-packages", "dist-packages"}
_SUFFIXES = (".py", *EXTENSION_SUFFIXES)

# As it was when the process began: user code may change sys.path as it is loaded, and what a file imports must not
# depend on whether it was loaded before.
_search_path: tuple[str, ...] = tuple(sys.path)


def search_path() -> tuple[str, ...]:
    """The module search path that local modules are looked for on, to pass on to another process."""
    return _search_path


def use_search_path(path: tuple[str, ...]) -> None:
    """Look for local modules on the path of the process that started this one."""
    global _search_path
    _search_path = path


def imported_files(path: Path) -> dict[Path, str]:
    """The files of the local modules that a file imports, each with its module name; without the file itself.

    A module is what comes first on the search path. One of that name in the folder of the file is listed too, since
    the file may put its folder first; but none that is named as a module of the standard library.
    """
    start = path.resolve()
    places = _Places.of(start)
    modules: dict[Path, str] = {}
    seen: set[str] = set()
    pending = [(start, "")]
    while pending:
        file, package = pending.pop()
        names = _names_in(file, package) - seen
        seen |= names
        for name in sorted(names):
            for module, source in places.located(name):
                if source not in modules and source != start:
                    modules[source] = module
                    parent = module if source.stem == "__init__" else module.rpartition(".")[0]
                    pending.append((source, parent))
    return modules


def is_local(path: Path, code_file: Path) -> bool:
    """Whether a loaded module's file is local to a file of user code: below its folder, or on the search path as it is.

    Hidden folders below it, such as caches, don't count.
    """
    if is_installed(path):
        return False
    folder = code_file.resolve().parent
    if path.is_relative_to(folder):
        return not any(part.startswith(".") for part in path.relative_to(folder).parts)
    return any(path.is_relative_to(root) for root in map(_folder, sys.path) if root is not None)


def is_installed(path: Path) -> bool:
    """Whether a file belongs to the standard library, an installed package or this package.

    Example:
        >>> is_installed(Path(ast.__file__)), is_installed(Path("net.py").resolve())
        (True, False)
    """
    if not _INSTALLED.isdisjoint(path.parts):
        return True
    return any(path.is_relative_to(folder) for folder in _fixed_folders())


@cache
def _fixed_folders() -> tuple[Path, ...]:
    named = (sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "scripts"))
    return (Path(__file__).resolve().parents[1], *(Path(folder).resolve() for folder in named))


@dataclass(frozen=True)
class _Places:
    """Where modules are looked for: the search path, and the folders that the code itself is in."""

    search_path: tuple[Path, ...]
    own: tuple[Path, ...]

    @classmethod
    def of(cls, file: Path) -> _Places:
        package = file.parent
        while (package / "__init__.py").is_file() and package.parent != package:
            package = package.parent  # the file is in a package, which is imported from the folder above it
        return cls(tuple(filter(None, map(_folder, _search_path))), tuple(dict.fromkeys([file.parent, package])))

    def located(self, name: str) -> list[tuple[str, Path]]:
        """The local files that importing a dotted name may load, each with the name of its module."""
        top = name.partition(".")[0]
        if top == _PACKAGE:
            return []
        # A folder without __init__.py is a package only where nothing else on the path has its name.
        having = [root for root in self.search_path if _sources(root, top)]
        having = having or [root for root in self.search_path if (root / top).is_dir()]
        own = () if top in sys.stdlib_module_names else self.own
        roots = dict.fromkeys([*having[:1], *own])
        return [pair for root in roots if not is_installed(root) for pair in _located(root, name)]


def _folder(entry: str) -> Path | None:
    """An entry of the search path as a folder; None where it is none, such as an archive."""
    path = Path(entry)  # an empty entry is the current folder
    return path.resolve() if path.is_dir() else None


def _sources(folder: Path, name: str) -> list[Path]:
    stem = os.path.join(folder, name)
    candidates = (os.path.join(stem, "__init__.py"), *(f"{stem}{suffix}" for suffix in _SUFFIXES))
    return [Path(candidate).resolve() for candidate in candidates if os.path.isfile(candidate)]


def _located(root: Path, name: str) -> Iterator[tuple[str, Path]]:
    """The files below a folder that importing a dotted name loads: of its packages, and its own."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        *above, last = parts[:count]
        folder = root.joinpath(*above)
        for source in _sources(folder, last):
            if not is_installed(source):
                yield ".".join(parts[:count]), source
        if not (folder / last).is_dir():
            return


def _names_in(file: Path, package: str) -> frozenset[str]:
    """The absolute names in the import statements of a file; none where it can't be read as Python."""
    if file.suffix != ".py":
        return frozenset()
    try:
        return _names(file.read_bytes(), package)
    except OSError:
        return frozenset()


@cache
def _names(content: bytes, package: str) -> frozenset[str]:
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, package)
            if base is not None:
                names.update([base, *(f"{base}.{alias.name}" for alias in node.names)])
    return frozenset(name.strip(".") for name in names if name.strip("."))


def _base(node: ast.ImportFrom, package: str) -> str | None:
    """The absolute name of what a ``from`` statement imports from; None where it leads out of every package."""
    if not node.level:
        return node.module or ""
    parts = package.split(".") if package else []
    if node.level > len(parts):
        return None
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
