"""Archives of records: equal to the runs folder they were written from, deterministic, and robust to damage."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contnorm.bench import archives
from contnorm.bench.archives import read_archive, write_archive
from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.records import RecordSet, Store, seal_of
from contnorm.errors import UserError
from tests.committed_records import FOLDER

RESULTS = {"matrix": {"correct": [[5, None], [4, 6]], "total": [10, 10]}}
BN, CN, HIGH = RunConfig(), from_dict({"norm": {"name": "cn"}}), from_dict({"train": {"lr": 9.0}})
SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "records"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs of three seeds each, one with a divergence, and a run that has only a divergence note of schema 1."""
    store = Store(tmp_path / "runs")
    for seed in (2, 0, 10):
        store.save(BN, seed, {**RESULTS, "commit": f"é{seed}"})
        store.save(CN, seed, RESULTS)
    store.save_diverged(CN, 1, "seed 1: the loss is nan.")
    note = store.path(HIGH, 3).with_name("3.lost.json")
    note.parent.mkdir()
    note.write_text(json.dumps({"schema": 1, "lost": "seed 3: the loss is inf."}))
    return tmp_path / "runs"


def archive_of(runs: Path, name: str = "all.jsonl.gz") -> Path:
    content = Store(runs).load_all(drop=False)
    path = runs.parent / name
    write_archive(path, [*content.records, *content.diverged_runs])
    return path


def identities(content: RecordSet) -> list[tuple[str, int, str]]:
    return [(record.hash, record.seed, record.outcome) for record in content.records]


def lines_of(path: Path) -> list[bytes]:
    return gzip.decompress(path.read_bytes()).splitlines(keepends=True)


@pytest.mark.parametrize("name", ["all.jsonl.gz", "all.jsonl"])
def test_archive_has_the_content_of_its_folder(runs: Path, name: str) -> None:
    path = archive_of(runs, name)
    folder, archive = Store(runs), Store(path)
    assert identities(archive.load_all()) == identities(folder.load_all())
    assert archive.load_all().diverged == folder.load_all().diverged and len(folder.load_all().diverged) == 2
    assert archive.load_all().problems == [] and len(list(archive)) == 6
    assert [record.raw for record in archive] == [record.raw for record in folder], "seals stay valid"
    for config in (BN, CN, HIGH):
        assert archive.seeds(config, range(11)) == folder.seeds(config, range(11))
        assert archive.diverged_seeds(config) == folder.diverged_seeds(config)
    assert archive.load_run(BN, 10).raw == folder.load_run(BN, 10).raw
    assert [record.seed for record in archive.find(BN.hash[:5])] == [0, 2, 10]
    assert [record.seed for record in archive.load_seeds(CN, [0, 2]).records] == [0, 2]
    assert len(Store(runs.parent / "other").search(str(path)).records) == 6


