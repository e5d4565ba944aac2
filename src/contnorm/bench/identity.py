"""The identity of Python objects that are passed as networks, strategies, memories or norms.

The records of a run are found again by its settings, so an object has to be identified by them:

- a function or class at the top level of a Python file by the file, as if it were named ``path/to/file.py:Name``;
- a function or class of an installed package by its module and the content of that file;
- any other object by a description of what it does: the source of its functions, or their compiled code where Python
  has no source, the values of closures, defaults and the global variables that are used, attributes and tensors.

A file is named relative to the current folder, or absolutely if it is not below it, as on the command line.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from contnorm.bench.components import PYTHON, Component, Kind, add_component, file_hash, is_installed
from contnorm.bench.memories.base import Memory
from contnorm.bench.strategies.base import Strategy
from contnorm.errors import UserError

__all__ = ["definition_hash", "identify"]

_PLAIN = (bool, int, float, complex, str, bytes, Enum, np.generic, torch.dtype, torch.device, torch.Size, Path, range)
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_unidentified = itertools.count()  # numbers of objects without an identity


def identify(value: Any, kind: Kind, tag: str | None, recorded: bool) -> Component:
    """Return an object as a component, with its name in the settings of a run and the hash of its code.

    Args:
        value: The object.
        kind: Its kind.
        tag: The user's name for it; runs with the same tag count as the same run.
        recorded: Whether the run is recorded, so that the object must have an identity.

    Raises:
        UserError: If the object can't be identified.
    """
    definition = value
    if isinstance(value, Strategy | Memory):  # its settings are those of the run
        own = _own_attributes(value)
        definition = (type(value), own) if own else type(value)
    label = getattr(value, "__qualname__", type(value).__qualname__)
    if tag is not None:
        name, code = f"{PYTHON}{tag}", None
    elif (file := _definition_file(definition)) is not None and is_installed(file):
        name, code = f"{PYTHON}{definition.__module__}.{definition.__qualname__}", definition_hash(definition)
    elif file is not None:
        path = Path(file).resolve()
        relative = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        name, code = f"{relative}:{definition.__qualname__}", _loaded_hash(definition, path)
    else:
        name = f"{PYTHON}{label}"
        try:
            code = _hash(_Description().of(definition, label))
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


def definition_hash(value: Any) -> str | None:
    """Return the hash that identifies the code of a function or class; None if it can't be identified.

    It is the hash of the file if there is one; of a file of an installed package, without what it imports.
    """
    file = _definition_file(value)
    if file is None:
        try:
            return _hash(_Description().of(value, "it"))
        except _UnknownError:
            return None
    return _hash(Path(file).read_bytes()) if is_installed(file) else _loaded_hash(value, Path(file).resolve())


def _definition_file(value: object) -> str | None:
    """Return the file that defines a function or class at its top level; None if there is none."""
    name, module = getattr(value, "__qualname__", ""), sys.modules.get(getattr(value, "__module__", None) or "")
    if (
        not isinstance(value, FunctionType | type)
        or not name.isidentifier()
        or getattr(module, name, None) is not value
    ):
        return None
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py") or not Path(file).is_file():
        return None
    parts = [value] if isinstance(value, FunctionType) else [p for p in vars(value).values() if inspect.isfunction(p)]
    written_in = {Path(inspect.unwrap(part).__code__.co_filename).resolve() for part in parts}
    # A definition that is typed at a prompt may be in a module that has a file: after `python -i file.py`.
    return file if not parts or is_installed(file) or Path(file).resolve() in written_in else None


_first_hash: dict[str, tuple[object, str]] = {}  # by module: its spec, which a reload replaces, and its hash


def _loaded_hash(value: Any, path: Path) -> str:
    """Return the hash of the file that defines a function or class; raises `UserError` if Python has an earlier one."""
    module, current = sys.modules[value.__module__], file_hash(path)
    spec, earlier = _first_hash.get(module.__name__, (None, current))
    if spec is not module.__spec__:  # it was reloaded
        earlier = current
    _first_hash[module.__name__] = (module.__spec__, earlier)
    if earlier != current and module.__name__ != "__main__":  # a script may be edited while it runs
        raise UserError(
            f"{path}:{value.__qualname__}: the file was edited after it was imported. Import it again with "
            f"importlib.reload, or restart Python."
        )
    return earlier


def _own_attributes(component: Strategy | Memory) -> dict[str, object]:
    """Return the attributes of an object that its class and the settings do not determine."""
    if isinstance(component, Memory):
        package = next(cls for cls in type(component).__mro__ if cls.__module__.startswith("contnorm."))
        return {name: value for name, value in vars(component).items() if name not in vars(package(1))}
    given = {*_MODULE_ATTRIBUTES, "config", "overrides", "settings"}
    parts = {**dict(component.named_children()), **dict(component.named_parameters(recurse=False))}
    parts |= dict(component.named_buffers(recurse=False))
    return {name: value for name, value in vars(component).items() if name not in given} | parts


def _hash(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:12]


class _UnknownError(Exception):
    """A value that can't be described; the message names it."""


