"""Checks of a norm's output: parameters, values, layouts and sizes of input, precision, and derivatives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from contnorm.moments.freeze import frozen_stats
from contnorm.testing.conformance import (
    CHANNELS,
    DIM_OF_RANK,
    CheckSkipped,
    NormSubject,
    assert_close,
    norm_check,
    require,
)

# float64 values against float32 arithmetic on values of order 1: a few units in the last place of a sum.
FLOAT32 = 2e-6
MODES = ((True, "training"), (False, "evaluation"))
STOCK: dict[int, type[nn.Module]] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
_HALF = (torch.bfloat16, torch.float16)


def assert_same_state(layer: nn.Module, before: dict[str, Tensor], when: str) -> None:
    for name, value in layer.state_dict().items():
        same = torch.equal(value, before[name]) or (value.isnan().all() and before[name].isnan().all())
        require(same, f"it changes {name} {when}.")


def gradients_of(subject: NormSubject, layer: nn.Module, x: Tensor, call: Any = None) -> list[Tensor | None]:
    """Return the output of a layer, the gradient of the input if it needs one, and those of the parameters."""
    layer.zero_grad()
    y = subject.run(layer, x, call)
    torch.autograd.backward(y, subject.data(x.dim(), seed=5))
    return [y, x.grad, *(p.grad for p in layer.parameters())]


def assert_all_close(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None], what: str) -> None:
    for a, b in zip(actual, expected, strict=True):
        if a is not None and b is not None:  # a parameter may be used in training only
            assert_close(a, b, 1e-5, what)


@norm_check()
def affine_parameters(subject: NormSubject) -> None:
    """It has a parameter ``weight`` with one value per channel, and ``bias``, if any, likewise; both have an effect."""
    layer: Any = subject.make_new()
    for name in ("weight", "bias"):
        parameter = getattr(layer, name, None)
        if parameter is None and name == "bias":
            continue
        require(
            isinstance(parameter, nn.Parameter),
            f"it has no {name}: a torch.nn.Parameter with one value per channel. If that is intended, declare "
            f'cannot = {{"affine_parameters": "the reason"}}.',
        )
        shape = tuple(getattr(layer, name).shape)
        require(shape == (CHANNELS,), f"its {name} has shape {shape} for 8 channels, and not (8,).")
        require(getattr(layer, name).requires_grad, f"its {name} is not trained: requires_grad is False.")
        for training, mode in MODES:
            doubled = subject.make().train(training)
            with torch.no_grad():
                getattr(doubled, name).mul_(2)
            plain = subject.run(subject.make().train(training), subject.data())  # new: a norm may change its input
            same = torch.allclose(subject.run(doubled, subject.data()), plain, rtol=1e-4, atol=1e-4)
            require(not same, f"its {name} has no effect on the output in {mode} mode.")


@norm_check()
def eps(subject: NormSubject) -> None:
    """``eps`` has an effect on the output in both modes, if the constructor has this argument."""
    subject.require_options("eps")
    for training, mode in MODES:
        layers = (subject.make(eps=value).train(training) for value in (1e-5, 0.5))
        small, large = (subject.run(layer, subject.data()) for layer in layers)
        same = torch.allclose(small, large, rtol=1e-4, atol=1e-4)
        require(not same, f"its output in {mode} mode is the same for eps=1e-5 and eps=0.5.")


@norm_check()
def output_like_input(subject: NormSubject) -> None:
    """Its output has the shape, dtype and device of the input, and finite values."""
    for rank, (training, mode) in product(subject.ranks, MODES):
        x = subject.data(rank)
        y = subject.run(subject.make(rank).train(training), x)
        require(isinstance(y, Tensor), f"its forward returns {type(y).__name__} and not a tensor.")
        for what in ("shape", "dtype", "device"):
            a, b = getattr(y, what), getattr(x, what)
            require(a == b, f"the {what} of its output is {a} for an input of {b}.")
        require(y.isfinite().all(), f"its output for {tuple(x.shape)} has values that are not finite in {mode} mode.")


@norm_check()
def declared_ranks(subject: NormSubject) -> None:
    """It raises an error for input of the ranks that it declares it can't process."""
    declared = [r for r, dim in DIM_OF_RANK.items() if dim in subject.dims and f"rank{r}" in subject.spec.cannot]
    if not declared:
        raise CheckSkipped("it declares no ranks")
    for rank in declared:
        error = subject.error_of(subject.make(rank), subject.data(rank))
        require(error is not None, f"input of rank {rank} raises no error, but cannot has 'rank{rank}'.")


