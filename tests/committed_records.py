"""The records in docs/records, and copies of some of them as files in a runs folder."""

import json
from pathlib import Path
from typing import Any

from contnorm.bench.records import Store, load_runs

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "records"
RUNS = FOLDER / "runs"
COARSE_GRID = FOLDER / "split-cifar100-coarse-grid.jsonl.gz"
COCOSEQ = FOLDER / "cocoseq-mini.jsonl.gz"


def contents_of(run: str, archive: Path = RUNS / "tables.jsonl.gz") -> dict[int, dict[str, Any]]:
    """Content of the records of a run by seed, diverged ones included."""
    content = load_runs(archive)
    every = [*content.records, *content.diverged]
    return {record.seed: json.loads(json.dumps(record.raw)) for record in every if record.hash == run}


def copy_run(run: str, root: Path, archive: Path = RUNS / "tables.jsonl.gz", seeds: Any = None) -> Path:
    """Write the records of a run as files of a runs folder, and return the run's folder."""
    folder = root / run
    folder.mkdir(parents=True, exist_ok=True)
    for seed, raw in contents_of(run, archive).items():
        if seeds is None or seed in seeds:
            (folder / f"{seed}.json").write_text(json.dumps(raw, indent=1) + "\n")
    assert Store(root).load_all().problems == []
    return folder
