"""Speed benchmarks: rows have the measured values, and CSV files have what was printed."""

from __future__ import annotations

import csv
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.timing import Percentiles, flatten_row, measure_time

from benchmarks import convolutions, eager, layers, speed, startup, step
from benchmarks import runs as whole_runs
from contnorm.bench.data.registry import load_source
from contnorm.kernels.convolution import ConvolutionTable, Direction, Geometry, Tiles
from tests.datasets import small_cifar100

pytestmark = pytest.mark.slow  # it measures

CPU = torch.device("cpu")


def test_measured_time_is_that_of_the_work() -> None:
    short, long = (measure_time(lambda s=s: time.sleep(s), CPU, replays=5) for s in (0.001, 0.02))
    assert 0.001 <= short.p20 <= short.p50 <= short.p80 and long.p20 >= 0.02 > short.p50


def test_layer_times_are_relative_to_batch_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "measure_time", lambda work, device: (work(), Percentiles(1.0, 2.0, 3.0))[1])
    case = layers.LayerCase((4, 64, 3, 3), "fp32", "nhwc", "train")
    rows = list(layers._rows(case, CPU, bandwidth=1e9))
    assert {row.layer for row in rows} == {"bn", "cn_stock", "cn", "cn_analytic"}
    assert all(row.over_bn == 1.0 for row in rows)
    # 8 passes over 4 * 64 * 9 values of 4 bytes, at 1e9 bytes a second, over the 2 seconds it took.
    assert rows[0].share_of_floor == pytest.approx(8 * 4 * 64 * 9 * 4 / 1e9 / 2)


def test_layer_calls_compute_what_their_names_say() -> None:
    """Ours equals the two stock calls, and neither is batch norm: the ratio is of the right things."""
    works = layers._layer_calls(layers.LayerCase((4, 64, 3, 3), "fp32", "nchw", "eval"), CPU)
    out = {name: work() for name, work in works.items()}
    torch.testing.assert_close(out["cn"], out["cn_stock"], rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]
    assert not torch.allclose(out["cn"], out["bn"])  # type: ignore[arg-type]


@pytest.fixture
def learned_sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes of the passes of each step, of networks that a test has time for."""
    seen: list[tuple[int, ...]] = []
    learn = step.Trainer.learn

    def recorded(lane: step.Trainer, row):  # type: ignore[no-untyped-def]
        seen.append(row.sizes)
        return learn(lane, row)

    monkeypatch.setattr(step.Trainer, "learn", recorded)
    monkeypatch.setattr(step, "step_config", _narrow(step.step_config))
    return seen


def test_steps_are_timed_with_replay(learned_sizes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "BLOCKS", {"cpu": (2, 1)})
    (row,) = step.measure_steps(CPU, [step.StepCase("cn", "pool", "fp32", 1)])
    assert learned_sizes[-2:] == [(10, 10), (10, 10)] and learned_sizes[0] == (10, 0)
    assert flatten_row(row)["norm"] == "cn" and flatten_row(row)["p50_us"] > 0


def _narrow(settings):  # type: ignore[no-untyped-def]
    """The same settings with a network that a test has time for."""

    def changed(case: step.StepCase, per_task: int = 500):  # type: ignore[no-untyped-def]
        config = settings(case, per_task)
        return replace(config, model=replace(config.model, width=32))

    return changed


def test_noise_has_the_format_of_the_data_set(tmp_path: Path) -> None:
    root = whole_runs.write_noise("cifar10", tmp_path)
    source = load_source("cifar10", root)
    assert source.train_images.shape == (50_000, 3, 32, 32) and source.test_labels.max() == 9
    assert 100 < source.train_images[:100].mean() < 155


def test_only_selects_whole_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def recorded(command: list[str]) -> float:
        ran.append(command)
        return 1.0

    monkeypatch.setattr(whole_runs, "_timed", recorded)
    monkeypatch.setattr(whole_runs, "write_noise", lambda *_: tmp_path)
    list(whole_runs.measure_runs("cpu", tmp_path, only=["er", "cn"]))
    assert len(ran) == 2 and all(" --strategy er --norm cn " in " ".join(command) for command in ran)


def test_recipe_is_timed_once_after_its_kernels_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the benchmark are executed, restricted to one norm and few steps, on images of noise."""
    ran: list[str] = []
    timed = whole_runs._timed

    def short(command: list[str]) -> float:
        ran.append(" ".join(command))
        few = ["--only", "norm=cn", "--only", "strategy=er", "--seeds", "1", "--max-steps", "1"]
        return timed([*command, *few])

    monkeypatch.setattr(whole_runs, "_timed", short)
    (row,) = whole_runs.measure_runs("cpu", tmp_path, only=["table2"])
    assert row.kernels == "cached" and row.seconds > 0.1
    compiling, measured = ran
    assert "--max-steps" in compiling and "--max-steps" not in measured
    assert " paper table2 --only stream=split-cifar100 --lr one --seeds 5 " in measured


