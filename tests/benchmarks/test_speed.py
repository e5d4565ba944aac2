"""Speed benchmarks: rows have the measured values, and CSV files have what was printed."""

from __future__ import annotations

import csv
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from contnorm.bench.data.registry import load_source
from contnorm.benchmarks import convolutions, eager, layers, measure, measure_speed, startup, step
from contnorm.benchmarks import runs as whole_runs
from contnorm.benchmarks.timing import Percentiles, flatten_row, measure_time
from contnorm.cli import speed
from contnorm.cli.main import main
from contnorm.errors import UserError
from contnorm.kernels.triton.convolution.launch import Direction, Geometry, Tiles
from contnorm.kernels.triton.convolution.table import VARIABLE, ConvolutionTable, format_tables, read_tables
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


def test_rows_are_printed_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = step.StepRow(step.StepCase("cn", "pool", "tf32", 8), Percentiles(1e-3, 2e-3, 3e-3))
    monkeypatch.setattr(measure, "_rows", lambda *_: iter([row, row]))
    console = Console(record=True, width=200)
    monkeypatch.setattr(speed, "console", console)
    speed.speed("step", "cpu", tmp_path)
    assert console.export_text().count("2000.0") == 2
    written = list(csv.DictReader((tmp_path / "step.csv").read_text().splitlines()))
    assert len(written) == 2 and written[0]["p50_us"] == "2000.0" and written[0]["torch"] == torch.__version__


@pytest.mark.parametrize("name", ["speed", "bench"])
def test_results_are_written_to_the_folder_speed_by_default(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = step.StepRow(step.StepCase("cn", "pool", "tf32", 8), Percentiles(1e-3, 2e-3, 3e-3))
    monkeypatch.setattr(measure, "_rows", lambda *_: iter([row]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["contnorm", name, "step"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.csv")] == ["speed/step.csv"]


def test_unknown_benchmark_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown benchmark 'layer'\. Did you mean 'layers'"):
        next(measure_speed("layer", tmp_path))


def test_only_selects_whole_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def recorded(command: list[str]) -> float:
        ran.append(command)
        return 1.0

    monkeypatch.setattr(whole_runs, "_timed", recorded)
    monkeypatch.setattr(whole_runs, "write_noise", lambda *_: tmp_path)
    list(measure_speed("run", tmp_path, root=tmp_path, only=["er", "cn"]))
    assert len(ran) == 2 and all(" --strategy er --norm cn " in " ".join(command) for command in ran)
    with pytest.raises(UserError, match=r"--only cn gn .*split-cifar100 er bn, "):
        list(measure_speed("run", tmp_path, root=tmp_path, only=["cn", "gn"]))
    with pytest.raises(UserError, match=r"--only cn .*layers.* speed run"):
        list(measure_speed("layers", tmp_path, only=["cn"]))


def test_steps_are_limited_in_whole_runs_only(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--max-steps 5 .*not to step.* speed run"):
        list(measure_speed("step", tmp_path, max_steps=5))
    with pytest.raises(UserError, match="max_steps=0"):
        list(measure_speed("run", tmp_path, max_steps=0))


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


def test_convolutions_are_measured_on_a_gpu_only(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs a GPU.*--device cuda"):
        next(measure_speed("convolutions", tmp_path))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"stem": "poll"}, r"stem 'poll'.*pool"),
        ({"precisions": ("fp32",)}, r"precision 'fp32'.*tf32"),
        ({"batch": 0}, "0 images of 32x32"),
        ({"size": -1}, "20 images of -1x-1"),
    ],
    ids=str,
)
def test_shape_of_the_network_is_checked(shape: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        next(measure_speed("convolutions", tmp_path, shape=convolutions.NetworkShape(**shape)))


def test_shape_applies_to_convolutions_only(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="convolutions, not to layers"):
        next(measure_speed("layers", tmp_path, shape=convolutions.NetworkShape(batch=10)))


def test_shape_determines_the_measured_convolutions() -> None:
    plain = convolutions.geometries(convolutions.NetworkShape("plain", 32, 64))
    assert plain[0] == Geometry(32, 3, 64, 64, 64, 3, 1, 1)
    assert Geometry(32, 512, 8, 8, 512, 3, 1, 1) in plain
    assert Geometry(20, 512, 2, 2, 512, 3, 1, 1) in convolutions.geometries()


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ("--stem plain --batch 32 --image-size 64 --precision bf16", ("plain", 32, 64, ("bf16",))),
        ("--batch 10", ("pool", 10, 32, ("tf32", "bf16"))),
        ("", None),
    ],
)
def test_options_describe_the_shape(
    options: str, shape: tuple[Any, ...] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def recorded(*args: Any, shape: object, **options: Any) -> tuple[()]:
        shapes.append(shape)
        return ()

    shapes: list[object] = []
    monkeypatch.setattr(speed.benchmarks, "measure_speed", recorded)
    monkeypatch.setattr(sys, "argv", ["contnorm", "speed", "convolutions", "--out", str(tmp_path), *options.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0 and shapes == [shape]


def test_measured_convolutions_extend_the_tables_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Entries of other sizes and other GPUs stay; a measured convolution at which cuDNN is faster has none."""
    old, slow, fast = (Geometry(20, 64, side, side, 64, 3, 1, 1) for side in (4, 8, 16))
    tiles, here = Tiles(64, 64, 32, 1, 4, 3), {"gpu": "here"}
    table = ConvolutionTable({("forward", "float32", g): tiles for g in (old, slow)})
    own = tmp_path / "own.json"
    own.write_text(format_tables([({"gpu": "other"}, table), (here, table)]))
    monkeypatch.setenv(VARIABLE, str(own))
    monkeypatch.setattr(measure, "find_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(measure, "environment_of", lambda device: {})
    monkeypatch.setattr(measure, "environment_of_table", lambda device: here)
    monkeypatch.setattr(measure, "current_device", lambda device: nullcontext())
    rows = [
        convolutions.ConvolutionRow("tf32", "forward", geometry, 10.0, us, tiles)
        for geometry, us in ((slow, 11.0), (fast, 5.0))
    ]
    monkeypatch.setattr(measure, "measure_convolutions", lambda device, shape: iter(rows))
    assert len(list(measure_speed("convolutions", tmp_path, device="cuda"))) == 2
    monkeypatch.setenv(VARIABLE, str(tmp_path / "convolutions.json"))
    tables = {valid_for["gpu"]: {key[2] for key in table.entries} for valid_for, table in read_tables()}
    assert tables == {"other": {old, slow}, "here": {old, fast}}


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


def test_startup_reports_the_error_of_a_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no finished run 'absent'"):
        startup._time_command(["show", "absent"], tmp_path)
    with pytest.raises(UserError, match="unknown norm 'absent'"):
        startup._time_first_step(["run", "--norm", "absent"], tmp_path)


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


def test_paths_that_are_not_possible_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager.replay, "activate", lambda: False)
    with pytest.raises(RuntimeError, match="can't be replayed"), eager._path("cpp"):
        pass
