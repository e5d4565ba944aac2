"""The hooks of the layers of a network, see `contnorm.tags`: tags, task boundaries, losses, an extra batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from contnorm.bench.plan import ExtraDraw
from contnorm.errors import UserCodeError, UserError
from contnorm.tags import ReplayRequest

__all__ = ["NormHooks"]


class NormHooks:
    """The layers of a network that define hooks of `contnorm.tags`.

    Args:
        model: The network.
        norm: Name of its norm in the settings, for messages.

    Attributes:
        need_tags: Whether a layer needs the tags of the batch.
        extra_draw: The extra draw from the memory that layers request; None if they request none.
        need_joint_forward: Whether a layer needs stream and memory samples in one forward pass.
        max_tasks: The number of tasks that all layers support; None if there is no limit.

    Example:
        >>> class Penalized(nn.BatchNorm1d):
        ...     def auxiliary_loss(self):
        ...         return self.weight.square().sum()
        >>> hooks = NormHooks(nn.Sequential(nn.Linear(2, 3), Penalized(3)), "mine.py:Penalized")
        >>> hooks.need_tags, hooks.auxiliary_loss()
        (False, tensor(3., grad_fn=<AddBackward0>))
    """

    def __init__(self, model: nn.Module, norm: str) -> None:
        self.norm = norm
        named = dict(model.named_modules())
        self._task_start = _methods(named, "on_task_start", norm)
        self._task_end = _methods(named, "on_task_end", norm)
        self._losses = _methods(named, "auxiliary_loss", norm)
        requests = {name: getattr(module, "replay_request", None) for name, module in named.items()}
        self.extra_draw = _extra_draw({n: request for n, request in requests.items() if request is not None}, norm)
        self.need_tags = self.extra_draw is not None or any(
            getattr(module, "needs_tags", False) for module in named.values()
        )
        self.need_joint_forward = any(getattr(module, "needs_joint_forward", False) for module in named.values())
        limits = [getattr(module, "num_tasks", None) for module in named.values() if hasattr(module, "on_task_start")]
        self.max_tasks = min((limit for limit in limits if isinstance(limit, int)), default=None)

    @property
    def on_tasks(self) -> bool:
        """Whether a layer has a hook at task boundaries."""
        return bool(self._task_start or self._task_end)

    @property
    def has_losses(self) -> bool:
        """Whether a layer adds to the loss."""
        return bool(self._losses)

    def start_task(self, task: int) -> None:
        """Call the layers before the first step of a task."""
        for hook in self._task_start.values():
            hook(task)

    def end_task(self, task: int) -> None:
        """Call the layers after the last step of a task."""
        for hook in self._task_end.values():
            hook(task)

    def auxiliary_loss(self) -> Tensor | float:
        """Return the sum of the losses of all layers; 0.0 if none has one."""
        total: Tensor | float = 0.0
        for name, method in self._losses.items():
            loss = method()
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
                shown = type(loss).__name__
                if isinstance(loss, Tensor):
                    shown = f"a tensor of shape {tuple(loss.shape)} and dtype {loss.dtype}"
                raise UserCodeError(
                    f"norm {self.norm!r}: auxiliary_loss() of layer {name!r} must return a floating-point tensor with "
                    f"one element, not {shown}."
                )
            total = total + loss.reshape(())
        return total


def _methods(named: dict[str, nn.Module], attribute: str, norm: str) -> dict[str, Any]:
    methods = {}
    for name, module in named.items():
        if isinstance(getattr(type(module), attribute, None), property):
            raise UserError(f"norm {norm!r}: {attribute} of layer {name!r} is a property. Define it as a method.")
        method = getattr(module, attribute, None)
        if method is not None and not callable(method):
            raise UserError(
                f"norm {norm!r}: {attribute} of layer {name!r} is of type {type(method).__name__}. Define it as a "
                f"method."
            )
        if method is not None:
            methods[name] = method
    return methods


def _extra_draw(requests: dict[str, Any], norm: str) -> ExtraDraw | None:
    for name, request in requests.items():
        if not isinstance(request, ReplayRequest):
            raise UserError(
                f"norm {norm!r}: replay_request of layer {name!r} is of type {type(request).__name__}. Use a "
                f"contnorm.tags.ReplayRequest."
            )
        if request.size is not None and (type(request.size) is not int or request.size < 1):
            raise UserError(
                f"norm {norm!r}: replay_request has size={request.size!r}. Use a whole number from 1, or None."
            )
        if request.balance not in ("none", "class", "task"):
            raise UserError(f"norm {norm!r}: replay_request has balance={request.balance!r}. Use none, class or task.")
    different = set(requests.values())
    if len(different) > 1:
        raise UserError(
            f"norm {norm!r}: layers have different replay_request ({', '.join(sorted(map(str, different)))}). A "
            f"network gets one extra batch per step; use the same for all layers."
        )
    return ExtraDraw(request.size, request.balance) if requests else None
