"""Selection of the norm layers of a model that are replaced, with the reasons why a layer can't be."""

from __future__ import annotations

import fnmatch
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType

from torch import Tensor, nn

from contnorm.convert.detect import detect_norm, drop_and_act
from contnorm.convert.detected import DetectedNorm, UnsupportedNorm
from contnorm.moments.freeze import FREEZING_HOOKS
from contnorm.registry import Dim

__all__ = [
    "Filter",
    "NormToReplace",
    "dim_of_convolutions",
    "floating_tensors",
    "hook_refusal",
    "layer_named_in_errors",
    "referenced_modules",
    "select_layers",
    "unreplaceable_modules",
]

Choice = str | type[nn.Module] | Callable[[str, nn.Module], bool]
Filter = Choice | Iterable[Choice]


@dataclass(frozen=True, eq=False)
class NormToReplace:
    """A norm layer to convert: its first name in the model, its description, and a tensor near it in the model."""

    name: str
    module: nn.Module
    detected: DetectedNorm
    near: Tensor | None


@contextmanager
def layer_named_in_errors(layer: NormToReplace, caller: str) -> Iterator[None]:
    """Add the name and class of the layer to the message of a ``ValueError`` raised inside."""
    try:
        yield
    except ValueError as error:
        where = f"{caller}: layer {layer.name!r} ({type(layer.module).__name__})"
        raise ValueError(f"{where}: {error} The model is unchanged.") from error


def select_layers(
    model: nn.Module,
    only: Filter | None,
    skip: Filter | None,
    caller: str,
    wants: Callable[[nn.Module, DetectedNorm], bool] = lambda module, detected: True,
) -> list[NormToReplace]:
    """Return the norm layers selected by ``wants`` and the filters; raise if one of them cannot be replaced."""
    wanted, unwanted = _predicate(only, f"{caller}: only"), _predicate(skip, f"{caller}: skip")
    unreplaceable = unreplaceable_modules(model)
    layers: list[NormToReplace] = []
    refused: dict[tuple[str, str], list[str]] = {}
    seen = 0
    names: list[str] = []
    near = next(floating_tensors(model.modules()), None)
    for name, module in model.named_modules():
        near = next(floating_tensors([module]), near)
        detected = detect_norm(module)
        if detected is None:
            continue
        names.append(name)
        if isinstance(detected, DetectedNorm) and not wants(module, detected):
            continue
        seen += 1
        if (only is not None and not wanted(name, module)) or (skip is not None and unwanted(name, module)):
            continue
        reason = (
            detected.reason
            if isinstance(detected, UnsupportedNorm)
            else unreplaceable.get(module) or hook_refusal(module)
        )
        if reason:
            refused.setdefault((type(module).__name__, reason), []).append(name)
        elif isinstance(detected, DetectedNorm):
            layers.append(NormToReplace(name, module, detected, near))
    if refused:
        raise ValueError(
            f"{caller}: can't convert {_refusals(refused)}. Remove the cause, or exclude the layers with skip=. The "
            f"model is unchanged."
        )
    if not layers:
        raise ValueError(
            f"{caller}: nothing to convert in {type(model).__name__}: {_why_nothing(seen, len(names))}. See "
            f"contnorm.summarize(model)."
        )
    for argument, value in (("only", only), ("skip", skip)):
        _check_names(value, names, f"{caller}: {argument}")
    return layers


def _why_nothing(selectable: int, norms: int) -> str:
    """Return why no layer is selected, from the number of layers that could be converted and of all norm layers."""
    if selectable:
        return f"only= and skip= exclude all {selectable} norm layers"
    if norms:
        return f"none of its {norms} norm layers needs it"
    return "it has no norm over channels in dimension 1 (torch's LayerNorm normalizes the last dimensions)"


