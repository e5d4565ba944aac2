"""The plan: what it shows is what the stream has, what it replays is what a live memory would hold."""

from typing import Any

import numpy as np
import pytest

from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.data.dataset import Source
from contnorm.bench.data.registry import load_source
from contnorm.bench.memories import NOT_STORED, Memory, Reservoir, StreamInfo, build_memory
from contnorm.bench.plan import _Views, make_plan
from contnorm.bench.rng import generator
from contnorm.bench.streams.tasks import TaskSequence, build_stream
from contnorm.errors import UserError
from tests.datasets import small_mnist

EVERY_MEMORY = [
    {"kind": "ring", "size": 7},
    {"kind": "ring", "size": 3, "per": "class"},
    {"kind": "reservoir", "size": 25},
    {"kind": "prs", "size": 25, "rho": 0.02},
    {"kind": "prs", "size": 25, "rho": -0.03, "quirk": True},
]
NAMES = ["ring", "ring per class", "reservoir", "prs", "prs, with its quirk"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return load_source("mnist", small_mnist(tmp_path_factory.mktemp("mnist")))


def settings(**groups: dict[str, Any]) -> RunConfig:
    stream = {"name": "split-mnist", "scenario": "class", "part": "all"}
    return from_dict({**groups, "stream": stream | groups.get("stream", {})})


def stream_of(config: RunConfig, source: Source, seed: int = 0) -> TaskSequence:
    return build_stream(config.stream, source, seed)


@pytest.mark.parametrize("padding", [0, 1, 4, 60])
def test_views_of_many_batches_are_those_of_one_batch_after_the_other(padding: int) -> None:
    """Batches of odd sizes too: a generator of 64 bits keeps the half that a draw of 32 bits has left."""
    sizes = [10, 3, 0, 1, 32, 7, 7]
    rng = np.random.default_rng(5)
    expected = [
        np.concatenate([rng.integers(0, 2 * padding + 1, (size, 2)), rng.integers(0, 2, (size, 1))], axis=1)
        for size in sizes
    ]
    views = _Views(np.random.default_rng(5), padding)
    actual = views.draw_batched(sizes[:3]) + views.draw_batched([]) + views.draw_batched(sizes[3:])
    assert [batch.shape for batch in actual] == [(size, 3) for size in sizes]
    for batch, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(batch, other)
    assert views.rng.integers(0, 2**40) == rng.integers(0, 2**40)


def test_every_item_occurs_once_in_order(source: Source) -> None:
    config = settings(train={"batch": 16})
    stream = stream_of(config, source)
    plan = make_plan(config, stream, 0, draws=0)
    np.testing.assert_array_equal(np.concatenate([s.stream for s in plan.steps]), np.arange(len(stream.train)))
    assert [len(s.stream) for s in plan.steps[:4]] == [16, 16, 16, 12] and plan.ends == (4, 8, 12, 16, 20)
    assert all((stream.train.task[s.stream] == s.task).all() for s in plan.steps)
    assert all((s.write == NOT_STORED).all() and s.replay == () for s in plan.steps)


def memory_of(config: RunConfig, stream: TaskSequence, seed: int) -> Memory:
    info = StreamInfo(stream.outputs, stream.tasks, stream.multi_label)
    return build_memory(config.memory, info, generator(seed, "memory"))


def given(stream: TaskSequence, memory: dict[str, Any], item: int) -> np.ndarray:
    """The label of one item as the memory takes it."""
    label = stream.train.label[[item]]
    return np.eye(stream.outputs, dtype=np.int64)[label] if memory["kind"] == "prs" else label


@pytest.mark.parametrize("memory", EVERY_MEMORY, ids=NAMES)
@pytest.mark.parametrize("past", ["past", "all"])
def test_replay_equals_that_of_a_live_memory(source: Source, memory: dict[str, Any], past: str) -> None:
    config = settings(memory=memory, strategy={"name": "er", "replay_from": past})
    stream = stream_of(config, source)
    plan = make_plan(config, stream, 3, draws=2)
    live = memory_of(config, stream, 3)
    held: dict[int, int] = {}
    replayed = 0
    for step in plan.steps:
        allowed = {s for s, i in held.items() if past == "all" or stream.train.task[i] < step.task}
        for items, slots in zip(step.replay, step.replay_slots, strict=True):
            assert len(set(slots.tolist())) == len(slots) == min(10, len(allowed))
            assert set(slots.tolist()) <= allowed
            assert [held[int(s)] for s in slots] == items.tolist()
            replayed += len(items)
        slots = np.concatenate([live.offer(given(stream, memory, i), step.task) for i in step.stream])  # one by one
        np.testing.assert_array_equal(slots, step.write)
        held |= {int(s): int(i) for s, i in zip(slots, step.stream, strict=True) if s != NOT_STORED}
    assert replayed > 100 and plan.slots == live.capacity
    assert any((a != b).any() for s in plan.steps for a, b in [s.replay] if len(a)), "draws are independent"


def test_plan_does_not_depend_on_the_norm(source: Source) -> None:
    plans = []
    for norm, seed in (("bn", 0), ("cn", 0), ("bn", 1)):
        config = settings(norm={"name": norm}, strategy={"name": "er"})
        plans.append(make_plan(config, stream_of(config, source, seed), seed, draws=1))
    for a, b in zip(plans[0].steps, plans[1].steps, strict=True):
        np.testing.assert_array_equal(a.replay[0], b.replay[0])
    assert any(
        (a.replay[0] != c.replay[0]).any() for a, c in zip(plans[0].steps, plans[2].steps, strict=True) if a.task
    )


def test_augmentation_covers_stream_and_replay(source: Source) -> None:
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


@pytest.mark.parametrize(
    ("groups", "slots"),
    [
        ({"memory": {"kind": "reservoir", "size": 5}}, 5),
        ({"memory": {"size": 2}}, 8),  # in the rings of four past tasks
        ({"memory": {"size": 1}, "strategy": {"replay_from": "all"}}, 5),
        ({"memory": {"size": 1, "per": "class"}}, 8),
    ],
)
def test_memory_that_never_fills_a_replay_batch_is_refused(
    source: Source, groups: dict[str, dict[str, Any]], slots: int
) -> None:
    config = settings(**groups)
    with pytest.raises(UserError, match=rf"too small: {slots} slots .* batch of 10"):
        make_plan(config, stream_of(config, source), 0, draws=1)
    make_plan(config, stream_of(config, source), 0, draws=0)  # who replays nothing needs no memory


def test_max_steps_is_a_prefix_of_the_plan(source: Source) -> None:
    whole, part = (settings(train={"max_steps": steps}) for steps in (None, 7))
    a, b = (make_plan(c, stream_of(c, source), 0, draws=0) for c in (whole, part))
    assert len(b.steps) == 7 and b.ends == (6, 7)
    np.testing.assert_array_equal(a.steps[6].stream, b.steps[6].stream)
    endless = settings(train={"max_steps": 7, "passes": 10**9})  # what is not shown is not planned either
    assert make_plan(endless, stream_of(endless, source), 0, draws=0).ends == (7,)


def test_task_free_batches_cross_task_boundaries(source: Source) -> None:
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


def test_task_free_memory_gets_no_tasks(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("memory", EVERY_MEMORY, ids=NAMES)
def test_updates_repeat_a_batch_and_write_it_once(source: Source, memory: dict[str, Any]) -> None:
    strategy = {"name": "er", "replay_from": "all"}
    once, twice = (settings(memory=memory, strategy=strategy, train={"updates": n}) for n in (1, 2))
    assert once.hash == settings(memory=memory, strategy=strategy).hash != twice.hash
    a, b = (make_plan(config, stream_of(config, source), 3, draws=1) for config in (once, twice))
    assert b.ends == tuple(2 * end for end in a.ends)
    for number, step in enumerate(a.steps):
        first, last = b.steps[2 * number : 2 * number + 2]
        for update in (first, last):
            np.testing.assert_array_equal(update.stream, step.stream)
        assert (first.write == NOT_STORED).all()
        np.testing.assert_array_equal(last.write, step.write)
    pairs = [(x.replay_slots[0], y.replay_slots[0]) for x, y in zip(b.steps[::2], b.steps[1::2], strict=True)]
    assert any(len(x) == 10 and not np.array_equal(np.sort(x), np.sort(y)) for x, y in pairs)
