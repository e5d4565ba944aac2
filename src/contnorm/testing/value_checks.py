"""Checks of a norm's output: parameters, values, layouts and sizes of input."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from contnorm.testing.subject import CHANNELS, DIM_OF_RANK, CheckSkipped, NormSubject, assert_close, norm_check

# float64 values against float32 arithmetic on values of order 1: a few units in the last place of a sum.
FLOAT32 = 2e-6
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
MODES = ((True, "training"), (False, "evaluation"))


@norm_check()
def affine_parameters(subject: NormSubject) -> None:
    """It has a parameter ``weight`` with one value per channel, and ``bias``, if any, likewise; both have an effect."""
    layer = subject.make_new()
    for name in ("weight", "bias"):
        parameter = getattr(layer, name, None)
        if parameter is None and name == "bias":
            continue
        if not isinstance(parameter, nn.Parameter):
            raise AssertionError(
                f"it has no {name}: a torch.nn.Parameter with one value per channel. If that is intended, declare "
                f'cannot = {{"affine_parameters": "the reason"}}.'
            )
        if tuple(parameter.shape) != (CHANNELS,):
            raise AssertionError(f"its {name} has shape {tuple(parameter.shape)} for 8 channels, and not (8,).")
        if not parameter.requires_grad:
            raise AssertionError(f"its {name} is not trained: requires_grad is False.")
    for name in ("weight", "bias"):
        for training, mode in MODES:
            doubled = subject.make().train(training)
            if not isinstance(getattr(doubled, name, None), nn.Parameter):
                continue
            with torch.no_grad():
                getattr(doubled, name).mul_(2)
            plain = subject.run(subject.make().train(training), subject.data())  # new: a norm may change its input
            if torch.allclose(subject.run(doubled, subject.data()), plain, rtol=1e-4, atol=1e-4):
                raise AssertionError(f"its {name} has no effect on the output in {mode} mode.")


@norm_check()
def eps(subject: NormSubject) -> None:
    """``eps`` has an effect on the output in both modes, if the constructor has this argument."""
    subject.require_options("eps")
    for training, mode in MODES:
        layers = (subject.make(eps=value).train(training) for value in (1e-5, 0.5))
        small, large = (subject.run(layer, subject.data()) for layer in layers)
        if torch.allclose(small, large, rtol=1e-4, atol=1e-4):
            raise AssertionError(f"its output in {mode} mode is the same for eps=1e-5 and eps=0.5.")


@norm_check()
def output_like_input(subject: NormSubject) -> None:
    """Its output has the shape, dtype and device of the input, and finite values."""
    for rank in subject.ranks:
        for training, mode in MODES:
            x = subject.data(rank)
            y = subject.run(subject.make(rank).train(training), x)
            if not isinstance(y, Tensor):
                raise AssertionError(f"its forward returns {type(y).__name__} and not a tensor.")
            for what in ("shape", "dtype", "device"):
                if getattr(y, what) != getattr(x, what):
                    raise AssertionError(
                        f"the {what} of its output is {getattr(y, what)} for an input of {getattr(x, what)}."
                    )
            if not y.isfinite().all():
                raise AssertionError(f"its output for {tuple(x.shape)} has values that are not finite in {mode} mode.")


@norm_check()
def declared_ranks(subject: NormSubject) -> None:
    """It raises an error for input of the ranks that it declares it can't process."""
    declared = [r for r, dim in DIM_OF_RANK.items() if dim in subject.dims and f"rank{r}" in subject.spec.cannot]
    if not declared:
        raise CheckSkipped("it declares no ranks")
    for rank in declared:
        try:
            subject.run(subject.make(rank), subject.data(rank))
        except (ValueError, TypeError, RuntimeError):
            continue
        raise AssertionError(f"input of rank {rank} raises no error, but cannot has 'rank{rank}'.")


@norm_check()
def training_matches_reference(subject: NormSubject) -> None:
    """Its output and running moments in training are those of the reference formula."""
    if subject.reference is None:
        raise CheckSkipped("no reference formula is given")
    for rank in subject.ranks:
        layer, x = subject.make(rank), subject.data(rank)
        y, moments = subject.expected(layer, x)
        assert_close(subject.run(layer, x), y, FLOAT32, f"its output for rank {rank}, against the reference")
        if moments is not None:
            for name, value in zip(("running_mean", "running_var"), moments, strict=True):
                assert_close(getattr(layer, name), value, FLOAT32, f"its {name} for rank {rank}, against the reference")


@norm_check()
def evaluation_matches_reference(subject: NormSubject) -> None:
    """Its output in evaluation is that of the reference formula."""
    if subject.reference is None:
        raise CheckSkipped("no reference formula is given")
    for rank in subject.ranks:
        layer = subject.make(rank)
        for seed in range(3):
            subject.run(layer, subject.data(rank, seed))
        layer.eval()
        x = subject.data(rank, seed=9)
        expected, _ = subject.expected(layer, x)
        assert_close(subject.run(layer, x), expected, FLOAT32, f"its output for rank {rank}, against the reference")


