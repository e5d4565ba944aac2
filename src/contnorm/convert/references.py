"""Find modules that Python objects refer to without registering them as submodules."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType

from torch import Tensor, nn

__all__ = ["referenced_modules"]

_MOST_OBJECTS = 100_000  # an attribute may refer to a whole dataset
_OPAQUE = (str, bytes, int, float, complex, type(None), type, ModuleType, CodeType, Tensor)


def referenced_modules(value: object) -> Iterator[nn.Module]:
    """Iterate over the modules a value refers to, through containers, attributes, partials, bound methods and closures.

    The search does not enter the modules that it finds, nor objects and functions of torch, such as those that
    ``torch.compile`` adds to a model. It stops after 100,000 objects.

    Example:
        >>> layer = nn.ReLU()
        >>> [m is layer for m in referenced_modules({"steps": [(1, functools.partial(layer))]})]
        [True]
    """
    seen: dict[int, object] = {}  # holds the objects too, so that no id is reused
    pending: list[object] = [[value]]
    while pending and len(seen) < _MOST_OBJECTS:
        current = pending.pop()
        if isinstance(current, nn.Module):
            yield current
            continue
        for part in _parts(current):
            # Check for weak proxies first: any other operation on one raises once its object has been deleted.
            if type(part) not in weakref.ProxyTypes and not isinstance(part, _OPAQUE) and id(part) not in seen:
                seen[id(part)] = part
                pending.append(part)


def _parts(value: object) -> Iterable[object]:
    """Return the objects that a value refers to directly."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return value
    defined_in = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
    if str(defined_in).partition(".")[0] == "torch":
        return ()
    attributes = list(vars(value).values()) if hasattr(value, "__dict__") else []
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values(), *attributes]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        return [*(_content(cell) for cell in value.__closure__ or ()), *(value.__defaults__ or ()), *attributes]
    return attributes


def _content(cell: CellType) -> object:
    """Return the value of a closure variable; None before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
