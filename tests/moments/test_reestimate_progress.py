"""The progress of `reestimate`: batches of all passes, with rich and without."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import contnorm as cn

MODEL = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2), nn.BatchNorm1d(2))


class Stream:
    """Batches without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(20, 2, generator=torch.Generator().manual_seed(0)).split(5))


BATCHES = [pytest.param(list(Stream()), id="list"), pytest.param(Stream(), id="stream")]


@pytest.mark.parametrize("batches", BATCHES)
def test_bar_counts_the_batches_of_all_passes(batches: Any) -> None:
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=100)
    with cn.reestimate(MODEL, batches, progress=console):
        assert re.search(r"Re-estimating moments .* 12/12 batches", console.file.getvalue())


def test_default_bar_is_on_stderr_and_off(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    with cn.reestimate(MODEL, Stream()):
        pass
    assert capsys.readouterr() == ("", "")
    with cn.reestimate(MODEL, Stream(), progress=True):
        out, err = capsys.readouterr()
    assert out == "" and "12/12" in err


@pytest.mark.parametrize("batches", BATCHES)
def test_lines_are_printed_without_rich(
    batches: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "rich", None)
    with cn.reestimate(MODEL, batches, progress=True):
        lines = capsys.readouterr().err.splitlines()
    assert lines == [f"Re-estimating moments: pass {number} of 3, 4 batches" for number in (1, 2, 3)]


def test_wrong_progress_raises() -> None:
    with pytest.raises(TypeError, match=r"progress is a str. Give True, False, or a rich.console.Console"):
        cn.reestimate(MODEL, Stream(), progress="yes")  # type: ignore[arg-type]