@norm_check()
def evaluation_keeps_state(subject: NormSubject) -> None:
    """It changes no parameter or buffer in evaluation mode."""
    for rank in subject.ranks:
        layer = subject.make(rank)
        subject.run(layer, subject.data(rank))
        before = copy.deepcopy(layer.state_dict())
        subject.run(layer.eval(), subject.data(rank, seed=9))
        assert_same_state(layer, before, "in evaluation mode")


def assert_same_state(layer: nn.Module, before: dict[str, Tensor], when: str) -> None:
    for name, value in layer.state_dict().items():
        same = torch.equal(value, before[name]) or (value.isnan().all() and before[name].isnan().all())
        if not same:
            raise AssertionError(f"it changes {name} {when}.")


@norm_check()
def evaluation_of_each_sample(subject: NormSubject) -> None:
    """Its output for a sample in evaluation does not depend on the other samples of the batch."""
    for rank in subject.ranks:
        layer = subject.make(rank)
        subject.run(layer, subject.data(rank))
        layer.eval()
        x = subject.data(rank, seed=9)
        together = subject.run(layer, x)
        alone = torch.cat([subject.run(layer, sample) for sample in torch.split(x, 1)])
        assert_close(alone, together, 1e-5, "its output for single samples in evaluation, against that for a batch")


@norm_check()
def input_unchanged(subject: NormSubject) -> None:
    """It does not change its input."""
    for rank in subject.ranks:
        for training, _ in MODES:
            x = subject.data(rank)
            before = x.clone()
            with torch.no_grad():
                subject.run(subject.make(rank).train(training), x)
            if not torch.equal(x, before):
                raise AssertionError("its forward changes the input in place.")


@norm_check()
def deterministic(subject: NormSubject) -> None:
    """Equal layers give the same bits for the same input."""
    for training, mode in MODES:
        x = subject.data()
        outputs = [subject.run(subject.make().train(training), x) for _ in range(3)]
        if not all(torch.equal(outputs[0], y) for y in outputs[1:]):
            raise AssertionError(f"equal layers give different outputs for the same input in {mode} mode.")


@norm_check()
def non_contiguous(subject: NormSubject) -> None:
    """It gives the same output for input that is not contiguous in memory."""
    for rank in subject.ranks:
        for training, mode in MODES:
            x = subject.data(rank)
            strided = x.repeat_interleave(2, dim=-1)[..., ::2]
            expected = subject.run(subject.make(rank).train(training), x)
            y = subject.run(subject.make(rank).train(training), strided)
            assert_close(y, expected, 1e-5, f"its output for non-contiguous input in {mode} mode")


def _ranks_with_layouts(subject: NormSubject) -> list[int]:
    ranks: list[int] = [rank for rank in (4, 5) if rank in subject.ranks]
    if not ranks:
        raise CheckSkipped("it has no 2d or 3d layers")
    return ranks


@norm_check()
def channels_last(subject: NormSubject) -> None:
    """It gives the same output and gradients for input in channels_last layout."""
    for rank in _ranks_with_layouts(subject):
        for training, mode in MODES:
            results = []
            for layout in (torch.contiguous_format, LAYOUTS[rank]):
                layer = subject.make(rank).train(training)
                x = subject.data(rank).to(memory_format=layout).requires_grad_()
                y = subject.run(layer, x)
                torch.autograd.backward(y, subject.data(rank, seed=5))
                results.append([y, x.grad, *(p.grad for p in layer.parameters())])
            for plain, last in zip(*results, strict=True):
                if plain is not None and last is not None:
                    assert_close(last, plain, 1e-5, f"output or gradients for channels_last input in {mode} mode")


@norm_check(strict=True)
def output_layout(subject: NormSubject) -> None:
    """Its output is in the layout of the input, channels_last or not."""
    for rank in _ranks_with_layouts(subject):
        for training, mode in MODES:
            for layout in (torch.contiguous_format, LAYOUTS[rank]):
                y = subject.run(subject.make(rank).train(training), subject.data(rank).to(memory_format=layout))
                if not y.is_contiguous(memory_format=layout):
                    raise AssertionError(f"its output in {mode} mode is not in the input's layout, {layout}.")


@norm_check(strict=True)
def gradients_of_affine_alone(subject: NormSubject) -> None:
    """Its parameters get the same gradients if the input needs none.

    As after a frozen network. In channels_last layout, torch's group norm ends the process on a CPU.
    """
    if not any(True for _ in subject.make().parameters()):
        raise CheckSkipped("it has no parameters")
    for rank in _ranks_with_layouts(subject):
        for training, mode in MODES:
            results = []
            for needed in (True, False):
                layer = subject.make(rank).train(training)
                x = subject.data(rank).to(memory_format=LAYOUTS[rank]).requires_grad_(needed)
                y = subject.run(layer, x)
                torch.autograd.backward(y, subject.data(rank, seed=5))
                results.append([y, *(p.grad for p in layer.parameters())])
            for expected, actual in zip(*results, strict=True):
                if (actual is None) != (expected is None):
                    raise AssertionError(f"whether a parameter has a gradient in {mode} mode depends on the input's.")
                if actual is not None and expected is not None:  # a parameter may be used in training only
                    assert_close(actual, expected, 1e-5, f"gradients of parameters in {mode} mode")


