"""The state of a strategy in checkpoints: collected from its attributes, split into tensors and JSON, and restored.

Tensors, modules, plain values (numbers, texts, True, False, None) and dictionaries, lists and tuples of them are saved.
An attribute with anything else in it is not. Neither are the network and its tensors, which are saved themselves, nor a
dictionary or list that another attribute holds too: they would be two after a restart. Tensors that share memory do so
afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "GIVEN_ATTRIBUTES",
    "UnsupportedStateError",
    "collect_state",
    "join_state",
    "modules_in",
    "restore_state",
    "same_split",
    "same_state",
    "split_state",
]

GIVEN_ATTRIBUTES = frozenset({"config", "overrides", "settings", "model", "head", "device"})  # by the engine
DTYPES = (
    torch.float64,
    torch.int64,
    torch.float32,
    torch.int32,
    torch.bfloat16,
    torch.float16,
    torch.int16,
    torch.uint8,
    torch.int8,
    torch.bool,
)
_PLAIN = (type(None), bool, int, float, str)
_MAX_BITS = 4096  # of a whole number; Python does not read longer ones from text


class UnsupportedStateError(Exception):
    """A value that a checkpoint can't contain; the message says where and of which type it is."""


def collect_state(owner: object, network: nn.Module | None) -> dict[str, Any]:
    """Return the attributes of an object that a checkpoint can contain, by name.

    Args:
        owner: The object.
        network: The network of the run. Attributes that hold it or parts of it are left out.

    Example:
        >>> class Owner:
        ...     def __init__(self):
        ...         self.mean, self.count, self.names = torch.zeros(2), 3, {"a", "b"}
        >>> collect_state(Owner(), None)  # a set is not supported
        {'mean': tensor([0., 0.]), 'count': 3}
    """
    parts = set(map(id, network.modules())) if network is not None else set()
    storages = set(map(_storage, network.state_dict(keep_vars=True).values())) if network is not None else set()
    state = {}
    seen = {id(value) for name, value in vars(owner).items() if name in GIVEN_ATTRIBUTES}
    for name, value in vars(owner).items():
        if name in GIVEN_ATTRIBUTES:
            continue
        try:
            state[name] = _collect(value, parts, storages, seen)
        except (UnsupportedStateError, RecursionError):
            continue
    return state


def _storage(value: object) -> int:
    """Return the address of a tensor's values; 0 if it has none."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
        return 0
    return value.untyped_storage().data_ptr()


def _collect(value: object, parts: set[int], storages: set[int], seen: set[int]) -> Any:
    """Return a value with the states of its modules; ``seen`` has the lists and dictionaries before it."""
    if _is_plain(value):
        return value
    if isinstance(value, Tensor):
        if not _is_savable(value) or (_storage(value) in storages and _storage(value)):
            raise UnsupportedStateError
        return value
    if isinstance(value, nn.Module):
        if id(value) in parts:
            raise UnsupportedStateError
        return _module_state(value)
    return _collect_container(value, parts, storages, seen)


def _collect_container(value: object, parts: set[int], storages: set[int], seen: set[int]) -> Any:
    if id(value) in seen:
        raise UnsupportedStateError
    if type(value) is tuple:
        return tuple(_collect(part, parts, storages, seen) for part in value)
    seen.add(id(value))
    if type(value) is list:
        return [_collect(part, parts, storages, seen) for part in value]
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return {key: _collect(part, parts, storages, seen) for key, part in value.items()}
    raise UnsupportedStateError


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN and not (isinstance(value, int) and value.bit_length() > _MAX_BITS)


def _is_savable(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and tensor.dtype in DTYPES


def _module_state(module: nn.Module) -> dict[str, Any]:
    tensors = module.state_dict()
    if not all(isinstance(value, Tensor) and _is_savable(value) for value in tensors.values()):
        raise UnsupportedStateError
    return {
        "state_dict": dict(tensors),
        "training": [part.training for part in module.modules()],
        "requires_grad": [parameter.requires_grad for parameter in module.parameters()],
    }


def restore_state(owner: object, state: Mapping[str, Any]) -> None:
    """Set the attributes of an object from a state; tensors of the same shape and dtype, and modules, in place.

    Example:
        >>> class Owner:
        ...     pass
        >>> owner = Owner()
        >>> restore_state(owner, {"mean": torch.ones(2), "count": 3})
        >>> owner.mean, owner.count
        (tensor([1., 1.]), 3)
    """
    for name, value in state.items():
        setattr(owner, name, _restored(getattr(owner, name, None), value))


def _restored(current: object, value: Any) -> Any:
    if isinstance(current, nn.Module):
        current.load_state_dict(value["state_dict"])
        for part, training in zip(current.modules(), value["training"], strict=True):
            part.training = training
        for parameter, trained in zip(current.parameters(), value["requires_grad"], strict=True):
            parameter.requires_grad_(trained)
        return current
    if isinstance(value, Tensor):
        if isinstance(current, Tensor) and (current.shape, current.dtype) == (value.shape, value.dtype):
            with torch.no_grad():
                current.copy_(value)
            return current.requires_grad_(value.requires_grad) if current.is_leaf else current
        return value
    if type(value) is dict:
        old = current if isinstance(current, dict) else {}
        return {key: _restored(old.get(key), part) for key, part in value.items()}
    if type(value) in (list, tuple):
        parts = list(current) if isinstance(current, list | tuple) else []
        parts += [None] * (len(value) - len(parts))
        return type(value)(_restored(part, new) for part, new in zip(parts, value, strict=False))
    return value


def modules_in(value: object, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in a value and in its dictionaries, lists and tuples, with their paths."""
    if isinstance(value, nn.Module):
        yield path, value
    elif type(value) is dict:
        for key, part in value.items():
            yield from modules_in(part, f"{path}[{key!r}]")
    elif type(value) in (list, tuple):
        assert isinstance(value, list | tuple)
        for number, part in enumerate(value):
            yield from modules_in(part, f"{path}[{number}]")