def _check_names(filter_: Filter | None, names: Sequence[str], where: str) -> None:
    """Raise for a name that no norm layer has, because a misspelt name would change which layers are converted."""
    choices = [filter_] if isinstance(filter_, str) else filter_ if isinstance(filter_, Iterable) else ()
    for name in choices:
        if isinstance(name, str) and name not in names and not any(sign in name for sign in "*?["):
            inside = any(other.startswith(f"{name}.") for other in names)
            advice = f"For the layers inside it write '{name}.*'." if inside else "See contnorm.summarize(model)."
            raise ValueError(f"{where}={name!r} is not the name of a norm layer. {advice} The model is unchanged.")


def _refusals(refused: Mapping[tuple[str, str], list[str]], most: int = 3) -> str:
    """Format the refused layers by class and reason: the names of the first few, and the number of the others.

    Example:
        >>> _refusals({("Odd2d", "it is odd"): ["a", "b", "c", "d", "e"], ("Even2d", "it is even"): ["f"]})
        "'a', 'b', 'c' and 2 more (Odd2d): it is odd; 'f' (Even2d): it is even"
    """
    parts = []
    for (kind, reason), names in list(refused.items())[:most]:
        more = f" and {len(names) - most} more" if len(names) > most else ""
        parts.append(f"{', '.join(map(repr, names[:most]))}{more} ({kind}): {reason}")
    rest = sum(len(names) for names in list(refused.values())[most:])
    return "; ".join([*parts, f"and {rest} more for other reasons"] if rest else parts)


def floating_tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Iterate over the floating-point parameters and buffers that modules hold directly."""
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.is_floating_point():
                yield tensor


def unreplaceable_modules(model: nn.Module) -> dict[nn.Module, str]:
    """Return modules that are also referenced outside the module tree, each with the reason to refuse it.

    Such a reference cannot be replaced, so the old layer would continue to run.
    """
    reasons: dict[nn.Module, str] = {}
    for parent in model.modules():
        if isinstance(compiled := getattr(parent, "_orig_mod", None), nn.Module):
            reasons[compiled] = "it is compiled separately; convert first, then compile"
            continue  # the other references are internal to the compiler's wrapper
        for key, value in vars(parent).items():
            if key not in ("_modules", "_parameters", "_buffers"):
                modules = (module for module in referenced_modules(value) if module is not parent)
                reasons |= dict.fromkeys(modules, f"the attribute {key!r} refers to it outside the module tree")
    return reasons


def _predicate(filter_: Filter | None, where: str) -> Callable[[str, nn.Module], bool]:
    if isinstance(filter_, type):
        return lambda name, module: isinstance(module, filter_)
    if callable(filter_):
        return filter_
    if isinstance(filter_, str):
        return lambda name, module: fnmatch.fnmatchcase(name, filter_)
    if filter_ is not None and not isinstance(filter_, Iterable):
        raise TypeError(f"{where}={filter_!r}: give names or patterns of layers, classes, or f(name, module).")
    predicates = [_predicate(choice, where) for choice in filter_ or ()]
    return lambda name, module: any(matches(name, module) for matches in predicates)


_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def hook_refusal(module: nn.Module) -> str:
    for kind in _HOOKS:
        hooks = getattr(module, kind, {})
        if any(hook not in (drop_and_act, *FREEZING_HOOKS) for hook in hooks.values()):
            return f"it has hooks ({kind.strip('_').replace('_', ' ')}), which would be lost; remove them first"
    return ""


def dim_of_convolutions(model: nn.Module) -> Dim | None:
    """Return the dimension of the model's convolutions; 1 if it has none, None if they differ."""
    kinds: tuple[tuple[Dim, tuple[type[nn.Module], ...]], ...] = (
        (1, (nn.Conv1d, nn.ConvTranspose1d)),
        (2, (nn.Conv2d, nn.ConvTranspose2d)),
        (3, (nn.Conv3d, nn.ConvTranspose3d)),
    )
    present = [dim for dim, classes in kinds if any(isinstance(m, classes) for m in model.modules())]
    if not present:
        return 1
    return present[0] if len(present) == 1 else None


# --- modules that Python objects refer to without registering them as submodules -----------------------------------

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