@norm_check()
def batch_of_one(subject: NormSubject) -> None:
    """It processes a batch of one sample, or raises a ValueError in training if a channel has one value only."""
    for rank in subject.ranks:
        layer, x = subject.make(rank), subject.data(rank, size=1)
        expected = copy.deepcopy(layer)
        try:
            y = subject.run(layer, x)
        except ValueError:
            if rank != 2:
                raise
        else:
            assert_close(y, subject.expected(expected, x)[0], FLOAT32, f"its output for one sample of rank {rank}")
        layer.eval()
        y = subject.run(layer, x)
        assert_close(y, subject.expected(layer, x)[0], FLOAT32, f"its output for one sample in evaluation, rank {rank}")


@norm_check()
def one_position(subject: NormSubject) -> None:
    """An (N, C, 1, 1) input gives the same output as an (N, C) input."""
    if "rank2" in subject.spec.cannot or not {2, 4} <= set(subject.ranks):
        raise CheckSkipped("it does not have both 1d and 2d layers, or can't process (N, C) input")
    x = subject.data(2)
    flat, square = subject.run(subject.make(2), x), subject.run(subject.make(4), x[:, :, None, None])
    assert_close(square[:, :, 0, 0], flat, 1e-6, "its output for (N, C, 1, 1), against that for (N, C)")


@norm_check()
def shape_of_positions(subject: NormSubject) -> None:
    """An (N, C, 12) input gives the same output and moments as the same values as (N, C, 4, 3) or (N, C, 2, 3, 2)."""
    shapes = {3: (12,), 4: (4, 3), 5: (2, 3, 2)}
    ranks = [rank for rank in shapes if rank in subject.ranks]
    if len(ranks) < 2:
        raise CheckSkipped("it has layers for one dimension only")
    values = torch.randn(6, CHANNELS, 12, generator=torch.Generator().manual_seed(11)).to(subject.device)
    for training, mode in MODES:
        results = []
        for rank in ranks:
            layer = subject.make(rank).train(training)
            y = subject.run(layer, values.reshape(6, CHANNELS, *shapes[rank])).flatten(2)
            results.append([y, *layer.buffers()])
        for rank, result in zip(ranks[1:], results[1:], strict=True):
            what = f"its output or moments for rank {rank} in {mode} mode, against those for rank {ranks[0]}"
            for actual, expected in zip(result, results[0], strict=True):
                assert_close(actual, expected, 1e-5, what)


@norm_check(strict=True)
def empty_batch(subject: NormSubject) -> None:
    """A batch without samples gives an empty output and zero gradients, and changes no state."""
    for rank in subject.ranks:
        layer, x = subject.make(rank), subject.data(rank, size=0).requires_grad_()
        before = copy.deepcopy(layer.state_dict())
        for training, _ in MODES:
            y = subject.run(layer.train(training), x)
            if y.shape != x.shape or y.dtype != x.dtype:
                raise AssertionError(f"its output for an input of shape {tuple(x.shape)} has shape {tuple(y.shape)}.")
            torch.autograd.backward(y.sum())
        if any(p.grad is None or p.grad.count_nonzero() for p in layer.parameters()):
            raise AssertionError("an empty batch gives its parameters gradients that are not zero.")
        assert_same_state(layer, before, "for an empty batch")


@norm_check()
def nan_stays_visible(subject: NormSubject) -> None:
    """A NaN in the input is a NaN in the output, and in the running moments of its channel in training."""
    for training, mode in MODES:
        for place in (0, -1):
            layer, x = subject.make().train(training), subject.data()
            index = tuple(place % size for size in x.shape)
            x[index] = float("nan")
            y = subject.run(layer, x)
            if not y[index].isnan():
                raise AssertionError(f"a NaN in the input is {y[index].item():.3g} in the output in {mode} mode.")
            for name in ("running_mean", "running_var") if training and subject.has_moments else ():
                if not getattr(layer, name)[index[1]].isnan():
                    raise AssertionError(f"a NaN in the input does not show in {name}.")


@norm_check(strict=True)
def wrong_input(subject: NormSubject) -> None:
    """Input with another number of channels, rank or dtype raises an error and changes no state."""
    layer = subject.make()
    before = copy.deepcopy(layer.state_dict())
    x = subject.data()
    for what, wrong in (
        ("another number of channels", x[:, :3]),
        ("rank 6", x.reshape(*x.shape, *[1] * (6 - x.dim()))),
        ("integers", x.long()),
    ):
        try:
            subject.run(layer, wrong)
        except (ValueError, TypeError, RuntimeError):
            assert_same_state(layer, before, f"for input of {what}, which raises an error")
        else:
            raise AssertionError(f"input of {what} raises no error.")
