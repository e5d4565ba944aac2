"""Memories of the user: by class, object, file and registered name; checks of what they return; settings; resuming."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from contnorm import bench
from contnorm.bench.components import remove_component
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.plan import Plan, make_plan, take_census
from contnorm.bench.streams.tasks import TaskSequence
from contnorm.errors import UserError

REPLAY_ALL = {"strategy.replay_from": "all"}


class Newest(bench.Memory):
    """The newest samples of the stream."""

    def setup(self) -> None:
        self.seen = 0

    def offer(self, labels: np.ndarray, task: int) -> np.ndarray:
        slots = (self.seen + np.arange(len(labels))) % self.capacity
        self.seen += len(labels)
        return slots


class RandomSlots(bench.Memory):
    """A random slot for each sample, with a probability that is a setting."""

    @dataclass(frozen=True)
    class Settings:
        probability: float = 0.5
        lowest: int = 0

    def offer(self, labels: np.ndarray, task: int) -> np.ndarray:
        slots = self.generator.integers(self.settings.lowest, self.capacity, len(labels))
        return np.where(self.generator.random(len(labels)) < self.settings.probability, slots, -1)


class MyRing(bench.Ring):
    """A ring that is a user's because of its class alone."""


class PerTask(bench.Memory):
    """``size`` slots for each task."""

    def setup(self) -> None:
        assert self.stream is not None
        self.capacity = self.size * self.stream.tasks

    def offer(self, labels: np.ndarray, task: int) -> np.ndarray:
        return task * self.size + self.generator.integers(0, self.size, len(labels))


