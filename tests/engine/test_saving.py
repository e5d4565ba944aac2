"""Checkpoints in the background: what is written is the state when it was saved, and the newest of those that wait."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from contnorm.engine.checkpoint import Checkpoints
from contnorm.engine.saving import Saver
from contnorm.errors import UserError


class Slow(Checkpoints):
    """Writes only when it is let, and notes what it wrote."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_write, self.begun, self.wrote = threading.Event(), threading.Event(), list[int]()

    def save(self, tensors: dict[str, Tensor], progress: dict[str, Any]) -> None:
        self.begun.set()
        assert self.may_write.wait(30)
        super().save(tensors, progress)
        self.wrote.append(progress["done"])


def test_the_state_written_is_the_one_saved_not_a_later_one(tmp_path: Path) -> None:
    place, weight, counted = Slow(tmp_path), torch.ones(3), {"done": 1, "tally": [1]}
    with Saver() as saver:
        saver.save(place, {"weight": weight}, counted)
        weight.add_(1)
        counted["tally"].append(2)  # type: ignore[union-attr]
        place.may_write.set()
        saver.flush()
    latest = place.latest()
    assert latest is not None and torch.equal(latest.tensors["weight"], torch.ones(3))
    assert latest.progress == {"done": 1, "tally": [1]} and place.latest_step() == 1


def test_of_those_that_wait_the_newest_is_written(tmp_path: Path) -> None:
    place = Slow(tmp_path)
    with Saver() as saver:
        for done in range(1, 6):
            saver.save(place, {}, {"done": done})
            assert place.begun.wait(30)
        place.may_write.set()
        saver.flush()
    assert place.wrote == [1, 5]


def test_a_run_that_is_over_is_not_written_any_more(tmp_path: Path) -> None:
    place = Slow(tmp_path)
    with Saver() as saver:
        saver.save(place, {}, {"done": 1})
        assert place.begun.wait(30)
        saver.save(place, {}, {"done": 2})
        place.may_write.set()
        saver.forget(place)
    assert 2 not in place.wrote or place.wrote == [1, 2]  # it may have been at it already; but nothing comes after
    place.clear()
    assert not tmp_path.exists()


def test_what_could_not_be_written_is_told_when_the_next_is_saved(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    place = Checkpoints(tmp_path / "file")
    with Saver() as saver:
        saver.save(place, {}, {"done": 1})
        with pytest.raises(UserError, match="a checkpoint can't be written"):
            saver.flush()
