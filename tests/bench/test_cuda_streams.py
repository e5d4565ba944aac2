"""Streams of training, weight gradients and copies come from pools of their own, as far as a GPU has priorities."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest
import torch

from contnorm.bench.cuda_streams import copying_stream, has_side_streams, side_stream, training_stream

DEVICE = torch.device("cuda")
CAPTURE = 0  # the priority of the stream that torch captures graphs from


@pytest.fixture
def priorities(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let torch have pools for this many priorities; a stream is the name of its pool and its place in it."""
    levels: int = request.param
    requests = {priority: count() for priority in range(1 - levels, 1)}

    class Stream:
        def __new__(cls, device: torch.device, priority: int = 0) -> SimpleNamespace:  # type: ignore[misc]
            valid = max(1 - levels, min(0, priority))
            return SimpleNamespace(device=device, priority=valid, place=next(requests[valid]) % 32)

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, 1 - levels

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    return levels


@pytest.mark.parametrize("priorities", [4], indirect=True)
def test_every_use_has_a_pool_of_its_own(priorities: int) -> None:
    assert has_side_streams()
    training, side, copying = (make(DEVICE).priority for make in (training_stream, side_stream, copying_stream))
    assert len({training, side, copying, CAPTURE}) == 4
    assert training < side, "weight gradients take what the rest of a step leaves free"


@pytest.mark.parametrize("priorities", [2, 3, 4], indirect=True)
def test_copies_never_get_a_stream_of_training(priorities: int) -> None:
    assert has_side_streams() == (priorities == 4)
    training = {(stream.priority, stream.place) for stream in (training_stream(DEVICE) for _ in range(8))}
    copying = {(stream.priority, stream.place) for stream in (copying_stream(DEVICE) for _ in range(64))}
    assert len(copying) == 32 and not training & copying
