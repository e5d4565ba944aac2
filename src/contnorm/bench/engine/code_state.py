"""Digests of the state that user code has in Python objects. They are the same in every process.

A checkpoint contains the parameters and buffers of a network, the optimizer, the memory, and the state of the strategy
(`Strategy.state_dict`). It does not contain other state of user code: attributes of types that can't be saved,
attributes of classes and of a network, and module variables. So a checkpoint is usable only if that state equals the
state of newly loaded code. The digests show whether it does.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import logging
import random
import re
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from contnorm.bench.config.schema import StrategyConfig
from contnorm.bench.strategies.state import GIVEN_ATTRIBUTES, modules_in, split_state
from contnorm.bench.user_code import forget_imports, imported_modules

__all__ = [
    "UNREADABLE",
    "CodeState",
    "isolate_modules",
    "network_state",
    "register_modules",
    "strategy_state",
]

UNREADABLE = "unreadable"  # instead of a digest: the state can't be read, so it never compares equal

CodeState = dict[str, str]  # digests by the name of the attribute or variable

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_CONSTANTS = (types.EllipsisType, types.NotImplementedType, StrategyConfig)
_IGNORED = (*_LOCKS, *_CONSTANTS, logging.Logger, weakref.ref)
_MODULE_PARTS = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"}


class _UnreadableError(Exception):
    """An object whose state can't be read, such as a generator or an open file."""


def strategy_state(
    strategy: object,
    modules: Mapping[str, types.ModuleType],
    head: object = None,
    network: nn.Module | None = None,
    saved: Mapping[str, object] | None = None,
) -> CodeState:
    """Return the state of a strategy that checkpoints do not contain: its attributes, and the variables of its modules.

    Args:
        strategy: The strategy.
        modules: The modules of its code, by name.
        head: The head that is passed to it, which it may change.
        network: The network of the run. Its modules and tensors are excluded.
        saved: The state of the strategy in checkpoints. Attributes with these names, and these tensors, are excluded.
            Of the modules in it, everything but the content of their ``state_dict()`` is included.
    """
    names = {*(saved or {}), *GIVEN_ATTRIBUTES} - {"config", "settings"}  # its settings must not change in a run
    attributes = {name: value for name, value in _attributes(strategy).items() if name not in names}
    values = {f"self.{name}": value for name, value in attributes.items()}
    known: list[object] = []
    if network is not None:
        known = [*network.modules(), *network.state_dict(keep_vars=True).values()]
    known += split_state(saved or {})[0].values()
    digests = _digests({**values, **_variables(modules), "head": head}, modules.keys(), known)
    for name in saved or {}:
        for path, module in modules_in(getattr(strategy, str(name), None), f"self.{name}"):
            state = network_state(module, {})
            digests |= {f"{path}.{part}": digest for part, digest in state.items() if part != "requires_grad"}
    return digests


def network_state(network: nn.Module, modules: Mapping[str, types.ModuleType]) -> CodeState:
    """Return the state of a network that is not in the values of its ``state_dict()``.

    That is: all other attributes of its modules, including hooks; the names and types of its modules, parameters and
    buffers; ``requires_grad``; and the variables of the Python modules of user code.

    Args:
        network: The network.
        modules: The Python modules of user code, by name.
    """
    saved = network.state_dict(keep_vars=True)
    values: dict[str, object] = {
        "named_modules()": [(path, type(module).__qualname__) for path, module in network.named_modules()],
        "state_dict()": [(name, str(t.dtype), tuple(t.shape)) for name, t in saved.items() if isinstance(t, Tensor)],
        "requires_grad": [(name, parameter.requires_grad) for name, parameter in network.named_parameters()],
    }
    for path, module in network.named_modules():
        prefix = f"{path}." if path else ""
        for name in module._non_persistent_buffers_set:
            values[f"{prefix}{name}"] = module._buffers.get(name)
        rest = {name: value for name, value in _attributes(module).items() if name not in _MODULE_PARTS}
        values |= {f"{prefix}{name}": value for name, value in rest.items()}
    return _digests({**values, **_variables(modules)}, modules.keys(), [*network.modules(), *saved.values()])


