"""Norms of this package in timm: names for ``norm_layer=``, norm-and-activation layers, and timm's model tools.

`register` adds the norms to timm's tables of layers. Models are then built with them as with timm's own:

    from contnorm.integrations.timm import register

    register()
    model = timm.create_model("efficientnet_b0", norm_layer="cn")

Many architectures of timm build a norm and the activation after it as one layer. `ContinualNormAct2d` and the other
``*Act2d`` classes are these layers: a norm of this package, then a dropout, then an activation, with the arguments of
timm's ``BatchNormAct2d`` and the state-dict keys of the norm.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import EllipsisType, FunctionType
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from contnorm import convert_sync
from contnorm.integrations.extras import missing_extra
from contnorm.layers.activation import ActivationNorm
from contnorm.layers.adaptive import AdaptiveBalanceNorm2d
from contnorm.layers.balanced import BalancedBatchNorm2d
from contnorm.layers.base import MomentNorm, NormLayer
from contnorm.layers.batch import BatchNorm2d
from contnorm.layers.continual import ContinualNorm2d, ContinualNormBase
from contnorm.layers.evonorm import EvoNorm2d
from contnorm.layers.filter_response import FilterResponseNorm2d
from contnorm.layers.group import GroupNorm2d, InstanceNorm2d, LayerNorm2d
from contnorm.layers.instance_aware import InstanceAwareBatchNorm2d
from contnorm.layers.none import NoNorm2d
from contnorm.layers.renorm import BatchRenorm2d
from contnorm.layers.robust import RobustBatchNorm2d
from contnorm.layers.switchable import SwitchNorm2d
from contnorm.layers.task_balanced import TaskBalancedNorm2d
from contnorm.moments.freeze import freeze_stats
from contnorm.norm_entry import DIMS, accepted_options, norm_class
from contnorm.registry import NORMS

try:
    import timm.layers
    import timm.utils.model
    from timm.layers import BatchNormAct2d, create_act_layer, create_norm, create_norm_act
except ModuleNotFoundError as error:
    raise missing_extra("timm", error) from error

__all__ = [
    "AdaptiveBalanceNormAct2d",
    "BalancedBatchNormAct2d",
    "BatchRenormAct2d",
    "ContinualNormAct2d",
    "EvoNormAct2d",
    "FilterResponseNormAct2d",
    "GroupNormAct2d",
    "InstanceAwareBatchNormAct2d",
    "InstanceNormAct2d",
    "LayerNormAct2d",
    "NoNormAct2d",
    "RobustBatchNormAct2d",
    "SwitchNormAct2d",
    "TaskBalancedNormAct2d",
    "register",
    "registered_names",
    "unregister",
]

Activation = str | type[nn.Module] | Callable[..., nn.Module]


# --- a norm, a dropout and an activation in one layer ----------------------------------------------------------------


class _NormAct(NormLayer):
    """A norm, then a dropout, then an activation: the first base of a class whose second base is the norm.

    Args:
        num_features: Number of channels.
        eps: Value added to the variance. Default: that of the norm.
        momentum: Weight of a batch in the running moments. Default: that of the norm. Norms without running moments
            ignore it.
        affine: Whether the layer has weight and bias.
        track_running_stats: Whether to keep running moments. Norms without running moments ignore it.
        apply_act: Whether to apply the activation.
        act_layer: The activation: a class, a function that creates it, or a name of timm's. None for no activation.
        act_kwargs: Arguments of the activation.
        inplace: Whether the activation overwrites the output of the norm.
        drop_layer: Class of the layer between norm and activation; None for none.
        device: Device of parameters and buffers.
        dtype: Dtype of parameters and buffers.
        **options: Arguments that only this norm has, such as ``num_groups``.
    """

    normalizes_as: ClassVar[type[nn.Module]]
    drop: nn.Module
    act: nn.Module

    def __init__(
        self,
        num_features: int,
        eps: float | EllipsisType = ...,
        momentum: float | EllipsisType | None = ...,
        affine: bool = True,
        track_running_stats: bool = True,
        apply_act: bool = True,
        act_layer: Activation | None = nn.ReLU,
        act_kwargs: Mapping[str, Any] | None = None,
        inplace: bool = True,
        drop_layer: Callable[[], nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        arguments = {
            "eps": eps,
            "momentum": momentum,
            "affine": affine,
            "track_running_stats": track_running_stats,
            "device": device,
            "dtype": dtype,
        }
        super().__init__(num_features, **_accepted(type(self), self.normalizes_as, arguments, options))
        self.drop = nn.Identity() if drop_layer is None else drop_layer()
        act = create_act_layer(act_layer, **{"inplace": inplace, **(act_kwargs or {})}) if apply_act else None
        self.act = nn.Identity() if act is None else act

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.act(self.drop(super().forward(input)))
        return output


def _accepted(
    cls: type[nn.Module], norm: type[nn.Module], arguments: Mapping[str, object], options: Mapping[str, object]
) -> dict[str, object]:
    """Return the arguments of a norm: those of batch norm that it has, and its own, which must exist."""
    allowed = accepted_options(norm)
    unknown = [name for name in options if name not in allowed]
    if unknown:
        raise TypeError(
            f"{cls.__name__}: unknown argument {unknown[0]!r}. Use the arguments of timm's BatchNormAct2d, or "
            f"{', '.join(allowed)}."
        )
    return {**{name: value for name, value in arguments.items() if name in allowed and value is not ...}, **options}


class ContinualNormAct2d(_NormAct, ContinualNorm2d):  # type: ignore[misc]  # its forward takes the input alone
    """Continual normalization and an activation, for the architectures of timm.

    The arguments are those of timm's ``BatchNormAct2d``, and ``num_groups``, ``order``, ``tied`` and ``kernel`` of
    `ContinualNorm2d`. The state-dict keys are those of batch norm.

    Example:
        >>> layer = ContinualNormAct2d(8, num_groups=4, act_layer="silu")
        >>> layer(torch.randn(2, 8, 5, 5)).shape
        torch.Size([2, 8, 5, 5])
        >>> list(layer.state_dict())
        ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """

    normalizes_as = ContinualNorm2d


class GroupNormAct2d(_NormAct, GroupNorm2d):
    """Group normalization and an activation. The number of channels is the first argument, not that of groups."""

    normalizes_as = GroupNorm2d


class LayerNormAct2d(_NormAct, LayerNorm2d):
    """Layer normalization of each sample over channels and positions, and an activation.

    It is not timm's ``LayerNormAct2d``, which normalizes each position over its channels.
    """

    normalizes_as = LayerNorm2d


class InstanceNormAct2d(_NormAct, InstanceNorm2d):
    """Instance normalization and an activation."""

    normalizes_as = InstanceNorm2d


class BatchRenormAct2d(_NormAct, BatchRenorm2d):
    """Batch renormalization and an activation."""

    normalizes_as = BatchRenorm2d


class SwitchNormAct2d(_NormAct, SwitchNorm2d):
    """Switchable normalization and an activation."""

    normalizes_as = SwitchNorm2d


class AdaptiveBalanceNormAct2d(_NormAct, AdaptiveBalanceNorm2d):
    """AdaB2N and an activation."""

    normalizes_as = AdaptiveBalanceNorm2d


class TaskBalancedNormAct2d(_NormAct, TaskBalancedNorm2d):
    """Task-balanced batch normalization and an activation."""

    normalizes_as = TaskBalancedNorm2d


class BalancedBatchNormAct2d(_NormAct, BalancedBatchNorm2d):
    """Batch normalization with class-balanced running moments, and an activation."""

    normalizes_as = BalancedBatchNorm2d


class InstanceAwareBatchNormAct2d(_NormAct, InstanceAwareBatchNorm2d):
    """Instance-aware batch normalization and an activation."""

    normalizes_as = InstanceAwareBatchNorm2d


class RobustBatchNormAct2d(_NormAct, RobustBatchNorm2d):
    """Robust batch normalization and an activation."""

    normalizes_as = RobustBatchNorm2d


class NoNormAct2d(_NormAct, NoNorm2d):
    """No normalization, and an activation that never overwrites its input, which the network may use elsewhere."""

    normalizes_as = NoNorm2d

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.clone())


class _WithOwnActivation(ActivationNorm):
    """Base of the norms that contain their activation, with the arguments of timm's ``BatchNormAct2d``.

    ``act_layer``, ``act_kwargs`` and ``inplace`` are ignored, as in timm's EvoNorm layers: ``apply_act`` says whether
    the norm's own activation is applied.
    """

    normalizes_as: ClassVar[type[nn.Module]]

    def __init__(
        self,
        num_features: int,
        eps: float | EllipsisType = ...,
        momentum: float | EllipsisType | None = ...,
        affine: bool = True,
        track_running_stats: bool = True,
        apply_act: bool = True,
        act_layer: Activation | None = None,
        act_kwargs: Mapping[str, Any] | None = None,
        inplace: bool = True,
        drop_layer: Callable[[], nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if drop_layer is not None:
            raise TypeError(
                f"{type(self).__name__}: drop_layer can't be applied between the norm and its activation, which are "
                f"one formula. Use another norm, or no drop_layer."
            )
        arguments = {"eps": eps, "affine": affine, "apply_act": apply_act, "device": device, "dtype": dtype}
        super().__init__(num_features, **_accepted(type(self), self.normalizes_as, arguments, options))  # type: ignore[arg-type]


class EvoNormAct2d(_WithOwnActivation, EvoNorm2d):
    """EvoNorm-S0, which contains its activation."""

    normalizes_as = EvoNorm2d


class FilterResponseNormAct2d(_WithOwnActivation, FilterResponseNorm2d):
    """Filter response normalization with its thresholded linear unit."""

    normalizes_as = FilterResponseNorm2d


_ACT_CLASSES: Mapping[type[nn.Module], type[nn.Module]] = {
    cls.normalizes_as: cls
    for cls in (
        ContinualNormAct2d,
        GroupNormAct2d,
        LayerNormAct2d,
        InstanceNormAct2d,
        BatchRenormAct2d,
        SwitchNormAct2d,
        AdaptiveBalanceNormAct2d,
        TaskBalancedNormAct2d,
        BalancedBatchNormAct2d,
        InstanceAwareBatchNormAct2d,
        RobustBatchNormAct2d,
        NoNormAct2d,
        EvoNormAct2d,
        FilterResponseNormAct2d,
    )
}
# timm's own, which its tools for batch norm know: the same function as ours.
_ACT_CLASS_OF = {**_ACT_CLASSES, BatchNorm2d: BatchNormAct2d}


# --- timm's tables ---------------------------------------------------------------------------------------------------

_NUMBERS_OF_GROUPS = range(1, 129)
_PREFIX = "contnorm_"  # of names that timm already has


@dataclass
class _Registration:
    """What `register` added to timm."""

    names: dict[str, str] = field(default_factory=dict)  # by norm, its name in timm
    entries: list[tuple[dict[str, Any], str, object]] = field(default_factory=list)
    members: list[tuple[set[Any], object]] = field(default_factory=list)
    functions: dict[FunctionType, FunctionType] = field(default_factory=dict)  # timm's by ours

    def add_entry(self, table: dict[str, Any], key: str, value: object) -> None:
        if key not in table:
            table[key] = value
            self.entries.append((table, key, value))

    def add_member(self, table: set[Any], value: object) -> None:
        if value not in table:
            table.add(value)
            self.members.append((table, value))


_registration: _Registration | None = None


def register() -> None:
    """Add the norms of this package to timm. A second call changes nothing.

    Afterwards these work in ``timm.create_model(..., norm_layer=...)``, ``create_norm_layer``, ``get_norm_layer``,
    ``create_norm_act_layer`` and ``get_norm_act_layer``:

    - the names of `registered_names`, such as ``"cn"``. A grouped norm takes the number of groups in its name
      (``"cn8"``); without one it is ``num_groups="auto"``, since the widths of timm's networks differ;
    - the classes, such as `contnorm.ContinualNorm2d`, and a `functools.partial` of them.

    Names that timm has keep their meaning. ``timm.utils.freeze``, ``unfreeze``, ``freeze_batch_norm_2d`` and
    ``convert_sync_batchnorm`` treat the layers of this package correctly, and ``convert_splitbn_model`` raises an error
    before it changes the model. Features can be extracted with torch.fx (``feature_cls="fx"``).

    Example:
        >>> import timm
        >>> register()
        >>> timm.layers.create_norm_act_layer("cn8", 64, act_layer="silu")
        ContinualNormAct2d(
          64, num_groups=8, eps=1e-05, momentum=0.1
          (drop): Identity()
          (act): SiLU(inplace=True)
        )
        >>> unregister()
    """
    global _registration
    if _registration is None:
        _registration = _Registration()
        _add_names(_registration)
        _add_classes(_registration)
        _add_leaves(_registration)
        _replace_functions(_registration)


def unregister() -> None:
    """Restore timm to its state before `register`. Models that were built in between keep working.

    Example:
        >>> register()
        >>> unregister()
        >>> "cn" in timm.layers.create_norm._NORM_MAP
        False
    """
    global _registration
    if _registration is None:
        return
    for table, key, value in _registration.entries:
        if table.get(key) is value:
            del table[key]
    for members, value in _registration.members:
        members.discard(value)
    _swap_functions(_registration.functions)
    _registration = None


def registered_names() -> dict[str, str]:
    """Return the name in timm of each norm of this package; empty before `register`.

    The names differ where timm has the same name for another layer: its ``"iabn"`` is in-place activated batch norm,
    and its ``"frn"`` and ``"evonorm_s0"`` are its own implementations.

    Example:
        >>> register()
        >>> registered_names()["cn"], registered_names()["iabn"]
        ('cn', 'contnorm_iabn')
        >>> unregister()
    """
    return {} if _registration is None else dict(_registration.names)


def _key(name: str) -> str:
    """Return the key of a name in timm's tables."""
    return name.replace("_", "").lower()


