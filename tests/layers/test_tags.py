"""Tags of a batch as a side channel to norm layers."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
import torch

from contnorm.tags import BatchTags, batch_tags, current_tags


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


def test_other_threads_do_not_see_the_tags() -> None:
    seen: list[object] = []
    with batch_tags(tags_of([0])):
        thread = threading.Thread(target=lambda: seen.append(current_tags(1)))
        thread.start()
        thread.join()
    assert seen == [None]


def test_tags_of_another_size_are_rejected() -> None:
    with batch_tags(tags_of([0, 1, 2])), pytest.raises(ValueError, match="input has 4 samples, but the tags are of 3"):
        current_tags(4)


def test_bad_tags_are_rejected() -> None:
    task = torch.zeros(3, dtype=torch.int64)
    for replayed, message in (
        (torch.zeros(2, dtype=torch.bool), r"shape \(2,\) and task \(3,\)"),
        (torch.zeros(3), "Use torch.bool"),
    ):
        with pytest.raises(ValueError, match=message), batch_tags(BatchTags(replayed, task)):
            pass