class _Description:
    """A text that describes an object and everything that it uses, the same in every process."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, object]] = {}  # by id: a number, and the object, which keeps the id

    def of(self, value: Any, where: str) -> str:
        """Return the description of a value; ``where`` names it in errors."""
        if value is None or isinstance(value, _PLAIN):
            return f"{type(value).__name__} {value!r}"
        if id(value) in self.seen:
            return f"seen {self.seen[id(value)][0]}"
        self.seen[id(value)] = len(self.seen), value
        for kind, parts in _PARTS:
            if isinstance(value, kind):
                return self._all(parts(value), where)
        for kind, describe in _LEAVES:
            if isinstance(value, kind):
                return describe(value, where)
        if isinstance(value, nn.Module):
            return self._network(value, where)
        if isinstance(value, type) or inspect.isroutine(value):
            return self._definition(value, where)
        if _is_users(type(value)):
            return self._all((type(value), vars(value)), where)
        raise _UnknownError(f"{where}, an object of type {type(value).__name__}")

    def _all(self, values: Iterable[object], where: str) -> str:
        return f"[{', '.join(self.of(value, where) for value in values)}]"

    def _definition(self, value: Any, where: str) -> str:
        """Describe a function or class: by its name if it is installed, by its file if one defines it."""
        file = _definition_file(value)
        if not _is_users(value):
            return f"{value.__module__}.{value.__qualname__}"
        if file is not None:
            return f"{value.__qualname__} {_loaded_hash(value, Path(file).resolve())}"
        if isinstance(value, type):
            parts = {name: part for name, part in vars(value).items() if _is_code_of_class(name, part)}
            return f"class {value.__qualname__} {self._all((value.__bases__, parts), where)}"
        function = value if isinstance(value, FunctionType) else getattr(value, "__wrapped__", None)
        if not isinstance(function, FunctionType):
            raise _UnknownError(f"{where}, an object of type {type(value).__name__}")
        closure = inspect.getclosurevars(function).nonlocals
        used = {
            name: function.__globals__[name] for name in _global_names(function.__code__) & function.__globals__.keys()
        }
        values = [(name, {**closure, **used}[name]) for name in sorted({**closure, **used})]
        described = [f"{name}={self.of(part, f'{name!r}')}" for name, part in values]
        defaults = self._all((function.__defaults__, function.__kwdefaults__), where)
        return f"def {value.__qualname__} {_code(function.__code__)} {defaults} {described}"

    def _network(self, network: nn.Module, where: str) -> str:
        """Describe a network: the classes, attributes and hooks of its modules, and its tensors."""
        lines = []
        for path, module in network.named_modules():
            public = {k: v for k, v in vars(module).items() if k not in _MODULE_ATTRIBUTES}
            if not _is_users(type(module)):  # private attributes vary between versions
                public = {k: v for k, v in public.items() if not k.startswith("_") and _is_describable(v)}
            hooks = [hook for name in _HOOKS for hook in vars(module)[name].values()]
            parts = self._all((type(module), module.extra_repr(), module.training, public, hooks), path or where)
            lines.append(f"{path} {parts}")
        for name, tensor in {**network.state_dict(keep_vars=True), **dict(network.named_buffers())}.items():
            lines.append(f"{name} {self.of(tensor, name)}")
        return "\n".join(lines)


_PARTS: tuple[tuple[Any, Callable[[Any], Iterable[object]]], ...] = (  # what kinds of values consist of
    (Mapping, lambda value: [part for item in value.items() for part in item]),
    ((list, tuple), iter),
    (partial, lambda value: (value.func, value.args, value.keywords)),
    (MethodType, lambda value: (value.__func__, value.__self__)),
    ((staticmethod, classmethod), lambda value: (value.__func__,)),
    (property, lambda value: (value.fget, value.fset)),
    (cached_property, lambda value: (value.func,)),
)
_LEAVES: tuple[tuple[Any, Callable[[Any, str], str]], ...] = (
    (torch.Tensor, lambda value, where: _tensor(value, where)),
    (np.ndarray, lambda value, where: _array(value, where)),
    ((set, frozenset), lambda value, where: f"set {sorted(_Description().of(part, where) for part in value)}"),
    ((ModuleType, np.ufunc), lambda value, _: value.__name__),
    (logging.Logger, lambda value, _: value.name),
)


def _is_describable(value: object) -> bool:
    try:
        _Description().of(value, "")
    except _UnknownError:
        return False
    return True


def _is_users(value: Any) -> bool:
    """Whether a function or class is code of the user: of a file that is not installed, or of no file."""
    module = sys.modules.get(value.__module__ or "builtins")
    if module is None or module.__name__ == "__main__":
        return True
    file = getattr(module, "__file__", None)
    return file is not None and not is_installed(file)


def _is_code_of_class(name: str, part: object) -> bool:
    """Whether an attribute of a class is described: not what Python and dataclasses set themselves."""
    is_special = name.startswith("__") and name.endswith("__")
    is_slot = inspect.isgetsetdescriptor(part) or inspect.ismemberdescriptor(part)
    return not is_slot and name != "_abc_impl" and (not is_special or isinstance(part, FunctionType))


def _tensor(tensor: torch.Tensor, where: str) -> str:
    if nn.parameter.is_lazy(tensor):
        raise _UnknownError(f"{where}, a parameter without values")
    trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{trained} {tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(values).hexdigest()}"


def _array(array: np.ndarray, where: str) -> str:
    if array.dtype.hasobject:
        raise _UnknownError(f"{where}, an array of objects")
    return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"


def _code(code: CodeType) -> str:
    """Return the source of a function that is in no file; otherwise, and for a lambda, its compiled code."""
    if code.co_name != "<lambda>" and not Path(code.co_filename).is_file():
        try:
            return inspect.getsource(code)
        except (OSError, TypeError):  # at a prompt, and in text that was executed
            pass
    constants = [_code(part) if isinstance(part, CodeType) else _constant(part) for part in code.co_consts]
    return f"{code.co_code.hex()} {constants} {code.co_names} {code.co_varnames} {code.co_freevars}"


def _constant(value: object) -> str:
    return f"set {sorted(map(repr, value))}" if isinstance(value, frozenset) else repr(value)


def _global_names(code: CodeType) -> set[str]:
    """Return the names of global variables that a function and those in it read."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(_global_names(part) for part in code.co_consts if isinstance(part, CodeType)))