def test_archive_bytes_depend_on_the_records_only(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = archive_of(runs).read_bytes()
    monkeypatch.setattr("time.time", lambda: 10.0**9)
    assert archive_of(runs, "b.jsonl.gz").read_bytes() == first
    assert first[4:8] == bytes(4), "no time in the header"
    keys = [(raw["hash"], raw["seed"]) for raw in map(json.loads, gzip.decompress(first).splitlines())]
    assert keys == sorted(keys) and len(keys) == 8
    content = Store(runs.parent / "all.jsonl.gz").load_all()
    write_archive(runs.parent / "c.jsonl.gz", [*content.diverged_runs, *reversed(content.records)])
    assert (runs.parent / "c.jsonl.gz").read_bytes() == first, "an archive of an archive"


def test_existing_file_is_replaced_by_force_only(runs: Path) -> None:
    path, records = archive_of(runs), Store(runs).load_all().records
    before = path.read_bytes()
    assert not write_archive(path, Store(path).load_all().records + Store(path).load_all().diverged_runs)
    with pytest.raises(UserError, match=r"all\.jsonl\.gz: exists with different content.*--force"):
        write_archive(path, records)
    assert path.read_bytes() == before
    assert write_archive(path, records, force=True) and len(Store(path).load_all().records) == 6
    assert Store(path).load_all().diverged == {}, "the file is read again after it changed"
    with pytest.raises(UserError, match=r"\.jsonl\.gz or \.jsonl"):
        write_archive(path.with_name("all.zip"), records)


def test_archive_that_could_not_be_read_is_not_written(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "LARGEST_ARCHIVE", 1000)
    with pytest.raises(UserError, match="exceed 1,000"):
        archive_of(runs)
    assert sorted(os.listdir(runs.parent)) == ["runs"]


def test_failed_write_keeps_the_old_archive(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive_of(runs)
    before = path.read_bytes()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_archive(path, [], force=True)
    assert path.read_bytes() == before and sorted(os.listdir(path.parent)) == ["all.jsonl.gz", "runs"]


def test_folder_may_contain_archives_next_to_run_folders(runs: Path) -> None:
    path = archive_of(runs)
    path.rename(runs / path.name)
    store = Store(runs)
    assert len(store.load_all().records) == 6 and store.load_all().problems == [], "copies count once"
    for folder in (runs / CN.hash, runs / HIGH.hash):
        for file in folder.iterdir():
            file.unlink()
    store = Store(runs)
    assert len(store.load_all().records) == 6 and store.has(CN, 2) and store.is_diverged(CN, 1)
    assert store.load_all().diverged == {
        CN.hash: {1: "seed 1: the loss is nan."},
        HIGH.hash: {3: "seed 3: the loss is inf."},
    }
    assert [record.seed for record in store.find(CN.hash[:6])] == [0, 2, 10]
    store.save(CN, 1, RESULTS)
    assert store.load_all().diverged.keys() == {HIGH.hash}, "finished after all"


def test_archives_are_read_only(runs: Path) -> None:
    path = archive_of(runs)
    for root in (path, path / "table3", runs / "new.jsonl"):
        with pytest.raises(UserError, match="read-only") as raised:
            Store(root).save(BN, 7, RESULTS)
        assert "\n" not in str(raised.value)
        with pytest.raises(UserError, match="read-only"):
            Store(root).save_diverged(BN, 7, "the loss is nan")
    assert Store(runs / "new.jsonl").load_all() == RecordSet([], [])


def resealed(line: bytes, **values: Any) -> bytes:
    raw = json.loads(line) | values
    return json.dumps(raw | {"seal": seal_of(raw)}).encode() + b"\n"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda line: b"\n", "Expecting value"),
        (lambda line: b"[1]\n", "JSON object"),
        (lambda line: b"\xff" + line, "utf-8"),
        (lambda line: line[:-20] + b"\n", "not a valid record"),
        (lambda line: b"[" * 10**5 + b"\n", "not a valid record"),
        (lambda line: line.replace(b'"correct":[[5,', b'"correct":[[6,'), "seal"),
        (lambda line: resealed(line, hash="0" * 12), "hash"),
        (lambda line: resealed(line, seed=-1), "seed"),
        (lambda line: resealed(line, schema=99), "schema 99"),
        (lambda line: resealed(line, status="done"), "status"),
    ],
)
def test_invalid_line_is_reported_and_others_are_read(
    runs: Path, damage: Callable[[bytes], bytes], reason: str
) -> None:
    path = archive_of(runs)
    lines = lines_of(path)
    number = next(i for i, line in enumerate(lines) if json.loads(line)["seed"] == 2)
    lines[number] = damage(lines[number])
    path.write_bytes(gzip.compress(b"".join(lines)))
    content = Store(path).load_all()
    assert len(content.records) == 5 and len(content.diverged_runs) == 2
    (problem,) = content.problems
    assert problem.startswith(f"{path}:{number + 1}: ") and reason in problem
    assert problem.isprintable() and len(problem) < 600


def test_duplicate_line_is_reported(runs: Path) -> None:
    path = archive_of(runs)
    lines = lines_of(path)
    path.write_bytes(gzip.compress(b"".join([*lines, lines[3]])))
    content = Store(path).load_all()
    assert len(content.records) == 6
    (problem,) = content.problems
    assert problem.startswith(f"{path}:9: ") and "Line 4 " in problem


def test_line_without_line_break_at_the_end_is_read(runs: Path) -> None:
    path = archive_of(runs)
    path.write_bytes(gzip.compress(b"".join(lines_of(path)).rstrip(b"\n")))
    assert Store(path).load_all().problems == [] and len(Store(path).load_all().records) == 6


@pytest.mark.parametrize("damage", ["cut", "changed", "not gzip", "empty", "cut in the first block"])
def test_damaged_gzip_is_reported_and_lines_before_are_read(runs: Path, damage: str) -> None:
    path = archive_of(runs)
    line = lines_of(path)[0]
    text = [hashlib.sha256(bytes([seed % 256])).hexdigest() * 20 for seed in range(300)]
    path.write_bytes(gzip.compress(b"".join(resealed(line, seed=seed, commit=text[seed]) for seed in range(300))))
    whole = path.read_bytes()
    half = len(whole) // 2
    path.write_bytes(
        {
            "cut": whole[:half],
            "changed": whole[:half] + bytes([whole[half] ^ 255]) + whole[half + 1 :],
            "not gzip": b"".join(lines_of(path)),
            "empty": b"",
            "cut in the first block": whole[:20],
        }[damage]
    )
    content = Store(path).load_all()
    seeds = [record.seed for record in content.records]
    assert content.problems and all(problem.startswith(f"{path}:") for problem in content.problems)
    assert len(seeds) < 300 and "damaged from this line on" in content.problems[-1]
    if damage == "cut":
        assert len(seeds) > 10 and seeds == list(range(len(seeds)))
        assert content.problems[0].startswith(f"{path}:{len(seeds) + 1}: ")
    if damage == "changed":  # what follows the change is checked by seals and by the checksum of the file
        assert len(seeds) > 10 and seeds[:10] == list(range(10))


