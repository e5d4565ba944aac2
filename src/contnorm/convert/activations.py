"""Conversion to and from norms that contain an activation: the activations of the model that they replace.

A norm such as EvoNorm-S0 replaces a norm and the activation module that directly follows it. The activation is wrapped
in an `AbsorbedActivation`, which passes the norm's output on; converting the norm to one without an activation puts the
original module back. An activation that is a function in the model's code can't be removed, so it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from contnorm.convert.detected import DetectedNorm
from contnorm.convert.neighbours import ACTIVATIONS, NeighbourMap, Neighbours
from contnorm.norms.activation import AbsorbedActivation, ActivationNorm

__all__ = ["Absorption", "absorbed_act", "plan_absorption"]


@dataclass(frozen=True)
class Absorption:
    """Which activations of a model new norms replace.

    Attributes:
        activations: By norm layer, the activations that its replacement absorbs; None if it has no activation.
        shared: Activations that the model also applies to other tensors.
    """

    activations: Mapping[nn.Module, tuple[nn.Module, ...] | None] = field(default_factory=dict)
    shared: frozenset[nn.Module] = frozenset()

    def options(self, norm: nn.Module) -> dict[str, object]:
        """Return the options of a layer's replacement."""
        return {"apply_act": self.activations[norm] is not None} if norm in self.activations else {}

    def changes(self, model: nn.Module, replace: Mapping[nn.Module, nn.Module]) -> dict[nn.Module, nn.Module]:
        """Return the activations to wrap and the wrappers to remove, given the new layers by old layer."""
        wrappers: dict[nn.Module, AbsorbedActivation] = {}
        for old, new in replace.items():
            if not isinstance(new, ActivationNorm):
                continue
            if old in self.activations:
                new.absorbed = tuple(self._wrapper(act, wrappers) for act in self.activations[old] or ())
            elif isinstance(old, ActivationNorm) and new.apply_act:
                new.absorbed = old.absorbed
        norms = [replace.get(module, module) for module in model.modules()]
        in_use = {wrapper for norm in norms if isinstance(norm, ActivationNorm) for wrapper in norm.absorbed}
        before = {wrapper for norm in replace if isinstance(norm, ActivationNorm) for wrapper in norm.absorbed}
        changes: dict[nn.Module, nn.Module] = {act: new for act, new in wrappers.items() if act is not new}
        for wrapper in before - in_use:
            if isinstance(wrapper, AbsorbedActivation):
                changes[wrapper] = wrapper.act
        return changes

    def _wrapper(self, act: nn.Module, wrappers: dict[nn.Module, AbsorbedActivation]) -> AbsorbedActivation:
        """Return the wrapper of an activation; one that other norms feed is shared from now on."""
        if act in wrappers:
            wrappers[act].shared = True
        elif isinstance(act, AbsorbedActivation):
            wrappers[act] = act
            act.shared = True
        else:
            wrappers[act] = AbsorbedActivation(act, act in self.shared).train(act.training)
        return wrappers[act]


def plan_absorption(norms: Sequence[tuple[str, nn.Module, DetectedNorm]], neighbours: NeighbourMap) -> Absorption:
    """Plan which activations are absorbed; a layer that contains an activation already keeps its own.

    Args:
        norms: Name, module and description of each layer to convert.
        neighbours: What the model applies after them.

    Raises:
        ValueError: If it is unknown what follows a layer, or if its activation can't be removed.
    """
    activations: dict[nn.Module, tuple[nn.Module, ...] | None] = {}
    for name, module, detected in norms:
        if isinstance(module, ActivationNorm):
            continue
        if detected.acts:  # the activation is a part of the layer, see `absorbed_act`
            activations[module] = () if isinstance(module.act, ACTIVATIONS) else None
        else:
            reason, activations[module] = _absorbed(neighbours.of[module])
            if reason:
                raise ValueError(
                    f"convert_norm: layer {name!r} ({type(module).__name__}): {reason} The model is unchanged."
                )
    return Absorption(activations, neighbours.shared)


def _absorbed(neighbours: Neighbours) -> tuple[str, tuple[nn.Module, ...] | None]:
    """Return why a layer can't be converted, and the activations to absorb; None if no activation directly follows."""
    if neighbours.fused is not None:
        return "", () if neighbours.fused else None
    if not neighbours.knows_after:
        return (
            "it is unknown whether an activation follows it. Give example_input=, or apply_act=False to keep the "
            "activations of the model.",
            None,
        )
    if neighbours.has_other_use:
        return "", None
    if neighbours.functions:
        return (
            f"its activation is a call of {neighbours.functions[0]} in the model's code, which can't be removed. Use a "
            f"module such as nn.ReLU instead, or apply_act=False to keep the activations of the model.",
            None,
        )
    return "", tuple(neighbours.activations) or None


def absorbed_act(act: nn.Module, new: nn.Module) -> nn.Module:
    """Return the activation of a norm-then-activation layer after its conversion: replaced by the norm's, or as it was.

    Example:
        >>> from contnorm import create_norm
        >>> wrapped = absorbed_act(nn.ReLU(), create_norm("frn", 8))
        >>> type(wrapped).__name__, absorbed_act(wrapped, create_norm("bn", 8))
        ('AbsorbedActivation', ReLU())
    """
    plain = act.act if isinstance(act, AbsorbedActivation) else act
    if isinstance(new, ActivationNorm) and new.apply_act:
        return AbsorbedActivation(plain).train(act.training)
    return plain
