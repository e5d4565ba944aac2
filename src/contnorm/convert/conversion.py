"""One line changes the normalization of any model: a single walk over the module tree, with a plan before any change.

The new layer takes over the old one's own Parameter and buffer objects wherever both have them, so an optimizer made
before the conversion goes on training them, and a conversion forth and back gives the first model's output bit for
bit. Nothing is changed unless every layer that was asked for can be.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd
from typing import Any, cast

import torch
from torch import Tensor, nn

from contnorm.checks import auto_groups, check_model
from contnorm.convert.detect import Recognized, Stranger, drop_and_act, holds_moments, recognize
from contnorm.convert.probe import random_state_restored
from contnorm.convert.references import referenced_modules
from contnorm.factory import Dim, accepted_options, build, check_options, named, norm_class
from contnorm.layers.base import MomentNorm
from contnorm.layers.sync import SyncContinualNorm
from contnorm.moments.freeze import FREEZING_HOOKS, freeze_stats, is_frozen
from contnorm.moments.modes import modes_restored
from contnorm.registry import NORMS, NormSpec

__all__ = ["Filter", "convert_norm", "convert_sync"]

Choice = str | type[nn.Module] | Callable[[str, nn.Module], bool]
Filter = Choice | Iterable[Choice]


def convert_norm(
    model: nn.Module,
    to: str,
    *,
    only: Filter | None = None,
    skip: Filter | None = None,
    dim: Dim | None = None,
    example_input: object = None,
    **options: object,
) -> nn.Module:
    """Replace the norm layers of a model by another norm, in place.

    Works on any module tree: nested, shared layers (one object stays one), models of torchvision, timm and others.
    Kept are parameters (the same objects), running moments, eps, momentum, device, dtype, training mode and
    ``requires_grad``. What the new norm doesn't have is dropped, what the old one didn't have starts afresh. A layer
    of another library is converted if a copy of it computes, on random input, what the converter assumes; where it
    does not, or can't be run, the conversion is refused.

    Args:
        model: The model; a bare norm layer works too, its replacement is what is returned.
        to: A norm's name, as in ``create_norm``.
        only: Convert just these layers: a name or pattern (``"layer1.*"``), a class, ``f(name, module) -> bool``, or
            a list of such, of which one has to fit.
        skip: Leave these layers alone; the same forms.
        dim: The dimension of layers whose class doesn't tell it (``GroupNorm``, ``SyncBatchNorm``); by default that
            of the model's convolutions.
        example_input: For ``num_groups="auto"``: an input of the model (a tuple or a dict for several arguments). The
            model is run on it once, in evaluation mode, and layers whose input has one position get groups of at
            least 8 channels instead of 2.
        **options: Arguments of the new norm, such as ``num_groups``, ``eps`` or ``momentum``; they win over what the
            old layer had. ``num_groups="auto"`` gives each layer the largest divisor of its channels, up to 32, that
            leaves at least 2 channels in a group (8 for (N, C) input), and one group where there is none.

    Returns:
        The model.

    Raises:
        ValueError: Where there is nothing to convert, or a layer can't be: its name and the reason are in the message,
            and the model is unchanged.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU())
        >>> weight = model[1].weight
        >>> convert_norm(model, "cn", num_groups=8)[1]
        ContinualNorm2d(64, num_groups=8, eps=1e-05, momentum=0.1)
        >>> model[1].weight is weight
        True
    """
    spec, options = named(to, options, "convert_norm")
    check_model(model, "convert_norm")
    check_options(spec, norm_class(spec, dim or 2, "convert_norm"), options, "convert_norm")
    found = _selected(model, only, skip, "convert_norm")
    fallback = dim or _dim_of_convolutions(model)
    if spec.grouped:
        _check_groups(found, options)
    narrow = _single_position_layers(model, found, example_input) if options.get("num_groups") == "auto" else set()
    replace = {}
    for layer in found:
        chosen = {"num_groups": auto_groups(layer.found.channels, one_position=True)} if layer.module in narrow else {}
        with _naming(layer, "convert_norm"):
            replace[layer.module] = _converted(layer, spec, {**options, **chosen}, fallback)
    return _swap(model, replace)


def _check_groups(layers: list[_Layer], options: Mapping[str, object]) -> None:
    """Refuse a number of groups that does not divide the channels of every layer, and name one that does."""
    counts = {layer: options.get("num_groups", layer.found.options.get("num_groups", 32)) for layer in layers}
    wrong = [
        layer
        for layer, count in counts.items()
        if type(count) is int and count > 0 and layer.found.channels % count  # the layer itself reports the rest
    ]
    if not wrong:
        return
    first, others = wrong[0], f" and {len(wrong) - 1} more layers" if len(wrong) > 1 else ""
    raise ValueError(
        f"convert_norm: layer {first.name!r} ({type(first.module).__name__}){others}: num_groups={counts[first]} does "
        f"not divide the {first.found.channels} channels. The largest number that divides all {len(layers)} layers is "
        f"num_groups={gcd(*(layer.found.channels for layer in layers))}; num_groups='auto' chooses one for each. The "
        f"model is unchanged."
    )


def _single_position_layers(model: nn.Module, layers: list[_Layer], example_input: object) -> set[nn.Module]:
    """The layers whose input has one position for each sample and channel, seen by running the model once."""
    positions: dict[nn.Module, int] = {}
    if example_input is None:
        return set()

    def measure(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if x is not None and x.dim() >= 2:
            positions[module] = min(x.shape[2:].numel(), positions.get(module, x.shape[2:].numel()))

    handles = [layer.module.register_forward_pre_hook(measure, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad(), random_state_restored(), modes_restored(model):
            _call(model, example_input)
    except Exception as error:
        raise ValueError(
            f"convert_norm: the model can't be run on example_input: {type(error).__name__}: {error}. The model is "
            f"unchanged."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return {module for module, count in positions.items() if count == 1}


def _call(model: nn.Module, example_input: object) -> object:
    if isinstance(example_input, tuple | list):
        return model(*example_input)
    return model(**example_input) if isinstance(example_input, dict) else model(example_input)


def convert_sync(
    model: nn.Module, process_group: Any = None, *, only: Filter | None = None, skip: Filter | None = None
) -> nn.Module:
    """Replace continual and batch norms by their synchronised forms, in place, for training on several processes.

    The safe counterpart of ``torch.nn.SyncBatchNorm.convert_sync_batchnorm``, which knows batch norm alone. Norms of
    single samples (GN, IN, LN) and norms whose moments are constants need no synchronisation and stay; a norm without
    a synchronised form is refused.

    Args:
        model: The model.
        process_group: Whose batches count as one; None for all processes.
        only: Convert just these layers, as in `convert_norm`.
        skip: Leave these layers alone.

    Returns:
        The model.

    Example:
        >>> from contnorm import ContinualNorm2d
        >>> type(convert_sync(nn.Sequential(ContinualNorm2d(64)))[0]).__name__
        'SyncContinualNorm'
    """
    check_model(model, "convert_sync")
    replace = {}
    for layer in _selected(model, only, skip, "convert_sync", _needs_sync):
        with _naming(layer, "convert_sync"):
            if layer.found.norm in ("brn", "sn"):
                raise ValueError(f"{layer.found.norm!r} has no synchronised form. Convert it to 'bn' or 'cn' first.")
            new = _synced_layer(layer.found, NORMS[layer.found.norm], {}, process_group)
            replace[layer.module] = _taken_over(layer, new)
    return _swap(model, replace)


def _needs_sync(module: nn.Module, found: Recognized) -> bool:
    constant = found.constant or getattr(module, "use_running", False)
    return NORMS[found.norm].keeps_moments and not found.synced and not constant


@dataclass(frozen=True, eq=False)
class _Layer:
    """A norm layer that was found, the first name it was reached by, and a tensor that stands near it."""

    name: str
    module: nn.Module
    found: Recognized
    near: Tensor | None


@contextmanager
def _naming(layer: _Layer, caller: str) -> Iterator[None]:
    """Adds to an error the layer it came from, once, at the door."""
    try:
        yield
    except ValueError as error:
        where = f"{caller}: layer {layer.name!r} ({type(layer.module).__name__})"
        raise ValueError(f"{where}: {error} The model is unchanged.") from error


def _selected(
    model: nn.Module,
    only: Filter | None,
    skip: Filter | None,
    caller: str,
    wants: Callable[[nn.Module, Recognized], bool] = lambda module, found: True,
) -> list[_Layer]:
    """All norm layers that are wanted and that the filters leave; refuses by name those that can't be replaced."""
    wanted, unwanted = _predicate(only, f"{caller}: only"), _predicate(skip, f"{caller}: skip")
    out_of_reach = _out_of_reach(model)
    layers: list[_Layer] = []
    refused: dict[tuple[str, str], list[str]] = {}
    seen = 0
    names: list[str] = []
    near = next(_floating(model.modules()), None)
    for name, module in model.named_modules():
        near = next(_floating([module]), near)
        found = recognize(module)
        if found is None:
            continue
        names.append(name)
        if isinstance(found, Recognized) and not wants(module, found):
            continue
        seen += 1
        if (only is not None and not wanted(name, module)) or (skip is not None and unwanted(name, module)):
            continue
        reason = found.reason if isinstance(found, Stranger) else out_of_reach.get(module) or _hooked(module)
        if reason:
            refused.setdefault((type(module).__name__, reason), []).append(name)
        elif isinstance(found, Recognized):
            layers.append(_Layer(name, module, found, near))
    if refused:
        raise ValueError(
            f"{caller}: can't convert {_refusals(refused)}. Remove the cause, or exclude the layers with skip=. The "
            f"model is unchanged."
        )
    if not layers:
        why = "only= and skip= leave none of them" if seen else "torch's LayerNorm, over the last ones, is none of them"
        raise ValueError(
            f"{caller}: found nothing to convert in {type(model).__name__}: it has {seen} norm layers to convert that "
            f"work over channels in dimension 1; {why}. See contnorm.summarize(model)."
        )
    for argument, value in (("only", only), ("skip", skip)):
        _check_names(value, names, f"{caller}: {argument}")
    return layers


