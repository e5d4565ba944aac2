"""Replace the normalization layers of a model.

The new layer reuses the Parameter and buffer objects of the old one wherever both have them. An optimizer created
before the conversion therefore continues to train them, and converting a model and converting it back restores its
output bit for bit. All new layers are built before the model is changed: if one layer cannot be converted, the model
stays unchanged.
"""

from __future__ import annotations

import fnmatch
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from torch import Tensor, nn

from contnorm.checks import GroupsError, auto_groups, check_model, nearest_groups
from contnorm.convert.activations import Absorption, absorbed_act, plan_absorption
from contnorm.convert.detect import (
    DetectedNorm,
    UnsupportedNorm,
    detect_norm,
    drop_and_act,
    holds_moments,
)
from contnorm.convert.neighbours import find_neighbours, run_example
from contnorm.convert.standardization import Standardization, plan_standardization
from contnorm.layers.base import MomentNorm, NormLayer
from contnorm.layers.sync import SyncContinualNorm
from contnorm.moments.freeze import FREEZING_HOOKS, freeze_stats, is_frozen
from contnorm.norm_entry import (
    DIMS,
    Dim,
    LayerFactory,
    NormEntry,
    accepted_options,
    build_norm,
    check_options,
    layer_parameters,
    norm_class,
)
from contnorm.registry import NORMS, resolve_norm

__all__ = ["Filter", "convert_norm", "convert_sync", "referenced_modules"]

Choice = str | type[nn.Module] | Callable[[str, nn.Module], bool]
Filter = Choice | Iterable[Choice]


def convert_norm(
    model: nn.Module,
    to: str | LayerFactory | NormEntry,
    *,
    only: Filter | None = None,
    skip: Filter | None = None,
    dim: Dim | None = None,
    example_input: object = None,
    **options: object,
) -> nn.Module:
    """Replace the norm layers of a model with another norm, in place.

    Works on any module tree, including nested modules, shared layers (which stay shared) and models of torchvision,
    timm and other libraries. Parameters (the same objects), running moments, eps, momentum, device, dtype, training
    mode and ``requires_grad`` are kept. State that the new norm does not have is dropped; state that the old norm did
    not have is initialized. A layer of another library is converted only if a copy of it computes the expected norm
    on random input. Otherwise the conversion raises an error.

    Args:
        model: The model. If it is itself a norm layer, its replacement is returned.
        to: The name of the new norm, as in ``create_norm``; or a class of layers, or a function
            ``(num_features, **options)`` that returns one. See `register_norm` to convert from such a norm, too.
        only: The layers to convert: a name or pattern (``"layer1.*"``), a class, a function
            ``f(name, module) -> bool``, or a list of these, at least one of which must match.
        skip: The layers not to convert, in the same forms.
        dim: The dimension of layers whose class does not define it (``GroupNorm``, ``SyncBatchNorm``). By default,
            that of the model's convolutions.
        example_input: An input of the model (a tuple or a dict for several arguments). The model is run on it once, in
            evaluation mode. With ``num_groups="auto"``, layers whose input has one position get groups of at least 8
            channels instead of 2. For norms that contain an activation (``evonorm_s0``, ``frn``) or standardize the
            weights of convolutions (``gn_ws``), the run shows what is applied before and after each layer. It is
            needed for them unless all layers are in ``nn.Sequential``.
        **options: Arguments of the new norm, such as ``num_groups``, ``eps`` or ``momentum``. They override the
            options of the old layer. ``num_groups="auto"`` gives each layer the largest divisor of its number of
            channels, up to 32, that leaves at least 2 channels in a group (8 for (N, C) input), or one group if there
            is no such divisor.

    Returns:
        The model.

    Raises:
        ValueError: If there is nothing to convert, or if a layer cannot be converted. The message contains the
            layer's name and the reason, and the model is unchanged.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU())
        >>> weight = model[1].weight
        >>> convert_norm(model, "cn", num_groups=8)[1]
        ContinualNorm2d(64, num_groups=8, eps=1e-05, momentum=0.1)
        >>> model[1].weight is weight
        True
    """
    spec, options = resolve_norm(to, options, "convert_norm")
    check_model(model, "convert_norm")
    used: Dim = dim or (2 if not spec.layers or 2 in spec.layers else min(spec.layers))
    check_options(spec, norm_class(spec, used, "convert_norm"), options, "convert_norm")
    layers = _select_layers(model, only, skip, "convert_norm")
    fallback = dim or _dim_of_convolutions(model)
    if spec.grouped:
        _check_groups(spec, layers, options)
    narrow = _single_position_layers(model, layers, example_input) if options.get("num_groups") == "auto" else set()
    absorption, standardization = _plan_neighbours(model, layers, spec, options, example_input)
    replace = {}
    for layer in layers:
        chosen = absorption.options(layer.module)
        if layer.module in narrow:
            chosen["num_groups"] = auto_groups(layer.detected.channels, one_position=True)
        with _layer_named_in_errors(layer, "convert_norm"):
            replace[layer.module] = _build_replacement(layer, spec, {**options, **chosen}, fallback)
    standardization.apply(model, replace)
    return _swap(model, {**replace, **absorption.changes(model, replace)})


