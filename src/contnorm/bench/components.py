"""Components of runs that this package does not have: in files, registered under a name, or passed as objects.

A component is a strategy, a memory, a network (``"model"``), a norm or a data set. Its name in the settings is

- ``path/to/file.py:Name``, for an object in a file, which may import modules of the file's folder;
- a name that a program or an installed plugin has registered (`contnorm.bench.register`);
- ``python:...``, for an object that a program passes and that no file defines. It exists in that program only.

A run is identified by the hash of the code as well. Commands load only what is named on the command line: what a
record or a settings file names is never executed.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

from contnorm.errors import UserCodeError, UserError, usable
from contnorm.registry import NORMS, NormInfo, Origin, add_norm, load_plugins

if TYPE_CHECKING:
    from contnorm.bench.config.schema import RunConfig

__all__ = [
    "PYTHON",
    "Component",
    "Kind",
    "add_component",
    "code_hash",
    "components",
    "components_of",
    "definition_hash",
    "file_hash",
    "find_component",
    "has_user_frame",
    "is_file_code",
    "is_installed",
    "is_user_code",
    "load_component",
    "loading_user_code",
    "own_code",
    "remove_component",
    "share_components",
    "user_code_error",
    "user_code_is_loading",
    "user_parts",
]

THIS_PROCESS = Origin()
PYTHON = "python:"  # prefix of the names of objects that are defined in no file
Kind = Literal["strategy", "memory", "model", "norm", "dataset"]


@dataclass(frozen=True, eq=False)
class Component:
    """A component that is registered under a name, or passed as an object.

    Attributes:
        kind: Its kind.
        name: Its name in the settings of runs.
        target: The object; or ``"module:Name"``, which is imported on first use.
        summary: One-line description for listings.
        origin: Where it comes from.
        code: The hash of the code of an object that is passed, or of a component in the process that registered it.
    """

    kind: Kind
    name: str
    target: object
    summary: str = ""
    origin: Origin = THIS_PROCESS
    code: str | None = None

    def load(self) -> Any:
        """Return the object; raises `UserError` if it can't be imported."""
        if not isinstance(self.target, str):
            return self.target
        module, _, name = self.target.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except Exception as error:  # code of another package raises errors of any type
            raise UserError(
                f"{self.kind} {self.name!r} of {self.origin}: {self.target} can't be imported "
                f"({type(error).__name__}: {error})."
            ) from error


_registered: dict[tuple[str, str], Component] = {}  # by kind and name
_passed: WeakValueDictionary[tuple[str, str, str | None], Component] = WeakValueDictionary()  # and hash of the code


def add_component(component: Component) -> None:
    """Add a component to those of this process; it replaces one of the same kind and name.

    One that a program passes is kept as long as something else holds the `Component`.
    """
    if component.name.startswith(PYTHON) or is_file_code(component.name):
        _passed[component.kind, component.name, component.code] = component
    elif isinstance(component.target, NormInfo):
        if component.name not in NORMS:
            add_norm(component.target)
    else:
        _registered[component.kind, component.name] = component


def remove_component(kind: Kind, name: str) -> None:
    """Remove a registered component; without effect if there is none of this name."""
    _registered.pop((kind, name), None)


def components(kind: str) -> list[Component]:
    """Return the registered components of a kind, without loading plugins."""
    return [component for component in _registered.values() if component.kind == kind]


def find_component(kind: str, name: str, code: str | None = None) -> Component | None:
    """Return a registered component, or one that was passed; None if there is none.

    Plugins are loaded if the name is not known yet: call it for names that are not built in.
    """
    if name.startswith(PYTHON) or is_file_code(name):
        return _passed.get((kind, name, code))
    if (kind, name) not in _registered:
        load_plugins()
    return _registered.get((kind, name))


def is_file_code(name: str) -> bool:
    """Whether a name refers to an object in a file."""
    return ".py:" in name and not name.startswith(PYTHON)


def is_user_code(name: str) -> bool:
    """Whether a name refers to user code: a file, a Python object, or a registered component.

    Example:
        >>> is_user_code("mine.py:Net"), is_user_code("python:net"), is_user_code("resnet18")
        (True, True, False)
    """
    return ".py:" in name or name.startswith(PYTHON) or any(name == known for _, known in _registered)


def user_parts(config: RunConfig) -> dict[Kind, tuple[str, str | None]]:
    """Return the name and the hash of the code of each component of a run that is user code."""
    parts: dict[Kind, tuple[str, str | None]] = {
        "strategy": (config.strategy.name, config.strategy.code),
        "memory": (config.memory.kind, config.memory.code),
        "model": (config.model.name, config.model.code),
        "norm": (config.norm.name, config.norm.code),
    }
    return {kind: (name, code) for kind, (name, code) in parts.items() if code is not None or is_user_code(name)}


