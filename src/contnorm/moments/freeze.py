"""Which moments the norms of a model normalize with, and whether they update them.

Layers of this package have attributes for both (`contnorm.norms.base.MomentNorm`). Any other module with running
moments (those of torch, layers of other libraries) is set by hooks: for one forward it is in the mode that normalizes
as asked for, and where it would update its moments without being asked to, it does so on a copy. Running moments that
are updated after the normalization are those of a second forward, in training mode without gradients, whose output is
dropped: each class has its own rule of updating, and this follows it.

A conversion keeps running moments that are of another signal than the new layer normalizes, so that it can be undone.
Such a layer is marked here: its moments are stale.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from contnorm.detect import (
    DetectedNorm,
    Filter,
    check_names,
    detect_norm,
    drop_and_act,
    holds_moments,
    is_selected,
)
from contnorm.norms.base import INPUT, STALE, MomentNorm, first_buffers, recomputes, remember_buffers

Normalize = Literal["batch", "running"] | None
StatsState = tuple[Normalize, bool]  # what a layer normalizes with, and whether training updates its moments
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class StatsMode:
    """Result of `stats_mode`. As a context manager, it restores the state of each layer on exit.

    Args:
        model: The model.
        before: The state of each layer that was set.
    """

    def __init__(self, model: nn.Module, before: list[tuple[nn.Module, StatsState]]) -> None:
        self._model, self._before = model, before

    def restore(self) -> None:
        """Restore the state that each layer had."""
        for module, state in self._before:
            set_stats_state(module, *state)

    def __enter__(self) -> nn.Module:
        return self._model

    def __exit__(self, *error: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"StatsMode({len(self._before)} layers)"


def stats_mode(
    model: nn.Module,
    normalize: Normalize = None,
    update: bool = True,
    *,
    only: Filter | None = None,
    skip: Filter | None = None,
) -> StatsMode:
    """Set which moments norms normalize with, and whether they update them: for good, or as a context manager.

    Layers are those with running moments, of this package, of torch (``BatchNorm2d``, ``SyncBatchNorm``, ...) and of
    other libraries. The setting does not depend on ``model.train()`` and ``model.eval()``, and copies of the model have
    it, and files of `save_model`.

    ============= ========== ============================================= =====================================
    ``normalize`` ``update`` training mode                                 evaluation mode
    ============= ========== ============================================= =====================================
    None          True       batch moments; then updates (the usual state) running moments
    None          False      batch moments                                 running moments
    ``"batch"``   True       batch moments; then updates                   the same as in training
    ``"batch"``   False      batch moments                                 the same as in training
    ``"running"`` True       running moments; then updates                 running moments
    ``"running"`` False      running moments                               running moments
    ============= ========== ============================================= =====================================

    Updates come after the normalization of the same batch. Layers without running moments always use the batch, and
    constant layers such as torchvision's ``FrozenBatchNorm2d`` stay as they are.

    Args:
        model: The model, changed in place.
        normalize: ``"batch"`` or ``"running"`` moments in both modes; None for those of the mode.
        update: Whether training updates the running moments.
        only: The layers to set, as in `convert_norm`.
        skip: The layers not to set.

    Returns:
        An object that restores the state of each layer on exit from a ``with`` block. Its value is the model.

    Raises:
        ValueError: If a filter names a layer that does not exist, or a value is not one of the above.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(1))
        >>> x = torch.tensor([[2.0], [4.0]])
        >>> with stats_mode(model, normalize="running"):  # an EMA over a stream of batches
        ...     for batch in [x, x]:
        ...         outputs = model(batch)
        >>> outputs.flatten().tolist(), model[0].running_mean  # the moments of the first batch
        ([1.6209..., 3.5278...], tensor([0.5700]))
        >>> _ = stats_mode(model, "running", update=False)  # for good, until stats_mode(model)
    """
    if normalize not in (None, "batch", "running"):
        raise ValueError(f"stats_mode: normalize={normalize!r} must be 'batch', 'running' or None.")
    return _set_stats(model, lambda state: (normalize, bool(update)), only, skip, "stats_mode")


def freeze_norms(
    model: nn.Module, affine: bool = True, *, only: Filter | None = None, skip: Filter | None = None
) -> nn.Module:
    """Freeze norms for fine-tuning: normalize with the running moments, also in training, and never update them.

    This is what ``bn.eval()`` after each ``model.train()`` does, and ``FrozenBatchNorm2d``: the outputs of both modes
    are the same.

    Args:
        model: The model, changed in place.
        affine: Whether to freeze weights and biases, too (``requires_grad``), also those of norms without moments.
        only: The layers to freeze, as in `convert_norm`.
        skip: The layers not to freeze.

    Returns:
        The model.

    Example:
        >>> model = freeze_norms(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))).train()
        >>> x = torch.randn(16, 4)
        >>> torch.equal(model(x), model.eval()(x)), model[1].weight.requires_grad
        (True, False)
    """
    stats_mode(model, "running", False, only=only, skip=skip)
    return _require_grad(model, not affine, only, skip) if affine else model


def unfreeze_norms(
    model: nn.Module, affine: bool = True, *, only: Filter | None = None, skip: Filter | None = None
) -> nn.Module:
    """Undo `freeze_norms`: batch moments and updates in training; weights and biases are trained.

    Args:
        model: The model, changed in place.
        affine: Whether to train weights and biases, too: also those that were frozen before `freeze_norms`. Use False
            and ``requires_grad_`` to keep some of them frozen.
        only: The layers to release, as in `convert_norm`.
        skip: The layers not to release.

    Returns:
        The model.

    Example:
        >>> model = unfreeze_norms(freeze_norms(nn.Sequential(nn.BatchNorm1d(2))))
        >>> _ = model(torch.tensor([[5.0, 5.0], [9.0, 9.0]]))
        >>> model[0].running_mean, model[0].weight.requires_grad
        (tensor([0.7000, 0.7000]), True)
    """
    stats_mode(model, only=only, skip=skip)
    return _require_grad(model, True, only, skip) if affine else model


def freeze_stats(model: nn.Module, frozen: bool = True) -> nn.Module:
    """Stop (or resume) the updates of the running moments of every norm. What a layer normalizes with does not change.

    In training mode such a layer still normalizes with the batch. To normalize with the running moments, as "frozen
    batch norm" means elsewhere, use `freeze_norms`. Its layers stay frozen here with ``frozen=False``: release them
    with `unfreeze_norms`.

    Args:
        model: The model, changed in place.
        frozen: True to freeze, False to release.

    Returns:
        The model.

    Example:
        >>> model = freeze_stats(nn.Sequential(nn.BatchNorm1d(2))).train()
        >>> _ = model(torch.tensor([[5.0, 5.0], [9.0, 9.0]]))
        >>> model[0].running_mean
        tensor([0., 0.])
    """
    _set_stats(model, lambda state: (state[0], not frozen and state != ("running", False)))
    return model


@contextmanager
def frozen_stats(model: nn.Module) -> Iterator[nn.Module]:
    """Context manager that stops the updates of the running moments; on exit, the state of each layer is restored.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(2))
        >>> with frozen_stats(model):
        ...     _ = model(torch.tensor([[5.0, 5.0], [9.0, 9.0]]))
        >>> model[0].running_mean, model[0].num_batches_tracked.item()
        (tensor([0., 0.]), 0)
    """
    with _set_stats(model, lambda state: (state[0], False)):
        yield model


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context manager for evaluation mode; on exit, the mode of each module is restored.

    Modes are restored by calling ``train()``, because modules may override it, for example to merge weights for
    evaluation and to separate them again for training.

    Example:
        >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
        >>> with evaluation_mode(model):
        ...     print([module.training for module in model.modules()])
        [False, False, False]
        >>> [module.training for module in model.modules()]
        [True, True, False]
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            if module.training is not training:
                module.train(training)
        for module, training in modes:  # an override of train() may have set another mode
            module.training = training


def stats_state(module: nn.Module) -> StatsState:
    """Return what a layer normalizes with, and whether training updates its moments.

    Example:
        >>> stats_state(nn.BatchNorm1d(2)), stats_state(freeze_norms(nn.BatchNorm1d(2)))
        ((None, True), ('running', False))
    """
    if isinstance(module, MomentNorm):
        return "running" if module.use_running else "batch" if module.use_batch else None, not module.stats_frozen
    state: StatsState = vars(module).get("_contnorm_stats", (None, True))
    return state


def set_stats_state(module: Any, normalize: Normalize, update: bool) -> None:
    """Set what `stats_state` returns."""
    _take_back(module)  # an interrupted forward may have left something
    before: list[Any] = []
    after: list[tuple[Any, bool]] = []
    if isinstance(module, MomentNorm):
        module.use_running, module.use_batch = normalize == "running", normalize == "batch"
        module.stats_frozen = not update
        if normalize == "running" and update:
            before, after = [_lend_copies], [(_take_back, True)]
    else:
        module._contnorm_stats = (normalize, update)
        if (normalize, update) != (None, True):
            before, after = [_lend_copies], [(_take_back, True)]
    if normalize == "running" and update:
        after.append((_update_after, False))
    _remove_hooks(module, STATS_HOOKS)
    for hook in before:
        module.register_forward_pre_hook(hook)
    for hook, always in after:
        module.register_forward_hook(hook, always_call=always, with_kwargs=True)


def _remove_hooks(module: Any, ours: tuple[Any, ...]) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in ours]:
            del hooks[key]
            module._forward_hooks_always_called.pop(key, None)
            module._forward_hooks_with_kwargs.pop(key, None)


def _set_stats(
    model: nn.Module,
    new: Callable[[StatsState], StatsState],
    only: Filter | None = None,
    skip: Filter | None = None,
    caller: str = "",
) -> StatsMode:
    norms = {name: module for name, module in model.named_modules() if detect_norm(module) or holds_moments(module)}
    check_names((only, skip), norms, caller)
    selected = {name: module for name, module in norms.items() if is_selected(name, module, only, skip)}
    if only is not None and not selected:
        raise ValueError(f"{caller}: only={only!r} is none of the norm layers: {', '.join(list(norms)[:5]) or 'none'}.")
    before = []
    for module in selected.values():
        detected = detect_norm(module)
        constant = isinstance(detected, DetectedNorm) and detected.constant
        state = stats_state(module)
        if holds_moments(module) and not constant and new(state) != state:
            set_stats_state(module, *new(state))
            before.append((module, state))
    return StatsMode(model, before)


def _require_grad(model: nn.Module, required: bool, only: Filter | None, skip: Filter | None) -> nn.Module:
    for name, module in model.named_modules():
        if detect_norm(module) is not None and is_selected(name, module, only, skip):
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.requires_grad_(required)
    return model


def _lend_copies(module: Any, args: Any) -> None:
    _take_back(module)
    normalize, update = stats_state(module)
    by_batch = normalize == "batch" or (normalize is None and module.training)
    if not module.training and not by_batch:
        return
    module.__dict__["_contnorm_own"] = originals = {"training": module.training}
    module.training = by_batch
    if by_batch is not update:  # updates that nobody asked for, or that would change what the backward pass needs
        buffers = {name: module._buffers[name] for name in _BUFFERS if isinstance(module._buffers.get(name), Tensor)}
        originals |= buffers
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        if update and args and not isinstance(module, MomentNorm):  # these see to gradient checkpointing themselves
            if recomputes():
                copies = first_buffers(module, *args)
            else:
                remember_buffers(module, *args)
        module._buffers.update(copies)


def _take_back(module: nn.Module, *args: object) -> None:
    originals = module.__dict__.pop("_contnorm_own", None)
    if originals is not None:
        module.training = originals.pop("training")
        module._buffers.update(originals)


def _update_after(module: Any, args: Any, kwargs: Any, output: object) -> None:
    if not module.training or recomputes():
        return
    with torch.no_grad():
        if isinstance(module, MomentNorm):
            module.use_running = False
            try:
                module.forward(*args, **kwargs)
            finally:
                module.use_running = True
        else:
            module.forward(*args, **kwargs)


# --- moments of another signal --------------------------------------------------------------------------------------

LEAST_SHARE = 0.01  # below this share of the running average, training has replaced the old moments


@dataclass
class StaleMoments:
    """The mark of a layer whose running moments are of another signal than it normalizes.

    Attributes:
        signal: What they are moments of.
        batches: The batch counter at the conversion.
        layers: The names of all layers of the conversion, one list for all of them; empty after the warning.
    """

    signal: str
    batches: int
    layers: list[str]


def stale_moments(module: nn.Module) -> StaleMoments | None:
    """Return the mark of a layer with stale moments; remove it if training has replaced them.

    Example:
        >>> stale_moments(nn.BatchNorm2d(8)) is None
        True
    """
    mark: StaleMoments | None = vars(module).get(STALE)
    if mark is None:
        return None
    updates, momentum = _batches(module) - mark.batches, getattr(module, "momentum", None)
    share = mark.batches / max(1, mark.batches + updates) if momentum is None else (1 - momentum) ** max(0, updates)
    if updates and share < LEAST_SHARE:
        del vars(module)[STALE]
        return None
    return mark


def set_stale(module: nn.Module, mark: StaleMoments | None) -> None:
    """Mark a layer, or remove its mark. The first evaluation of any layer of a conversion warns of all of them."""
    vars(module).pop(STALE, None)
    _remove_hooks(module, (_warn_of_stale,))
    if mark is not None:
        vars(module)[STALE] = mark
        module.register_forward_pre_hook(_warn_of_stale)


def carry_stale(old: nn.Module, new: nn.Module, layers: list[str]) -> bool:
    """Mark a layer that has the running moments of the layer that it replaces, if they are of another signal.

    So are initial moments of a layer whose weights were trained without moments; others are of no signal. If
    training has updated stale moments, they are of no signal that a layer has.
    """
    mean, var = (new._buffers.get(name) for name in ("running_mean", "running_var"))
    if mean is None or var is None or mean.is_meta:
        return False
    had = old._buffers.get("running_mean")
    is_initial = not mean.any() and bool((var == getattr(new if had is None else old, "initial_var", 1.0)).all())
    if had is None:
        signal, weight, bias = "no data", new._parameters.get("weight"), new._parameters.get("bias")
        trained = any(p is not None and bool((p != initial).any()) for p, initial in ((weight, 1), (bias, 0)))
        is_stale = is_initial and trained
    else:
        signal, mark = getattr(old, "signal", INPUT), stale_moments(old)
        if mark is not None:
            signal = mark.signal if _batches(old) == mark.batches else "several signals"
        is_stale = mean is had and signal != getattr(new, "signal", INPUT) and not is_initial
    if is_stale:
        set_stale(new, StaleMoments(signal, _batches(new), layers))
    return is_stale


def _batches(module: nn.Module) -> int:
    counter = module._buffers.get("num_batches_tracked")
    return 0 if counter is None else int(counter)


def _warn_of_stale(module: Any, args: Any) -> None:
    x = args[0] if args else None
    traced = (
        torch.compiler.is_compiling() or torch._C._get_tracing_state() or torch._C._functorch.peek_interpreter_stack()
    )
    if traced or type(x) is not Tensor or x.is_meta or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    normalize, training = stats_state(module)[0], vars(module).get("_contnorm_own", vars(module))["training"]
    if normalize == "batch" or (normalize is None and training):
        return
    mark = stale_moments(module)
    _remove_hooks(module, (_warn_of_stale,))
    if mark is None or not mark.layers:
        return
    names = ", ".join(map(repr, mark.layers[:3])) + ", ..." * (len(mark.layers) > 3)
    mark.layers.clear()
    warnings.warn(
        f"The running moments of converted norm layers ({names}) are stale: they are moments of {mark.signal} and "
        f"{type(module).__name__} needs those of {getattr(module, 'signal', INPUT)}. Outputs of evaluation are wrong "
        f"until contnorm.reestimate(model, batches), or training, has set them.",
        stacklevel=2,
    )


# Pickled models refer to these functions by name, so they must not be renamed.
STATS_HOOKS: tuple[Any, ...] = (_lend_copies, _take_back, _update_after)
OWN_HOOKS: tuple[Any, ...] = (*STATS_HOOKS, _warn_of_stale, drop_and_act)  # a conversion may drop them