def _plan_neighbours(
    model: nn.Module, layers: list[_Layer], spec: NormEntry, options: Mapping[str, object], example_input: object
) -> tuple[Absorption, Standardization]:
    """Plan what happens to the activations after the layers and to the convolutions before them."""
    absorbs = spec.absorbs_activation and "apply_act" not in options
    if not absorbs and not spec.standardizes_weights:
        return Absorption(), Standardization()
    neighbours = find_neighbours(model, [layer.module for layer in layers], example_input)
    if absorbs:
        described = [(layer.name, layer.module, layer.detected) for layer in layers]
        return plan_absorption(described, neighbours), Standardization()
    return Absorption(), plan_standardization(model, [(layer.name, layer.module) for layer in layers], neighbours)


def _check_groups(spec: NormEntry, layers: list[_Layer], options: Mapping[str, object]) -> None:
    """Raise if the number of groups does not divide the channels of every layer, and suggest one that does."""
    usual = layer_parameters(norm_class(spec, min(spec.layers or DIMS)))["num_groups"].default
    counts = {layer: options.get("num_groups", layer.detected.options.get("num_groups", usual)) for layer in layers}
    wrong = [
        layer
        for layer, count in counts.items()
        if type(count) is int and count > 0 and layer.detected.channels % count  # the layer itself reports the rest
    ]
    if not wrong:
        return
    first, more = wrong[0], len(wrong) - 1
    others = f" and {more} more layer{'s' if more > 1 else ''}" if more else ""
    channels, requested = first.detected.channels, cast(int, counts[first])
    suggestion = nearest_groups([layer.detected.channels for layer in layers], requested)
    reason = f"which divides the channels of all {len(layers)} layers, " if len(layers) > 1 else ""
    raise GroupsError(
        f"convert_norm: layer {first.name!r} ({type(first.module).__name__}){others}: num_groups={requested} does "
        f"not divide the {channels} channels. Use num_groups={suggestion}, {reason}or num_groups='auto', which chooses "
        f"a number for each layer. The model is unchanged.",
        requested,
        channels,
        suggestion,
    )


