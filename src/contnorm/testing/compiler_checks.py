"""Checks of a norm under the compiler and in exported programs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from contnorm.testing.checks import norm_check
from contnorm.testing.subject import CheckSkipped, NormSubject, assert_close


@norm_check(slow=True)
def compiles(subject: NormSubject) -> None:
    """``torch.compile`` gives the same output, gradients and moments, in one graph unless it needs tags."""
    _check_compiled(subject, {})


@norm_check(strict=True, slow=True)
def compiles_cumulative(subject: NormSubject) -> None:
    """``torch.compile`` compiles it in one graph also with ``momentum=None``."""
    subject.require_moments()
    subject.require_options("momentum")
    _check_compiled(subject, {"momentum": None})


def _check_compiled(subject: NormSubject, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    plain, twin = subject.make(**options), subject.make(**options)
    compiled = torch.compile(twin, fullgraph=not subject.needs_tags, backend="aot_eager")
    for training in (True, False):
        results = []
        for module, layer in ((plain, plain), (compiled, twin)):
            layer.train(training).zero_grad()
            x = subject.data().requires_grad_()
            with subject.tags(len(x)):
                y = module(x)
            torch.autograd.backward((y * subject.data(seed=2)).sum())
            results.append([y, x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()])
        for expected, actual in zip(*results, strict=True):
            if expected is not None:
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def _exportable(subject: NormSubject) -> torch.nn.Module:
    layer = subject.make()
    subject.run(layer, subject.data())
    return layer.eval()


@norm_check()
def exports(subject: NormSubject) -> None:
    """``torch.export`` exports it in evaluation mode with a batch of any size."""
    layer = _exportable(subject)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(layer, (subject.data(),), dynamic_shapes=({0: batch},))
    x = subject.data(seed=1, size=7)
    assert_close(program.module()(x), layer(x), 1e-5, "the output of the exported program")


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Suppress warnings, such as about other libraries that are not installed."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@norm_check(slow=True)
def exports_to_onnx(subject: NormSubject) -> None:
    """ONNX Runtime reproduces its output in evaluation mode with a batch of any size."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise CheckSkipped(f"{missing[0]} is not installed")
    runtime: Any = import_module("onnxruntime")
    layer = _exportable(subject).cpu()
    batch = torch.export.Dim("batch", min=2, max=64)
    data = subject.data().cpu()
    with _quiet(logging.getLogger("torch.onnx")):
        program = torch.onnx.export(layer, (data,), dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    assert program is not None
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for size in (2, 7):
        x = subject.data(seed=1, size=size).cpu()
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert_close(torch.from_numpy(y), subject.expected(layer, x)[0], 1e-5, "the output of ONNX Runtime")
