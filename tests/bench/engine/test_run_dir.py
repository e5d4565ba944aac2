"""Runs that were stopped: each goes on where it lies, as it was begun, in one process at a time; or is told why not."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.engine.events import Failed, Finished, Stopped
from contnorm.bench.engine.lock import RunLock
from contnorm.bench.engine.run_dir import RunDir, stopped_runs
from contnorm.bench.engine.scheduler import Job, RunEnvironment, Waiting, execute, resolve
from contnorm.bench.records import Store
from contnorm.errors import UserError
from tests.datasets import small_mnist

CPU = torch.device("cpu")
OWN = "from contnorm.bench.strategies.base import Single\nclass Mine(Single):\n    factor = 1\n"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_mnist(tmp_path_factory.mktemp("data"), train=400, test=100)


def settings(root: Path, **groups: dict[str, Any]) -> RunConfig:
    values = {"stream": {"name": "permuted-mnist", "train_per_task": 60, "tasks": 2}, "norm": {"name": "bn"}, **groups}
    return resolve(values, root)


def stop_one(config: RunConfig, place: RunEnvironment, *seeds: int) -> RunDir:
    """Begin a run and stop it at its first report; others of its seeds wait for their turn."""
    events = list(execute([Job(config, seed) for seed in seeds or (0,)], place, stop=lambda: True))
    assert isinstance(events[-1].what, Stopped)
    return RunDir.of(events[-1].job, Store(place.runs))


def last(config: RunConfig, place: RunEnvironment) -> object:
    return list(execute([Job(config, 0)], place))[-1].what


@pytest.mark.parametrize("kind", ["strategy", "model"])
def test_edited_code_is_not_resumed(root: Path, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN + "def Net(shape, outputs, norm):\n    from torch import nn\n")
    with file.open("a") as more:
        more.write("    return nn.Sequential(norm(1), nn.Flatten(), nn.Linear(784, outputs))\n")
    config = settings(root, **{kind: {"name": f"{file}:{'Mine' if kind == 'strategy' else 'Net'}"}})
    place = RunEnvironment(tmp_path / "runs", root, CPU)
    left = stop_one(config, place)
    before = file.read_text()
    file.write_text(before + "# edited\n")
    found = stopped_runs(place.runs)
    assert not found.runs
    (said,) = found.problems
    assert f"{left.folder}: " in said and "repeat the command that started it" in said
    what = last(config, place)  # by whoever asks for it with the old settings
    assert isinstance(what, Failed) and "has changed since" in what.why
    file.write_text(before)
    assert isinstance(last(config, place), Finished)


@pytest.mark.slow
def test_note_has_device_and_threads(root: Path, tmp_path: Path) -> None:
    config, place = settings(root), RunEnvironment(tmp_path, root, CPU, threads=2)
    left = stop_one(config, place)
    steps = left.checkpoints.latest_step()
    (found,) = stopped_runs(tmp_path).runs
    assert (found.device, found.threads, found.runs.resolve()) == ("cpu", 2, tmp_path.resolve())
    other = last(config, RunEnvironment(tmp_path, root, CPU, threads=1))
    assert isinstance(other, Failed)
    assert f"{left.folder}: started with --device cpu --threads 2 and has " in other.why
    assert left.checkpoints.latest_step() == steps > 0, "what is refused is left as it is"
    note = json.loads(left.note.read_text())
    left.note.write_text(json.dumps({**note, "device": "cuda"}))
    assert "--device cuda --threads 2" in getattr(last(config, place), "why", "")
    left.note.write_text(json.dumps({k: v for k, v in note.items() if k not in ("device", "threads")}))
    assert stopped_runs(tmp_path).runs[0].threads == 1, "as it was before notes said so"
    assert isinstance(last(config, place), Finished)


def test_run_resumes_with_the_same_instruction_set_only(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums on a CPU with AVX512 have other bits than with AVX2: half a run of each would be a run of neither."""
    config, place = settings(root), RunEnvironment(tmp_path, root, CPU)
    monkeypatch.setattr("contnorm.bench.engine.run_dir.cpu_instructions", lambda: "SOMETHING ELSE")
    stop_one(config, place)
    monkeypatch.undo()
    what = last(config, place)
    assert isinstance(what, Failed) and "SOMETHING ELSE" in what.why
    monkeypatch.setattr("contnorm.bench.engine.run_dir.cpu_instructions", lambda: "SOMETHING ELSE")
    assert isinstance(last(config, place), Finished)


