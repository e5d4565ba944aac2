"""Streams of images with several labels, and their plans: the published steps, what is left out, what comes again."""

from typing import Any

import numpy as np
import pytest

from contnorm.bench.config.schema import RunConfig, StreamConfig, from_dict, merge_settings
from contnorm.bench.data.dataset import Source
from contnorm.bench.memories import NOT_STORED
from contnorm.bench.plan import make_plan, take_census
from contnorm.bench.streams.tasks import STREAMS, Items, TaskSequence, build_stream, check_stream
from contnorm.errors import UserError
from tests.datasets import small_multi_label

SOURCE = small_multi_label(train=183, test=60)
FREE = StreamConfig("cocoseq", scenario="free", part="all", augment=False)


def settings(name: str = "cocoseq", **groups: dict[str, Any]) -> RunConfig:
    own: dict[str, Any] = {"stream": {"name": name}, "strategy": {"name": "prs"}, "memory": {"kind": "prs", "size": 30}}
    return from_dict(merge_settings(merge_settings(STREAMS[name].defaults, own), groups))


def test_stream_has_the_tasks_of_its_source_in_random_order() -> None:
    one, other = (build_stream(FREE, SOURCE, seed) for seed in (0, 1))
    assert one.multi_label and one.task_free and one.padding is None and one.tasks == 3 and one.outputs == 12
    for items, task_of, labels in (
        (one.train, SOURCE.train_task, SOURCE.train_labels),
        (one.test, SOURCE.test_task, SOURCE.test_labels),
    ):
        np.testing.assert_array_equal(np.sort(items.image), np.arange(len(task_of)))
        np.testing.assert_array_equal(items.task, task_of)
        np.testing.assert_array_equal(task_of[items.image], items.task)
        np.testing.assert_array_equal(items.label, labels[items.image])
    assert (one.train.image != other.train.image).any() and (one.train.image != np.arange(183)).any()
    np.testing.assert_array_equal(one.test.image, other.test.image)


@pytest.mark.parametrize(
    ("name", "sizes", "steps"),
    [
        ("cocoseq", [8365, 7290, 7814, 11603], [836, 729, 781, 1160]),
        ("nus-wideseq", [1948, 18402, 17672, 4730, 2373, 3623], [194, 1840, 1767, 473, 237, 362]),
    ],
)
def test_published_streams_have_the_published_steps(name: str, sizes: list[int], steps: list[int]) -> None:
    task = np.repeat(np.arange(len(sizes)), sizes)
    items = Items(np.arange(len(task)), np.zeros((len(task), 2), dtype=np.uint8), task)
    ones = np.ones((len(sizes), 2), dtype=bool)
    stream = TaskSequence(SOURCE, items, items, len(sizes), 2, ones, task_free=True)
    plan = make_plan(settings(name), stream, 0, draws=0)
    assert np.diff(plan.ends, prepend=0).tolist() == steps and len(plan.steps) == sum(steps)
    assert {len(step.stream) for step in plan.steps} == {10}


def test_partial_batches_are_dropped_and_replay_is_full_at_once() -> None:
    stream = build_stream(FREE, SOURCE, 0)
    plan = make_plan(settings(), stream, 0, draws=1)
    assert [(stream.train.task == t).sum() for t in range(3)] == [61] * 3 and plan.ends == (6, 12, 18)
    assert [len(step.replay[0]) for step in plan.steps] == [0] + [10] * 17
    assert all(len(np.unique(stream.train.task[step.stream])) == 1 for step in plan.steps)
    kept = make_plan(settings(train={"partial": "keep"}), stream, 0, draws=1)
    assert [len(step.stream) for step in kept.steps] == [10] * 18 + [3] and kept.ends == (7, 13, 19)


def test_repeated_pass_is_offered_to_the_memory_once() -> None:
    stream = build_stream(FREE, SOURCE, 0)
    once, thrice = (make_plan(settings(train={"passes": n}), stream, 0, draws=1) for n in (1, 3))
    assert thrice.ends == (18, 36, 54)
    first = [thrice.steps[i] for task in range(3) for i in range(18 * task, 18 * task + 6)]
    for a, b in zip(once.steps, first, strict=True):
        np.testing.assert_array_equal(a.stream, b.stream)
        np.testing.assert_array_equal(a.write, b.write)
    again = thrice.steps[6:12]
    assert all((step.write == NOT_STORED).all() for step in again)
    shown, before = (np.concatenate([step.stream for step in steps]) for steps in (again, thrice.steps[:6]))
    assert len(set(shown)) == 60 and (shown != before).any() and (stream.train.task[shown] == 0).all()


def test_census_equals_replayed_writes() -> None:
    stream = build_stream(FREE, SOURCE, 0)
    plan = make_plan(settings(), stream, 0, draws=1)
    census = take_census(plan, stream)
    held: dict[int, int] = {}
    written = 0
    for number, step in enumerate(plan.steps, 1):
        for item, slot in zip(step.stream.tolist(), step.write.tolist(), strict=True):
            if slot != NOT_STORED:
                held[slot], written = item, written + 1
        if number in plan.ends:
            task = plan.ends.index(number)
            assert census["held"][task] == " ".join(map(str, stream.train.label[sorted(held.values())].sum(0)))
            assert census["written"][task] == written and census["evicted"][task] == written - len(held)
    shown = np.concatenate([step.stream for step in plan.steps])
    assert census["shown"][-1] == " ".join(map(str, stream.train.label[shown].sum(0))) and census["evicted"][-1] > 10


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"stream": {"scenario": "class"}}, r"stream.scenario=class: .*task-free \(cocoseq\)"),
        ({"stream": {"tasks": 4}}, "stream.tasks=4 must be 1 to 3 for cocoseq here"),
        ({"memory": {"kind": "ring", "per": "class"}}, "has several labels"),
        ({"memory": {"kind": "balanced"}}, "memory.kind=balanced: .*has several labels.*prs or reservoir"),
        ({"strategy": {"replay_from": "past"}}, "a task-free stream has no task boundaries"),
        ({"train": {"batch": 62}}, "a task has 61 samples, .*train.partial=drop"),
    ],
)
def test_unsupported_multilabel_settings_are_refused(groups: dict[str, dict[str, Any]], said: str) -> None:
    def plan(config: RunConfig) -> None:
        check_stream(config.stream)
        make_plan(config, build_stream(config.stream, SOURCE, 0), 0, draws=1)

    with pytest.raises(UserError, match=said):
        plan(settings(**groups))


def test_single_label_source_is_refused() -> None:
    labels = np.zeros(4, dtype=np.int64)
    plain = Source("cocoseq", SOURCE.train_images[:4], labels, SOURCE.test_images[:4], labels, 12, "0" * 16)
    with pytest.raises(UserError, match="one label each, but cocoseq needs several"):
        build_stream(FREE, plain, 0)