def _add_names(registration: _Registration) -> None:
    norms, norm_acts = create_norm._NORM_MAP, create_norm_act._NORM_ACT_MAP
    for name, entry in NORMS.items():
        if entry.layers:
            continue  # a norm of another package
        if entry.standardizes_weights:
            for table in (norms, norm_acts):
                registration.add_entry(table, _key(name), _refusal(name, _STANDARDIZES))
            continue
        name_in_timm = name if _key(name) not in {*norms, *norm_acts} else f"{_PREFIX}{name}"
        registration.names[name] = name_in_timm
        plain = norm_class(entry, 2)
        assert isinstance(plain, type)
        for suffix, options in _variants(entry.grouped):
            key = f"{_key(name_in_timm)}{suffix}"
            norm = functools.partial(plain, **{**options, **entry.preset}) if options or entry.preset else plain
            act: Any = _with_keywords(_ACT_CLASS_OF[plain], norm)
            registration.add_entry(norms, key, _refusal(name, _ABSORBS) if entry.absorbs_activation else norm)
            registration.add_entry(norm_acts, key, act)
            if not entry.absorbs_activation:
                registration.add_member(create_norm_act._NORM_ACT_REQUIRES_ARG, act)


def _variants(grouped: bool) -> Iterator[tuple[str, dict[str, object]]]:
    """Iterate over the suffixes of a norm's name and the options that they stand for."""
    yield "", {"num_groups": "auto"} if grouped else {}
    if grouped:
        for count in _NUMBERS_OF_GROUPS:
            yield str(count), {"num_groups": count}