def _check_names(given: Filter | None, names: Sequence[str], where: str) -> None:
    """Refuse a name that no norm layer has: misspelt, it would change which layers are converted."""
    choices = [given] if isinstance(given, str) else given if isinstance(given, Iterable) else ()
    for name in choices:
        if isinstance(name, str) and name not in names and not any(sign in name for sign in "*?["):
            inside = any(other.startswith(f"{name}.") for other in names)
            advice = f"For the layers inside it write '{name}.*'." if inside else "See contnorm.summarize(model)."
            raise ValueError(f"{where}={name!r} is not the name of a norm layer. {advice} The model is unchanged.")


def _refusals(refused: Mapping[tuple[str, str], list[str]], most: int = 3) -> str:
    """The refused layers, those of one class and reason together: the first few by name, then how many more.

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


def _floating(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """The floating-point tensors that modules hold themselves."""
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.is_floating_point():
                yield tensor


def _out_of_reach(model: nn.Module) -> dict[nn.Module, str]:
    """Layers that are also held where a walk over the modules can't replace them: the old one would go on running."""
    found: dict[nn.Module, str] = {}
    for parent in model.modules():
        if isinstance(compiled := getattr(parent, "_orig_mod", None), nn.Module):
            found[compiled] = "it is compiled as a model of its own; convert first, then compile"
            continue  # all other references of the compiler's wrapper are its own
        for key, value in vars(parent).items():
            if key not in ("_modules", "_parameters", "_buffers"):
                held = (module for module in referenced_modules(value) if module is not parent)
                found |= dict.fromkeys(held, f"the attribute {key!r} refers to it outside the module tree")
    return found


