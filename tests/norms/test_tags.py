"""Tags of a batch as a side channel to norm layers."""

import copy
from contextlib import suppress
from typing import Any

import pytest
import torch

import contnorm as cn
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


@pytest.mark.slow
def test_compiled_layer_follows_the_tags() -> None:
    """The compiler breaks the graph where a mask selects; other tags give other results without a new layer."""
    torch._dynamo.reset()
    layer = StreamNorm(4)
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager")
    x, tags = stream_batch(0)
    for replayed in (tags.replayed, ~tags.replayed):
        with batch_tags(BatchTags(replayed, tags.task)):
            torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["adab2n", "tbbn", "bnt"])
def test_norms_that_need_tags_compile_in_one_graph(norm: str) -> None:
    """Also when task and sizes change: outputs, gradients, moments and losses are those of the layer."""
    torch._dynamo.reset()
    layer: Any = cn.create_norm(norm, 4)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for task, stream, memory in ((0, 6, 0), (2, 6, 6), (2, 12, 4), (3, 12, 4)):
        x = torch.randn(stream + memory, 4, 3, 3, generator=torch.Generator().manual_seed(stream))
        replayed = torch.arange(len(x)) >= stream
        tags = BatchTags(replayed, torch.where(replayed, 0, task), extra_size=memory, stream_size=stream)
        results = []
        for each, call in ((layer, layer), (twin, compiled)):
            getattr(each, "on_task_start", int)(task)
            with batch_tags(tags):
                loss = call(x).square()[0].sum()
            (loss + (each.auxiliary_loss() if norm == "adab2n" else 0)).backward()
            results.append([loss, *(parameter.grad for parameter in each.parameters()), *each.buffers()])
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
