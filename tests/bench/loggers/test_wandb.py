"""The files that W&B writes offline have what the record has."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contnorm import bench
from tests.bench.loggers.conftest import Memo, StopAt

wandb = pytest.importorskip("wandb", reason="wandb is not installed")
wandb_internal_pb2 = pytest.importorskip("wandb.proto.wandb_internal_pb2")

pytestmark = pytest.mark.slow  # wandb starts a process of its own
BLOCK = 32768  # bytes; a file of W&B has the format of LevelDB's logs, after a header of 7 bytes


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    wandb.teardown()  # settings are read once
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    yield
    wandb.teardown()


def records(path: Path) -> Iterator[Any]:
    data, at, part = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(part)
            part = b""


def logged(folder: Path) -> tuple[set[str], dict[str, list[tuple[int, float]]], dict[str, Any]]:
    """Ids, metrics and settings of the runs in a folder of W&B."""
    wandb.teardown()  # its process may write the end of a file after a run is finished
    ids: set[str] = set()
    metrics: dict[str, list[tuple[int, float]]] = {}
    config: dict[str, Any] = {}
    for path in sorted(folder.glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for record in records(path):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif record.WhichOneof("record_type") == "history":
                row = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
                }
                for name, value in row.items():
                    metrics.setdefault(name, []).append((row["_step"], value))
    return ids, metrics, config


def test_history_is_that_of_the_run(stream: bench.Stream, tmp_path: Path) -> None:
    memo = Memo()
    result = bench.run(stream, norm="cn4", runs=tmp_path / "runs", log=["wandb", memo], log_every=5)
    ids, metrics, config = logged(tmp_path / "runs-logs" / "wandb")
    assert len(ids) == 1
    names = {name for _, _, name, _ in memo.rows}
    assert names <= set(metrics)
    for name in names:
        assert metrics[name] == list(memo.series(name).items())
    assert metrics["score/acc"] == [(24, result.records[0].score("acc"))]
    assert config["train.batch"] == 10 and config["norm.groups"] == 4 and config["hash"] == result.hash


def test_stopped_and_resumed_run_is_one_run(stream: bench.Stream, tmp_path: Path) -> None:
    memo = Memo()
    bench.run(stream, log=memo, log_every=1)
    with pytest.raises(KeyboardInterrupt):
        bench.run(stream, runs=tmp_path / "runs", log=["wandb", StopAt(13)], log_every=1)
    bench.run(stream, runs=tmp_path / "runs", log="wandb", log_every=1)
    ids, metrics, _ = logged(tmp_path / "runs-logs" / "wandb")
    assert len(ids) == 1
    for name in ("loss", "accuracy/task_0", "score/acc"):
        assert metrics[name] == list(memo.series(name).items())