def _with_keywords(cls: type[nn.Module], norm: object) -> object:
    """Return a class with the arguments that are bound in a partial of another one."""
    return functools.partial(cls, **norm.keywords) if isinstance(norm, functools.partial) else cls


_STANDARDIZES = (
    "it also standardizes the weights of the convolutions before it, which timm's architectures do not let a norm do"
)
_ABSORBS = "it contains an activation, and this architecture applies one after each norm"


def _refusal(name: str, reason: str) -> Callable[..., NoReturn]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise ValueError(
            f"norm_layer={name!r}: {reason}. Build the model with its own norm, then use "
            f"contnorm.convert_norm(model, {name!r}, example_input=...)."
        )

    return refuse


def _add_classes(registration: _Registration) -> None:
    """Let timm find the norm-and-activation class of a norm class, which it looks up by the name of the class."""
    by_name = getattr(create_norm_act, "_NORM_TO_NORM_ACT_MAP", {})  # older versions of timm have a fixed list
    for plain, act in _ACT_CLASSES.items():
        registration.add_member(create_norm_act._NORM_ACT_TYPES, act)
        if not issubclass(plain, ActivationNorm):
            registration.add_member(create_norm_act._NORM_ACT_REQUIRES_ARG, act)
            registration.add_entry(by_name, plain.__name__.lower(), act)
    # timm has another class with the name LayerNorm2d. As a member of these sets, ours is called with `act_layer`,
    # which it refuses; otherwise timm would silently build its own.
    registration.add_member(create_norm_act._NORM_ACT_TYPES, LayerNorm2d)
    registration.add_member(create_norm_act._NORM_ACT_REQUIRES_ARG, LayerNorm2d)


