"""Records: written whole or not at all, found by the beginning of a hash, refused when they are none."""

import json
import math
import os
from pathlib import Path

import pytest

from contnorm.config import RunConfig
from contnorm.errors import UserError
from contnorm.results import SCHEMA, Store, spread_over_seeds, write_atomically

FOUND = {"matrix": {"correct": [[5, None], [4, 6]], "total": [10, 10]}, "drift": {}, "seconds": {}}


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    store, config = Store(tmp_path), RunConfig()
    for seed in (3, 1):
        assert not store.has(config, seed)
        store.save(config, seed, FOUND)
    (record, other) = store.find(config.hash[:4])
    assert (record.seed, other.seed) == (1, 3) and record.config == config
    assert record.score("acc") == 50 and [r.seed for r in store] == [1, 3]
    raw = json.loads(store.path(config, 1).read_text())
    assert raw["schema"] == SCHEMA and raw["hash"] == config.hash


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"old")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask(), "readable by whom the user lets read"


def _umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no record of a run"),
        ("{}", "is no record of a run .without config, matrix"),
        (json.dumps({"schema": 99}), "is a record of version 99.*Upgrade contnorm"),
    ],
)
def test_what_is_no_record_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "0.json"
    path.write_text(content)
    with pytest.raises(UserError, match=said):
        Store(tmp_path).load(path)


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no finished run 'abc'"):
        Store(tmp_path).find("abc")


def test_spread() -> None:
    assert spread_over_seeds([1.0, 2.0, 6.0]) == pytest.approx((3.0, 7**0.5))
    assert all(map(math.isnan, spread_over_seeds([math.nan, math.nan]))), "forgetting, where there is one task"
