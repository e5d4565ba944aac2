"""What our layers share: the check at the door, and the running moments of those that keep them."""

from __future__ import annotations

import re
import sys
import warnings
from functools import cache
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from contnorm.checks import check_eps, check_features, check_input, check_momentum
from contnorm.functional.batch import channel_moments, unbiased
from contnorm.kernels import Kernel

__all__ = ["MomentNorm", "NormLayer", "ReplacementGuard"]


class NormLayer(nn.Module):
    """A layer over (N, C, *) that checks what it is given under its own name.

    ``ranks`` lists the ranks of input a class takes; ``num_features`` is its number of channels. ``own_kernels`` says
    whether on a GPU it is kernels of ours, which are compiled before they first run.
    """

    ranks: ClassVar[tuple[int, ...]] = (2, 3, 4, 5)
    own_kernels: ClassVar[bool] = False
    num_features: int
    kernel: Kernel = "auto"  # which arithmetic, where there is a choice

    def _check(self, x: Tensor) -> None:
        check_input(x, self.ranks, self.num_features, type(self).__name__)


class MomentNorm(NormLayer, _BatchNorm):
    """Base of the norms with running moments: batch norm's arguments, buffers and state-dict keys.

    It derives from torch's ``_BatchNorm``, and its 1d, 2d and 3d forms from torch's ``BatchNorm1d``, ``BatchNorm2d``
    and ``BatchNorm3d``, so that tools which look for batch norms (``swa_utils.update_bn`` and the like) see it. It
    follows its rules for modes, with two further states: ``stats_frozen`` (running moments don't
    move, set by ``freeze_stats``) and ``use_running`` (they are also what training mode normalizes with, as in
    torchvision's FrozenBatchNorm2d). Unlike torch, ``momentum=None`` needs no trip to the host.
    """

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    stats_frozen: bool = False
    use_running: bool = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        check_features(num_features, name)
        eps = check_eps(eps, name)
        check_momentum(momentum, name)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)

    def _check_input_dim(self, input: Tensor) -> None:
        self._check(input)

    def reset_running_stats(self) -> None:
        if self.stats_frozen:
            raise RuntimeError(
                f"{type(self).__name__}: its running moments are frozen and can't be reset. "
                f"Call contnorm.freeze_stats(model, False) first."
            )
        super().reset_running_stats()

    def _normalizes_with_batch(self) -> bool:
        return (self.training and not self.use_running) or self.running_mean is None

    def _moves_moments(self) -> bool:
        return (
            self.training
            and self.track_running_stats
            and not self.stats_frozen
            and not self.use_running
            and self.running_mean is not None
        )

    def _weight_of_batch(self) -> float | Tensor:
        """How much the batch at hand weighs in the running moments."""
        return self._weight_of_moving_batch() if self._moves_moments() else 0.0

    def _weight_of_moving_batch(self) -> float | Tensor:
        if self.momentum is None:
            if self.num_batches_tracked is None:
                raise ValueError(
                    f"{type(self).__name__}: momentum=None averages over the batches counted in num_batches_tracked, "
                    f"which is None. Give a momentum, or call reset_running_stats() on a layer that has the counter."
                )
            return (self.num_batches_tracked + 1).to(torch.float64).reciprocal()
        return self.momentum

    def _count(self, x: Tensor) -> None:
        """Count a batch once it is through: one that is refused, or empty, is not counted."""
        if x.numel():
            self._count_one()

    def _count_one(self) -> None:
        if self._moves_moments() and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)

    def _moments(self) -> tuple[Tensor | None, Tensor | None]:
        """The buffers to hand on: none where the batch is normalized by itself and nothing is to be kept."""
        if self._normalizes_with_batch() and not self._moves_moments():
            return None, None
        return self.running_mean, self.running_var

    def batch_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and biased variance that an input adds to the running moments, (C,) each, in float64."""
        return channel_moments(self._tracked_signal(x).double())

    def stored_variance(self, var: Tensor, count: int) -> Tensor:
        """What ``running_var`` holds for data of this biased variance and number of values: the unbiased one."""
        return unbiased(var, count)

    def _tracked_signal(self, x: Tensor) -> Tensor:
        """The signal whose moments the buffers describe."""
        return x

    def extra_repr(self) -> str:
        kernel = [] if self.kernel == "auto" else [f"kernel={self.kernel!r}"]
        shown = [f"{self.num_features}", *self._own_repr(), *kernel, f"eps={self.eps}", f"momentum={self.momentum}"]
        usual = {"affine": True, "track_running_stats": True, "stats_frozen": False, "use_running": False}
        shown += [f"{name}={getattr(self, name)}" for name, value in usual.items() if getattr(self, name) is not value]
        return ", ".join(shown)

    def _own_repr(self) -> list[str]:
        return []


class ReplacementGuard:
    """Raises when a tool that knows only batch norm replaces one of our layers or folds it into a convolution.

    Such tools select layers by ``isinstance(module, _BatchNorm)`` and would silently drop what the layer does besides
    batch norm. Each of them has to read ``eps``, so that attribute looks at the function that reads it. It raises in
    such a function of a known library (``torch.nn.utils.fusion.fuse_conv_bn_eval``, timm's ``convert_splitbn_model``)
    and, wherever it is defined, in one whose name leaves no doubt (``fuse_conv_and_bn``, ``_fuse_bn_tensor``), since
    these are copied between projects. A function of other code with a similar name (``merge_models``,
    ``convert_my_bn``) may have good reasons to read ``eps``: it gets the value, and a warning. Everywhere else ``eps``
    is a plain attribute.
    """

    sync_advice: ClassVar[str]
    _eps: float

    @property
    def eps(self) -> float:
        value = self._eps
        # A compiled forward reads `eps` too, and the compiler can't trace a look at the calling frame.
        if not torch.compiler.is_compiling():
            frame = sys._getframe(1)
            if _may_replace(frame.f_code.co_name):
                self._check_reader(frame)
        return value

    @eps.setter
    def eps(self, value: float) -> None:
        # Not under the property's own name: the compiler of torch 2.11 takes `__dict__["eps"]` for the property again.
        self._eps = value

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Layers pickled by version 0.1 have ``eps`` as a plain attribute."""
        if "eps" in state:
            state = {**state, "_eps": state["eps"]}
            del state["eps"]
        super().__setstate__(state)  # type: ignore[misc]

    def _check_reader(self, frame: FrameType) -> None:
        caller, package = frame.f_code.co_name, str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _KNOWN_LIBRARIES or _FOLDS.fullmatch(caller):
            raise TypeError(
                f"{caller} would treat {type(self).__name__} as a plain batch norm and drop the rest of it. "
                f"{self._advice(caller)}"
            )
        if frame.f_locals.get("self") is not self:  # a subclass may name its own methods as it likes
            warnings.warn(
                f"{caller} reads eps of a {type(self).__name__}. If it replaces the layer or folds it into another, "
                f"the result is wrong: the layer is more than a batch norm. {self._advice(caller)}",
                stacklevel=3,
            )

    def _advice(self, caller: str) -> str:
        if "sync" in caller.lower():
            return self.sync_advice
        if "freeze" in caller or "frozen" in caller:
            return "Use contnorm.freeze_stats(model), and requires_grad_(False) for weight and bias."
        return "Keep the layer: it is not a constant scale and shift that another layer could take over."


# Top-level packages whose functions of these names are known to replace or fold every batch norm they find.
_KNOWN_LIBRARIES = frozenset(
    (
        "apex",
        "avalanche",
        "brevitas",
        "detectron2",
        "fvcore",
        "mmcv",
        "mmdet",
        "mmengine",
        "mmpretrain",
        "mmseg",
        "nncf",
        "timm",
        "torch",
        "torchao",
        "torchvision",
        "transformers",
        "ultralytics",
    )
)
_MAY_REPLACE = re.compile(
    r"_*(?:(?:fuse|fold|absorb|merge)(?:_\w*)?|(?:convert|freeze|replace|revert)_\w*(?:bn|batch_?norm)\w*)",
    re.IGNORECASE,
)
_FOLDS = re.compile(
    r"_*(?:fuse|fold|absorb|merge)_(?:conv|linear|fc)\d*d?_?(?:and_)?_?(?:bn|batch_?norm)\w*|_*fuse_bn_tensor"
    r"|convert_sync_batchnorm",
    re.IGNORECASE,
)


@cache
def _may_replace(function: str) -> bool:
    """Whether a function's name is one of those that replace batch norms or fold them into other layers have.

    Example:
        >>> [_may_replace(name) for name in ("fuse_conv_bn_eval", "fuse", "convert_splitbn_model")]
        [True, True, True]
        >>> [_may_replace(name) for name in ("forward", "fused_forward", "convert_model", "extra_repr")]
        [False, False, False, False]
    """
    return _MAY_REPLACE.fullmatch(function) is not None
