"""How a model is run on a batch, and the weights of its samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from contnorm.checks import widest

__all__ = [
    "Call",
    "WeightGroups",
    "Weights",
    "call_on_batch",
    "call_on_first_element",
    "group_by_weight",
    "number_of_batches",
    "to_model_device",
]

Call = Callable[[nn.Module, Any], object]
Weights = Callable[[Any], Tensor | float]
# The samples of a batch by weight: the weight, and the numbers of the samples; None for all of them.
WeightGroups = list[tuple[float, Tensor | None]]

# The names of labels in batches of transformers' data sets and collators.
_LABELS = frozenset(("label", "labels", "label_ids"))


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

    A mapping is passed without labels (``labels``, ``label`` and ``label_ids``) unless ``forward`` requires them, so
    that no loss is computed, and without keys that ``forward`` does not take.

    Example:
        >>> call_on_batch(nn.Identity(), (torch.ones(2), "labels"))
        tensor([1., 1.])
    """
    if not isinstance(batch, Mapping):
        return call_on_first_element(model, batch)
    inner = model
    while isinstance(inner, DataParallel | DistributedDataParallel) or "_orig_mod" in inner._modules:
        inner = cast(nn.Module, inner._modules.get("_orig_mod", inner._modules.get("module")))
    parameters = inspect.signature(inner.forward).parameters.values()
    named = {p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    any_key = any(p.kind is p.VAR_KEYWORD for p in parameters)
    taken = {k: v for k, v in batch.items() if named.get(k) or ((any_key or k in named) and k not in _LABELS)}
    if not taken or any(required and name not in taken for name, required in named.items()):
        raise TypeError(
            f"reestimate: a batch has the keys {sorted(map(str, batch))}, and {type(inner).__name__}.forward takes "
            f"{sorted(named)}. Give call=, a function that runs the model on a batch."
        )
    return model(**tree_map(lambda value: to_model_device(model, value), taken))


def call_on_first_element(model: nn.Module, batch: Any) -> object:
    """Run the model, on its device, on a batch or on the first element of a tuple or list."""
    return model(to_model_device(model, batch[0] if isinstance(batch, tuple | list) else batch))


def to_model_device(model: nn.Module, x: Any) -> Any:
    """Move a tensor to the model's device; return any other object unchanged."""
    device = next((t.device for t in (*model.parameters(), *model.buffers())), None)
    return x.to(device) if isinstance(x, Tensor) and device is not None else x


def group_by_weight(weights: Tensor | float) -> WeightGroups:
    """Group the samples of a batch by weight. A layer defines moments without weights; those of groups are merged.

    Raises:
        ValueError: If the weights are not one finite number from 0 for each sample, or one for the batch.

    Example:
        >>> group_by_weight(torch.tensor([2.0, 1.0, 2.0]))
        [(1.0, tensor([1])), (2.0, tensor([0, 2]))]
    """
    if not isinstance(weights, Tensor) or weights.dim() == 0:
        weights = torch.tensor([float(weights)], dtype=torch.float64)
    values = widest(weights.detach())
    if values.dim() != 1 or not bool((values.isfinite() & (values >= 0)).all()):
        raise ValueError(
            "reestimate: weights(batch) must return one finite number from 0 for each sample, as a tensor of shape "
            "(N,), or one number for the batch."
        )
    distinct, group = torch.unique(values, return_inverse=True)
    if len(distinct) == 1:
        return [(distinct.item(), None)]
    numbers = cast("list[float]", distinct.tolist())
    return [(weight, torch.nonzero(group == number).squeeze(1)) for number, weight in enumerate(numbers)]
