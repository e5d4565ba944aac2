"""Static analysis of the local modules that a Python file imports, directly or indirectly.

Nothing is executed or imported. A module is local if it is in the folder of the file or on the module search path, and
is not part of the standard library, an installed package or this package.
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

__all__ = [
    "code_folders",
    "imported_files",
    "is_installed",
    "is_local",
    "module_folders",
    "search_path",
    "use_search_path",
]

_PACKAGE = __name__.partition(".")[0]
_INSTALLED = {"site-packages", "dist-packages"}
_SUFFIXES = (".py", *EXTENSION_SUFFIXES)

# The path at the start of the process: user code may change sys.path when it is loaded, and the result for a file must
# not depend on whether it was loaded before.
_search_path: tuple[str, ...] = tuple(sys.path)


def search_path() -> tuple[str, ...]:
    """Return the search path for local modules, for use in another process."""
    return _search_path


def use_search_path(path: tuple[str, ...]) -> None:
    """Set the search path for local modules, to that of the parent process."""
    global _search_path
    _search_path = path


def imported_files(path: Path) -> dict[Path, str]:
    """Return the files of the local modules that a file imports, with their module names; without the file itself.

    A module of the search path and one of the same name in the folder of the file are both listed, since it depends on
    how the file is loaded which of them it imports; except for names of the standard library.
    """
    start = path.resolve()
    roots = _Roots.of(start)
    modules: dict[Path, str] = {}
    seen: set[str] = set()
    pending = [(start, "")]
    while pending:
        file, package = pending.pop()
        names = _names_in(file, package) - seen
        seen |= names
        for name in sorted(names):
            for module, source in roots.locate(name):
                if source not in modules and source != start:
                    modules[source] = module
                    parent = module if source.stem == "__init__" else module.rpartition(".")[0]
                    pending.append((source, parent))
    return modules


def module_folders(path: Path) -> dict[str, Path]:
    """Return the top-level local modules that a file imports when it is loaded as user code, with their folders.

    Modules in the folder of the file (or of its package) come before those on the search path, except for names of the
    standard library.
    """
    roots = _Roots.of(path.resolve())
    tops = sorted({module.partition(".")[0] for module in imported_files(path).values()})
    return {top: folder for top in tops if (folder := roots.first(top)) is not None and not is_installed(folder)}


def code_folders(path: Path) -> tuple[Path, ...]:
    """Return the folder of a file and, for a file in a package, the folder of the outermost package."""
    return _Roots.of(path.resolve()).code_folders


def is_local(path: Path, code_file: Path) -> bool:
    """Whether the file of a loaded module is local to a file of user code: in its folder, or on ``sys.path``.

    Hidden subfolders, such as caches, are ignored.
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
class _Roots:
    """The folders that modules are searched in: the search path, and the folders of the code itself."""

    search_path: tuple[Path, ...]
    code_folders: tuple[Path, ...]

    @classmethod
    def of(cls, file: Path) -> _Roots:
        package = file.parent
        while (package / "__init__.py").is_file() and package.parent != package:
            package = package.parent  # the file is in a package, which is imported from its parent folder
        return cls(tuple(filter(None, map(_folder, _search_path))), tuple(dict.fromkeys([file.parent, package])))

    def locate(self, name: str) -> list[tuple[str, Path]]:
        """Return the local files that importing a dotted name may load, with their module names."""
        top = name.partition(".")[0]
        if top == _PACKAGE:
            return []
        roots = dict.fromkeys([*self._matches(self.search_path, top)[:1], *self._code_folders(top)])
        return [pair for root in roots if not is_installed(root) for pair in _files_below(root, name)]

    def first(self, top: str) -> Path | None:
        """Return the folder that code which is loaded from a file imports a top-level module from; None if none."""
        return next(iter(self._matches((*self._code_folders(top), *self.search_path), top)), None)

    def _code_folders(self, top: str) -> tuple[Path, ...]:
        return () if top in sys.stdlib_module_names else self.code_folders

    @staticmethod
    def _matches(roots: tuple[Path, ...], top: str) -> list[Path]:
        # A folder without __init__.py is a package only if nothing else on the path has its name.
        matches = [root for root in roots if _sources(root, top)]
        return matches or [root for root in roots if (root / top).is_dir()]


def _folder(entry: str) -> Path | None:
    """Return an entry of the search path as a folder; None if it is not a folder, such as an archive."""
    path = Path(entry)  # an empty entry means the current folder
    return path.resolve() if path.is_dir() else None


def _sources(folder: Path, name: str) -> list[Path]:
    stem = os.path.join(folder, name)
    candidates = (os.path.join(stem, "__init__.py"), *(f"{stem}{suffix}" for suffix in _SUFFIXES))
    return [Path(candidate).resolve() for candidate in candidates if os.path.isfile(candidate)]


def _files_below(root: Path, name: str) -> Iterator[tuple[str, Path]]:
    """Yield the files below a folder that importing a dotted name loads: of its parent packages, and of the module."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        *parents, last = parts[:count]
        folder = root.joinpath(*parents)
        for source in _sources(folder, last):
            if not is_installed(source):
                yield ".".join(parts[:count]), source
        if not (folder / last).is_dir():
            return


def _names_in(file: Path, package: str) -> frozenset[str]:
    """Return the absolute names in the import statements of a file; empty if it is not valid Python."""
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
    """Return the absolute name of the module of a ``from`` statement; None if it is above the top-level package."""
    if not node.level:
        return node.module or ""
    parts = package.split(".") if package else []
    if node.level > len(parts):
        return None
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
