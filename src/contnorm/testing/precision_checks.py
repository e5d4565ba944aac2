"""Checks of floating-point precision, and of derivatives against numeric ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from contnorm.moments.freeze import frozen_stats
from contnorm.testing.subject import CHANNELS, CheckSkipped, NormSubject, assert_close, norm_check
from contnorm.testing.value_checks import FLOAT32, MODES

_HALF = (torch.bfloat16, torch.float16)
_STOCK = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@norm_check()
def dtypes(subject: NormSubject) -> None:
    """For float64, float32, bfloat16 and float16 input, it computes moments in float32 or better.

    A layer of float32 parameters gets input of half precision, as under autocast. The expected values are those of the
    rounded input, so the tolerance is one rounding of the result in its own type.
    """
    for dtype in (torch.float64, torch.float32, *_HALF):
        for training, mode in MODES:
            layer = subject.make().train(training)
            if dtype == torch.float64:
                layer.double()
            x = subject.data(dtype=dtype)
            expected, moments = subject.expected(layer, x)
            y = subject.run(layer, x)
            if y.dtype != dtype:
                raise AssertionError(f"its output for {_short(dtype)} input is {_short(y.dtype)} in {mode} mode.")
            tolerance = {torch.float64: 1e-12, torch.float32: FLOAT32}.get(dtype, torch.finfo(dtype).eps)
            assert_close(y, expected, tolerance, f"its output for {_short(dtype)} input in {mode} mode")
            if training and moments is not None:
                _check_moments(layer, moments, dtype)


def _check_moments(layer: nn.Module, moments: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    for name, expected in zip(("running_mean", "running_var"), moments, strict=True):
        value: Tensor = getattr(layer, name)
        if value.dtype != (torch.float64 if dtype == torch.float64 else torch.float32):
            raise AssertionError(f"its {name} becomes {_short(value.dtype)} for {_short(dtype)} input.")
        assert_close(value, expected, FLOAT32, f"its {name} for {_short(dtype)} input")


@norm_check()
def half_precision(subject: NormSubject) -> None:
    """A layer that is converted to half precision as a whole gives outputs of that precision."""
    for dtype in _HALF:
        for momentum in (0.1, None) if subject.averages_batches else ("default",):
            options: dict[str, Any] = {} if momentum == "default" else {"momentum": momentum}
            layer, x = subject.make(**options).to(dtype), subject.data(dtype=dtype)
            for training, mode in MODES:
                layer.train(training)
                expected, _ = subject.expected(layer, x)
                y = subject.run(layer, x)
                if y.dtype != dtype:
                    raise AssertionError(f"its output as a {_short(dtype)} layer is {_short(y.dtype)}.")
                assert_close(y, expected, 2 * torch.finfo(dtype).eps, f"its output in {_short(dtype)} and {mode} mode")


@norm_check()
def autocast(subject: NormSubject) -> None:
    """Under autocast, its output has the dtype that torch's batch norm gives, and gradients the input's dtype."""
    for dtype in (torch.bfloat16, torch.float32):
        layer, x = subject.make(), subject.data(dtype=dtype).requires_grad_()
        expected, _ = subject.expected(layer, x)
        with torch.autocast(subject.device.type, torch.bfloat16):
            y = subject.run(layer, x)
            stock: Tensor = _STOCK[subject.rank](CHANNELS).to(subject.device)(x)
        if y.dtype != stock.dtype:
            raise AssertionError(
                f"its output for {_short(dtype)} input under autocast is {_short(y.dtype)}, and that of torch's batch "
                f"norm {_short(stock.dtype)}."
            )
        assert_close(y, expected, torch.finfo(dtype).eps + FLOAT32, f"its output for {_short(dtype)} under autocast")
        torch.autograd.backward(y.sum())
        if x.grad is None or x.grad.dtype != dtype:
            raise AssertionError(f"its input gradient for {_short(dtype)} input under autocast is not {_short(dtype)}.")


@norm_check()
def autocast_other_dtype(subject: NormSubject) -> None:
    """Under autocast to float16, bfloat16 input stays bfloat16, and the other way round."""
    layer = subject.make()
    for dtype, lower in (_HALF, _HALF[::-1]):
        x = subject.data(dtype=dtype)
        expected = subject.run(copy.deepcopy(layer), x)
        with torch.autocast(subject.device.type, lower):
            y = subject.run(layer, x)
        if y.dtype != dtype:
            raise AssertionError(f"its output for {_short(dtype)} input under autocast is {_short(y.dtype)}.")
        assert_close(y, expected, 4 * torch.finfo(dtype).eps, f"its output for {_short(dtype)} input under autocast")


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
            # From the same moments: those of the float32 layer, as they are.
            exact.load_state_dict(layer.state_dict())
        layer.train(training), exact.train(training)
        _check_large_mean(subject, layer, exact, x)


def _check_large_mean(subject: NormSubject, layer: nn.Module, exact: nn.Module, x: Tensor) -> None:
    inputs = [x.clone().requires_grad_(), x.double().requires_grad_()]
    # The reference formula, if there is one, checks the float64 layer, which then checks the gradients.
    expected, _ = subject.expected(exact, inputs[1])
    outputs = [subject.run(layer, inputs[0]), subject.run(exact, inputs[1])]
    scale = max(1.0, expected.detach().abs().max().item() / 10)  # a norm that keeps the mean keeps its rounding
    assert_close(outputs[0] / scale, expected / scale, 1e-5, "its output for a large mean")
    assert_close(outputs[1] / scale, expected / scale, 1e-9, "its output in float64 for a large mean")
    dy = subject.data(seed=4, dtype=torch.float64)
    torch.autograd.backward(outputs, [dy.float(), dy])
    gradients = [(inputs[0].grad, inputs[1].grad)]
    gradients += [(a.grad, b.grad) for a, b in zip(layer.parameters(), exact.parameters(), strict=True)]
    for gradient, expected_gradient in gradients:
        assert gradient is not None and expected_gradient is not None
        size: Any = expected_gradient.abs().max().clamp_min(1e-300)
        if expected_gradient is not inputs[1].grad:
            size = size.clamp_min(1)
        assert_close(gradient / size, expected_gradient / size, 1e-5, "its gradients for a large mean")
    for a, b in zip(layer.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-5)


_Function = Callable[..., Tensor]


def _function_of(subject: NormSubject, layer: nn.Module) -> _Function:
    """Return the layer as a function of its input and parameters; it leaves the running moments unchanged."""
    names = [name for name, _ in layer.named_parameters()]

    def function(x: Tensor, *values: Tensor) -> Tensor:
        with frozen_stats(layer), subject.tags(len(x)):
            y: Tensor = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))
        return y

    return function


def _check(subject: NormSubject, compare: Callable[[_Function, tuple[Tensor, ...]], bool], what: str) -> None:
    for rank in (rank for rank in subject.ranks if rank < 5):
        for training, mode in MODES:
            layer = subject.make(rank).double()
            subject.run(layer, subject.data(rank, seed=8, dtype=torch.float64))
            layer.train(training)
            x = _small(subject.data(rank, dtype=torch.float64)).clone().requires_grad_()
            values = tuple(p.detach().clone().requires_grad_() for p in layer.parameters())
            try:
                compare(_function_of(subject, layer), (x, *values))
            except RuntimeError as error:  # the error of torch.autograd.gradcheck has a table in its message
                line = str(error).strip().partition("\n")[0].rstrip(",")
                raise AssertionError(
                    f"{what} differ from numeric ones for rank {rank} in {mode} mode: {line}"
                ) from error


def _small(x: Tensor) -> Tensor:
    """Return a part of an input: a numeric Jacobian costs one forward pass per number."""
    if x.dim() == 2:
        return x[:4]
    return x[:3, :, :2, :2] if x.dim() == 4 else x[:3, ..., :2]


@norm_check()
def gradients(subject: NormSubject) -> None:
    """The gradients of its input and parameters are those of numeric differentiation."""
    _check(subject, lambda f, values: torch.autograd.gradcheck(f, values), "its gradients")


@norm_check(slow=True)
def second_derivatives(subject: NormSubject) -> None:
    """The second derivatives of its input and parameters are those of numeric differentiation."""
    _check(subject, lambda f, values: torch.autograd.gradgradcheck(f, values), "its second derivatives")
