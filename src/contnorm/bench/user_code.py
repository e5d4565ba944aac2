"""User code, named as ``path/to/file.py:Name``, ``python:Name`` or as registered: trust, hash and loading.

A name with a file refers to an object in that file, which may import modules of the file's folder. The Python API also
takes objects directly (`python_objects`). One that is defined at the top level of a file gets the name of the file, so
it is the same run as by that name; any other has a name that begins with ``python:``, which exists in the program that
passes the object only. A program or an installed package can also register an object under a name
(`contnorm.bench.components`).

Records, notes of stopped runs, recipes and settings files can name code. Such a file may come from anyone, so a name
in it is no permission: commands execute code only if the user names its file on the command line (`only_trusted`). A
Python program that passes a name to the package chooses the file itself, and is not restricted.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import secrets
import shlex
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from contnorm.bench.code_hashes import content_hash, definition_file, definition_hash, file_hash
from contnorm.bench.components import find_component, registered
from contnorm.bench.config.schema import flatten_settings
from contnorm.bench.local_imports import code_folders, imported_files, is_local, module_folders
from contnorm.errors import UserCodeError, UserError
from contnorm.plugins import has_additions
from contnorm.registry import NORMS

__all__ = [
    "PYTHON",
    "PythonObject",
    "breaks_in",
    "check_files",
    "check_module_names",
    "code_files",
    "code_hash",
    "forget_imports",
    "has_run",
    "imported_modules",
    "is_file_code",
    "is_python",
    "is_trusted",
    "is_user_code",
    "load_user_code",
    "loaded_modules",
    "loading_user_code",
    "only_trusted",
    "python_object",
    "python_objects",
    "require_trust",
    "trusted_files",
    "untrusted",
    "untrusted_code",
    "user_code_error",
    "user_code_is_loading",
]

PYTHON = "python:"  # prefix of the names of objects that are defined in no file


@dataclass(frozen=True)
class PythonObject:
    """An object that a Python program passes as a network or a strategy.

    Attributes:
        value: The object.
        code: The hash that identifies it in a run's settings; None if its name alone does.
    """

    value: object
    code: str | None = None


_objects: ContextVar[Mapping[str, PythonObject] | None] = ContextVar("python_objects", default=None)


@contextmanager
def python_objects(objects: Mapping[str, PythonObject]) -> Iterator[None]:
    """Make objects available under their names, in place of code that is loaded from files.

    Example:
        >>> with python_objects({"python:net": PythonObject(len)}):
        ...     load_user_code("python:net", "model")
        <built-in function len>
    """
    token = _objects.set({**(_objects.get() or {}), **objects})
    try:
        yield
    finally:
        _objects.reset(token)


def python_object(name: str) -> PythonObject | None:
    """Return the object that a program passed under a name; None if there is none."""
    return (_objects.get() or {}).get(name)


# Modules that user code imported, with their file and its hash at the time of the import.
_imported: dict[str, tuple[Path, str]] = {}

_loading: ContextVar[bool] = ContextVar("loading_user_code", default=False)

_NO_FOLDER = os.path.join(tempfile.gettempdir(), f"contnorm-{secrets.token_hex(16)}")  # never created


_PREFIX = "contnorm_own_"  # of the modules that files of user code are executed as


def has_run() -> bool:
    """Whether this process has executed a file of user code, or has components of a program or a plugin."""
    return has_additions() or any(name.startswith(_PREFIX) for name in sys.modules)


def is_user_code(name: str) -> bool:
    """Whether a name refers to user code: a file, a Python object, or a registered component.

    Example:
        >>> is_user_code("mine.py:Net"), is_user_code("python:net"), is_user_code("resnet18")
        (True, True, False)
    """
    return is_file_code(name) or name.startswith(PYTHON) or registered(name) is not None


def is_file_code(name: str) -> bool:
    """Whether a name refers to an object in a file."""
    return ".py:" in name and not name.startswith(PYTHON)


def code_hash(name: str, what: str = "") -> str | None:
    """Return the hash of the file that a name refers to and of the local modules it imports.

    It is None for names of the package, and if there is no such file. Editing any of the files changes the identity of
    the run. For a file without local imports it is the hash of the file alone. Nothing is executed.

    Args:
        name: The name.
        what: The kind of a registered component, such as "memory"; empty for any.

    Example:
        >>> code_hash("er") is None
        True
    """
    if not is_user_code(name):
        return None
    known = python_object(name)
    if known is not None:
        return known.code
    component = None if is_file_code(name) else registered(name, what)
    if component is not None:
        return component.code or definition_hash(component.load())
    path = _path(name)
    if not path.is_file():
        return None
    return file_hash(path)


def code_files(values: Mapping[str, Any]) -> list[Path]:
    """Return the files of user code that nested settings name.

    Example:
        >>> code_files({"strategy": {"name": "er"}, "model": {"name": "nets/mine.py:make"}})
        [PosixPath('nets/mine.py')]
    """
    flat = flatten_settings(values)
    names = [flat.get(key) for key in ("strategy.name", "memory.kind", "model.name", "norm.name")]
    return [_path(name) for name in names if isinstance(name, str) and is_file_code(name)]


def untrusted_code(name: str, what: str) -> str:
    """Return why the user code that a name refers to may not be executed; empty if it may, or if it is no user code."""
    if not is_file_code(name) or python_object(name) is not None:
        return ""
    return untrusted(_path(name), what, name)


def load_user_code(name: str, what: str) -> object:
    """Execute a file of user code, if it is trusted, and return the object that a name refers to.

    Args:
        name: ``path/to/file.py:Name``.
        what: The kind of object for error messages, such as "strategy".

    Raises:
        UserError: If the file is untrusted, missing, fails, or imports local modules that `code_hash` does not cover.
    """
    known = python_object(name)
    if known is not None:
        return known.value
    if is_python(name):
        raise UserError(
            f"{what} {name!r}: was passed as a Python object, which is not available here. Run the program that passed "
            f"it again."
        )
    if not is_file_code(name):
        component = find_component(what, name)
        if component is None:
            raise UserError(
                f"{what} {name!r}: is not known here. Install the package that adds it, or run the program that "
                f"registers it."
            )
        return component.load()
    path, attribute = _path(name), name.rpartition(":")[2]
    require_trust(path, what, name)
    module_name = _module_name(path)
    if not path.is_file():
        raise UserError(f"{what} {name!r}: there is no file {path}.")
    _ignore_stored_bytecode()
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None  # its name ends in .py
    files = imported_files(path)
    _forget_edited(files)
    _open_folder(path, f"{what} {name!r}")
    module = importlib.util.module_from_spec(spec)
    before = set(sys.modules)
    sys.modules[module_name] = module
    try:
        with user_code_is_loading():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        hidden = _hidden_import(error, path)
        if hidden is not None:
            raise _uncovered(f"{what} {name!r}", hidden) from error
        raise user_code_error(error, what, name, "it can't be loaded") from error
    _register_imports(set(sys.modules) - before - {module_name}, files, path, f"{what} {name!r}")
    if not hasattr(module, attribute):
        raise UserError(f"{what} {name!r}: {path} has no {attribute}.")
    return getattr(module, attribute)


@contextmanager
def user_code_is_loading() -> Iterator[None]:
    """Mark that user code is being loaded, for `loading_user_code`."""
    token = _loading.set(True)
    try:
        yield
    finally:
        _loading.reset(token)


def loading_user_code() -> bool:
    """Whether a file of user code is being loaded. A script that runs an experiment must not start it again then."""
    return _loading.get()


def loaded_modules(name: str) -> dict[str, ModuleType]:
    """Return the loaded modules of the user code that a name refers to: its file (latest load) and its imports."""
    if python_object(name) is not None or not is_file_code(name):
        return {}
    path = _path(name)
    files = {path.resolve(), *imported_files(path)}
    names = {_module_name(path), *(module for module, (file, _) in _imported.items() if file in files)}
    return {module: sys.modules[module] for module in sorted(names) if module in sys.modules}


def imported_modules() -> dict[str, ModuleType]:
    """Return the local modules that user code has imported in this process."""
    return {name: sys.modules[name] for name in _imported if name in sys.modules}


def forget_imports() -> None:
    """Remove the local modules that user code has imported, so that they are loaded again on the next import."""
    for name in _imported:
        sys.modules.pop(name, None)
    _imported.clear()


class _FolderFinder(MetaPathFinder):
    """Finds the modules that user code imports from its own folder, before those on ``sys.path``.

    It knows only names that appear in import statements of user code, so a folder hides no other modules of the same
    names, as it would at the front of ``sys.path``.
    """

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}  # by top-level module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        folder = self.folders.get(fullname)
        if path is not None or folder is None:
            return None
        return PathFinder.find_spec(fullname, [str(folder)])


_finder = _FolderFinder()


def _open_folder(path: Path, what: str) -> None:
    """Make the modules in the folder of user code importable, also for imports in its functions.

    Raises:
        UserError: If another module of the same name is loaded already, which Python would use instead.
    """
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    own_folders = code_folders(path)
    for module, folder in module_folders(path).items():
        _finder.folders.pop(module, None)
        if folder in own_folders:
            _finder.folders[module] = folder
        loaded = getattr(sys.modules.get(module), "__file__", None)
        if loaded is None or _is_in(folder, Path(loaded).resolve()):
            continue
        if module in _imported:
            forget_imports()  # of user code in another folder
        elif folder in own_folders:
            raise UserError(
                f"{what}: imports the module {module} of {folder}, but {loaded} is loaded under that name already. "
                f"Rename the module."
            )


def _is_in(folder: Path, file: Path) -> bool:
    """Whether a file is that of a top-level module or package in a folder."""
    return folder == (file.parents[1] if file.stem == "__init__" else file.parent)


def check_module_names(files: Iterable[Path]) -> None:
    """Raise `UserError` if files of user code in one run import different modules of the same name."""
    known: dict[str, Path] = {}
    for file in dict.fromkeys(files):
        for module, folder in module_folders(file).items():
            other = known.setdefault(module, folder)
            if other != folder:
                raise UserError(
                    f"{file}: imports the module {module} of {folder}, and other code of this run that of {other}. "
                    f"Rename one of them."
                )


def _ignore_stored_bytecode() -> None:
    """Make Python compile user code from its source, instead of reading bytecode from ``__pycache__`` folders.

    Python accepts such bytecode if size and modification second of the source match, or without a check if its header
    says so. It may therefore be of an earlier version, or of other code than the file that the user trusts.
    """
    sys.dont_write_bytecode = True
    sys.pycache_prefix = _NO_FOLDER  # not restored: functions of user code may import modules later


def _module_name(path: Path) -> str:
    """Return a unique module name: dataclasses and pickle look modules up by name, and two files may share a name."""
    return f"{_PREFIX}{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"


def _forget_edited(files: dict[Path, str]) -> None:
    """Remove the loaded modules if a file was edited since; Python would not notice."""
    known = [(file, content) for file, content in _imported.values() if file in files]
    if any(content_hash(file) != content for file, content in known):
        forget_imports()


def _register_imports(names: set[str], files: dict[Path, str], path: Path, what: str) -> None:
    """Register the local modules that were just imported; rejects those that `code_hash` does not cover."""
    located = {name: Path(file).resolve() for name in names if (file := getattr(sys.modules[name], "__file__", None))}
    local = {name: file for name, file in located.items() if is_local(file, path)}
    uncovered = next((file for file in local.values() if file not in files), None)
    if uncovered is not None:
        for name in local:  # or a second attempt would not detect the import
            del sys.modules[name]
        raise _uncovered(what, uncovered)
    _imported.update({name: (file, content_hash(file)) for name, file in local.items()})


def _uncovered(what: str, file: Path) -> UserError:
    return UserError(
        f"{what}: imports {file} without an import statement that can be followed, so changes of it would not be "
        f"detected. Use import statements, and set PYTHONPATH instead of changing sys.path."
    )


def _hidden_import(error: BaseException, path: Path) -> Path | None:
    """Return the file in the folder of user code that a failed import by a computed name refers to; None if none."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    file = path.resolve().parent / f"{(name or '').replace('.', '/')}.py"
    return file if name and file.is_file() else None


