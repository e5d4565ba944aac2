"""The state that user code keeps in Python objects, as digests that are the same in every process.

A checkpoint holds the parameters and buffers of a network, the optimizer and the memory. What a strategy or a network
of the user's own keeps besides (attributes of ``self``, of its class, module variables) is not in it. So a checkpoint
is good only where that state is the one that freshly loaded code has: the digests are compared. Once checkpoints hold
this state, `Lane.state` and `Lane.load` take it over and the comparison goes.
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
from contnorm.bench.user_code import forget_imports, imported_modules

__all__ = [
    "UNREADABLE",
    "CodeState",
    "isolate_modules",
    "network_state",
    "register_modules",
    "strategy_state",
]

UNREADABLE = "unreadable"  # in place of a digest: the state can't be told, so it is never the same

CodeState = dict[str, str]  # a digest by the name of an attribute or variable

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_CONSTANTS = (types.EllipsisType, types.NotImplementedType, StrategyConfig)
_IGNORED = (*_LOCKS, *_CONSTANTS, logging.Logger, weakref.ref)
_MODULE_PARTS = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"}


class _UnreadableError(Exception):
    """An object whose state can't be told, such as a generator or an open file."""


def strategy_state(strategy: object, modules: Mapping[str, types.ModuleType], head: object = None) -> CodeState:
    """The state of a strategy: its attributes, and the variables of the modules of user code.

    Args:
        strategy: The strategy.
        modules: The modules of its code, by name.
        head: The head that it is called with, which it may change as well.
    """
    attributes = {f"self.{name}": value for name, value in _attributes(strategy).items()}
    return _digests({**attributes, **_variables(modules), "head": head}, modules.keys(), ())


def network_state(network: nn.Module, modules: Mapping[str, types.ModuleType]) -> CodeState:
    """The state of a network that is not in the values of its ``state_dict()``.

    It is all other attributes of its modules, with their hooks; which modules, parameters and buffers there are, and
    which of them are learned; and the variables of the modules of user code.

    Args:
        network: The network.
        modules: The modules of user code, by name.
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


_first_states: dict[str, CodeState] = {}  # of each imported module, before a run had used it


def isolate_modules() -> None:
    """Undo what an earlier run in this process did to the variables of imported modules: they are loaded afresh."""
    for name, module in imported_modules().items():
        if name in _first_states and _module_state(name, module) != _first_states[name]:
            forget_imports()
            _first_states.clear()
            return


def register_modules() -> None:
    """Note the variables of imported modules as they are before a run."""
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
    """The file of a module that was loaded by its path, which has no name a user knows; else the module's name."""
    path = getattr(module, "__file__", None)
    return Path(path).name if path and module.__name__.startswith("contnorm_own_") else module.__name__


def _digests(values: Mapping[str, object], modules: Collection[str], saved: Iterable[object]) -> CodeState:
    digests = {}
    known = {id(value) for value in saved}
    for name, value in values.items():
        try:
            digests[name] = _Digest(modules, known).of(value)
        except Exception:  # user code decides what happens here, such as in a property or __reduce_ex__
            digests[name] = UNREADABLE
    return digests


def _is_machinery(name: str) -> bool:
    """Whether Python itself keeps something under a name of a class."""
    return name == "_abc_impl" or (name.startswith("__") and name.endswith("__") and name != "__init__")


class _Digest:
    """A digest of an object and all that it refers to.

    Args:
        modules: The names of the modules of user code: their classes, functions and variables are gone into.
        saved: The identities of what a checkpoint holds, which is not gone into.
    """

    def __init__(self, modules: Collection[str], saved: set[int]) -> None:
        self.modules, self.saved = modules, saved
        self.hash = hashlib.sha256()
        self.seen: dict[int, int] = {}
        self.alive: list[object] = []  # or the identity of something made on the way could come again

    def of(self, value: object) -> str:
        self._add(value)
        return self.hash.hexdigest()[:16]

    def _write(self, *words: object) -> None:
        self.hash.update(repr(words).encode())

    def _write_name(self, value: types.FunctionType | type) -> None:
        """The name of a class or function; of the module of user code not what depends on where its file is."""
        self._write(re.sub(r"^(contnorm_own_.*)_[0-9a-f]{12}$", r"\1", str(value.__module__)), value.__qualname__)

    def _add(self, value: object) -> None:
        if type(value) in _PLAIN:
            self._write(type(value).__name__, value)
        elif isinstance(value, _IGNORED):
            self._write("ignored")
        elif id(value) in self.saved:
            self._write("saved")
        elif id(value) in self.seen:
            self._write("again", self.seen[id(value)])
        else:
            if not isinstance(value, tuple | frozenset):  # of equal ones Python may make one
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
        elif isinstance(value, set | frozenset):  # in an order that does not depend on the process
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
            own = {name: part for name, part in vars(value).items() if not _is_machinery(name)}
            self._add_mapping(own)

    def _add_module(self, value: types.ModuleType) -> None:
        self._write(value.__name__.rpartition(".")[2])  # of user code, all variables are looked at by themselves

    def _add_wrapped(self, value: object) -> None:
        self._add_all(getattr(value, name, None) for name in ("__func__", "__self__", "fget", "fset", "func"))
        self._add_all(getattr(value, name, None) for name in ("args", "keywords"))

    def _add_cache(self, value: Any) -> None:
        """A function of `functools.cache`: what it holds can't be read, but an empty cache can be told."""
        if value.cache_info().currsize:
            raise _UnreadableError
        self._add(value.__wrapped__)
        self._add_mapping({name: part for name, part in vars(value).items() if not _is_machinery(name)})

    def _add_file(self, value: io.IOBase) -> None:
        if value.closed or not value.readable():  # what is only written does not come back
            return
        raise _UnreadableError

    def _add_parts(self, value: object) -> None:
        """What a copy of an object would be made of."""
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            parts = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception as error:  # such as of a generator
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
    (type(lru_cache(_is_machinery)), _Digest._add_cache),
    ((types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType), _Digest._add_parts),
)


def _attributes(value: object) -> dict[object, object]:
    """What an object has in its ``__dict__`` and its slots."""
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