def split_state(state: object) -> tuple[dict[str, Tensor], Any]:
    """Split a nested state into its tensors, by name, and a value for JSON that refers to them.

    Raises:
        UnsupportedStateError: If a value in it can't be saved.

    Example:
        >>> split_state({"mean": torch.ones(2), "count": [3, None]})
        ({'mean': tensor([1., 1.])}, {'dict': [['count', {'list': [3, None]}], ['mean', {'tensor': 'mean', ...
    """
    split = _Split({}, {})
    if isinstance(state, Mapping):  # attributes may be set in another order after a restart
        state = dict(sorted(state.items(), key=lambda item: str(item[0])))
    try:
        return split.tensors, split.of(state, "")
    except RecursionError:
        raise UnsupportedStateError("a dictionary or list contains itself") from None


@dataclass
class _Split:
    """The tensors of a state that is being split, by name, and the first name of each storage."""

    tensors: dict[str, Tensor]
    storages: dict[int, str]

    def of(self, value: Any, path: str) -> Any:
        """Return a value for JSON that refers to the tensors in it."""
        if _is_plain(value):
            return value
        if isinstance(value, Tensor) and _is_savable(value):
            return self._add_tensor(value, path)
        if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
            return {"dict": [[key, self.of(part, _joined(path, key))] for key, part in value.items()]}
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [self.of(part, _joined(path, number)) for number, part in enumerate(value)]}
        dtype = f" of {value.dtype}" if isinstance(value, Tensor) else ""
        raise UnsupportedStateError(f"{path or 'it'} is of type {type(value).__name__}{dtype}")

    def _add_tensor(self, tensor: Tensor, name: str) -> dict[str, Any]:
        while name in self.tensors:  # such as of the keys "a.b", and "b" in "a"
            name += "_"
        self.tensors[name] = tensor.detach()
        entry: dict[str, Any] = {"tensor": name, "device": tensor.device.type}
        if tensor.requires_grad and tensor.is_leaf:
            entry["requires_grad"] = True
        first = self.storages.setdefault(_storage(tensor) or -len(self.tensors), name)
        if first != name:
            layout, of_first = (
                [t.storage_offset(), list(t.shape), list(t.stride())] for t in (tensor, self.tensors[first])
            )
            entry |= {"same_as": first} if layout == of_first else {"overlaps": [first, *layout]}
        return entry


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def join_state(value: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """Return the nested state that `split_state` has split, with a copy of each tensor on the device it was on.

    Example:
        >>> join_state(split_state({"sizes": (1, 2)})[1], {}, torch.device("cpu"))
        {'sizes': (1, 2)}
    """
    return _join(value, tensors, device, {})


def _join(value: Any, tensors: Mapping[str, Tensor], device: torch.device, copies: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        if "same_as" in value:
            return copies[value["same_as"]]
        tensor = tensors[value["tensor"]]
        copied = tensor.to(device if value["device"] == device.type else tensor.device, copy=True)
        copies[value["tensor"]] = copied.requires_grad_(value.get("requires_grad", False))
        return copied
    if "dict" in value:
        return {key: _join(part, tensors, device, copies) for key, part in value["dict"]}
    if "list" in value:
        return [_join(part, tensors, device, copies) for part in value["list"]]
    return tuple(_join(part, tensors, device, copies) for part in value["tuple"])


def same_state(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two states are equal: tensors bit for bit, and which of them share memory.

    Example:
        >>> same_state({"mean": torch.ones(2)}, {"mean": torch.ones(2)}), same_state({"count": 1}, {"count": True})
        (True, False)
    """
    return same_split(split_state(a), split_state(b))


def same_split(a: tuple[Mapping[str, Tensor], Any], b: tuple[Mapping[str, Tensor], Any]) -> bool:
    """Whether two states are equal after `split_state`.

    Example:
        >>> mean = torch.ones(2)
        >>> same_split(split_state({"mean": mean, "now": mean}), split_state({"mean": mean, "now": mean.clone()}))
        False
    """
    (tensors, values), (other_tensors, other_values) = a, b
    return (
        json.dumps(values) == json.dumps(other_values)
        and tensors.keys() == other_tensors.keys()
        and all(_same_bits(tensor, other_tensors[name]) for name, tensor in tensors.items())
    )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    first, second = (tensor.cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
    return torch.equal(first, second)