_first_states: dict[str, CodeState] = {}  # of each imported module, before its first use by a run


def isolate_modules() -> None:
    """Reload imported modules if an earlier run in this process has changed their variables."""
    for name, module in imported_modules().items():
        if name in _first_states and _module_state(name, module) != _first_states[name]:
            forget_imports()
            _first_states.clear()
            return


def register_modules() -> None:
    """Store the digests of the variables of imported modules before a run."""
    for name, module in imported_modules().items():
        _first_states.setdefault(name, _module_state(name, module))


def _module_state(name: str, module: types.ModuleType) -> CodeState:
    return _digests(_variables({name: module}), {name}, ())


def _variables(modules: Mapping[str, types.ModuleType]) -> dict[str, object]:
    return {
        f"{_title(module)}: {name}": value
        for module in modules.values()
        for name, value in vars(module).items()
        if not name.startswith("__")
    }


def _title(module: types.ModuleType) -> str:
    """Return the file name of a module that was loaded by path, since its name is generated; else the module's name."""
    path = getattr(module, "__file__", None)
    return Path(path).name if path and module.__name__.startswith("contnorm_own_") else module.__name__


def _digests(values: Mapping[str, object], modules: Collection[str], saved: Iterable[object]) -> CodeState:
    digests = {}
    saved = list(saved)
    known = {id(value) for value in saved} | {_storage_key(v) for v in saved if isinstance(v, Tensor)}
    known.discard(0)
    for name, value in values.items():
        try:
            digests[name] = _Digest(modules, known).of(value)
        except Exception:  # user code may raise anything, such as in a property or __reduce_ex__
            digests[name] = UNREADABLE
    return digests


def _storage_key(tensor: Tensor) -> int:
    """Return a number that identifies the values of a tensor, and is not the ``id()`` of an object."""
    return -tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided and tensor.numel() else 0


def _is_internal(name: str) -> bool:
    """Whether an attribute of a class is set by Python itself."""
    return name == "_abc_impl" or (name.startswith("__") and name.endswith("__") and name != "__init__")