def _single_position_layers(model: nn.Module, layers: list[_Layer], example_input: object) -> set[nn.Module]:
    """Run the model once, and return the layers whose input has one position per sample and channel."""
    positions: dict[nn.Module, int] = {}
    if example_input is None:
        return set()

    def measure(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if x is not None and x.dim() >= 2:
            positions[module] = min(x.shape[2:].numel(), positions.get(module, x.shape[2:].numel()))

    handles = [layer.module.register_forward_pre_hook(measure, with_kwargs=True) for layer in layers]
    try:
        run_example(model, example_input)
    finally:
        for handle in handles:
            handle.remove()
    return {module for module, count in positions.items() if count == 1}


def convert_sync(
    model: nn.Module, process_group: Any = None, *, only: Filter | None = None, skip: Filter | None = None
) -> nn.Module:
    """Replace continual and batch norms with their synchronized forms, in place, for training on several processes.

    Use it instead of ``torch.nn.SyncBatchNorm.convert_sync_batchnorm``, which supports only batch norm. Norms that
    normalize each sample (GN, IN, LN) and norms with constant moments need no synchronization and are not replaced. A
    norm without a synchronized form raises an error.

    Args:
        model: The model.
        process_group: The processes whose batches are normalized together; None for all processes.
        only: The layers to convert, as in `convert_norm`.
        skip: The layers not to convert.

    Returns:
        The model.

    Example:
        >>> from contnorm import ContinualNorm2d
        >>> type(convert_sync(nn.Sequential(ContinualNorm2d(64)))[0]).__name__
        'SyncContinualNorm'
    """
    check_model(model, "convert_sync")
    replace = {}
    for layer in _select_layers(model, only, skip, "convert_sync", _needs_sync):
        with _layer_named_in_errors(layer, "convert_sync"):
            if not _has_synced_form(NORMS[layer.detected.norm]):
                raise ValueError(f"{layer.detected.norm!r} has no synchronised form. Convert it to 'bn' or 'cn' first.")
            new = _build_synced(layer.detected, NORMS[layer.detected.norm], {}, process_group)
            replace[layer.module] = _transfer_state(layer, new)
    return _swap(model, replace)


def _has_synced_form(spec: NormEntry) -> bool:
    return spec.name == "bn" or spec.target == NORMS["cn"].target


def _needs_sync(module: nn.Module, detected: DetectedNorm) -> bool:
    constant = detected.constant or getattr(module, "use_running", False)
    return NORMS[detected.norm].keeps_moments and not detected.synced and not constant


@dataclass(frozen=True, eq=False)
class _Layer:
    """A norm layer to convert: its first name in the model, its description, and a tensor near it in the model."""

    name: str
    module: nn.Module
    detected: DetectedNorm
    near: Tensor | None


@contextmanager
def _layer_named_in_errors(layer: _Layer, caller: str) -> Iterator[None]:
    """Add the name and class of the layer to the message of a ``ValueError`` raised inside."""
    try:
        yield
    except ValueError as error:
        where = f"{caller}: layer {layer.name!r} ({type(layer.module).__name__})"
        raise ValueError(f"{where}: {error} The model is unchanged.") from error


def _select_layers(
    model: nn.Module,
    only: Filter | None,
    skip: Filter | None,
    caller: str,
    wants: Callable[[nn.Module, DetectedNorm], bool] = lambda module, detected: True,
) -> list[_Layer]:
    """Return the norm layers selected by ``wants`` and the filters; raise if one of them cannot be replaced."""
    wanted, unwanted = _predicate(only, f"{caller}: only"), _predicate(skip, f"{caller}: skip")
    unreplaceable = _unreplaceable_modules(model)
    layers: list[_Layer] = []
    refused: dict[tuple[str, str], list[str]] = {}
    seen = 0
    names: list[str] = []
    near = next(_floating(model.modules()), None)
    for name, module in model.named_modules():
        near = next(_floating([module]), near)
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
            else unreplaceable.get(module) or _hook_refusal(module)
        )
        if reason:
            refused.setdefault((type(module).__name__, reason), []).append(name)
        elif isinstance(detected, DetectedNorm):
            layers.append(_Layer(name, module, detected, near))
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


