"""The local modules that a file of Python code imports, directly or through each other, from its text alone.

Nothing is executed or imported. A module is local where it is found in the folder of the file or on the module search
path, outside the standard library, installed packages and this package.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

__all__ = ["imported_files", "is_installed", "is_local", "search_path", "use_search_path"]

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

    Every file that an import statement could mean is listed, also where another one of that name comes first on the
    search path.
    """
    start = path.resolve()
    roots = _roots(start)
    modules: dict[Path, str] = {}
    pending = [(start, "")]
    while pending:
        file, package = pending.pop()
        for name in sorted(_names_in(file, package)):
            for module, source in (pair for root in roots for pair in _located(root, name)):
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
    return (Path(__file__).resolve().parent, *(Path(folder).resolve() for folder in named))


def _roots(file: Path) -> list[Path]:
    """The folders that absolute imports of a file start from."""
    package = file.parent
    while (package / "__init__.py").is_file() and package.parent != package:
        package = package.parent  # the file is in a package, which is imported from the folder above it
    folders = [file.parent, package, *filter(None, map(_folder, _search_path))]
    return [root for root in dict.fromkeys(folders) if not is_installed(root)]


def _folder(entry: str) -> Path | None:
    """An entry of the search path as a folder; None where it is none, such as an archive."""
    path = Path(entry)  # an empty entry is the current folder
    return path.resolve() if path.is_dir() else None


def _located(root: Path, name: str) -> Iterator[tuple[str, Path]]:
    """The files below a folder that importing a dotted name loads: of its packages, and its own."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        *above, last = parts[:count]
        folder = root.joinpath(*above)
        candidates = [folder / last / "__init__.py", *(folder / f"{last}{suffix}" for suffix in _SUFFIXES)]
        for candidate in candidates:
            if candidate.is_file() and not is_installed(candidate.resolve()):
                yield ".".join(parts[:count]), candidate.resolve()
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
