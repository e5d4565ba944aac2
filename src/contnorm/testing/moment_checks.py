"""Checks of running moments: updates, momentum, evaluation, freezing."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from contnorm.moments.freeze import freeze_stats
from contnorm.testing.subject import CheckSkipped, NormSubject, assert_close, norm_check
from contnorm.testing.value_checks import FLOAT32, assert_same_state

_MOMENTS = ("running_mean", "running_var")


@norm_check()
def moments_updated(subject: NormSubject) -> None:
    """A batch in training moves the running moments, and counts in ``num_batches_tracked`` if there is one."""
    subject.require_moments()
    for rank in subject.ranks:
        layer: Any = subject.make(rank)
        before = {name: getattr(layer, name).clone() for name in _MOMENTS}
        for seed in range(2):
            subject.run(layer, subject.data(rank, seed))
        for name in _MOMENTS:
            value = getattr(layer, name)
            if torch.equal(value, before[name]):
                raise AssertionError(f"its {name} does not change in training.")
            if value.requires_grad or not value.isfinite().all():
                raise AssertionError(
                    f"its {name} after two batches requires a gradient, or has values that are not finite."
                )
        _check_count(layer, 2, "after two batches")


def _check_count(layer: Any, batches: int, when: str) -> None:
    count = getattr(layer, "num_batches_tracked", None)
    if isinstance(count, Tensor) and count.item() != batches:
        raise AssertionError(f"its num_batches_tracked is {count.item()} {when}, and not {batches}.")


@norm_check()
def evaluation_uses_running_moments(subject: NormSubject) -> None:
    """In evaluation it normalizes with its running moments, in training with those of the batch."""
    subject.require_moments()
    layer: Any = subject.make()
    x = subject.data()
    in_training = subject.run(layer, x)
    in_evaluation = subject.run(layer.eval(), x)
    if torch.allclose(in_training, in_evaluation, rtol=1e-3, atol=1e-3):
        raise AssertionError("its output after one batch is the same in training and evaluation mode.")
    for name in _MOMENTS:
        moved = copy.deepcopy(layer)
        getattr(moved, name).add_(1)
        if torch.allclose(subject.run(moved, x), in_evaluation, rtol=1e-4, atol=1e-4):
            raise AssertionError(f"its output in evaluation mode does not depend on {name}.")


@norm_check()
def momentum(subject: NormSubject) -> None:
    """``momentum`` is the weight of the newest batch in the running mean; None averages all batches equally."""
    subject.require_moments()
    subject.require_options("momentum")

    def mean_after(momentum: float | None, *seeds: int) -> Tensor:
        layer: Any = subject.make(momentum=momentum)
        for seed in seeds:
            subject.run(layer, subject.data(seed=seed))
        return layer.running_mean.double()  # type: ignore[no-any-return]

    start, first, second = mean_after(0.5), mean_after(1.0, 0), mean_after(1.0, 1)
    assert_close(mean_after(0.0, 0), start, 0.0, "its running_mean with momentum=0, against its initial value")
    expected = 0.7 * (0.7 * start + 0.3 * first) + 0.3 * second
    assert_close(mean_after(0.3, 0, 1), expected, FLOAT32, "its running_mean after two batches with momentum=0.3")
    average = (first + second) / 2
    if not subject.averages_batches:
        raise AssertionError(
            "momentum=None, the equal average of all batches, raises an error. If that is intended, declare "
            'cannot = {"momentum": "the reason"}.'
        )
    assert_close(mean_after(None, 0, 1), average, FLOAT32, "its running_mean after two batches with momentum=None")


@norm_check()
def moments_match_reference(subject: NormSubject) -> None:
    """With any momentum, its running moments over several batches are those of the reference formula."""
    subject.require_moments()
    subject.require_options("momentum")
    if subject.reference is None:
        raise CheckSkipped("no reference formula is given")
    for value in (0.0, 0.3, 1.0, None):
        layer: Any = subject.make(momentum=value)
        for seed in range(4):
            x = subject.data(seed=seed)
            _, moments = subject.expected(layer, x)
            assert moments is not None
            subject.run(layer, x)
            for name, expected in zip(_MOMENTS, moments, strict=True):
                assert_close(getattr(layer, name), expected, FLOAT32, f"its {name} with momentum={value}")
        if layer.num_batches_tracked.item() != 4:
            raise AssertionError(f"its num_batches_tracked is {layer.num_batches_tracked.item()} after four batches.")


@norm_check()
def reset_moments(subject: NormSubject) -> None:
    """``reset_running_stats()``, if it has one, restores the initial moments."""
    subject.require_moments()
    layer: Any = subject.make()
    if not hasattr(layer, "reset_running_stats"):
        raise CheckSkipped("it has no reset_running_stats")
    before = copy.deepcopy(layer.state_dict())
    subject.run(layer, subject.data())
    layer.reset_running_stats()
    assert_same_state(layer, before, "in reset_running_stats, against its initial value")


@norm_check()
def without_tracking(subject: NormSubject) -> None:
    """With ``track_running_stats=False`` it has no running moments and normalizes with the batch in both modes."""
    subject.require_moments()
    subject.require_options("track_running_stats")
    for rank in subject.ranks:
        layer: Any = subject.make(rank, track_running_stats=False)
        x = subject.data(rank)
        if layer.running_mean is not None or layer.running_var is not None:
            raise AssertionError("it has running moments with track_running_stats=False.")
        expected = subject.expected(layer, x)[0]
        for training in (True, False):
            assert_close(subject.run(layer.train(training), x), expected, FLOAT32, "its output without tracking")


@norm_check()
def without_affine(subject: NormSubject) -> None:
    """With ``affine=False`` it has no weight and bias, and the same output as with a weight of 1 and a bias of 0."""
    subject.require_options("affine")
    for rank in subject.ranks:
        layer: Any = subject.make(rank, affine=False)
        x = subject.data(rank)
        if layer.weight is not None or layer.bias is not None:
            raise AssertionError("it has a weight or a bias with affine=False.")
        plain: Any = subject.make(rank)
        plain.load_state_dict(layer.state_dict(), strict=False)  # other parameters, if any
        with torch.no_grad():
            plain.weight.fill_(1)
            if plain.bias is not None:
                plain.bias.fill_(0)
        expected, _ = subject.expected(layer, x)  # by the reference formula, if there is one
        y = subject.run(layer, x)
        assert_close(y, expected, FLOAT32, "its output with affine=False")
        assert_close(y, subject.run(plain, x), FLOAT32, "its output with affine=False, against weight 1 and bias 0")


@norm_check()
def tracking_disabled_later(subject: NormSubject) -> None:
    """If ``track_running_stats`` is set to False on a layer, as tools do, training updates no moments."""
    subject.require_moments()
    layer: Any = subject.make()
    if not hasattr(layer, "track_running_stats"):
        raise CheckSkipped("it has no attribute track_running_stats")
    x = subject.data()
    subject.run(layer, x)
    expected, _ = subject.expected(layer, x)
    before = copy.deepcopy(layer.state_dict())
    layer.track_running_stats = False
    assert_close(subject.run(layer, x), expected, FLOAT32, "its output in training with track_running_stats = False")
    assert_same_state(layer, before, "with track_running_stats = False")


@norm_check()
def frozen_moments(subject: NormSubject) -> None:
    """`contnorm.freeze_stats` stops updates of its moments, and releases them again."""
    subject.require_moments()
    layer: Any = subject.make()
    subject.run(layer, subject.data())
    before = copy.deepcopy(layer.state_dict())
    freeze_stats(layer)
    subject.run(copy.deepcopy(layer), subject.data(seed=3))  # a copy stays frozen, and shares no moments
    for mode in (True, False, True):
        subject.run(layer.train(mode), subject.data(seed=3))
    assert_same_state(layer, before, "while its moments are frozen")
    freeze_stats(layer, False)
    subject.run(layer, subject.data(seed=3))
    if torch.equal(layer.running_mean, before["running_mean"]):
        raise AssertionError("its running_mean does not change after freeze_stats(layer, False).")
    _check_count(layer, 2, "after two batches, and three while its moments were frozen")


@norm_check()
def update_bn(subject: NormSubject) -> None:
    """``torch.optim.swa_utils.update_bn``, for subclasses of torch's batch norms, sets the average of all batches."""
    if not isinstance(subject.make(), _BatchNorm):
        raise CheckSkipped("it does not derive from a batch norm of torch")
    subject.require_moments()
    subject.require_options("momentum")
    layer: Any = subject.make()
    batches = [subject.data(seed=seed) for seed in range(3)]
    usual = layer.momentum
    layer.train()
    with subject.tags(len(batches[0])):
        torch.optim.swa_utils.update_bn(batches, torch.nn.Sequential(layer), device=subject.device)
    means = []
    for x in batches:
        single: Any = subject.make(momentum=1.0)
        subject.run(single, x)
        means.append(single.running_mean.double())
    assert_close(layer.running_mean, torch.stack(means).mean(0), FLOAT32, "its running_mean after update_bn")
    _check_count(layer, 3, "after update_bn over three batches")
    if layer.momentum != usual:
        raise AssertionError(f"its momentum is {layer.momentum} after update_bn, and was {usual}.")
