"""Batches of data for a model: what can be iterated repeatedly, and how a model is called on a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

__all__ = [
    "Call",
    "call_on_batch",
    "call_on_first_element",
    "call_with_keywords",
    "check_batches",
    "number_of_batches",
    "to_model_device",
]

Call = Callable[[nn.Module, Any], object]

# The names of labels in batches of transformers' data sets and collators.
_LABELS = frozenset(("label", "labels", "label_ids"))
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_batches(batches: object, exact: bool = True) -> None:
    """Raise a TypeError for objects that do not hold batches, and for exact moments if they can be iterated only once.

    Args:
        batches: The object.
        exact: Whether the moments are exact, for which the data may be read several times.
    """
    if exact and isinstance(batches, Iterator):
        raise TypeError(
            f"reestimate: batches is a one-shot iterator ({type(batches).__name__}), and exact moments may need "
            f"several passes over the data. Give a list, a DataLoader, or another object that can be iterated "
            f"repeatedly; or exact=False, for approximate moments in one pass."
        )
    if isinstance(batches, Tensor):
        raise TypeError("reestimate: batches is a tensor, whose elements are samples. Give a list of batches: [x].")
    if isinstance(batches, Mapping | str) or not isinstance(batches, Iterable):
        what = "None" if batches is None else f"a {type(batches).__name__}"
        raise TypeError(f"reestimate: batches is {what}. Give a list of batches, or a DataLoader.")


def number_of_batches(batches: Iterable[Any]) -> int | None:
    """Return ``len(batches)``; None if it is not known, or only approximately, as for a stream in a DataLoader.

    Example:
        >>> number_of_batches([1, 2]), number_of_batches(iter([1, 2]))
        (2, None)
    """
    if isinstance(batches, DataLoader) and isinstance(batches.dataset, IterableDataset):
        return None
    try:
        return len(batches)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def call_on_batch(model: nn.Module, batch: Any) -> object:
    """Run the model on a batch: a mapping as keyword arguments, of a tuple or list the first element, else all of it.

    Example:
        >>> call_on_batch(nn.Identity(), (torch.ones(2), "labels"))
        tensor([1., 1.])
    """
    return call_with_keywords(model, batch) if isinstance(batch, Mapping) else call_on_first_element(model, batch)


def call_on_first_element(model: nn.Module, batch: Any) -> object:
    """Run the model, on its device, on a batch or on the first element of a tuple or list."""
    return model(to_model_device(model, batch[0] if isinstance(batch, tuple | list) else batch))


def call_with_keywords(model: nn.Module, batch: Mapping[str, Any]) -> object:
    """Run the model, on its device, as ``model(**batch)``, without labels and without keys that forward does not take.

    Labels (``labels``, ``label`` and ``label_ids``) are passed only if ``forward`` requires them. A loss is thus not
    computed. Other keys, such as indices, are left out as by the ``Trainer`` of transformers.

    Raises:
        TypeError: If the batch has no key that ``forward`` takes, or lacks one that it requires.

    Example:
        >>> class Net(nn.Module):
        ...     def forward(self, pixel_values, labels=None):
        ...         return pixel_values.sum(), labels
        >>> call_with_keywords(Net(), {"pixel_values": torch.ones(3), "labels": torch.zeros(3), "index": [7]})
        (tensor(3.), None)
    """
    parameters = inspect.signature(_unwrapped(model).forward).parameters.values()
    named = {p.name for p in parameters if p.kind in _NAMED}
    required = {p.name for p in parameters if p.kind in _NAMED and p.default is inspect.Parameter.empty}
    any_key = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    taken = {key for key in batch if key in required or ((any_key or key in named) and key not in _LABELS)}
    if not taken or required - taken:
        forward = f"{type(_unwrapped(model)).__name__}.forward"
        raise TypeError(
            f"reestimate: a batch has the keys {sorted(map(str, batch))}, and {forward} takes {sorted(named)}. Give "
            f"call=, a function that runs the model on a batch, such as "
            f"lambda model, batch: model(batch[{next(iter(batch), 'x')!r}])."
        )
    arguments = tree_map(
        lambda value: to_model_device(model, value), {key: batch[key] for key in batch if key in taken}
    )
    return model(**arguments)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of torch's wrappers, whose forward takes any argument."""
    while isinstance(model, DataParallel | DistributedDataParallel) or "_orig_mod" in model._modules:
        inner = model._modules.get("_orig_mod", model._modules.get("module"))
        assert inner is not None
        model = inner
    return model


def to_model_device(model: nn.Module, x: Any) -> Any:
    """Move a tensor to the model's device; return any other object unchanged."""
    device = next((t.device for t in (*model.parameters(), *model.buffers())), None)
    return x.to(device) if isinstance(x, Tensor) and device is not None else x