@pytest.mark.parametrize(
    ("was", "now", "advice"),
    [("cpp", "torch", "can be compiled"), ("torch", "cpp", "CXX=none"), ("pivoted", "cpp", "CONTNORM_KERNEL=pivoted")],
)
def test_run_of_cn_resumes_with_the_same_kernel_only(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was: str, now: str, advice: str
) -> None:
    """The C++ kernel and torch operators differ in the last bits."""

    def use(kernel: str) -> None:
        reason = None if kernel == "cpp" else "no compiler"
        monkeypatch.setattr("contnorm.bench.engine.precision.unavailable_reason", lambda: reason)
        monkeypatch.setenv("CONTNORM_KERNEL", kernel if kernel == "pivoted" else "")

    config, place = settings(root, norm={"name": "cn"}), RunEnvironment(tmp_path, root, CPU)
    use(was)
    left = stop_one(config, place)
    use(now)
    what = last(config, place)
    assert isinstance(what, Failed) and all(word in what.why for word in (repr(was), repr(now), advice))
    note = json.loads(left.note.read_text())
    assert note.pop("cn_kernel") == was
    left.note.write_text(json.dumps(note))  # as versions without the kernel wrote it
    assert isinstance(last(config, place), Failed if now == "cpp" else Finished)
    if now == "cpp":
        left.note.write_text(json.dumps({**note, "cn_kernel": was}))
        use(was)
        done = last(config, place)
        assert isinstance(done, Finished) and done.results["device"]["cn_kernel"] == was