@pytest.mark.parametrize(
    ("limit", "content", "reason"),
    [
        ("LARGEST_LINE", b"0" * 10**7, "bytes"),
        ("LARGEST_ARCHIVE", b"0" * 10**7, "bytes"),
        ("", b"\n" * 10**7, "invalid lines"),
        ("", b"{}\n" * 10**6, "invalid lines"),
    ],
)
def test_bomb_is_not_read_to_its_end(
    runs: Path, limit: str, content: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit:
        monkeypatch.setattr(archives, limit, 10**6)
    path = archive_of(runs)
    path.write_bytes(gzip.compress(b"".join(lines_of(path)) + content, compresslevel=1))
    loaded = Store(path).load_all()
    assert len(loaded.records) == 6 and len(loaded.problems) <= archives.MOST_PROBLEMS + 1
    assert reason in loaded.problems[-1] and "not read from this line on" in loaded.problems[-1]


@pytest.mark.parametrize("kind", ["pipe", "device", "unreadable"])
def test_archive_that_is_not_a_file_is_reported(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "all.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.symlink_to(path)
    (problem,) = read_archive(path).problems
    assert problem.startswith(f"{path}: can't be read")


# SHA-256 over the seals of all records, in order; they change if a committed record changes.
COMMITTED = {
    "cocoseq-mini.jsonl.gz": (50, 0, "1ce54089f60e0e9e"),
    "runs/permuted-mnist-fresh-seeds.jsonl.gz": (128, 0, "35f53b1f67f40fd0"),
    "runs/split-cifar10.jsonl.gz": (75, 0, "1904aeb9210a4648"),
    "runs/split-cifar100-fresh-seeds-more-tables.jsonl.gz": (226, 0, "b4c2fdf232672e3e"),
    "runs/split-cifar100-fresh-seeds.jsonl.gz": (639, 1, "47cd01f4e8b82669"),
    "runs/split-cifar100-panel-weights.jsonl.gz": (32, 0, "bc186d4197e46d7e"),
    "runs/split-cifar100-panel.jsonl.gz": (216, 0, "bb2da5a47a2cffcd"),
    "runs/split-mini-imagenet.jsonl.gz": (30, 0, "e0962691e18b353e"),
    "runs/split-tiny-imagenet.jsonl.gz": (10, 0, "8228e7f62d557354"),
    "runs/table3/timed.jsonl.gz": (14, 0, "30dd1fee350b3d11"),
    "runs/tables.jsonl.gz": (269, 1, "dac4ee9d459c39b3"),
    "split-cifar10-more-seeds.jsonl.gz": (44, 0, "a0570b6c780c797b"),
    "split-cifar100-coarse-grid.jsonl.gz": (233, 7, "d60a5e6c35abf600"),
    "split-cifar100-exploratory.jsonl.gz": (140, 0, "eb5e5571dc2f9b79"),
    "split-cifar100-fine-grid.jsonl.gz": (283, 0, "e756ad446b7127a3"),
    "split-cifar100-panel-validation.jsonl.gz": (449, 13, "f389109051b91bde"),
}


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_archive_is_unchanged(name: str) -> None:
    """Loading checks that the settings have the hash under which they were recorded."""
    content = read_archive(FOLDER / name)
    finished, diverged, digest = COMMITTED[name]
    assert (len(content.records), len(content.diverged_runs), content.problems) == (finished, diverged, [])
    items = [*content.records, *content.diverged_runs]
    assert all(item.config is not None and item.config.hash == item.raw["hash"] for item in items)
    assert hashlib.sha256("".join(seal_of(item.raw) for item in items).encode()).hexdigest()[:16] == digest


def test_all_committed_archives_are_checked() -> None:
    assert {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.jsonl*")} == set(COMMITTED)
    assert not [path for path in FOLDER.rglob("*.json") if path.stem.isdecimal()], "single records"
    content = Store(FOLDER).load_all()
    assert content.problems == [] and len(content.records) == 233 + 283 + 50 + 44 + 140 + 449


@pytest.mark.skipif(not SHARED.is_dir(), reason="records of other data sets are not part of the repository")
def test_records_of_version_0_1_load_with_their_hash(tmp_path: Path) -> None:
    contents = [Store(folder).load_all() for folder in sorted(SHARED.iterdir()) if folder.is_dir()]
    records = [record for content in contents for record in content.records]
    assert len(records) == 180 and [content.problems for content in contents] == [[]] * 3
    assert all(record.config.hash == record.raw["hash"] == Path(str(record.path)).parent.name for record in records)
    write_archive(tmp_path / "all.jsonl.gz", records)
    assert identities(read_archive(tmp_path / "all.jsonl.gz")) == sorted(identities(RecordSet(records, [])))