@pytest.fixture
def stream() -> bench.Stream:
    """Six classes of Gaussian vectors in three tasks: 40 training samples of each."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(6), 40)
    x = (2 * rng.normal(size=(6, 12)))[y] + rng.normal(size=(len(y), 12))
    return bench.Stream.from_arrays(x, y, x, y, tasks=3)


def plan_of(result: bench.Result, stream: bench.Stream, seed: int = 0) -> tuple[Plan, TaskSequence]:
    sequence = stream.sequence(seed)
    return make_plan(result.config, sequence, seed, draws=1), sequence


def test_user_memory_determines_what_is_replayed(stream: bench.Stream) -> None:
    """With the newest 20 samples in memory, a step replays samples of the two batches before it."""
    result = bench.run(stream, memory=Newest(20), settings=REPLAY_ALL)
    plan, sequence = plan_of(result, stream)
    order = np.concatenate([step.stream for step in plan.steps])
    for number, step in enumerate(plan.steps):
        newest = order[max(0, number * 10 - 20) : number * 10]
        assert set(step.replay[0].tolist()) <= set(newest.tolist())
        assert len(step.replay[0]) == min(10, len(newest))
    census = take_census(plan, sequence)
    assert census["held"][-1] == " ".join(map(str, np.bincount(sequence.train.label[order[-20:]], minlength=6)))
    assert (census["capacity"], census["written"][-1], census["evicted"][-1]) == (20, 240, 220)


def test_class_object_file_and_name_have_the_same_scores(stream: bench.Stream, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\nfrom contnorm import bench\n\n\nclass Newest(bench.Memory):\n    seen = 0\n\n"
        "    def offer(self, labels, task):\n        self.seen += len(labels)\n"
        "        return np.arange(self.seen - len(labels), self.seen) % self.capacity\n"
    )
    bench.register("memory", "latest", Newest)
    try:
        results = [
            bench.run(stream, memory=memory, settings={**REPLAY_ALL, "memory.size": 20})
            for memory in (Newest, Newest(20), f"{file}:Newest", "latest")
        ]
    finally:
        remove_component("memory", "latest")
    for other in results[1:]:
        np.testing.assert_array_equal(other.accuracy, results[0].accuracy)
    by_class, by_object, by_file, by_name = (result.config.memory for result in results)
    assert by_class == by_object and by_class.code and by_class.kind.endswith("test_user_memories.py:Newest")
    assert by_file.kind == f"{file}:Newest" and by_file.code != by_class.code
    assert by_name.kind == "latest" and by_name.code == by_class.code


class FirstSlot:
    """A mixin that is no memory."""

    def offer(self, labels: np.ndarray, task: int) -> np.ndarray:
        return np.where(np.arange(len(labels)) == 0, 0, -1)


class Mixed(FirstSlot, bench.Memory):
    pass


class Doubled(Mixed):
    """Calls the offer of its base class, and stores the second sample too."""

    def offer(self, labels: np.ndarray, task: int) -> np.ndarray:
        slots = super().offer(labels, task)
        slots[1] = 1
        return slots


def test_inherited_offer_records_the_slots_it_fills() -> None:
    for memory, filled in ((Mixed(4), [0]), (Doubled(4), [0, 1])):
        memory.offer(np.zeros(3, dtype=np.int64), task=2)
        assert memory.readable().tolist() == filled
        assert memory.readable(before_task=2).tolist() == []


def test_subclass_of_a_built_in_memory_stores_the_same(stream: bench.Stream) -> None:
    mine, theirs = (bench.run(stream, memory=memory(5)) for memory in (MyRing, bench.Ring))
    np.testing.assert_array_equal(mine.accuracy, theirs.accuracy)
    assert mine.config.memory.kind != theirs.config.memory.kind == "ring"


def test_capacity_may_depend_on_the_stream(stream: bench.Stream) -> None:
    plan, _ = plan_of(bench.run(stream, memory=PerTask(15)), stream)
    assert plan.slots == 45
    assert all((step.replay_slots[0] < 15 * step.task).all() for step in plan.steps), "past tasks only"
    with pytest.raises(UserError, match=r"memory\.size=3 is too small: 9 slots"):
        bench.run(stream, memory=PerTask(3))


def test_own_settings_are_checked_and_recorded(stream: bench.Stream) -> None:
    config = bench.run(stream, memory=RandomSlots(30, probability=0.9), settings={"memory.lowest": 3}).config
    assert config.memory.options == (("lowest", 3), ("probability", 0.9)) and config.memory.size == 30
    default = bench.run(stream, memory=RandomSlots(30)).config
    assert default.memory.options == (("lowest", 0), ("probability", 0.5)) and default.hash != config.hash
    for settings, words in (
        ({"memory.probability": "often"}, "memory.probability='often'"),
        ({"memory.probabilty": 0.1}, "Did you mean 'memory.probability'"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            bench.run(stream, memory=RandomSlots, settings=settings)
    with pytest.raises(UserError, match=r"memory\.probability to 0\.9 and to 0\.5"):
        bench.run(stream, memory=RandomSlots(30, probability=0.9), settings={"memory.probability": 0.5})
    with pytest.raises(TypeError, match="temperature"):
        Newest(3, temperature=2)


def source(body: str, before: str = "") -> str:
    head = f"import numpy as np\nfrom contnorm import bench\n{before}\nclass Mine(bench.Memory):\n"
    return head + "".join(f"    {line}\n" for line in body.splitlines())


OFFER = "def offer(self, labels, task):\n    return "
FILL = "def offer(self, labels, task):\n    return np.arange(len(labels))\n"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (f"{OFFER}np.full(len(labels), 50)", "offer() returned [50, 50, 50"),
        (f"{OFFER}np.full(len(labels), -2)", "from 0 to 49, or -1"),
        (f"{OFFER}np.zeros(len(labels))", "offer() returned [0.0, 0.0"),
        (f"{OFFER}np.zeros(3, dtype=int)", "offer() returned [0, 0, 0] for 10 samples"),
        (f"{OFFER}None", "offer() returned None"),
        (f"{OFFER}1 / 0", "FILE, line 6: ZeroDivisionError: division by zero"),
        ("pass", "does not define offer"),
        (f"{FILL}def setup(self): raise KeyError('x')", "FILE, line 7: KeyError"),
        (f"{FILL}class Settings:\n    x = 1", "Settings must be a dataclass"),
    ],
)
def test_unusable_memory_is_one_line_and_nothing_is_written(
    stream: bench.Stream, tmp_path: Path, body: str, words: str
) -> None:
    file, runs = tmp_path / "mine.py", tmp_path / "runs"
    file.write_text(source(body))
    with pytest.raises(UserError) as error:
        bench.run(stream, memory=f"{file}:Mine", settings={"memory.size": 50}, runs=runs)
    message = str(error.value)
    assert message.startswith((f"memory '{file}:Mine': ", "memory Mine: Settings"))
    assert words.replace("FILE", str(file)) in message and "\n" not in message
    assert not runs.exists() or not [path for path in runs.rglob("*") if path.is_file()]


def test_arrays_that_a_memory_changes_later_are_copied(stream: bench.Stream, tmp_path: Path) -> None:
    """A memory may return the same array at each step; the plan must have the values at the time of each call."""
    body = (
        "def setup(self):\n    self.slots, self.seen = np.zeros(10, dtype=np.int64), 0\n"
        "def offer(self, labels, task):\n    self.slots[:] = (self.seen + np.arange(10)) % self.capacity\n"
        "    self.seen += 10\n    labels[:] = -1\n    return self.slots"
    )
    (tmp_path / "mine.py").write_text(source(body))
    settings = {**REPLAY_ALL, "memory.size": 20}
    shared, plain = (bench.run(stream, memory=m, settings=settings) for m in (f"{tmp_path}/mine.py:Mine", Newest))
    np.testing.assert_array_equal(shared.accuracy, plain.accuracy)


class _StopError(Exception):
    pass


def interrupt_at(step: int, patch: pytest.MonkeyPatch) -> None:
    real = Trainer.step

    def step_or_stop(trainer: Trainer) -> torch.Tensor:
        if trainer.done == step:
            raise _StopError
        return real(trainer)

    patch.setattr(Trainer, "step", step_or_stop)


@pytest.mark.parametrize("step", [8, 17])
def test_run_with_a_random_memory_resumes_bit_exactly(
    stream: bench.Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    def run(runs: str) -> bench.Result:
        memory = RandomSlots(30, probability=0.7)
        return bench.run(stream, memory=memory, strategy="derpp", runs=tmp_path / runs, keep_weights=True)

    whole = run("whole")
    with monkeypatch.context() as patch:
        interrupt_at(step, patch)
        with pytest.raises(_StopError):
            run("stopped")
    resumed = run("stopped")
    np.testing.assert_array_equal(resumed.accuracy, whole.accuracy)
    (first,), (second,) = whole.models(), resumed.models()
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


def test_multi_hot_memory_gets_rows(stream: bench.Stream, tmp_path: Path) -> None:
    body = (
        "multi_hot = True\ndef offer(self, labels, task):\n    assert labels.shape[1] == 6\n    return labels.argmax(1)"
    )
    (tmp_path / "mine.py").write_text(source(body))
    result = bench.run(stream, memory=f"{tmp_path}/mine.py:Mine", replay=2)
    plan, sequence = plan_of(result, stream)
    for step in plan.steps:
        np.testing.assert_array_equal(step.write, sequence.train.label[step.stream])


@pytest.mark.parametrize(
    ("memory", "text"),
    [
        (bench.Ring(50), "Ring(50, per='task')"),
        (bench.Reservoir(500), "Reservoir(500)"),
        (Newest(8), "Newest(8)"),
        (RandomSlots(8, probability=0.25), "RandomSlots(8, probability=0.25)"),
    ],
    ids=["ring", "reservoir", "own", "own settings"],
)
def test_repr_is_the_call_that_makes_a_memory(memory: bench.Memory, text: str) -> None:
    assert repr(memory) == text
