"""Identity of Python objects that are passed as networks, strategies or memories.

The records of a run are found again by its settings, so an object has to be identified by them:

- a function or class at the top level of a Python file, by the file and the local modules it imports, as if it were
  named ``path/to/file.py:Name``;
- a function or class of an installed package, by its module and the content of that file;
- a network (`torch.nn.Module`), by its structure, its weights and attributes, and the source of its classes;
- anything else, such as a lambda or a class of a notebook, by a tag that the user gives.

A file is named relative to the current folder, or absolutely if it is not below it, as on the command line.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from contnorm.bench.code_hashes import definition_file, definition_hash, loaded_hash
from contnorm.bench.config.schema import MemoryConfig
from contnorm.bench.local_imports import is_installed
from contnorm.bench.memories import Memory
from contnorm.bench.strategies.base import Strategy
from contnorm.bench.user_code import PYTHON, PythonObject
from contnorm.errors import UserError

__all__ = ["identify"]

_PLAIN = (bool, int, float, complex, str, bytes, Enum, np.generic, torch.dtype, torch.device, torch.Size)
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def identify(value: object, what: str, tag: str | None, recorded: bool) -> tuple[str, PythonObject]:
    """Return the name of an object in the settings of a run, and the object with its hash.

    Args:
        value: The object.
        what: Its kind for error messages: ``"model"``, ``"strategy"`` or ``"memory"``.
        tag: The user's name for an object that has no other identity.
        recorded: Whether the run is recorded, so that the object must have an identity.
    """
    named: tuple[str, str | None] | None
    if isinstance(value, nn.Module) and not isinstance(value, Strategy):
        named = _identify_network(value)
    elif isinstance(value, Strategy | Memory):
        named = None if _own_attributes(value) else _identify_definition(type(value))
    else:
        named = _identify_definition(value)
    if tag is not None:
        return f"{PYTHON}{_checked_tag(tag)}", PythonObject(value)
    if named is not None:
        name, code = named
        return name, PythonObject(value, code)
    label = getattr(value, "__qualname__", None) or type(value).__qualname__
    if recorded:
        if isinstance(value, nn.Module) and not isinstance(value, Strategy):
            reason = "has code or attributes that no file defines"
        elif isinstance(value, Strategy | Memory) and _own_attributes(value):
            reason = f"has attributes that are no settings ({', '.join(sorted(_own_attributes(value))[:3])})"
        else:
            reason = "is not defined at the top level of a file"
        raise UserError(
            f"{what}={label}: {reason}, so its records can't be told from those of another {what}. Give it a name with "
            f"tag=..., or use runs=None."
        )
    return f"{PYTHON}{label}", PythonObject(value)


def _identify_definition(value: Any) -> tuple[str, str | None] | None:
    """Return the name and hash of a function or class that is defined at the top level of a file; None otherwise."""
    path = definition_file(value)
    if path is None:
        return None
    if is_installed(path):
        return f"{PYTHON}{value.__module__}.{value.__qualname__}", definition_hash(value)
    if path.suffix != ".py":
        return None
    relative = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    in_file = f"{relative}:{value.__qualname__}"
    return in_file, loaded_hash(value, path, in_file)


def _identify_network(model: nn.Module) -> tuple[str, str | None] | None:
    """Return the name and hash of a network; None if a class or an attribute of it can't be identified."""
    lines: list[str] = []
    for path, module in model.named_modules():
        described = _describe_module(module)
        if described is None:
            return None
        lines.append(f"{path} {described}")
    tensors = {**model.state_dict(keep_vars=True), **dict(model.named_buffers())}  # buffers may be non-persistent
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            return None
        trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        lines.append(f"{name} {trained} {_describe_tensor(tensor)}")
    return f"{PYTHON}{type(model).__name__}", hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def _describe_module(module: nn.Module) -> str | None:
    """Return a text that identifies the class, attributes and hooks of a module; None if there is no such text."""
    defined = _identify_class(type(module))
    if defined is None:
        return None
    installed = is_installed(_file_of(type(module)) or Path())
    parts = [defined, module.extra_repr(), str(module.training)]
    for name, value in sorted(vars(module).items()):
        if name in _MODULE_ATTRIBUTES:
            continue
        text = _describe(value)
        if text is None and not installed:
            return None
        if text is not None and not (installed and name.startswith("_")):  # private ones vary between versions
            parts.append(f"{name}={text}")
    texts = [_describe(hook) for name in _HOOKS for hook in vars(module)[name].values()]
    return None if None in texts else " ".join([*parts, *map(str, texts)])


def _describe(value: object) -> str | None:
    """Return a text that identifies the value of an attribute, in this process and in others; None if it can't."""
    if value is None or isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value)
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else _describe_tensor_bytes(str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, partial):
        return _describe((value.func, value.args, value.keywords))
    if isinstance(value, Mapping):
        return _describe(list(value.items()))
    if isinstance(value, set | frozenset):
        return _describe(sorted(value, key=repr))
    if isinstance(value, list | tuple):
        texts = [_describe(item) for item in value]
        return None if None in texts else f"[{', '.join(map(str, texts))}]"
    if inspect.isbuiltin(value):
        return f"{value.__module__}.{value.__qualname__}"
    defined = _identify_definition(value)
    return None if defined is None else f"{getattr(value, '__qualname__', '')} {defined[1]}"


def _describe_tensor(tensor: torch.Tensor) -> str:
    if is_lazy(tensor) or tensor.is_meta:
        raise UserError("model: has parameters without values. Run a batch through a lazy network first.")
    values = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    return _describe_tensor_bytes(str(tensor.dtype), tuple(tensor.shape), values)


def _describe_tensor_bytes(dtype: str, shape: tuple[int, ...], values: bytes) -> str:
    return f"{dtype} {shape} {hashlib.sha256(values).hexdigest()}"


def _file_of(cls: type) -> Path | None:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return None if file is None else Path(file).resolve()


def _identify_class(cls: type) -> str | None:
    """Return a text that identifies the code of a class; None if it is not defined in a file."""
    path = _file_of(cls)
    if path is None:
        return None
    if is_installed(path):
        return f"{cls.__module__}.{cls.__qualname__}"
    if "<locals>" in cls.__qualname__:  # it may refer to variables of the function that defines it
        return None
    return f"{cls.__qualname__} {loaded_hash(cls, path, f'{path}:{cls.__qualname__}')}"


def _own_attributes(component: Strategy | Memory) -> set[str]:
    """Return the attributes of a user's object that its class and the settings do not determine."""
    if isinstance(component, Memory):
        bases = (cls for cls in type(component).__mro__ if issubclass(cls, Memory))
        known = next(cls for cls in bases if cls.__module__.startswith("contnorm."))
        return set(vars(component)) - set(vars(known.from_config(MemoryConfig())))
    return set(vars(component)) - _MODULE_ATTRIBUTES - {"config", "overrides", "settings"}


def _checked_tag(tag: str) -> str:
    if not tag or not tag.isprintable():
        raise UserError(f"tag={tag!r}: use a name of printable characters.")
    return tag
