"""Descriptions of norm layers, as `contnorm.convert.detect` finds them."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["DetectedNorm", "UnsupportedNorm"]


@dataclass(frozen=True)
class DetectedNorm:
    """Description of a norm layer, sufficient to build a replacement."""

    norm: str  # its name in the registry
    channels: int
    dim: int | None  # 1, 2, 3; None if the class accepts any rank
    options: dict[str, object] = field(default_factory=dict)  # eps, momentum, num_groups, ...
    synced: bool = False
    acts: bool = False  # it applies its submodules `drop` and `act` to the result
    constant: bool = False  # its moments and affine parameters are buffers that never change
    obeys_tracking: bool = True  # setting `track_running_stats` to False stops updates of its moments

    @property
    def per_position(self) -> bool:
        """Whether it is a layer norm of each position, not of each sample as the norm ``"ln"`` of the registry is."""
        return bool(self.options.get("per_position"))


@dataclass(frozen=True)
class UnsupportedNorm:
    """A norm layer that is not supported, because it is of an unknown kind or does more than a known norm."""

    reason: str
