"""The plan: what it shows is what the stream has, what it replays is what a live memory would hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from contnorm.config import RunConfig, from_dict
from contnorm.errors import UserError
from contnorm.memories import NOT_KEPT, Reservoir
from contnorm.plan import build_memory, make_plan
from contnorm.streams.classification import Stream, build_stream
from contnorm.streams.sources import Source, load_source
from tests.datasets import small_mnist

EVERY_MEMORY = [
    {"kind": "ring", "size": 7},
    {"kind": "ring", "size": 3, "per": "class"},
    {"kind": "reservoir", "size": 25},
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return load_source("mnist", small_mnist(tmp_path_factory.mktemp("mnist")))


def settings(**groups: dict[str, Any]) -> RunConfig:
    stream = {"name": "split-mnist", "scenario": "class", "part": "all"}
    return from_dict({**groups, "stream": stream | groups.get("stream", {})})


def stream_of(config: RunConfig, source: Source, seed: int = 0) -> Stream:
    return build_stream(config.stream, source, seed)


def test_every_item_comes_once_in_order_with_a_smaller_last_batch(source: Source) -> None:
    config = settings(train={"batch": 16})
    stream = stream_of(config, source)
    plan = make_plan(config, stream, 0, draws=0)
    np.testing.assert_array_equal(np.concatenate([s.stream for s in plan.steps]), np.arange(len(stream.train)))
    assert [len(s.stream) for s in plan.steps[:4]] == [16, 16, 16, 12] and plan.ends == (4, 8, 12, 16, 20)
    assert all((stream.train.task[s.stream] == s.task).all() for s in plan.steps)
    assert all((s.write == NOT_KEPT).all() and s.replay == () for s in plan.steps)


@pytest.mark.parametrize("memory", EVERY_MEMORY, ids=["ring", "ring per class", "reservoir"])
@pytest.mark.parametrize("past", ["past", "all"])
def test_replay_is_what_a_live_memory_holds(source: Source, memory: dict[str, Any], past: str) -> None:
    config = settings(memory=memory, strategy={"name": "er", "replay_from": past})
    stream = stream_of(config, source)
    plan = make_plan(config, stream, 3, draws=2)
    live = build_memory(config.memory, stream, 3)
    held: dict[int, int] = {}
    replayed = 0
    for step in plan.steps:
        allowed = {s for s, i in held.items() if past == "all" or stream.train.task[i] < step.task}
        for items, slots in zip(step.replay, step.replay_slots, strict=True):
            assert len(set(slots.tolist())) == len(slots) == min(10, len(allowed))
            assert set(slots.tolist()) <= allowed
            assert [held[int(s)] for s in slots] == items.tolist()
            replayed += len(items)
        slots = np.concatenate([live.offer(stream.train.label[[i]], step.task) for i in step.stream])  # one by one
        np.testing.assert_array_equal(slots, step.write)
        held |= {int(s): int(i) for s, i in zip(slots, step.stream, strict=True) if s != NOT_KEPT}
    assert replayed > 100 and plan.slots == live.capacity
    assert any((a != b).any() for s in plan.steps for a, b in [s.replay] if len(a)), "draws are independent"


def test_the_same_seed_gives_the_same_plan_whatever_the_norm(source: Source) -> None:
    plans = []
    for norm, seed in (("bn", 0), ("cn", 0), ("bn", 1)):
        config = settings(norm={"name": norm}, strategy={"name": "er"})
        plans.append(make_plan(config, stream_of(config, source, seed), seed, draws=1))
    for a, b in zip(plans[0].steps, plans[1].steps, strict=True):
        np.testing.assert_array_equal(a.replay[0], b.replay[0])
    assert any(
        (a.replay[0] != c.replay[0]).any() for a, c in zip(plans[0].steps, plans[2].steps, strict=True) if a.task
    )


def test_views_are_drawn_for_stream_and_replay_where_there_is_augmentation(source: Source) -> None:
    plain = settings(strategy={"name": "er"})
    augmented = settings(strategy={"name": "er"}, stream={"augment": True})
    a, b = (make_plan(c, stream_of(c, source), 0, draws=1) for c in (plain, augmented))
    assert a.steps[0].stream_views is None
    for with_views, without in zip(b.steps, a.steps, strict=True):
        np.testing.assert_array_equal(with_views.replay[0], without.replay[0])  # views disturb nothing else
        assert with_views.stream_views is not None and with_views.replay_views is not None
        assert with_views.stream_views.shape == (len(without.stream), 3)
        assert with_views.replay_views[0].shape == (len(without.replay[0]), 3)
    drawn = np.concatenate([s.stream_views for s in b.steps if s.stream_views is not None])
    assert drawn[:, :2].min() == 0 and drawn[:, :2].max() == 8 and set(drawn[:, 2].tolist()) == {0, 1}


def test_a_memory_smaller_than_a_replay_batch_is_named(source: Source) -> None:
    config = settings(memory={"kind": "reservoir", "size": 5}, strategy={"name": "er"})
    with pytest.raises(UserError, match=r"memory\.size=5 is smaller than the replay batch of 10.*--buffer"):
        make_plan(config, stream_of(config, source), 0, draws=1)


def test_stopping_early_is_the_beginning_of_the_whole(source: Source) -> None:
    whole, part = (settings(train={"max_steps": steps}) for steps in (None, 7))
    a, b = (make_plan(c, stream_of(c, source), 0, draws=0) for c in (whole, part))
    assert len(b.steps) == 7 and b.ends == (6, 7, 7, 7, 7)
    np.testing.assert_array_equal(a.steps[6].stream, b.steps[6].stream)


def test_without_tasks_batches_go_across_their_borders(source: Source) -> None:
    values = {"stream": {"scenario": "free"}, "train": {"batch": 16}, "memory": {"kind": "reservoir", "size": 25}}
    config = settings(**values, strategy={"name": "er", "replay_from": "all"})
    stream = stream_of(config, source)
    assert stream.task_free and stream.competing.all()
    plan = make_plan(config, stream, 0, draws=1)
    np.testing.assert_array_equal(np.concatenate([s.stream for s in plan.steps]), np.arange(300))
    assert [len(s.stream) for s in plan.steps] == [16] * 18 + [12]
    # 60 samples a task: its last is the 60th, 120th, ... of the stream, in the 4th, 8th, 12th, 15th and 19th batch.
    assert plan.ends == (4, 8, 12, 15, 19)
    assert any(len(set(stream.train.task[s.stream].tolist())) == 2 for s in plan.steps)


def test_without_tasks_the_memory_is_told_of_none(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    reservoir, er = {"kind": "reservoir", "size": 25}, {"name": "er", "replay_from": "all"}
    config = settings(stream={"scenario": "free"}, memory=reservoir, strategy=er)
    told: list[int] = []
    offer = Reservoir.offer

    def listening(memory: Reservoir, labels: np.ndarray, task: int) -> np.ndarray:
        told.append(task)
        return offer(memory, labels, task)

    monkeypatch.setattr(Reservoir, "offer", listening)
    make_plan(config, stream_of(config, source), 0, draws=1)
    assert len(told) == 30 and set(told) == {0}


@pytest.mark.parametrize("group", [{"memory": {"kind": "ring"}}, {"strategy": {"name": "er", "replay_from": "past"}}])
def test_what_goes_by_tasks_is_refused_without_tasks(source: Source, group: dict[str, Any]) -> None:
    values = {"memory": {"kind": "reservoir", "size": 25}, "strategy": {"name": "er", "replay_from": "all"}, **group}
    config = settings(stream={"scenario": "free"}, **values)
    with pytest.raises(UserError, match=r"stream.scenario=free: a task-free stream has no tasks to go by, and"):
        make_plan(config, stream_of(config, source), 0, draws=1)