def _predicate(given: Filter | None, where: str) -> Callable[[str, nn.Module], bool]:
    if isinstance(given, type):
        return lambda name, module: isinstance(module, given)
    if callable(given):
        return given
    if isinstance(given, str):
        return lambda name, module: fnmatch.fnmatchcase(name, given)
    if given is not None and not isinstance(given, Iterable):
        raise TypeError(f"{where}={given!r}: give names or patterns of layers, classes, or f(name, module).")
    several = [_predicate(one, where) for one in given or ()]
    return lambda name, module: any(fits(name, module) for fits in several)


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


def _hooked(module: nn.Module) -> str:
    for kind in _HOOKS:
        hooks = getattr(module, kind, {})
        if any(hook not in (drop_and_act, *FREEZING_HOOKS) for hook in hooks.values()):
            return f"it carries hooks ({kind.strip('_').replace('_', ' ')}), which would be lost; remove them first"
    return ""


def _dim_of_convolutions(model: nn.Module) -> Dim | None:
    """The one dimension the model's convolutions have; 1 for a model of none; None where they differ."""
    kinds: tuple[tuple[Dim, tuple[type[nn.Module], ...]], ...] = (
        (1, (nn.Conv1d, nn.ConvTranspose1d)),
        (2, (nn.Conv2d, nn.ConvTranspose2d)),
        (3, (nn.Conv3d, nn.ConvTranspose3d)),
    )
    present = [dim for dim, classes in kinds if any(isinstance(m, classes) for m in model.modules())]
    if not present:
        return 1
    return present[0] if len(present) == 1 else None


