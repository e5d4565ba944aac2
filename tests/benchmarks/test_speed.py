"""Speed benchmarks: rows have the measured values, and CSV files have what was printed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.timing import Percentiles, flatten_row

from benchmarks import layers, step, your_model

pytestmark = pytest.mark.slow  # it measures

CPU = torch.device("cpu")


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


def test_a_network_of_a_file_is_converted_and_compared(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "from torch import nn\n"
        "def make():\n"
        "    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), *head)\n"
    )
    cases = [your_model.Case(f"{file}:make", norm, "eager", 4, 8, "nhwc", "fp32") for norm in ("bn", "cn")]
    rows = [your_model.measure(case, "cpu", steps=2, warm_up=1) for case in cases]
    printed = [line.split(" | ") for line in your_model.table(rows).splitlines() if line.startswith("| eager")]
    assert [line[5] for line in printed] == ["bn", "cn"] and printed[0][7] == "1.00"
    assert float(printed[1][7]) == pytest.approx(rows[1].milliseconds / rows[0].milliseconds, abs=0.006)
