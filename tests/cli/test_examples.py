"""Examples of commands, which end the help of each, work."""

import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from contnorm.bench.config.schema import merge_settings
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.streams.tasks import STREAMS
from contnorm.cli.main import COMMANDS, examples_of, load_command
from tests.cli.conftest import Contnorm

NOT_EXECUTED = ("contnorm paper table2 --only norm=cn --device cuda",)  # needs data
# Files that examples write.
WRITTEN = {
    "contnorm show --to records.jsonl.gz": "records.jsonl.gz",
    "contnorm show --to runs.csv": "runs.csv",
    "contnorm diagnose norm=bn --beside norm=cn --out diagnosis.svg": "diagnosis.svg",
    "contnorm report": "report.html",
}


def commands_in(name: str) -> list[str]:
    return examples_of(load_command(name))[1::2]


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
        for typed in commands_in(command):
            if typed in NOT_EXECUTED:
                continue
            code, out, err = contnorm(*shlex.split(typed)[1:])
            assert code == 0 and out.strip(), f"{typed}: {err}"
            if typed in WRITTEN:
                assert (tmp_path / WRITTEN[typed]).stat().st_size > 0
