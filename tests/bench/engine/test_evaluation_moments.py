"""Evaluation with moments of the memory and with task-wise moments, and training with frozen moments."""

import copy
import math
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contnorm import bench
from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig, from_dict, merge_settings
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine import evaluate as evaluation
from contnorm.bench.engine.evaluate import memory_moments
from contnorm.bench.engine.execute import execute
from contnorm.bench.engine.loop import train_lanes
from contnorm.bench.engine.run import Event, Run, RunOptions
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.records import Record, Store
from contnorm.bench.streams.tasks import STREAMS
from contnorm.bench.unfinished import unfinished_runs
from contnorm.errors import UserError
from tests.bench.engine import stopped_runs
from tests.bench.engine.stopped_runs import kill, lanes_of, same_state
from tests.datasets import small_mnist

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_mnist(tmp_path_factory.mktemp("data"), train=400, test=100)


def settings(root: Path, **groups: dict[str, Any]) -> RunConfig:
    """Three tasks of about eighty samples, and a reservoir in which they have different numbers of samples."""
    own: dict[str, Any] = {
        "stream": {"name": "split-mnist", "tasks": 3},
        "strategy": {"name": "er"},
        "memory": {"kind": "reservoir", "size": 23},
        "norm": {"name": "bn"},
        "model": {"width": 12},
        "train": {"lr": 0.1, "batch": 6, "replay": 4},
    }
    return resolve(merge_settings(own, groups), root)


def trainer(config: RunConfig, root: Path, seed: int = 0, memory_moments: bool = False) -> Trainer:
    return Trainer(config, seed, load_source("mnist", root), CPU, memory_moments=memory_moments)


def results(*trainers: Trainer) -> list[dict[str, Any]]:
    return stopped_runs.results(trainers)


def steps_to_end_of(made: Trainer, task: int) -> None:
    while made.done < made.plan.ends[task]:
        made.step()


def moments_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if "running" in name}


def memory_by_hand(made: Trainer, task: int) -> list[tuple[int, int]]:
    """The items in the memory at the end of a task and their tasks, written one by one."""
    slots: dict[int, int] = {}
    for step in made.plan.steps[: made.plan.ends[task]]:
        for item, slot in zip(step.stream.tolist(), step.write.tolist(), strict=True):
            if slot >= 0:
                slots[slot] = item
    return [(item, int(made.data.sequence.train.task[item])) for item in slots.values()]


