"""User code in runs: how it is loaded, identified, registered and reported in errors. Needs no torch.

A component is a strategy, a memory, a network (``"model"``), a norm or a data set. Its name in the settings is

- ``path/to/file.py:Name``, for a function or class at the top level of a file, which may import modules of its folder;
- a name that a program or an installed plugin has registered (`contnorm.bench.register`);
- ``python:Name``, for any other object that a program passes. It exists in that program only.

The hash of its code is a setting too: that of the file; of a function or class that no file defines, of its source, or
its compiled code where Python has no source, with the values of its closure and of the global variables that it uses;
of any other object, of its class and of what pickle would store. What this does not cover is named with ``tag``.

Commands load only what is named on the command line: what a record or a settings file names is never executed.
"""

from __future__ import annotations

import ast
import copyreg
import dis
import hashlib
import importlib
import inspect
import itertools
import pickle
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

from contnorm.errors import UserCodeError, UserError, is_installed, unknown, usable
from contnorm.registry import BUILT_IN, NORMS, NormInfo, Origin, add_norm, load_plugins

if TYPE_CHECKING:
    from contnorm.bench.config.schema import RunConfig

THIS_PROCESS = Origin()
PYTHON = "python:"  # prefix of the names of objects that are defined in no file
ComponentKind = Literal["strategy", "memory", "model", "norm", "dataset", "launcher"]


# --- Names and objects -----------------------------------------------------------------------------------------------


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

    kind: ComponentKind
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
        with user_code_errors(f"{self.kind} {self.name!r} of {self.origin}", f"{self.target} can't be imported"):
            return getattr(importlib.import_module(module), name)


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


def remove_component(kind: ComponentKind, name: str) -> None:
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


