"""timm: names of this package's norms for ``norm_layer=``, and norm-and-activation layers.

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
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from timm.layers import BatchNormAct2d, create_act_layer, create_norm, create_norm_act
from timm.models import register_notrace_module
from torch import Tensor, nn

from contnorm.norms.base import NormLayer
from contnorm.norms.batch import BatchNorm2d
from contnorm.norms.group import LayerNorm2d
from contnorm.registry import DIMS, NORMS, layer_parameters, norm_class

__all__ = ["ACT_CLASSES", "ContinualNormAct2d", "register"]

NUMBERS_OF_GROUPS = range(1, 129)


class _NormAct(NormLayer):
    """A norm, then a dropout, then an activation: the first base of a class whose second base is the norm.

    Args:
        num_features: Number of channels.
        apply_act: Whether to apply the activation.
        act_layer: The activation: a class, a function that creates it, or a name of timm's. None for no activation.
        act_kwargs: Arguments of the activation.
        inplace: Whether the activation overwrites the output of the norm.
        drop_layer: Class of the layer between norm and activation; None for none.
        **options: Arguments of the norm. Those that only other norms have, such as the momentum, are ignored.
    """

    normalizes_as: ClassVar[type[nn.Module]]
    drop: nn.Module
    act: nn.Module

    def __init__(
        self,
        num_features: int,
        *,
        apply_act: bool = True,
        act_layer: str | type[nn.Module] | Callable[..., nn.Module] | None = nn.ReLU,
        act_kwargs: Mapping[str, Any] | None = None,
        inplace: bool = True,
        drop_layer: Callable[[], nn.Module] | None = None,
        **options: Any,
    ) -> None:
        absent = {"eps", "momentum", "affine", "track_running_stats"} - set(layer_parameters(self.normalizes_as))
        super().__init__(num_features, **{name: value for name, value in options.items() if name not in absent})
        self.drop = nn.Identity() if drop_layer is None else drop_layer()
        act = create_act_layer(act_layer, **{"inplace": inplace, **(act_kwargs or {})}) if apply_act else None
        self.act = nn.Identity() if act is None else act

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        # An activation in place must not change an input that no norm has copied.
        activated: Tensor = self.act(self.drop(output.clone() if output is input else output))
        return activated


def _act_class(norm: type[nn.Module]) -> type[nn.Module]:
    """Return the norm-and-activation class of a norm, as a class of this module."""
    document = f"`{norm.__name__}`, a dropout and an activation, with the arguments of timm's ``BatchNormAct2d``."
    names = {"normalizes_as": norm, "__module__": __name__, "__doc__": document}
    return type(norm.__name__.replace("2d", "Act2d"), (_NormAct, norm), names)


_ENTRIES = [e for e in NORMS.values() if not (e.layers or e.absorbs_activation or e.standardizes_weights)]
# timm's own class for batch norm, which its tools for batch norm know: the same function as ours.
ACT_CLASSES: dict[Any, type[nn.Module]] = {
    norm: BatchNormAct2d if norm is BatchNorm2d else _act_class(norm)  # type: ignore[arg-type]
    for norm in dict.fromkeys(norm_class(entry, 2) for entry in _ENTRIES)
}
globals().update({cls.__name__: cls for cls in ACT_CLASSES.values()})
ContinualNormAct2d = ACT_CLASSES[norm_class(NORMS["cn"], 2)]


@functools.cache  # a second call changes nothing
def register() -> None:
    """Add the norms of this package to timm.

    Afterwards these work in ``timm.create_model(..., norm_layer=...)``, ``create_norm_layer``, ``get_norm_layer``,
    ``create_norm_act_layer`` and ``get_norm_act_layer``:

    - the names of the norms, such as ``"cn"``. A grouped norm takes the number of groups in its name (``"cn8"``);
      without one it is ``num_groups="auto"``, since the widths of timm's networks differ. timm's ``"iabn"`` is another
      layer and stays so; ours is ``"contnorm_iabn"``;
    - the classes, such as `contnorm.ContinualNorm2d`, and a `functools.partial` of them.

    Norms that contain an activation are not added, as timm has its own EvoNorm and FRN, and ``gn_ws`` is not.
    Features can be extracted with torch.fx (``feature_cls="fx"``).

    Example:
        >>> import timm
        >>> register()
        >>> timm.layers.create_norm_act_layer("cn8", 64, act_layer="silu")
        ContinualNormAct2d(
          64, num_groups=8, eps=1e-05, momentum=0.1
          (drop): Identity()
          (act): SiLU(inplace=True)
        )
    """
    plain_table, act_table = create_norm._NORM_MAP, create_norm_act._NORM_ACT_MAP
    for entry in _ENTRIES:
        key = entry.name.replace("_", "")  # timm's tables have no underscores
        key = f"contnorm{key}" if key in plain_table or key in act_table else key
        plain: Any = norm_class(entry, 2)
        for suffix in ("", *map(str, NUMBERS_OF_GROUPS)) if entry.grouped else ("",):
            options: dict[str, Any] = {"num_groups": int(suffix) if suffix else "auto"} if entry.grouped else {}
            options |= entry.preset
            plain_table[f"{key}{suffix}"] = functools.partial(plain, **options) if options else plain
            act = functools.partial(ACT_CLASSES[plain], **options) if options else ACT_CLASSES[plain]
            act_table[f"{key}{suffix}"] = act
            create_norm_act._NORM_ACT_REQUIRES_ARG.add(act)
    # timm looks up the norm-and-activation class of a class by its name.
    for plain, act_class in ACT_CLASSES.items():
        create_norm_act._NORM_ACT_TYPES.add(act_class)
        create_norm_act._NORM_ACT_REQUIRES_ARG.add(act_class)
        create_norm_act._NORM_TO_NORM_ACT_MAP.setdefault(plain.__name__.lower(), act_class)
    # timm has another class with the name LayerNorm2d. As a member of these sets, ours is called with `act_layer`,
    # which it refuses; otherwise timm would silently build its own.
    create_norm_act._NORM_ACT_TYPES.add(LayerNorm2d)
    create_norm_act._NORM_ACT_REQUIRES_ARG.add(LayerNorm2d)
    # Feature extraction with torch.fx treats the layers as units, as it does timm's own.
    norms = {norm_class(entry, dim) for entry in NORMS.values() if not entry.layers for dim in DIMS}
    for leaf in norms.union(ACT_CLASSES.values()):
        register_notrace_module(leaf)