def test_kernel_of_cn_does_not_matter_to_other_norms(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, place = settings(root), RunEnvironment(tmp_path, root, CPU)
    left = stop_one(config, place)
    assert "cn_kernel" not in json.loads(left.note.read_text())
    monkeypatch.setattr("contnorm.bench.engine.precision.unavailable_reason", lambda: "no compiler")
    assert isinstance(last(config, place), Finished)


def test_run_without_steps_may_start_with_other_options(root: Path, tmp_path: Path) -> None:
    config = settings(root)
    stop_one(config, RunEnvironment(tmp_path, root, CPU, threads=2), 0, 1)
    list(execute([Job(config, 1)], RunEnvironment(tmp_path, root, CPU), stop=lambda: True))
    assert {run.job.seed: run.threads for run in stopped_runs(tmp_path).runs} == {0: 2, 1: 1}


def test_stopped_runs_are_found_in_subfolders(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(root)
    for name in ("a", "b"):
        left = stop_one(config, RunEnvironment(tmp_path / name, root, CPU))
    assert [run.runs.name for run in stopped_runs(tmp_path).runs] == ["a", "b"]
    for inside in (tmp_path / "b", left.folder.parent, left.folder):
        for start, given in ((Path.cwd(), inside), (inside, Path()), (inside.parent, Path(inside.name))):
            monkeypatch.chdir(start)
            (run,) = stopped_runs(given).runs
            assert run.runs.resolve() == (tmp_path / "b").resolve()


def break_note(text: str) -> Callable[[RunDir], None]:
    return lambda left: left.note.write_text(text) and None


def edit_note(**changes: object) -> Callable[[RunDir], None]:
    return lambda left: left.note.write_text(json.dumps(json.loads(left.note.read_text()) | changes)) and None


def edit_weights(path: str) -> Callable[[RunDir], None]:
    """Name weights in a note, in the place of the run that has them."""

    def edit(left: RunDir) -> None:
        raw = json.loads(left.note.read_text())
        raw["config"]["model"] |= {"weights": path, "weights_hash": "01234567"}
        left.note.write_text(json.dumps(raw))
        left.folder.parent.rename(left.folder.parent.with_name(from_dict(raw["config"]).hash))

    return edit


def link_folder(left: RunDir) -> None:
    left.folder.rename(left.folder.parent.parent / "elsewhere")
    left.folder.symlink_to(left.folder.parent.parent / "elsewhere")


def move_away(left: RunDir) -> None:
    left.folder.rename(left.folder.with_name("7.unfinished"))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (break_note("{"), "run.json: is not a valid note of a stopped run"),
        (break_note("{}"), "run.json: is not a valid note of a stopped run"),
        (break_note("[]"), "run.json: is not a valid note of a stopped run"),
        (break_note('{"schema": 1, "config": 3, "seed": 0}'), "run.json: is not a valid note of a stopped run"),
        (break_note('{"schema": 1, "config": {"nosuch": 3}, "seed": 0}'), "unknown key 'nosuch'"),
        (break_note('{"schema": 99, "config": {}, "seed": 0}'), "was written by a newer contnorm"),
        (lambda left: left.note.unlink(), "has checkpoints but no run.json"),
        (edit_note(threads=10**9), "threads=1000000000 must be"),
        (edit_note(threads=10**30), "threads=<a number of 100 bits> must be"),
        (edit_note(threads=-1), "threads=-1 must be"),
        (edit_note(seed=-1), "seed=-1 must be"),
        (edit_note(device="meta"), "device='meta' must be cpu or cuda"),
        (edit_weights("a" * 5000), "File name too long"),
        (edit_weights("~nobody-of-this-name/weights.pth"), "home directory"),
        (link_folder, "is a symbolic link"),
        (move_away, "seed 0, but is in the folder of another run"),
    ],
)
def test_damaged_stopped_run_is_reported_and_others_resume(
    root: Path, tmp_path: Path, harm: Callable[[RunDir], None], said: str
) -> None:
    place = RunEnvironment(tmp_path, root, CPU)
    harm(stop_one(settings(root), place))
    stop_one(settings(root, norm={"name": "gn"}), place)
    found = stopped_runs(tmp_path)
    assert [run.job.config.norm.name for run in found.runs] == ["gn"]
    (problem,) = found.problems
    assert said in problem and str(tmp_path) in problem and "\n" not in problem


def test_symbolic_link_as_checkpoint_folder_is_not_followed(root: Path, tmp_path: Path) -> None:
    place = RunEnvironment(tmp_path / "runs", root, CPU)
    left = stop_one(settings(root), place)
    other = tmp_path / "documents"
    left.checkpoints.folder.rename(other)
    (other / "thesis.txt").write_text("content")
    left.checkpoints.folder.symlink_to(other)
    files = sorted(other.iterdir())
    with pytest.raises(UserError, match="is a symbolic link"):
        last(settings(root), place)
    left.checkpoints.clear()
    assert sorted(other.iterdir()) == files and left.checkpoints.latest_step() == 0


@pytest.mark.parametrize("harm", [break_note("{"), lambda left: left.note.unlink()])
def test_run_resumes_without_a_note(root: Path, tmp_path: Path, harm: Callable[[RunDir], None]) -> None:
    config, place = settings(root), RunEnvironment(tmp_path, root, CPU)
    harm(stop_one(config, place))
    events = list(execute([Job(config, 0)], place))
    assert isinstance(events[-1].what, Finished) and not list(tmp_path.rglob("*.unfinished"))


def test_run_is_executed_by_one_process_at_a_time(root: Path, tmp_path: Path) -> None:
    config, place = settings(root), RunEnvironment(tmp_path, root, CPU)
    first = execute([Job(config, 0), Job(config, 1)], place)
    next(first)
    events: dict[int, object] = {}
    for event in execute([Job(config, 0), Job(config, 1)], place, stop=lambda: 0 in events):
        events[event.job.seed] = event.what
    assert isinstance(events[1], Finished), "a run that nobody holds is run"
    assert events[0] == Waiting(f"process {os.getpid()} on {socket.gethostname()}")
    rest = {event.job.seed: event.what for event in first}
    assert isinstance(rest[0], Finished), "who has it is not disturbed"
    assert rest[1] == "recorded", "what another has recorded meanwhile is not run again"
    assert len(list(Store(tmp_path))) == 2 and not list(tmp_path.rglob("*.unfinished"))