def own_code(config: RunConfig) -> str:
    """Return the code of the user that settings of a record or a note name, for messages; empty if there is none.

    Such a file may come from somebody else, so what it names is not executed. Plugins are installed, and may be.
    """
    for kind, (name, _) in user_parts(config).items():
        if is_file_code(name) or name.startswith(PYTHON):
            return f"{kind} {name!r} is code of your own, which is not executed because a file names it"
    return ""


def components_of(config: RunConfig) -> list[Component]:
    """Return the components of a run, and its data set, that are registered or passed, for use in another process."""
    found = []
    for kind, (name, code) in user_parts(config).items():
        component = find_component(kind, name, code)
        if component is not None:
            found.append(component if component.code else replace(component, code=code))
        elif kind == "norm" and name in NORMS:
            found.append(Component("norm", name, NORMS[name], origin=NORMS[name].origin, code=code))
    dataset = _registered.get(("dataset", str(config.stream.source).partition("@")[0]))  # a digest of the data follows
    return found if dataset is None else [*found, dataset]


def share_components(components: Iterable[Component]) -> None:
    """Add the components of another process to those of this one."""
    for component in components:
        if component.kind != "dataset":  # data is sent, or loaded
            add_component(component)


def load_component(kind: Kind, name: str, code: str | None = None) -> Any:
    """Return the object that a name refers to. Its file is executed, unless the object was passed.

    Args:
        kind: The kind of object.
        name: Its name in the settings.
        code: The hash of its code, if it is known.

    Raises:
        UserError: If there is none, or if its code is not that of the hash.
    """
    component = find_component(kind, name, code)
    if component is None and is_file_code(name):
        path, _, attribute = name.rpartition(":")
        if code is not None and file_hash(Path(path)) != code:
            raise UserError(f"{kind} {name!r}: the file has changed since the run was started. Run it again.")
        try:
            module = _load_file(Path(path))
        except UserError as error:
            raise UserError(f"{kind} {name!r}: {error}") from error
        except (Exception, SystemExit) as error:
            raise user_code_error(error, kind, name, "it can't be loaded") from error
        if not hasattr(module, attribute):
            raise UserError(f"{kind} {name!r}: {path} has no {attribute}.")
        return getattr(module, attribute)
    if component is None:
        what = "was passed as a Python object" if name.startswith(PYTHON) else "is not known here"
        raise UserError(
            f"{kind} {name!r}: {what}. Run the program that passes or registers it, or install its package."
        )
    return component.load()


def code_hash(kind: Kind, name: str, code: str | None = None) -> str | None:
    """Return the hash of the code of a component; None for names of the package, and if it is not here.

    Args:
        kind: The kind of the component.
        name: Its name in the settings.
        code: The hash in the settings, which an object that is passed has.

    Example:
        >>> code_hash("strategy", "er") is None
        True
    """
    if name.startswith(PYTHON) or (kind, name, code) in _passed:
        return code
    if is_file_code(name):
        path = Path(name.rpartition(":")[0])
        return file_hash(path) if path.is_file() else None
    component = _registered.get((kind, name))
    if component is None or component.code is not None:
        return None if component is None else component.code
    return definition_hash(component.load())


def definition_hash(value: Any) -> str | None:
    """Return the hash that identifies the code of a function or class; None if it can't be identified."""
    identity = importlib.import_module("contnorm.bench.identity")  # it needs torch, which listings do not
    found: str | None = identity.definition_hash(value)
    return found