def user_code_error(error: BaseException, what: str, name: str, when: str) -> UserCodeError:
    """Return an error of user code as one line: the file, the line, and Python's message."""
    path = _path(name) if is_file_code(name) else _registered_file(name, what)
    line = None if path is None else _line(error, path)
    where = "" if path is None else f" {path}{f', line {line}' if line else ''}:"
    message = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    return UserCodeError(f"{what} {name!r}: {when}:{where} {type(error).__name__}: {message}")


def breaks_in(error: BaseException, name: str) -> bool:
    """Whether the traceback of an error contains the file that a name refers to."""
    path = _path(name) if is_file_code(name) else _registered_file(name, "")
    return path is not None and _line(error, path) is not None


def _registered_file(name: str, what: str) -> Path | None:
    component = registered(name, what)
    if component is None and what in ("", "norm") and name in NORMS:
        return next((definition_file(layer) for layer in NORMS[name].layers.values()), None)
    return None if component is None or isinstance(component.target, str) else definition_file(component.target)


def is_python(name: str) -> bool:
    """Whether a name refers to an object that a Python program passed, and that is defined in no file."""
    return name.startswith(PYTHON)


def _path(name: str) -> Path:
    return Path(name.rpartition(":")[0])


def _line(error: BaseException, path: Path) -> int | None:
    """Return the line of a file in the traceback of an error; None if the file is not in it."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).resolve() == path.resolve():
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno for f in reversed(frames) if Path(f.filename).resolve() == path.resolve()), None)


_allowed: ContextVar[frozenset[Path] | None] = ContextVar("allowed", default=None)  # None: no restriction


@contextmanager
def only_trusted(files: Iterable[Path] | None) -> Iterator[None]:
    """Restrict the execution of user code to these files; None removes the restriction.

    Example:
        >>> with only_trusted([Path("net.py")]):
        ...     is_trusted(Path("net.py")), is_trusted(Path("other.py"))
        (True, False)
    """
    token = _allowed.set(None if files is None else frozenset(_absolute(file) for file in files))
    try:
        yield
    finally:
        _allowed.reset(token)


def trusted_files() -> frozenset[Path] | None:
    """Return the files that may be executed, for use in another process; None if there is no restriction."""
    return _allowed.get()


def is_trusted(path: Path) -> bool:
    """Whether a file may be executed."""
    allowed = _allowed.get()
    return allowed is None or _absolute(path) in allowed


def untrusted(path: Path, what: str, name: str) -> str:
    """Return why a file may not be executed, and how to allow it; empty if it may."""
    if is_trusted(path):
        return ""
    # The name is untrusted: it must not contain terminal control codes, or shell syntax that acts when it is copied.
    quoted = shlex.quote(str(path)) if str(path).isprintable() else ascii(str(path))
    return (
        f"{what} {name!r}: is code in {quoted}, which is not executed without your consent. If you trust that file, "
        f"add --trust-code {quoted} (in Python: trusted=[...])."
    )


def require_trust(path: Path, what: str, name: str) -> None:
    """Raise `UserError` if a file may not be executed."""
    reason = untrusted(path, what, name)
    if reason:
        raise UserError(reason)


def check_files(files: Iterable[Path]) -> list[Path]:
    """Return the files of --trust-code; raises `UserError` if one does not exist."""
    paths = list(files)
    for path in paths:
        if not path.is_file():
            raise UserError(f"--trust-code {path}: there is no such file. Name a Python file, such as net.py.")
    return paths


def _absolute(path: Path) -> Path:
    return path.resolve()  # "~" is not expanded, as when the file is loaded