def _converted(layer: _Layer, spec: NormSpec, options: Mapping[str, object], fallback: Dim | None) -> nn.Module:
    """The layer that takes another's place, with its tensors."""
    found = layer.found
    if found.synced and spec.keeps_moments:
        if spec.name in ("brn", "sn"):
            raise ValueError(f"it is synchronised, and {spec.name!r} has no synchronised form.")
        group = getattr(layer.module, "process_group", None)
        return _taken_over(layer, _synced_layer(found, spec, options, group))
    dim = cast("Dim | None", found.dim) or fallback
    if dim is None:
        raise ValueError("its class takes input of any rank and the model's convolutions differ. Say dim=1, 2 or 3.")
    allowed = accepted_options(norm_class(spec, dim))
    carried = {key: value for key, value in found.options.items() if key in allowed and key not in spec.preset}
    new = build(spec, found.channels, dim, {**carried, **_placement(layer, allowed), **options}, "the new norm")
    return _taken_over(layer, new)


def _synced_layer(found: Recognized, spec: NormSpec, options: Mapping[str, object], group: Any) -> nn.Module:
    cls: type[nn.Module] = nn.SyncBatchNorm if spec.name == "bn" else SyncContinualNorm
    check_options(spec, cls, options, "the new norm")
    carried = {key: value for key, value in found.options.items() if key in accepted_options(cls)}
    return cls(found.channels, **{**carried, **options, **spec.preset, "process_group": group})


def _placement(layer: _Layer, allowed: Iterable[str]) -> dict[str, object]:
    """Device and dtype for what the new layer has to make afresh: the old one's, or else those of what stands near."""
    tensor = next(_floating([layer.module]), layer.near)
    if tensor is None or "device" not in allowed:
        return {}
    return {"device": tensor.device, "dtype": tensor.dtype}


def _taken_over(layer: _Layer, new: nn.Module) -> nn.Module:
    """Give the new layer the old one's parameters, moments and state: the same objects, not copies."""
    old, found = layer.module, layer.found
    _take_parameters(old, new)
    if NORMS[found.norm].keeps_moments:
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            if old._buffers.get(name) is not None and new._buffers.get(name) is not None:
                new._buffers[name] = old._buffers[name]
    new.train(old.training)
    if isinstance(new, MomentNorm):
        new.use_running = found.constant or getattr(old, "use_running", False)
    if holds_moments(new) and (found.constant or is_frozen(old)):
        freeze_stats(new)
    if found.acts:
        new.drop, new.act = old.drop, old.act
        new.register_forward_hook(drop_and_act)
    return new


def _take_parameters(old: nn.Module, new: nn.Module) -> None:
    for name in ("weight", "bias"):
        if new._parameters.get(name) is None:
            continue
        if old._parameters.get(name) is not None:
            new._parameters[name] = old._parameters[name]
        elif old._buffers.get(name) is not None:  # a constant stays untrained
            new._parameters[name] = nn.Parameter(cast(Tensor, old._buffers[name]).clone(), requires_grad=False)
        elif old._parameters.get("weight") is not None or old._parameters.get("bias") is not None:
            new._parameters[name] = None  # one of the two stays without the other


_drop_and_act = drop_and_act  # under this name in models pickled by version 0.1


def _swap(model: nn.Module, replace: Mapping[nn.Module, nn.Module]) -> nn.Module:
    for parent, name, child in list(_edges(model)):
        if child in replace:
            parent._modules[name] = replace[child]
    return replace.get(model, model)


def _edges(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Every place where a module stands in another: a shared one stands in several."""
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                yield parent, name, child
