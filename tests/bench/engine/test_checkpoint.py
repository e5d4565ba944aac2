"""The folder of an unfinished run: its checkpoint, its lock, and what is left of it."""

import json
from pathlib import Path

import pytest
import torch

from contnorm.bench.config.resolve import resolve
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine import checkpoint
from contnorm.bench.engine.checkpoint import CheckpointWriter, RunFolder, load_checkpoint
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.bench.unfinished import is_locked, read_progress, unfinished_runs

TENSORS = {
    "half": torch.randn(3, 4).half(),
    "transposed": torch.randn(4, 3).T,
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "count": torch.tensor(7),
    "none": torch.zeros(0, 5),
    "mask": torch.tensor([True, False]),
}


def saved(path: Path, done: int = 4) -> Path:
    with CheckpointWriter() as writer:
        writer.save(path, TENSORS, {"done": done, "measured": {"rows": {}}})
    return path


def test_checkpoint_has_the_tensors_and_the_progress(tmp_path: Path) -> None:
    path = saved(tmp_path / "run" / "checkpoint.safetensors")
    found = load_checkpoint(path)
    assert found is not None and found[1] == read_progress(path) == {"done": 4, "measured": {"rows": {}}}
    assert all(torch.equal(found[0][name], tensor) for name, tensor in TENSORS.items())


def test_writer_keeps_the_values_of_the_call_and_the_newest_file(tmp_path: Path) -> None:
    tensor = torch.zeros(1000)
    with CheckpointWriter() as writer:
        for step in range(5):
            tensor.fill_(step)
            writer.save(tmp_path / "a", {"x": tensor}, {"done": step})
            tensor.fill_(-1)
    found = load_checkpoint(tmp_path / "a")
    assert found is not None and found[1]["done"] == 4 and bool((found[0]["x"] == 4).all())
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_torn_checkpoint_is_not_used(tmp_path: Path, keep: int, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path / "a")
    path.write_bytes(path.read_bytes()[:keep])
    assert load_checkpoint(path) is None and "starts again from step 0" in caplog.text


def test_lock_and_what_stays_of_a_run(tmp_path: Path) -> None:
    run = Run(resolve({"stream": {"name": "split-mnist", "source": "digits"}}, Path("data")), 3)
    options = RunOptions(runs=tmp_path)
    record = options.store.path(run.config, run.seed)
    first, second = RunFolder(record), RunFolder(record)
    assert first.acquire() and not second.acquire() and is_locked(first.folder)
    assert first.start(run, options, load_source("digits", Path("data"))) == ""
    assert "process" in second.holder()
    saved(first.checkpoint)
    (found,) = unfinished_runs(tmp_path)
    assert (found.config, found.seed, found.step, found.status) == (run.config, 3, 4, "running")
    first.release()
    assert unfinished_runs(tmp_path)[0].status == "stopped" and second.acquire()
    record.write_text("{}")
    second.release()
    assert [path.name for path in record.parent.iterdir()] == ["3.json"] and not unfinished_runs(tmp_path)
    third = RunFolder(options.store.path(run.config, 4))
    assert third.acquire()
    third.release()
    assert not third.folder.exists(), "nothing stays of a run without a checkpoint"


def test_run_resumes_only_where_it_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(resolve({"stream": {"name": "split-mnist", "source": "digits"}, "norm": {"name": "cn"}}, Path("data")), 0)
    source, options = load_source("digits", Path("data")), RunOptions(runs=tmp_path)
    folder = RunFolder(options.store.path(run.config, 0))
    folder.start(run, options, source)
    for name in ("instructions", "cn_kernel"):
        with monkeypatch.context() as patched:
            patched.setattr(checkpoint, "cpu_circumstances", lambda _, name=name: {name: "other"})
            assert folder.start(run, options, source) == "", "there is nothing to resume"
        folder.start(run, options, source)
        saved(folder.checkpoint)
        with monkeypatch.context() as patched:
            patched.setattr(checkpoint, "cpu_circumstances", lambda _, name=name: {name: "other"})
            assert "here other" in folder.start(run, options, source)
        folder.checkpoint.unlink()
    saved(folder.checkpoint)
    assert "threads 1, here 2" in folder.start(run, RunOptions(runs=tmp_path, threads=2), source)
    assert json.loads(folder.note.read_bytes())["circumstances"]["threads"] == 1, "what is refused is left as it is"