def _add_leaves(registration: _Registration) -> None:
    """Let timm's feature extraction with torch.fx treat the layers as units, as it does its own."""
    leaves = timm.layers._fx._leaf_modules if hasattr(timm.layers, "_fx") else set()  # elsewhere in older versions
    for entry in NORMS.values():
        for dim in DIMS if not entry.layers else ():
            registration.add_member(leaves, norm_class(entry, dim))
    for cls in _ACT_CLASSES.values():
        registration.add_member(leaves, cls)


# --- timm's tools ----------------------------------------------------------------------------------------------------


def _replace_functions(registration: _Registration) -> None:
    wrappers = {
        timm.layers.freeze_batch_norm_2d: _freeze_batch_norm_2d,
        timm.layers.unfreeze_batch_norm_2d: _unfreeze_batch_norm_2d,
        timm.layers.convert_sync_batchnorm: _convert_sync_batchnorm,
        timm.layers.convert_splitbn_model: _convert_splitbn_model,
    }
    replacements = {}
    for original, wrapper in wrappers.items():
        # A new function for each, with the name and the docstring of timm's.
        replacements[original] = _bound(wrapper, original)
        registration.functions[replacements[original]] = original
    _swap_functions(replacements)


def _bound(wrapper: Callable[..., nn.Module], original: Any) -> Any:
    @functools.wraps(original)
    def function(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return wrapper(original, module, *args, **kwargs)

    return function


def _swap_functions(replacements: Mapping[Any, Any]) -> None:
    """Replace functions in all modules of timm that have imported them."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "timm"]
    for old, new in replacements.items():
        attribute = str(old.__name__)
        for module in modules:
            if vars(module).get(attribute) is old:
                setattr(module, attribute, new)


def _freeze_batch_norm_2d(original: Callable[..., nn.Module], module: nn.Module) -> nn.Module:
    """Freeze: a layer of this package uses its running moments in training too, and its parameters are constant.

    timm's function calls itself for the children of a module, so each layer arrives here.
    """
    if not isinstance(module, MomentNorm):
        return original(module)
    _check_moments(module, "freeze_batch_norm_2d")
    freeze_stats(module)
    module.use_running = True
    return module.requires_grad_(False)


def _unfreeze_batch_norm_2d(original: Callable[..., nn.Module], module: nn.Module) -> nn.Module:
    if not isinstance(module, MomentNorm):
        return original(module)
    if module.use_running:
        module.use_running = False
        freeze_stats(module, False)
        module.requires_grad_(True)
    return module


def _check_moments(module: MomentNorm, caller: str) -> None:
    if module.running_mean is None:
        raise ValueError(
            f"{caller}: a {type(module).__name__} has no running moments that could be used in training. Build it "
            f"with track_running_stats=True."
        )


def _convert_sync_batchnorm(
    original: Callable[..., nn.Module], module: nn.Module, process_group: Any = None
) -> nn.Module:
    for layer in module.modules():  # before anything is changed
        if isinstance(layer, MomentNorm) and not isinstance(layer, ContinualNormBase | BatchNorm2d):
            raise ValueError(
                f"convert_sync_batchnorm: {type(layer).__name__} has no synchronised form. Convert it to 'bn' or 'cn' "
                f"with contnorm.convert_norm first. The model is unchanged."
            )
    return convert_sync(module, process_group) if isinstance(module, MomentNorm) else original(module, process_group)


def _convert_splitbn_model(original: Callable[..., nn.Module], module: nn.Module, num_splits: int = 2) -> nn.Module:
    for layer in module.modules():
        if isinstance(layer, MomentNorm) and (not isinstance(layer, BatchNorm2d) or "act" in layer._modules):
            also = "applies an activation" if isinstance(layer, BatchNorm2d) else "is more than a batch norm"
            raise TypeError(
                f"convert_splitbn_model would drop a part of {type(layer).__name__}, which {also}. Split only models "
                f"with plain batch norms. The model is unchanged."
            )
    return original(module, num_splits)
