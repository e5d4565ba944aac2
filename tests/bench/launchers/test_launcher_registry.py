"""Launchers of other packages, by the entry points that these install."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from contnorm.bench.launchers.registry import create_launcher, launchers

from contnorm import bench

MODULE = """
from contnorm import bench

class Inline(bench.Launcher):
    remote = False
    executed = 0

    def __init__(self, only=None):
        self.only = only

    def launch(self, work, units, stop):
        for unit in units[: self.only]:
            Inline.executed += len(unit.jobs)
            yield from work(unit, stop)

class Outer:
    class Inner(Inline):
        def __init__(self, **options):
            super().__init__(**options)

class NoLauncher:
    pass
"""
ENTRY_POINTS = """[contnorm.launchers]
inline = some_launchers:Inline
nested = some_launchers:Outer.Inner [extra]
wrong = some_launchers:NoLauncher
local = some_launchers:Inline
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    info = tmp_path / "site" / "some_launchers-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-launchers\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "site" / "some_launchers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield
    sys.modules.pop("some_launchers", None)


@pytest.fixture
def stream() -> bench.Stream:
    y = np.repeat(np.arange(4), 20)
    x = np.random.default_rng(0).normal(size=(len(y), 12)) + y[:, None]
    return bench.Stream.from_arrays(x, y, x[::4], y[::4], tasks=2)


def test_launcher_of_another_package_executes_runs(stream: bench.Stream, tmp_path: Path) -> None:
    assert str(launchers()["inline"].origin) == "some-launchers 1.2" and str(launchers()["local"].origin) == "contnorm"
    result = bench.run(stream, norm="bn", seeds=2, runs=tmp_path / "runs", launcher="inline")
    assert sys.modules["some_launchers"].Inline.executed == 2
    np.testing.assert_array_equal(result.accuracy, bench.run(stream, norm="bn", seeds=2, lanes=1).accuracy)


def test_class_inside_a_class_with_any_options() -> None:
    assert create_launcher("nested", {"only": 1}).only == 1


@pytest.mark.parametrize("runs", [True, False])
def test_launcher_that_leaves_out_runs_is_an_error(stream: bench.Stream, tmp_path: Path, runs: bool) -> None:
    launcher, folder = create_launcher("inline", {"only": 1}), tmp_path / "runs" if runs else None
    with pytest.raises(bench.UserError, match=r"launcher Inline: returned without the end of 1 of 2 runs"):
        bench.run(stream, norm="bn", seeds=2, runs=folder, launcher=launcher)


def test_object_or_class_that_is_no_launcher(stream: bench.Stream, tmp_path: Path) -> None:
    for launcher, kind in (
        ("wrong", "of class NoLauncher"),
        (5, "of class int"),
        (bench.Launcher, "the class Launcher"),
    ):
        with pytest.raises(bench.UserError, match=rf"launcher is {kind}: .*subclass of bench.Launcher"):
            bench.run(stream, norm="bn", runs=tmp_path / "runs", launcher=launcher)  # type: ignore[arg-type]
    assert not (tmp_path / "runs").exists()
