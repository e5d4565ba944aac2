"""Speed benchmarks: rows have the measured values, and CSV files have what was printed."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from benchmarks.timing import Percentiles, flatten_row, measure_time

from benchmarks import convolutions, layers, speed, step
from contnorm.kernels.convolution import ConvolutionTable, Direction, Geometry, Tiles

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