def _load_file(path: Path) -> ModuleType:
    """Execute a Python file, once for each content of it and of the modules in its folder that it imports."""
    digest = hashlib.sha256(f"{path.resolve()} {file_hash(path)}".encode()).hexdigest()[:12]
    name = f"contnorm_own_{path.stem}_{digest}"  # dataclasses and pickle look modules up by name
    if name in sys.modules:
        return sys.modules[name]
    for helper in _helpers:  # of the file that was loaded before: another folder may have one of the same name
        sys.modules.pop(helper, None)
    module, folder, before = ModuleType(name), str(path.resolve().parent), set(sys.modules)
    module.__file__ = str(path)
    sys.modules[name] = module
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        with user_code_is_loading():
            exec(compile(path.read_bytes(), path, "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(folder)
        new = {other: getattr(sys.modules[other], "__file__", None) for other in set(sys.modules) - before - {name}}
        _helpers[:] = [other for other, file in new.items() if file is not None and Path(file).is_relative_to(folder)]
    return module


_helpers: list[str] = []  # modules that the file which was loaded last has imported from its folder
_loading: list[bool] = []  # files of user code that are being loaded


@contextmanager
def user_code_is_loading() -> Iterator[None]:
    """Mark that user code is being loaded, for `loading_user_code`."""
    _loading.append(True)
    try:
        yield
    finally:
        _loading.pop()


def loading_user_code() -> bool:
    """Whether a file of user code is being loaded. A script that runs an experiment must not start it again then."""
    return bool(_loading)


def file_hash(path: Path) -> str:
    """Return the hash of a Python file and of the modules in its folder that it imports, directly or indirectly.

    Without such modules it is the hash of the file. Nothing is executed.

    Raises:
        UserError: If there is no such file.
    """
    with usable(path, "can't be read", "Name a Python file, such as net.py."):
        own = hashlib.sha256(path.read_bytes()).hexdigest()
    helpers = _imported_files(path.resolve())
    if not helpers:
        return own[:12]
    lines = [f"{name} {hashlib.sha256(helpers[name].read_bytes()).hexdigest()}" for name in sorted(helpers)]
    return hashlib.sha256("\n".join([own, *lines]).encode()).hexdigest()[:12]


def _imported_files(path: Path) -> dict[str, Path]:
    """Return the modules in the folder of a file that its import statements name, and those that these name."""
    found: dict[str, Path] = {}
    pending = [path]
    while pending:
        file = pending.pop()
        try:
            nodes = list(ast.walk(ast.parse(file.read_bytes())))
        except (SyntaxError, ValueError):  # reported when the file is loaded
            continue
        for base, name in _imports(nodes, file, path.parent):
            parts = name.split(".")
            for stem in (base.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)):
                for source in (stem.with_suffix(".py"), stem / "__init__.py"):
                    if source.is_file() and source != path and source not in found.values():
                        found[".".join(stem.relative_to(path.parent).parts)] = source
                        pending.append(source)
    return found


def _imports(nodes: Iterable[ast.AST], file: Path, folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the dotted names that are imported, each with the folder that it is relative to."""
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [(folder, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = file.parents[node.level - 1] if node.level else folder
            names = [(base, ".".join(filter(None, [node.module, alias.name]))) for alias in node.names]
        else:
            continue
        for base, name in names:
            is_local = base.is_relative_to(folder) and (base != folder or name.partition(".")[0] not in _STANDARD)
            if is_local:
                yield base, name


_STANDARD = sys.stdlib_module_names


@cache
def _installed_folders() -> tuple[Path, ...]:
    folders = (sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    return (Path(__file__).parents[1], *(Path(folder).resolve() for folder in folders))


def is_installed(file: str) -> bool:
    """Whether a file belongs to the standard library, an installed package or this package.

    Example:
        >>> is_installed(ast.__file__), is_installed("<stdin>"), is_installed("net.py")
        (True, False, False)
    """
    if file.startswith("<frozen "):
        return True
    path = Path(file).resolve()
    return "site-packages" in path.parts or any(path.is_relative_to(folder) for folder in _installed_folders())


def user_code_error(
    error: BaseException, kind: str, name: str, when: str, parts: Mapping[Any, tuple[str, str | None]] | None = None
) -> UserCodeError:
    """Return an error of user code as one line: where it was raised, and Python's message.

    Args:
        error: The error.
        kind: The kind of the component.
        name: Its name.
        when: What was being done.
        parts: The components of the run that are user code; the one whose code raised the error is named instead.
    """
    frame = _user_frame(error)
    if frame is not None and parts:
        raised_in = (part for part, (own, code) in parts.items() if _file_of(part, own, code) == frame[0])
        kind = next(raised_in, kind)
        name = parts[kind][0] if kind in parts else name
    where = ""
    if frame is not None:
        file, line, function = frame
        where = f" {file}, line {line}:" if Path(file).is_file() else f" {function}, line {line}:"
    message = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    return UserCodeError(f"{kind} {name!r}: {when}:{where} {type(error).__name__}: {message}")


def has_user_frame(error: BaseException) -> bool:
    """Whether an error was raised in code of the user, or in what it called."""
    return _user_frame(error) is not None


def _user_frame(error: BaseException) -> tuple[str, int | None, str] | None:
    """Return file, line and function of the last frame of user code in the traceback of an error."""
    if isinstance(error, SyntaxError) and error.filename and not is_installed(error.filename):
        return error.filename, error.lineno, ""
    frames = traceback.extract_tb(error.__traceback__)
    return next(((f.filename, f.lineno, f.name) for f in reversed(frames) if not is_installed(f.filename)), None)


def _file_of(kind: Kind, name: str, code: str | None) -> str | None:
    """Return the file name in tracebacks of the code of a component."""
    if is_file_code(name):
        return name.rpartition(":")[0]
    component = find_component(kind, name, code)
    value = next(iter(NORMS[name].layers.values()), None) if component is None and name in NORMS else None
    value = component.load() if component is not None else value
    parts = (
        [value] if isinstance(value, FunctionType) else vars(value if isinstance(value, type) else type(value)).values()
    )
    return next((part.__code__.co_filename for part in parts if isinstance(part, FunctionType)), None)
