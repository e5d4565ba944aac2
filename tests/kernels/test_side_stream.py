"""Convolutions with weight gradients on a side stream are bit-exact with torch's.

The CUDA stream is fake and records its calls. On a GPU `tests/bench/engine/test_cuda_graph.py` compares runs that
use one with runs that do not.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from contnorm.kernels import side_stream as module
from contnorm.kernels.side_stream import Convolution, SideStream, side_stream_gradients


class Stream:
    """Fake CUDA stream that records waits."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def wait_stream(self, other: Stream) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    result: list[str] = []

    def on(stream: Stream) -> nullcontext[None]:
        result.append(f"on {stream.name}")
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("main", result))
    monkeypatch.setattr(torch.cuda, "stream", on)
    return result


def both(stride: int = 1, padding: int = 1, size: int = 3, groups: int = 1) -> tuple[Convolution, nn.Conv2d]:
    torch.manual_seed(0)
    ours = Convolution(4, 6, size, stride, padding, groups=groups, bias=False)
    theirs = nn.Conv2d(4, 6, size, stride, padding, groups=groups, bias=False)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def images() -> Tensor:
    return torch.randn(3, 4, 7, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "settings", [{}, {"stride": 2}, {"size": 1, "padding": 0, "stride": 2}, {"groups": 2}], ids=str
)
def test_gradients_are_bit_exact(notes: list[str], settings: dict[str, Any]) -> None:
    ours, theirs = both(**settings)
    x, y = images().requires_grad_(), images().requires_grad_()
    with side_stream_gradients(SideStream(Stream("side", notes))):
        ours(x).square().sum().backward()
        assert ours.weight.grad is None, "not before it is joined"
    theirs(y).square().sum().backward()
    for own, other in ((x, y), (ours.weight, theirs.weight)):
        assert own.grad is not None and other.grad is not None and torch.equal(own.grad, other.grad)
    assert notes == ["side waits for main", "on side", "main waits for side"]


def test_weight_used_twice_gets_the_summed_gradient(notes: list[str]) -> None:
    ours, theirs = both()
    side = SideStream(Stream("side", notes))
    with side_stream_gradients(side):
        (ours(images()).square().sum() + ours(images() + 1).sum()).backward()
    (theirs(images()).square().sum() + theirs(images() + 1).sum()).backward()
    assert ours.weight.grad is not None and theirs.weight.grad is not None
    assert torch.equal(ours.weight.grad, theirs.weight.grad)
    assert not side.read and not side.made, "tensors are released"


@pytest.mark.parametrize("why", ["no stream", "large", "frozen", "bias", "no gradients"])
def test_unsupported_convolutions_use_autograd(notes: list[str], monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    ours, _ = both()
    if why == "bias":
        ours = Convolution(4, 6, 3)
    if why == "large":
        monkeypatch.setattr(module, "LARGE", images().numel() - 1)
    ours.weight.requires_grad_(why != "frozen")
    side = None if why == "no stream" else SideStream(Stream("side", notes))
    with torch.set_grad_enabled(why != "no gradients"), side_stream_gradients(side):
        y = ours(images().requires_grad_())
        if y.requires_grad:
            y.sum().backward()
    assert notes == []


def test_weight_cast_by_autocast_uses_autograd(notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = both()
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    with side_stream_gradients(SideStream(Stream("side", notes))):
        ours(images()).sum().backward()
    assert notes == [] and ours.weight.grad is not None


def test_side_stream_is_reset_after_an_error(notes: list[str]) -> None:
    ours, _ = both()
    with pytest.raises(KeyError), side_stream_gradients(SideStream(Stream("side", notes))):
        raise KeyError
    ours(images()).sum().backward()
    assert notes == []
