"""Checks of the protocol between norm layers and the bench: tags, task boundaries, auxiliary loss, extra batches."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from contnorm.tags import ReplayRequest, batch_tags
from contnorm.testing.checks import norm_check
from contnorm.testing.subject import CheckSkipped, NormSubject
from contnorm.testing.value_checks import MODES

_BALANCES = ("none", "class", "task")


def _definers(layer: nn.Module, name: str) -> list[Any]:
    return [module for module in layer.modules() if getattr(module, name, None) is not None]


@norm_check()
def tags(subject: NormSubject) -> None:
    """A norm with ``needs_tags = True`` trains with tags, and without them works or raises an error that names tags.

    In evaluation there are no tags. A norm without ``needs_tags`` gives the same output with and without them.
    """
    x = subject.data()
    if not subject.needs_tags:
        for training, mode in MODES:
            with subject.tags(len(x)):
                tagged = subject.make().train(training)(x)
            if not torch.equal(tagged, subject.make().train(training)(x)):
                raise AssertionError(f"tags change its output in {mode} mode, but it does not set needs_tags = True.")
        return
    with subject.tags(len(x)):
        y = subject.make()(x)
    if y.shape != x.shape or not y.isfinite().all():
        raise AssertionError(f"its output with tags has shape {tuple(y.shape)}, or values that are not finite.")
    subject.make().eval()(x)
    try:
        with batch_tags(None):
            subject.make()(x)
    except (ValueError, RuntimeError) as error:
        if "tags" not in str(error):
            raise AssertionError(
                f"without tags it raises {type(error).__name__}: {error}. The message must say that it needs tags."
            ) from error


@norm_check()
def task_hooks(subject: NormSubject) -> None:
    """``on_task_start`` and ``on_task_end``, if defined, take the number of a task; ``state_dict()`` stays complete."""
    layer = subject.make()
    hooked = [*_definers(layer, "on_task_start"), *_definers(layer, "on_task_end")]
    if not hooked:
        raise CheckSkipped("it defines neither on_task_start nor on_task_end")
    for task in range(2):
        for module in _definers(layer, "on_task_start"):
            module.on_task_start(task)
        subject.run(layer, subject.data(seed=task))
        for module in _definers(layer, "on_task_end"):
            module.on_task_end(task)
    other = subject.make_new().to(subject.device)
    other.load_state_dict(copy.deepcopy(layer.state_dict()))
    x = subject.data(seed=5)
    if not torch.equal(subject.run(other.eval(), x), subject.run(layer.eval(), x)):
        raise AssertionError("what its task hooks change is not in its state_dict(), so a resumed run would differ.")


@norm_check()
def auxiliary_loss(subject: NormSubject) -> None:
    """``auxiliary_loss()``, if defined, returns a finite scalar tensor after a forward pass."""
    layer = subject.make()
    if any(isinstance(getattr(type(module), "auxiliary_loss", None), property) for module in layer.modules()):
        raise AssertionError("its auxiliary_loss is a property and not a method.")
    modules = _definers(layer, "auxiliary_loss")
    if not modules:
        raise CheckSkipped("it does not define auxiliary_loss")
    x = subject.data().requires_grad_()
    with subject.tags(len(x)):
        y = layer(x)
    total = y.sum()
    for module in modules:
        loss = module.auxiliary_loss()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.isfinite().all():
            raise AssertionError(f"its auxiliary_loss() returns {loss!r} and not a finite tensor with one element.")
        if not loss.requires_grad:
            raise AssertionError("its auxiliary_loss() has no gradient, so that it has no effect on training.")
        total = total + loss.reshape(())
    total.backward()


@norm_check()
def replay_request(subject: NormSubject) -> None:
    """``replay_request``, if defined, is a `ReplayRequest`, and the extra batch passes without gradients."""
    layer = subject.make()
    modules = _definers(layer, "replay_request")
    if not modules:
        raise CheckSkipped("it does not define replay_request")
    for module in modules:
        request = module.replay_request
        if not isinstance(request, ReplayRequest) or request.balance not in _BALANCES:
            shown = request if not inspect.ismethod(request) else "a method"
            raise AssertionError(f"its replay_request is {shown!r} and not a contnorm.ReplayRequest.")
        if request.size is not None and (not isinstance(request.size, int) or request.size < 1):
            raise AssertionError(f"its replay_request has size={request.size!r}. Use a whole number, or None.")
    x = subject.data()
    with torch.no_grad(), subject.tags(len(x), is_extra=True):
        layer(x)
    subject.run(layer, x)