def user_parts(config: RunConfig) -> dict[ComponentKind, tuple[str, str | None]]:
    """Return the name and the hash of the code of each component of a run that is user code."""
    parts: dict[ComponentKind, tuple[str, str | None]] = {
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


# --- Launchers -------------------------------------------------------------------------------------------------------


def launchers() -> dict[str, Component]:
    """Return the launchers by name: ours, and those of the entry point group ``contnorm.launchers``.

    Example:
        >>> str(launchers()["local"].origin)
        'contnorm'
    """
    found = {}
    for entry in sorted(entry_points(group="contnorm.launchers"), key=lambda entry: entry.name):
        origin = Origin(entry.module) if entry.dist is None else Origin(entry.dist.name, entry.dist.version)
        summary = f"class {entry.attr} of {entry.module}"
        found[entry.name] = Component("launcher", entry.name, f"{entry.module}:{entry.attr}", summary, origin)
    local, ray = "this machine: its GPUs, or a process per CPU core", "the nodes of a Ray cluster, with retries"
    found["local"] = Component("launcher", "local", None, local, BUILT_IN)
    found["ray"] = Component("launcher", "ray", "contnorm.bench.engine.launch:RayLauncher", ray, BUILT_IN)
    return found


def create_launcher(name: str, options: Mapping[str, Any] | None = None) -> Any:
    """Create a launcher by name; None for this machine.

    Args:
        name: One of `launchers`.
        options: Arguments of its class, such as ``{"address": "auto"}`` for Ray.

    Raises:
        UserError: If the name is unknown, or the launcher can't be created.

    Example:
        >>> create_launcher("locl")
        Traceback (most recent call last):
        contnorm.errors.UserError: unknown launcher 'locl'. Did you mean 'local'? There are: local, ...
    """
    known = launchers()
    if name not in known:
        raise unknown("launcher", name, known)
    with user_code_errors(f"launcher {name!r}", "it can't be created"):
        launcher = known[name].load()
        return None if launcher is None else launcher(**(options or {}))


# --- Loading ---------------------------------------------------------------------------------------------------------


def load_component(kind: ComponentKind, name: str, code: str | None = None) -> Any:
    """Return the object that a name refers to. Its file is executed, unless the object was passed.

    Args:
        kind: The kind of object.
        name: Its name in the settings.
        code: The hash of its code, if it is known.

    Raises:
        UserError: If there is none, or if its code is not that of the hash.
    """
    component = find_component(kind, name, code)
    if component is not None:
        return component.load()
    if not is_file_code(name):
        what = "was passed as a Python object" if name.startswith(PYTHON) else "is not known here"
        raise UserError(
            f"{kind} {name!r}: {what}. Run the program that passes or registers it, or install its package."
        )
    file, _, attribute = name.rpartition(":")
    current = file_hash(Path(file))
    if code not in (None, current):
        raise UserError(f"{kind} {name!r}: the file has changed since the run was started. Run it again.")
    with user_code_errors(f"{kind} {name!r}", "it can't be loaded"):
        module = _load_file(Path(file), current)
    if not hasattr(module, attribute):
        raise UserError(f"{kind} {name!r}: {file} has no {attribute}.")
    return getattr(module, attribute)


_helpers: list[str] = []  # modules that the file which was loaded last has imported from its folder
_loading: list[bool] = []  # one for each piece of user code that is being loaded


def _load_file(path: Path, content: str) -> ModuleType:
    """Execute a Python file, once for each content of it and of the modules in its folder that it imports."""
    name = f"contnorm_own_{path.stem}_{_hash(f'{path.resolve()} {content}')}"  # dataclasses and pickle look it up
    if name in sys.modules:
        return sys.modules[name]
    for helper in _helpers:  # another folder may have a helper of the same name as the file that was loaded before
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


# --- Identity --------------------------------------------------------------------------------------------------------

_unidentified = itertools.count()  # numbers of objects without an identity
_imported: dict[str, tuple[object, str]] = {}  # by module: its spec, which a reload replaces, and its first hash


def identify(value: Any, kind: ComponentKind, tag: str | None, recorded: bool, definition: Any = None) -> Component:
    """Return an object as a component, with its name in the settings of a run and the hash of its code.

    Args:
        value: The object.
        kind: Its kind.
        tag: The user's name for it; runs with the same tag count as the same run.
        recorded: Whether the run is recorded, so that the object must have an identity.
        definition: What identifies it instead, such as its class if the settings have its attributes.

    Raises:
        UserError: If the object can't be identified.
    """
    definition = value if definition is None else definition
    label = getattr(value, "__qualname__", type(value).__qualname__)
    name, code = f"{PYTHON}{tag or label}", None
    if tag is None:
        if (file := _definition_file(definition)) is not None and is_installed(file):
            name = f"{PYTHON}{definition.__module__}.{definition.__qualname__}"
        elif file is not None:
            path = Path(file).resolve()
            path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            name = f"{path}:{definition.__qualname__}"
        try:
            code = _code_hash(definition, label)
        except _UnknownError as error:
            if recorded:
                raise UserError(
                    f"{kind}={label}: uses {error}, so its records can't be told from those of another {kind}. "
                    f"Give it a name with tag=..., or use runs=None."
                ) from None
            code = f"unknown-{next(_unidentified)}"
    component = Component(kind, name, value, code=code)
    add_component(component)
    return component


def code_hash(kind: ComponentKind, name: str, code: str | None = None) -> str | None:
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
    with suppress(_UnknownError):
        return _code_hash(value, "it")
    return None


def file_hash(path: Path) -> str:
    """Return the hash of a Python file and of the modules in its folder that it imports, directly or indirectly.

    Without such modules it is the hash of the file. Nothing is executed.

    Raises:
        UserError: If there is no such file.
    """
    with usable(path, "can't be read", "Name a Python file, such as net.py."):
        content = path.read_bytes()
    path, helpers, pending = path.resolve(), dict[str, Path](), [path.resolve()]
    while pending:
        for stem in _import_stems(pending.pop(), path.parent):
            for source in (stem.with_suffix(".py"), stem / "__init__.py"):
                if source.is_file() and source != path and source not in helpers.values():
                    helpers[".".join(stem.relative_to(path.parent).parts)] = source
                    pending.append(source)
    if not helpers:
        return _hash(content)
    digests = {name: hashlib.sha256(helpers[name].read_bytes()).hexdigest() for name in sorted(helpers)}
    return _hash("\n".join([hashlib.sha256(content).hexdigest(), *(f"{name} {digests[name]}" for name in digests)]))


def _import_stems(file: Path, folder: Path) -> Iterator[Path]:
    """Yield the paths, without suffix, that the modules which a file imports would have in a folder."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):  # reported when the file is loaded
        return
    for node in nodes:
        base, names = folder, list[str]()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = file.parents[node.level - 1] if node.level else folder
            names = [".".join(filter(None, [node.module, alias.name])) for alias in node.names]
        for parts in (name.split(".") for name in names):
            if base.is_relative_to(folder) and (base != folder or parts[0] not in sys.stdlib_module_names):
                yield from (base.joinpath(*parts[:count]) for count in range(1, len(parts) + 1))


def _hash(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:12]


def _code_hash(value: Any, where: str) -> str:
    """Return the hash of an object: that of its file if it is a function or class at the top level of one.

    A module that was edited after it was imported is refused, since Python has the earlier content.
    """
    file = _definition_file(value)
    if file is None:
        return _hash(_Description().of(value, where))
    if is_installed(file):
        return _hash(Path(file).read_bytes())
    path, module = Path(file).resolve(), sys.modules[value.__module__]
    current = file_hash(path)
    spec, earlier = _imported.get(module.__name__, (None, current))
    earlier = earlier if spec is module.__spec__ else current
    _imported[module.__name__] = (module.__spec__, earlier)
    if earlier != current and module.__name__ != "__main__":  # a script may be edited while it runs
        raise UserError(
            f"{path}:{value.__qualname__}: the file was edited after it was imported. Import it again with "
            f"importlib.reload, or restart Python."
        )
    return earlier


def _definition_file(value: object) -> str | None:
    """Return the file that defines a function or class at its top level; None if there is none."""
    name, module = getattr(value, "__qualname__", ""), sys.modules.get(getattr(value, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    is_named = isinstance(value, FunctionType | type) and getattr(module, name, None) is value
    if not is_named or file is None or not file.endswith(".py") or not Path(file).is_file():
        return None
    if not (is_installed(file) or _is_defined_once(Path(file), name)):
        return None
    parts = [value] if isinstance(value, FunctionType) else filter(inspect.isfunction, vars(value).values())
    written_in = {Path(inspect.unwrap(part).__code__.co_filename).resolve() for part in parts}
    # A definition that is typed at a prompt may be in a module that has a file: after `python -i file.py`.
    return file if not written_in or is_installed(file) or Path(file).resolve() in written_in else None


def _is_defined_once(file: Path, name: str) -> bool:
    """Whether a file defines a name once at its top level and in no loop, so that the file tells what the name is."""
    found = 0
    with suppress(SyntaxError, ValueError):  # a script can be edited while it runs
        pending = [(node, 1) for node in ast.parse(file.read_bytes()).body]
        while pending:
            node, times = pending.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found += times * (node.name == name)
            elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
                times = 2 if isinstance(node, ast.For | ast.While) else times
                pending += [(child, times) for child in ast.iter_child_nodes(node)]  # type: ignore[misc]
    return found <= 1


class _UnknownError(Exception):
    """A value that can't be described; the message names it."""


class _Description:
    """A text that describes an object and everything that it uses, the same in every process."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, object]] = {}  # by id: a number, and the object, which keeps the id

    def of(self, value: Any, where: str) -> str:
        """Return the description of a value; ``where`` names it in errors."""
        if value is None or isinstance(value, bool | int | float | complex | str):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, bytes):
            return hashlib.sha256(value).hexdigest()
        if id(value) in self.seen:
            return f"seen {self.seen[id(value)][0]}"
        self.seen[id(value)] = len(self.seen), value
        torch: Any = sys.modules.get("torch")  # without it there are no tensors
        if torch is not None and torch.nn.parameter.is_lazy(value):
            return f"lazy {value.dtype}"
        if torch is not None and isinstance(value, torch.Tensor):
            values = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            trained = isinstance(value, torch.nn.Parameter) and value.requires_grad
            return f"{trained} {value.dtype} {tuple(value.shape)} {self.of(values.tobytes(), where)}"
        if isinstance(value, ModuleType):
            return value.__name__
        if isinstance(value, set | frozenset):
            return f"set {sorted(_Description().of(part, where) for part in value)}"
        if isinstance(value, Mapping):
            return self.all_of(itertools.chain.from_iterable(value.items()), where)
        if isinstance(value, list | tuple):
            return self.all_of(value, where)
        if isinstance(value, staticmethod | classmethod | property | cached_property):
            return self.all_of((getattr(value, name, None) for name in ("__func__", "fget", "fset", "func")), where)
        if isinstance(value, type) or (inspect.isroutine(value) and not isinstance(value, MethodType)):
            return self.of_definition(value, where)
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            stored = value.__reduce_ex__(2) if reduce is None else reduce(value)  # as pickle: a name, or parts
        except (TypeError, pickle.PicklingError):
            raise _UnknownError(f"{where}, an object of type {type(value).__name__}") from None
        parts = [stored] if isinstance(stored, str) else (list(p) if isinstance(p, Iterator) else p for p in stored)
        return self.all_of((type(value), *parts), where)

    def all_of(self, values: Iterable[object], where: str) -> str:
        return f"[{', '.join(self.of(value, where) for value in values)}]"

    def of_definition(self, value: Any, where: str) -> str:
        """Describe a function or class: by its name if it is installed, by its file if one defines it."""
        module = sys.modules.get(value.__module__ or "builtins")
        file = getattr(module, "__file__", None)
        if module is not None and module.__name__ != "__main__" and (file is None or is_installed(file)):
            return f"{value.__module__}.{value.__qualname__}"
        if _definition_file(value) is not None:
            return f"{value.__qualname__} {_code_hash(value, where)}"
        if isinstance(value, type):
            parts = {name: part for name, part in vars(value).items() if _is_code_of_class(name, part)}
            return f"class {value.__qualname__} {self.all_of((value.__bases__, parts), where)}"
        function = inspect.unwrap(value)
        if not isinstance(function, FunctionType):
            raise _UnknownError(f"{where}, an object of type {type(value).__name__}")
        names = _global_names(function.__code__) & function.__globals__.keys()
        used = {name: function.__globals__[name] for name in names}
        used |= inspect.getclosurevars(function).nonlocals
        described = [f"{name}={self.of(part, f'{name!r}')}" for name, part in sorted(used.items())]
        defaults = self.all_of((function.__defaults__, function.__kwdefaults__), where)
        return f"def {value.__qualname__} {_code(function.__code__)} {defaults} {described}"


def _is_code_of_class(name: str, part: object) -> bool:
    """Whether an attribute of a class is described: not what Python and dataclasses set themselves."""
    is_special = name.startswith("__") and name.endswith("__")
    is_slot = inspect.isgetsetdescriptor(part) or inspect.ismemberdescriptor(part)
    return not is_slot and name != "_abc_impl" and (not is_special or isinstance(part, FunctionType))


def _code(code: CodeType) -> str:
    """Return the source of a function that is in no file; otherwise, and for a lambda, its compiled code."""
    if code.co_name != "<lambda>" and not Path(code.co_filename).is_file():
        with suppress(OSError, TypeError):  # at a prompt, and in text that was executed
            return inspect.getsource(code)
    parts = (sorted(map(repr, part)) if isinstance(part, frozenset) else part for part in code.co_consts)
    constants = [_code(part) if isinstance(part, CodeType) else repr(part) for part in parts]
    return f"{code.co_code.hex()} {constants} {code.co_names} {code.co_varnames} {code.co_freevars}"


def _global_names(code: CodeType) -> set[str]:
    """Return the names of global variables that a function and those in it read."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(_global_names(part) for part in code.co_consts if isinstance(part, CodeType)))


# --- Errors ----------------------------------------------------------------------------------------------------------


def user_code_error(error: BaseException, component: str, when: str) -> UserCodeError:
    """Return an error of user code as one line: where it was raised, and Python's message.

    Args:
        error: The error.
        component: Kind and name of the component, as in ``"strategy 'mine.py:Mine'"``.
        when: What was being done.
    """
    where = ""
    if frame := _user_frame(error):
        file, line, function = frame
        where = f" {file if Path(file).is_file() else function}, line {line}:"
    message = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    return UserCodeError(f"{component}: {when}:{where} {type(error).__name__}: {message}")


@contextmanager
def user_code_errors(component: str, when: str) -> Iterator[None]:
    """Turn every error of the block into one line, as `user_code_error`; a `UserError` stays."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, UserError):
            raise
        raise user_code_error(error, component, when) from error


def has_user_frame(error: BaseException) -> bool:
    """Whether an error was raised in code of the user, or in what it called."""
    return _user_frame(error) is not None


def _user_frame(error: BaseException) -> tuple[str, int | None, str] | None:
    """Return file, line and function of the last frame of user code in the traceback of an error."""
    if isinstance(error, SyntaxError) and error.filename and not is_installed(error.filename):
        return error.filename, error.lineno, ""
    frames = traceback.extract_tb(error.__traceback__)
    return next(((f.filename, f.lineno, f.name) for f in reversed(frames) if not is_installed(f.filename)), None)