def _floating(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Iterate over the floating-point parameters and buffers that modules hold directly."""
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.is_floating_point():
                yield tensor


def _unreplaceable_modules(model: nn.Module) -> dict[nn.Module, str]:
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


def _hook_refusal(module: nn.Module) -> str:
    for kind in _HOOKS:
        hooks = getattr(module, kind, {})
        if any(hook not in (drop_and_act, *FREEZING_HOOKS) for hook in hooks.values()):
            return f"it has hooks ({kind.strip('_').replace('_', ' ')}), which would be lost; remove them first"
    return ""


def _dim_of_convolutions(model: nn.Module) -> Dim | None:
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


def _build_replacement(
    layer: _Layer, spec: NormEntry, options: Mapping[str, object], fallback: Dim | None
) -> nn.Module:
    """Build the replacement of a layer, with the layer's tensors."""
    detected = layer.detected
    if detected.synced and spec.keeps_moments:
        if not _has_synced_form(spec):
            raise ValueError(f"it is synchronised, and {spec.name!r} has no synchronised form.")
        group = getattr(layer.module, "process_group", None)
        return _transfer_state(layer, _build_synced(detected, spec, options, group))
    dim = cast("Dim | None", detected.dim) or fallback
    if dim is None:
        raise ValueError("its class accepts any rank, and the model's convolutions have several. Give dim=1, 2 or 3.")
    allowed = accepted_options(norm_class(spec, dim, "the new norm"))
    carried = {key: value for key, value in detected.options.items() if key in allowed and key not in spec.preset}
    options = {**carried, **_placement(layer, allowed), **options}
    if spec.layers:
        return _transfer_state(layer, _build_user_layer(layer, spec, dim, options))
    return _transfer_state(layer, build_norm(spec, detected.channels, dim, options, "the new norm"))


def _build_user_layer(layer: _Layer, spec: NormEntry, dim: Dim, options: dict[str, object]) -> nn.Module:
    """Build a layer of a norm that is not of this package, which may support neither devices nor automatic groups."""
    if options.get("num_groups") == "auto":
        options["num_groups"] = auto_groups(layer.detected.channels, one_position=dim == 1)
    new = build_norm(spec, layer.detected.channels, dim, options, "the new norm")
    tensor = next(_floating([layer.module]), layer.near)
    return new if tensor is None or "device" in options else new.to(tensor.device, tensor.dtype)


def _build_synced(detected: DetectedNorm, spec: NormEntry, options: Mapping[str, object], group: Any) -> nn.Module:
    cls: type[nn.Module] = nn.SyncBatchNorm if spec.name == "bn" else SyncContinualNorm
    check_options(spec, cls, options, "the new norm")
    carried = {key: value for key, value in detected.options.items() if key in accepted_options(cls)}
    return cls(detected.channels, **{**carried, **options, **spec.preset, "process_group": group})


def _placement(layer: _Layer, allowed: Iterable[str]) -> dict[str, object]:
    """Return device and dtype for new tensors: those of the old layer, or else of the nearest tensor in the model."""
    tensor = next(_floating([layer.module]), layer.near)
    if tensor is None or "device" not in allowed:
        return {}
    return {"device": tensor.device, "dtype": tensor.dtype}


def _transfer_state(layer: _Layer, new: nn.Module) -> nn.Module:
    """Move the parameters, moments and state of the old layer to the new one: the same objects, not copies."""
    old, detected = layer.module, layer.detected
    _take_parameters(old, new)
    if NORMS[detected.norm].keeps_moments:
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            buffer = old._buffers.get(name)
            if buffer is not None and _fits(new._buffers.get(name), buffer):
                new._buffers[name] = buffer
    if isinstance(new, NormLayer) and type(old) is type(new):
        _take_own_tensors(old, new)
    new.train(old.training)
    if isinstance(new, MomentNorm):
        new.use_running = detected.constant or getattr(old, "use_running", False)
    if holds_moments(new) and (detected.constant or is_frozen(old)):
        freeze_stats(new)
    if detected.acts:
        new.drop, new.act = old.drop, absorbed_act(cast(nn.Module, old.act), new)
        new.register_forward_hook(drop_and_act)
    return new


def _take_own_tensors(old: nn.Module, new: NormLayer) -> None:
    """Move the tensors that only this norm has, such as learned mixture weights, from a layer of the same class."""
    for name in new.own_tensors:
        parameter, buffer = old._parameters.get(name), old._buffers.get(name)
        if parameter is not None and _fits(new._parameters.get(name), parameter):
            new._parameters[name] = parameter
        if buffer is not None and _fits(new._buffers.get(name), buffer):
            new._buffers[name] = buffer


def _fits(new: Tensor | None, old: Tensor) -> bool:
    """Whether a new layer can use a tensor of the old one. Layers of this package always can; others have any shape."""
    return new is not None and new.shape == old.shape


def _take_parameters(old: nn.Module, new: nn.Module) -> None:
    for name in ("weight", "bias"):
        parameter = new._parameters.get(name)
        tensor: Tensor | None = old._parameters.get(name)
        tensor = old._buffers.get(name) if tensor is None else tensor
        if parameter is None or (tensor is not None and not _fits(parameter, tensor)):
            continue
        if old._parameters.get(name) is not None:
            new._parameters[name] = old._parameters[name]
        elif old._buffers.get(name) is not None:  # a constant must not become trainable
            new._parameters[name] = nn.Parameter(cast(Tensor, old._buffers[name]).clone(), requires_grad=False)
        elif old._parameters.get("weight") is not None or old._parameters.get("bias") is not None:
            # The old layer has only one of weight and bias. Code of others may not expect None in place of the other.
            if isinstance(new, NormLayer | nn.SyncBatchNorm):
                new._parameters[name] = None
            else:
                parameter.requires_grad_(False)


def _swap(model: nn.Module, replace: Mapping[nn.Module, nn.Module]) -> nn.Module:
    for parent, name, child in list(_edges(model)):
        if child in replace:
            parent._modules[name] = replace[child]
    return replace.get(model, model)


def _edges(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Iterate over all (parent, name, child) registrations; a shared module has several."""
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                yield parent, name, child


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
