"""Examples of commands: each command has two, its help ends with them, and they work."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from contnorm.bench.config.schema import merge_settings
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.streams.tasks import STREAMS
from contnorm.cli.examples import examples_of
from contnorm.cli.main import COMMANDS, load_command
from tests.cli.conftest import Called

Contnorm = Callable[..., Called]
# Examples that are not executed here, with what they need.
NOT_EXECUTED = {
    "contnorm paper table2 --only norm=cn --device cuda": "data",
}
# Files that examples write.
WRITTEN = {
    "contnorm archive runs --out records.jsonl.gz": "records.jsonl.gz",
    "contnorm export runs --to csv --out runs.csv": "runs.csv",
    "contnorm diagnose norm=bn --beside norm=cn --out diagnosis.svg": "diagnosis.svg",
    "contnorm report": "report.html",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_two_examples(command: str, contnorm: Contnorm) -> None:
    code, out, _ = contnorm(command, "--help")
    shown = [line.strip() for line in out[out.rindex(" Examples:") :].strip().splitlines()[1:]]
    assert code == 0
    items = examples_of(command)
    assert len(items) >= 2 and shown[1::2] == [item.command for item in items]
    for comment, item in zip(shown[::2], items, strict=True):
        assert comment.startswith(f"# {item.purpose}") and item.purpose.endswith(".")
        assert item.command.split()[:2] == ["contnorm", command]


def test_examples_that_need_more_are_known() -> None:
    for command in COMMANDS:
        load_command(command)
    items = [item for command in COMMANDS for item in examples_of(command)]
    assert {item.command: item.needs for item in items if item.needs} == NOT_EXECUTED
    assert all(sum(not item.needs for item in examples_of(command)) for command in COMMANDS)


@contextmanager
def interrupted() -> Iterator[None]:
    """Interrupt the process in the third step."""
    steps = 0
    original = Trainer.step

    def step(trainer: Trainer) -> Tensor:
        nonlocal steps
        steps += 1
        if steps == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        yield


@pytest.mark.slow
def test_examples_work_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contnorm: Contnorm) -> None:
    """Execute all examples in one folder, with small tasks, one run at a time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CONTNORM_DATA", raising=False)
    spec = STREAMS["permuted-mnist"]
    small = {"stream": {"tasks": 2, "train_per_task": 30, "test_per_task": 20}}
    monkeypatch.setitem(STREAMS, spec.name, replace(spec, defaults=merge_settings(spec.defaults, small)))
    for command in COMMANDS:
        load_command(command)
        if command == "resume":
            with interrupted():
                assert contnorm("run", "--norm", "gn")[0] == 130
            with interrupted():
                assert contnorm("run", "--norm", "gn", "--runs", "sweep-runs")[0] == 130
        for item in examples_of(command):
            if item.command in NOT_EXECUTED:
                continue
            code, out, err = contnorm(*shlex.split(item.command)[1:])
            assert code == 0 and out.strip(), f"{item.command}: {err}"
            if item.command in WRITTEN:
                assert (tmp_path / WRITTEN[item.command]).stat().st_size > 0