@norm_check()
def training_matches_reference(subject: NormSubject) -> None:
    """Its output and running moments in training are those of the reference formula."""
    subject.require_reference()
    for rank in subject.ranks:
        layer, x = subject.make(rank), subject.data(rank)
        y, moments = subject.expected(layer, x)
        assert_close(subject.run(layer, x), y, FLOAT32, f"its output for rank {rank}, against the reference")
        for name, value in zip(("running_mean", "running_var"), moments or (), strict=bool(moments)):
            assert_close(getattr(layer, name), value, FLOAT32, f"its {name} for rank {rank}, against the reference")


@norm_check()
def evaluation_matches_reference(subject: NormSubject) -> None:
    """Its output in evaluation is that of the reference formula."""
    subject.require_reference()
    for rank in subject.ranks:
        layer = subject.make(rank)
        for seed in range(3):
            subject.run(layer, subject.data(rank, seed))
        x = subject.data(rank, seed=9)
        expected, _ = subject.expected(layer.eval(), x)
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


@norm_check()
def evaluation_of_each_sample(subject: NormSubject) -> None:
    """Its output for a sample in evaluation does not depend on the other samples of the batch."""
    for rank in subject.ranks:
        layer = subject.make(rank)
        subject.run(layer, subject.data(rank))
        x = subject.data(rank, seed=9)
        together = subject.run(layer.eval(), x)
        alone = torch.cat([subject.run(layer, sample) for sample in torch.split(x, 1)])
        assert_close(alone, together, 1e-5, "its output for single samples in evaluation, against that for a batch")


@norm_check()
def input_unchanged(subject: NormSubject) -> None:
    """It does not change its input."""
    for rank, (training, _) in product(subject.ranks, MODES):
        x = subject.data(rank)
        before = x.clone()
        with torch.no_grad():
            subject.run(subject.make(rank).train(training), x)
        require(torch.equal(x, before), "its forward changes the input in place.")


@norm_check()
def deterministic(subject: NormSubject) -> None:
    """Equal layers give the same bits for the same input."""
    for training, mode in MODES:
        x = subject.data()
        first, *others = [subject.run(subject.make().train(training), x) for _ in range(3)]
        same = all(torch.equal(first, y) for y in others)
        require(same, f"equal layers give different outputs for the same input in {mode} mode.")


@norm_check()
def non_contiguous(subject: NormSubject) -> None:
    """It gives the same output for input that is not contiguous in memory."""
    for rank, (training, mode) in product(subject.ranks, MODES):
        x = subject.data(rank)
        strided = x.repeat_interleave(2, dim=-1)[..., ::2]
        expected = subject.run(subject.make(rank).train(training), x)
        y = subject.run(subject.make(rank).train(training), strided)
        assert_close(y, expected, 1e-5, f"its output for non-contiguous input in {mode} mode")


def _ranks_with_layouts(subject: NormSubject) -> list[int]:
    ranks: list[int] = [rank for rank in _LAYOUTS if rank in subject.ranks]
    if not ranks:
        raise CheckSkipped("it has no 2d or 3d layers")
    return ranks


@norm_check()
def channels_last(subject: NormSubject) -> None:
    """It gives the same output and gradients for input in channels_last layout."""
    for rank, (training, mode) in product(_ranks_with_layouts(subject), MODES):
        inputs = [subject.data(rank).to(memory_format=f) for f in (torch.contiguous_format, _LAYOUTS[rank])]
        plain, last = (gradients_of(subject, subject.make(rank).train(training), x.requires_grad_()) for x in inputs)
        assert_all_close(last, plain, f"output or gradients for channels_last input in {mode} mode")


@norm_check(strict=True)
def output_layout(subject: NormSubject) -> None:
    """Its output is in the layout of the input, channels_last or not."""
    for rank, (training, mode) in product(_ranks_with_layouts(subject), MODES):
        for layout in (torch.contiguous_format, _LAYOUTS[rank]):
            y = subject.run(subject.make(rank).train(training), subject.data(rank).to(memory_format=layout))
            same = y.is_contiguous(memory_format=layout)
            require(same, f"its output in {mode} mode is not in the input's layout, {layout}.")


@norm_check(strict=True)
def gradients_of_affine_alone(subject: NormSubject) -> None:
    """Its parameters get the same gradients if the input needs none.

    As after a frozen network. In channels_last layout, torch's group norm ends the process on a CPU.
    """
    if not any(True for _ in subject.make().parameters()):
        raise CheckSkipped("it has no parameters")
    for rank, (training, mode) in product(_ranks_with_layouts(subject), MODES):
        inputs = [subject.data(rank).to(memory_format=_LAYOUTS[rank]).requires_grad_(n) for n in (True, False)]
        full, alone = (gradients_of(subject, subject.make(rank).train(training), x) for x in inputs)
        same = all((a is None) == (b is None) for a, b in zip(full[2:], alone[2:], strict=True))
        require(same, f"whether a parameter has a gradient in {mode} mode depends on the input's.")
        assert_all_close(alone, full, f"gradients of parameters in {mode} mode")


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
        y = subject.run(layer.eval(), x)
        assert_close(y, subject.expected(layer, x)[0], FLOAT32, f"its output for one sample in evaluation, rank {rank}")


