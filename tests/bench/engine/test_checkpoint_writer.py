"""Checkpoints in the background: what is written is the state when it was saved, and the newest of those that wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from contnorm.bench.engine.checkpoint import Checkpoints, CheckpointWriter, Packed, packed
from contnorm.errors import UserError


class Slow(Checkpoints):
    """Writes only when it is let, and notes what it wrote."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_write, self.begun, self.wrote = threading.Event(), threading.Event(), list[int]()

    def save(self, tensors: Packed, progress: dict[str, Any]) -> None:
        self.begun.set()
        assert self.may_write.wait(30)
        super().save(tensors, progress)
        self.wrote.append(progress["done"])


def test_written_state_is_that_of_the_save(tmp_path: Path) -> None:
    place, weight, counted = Slow(tmp_path), torch.ones(3), {"done": 1, "tally": [1]}
    with CheckpointWriter() as saver:
        saver.save(place, {"weight": weight}, counted)
        weight.add_(1)
        counted["tally"].append(2)  # type: ignore[union-attr]
        place.may_write.set()
        saver.flush()
    latest = place.latest()
    assert latest is not None and torch.equal(latest.tensors["weight"], torch.ones(3))
    assert latest.progress == {"done": 1, "tally": [1]} and place.latest_step() == 1


def test_newest_pending_checkpoint_is_written(tmp_path: Path) -> None:
    place = Slow(tmp_path)
    with CheckpointWriter() as saver:
        for done in range(1, 6):
            saver.save(place, {}, {"done": done})
            assert place.begun.wait(30)
        place.may_write.set()
        saver.flush()
    assert place.wrote == [1, 5]


def test_required_checkpoint_is_always_written(tmp_path: Path) -> None:
    place = Slow(tmp_path)
    with CheckpointWriter() as saver:
        for done in range(1, 6):
            saver.save(place, {}, {"done": done}, required=done in (1, 3))
            assert place.begun.wait(30)
        place.may_write.set()
        saver.flush()
    assert place.wrote == [1, 3, 5]


@pytest.mark.parametrize(("end", "written"), [(CheckpointWriter.finish, [1, 2]), (CheckpointWriter.forget, [1])])
def test_complete_run_waits_for_required_checkpoints_and_failed_run_drops_them(
    tmp_path: Path, end: Callable[[CheckpointWriter, list[Checkpoints]], None], written: list[int]
) -> None:
    place = Slow(tmp_path)
    with CheckpointWriter() as saver:
        saver.save(place, {}, {"done": 1})
        assert place.begun.wait(30)
        saver.save(place, {}, {"done": 2}, required=True)
        saver.save(place, {}, {"done": 3})
        threading.Timer(0.05, place.may_write.set).start()
        end(saver, [place])
        assert place.wrote == written


def test_required_checkpoints_do_not_accumulate(tmp_path: Path) -> None:
    place = Slow(tmp_path)
    with CheckpointWriter() as saver:
        saver.save(place, {}, {"done": 1}, required=True)
        assert place.begun.wait(30)
        saver.save(place, {}, {"done": 2}, required=True)
        threading.Timer(0.05, place.may_write.set).start()
        saver.save(place, {}, {"done": 3}, required=True)
        assert place.wrote[:2] == [1, 2]


def test_ended_run_is_not_written(tmp_path: Path) -> None:
    place = Slow(tmp_path)
    with CheckpointWriter() as saver:
        saver.save(place, {}, {"done": 1})
        assert place.begun.wait(30)
        saver.save(place, {}, {"done": 2})
        place.may_write.set()
        saver.forget([place])
    assert 2 not in place.wrote or place.wrote == [1, 2]  # it may have been at it already; but nothing comes after
    place.clear()
    assert not tmp_path.exists()


def test_write_error_is_raised_at_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    place = Checkpoints(tmp_path / "file")
    with CheckpointWriter() as saver:
        saver.save(place, {}, {"done": 1})
        with pytest.raises(UserError, match="a checkpoint can't be written"):
            saver.flush()


def test_pending_checkpoints_of_ended_runs_are_cancelled_before_waiting(tmp_path: Path) -> None:
    first, second = Slow(tmp_path / "first"), Slow(tmp_path / "second")
    second.may_write.set()
    with CheckpointWriter() as saver:
        saver.save(first, {}, {"done": 1})
        assert first.begun.wait(30)
        saver.save(second, {}, {"done": 1})
        waiting, cancelled = saver._writes[second][-1].done, list[bool]()

        def let_the_first_go_on() -> None:
            cancelled.append(waiting.cancelled())
            first.may_write.set()

        threading.Timer(0.05, let_the_first_go_on).start()
        saver.forget([first, second])
    assert first.wrote == [1] and second.wrote == [] and cancelled == [True]


KINDS = (torch.float64, torch.int64, torch.float32, torch.int32, torch.bfloat16, torch.float16, torch.int16, torch.int8)


def test_packed_tensors_are_a_valid_safetensors_file() -> None:
    chance = torch.Generator().manual_seed(0)
    tensors = {f"{kind}": torch.randint(-9, 9, (3, 5), generator=chance).to(kind) for kind in KINDS}
    tensors |= {"a mask": torch.tensor([True, False, True]), "levels": torch.arange(7, dtype=torch.uint8)}
    tensors |= {"a single": torch.tensor(7), "none": torch.empty(0, 4), "näme": torch.ones(1)}
    tensors["channels last"] = torch.rand(2, 3, 4, 5, generator=chance).to(memory_format=torch.channels_last)
    tensors["a part"] = torch.rand(9, 4, generator=chance)[:-1, 1:3]
    mine, theirs = b"".join(packed(tensors).parts), save({name: t.contiguous() for name, t in tensors.items()})
    found = load(mine)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert len(mine) - _head(mine) == len(theirs) - _head(theirs)
    assert _head(mine) % 8 == 0, "what comes after the head lies as numbers like to lie"


def _head(file: bytes) -> int:
    return 8 + int.from_bytes(file[:8], "little")


def test_packed_tensors_are_copies() -> None:
    weight = torch.ones(3)
    kept = packed({"weight": weight})
    weight.add_(1)
    assert torch.equal(load(b"".join(kept.parts))["weight"], torch.ones(3))