def copies_of(weights: str, replay_from: str, stored: list[tuple[int, int]], current: int) -> list[int]:
    """How often each stored sample occurs in a data set of the same shares, for batches of 6 and 4 samples."""
    if weights == "plain":
        return [1] * len(stored)
    tasks = [task for _, task in stored]
    if weights == "task":
        most = math.lcm(*(tasks.count(task) for task in set(tasks)))
        return [most // tasks.count(task) for task in tasks]
    drawn = [task for task in tasks if task < current or replay_from == "all"]
    unit = math.lcm(tasks.count(current), len(drawn))
    of_stream, of_memory = 6 * unit // tasks.count(current), 4 * unit // len(drawn)
    return [of_stream * (task == current) + of_memory * (task < current or replay_from == "all") for task in tasks]


@pytest.mark.parametrize(
    ("weights", "replay_from"), [("plain", "past"), ("task", "past"), ("batch", "past"), ("batch", "all")]
)
@pytest.mark.parametrize("norm", ["bn", "cn4"])
def test_memory_moments_are_those_of_a_data_set_with_these_shares(
    root: Path, norm: str, weights: str, replay_from: str
) -> None:
    """The oracle: one training-mode pass with momentum 1 over repeated samples. Its variance has their number."""
    evaluate = {"moments": "memory", "weights": weights}
    config = settings(root, evaluate=evaluate, norm={"name": norm}, strategy={"name": "er", "replay_from": replay_from})
    made = trainer(config, root)
    steps_to_end_of(made, 2)
    stored = memory_by_hand(made, 2)
    copies = copies_of(weights, replay_from, stored, current=2)
    assert (
        len(stored) == 23 and len({task for _, task in stored}) == 3 and (len(set(copies)) > 1) == (weights != "plain")
    )
    items = [item for (item, _), count in zip(stored, copies, strict=True) for _ in range(count)]
    norms = [nn.BatchNorm1d(12, momentum=1.0) for _ in range(2)]
    groups = [nn.Identity() if norm == "bn" else nn.GroupNorm(4, 12, affine=False) for _ in range(2)]
    layers = (made.model.fc1, groups[0], norms[0], nn.ReLU(), made.model.fc2, groups[1], norms[1])
    plain = copy.deepcopy(nn.Sequential(*layers)).double()
    with torch.no_grad():
        for ours, theirs in ((made.model.norm1, plain[2]), (made.model.norm2, plain[6])):
            theirs.weight.copy_(ours.weight)
            theirs.bias.copy_(ours.bias)
            theirs.eps = ours.eps
        plain.train()(made.data.train_x(torch.tensor(items)).flatten(1).double())
    effective = sum(copies) ** 2 / sum(count**2 for count in copies)
    size = len(items)
    before = moments_of(made.model)
    with memory_moments(made, 2) as done:
        for name, theirs in (("norm1", plain[2]), ("norm2", plain[6])):
            torch.testing.assert_close(done.moments[name].new_mean, theirs.running_mean.float(), rtol=1e-4, atol=1e-5)
            biased = theirs.running_var * (size - 1) / size
            expected = biased * effective / (effective - 1)
            torch.testing.assert_close(done.moments[name].new_var, expected.float(), rtol=1e-4, atol=1e-6)
        inside = moments_of(made.model)
        assert torch.equal(inside["norm2.running_mean"], done.moments["norm2"].new_mean)
    assert all(torch.equal(value, before[name]) for name, value in moments_of(made.model).items())


def test_memory_moments_change_the_evaluation_alone(root: Path) -> None:
    plain, memory = trainer(settings(root), root), trainer(settings(root, evaluate={"moments": "memory"}), root)
    (first,), (second,) = results(plain), results(memory)
    assert same_state(plain, memory)
    assert second["matrix_running"] == first["matrix"] and second["drift"] == first["drift"]
    assert second["matrix"] != first["matrix"]
    with memory_moments(memory, 2):
        assert second["matrix"]["correct"][2] == evaluation.count_predictions(memory, 3)["matrix"]


def record_of(config: RunConfig, environment: RunOptions) -> Record:
    """The record of a run, made from where its checkpoint is."""
    for _ in execute([Run(config, 0)], environment):
        pass
    record = environment.store.load_run(config, 0)
    assert isinstance(record, Record)
    return record


@pytest.mark.parametrize("moments", ["running", "oracle", "task"])
@pytest.mark.parametrize("scenario", ["task", "class"])
def test_memory_moments_are_measured_beside_those_of_the_settings(root: Path, moments: str, scenario: str) -> None:
    stream, slow = {"scenario": scenario}, {"lr": 0.001}
    config = settings(root, stream=stream, train=slow, evaluate={"moments": moments})
    plain, both = trainer(config, root), trainer(config, root, memory_moments=True)
    as_set = trainer(settings(root, stream=stream, train=slow, evaluate={"moments": "memory"}), root)
    (first,), (second,), (third,) = results(plain), results(both), results(as_set)
    assert same_state(plain, both)
    added = {"matrix_memory", *(["matrix_task_memory"] if scenario == "class" else [])}
    assert second.keys() - first.keys() == added
    assert all(second[key] == value for key, value in first.items() if key != "seconds")
    assert second["matrix_memory"] == third["matrix"] != third["matrix_running"]
    assert second.get("matrix_task_memory") == third.get("matrix_task")


def test_recorded_memory_moments_do_not_change_the_hash_and_are_resumed(root: Path, tmp_path: Path) -> None:
    config = settings(root)
    plain = record_of(config, RunOptions(runs=tmp_path / "plain", data_root=root))
    both = RunOptions(runs=tmp_path / "both", data_root=root, memory_moments=True, checkpoint_every=5)
    whole = record_of(config, both)
    assert whole.hash == plain.hash and list(plain.evaluated) == ["running"]
    assert list(whole.evaluated) == ["running", "memory"] and whole.evaluated["running"] == plain.evaluated["running"]
    stopped = replace(both, runs=tmp_path / "stopped")
    learned: list[Event] = []
    stop = partial(bool, learned)  # once a task is learned
    for event in execute([Run(config, 0)], stopped, stop=stop):
        learned += [event] if event.kind == "task" else []
    (left,) = unfinished_runs(tmp_path / "stopped")
    assert left.note["options"]["memory_moments"] and left.step > 0
    (resumed,) = bench.resume(tmp_path / "stopped", root=root)
    assert resumed.evaluated == whole.evaluated
    again = record_of(config, replace(both, runs=tmp_path / "plain"))
    assert list(again.evaluated) == ["running"]  # a recorded run is kept as it is


def test_task_moments_equal_manual_save_and_restore(root: Path) -> None:
    # Five tasks with different counts: with few or correct predictions, a mistake might not show.
    more: dict[str, Any] = {"stream": {"tasks": 5}, "train": {"lr": 0.001}}
    by_hand = trainer(settings(root, **more), root)
    saved, rows = [], []
    for task in range(5):
        steps_to_end_of(by_hand, task)
        saved.append(moments_of(by_hand.model))
        row: list[int | None] = [None] * 5
        for earlier, moments in enumerate(saved):
            other = trainer(settings(root, **more), root)
            other.model.load_state_dict({**by_hand.model.state_dict(), **moments})
            row[earlier] = evaluation.count_predictions(other, 5)["matrix"][earlier]
        rows.append(row)
    made = trainer(settings(root, **more, evaluate={"moments": "task"}), root)
    (found,) = results(made)
    assert found["matrix"]["correct"] == rows and len(set(rows[4])) > 2
    assert found["matrix_running"]["correct"] != rows
    assert all(
        torch.equal(tensor, by_hand.state()[name]) for name, tensor in made.state().items() if "moments" not in name
    )


def test_class_incremental_streams_use_task_moments_where_the_task_is_known(root: Path, tmp_path: Path) -> None:
    stream = {"name": "split-mnist", "tasks": 3, "scenario": "class"}
    slow = {"lr": 0.001}  # else all are right if the task is known
    (plain,) = results(trainer(settings(root, stream=stream, train=slow), root))
    config = settings(root, stream=stream, train=slow, evaluate={"moments": "task"})
    for _ in execute([Run(config, 0)], RunOptions(runs=tmp_path, data_root=root)):
        pass
    (record,) = Store(tmp_path)
    assert isinstance(record, Record)
    assert record.raw["matrix"] == plain["matrix"] and "matrix_running" not in record.raw
    assert record.raw["matrix_task_running"] == plain["matrix_task"] != record.raw["matrix_task"]
    assert list(record.evaluated) == ["running"]


@pytest.mark.parametrize("norm", ["bn", "cn4", "brn", "sn"])
def test_frozen_moments_stay_and_all_weights_are_trained(root: Path, norm: str) -> None:
    made = trainer(settings(root, norm={"name": norm, "freeze_after": 1}), root)
    steps_to_end_of(made, 0)
    frozen, weights = moments_of(made.model), copy.deepcopy(dict(made.model.named_parameters()))
    steps_to_end_of(made, 2)
    assert frozen and all(torch.equal(value, frozen[name]) for name, value in moments_of(made.model).items())
    assert not [name for name, value in made.model.named_parameters() if torch.equal(value, weights[name])]
    free = trainer(settings(root, norm={"name": norm}), root)
    steps_to_end_of(free, 0)
    assert all(torch.equal(value, frozen[name]) for name, value in moments_of(free.model).items()), "frozen too early"


def test_training_normalizes_with_frozen_moments(root: Path) -> None:
    """The first step of the second task, made by hand with torch's functions."""
    made = trainer(settings(root, norm={"name": "bn", "freeze_after": 1}), root)
    steps_to_end_of(made, 0)
    by_hand = {name: p.detach().clone().requires_grad_() for name, p in made.model.named_parameters()}
    moments, step = moments_of(made.model), made.plan.steps[made.done]
    items = torch.from_numpy(step.stream)
    assert step.task == 1 and len(step.replay[0]) == 4
    items = torch.cat([items, *map(torch.from_numpy, step.replay)])
    signal = made.data.train_x(items).flatten(1)
    for number in ("1", "2"):
        signal = F.linear(signal, by_hand[f"fc{number}.weight"], by_hand[f"fc{number}.bias"])
        name = f"norm{number}"
        mean, var = moments[f"{name}.running_mean"], moments[f"{name}.running_var"]
        signal = F.batch_norm(signal, mean, var, by_hand[f"{name}.weight"], by_hand[f"{name}.bias"], training=False)
        signal = signal.relu()
    logits = F.linear(signal, by_hand["head.weight"], by_hand["head.bias"])
    train = made.data.train
    loss = F.cross_entropy(made.head(logits, train.task[items]), train.label[items])
    loss.backward()
    assert float(made.step()) == pytest.approx(loss.item(), rel=1e-5)
    for name, p in made.model.named_parameters():
        grad = by_hand[name].grad
        assert grad is not None
        torch.testing.assert_close(p.detach(), by_hand[name].detach() - 0.1 * grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", ["single", "derpp", "er_ace", "ewc", "lwf"])
def test_moments_stay_frozen_with_every_strategy(root: Path, strategy: str) -> None:
    made = trainer(
        settings(root, strategy={"name": strategy}, norm={"name": "bn", "freeze_after": 2}, train={"lr": 0.01}), root
    )
    after: list[dict[str, Tensor]] = []
    for event in train_lanes(lanes_of([made])):
        if event.kind == "task":
            after.append(moments_of(made.model))
    assert all(torch.equal(value, after[1][name]) for name, value in after[2].items())
    assert not torch.equal(after[1]["norm1.running_mean"], after[0]["norm1.running_mean"])


MODES: dict[str, dict[str, Any]] = {
    "memory": {"evaluate": {"moments": "memory", "weights": "batch"}},
    "both": {},
    "task": {"evaluate": {"moments": "task"}},
    "class": {"evaluate": {"moments": "task"}, "stream": {"scenario": "class"}},
    "frozen": {"norm": {"freeze_after": 1}},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_killed_and_resumed_run_has_the_same_bits(root: Path, tmp_path: Path, mode: str) -> None:
    config, rng = settings(root, **MODES[mode]), random.Random(7)

    def make() -> list[Trainer]:
        return [trainer(config, root, seed, mode == "both") for seed in (0, 1)]

    whole, folders = make(), [tmp_path / str(seed) for seed in (0, 1)]
    expected = results(*whole)
    kills = 0
    while kills < 6:
        done = kill(make, folders, rng)
        kills += 1
        if done == whole[0].done:
            break
    resumed = make()
    again = stopped_runs.results(resumed, folders)
    for one, other, found, results_of in zip(whole, resumed, again, expected, strict=True):
        assert same_state(one, other)
        for key in ("matrix", "matrix_running", "matrix_memory", "matrix_task", "matrix_task_running", "drift"):
            assert found.get(key) == results_of.get(key), key


@pytest.mark.parametrize("mode", MODES)
def test_lanes_together_equal_lanes_alone(root: Path, mode: str) -> None:
    config = settings(root, **MODES[mode])
    together = [trainer(config, root, seed, mode == "both") for seed in (0, 1)]
    found = results(*together)
    for seed, lane in enumerate(together):
        alone = trainer(config, root, seed, mode == "both")
        (expected,) = results(alone)
        assert same_state(alone, lane) and found[seed]["matrix"] == expected["matrix"]
        assert found[seed].get("matrix_memory") == expected.get("matrix_memory")


def multi_label(**groups: dict[str, Any]) -> RunConfig:
    own: dict[str, Any] = {
        "stream": {"name": "cocoseq", "source": "cocoseq"},
        "strategy": {"name": "prs"},
        "memory": {"kind": "prs", "size": 25},
        "model": {"name": "mlp", "width": 16},
        "norm": {"name": "bn"},
    }
    return from_dict(merge_settings(merge_settings(STREAMS["cocoseq"].defaults, own), groups))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"strategy": {"name": "single"}, "evaluate": {"moments": "memory"}}, ("task 0", "0 samples")),
        ({"memory": {"size": 1}, "train": {"replay": 1}, "evaluate": {"moments": "memory"}}, ("task 0", "1 samples")),
        ({"evaluate": {"weights": "task"}}, ("evaluate.weights=task",)),
        ({"stream": {"scenario": "domain"}, "evaluate": {"moments": "task"}}, ("evaluate.moments=task",)),
        ({"norm": {"name": "gn4", "freeze_after": 1}}, ("norm.freeze_after=1", "'gn'")),
        ({"norm": {"freeze_after": 3}}, ("norm.freeze_after=3", "below the number of tasks, 3")),
        ({"norm": {"freeze_after": 0}}, ("norm.freeze_after=0",)),
        ({"stream": {"tasks": 1}, "norm": {"freeze_after": 1}}, ("below the number of tasks, 1",)),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused_and_nothing_is_written(
    root: Path, tmp_path: Path, more: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as refused:
        list(execute([Run(settings(root, **more), 0)], RunOptions(runs=tmp_path / "runs", data_root=root)))
    assert all(word in str(refused.value) for word in words) and "\n" not in str(refused.value)
    assert not (tmp_path / "runs").exists()