@norm_check()
def one_position(subject: NormSubject) -> None:
    """An (N, C, 1, 1) input gives the same output as an (N, C) input."""
    if not {2, 4} <= set(subject.ranks):
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
            assert_all_close(result, results[0], what)


@norm_check(strict=True)
def empty_batch(subject: NormSubject) -> None:
    """A batch without samples gives an empty output and zero gradients, and changes no state."""
    for rank in subject.ranks:
        layer, x = subject.make(rank), subject.data(rank, size=0).requires_grad_()
        before = copy.deepcopy(layer.state_dict())
        for training, _ in MODES:
            y = subject.run(layer.train(training), x)
            require(y.shape == x.shape and y.dtype == x.dtype, f"its output for {tuple(x.shape)} is {tuple(y.shape)}.")
            torch.autograd.backward(y.sum())
        wrong = any(p.grad is None or p.grad.count_nonzero() for p in layer.parameters())
        require(not wrong, "an empty batch gives its parameters gradients that are not zero.")
        assert_same_state(layer, before, "for an empty batch")


@norm_check()
def nan_stays_visible(subject: NormSubject) -> None:
    """A NaN in the input is a NaN in the output, and in the running moments of its channel in training."""
    for (training, mode), place in product(MODES, (0, -1)):
        layer, x = subject.make().train(training), subject.data()
        index = tuple(place % size for size in x.shape)
        x[index] = float("nan")
        y = subject.run(layer, x)
        require(y[index].isnan(), f"a NaN in the input is {y[index].item():.3g} in the output in {mode} mode.")
        for name in ("running_mean", "running_var") if training and subject.has_moments else ():
            require(getattr(layer, name)[index[1]].isnan(), f"a NaN in the input does not show in {name}.")


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
        require(subject.error_of(layer, wrong) is not None, f"input of {what} raises no error.")
        assert_same_state(layer, before, f"for input of {what}, which raises an error")


# --- precision ------------------------------------------------------------------------------------------------------


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@norm_check()
def dtypes(subject: NormSubject) -> None:
    """For float64, float32, bfloat16 and float16 input, it computes moments in float32 or better.

    A layer of float32 parameters gets input of half precision, as under autocast. The expected values are those of the
    rounded input, so the tolerance is one rounding of the result in its own type.
    """
    for dtype, (training, mode) in product((torch.float64, torch.float32, *_HALF), MODES):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        layer, x = subject.make().train(training).to(wide), subject.data(dtype=dtype)
        expected, moments = subject.expected(layer, x)
        y = subject.run(layer, x)
        require(y.dtype == dtype, f"its output for {_short(dtype)} input is {_short(y.dtype)} in {mode} mode.")
        tolerance = {torch.float64: 1e-12, torch.float32: FLOAT32}.get(dtype, torch.finfo(dtype).eps)
        assert_close(y, expected, tolerance, f"its output for {_short(dtype)} input in {mode} mode")
        for i, name in enumerate(("running_mean", "running_var") if training and moments is not None else ()):
            value: Tensor = getattr(layer, name)
            require(value.dtype == wide, f"its {name} becomes {_short(value.dtype)} for {_short(dtype)} input.")
            assert moments is not None
            assert_close(value, moments[i], FLOAT32, f"its {name} for {_short(dtype)} input")


@norm_check()
def half_precision(subject: NormSubject) -> None:
    """A layer that is converted to half precision as a whole gives outputs of that precision."""
    variants: list[dict[str, Any]] = [{"momentum": 0.1}, {"momentum": None}] if subject.averages_batches else [{}]
    for dtype, options in product(_HALF, variants):
        layer, x = subject.make(**options).to(dtype), subject.data(dtype=dtype)
        for training, mode in MODES:
            expected, _ = subject.expected(layer.train(training), x)
            y = subject.run(layer, x)
            require(y.dtype == dtype, f"its output as a {_short(dtype)} layer is {_short(y.dtype)}.")
            assert_close(y, expected, 2 * torch.finfo(dtype).eps, f"its output in {_short(dtype)} and {mode} mode")


