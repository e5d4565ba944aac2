"""The measuring itself: rows say what was measured, and files hold what was printed."""

from __future__ import annotations

import csv
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from contnorm.bench.data.registry import load_source
from contnorm.benchmarks import layers, step
from contnorm.benchmarks import runs as whole_runs
from contnorm.benchmarks.table import flat
from contnorm.benchmarks.timing import Spread, timed
from contnorm.cli import speed as benching
from contnorm.errors import UserError

CPU = torch.device("cpu")


def test_a_longer_piece_of_work_takes_longer() -> None:
    short, long = (timed(lambda s=s: time.sleep(s), CPU, replays=5) for s in (0.001, 0.02))
    assert 0.001 <= short.p20 <= short.p50 <= short.p80 and long.p20 >= 0.02 > short.p50


def test_layers_are_compared_on_the_same_input_with_batch_norm_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "timed", lambda work, device: (work(), Spread(1.0, 2.0, 3.0))[1])
    case = layers.Case((4, 64, 3, 3), "fp32", "nhwc", "train")
    rows = list(layers._rows(case, CPU, bandwidth=1e9))
    assert {row.layer for row in rows} == {"bn", "cn_stock", "cn", "cn_analytic"}
    assert all(row.over_bn == 1.0 for row in rows)
    # 8 passes over 4 * 64 * 9 values of 4 bytes, at 1e9 bytes a second, over the 2 seconds it took.
    assert rows[0].share_of_floor == pytest.approx(8 * 4 * 64 * 9 * 4 / 1e9 / 2)


def test_every_layer_of_a_case_computes_what_its_name_says() -> None:
    """Ours equals the two stock calls, and neither is batch norm: the ratio is of the right things."""
    works = layers._works(layers.Case((4, 64, 3, 3), "fp32", "nchw", "eval"), CPU)
    out = {name: work() for name, work in works.items()}
    torch.testing.assert_close(out["cn"], out["cn_stock"], rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]
    assert not torch.allclose(out["cn"], out["bn"])  # type: ignore[arg-type]


def test_a_step_is_timed_after_replay_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    learn = step.Trainer.learn

    def listening(lane: step.Trainer, row):  # type: ignore[no-untyped-def]
        seen.append(row.sizes)
        return learn(lane, row)

    monkeypatch.setattr(step.Trainer, "learn", listening)
    monkeypatch.setattr(step, "BLOCKS", {"cpu": (2, 1)})
    monkeypatch.setattr(step, "settings", _narrow(step.settings))
    (row,) = step.step_rows(CPU, [step.StepCase("cn", "pool", "fp32", 1)])
    assert seen[-2:] == [(10, 10), (10, 10)] and seen[0] == (10, 0)
    assert flat(row)["norm"] == "cn" and flat(row)["p50_us"] > 0


def _narrow(settings):  # type: ignore[no-untyped-def]
    """The same settings with a network that a test has time for."""

    def changed(case: step.StepCase, per_task: int = 500):  # type: ignore[no-untyped-def]
        config = settings(case, per_task)
        return replace(config, model=replace(config.model, width=32))

    return changed


def test_noise_is_read_as_the_data_set_it_stands_for(tmp_path: Path) -> None:
    root = whole_runs._noise("cifar10", tmp_path)
    source = load_source("cifar10", root)
    assert source.train_images.shape == (50_000, 3, 32, 32) and source.test_labels.max() == 9
    assert 100 < source.train_images[:100].mean() < 155


def test_rows_are_printed_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = step.StepRow(step.StepCase("cn", "pool", "tf32", 8), Spread(1e-3, 2e-3, 3e-3))
    monkeypatch.setattr(benching, "_rows", lambda *_: iter([row, row]))
    console = Console(record=True, width=200)
    benching.bench("step", "cpu", None, tmp_path, None, console)
    assert console.export_text().count("2000.0") == 2
    kept = list(csv.DictReader((tmp_path / "step.csv").read_text().splitlines()))
    assert len(kept) == 2 and kept[0]["p50_us"] == "2000.0" and kept[0]["torch"] == torch.__version__


def test_an_unknown_benchmark_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown benchmark 'layer'\. Did you mean 'layers'"):
        benching.bench("layer", "cpu", None, tmp_path, None, Console())


def test_whole_runs_are_chosen_by_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[whole_runs.RunCase] = []

    def timed(case: whole_runs.RunCase, *_: object) -> float:
        ran.append(case)
        return 1.0

    monkeypatch.setattr(whole_runs, "_timed", timed)
    monkeypatch.setattr(whole_runs, "_noise", lambda *_: tmp_path)
    benching.bench("run", "cpu", tmp_path, tmp_path, None, Console(quiet=True), ["er", "cn"])
    assert {(case.strategy, case.norm) for case in ran} == {("er", "cn")}
    with pytest.raises(UserError, match=r"--only cn gn: no run has all of these\. There are split-cifar100 er bn, "):
        benching.bench("run", "cpu", tmp_path, tmp_path, None, Console(quiet=True), ["cn", "gn"])
    with pytest.raises(UserError, match="only whole runs are chosen from"):
        benching.bench("layers", "cpu", tmp_path, tmp_path, None, Console(quiet=True), ["cn"])