def test_steps_of_large_images_have_three_passes(
    learned_sizes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "BLOCKS", {"cpu": (1, 1)})
    monkeypatch.setattr(step, "FIRST_TASK", {"cpu": 1})
    (row,) = step.measure_steps(CPU, [step.StepCase("cn", "plain", "fp32", 1, strategy="derpp", size=64)])
    assert learned_sizes[0] == (32, 0, 0) and learned_sizes[-1] == (32, 32, 32)
    assert flatten_row(row)["size"] == 64 and row.seconds.p50 > 0


def test_shape_determines_the_measured_convolutions() -> None:
    plain = convolutions.geometries(convolutions.NetworkShape("plain", 32, 64))
    assert plain[0] == Geometry(32, 3, 64, 64, 64, 3, 1, 1)
    assert Geometry(32, 512, 8, 8, 512, 3, 1, 1) in plain
    assert Geometry(20, 512, 2, 2, 512, 3, 1, 1) in convolutions.geometries()


@pytest.mark.parametrize("direction", convolutions.DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stem", convolutions.STEMS)
def test_candidates_of_every_convolution_can_be_launched(direction: Direction, dtype: torch.dtype, stem: str) -> None:
    """Triton requires powers of two of at least 16; every program must have something to add."""
    for geometry in convolutions.geometries(convolutions.NetworkShape(stem)):
        tensors = convolutions._Tensors.__new__(convolutions._Tensors)
        tensors.geometry, tensors.dtype = geometry, dtype
        found = convolutions._candidates(direction, tensors)
        assert found, geometry
        for tiles in found:
            assert all(size >= 16 and size & (size - 1) == 0 for size in tiles[:3])
            assert 1 <= tiles.splits <= convolutions._steps(direction, geometry, tiles)
            assert tiles.rounded == (dtype == torch.float32)
            assert not tiles.prepared or geometry.stride == 1 or direction != "input"


def test_startup_times_commands_and_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "COMMANDS", ("show",))
    monkeypatch.setattr(startup, "SEEDS", 1)
    monkeypatch.setattr(startup, "write_noise", lambda _, root: small_cifar100(root))
    command, run = startup.measure_startup("cpu", tmp_path, repeats=1, runs=1)
    assert (command.command, command.until, run.until) == ("contnorm show", "end", "first step")
    assert 0 < command.least <= command.seconds < run.seconds


def test_host_and_eager_steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "REPEATS", {"cpu": 2})
    monkeypatch.setattr(eager, "BATCHES", {"cpu": (2,)})
    monkeypatch.setattr(eager, "LAYERS", 2)
    host = [flatten_row(row) for row in eager.measure_host(CPU)]
    assert [(row["layer"], row["path"], row["direction"]) for row in host] == [
        (layer, path, direction)
        for layer, path in (("bn", "torch"), ("cn", "python"))
        for direction in ("forward", "backward")
    ]
    steps = [flatten_row(row) for row in eager.measure_eager_steps(CPU)]
    assert [(row["layer"], row["path"], row["batch"]) for row in steps] == [("bn", "torch", 2), ("cn", "python", 2)]
    assert all(row["p50_us"] > 0 for row in host + steps)


def test_rows_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = step.StepRow(step.StepCase("cn", "pool", "tf32", 8), Percentiles(1e-3, 2e-3, 3e-3))
    monkeypatch.setattr(speed, "measure_steps", lambda device: iter([row, row]))
    speed.measure(speed.parse(["step", "--out", str(tmp_path)]))
    written = list(csv.DictReader((tmp_path / "step.csv").read_text().splitlines()))
    assert len(written) == 2 and written[0]["p50_us"] == "2000.0" and written[0]["torch"] == torch.__version__


def test_measured_convolutions_extend_the_tables_in_use() -> None:
    """Entries of other sizes and other GPUs stay; a measured convolution at which cuDNN is faster has none."""
    old, slow, fast = (Geometry(20, 64, side, side, 64, 3, 1, 1) for side in (4, 8, 16))
    tiles, here, other = Tiles(64, 64, 32, 1, 4, 3), {"gpu": "here"}, {"gpu": "other"}
    table = ConvolutionTable({("forward", "float32", g): tiles for g in (old, slow)})
    rows = [
        convolutions.ConvolutionRow("tf32", "forward", geometry, 10.0, us, tiles)
        for geometry, us in ((slow, 11.0), (fast, 5.0))
    ]
    tables = speed.with_rows([(other, table), (here, table)], here, rows)
    found = {valid_for["gpu"]: {key[2] for key in each.entries} for valid_for, each in tables}
    assert found == {"other": {old, slow}, "here": {old, fast}}