@norm_check()
def autocast(subject: NormSubject) -> None:
    """Under autocast, its output has the dtype that torch's batch norm gives, and gradients the input's dtype."""
    for dtype in (torch.bfloat16, torch.float32):
        layer, x = subject.make(), subject.data(dtype=dtype).requires_grad_()
        expected, _ = subject.expected(layer, x)
        with torch.autocast(subject.device.type, torch.bfloat16):
            y = subject.run(layer, x)
            stock: Tensor = STOCK[subject.rank](CHANNELS).to(subject.device)(x)
        what, ours, theirs = f"{_short(dtype)} input under autocast", _short(y.dtype), _short(stock.dtype)
        require(ours == theirs, f"its output for {what} is {ours}, and that of torch's batch norm {theirs}.")
        assert_close(y, expected, torch.finfo(dtype).eps + FLOAT32, f"its output for {what}")
        torch.autograd.backward(y.sum())
        require(x.grad is not None and x.grad.dtype == dtype, f"its input gradient for {what} is not {_short(dtype)}.")


@norm_check()
def autocast_other_dtype(subject: NormSubject) -> None:
    """Under autocast to float16, bfloat16 input stays bfloat16, and the other way round."""
    layer = subject.make()
    for dtype, lower in (_HALF, _HALF[::-1]):
        x = subject.data(dtype=dtype)
        expected = subject.run(copy.deepcopy(layer), x)
        with torch.autocast(subject.device.type, lower):
            y = subject.run(layer, x)
        what = f"its output for {_short(dtype)} input under autocast"
        require(y.dtype == dtype, f"{what} is {_short(y.dtype)}.")
        assert_close(y, expected, 4 * torch.finfo(dtype).eps, what)


@norm_check(strict=True)
def large_mean(subject: NormSubject) -> None:
    """For a mean of 1e4 and a standard deviation of 1e-2, outputs, gradients and moments have no cancellation."""
    if subject.rank != 4:
        raise CheckSkipped("it has no 2d layers")
    x = (torch.randn(subject.data().shape, generator=torch.Generator().manual_seed(3)) * 1e-2 + 1e4).to(subject.device)
    for training, _ in MODES:
        layer, exact = subject.make(), subject.make().double()
        if not training:
            subject.run(layer, x)
            exact.load_state_dict(layer.state_dict())  # the moments of the float32 layer, as they are
        layer.train(training), exact.train(training)
        inputs = [x.clone().requires_grad_(), x.double().requires_grad_()]
        # The reference formula, if there is one, checks the float64 layer, which then checks the gradients.
        expected, _ = subject.expected(exact, inputs[1])
        outputs = [subject.run(layer, inputs[0]), subject.run(exact, inputs[1])]
        scale = max(1.0, expected.detach().abs().max().item() / 10)  # a norm that keeps the mean keeps its rounding
        assert_close(outputs[0] / scale, expected / scale, 1e-5, "its output for a large mean")
        assert_close(outputs[1] / scale, expected / scale, 1e-9, "its output in float64 for a large mean")
        dy = subject.data(seed=4, dtype=torch.float64)
        torch.autograd.backward(outputs, [dy.float(), dy])
        gradients: list[tuple[Any, Any]] = [(inputs[0].grad, inputs[1].grad)]
        gradients += [(a.grad, b.grad) for a, b in zip(layer.parameters(), exact.parameters(), strict=True)]
        for gradient, other in gradients:
            size = other.abs().max().clamp_min(1e-300 if other is inputs[1].grad else 1)
            assert_close(gradient / size, other / size, 1e-5, "its gradients for a large mean")
        for a, b in zip(layer.buffers(), exact.buffers(), strict=True):
            assert_close(a, b, 1e-5, "its moments for a large mean")


def _check_derivatives(subject: NormSubject, check: Callable[..., object], what: str) -> None:
    for rank, (training, mode) in product([rank for rank in subject.ranks if rank < 5], MODES):
        layer = subject.make(rank).double()
        subject.run(layer, subject.data(rank, seed=8, dtype=torch.float64))
        layer.train(training)
        names = [name for name, _ in layer.named_parameters()]

        def function(x: Tensor, *values: Tensor, layer: Any = layer, names: list[str] = names) -> Tensor:
            with frozen_stats(layer), subject.tags(len(x)):
                y: Tensor = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))
            return y

        # A part of an input, because a numeric Jacobian costs one forward pass per number.
        x = subject.data(rank, dtype=torch.float64)
        x = x[:4] if rank == 2 else x[:3, :, :2, :2] if rank == 4 else x[:3, ..., :2]
        values = [p.detach().clone().requires_grad_() for p in layer.parameters()]
        agrees = check(function, (x.clone().requires_grad_(), *values), raise_exception=False)
        require(agrees, f"{what} differ from numeric ones for rank {rank} in {mode} mode.")


@norm_check()
def gradients(subject: NormSubject) -> None:
    """The gradients of its input and parameters are those of numeric differentiation."""
    _check_derivatives(subject, torch.autograd.gradcheck, "its gradients")


@norm_check(slow=True)
def second_derivatives(subject: NormSubject) -> None:
    """The second derivatives of its input and parameters are those of numeric differentiation."""
    _check_derivatives(subject, torch.autograd.gradgradcheck, "its second derivatives")
