"""Tags of a batch as a side channel to norm layers."""

import copy
from contextlib import suppress

import pytest
import torch
from torch import nn

from contnorm.tags import BatchTags, batch_tags, current_tags
from tests.testing.norms import StreamNorm


def tags_of(task: list[int]) -> BatchTags:
    return BatchTags(torch.zeros(len(task), dtype=torch.bool), torch.tensor(task))


def test_contexts_nest_and_end_on_an_error() -> None:
    outer, inner = tags_of([0, 1]), tags_of([2])
    with batch_tags(outer):
        with batch_tags(inner):
            assert current_tags(1) is inner
        with suppress(RuntimeError), batch_tags(inner):
            raise RuntimeError
        assert current_tags(2) is outer
        with batch_tags(None):
            assert current_tags(5) is None
    assert current_tags(2) is None


def test_bad_tags_are_rejected() -> None:
    with batch_tags(tags_of([0, 1, 2])), pytest.raises(ValueError, match="input has 4 samples, but the tags are of 3"):
        current_tags(4)
    for replayed in (torch.zeros(2, dtype=torch.bool), torch.zeros(3)):
        tags = BatchTags(replayed, torch.zeros(3, dtype=torch.int64))
        with pytest.raises(ValueError, match="replayed has"), batch_tags(tags):
            pass


# --- norms that use tags, in plain training loops ------------------------------------------------------------------


def stream_batch(seed: int) -> tuple[torch.Tensor, BatchTags]:
    x = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(seed)) * 2 + 1
    replayed = torch.tensor([False, True, False, False, True, False])
    return x, BatchTags(replayed, torch.where(replayed, 0, 1))


def test_layer_normalizes_with_the_samples_of_the_stream() -> None:
    layer, expected = StreamNorm(4), nn.BatchNorm2d(4)
    for seed in range(3):
        x, tags = stream_batch(seed)
        with batch_tags(tags):
            y = layer(x)
        torch.testing.assert_close(y[~tags.replayed], expected(x[~tags.replayed]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.running_mean, expected.running_mean)
    x, _ = stream_batch(9)
    assert layer.eval()(x).shape == x.shape  # there are no tags in evaluation


@pytest.mark.slow
def test_compiled_layer_follows_the_tags() -> None:
    """The compiler breaks the graph where tags are read; other tags give other results without a new layer."""
    torch._dynamo.reset()
    layer = StreamNorm(4)
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager")
    x, tags = stream_batch(0)
    for replayed in (tags.replayed, ~tags.replayed):
        with batch_tags(BatchTags(replayed, tags.task)):
            torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-5)
    with batch_tags(tags), pytest.raises(torch._dynamo.exc.Unsupported, match="ContextVar"):
        torch.compile(StreamNorm(4), backend="eager", fullgraph=True)(x)