class _Digest:
    """A digest of an object and everything that it refers to.

    Args:
        modules: Names of the modules of user code. Their classes, functions and variables are included.
        saved: The ``id()`` of objects that a checkpoint contains, and the storages of tensors. They are excluded.
    """

    def __init__(self, modules: Collection[str], saved: set[int]) -> None:
        self.modules, self.saved = modules, saved
        self.hash = hashlib.sha256()
        self.seen: dict[int, int] = {}
        self.alive: list[object] = []  # keeps temporary objects alive, or their id() could be reused

    def of(self, value: object) -> str:
        """Return the digest of a value."""
        self._add(value)
        return self.hash.hexdigest()[:16]

    def _write(self, *values: object) -> None:
        self.hash.update(repr(values).encode())

    def _write_name(self, value: types.FunctionType | type) -> None:
        """Add the name of a class or function, without the part of the module name that depends on its path."""
        self._write(re.sub(r"^(contnorm_own_.*)_[0-9a-f]{12}$", r"\1", str(value.__module__)), value.__qualname__)

    def _add(self, value: object) -> None:
        if type(value) in _PLAIN:
            self._write(type(value).__name__, value)
        elif isinstance(value, _IGNORED):
            self._write("ignored")
        elif id(value) in self.saved or (isinstance(value, Tensor) and _storage_key(value) in self.saved):
            self._write("saved")
        elif id(value) in self.seen:
            self._write("again", self.seen[id(value)])
        else:
            if not isinstance(value, tuple | frozenset):  # Python may share equal ones
                self.seen[id(value)] = len(self.seen)
            self.alive.append(value)
            self._write_name(type(value))
            self._add_object(value)

    def _add_object(self, value: object) -> None:
        for kind, add in _KINDS:
            if isinstance(value, kind):
                add(self, value)
                return
        attributes = _attributes(value)
        if attributes:
            self._add_mapping(attributes)
        else:
            self._add_parts(value)

    def _add_all(self, values: Iterable[object]) -> None:
        for value in values:
            self._add(value)
        self._write("end")

    def _add_mapping(self, values: Mapping[Any, object]) -> None:
        for key, value in list(values.items()):
            self._add(key)
            self._add(value)
        self._write("end")

    def _add_container(self, value: Iterable[object]) -> None:
        if isinstance(value, Mapping):
            self._add_mapping(value)
        elif isinstance(value, set | frozenset):  # sorted: the order of a set depends on the process
            self._write(sorted(_Digest(self.modules, self.saved).of(element) for element in value))
        else:
            self._add_all(value)
        self._add_mapping(_attributes(value))

    def _add_tensor(self, value: Tensor) -> None:
        self._write(str(value.dtype), tuple(value.shape), value.requires_grad)
        if value.is_meta:
            return
        if value.layout != torch.strided or value.is_quantized:
            raise _UnreadableError
        content = value.detach().cpu().contiguous().reshape(-1)
        self.hash.update(content.view(torch.uint8).numpy().tobytes() if content.numel() else b"")

    def _add_array(self, value: np.ndarray) -> None:
        self._write(str(value.dtype), value.shape)
        if value.dtype.hasobject:
            self._add_all(value.ravel().tolist())
        else:
            self.hash.update(np.ascontiguousarray(value).tobytes())

    def _add_random_state(self, value: torch.Generator | random.Random | np.random.Generator) -> None:
        if isinstance(value, torch.Generator):
            self._add(value.get_state())
        elif isinstance(value, random.Random):
            self._add(value.getstate())
        else:
            self._add(value.bit_generator.state)

    def _add_function(self, value: types.FunctionType) -> None:
        self._write_name(value)
        if value.__module__ in self.modules:
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            self._add_all([value.__defaults__, value.__kwdefaults__, vars(value), *cells])

    def _add_class(self, value: type) -> None:
        self._write_name(value)
        if value.__module__ in self.modules:
            attributes = {name: part for name, part in vars(value).items() if not _is_internal(name)}
            self._add_mapping(attributes)

    def _add_module(self, value: types.ModuleType) -> None:
        self._write(value.__name__.rpartition(".")[2])  # variables of user code are digested separately

    def _add_wrapped(self, value: object) -> None:
        self._add_all(getattr(value, name, None) for name in ("__func__", "__self__", "fget", "fset", "func"))
        self._add_all(getattr(value, name, None) for name in ("args", "keywords"))

    def _add_cache(self, value: Any) -> None:
        """Add a function of `functools.cache`. A cache can't be read, so only empty ones have a digest."""
        if value.cache_info().currsize:
            raise _UnreadableError
        self._add(value.__wrapped__)
        self._add_mapping({name: part for name, part in vars(value).items() if not _is_internal(name)})

    def _add_file(self, value: io.IOBase) -> None:
        if value.closed or not value.readable():  # a write-only file does not affect the results
            return
        raise _UnreadableError

    def _add_parts(self, value: object) -> None:
        """Add the parts that a pickle of an object would contain."""
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            parts = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception as error:  # such as for a generator
            raise _UnreadableError from error
        if isinstance(parts, str):
            self._write(parts)
            return
        for part in parts:
            self._add_all(part) if isinstance(part, Iterator) else self._add(part)


_KINDS: tuple[tuple[type | tuple[type, ...], Callable[..., None]], ...] = (
    (Tensor, _Digest._add_tensor),
    (np.ndarray, _Digest._add_array),
    ((torch.Generator, random.Random, np.random.Generator), _Digest._add_random_state),
    ((dict, list, tuple, set, frozenset, deque, types.MappingProxyType), _Digest._add_container),
    (types.FunctionType, _Digest._add_function),
    (type, _Digest._add_class),
    (types.ModuleType, _Digest._add_module),
    ((types.MethodType, staticmethod, classmethod, property, partial), _Digest._add_wrapped),
    (io.IOBase, _Digest._add_file),
    (type(lru_cache(_is_internal)), _Digest._add_cache),
    ((types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType), _Digest._add_parts),
)


def _attributes(value: object) -> dict[object, object]:
    """Return the attributes in the ``__dict__`` and the slots of an object."""
    values: dict[object, object] = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                values[name] = getattr(value, name)
    return values


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