def test_threads_on_one_folder_execute_each_run_once(root: Path, tmp_path: Path) -> None:
    config, place = settings(root), RunEnvironment(tmp_path, root, CPU)
    ended: list[tuple[int, object]] = []

    def work() -> None:
        for event in execute([Job(config, seed) for seed in range(3)], place):
            if isinstance(event.what, Finished | Failed | str):
                ended.append((event.job.seed, event.what))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seed for seed, what in ended if isinstance(what, Finished)) == [0, 1, 2]
    assert len(ended) == 12 and sum(what == "recorded" for _, what in ended) == 9
    assert not list(tmp_path.rglob("*.unfinished"))


def command(root: Path, runs: Path, *more: str, tasks: int = 3) -> list[str]:
    typed = [sys.executable, "-m", "contnorm", "run", "--data-root", str(root), "--runs", str(runs), "--norm", "bn"]
    return [*typed, "--set", f"stream.tasks={tasks}", *more]


@pytest.mark.slow
def test_processes_on_one_folder_execute_each_run_once(root: Path, tmp_path: Path) -> None:
    typed = command(root, tmp_path, "--seeds", "3", "--lanes", "1", "--set", "stream.train_per_task=60")
    processes = [subprocess.Popen(typed, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [process.communicate(timeout=250) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert sum(out.count("recorded in") for out, _ in outputs) == 3 and all(err == "" for _, err in outputs)
    assert len(list(Store(tmp_path))) == 3 and not list(tmp_path.rglob("*.unfinished"))


@pytest.mark.slow
def test_run_of_a_dead_process_is_taken_over(root: Path, tmp_path: Path) -> None:
    typed = command(root, tmp_path, "--set", "stream.train_per_task=400", tasks=400)
    with subprocess.Popen(typed, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 100
        while not list(tmp_path.rglob("checkpoints/*.json")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGSTOP)  # it holds the lock and does nothing
        (left,) = stopped_runs(tmp_path).runs
        events: list[object] = []
        for event in execute([left.job], RunEnvironment(tmp_path, root, CPU), stop=lambda: len(events) > 1):
            if not events:
                assert event.what == Waiting(f"process {process.pid} on {socket.gethostname()}")
                process.kill()
            events.append(event.what)
    assert isinstance(events[-1], Stopped) and events[-1].done > 40, "it goes on where the other was"


def test_lock_of_a_dead_process_is_free(root: Path, tmp_path: Path) -> None:
    config, place = settings(root), RunEnvironment(tmp_path, root, CPU)
    left = stop_one(config, place)
    assert not left.lock.path.exists()
    left.lock.path.write_text("12345")
    left.lock.note.write_text('{"host": "elsewhere", "pid": 12345}')
    assert isinstance(last(config, place), Finished)


def test_late_release_does_not_affect_the_next_lock(tmp_path: Path) -> None:
    first, second, third = (RunLock(tmp_path / "lock") for _ in range(3))
    assert first.acquire()
    (tmp_path / "lock").unlink()
    assert second.acquire()
    first.release()
    assert not third.acquire()
    second.release()
    assert not (tmp_path / "lock").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_locks_work_without_flock(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*given: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    first, second = RunLock(tmp_path / "claims" / "lock"), RunLock(tmp_path / "claims" / "lock")
    assert first.acquire() and not second.acquire() and not second.is_free()
    first.release()
    assert list((tmp_path / "claims").iterdir()) == [] and second.is_free() and second.acquire()
    second.release()
    config, place = settings(root), RunEnvironment(tmp_path / "runs", root, CPU)
    deadline = time.monotonic() + 30
    events = list(execute([Job(config, 0)], place, stop=lambda: time.monotonic() > deadline))
    assert isinstance(events[-1].what, Finished)
    assert [path.name for path in (tmp_path / "runs").rglob("*") if path.is_file()] == ["0.json"]


def test_diverged_runs_leave_only_their_records(root: Path, tmp_path: Path) -> None:
    config = settings(root, train={"lr": 1e30}, norm={"name": "none"})
    events = list(execute([Job(config, seed) for seed in range(3)], RunEnvironment(tmp_path / "runs", root, CPU)))
    assert sum(isinstance(event.what, Failed) for event in events) == 3
    assert sorted(path.name for path in (tmp_path / "runs" / config.hash).iterdir()) == ["0.json", "1.json", "2.json"]
    assert len(Store(tmp_path / "runs").diverged_seeds(config)) == 3


@pytest.mark.parametrize("place", ["file", "/proc/contnorm"])
def test_unusable_runs_folder_is_a_one_line_error(root: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"no run can be saved there \(.+\)\. Use .*--runs"):
        last(settings(root), RunEnvironment(tmp_path / place, root, CPU))


def test_failed_record_write_loses_nothing(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, place = settings(root), RunEnvironment(tmp_path, root, CPU)

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Store, "save", full)
    with pytest.raises(UserError, match=r"0\.json: the record can't be written \(No space left .* then resume"):
        last(config, place)
    monkeypatch.undo()
    (left,) = stopped_runs(tmp_path).runs
    assert RunDir.of(left.job, Store(tmp_path)).checkpoints.latest_step() > 0
    assert isinstance(last(config, place), Finished)


BREAKS = """
from contnorm.bench.strategies.base import Single
class Mine(Single):
    def loss(self, model, head, stream):
        with open(__file__ + ".steps", "a") as steps:  # not in Python, where a checkpoint could not hold it
            if steps.write(".") and steps.tell() > {at}:
                {how}
        return super().loss(model, head, stream)
"""


@pytest.mark.parametrize(
    ("how", "said"), [("raise ValueError('broken')", "ValueError: broken"), ("raise SystemExit(0)", "SystemExit: 0")]
)
@pytest.mark.parametrize(("at", "rest"), [(3, "none are saved"), (8, "6 steps are saved in ")])
def test_error_in_user_code_is_one_line(root: Path, tmp_path: Path, how: str, said: str, at: int, rest: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(BREAKS.format(at=at, how=how))
    config = settings(root, strategy={"name": f"{file}:Mine"})
    place = RunEnvironment(tmp_path / "runs", root, CPU)
    with pytest.raises(UserError) as told:
        list(execute([Job(config, 0), Job(config, 1)], place))
    assert f"after {at} of 12 steps: {file}, line 7: {said} ({rest}" in str(told.value)
    assert len(stopped_runs(place.runs).problems) == (0 if at == 3 else 1)


def test_internal_error_keeps_its_traceback_and_names_saved_steps(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("contnorm.bench.engine.loop._evaluate", broken)
    with pytest.raises(RuntimeError, match="a bug") as told:
        last(settings(root), RunEnvironment(tmp_path, root, CPU))
    assert told.value.__notes__ == ["seed 0, after 6 of 12 steps; none are saved."]
    assert not list(tmp_path.iterdir())


def with_fingerprint(left: RunDir, fingerprint: str) -> None:
    note = json.loads(left.note.read_text())
    left.note.write_text(json.dumps(note | {"data": fingerprint}))


def test_fingerprints_of_different_versions_allow_resuming(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, place = settings(root), RunEnvironment(tmp_path, root, CPU)
    left = stop_one(config, place)
    assert json.loads(left.note.read_text())["data"].startswith("2:")
    with_fingerprint(left, "2:0123456789abcdef")
    what = last(config, place)
    assert isinstance(what, Failed) and "on other data" in what.why
    with_fingerprint(left, "0123456789abcdef")
    assert isinstance(last(config, place), Finished)
    assert "cannot be compared" in caplog.text and "other data than" not in caplog.text
