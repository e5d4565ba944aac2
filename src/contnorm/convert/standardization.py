"""Conversion to and from norms with weight standardization: the convolutions whose weights are standardized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from contnorm.convert.neighbours import CONVOLUTIONS, NeighbourMap
from contnorm.norms.weight_standardization import WSGroupNorm, check_standardizable, standardize, unstandardize

__all__ = ["Standardization", "plan_standardization", "standardize_convolutions"]


@dataclass(frozen=True)
class Standardization:
    """By norm layer, the convolutions to standardize, in place."""

    convolutions: Mapping[nn.Module, tuple[nn.Module, ...]] = field(default_factory=dict)

    def apply(self, model: nn.Module, replace: Mapping[nn.Module, nn.Module]) -> None:
        """Standardize the convolutions of new layers, and undo it for those of layers that are no longer there."""
        for old, new in replace.items():
            if isinstance(new, WSGroupNorm):
                new.standardized = self.convolutions.get(old, ())
                for convolution in new.standardized:
                    standardize(convolution, new.weight_eps)
        norms = [replace.get(module, module) for module in model.modules()]
        in_use = {convolution for norm in norms if isinstance(norm, WSGroupNorm) for convolution in norm.standardized}
        before = {convolution for norm in replace if isinstance(norm, WSGroupNorm) for convolution in norm.standardized}
        for convolution in before - in_use:
            unstandardize(convolution)


def plan_standardization(
    model: nn.Module, norms: Sequence[tuple[str, nn.Module]], neighbours: NeighbourMap
) -> Standardization:
    """Plan which convolutions are standardized: those whose output a converted layer normalizes.

    Raises:
        ValueError: If it is unknown what precedes a layer, or if a convolution can't be standardized.
    """
    names = {module: name for name, module in model.named_modules()}
    has_convolutions = any(isinstance(m, CONVOLUTIONS) for m in model.modules())
    planned: dict[nn.Module, tuple[nn.Module, ...]] = {}
    for name, module in norms:
        layer_neighbours = neighbours.of[module]
        where = f"convert_norm: layer {name!r} ({type(module).__name__})"
        if has_convolutions and not layer_neighbours.knows_before:
            raise ValueError(
                f"{where}: it is unknown which convolution precedes it. Give example_input=. The model is unchanged."
            )
        for convolution in layer_neighbours.convolutions:
            try:
                check_standardizable(convolution)
            except ValueError as error:
                raise ValueError(
                    f"{where}: the convolution {names[convolution]!r} before it: {error} The model is unchanged."
                ) from error
        planned[module] = tuple(layer_neighbours.convolutions)
    return Standardization(planned)


def standardize_convolutions(model: nn.Module) -> nn.Module:
    """Standardize all convolutions of a network that has norms with weight standardization, in place.

    Example:
        >>> from contnorm import create_norm
        >>> model = standardize_convolutions(nn.Sequential(nn.Conv2d(3, 8, 3), create_norm("gn_ws", 8, num_groups=2)))
        >>> model[0](torch.randn(1, 3, 5, 5)).shape, len(model[1].standardized)
        (torch.Size([1, 8, 3, 3]), 1)
    """
    convolutions = tuple(m for m in model.modules() if isinstance(m, CONVOLUTIONS))
    for norm in [module for module in model.modules() if isinstance(module, WSGroupNorm)]:
        norm.standardized = convolutions
        for convolution in convolutions:
            standardize(convolution, norm.weight_eps)
    return model
