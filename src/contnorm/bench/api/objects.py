"""Identity of Python objects that are passed as networks or strategies.

The records of a run are found again by its settings, so an object has to be identified by them:

- a function or class at the top level of a Python file, by the file and the local modules it imports, as if it were
  named ``path/to/file.py:Name``;
- a function or class of an installed package, by its module and the content of that file;
- a network (`torch.nn.Module`), by its structure, its weights and the source of its classes;
- anything else, such as a lambda or a class of a notebook, by a tag that the user gives.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from pathlib import Path

import torch
from torch import nn

from contnorm.bench.local_imports import is_installed
from contnorm.bench.strategies.base import Strategy
from contnorm.bench.user_code import PYTHON, PythonObject, code_hash
from contnorm.errors import UserError

__all__ = ["identify"]


def identify(value: object, what: str, tag: str | None, recorded: bool) -> tuple[str, PythonObject]:
    """Return the name of an object in the settings of a run, and the object with its hash.

    Args:
        value: The object.
        what: Its kind for error messages: ``"model"`` or ``"strategy"``.
        tag: The user's name for an object that has no other identity.
        recorded: Whether the run is recorded, so that the object must have an identity.
    """
    named: tuple[str, str | None] | None
    if isinstance(value, nn.Module):
        named = _identify_network(value)
    elif isinstance(value, Strategy):
        named = None if _has_state(value) else _identify_definition(type(value))
    else:
        named = _identify_definition(value)
    if tag is not None:
        return f"{PYTHON}{_checked_tag(tag)}", PythonObject(value)
    if named is not None:
        name, code = named
        return name, PythonObject(value, code)
    label = getattr(value, "__qualname__", None) or type(value).__qualname__
    if recorded:
        raise UserError(
            f"{what}={label}: is not defined at the top level of a file, so its records can't be told from those of "
            f"another {what}. Give it a name with tag=..., or use runs=None."
        )
    return f"{PYTHON}{label}", PythonObject(value)


def _identify_definition(value: object) -> tuple[str, str | None] | None:
    """Return the name and hash of a function or class that is defined at the top level of a file; None otherwise."""
    name, module = getattr(value, "__qualname__", ""), sys.modules.get(getattr(value, "__module__", None) or "")
    if not (inspect.isfunction(value) or inspect.isclass(value)) or not name.isidentifier() or module is None:
        return None
    file = getattr(module, "__file__", None)
    if file is None or getattr(module, name, None) is not value or not Path(file).is_file():
        return None
    path = Path(file).resolve()
    if is_installed(path):
        return f"{PYTHON}{module.__name__}.{name}", hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    if path.suffix != ".py":
        return None
    relative = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    in_file = f"{relative}:{name}"
    return in_file, code_hash(in_file)


def _identify_network(model: nn.Module) -> tuple[str, str | None] | None:
    """Return the name and hash of a network: its structure, weights and classes; None if a class is in no file."""
    digest = hashlib.sha256()
    for path, module in model.named_modules():
        defined = _identify_class(type(module))
        if defined is None:
            return None
        digest.update(f"{path} {defined} {module.extra_repr()} {module.training}\n".encode())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            return None
        trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {trained}\n".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"{PYTHON}{type(model).__name__}", digest.hexdigest()[:12]


def _identify_class(cls: type) -> str | None:
    """Return a text that identifies the code of a class; None if it is not defined in a file."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    if is_installed(path):
        return f"{cls.__module__}.{cls.__qualname__}"
    return f"{cls.__qualname__} {code_hash(f'{path}:{cls.__qualname__}')}"


def _has_state(strategy: Strategy) -> bool:
    """Whether a user's strategy object has attributes that its class and the settings do not determine."""
    return bool(set(vars(strategy)) - {"config", "settings"})


def _checked_tag(tag: str) -> str:
    if not tag or not tag.isprintable():
        raise UserError(f"tag={tag!r}: use a name of printable characters.")
    return tag
