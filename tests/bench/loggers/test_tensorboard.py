"""TensorBoard's own reader finds what the record has."""

from pathlib import Path

import numpy as np
import pytest

from contnorm import bench
from tests.bench.loggers.conftest import Memo, StopAt

pytest.importorskip("tensorboard", reason="tensorboard is not installed")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def series(accumulator: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def single(values: dict[int, float]) -> list[tuple[int, float]]:
    """Values in single precision, which TensorBoard stores."""
    return [(step, float(np.float32(value))) for step, value in values.items()]


def test_events_are_those_of_the_run(stream: bench.Stream, tmp_path: Path) -> None:
    memo = Memo()
    result = bench.run(stream, norm="cn4", runs=tmp_path / "runs", log=["tensorboard", memo], log_every=5)
    (folder,) = (tmp_path / "runs-logs" / "tensorboard").glob("*/seed-0")
    assert folder.parent.name.endswith(f"-er-cn-{result.hash}")
    accumulator = read(folder)
    names = {name for _, _, name, _ in memo.rows}
    assert set(accumulator.Tags()["scalars"]) == names and "score/acc" in names
    for name in names:
        assert series(accumulator, name) == single(memo.series(name))
    assert series(accumulator, "accuracy/task_0")[-1][1] == pytest.approx(result.accuracy[0, 2, 0])
    content = accumulator.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    settings = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert settings["norm.name"].string_value == "cn" and settings["train.batch"].number_value == 10
    assert accumulator.Tensors("status/text_summary")[0].tensor_proto.string_val[0] == b"finished"


def test_stopped_and_resumed_run_has_every_step_once(stream: bench.Stream, tmp_path: Path) -> None:
    memo = Memo()
    bench.run(stream, log=memo, log_every=1)
    with pytest.raises(KeyboardInterrupt):
        bench.run(stream, runs=tmp_path / "runs", log=["tensorboard", StopAt(13)], log_every=1)
    bench.run(stream, runs=tmp_path / "runs", log="tensorboard", log_every=1)
    (folder,) = (tmp_path / "runs-logs" / "tensorboard").glob("*/seed-0")
    assert len(list(folder.glob("events.*"))) == 2
    for name in ("loss", "accuracy/task_0", "score/acc"):
        assert series(read(folder), name) == single(memo.series(name))
