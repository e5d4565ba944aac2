"""docs/results/README.md: its numbers on the PRS and reservoir memories are those of the records."""

from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from contnorm.bench.records import Record, load_runs

ROOT = Path(__file__).resolve().parent.parent
GROUPS = ("majority", "moderate", "minority")


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return list(load_runs(ROOT / "docs" / "records" / "cocoseq-mini.jsonl.gz"))


def final_memory(record: Record) -> tuple[dict[str, Any], dict[str, float]]:
    """The census at the end, and the share of each group of classes in the memory's labels, in percent."""
    census = {name: values[-1] for name, values in record.raw["census"].items() if name != "capacity"}
    census |= {name: [int(count) for count in census[name].split()] for name in ("held", "shown")}
    held = census["held"]
    shares = {group: 100 * sum(held[i] for i in record.classes_of(group)) / sum(held) for group in GROUPS}
    return census, shares


def test_table_matches_the_records(records: list[Record]) -> None:
    page = (ROOT / "docs" / "results" / "README.md").read_text()
    for kind, words in (("reservoir", "of those in a reservoir's memory"), ("prs", "of those in PRS's memory")):
        some = [final_memory(r) for r in records if (r.config.memory.kind, r.config.norm.name) == (kind, "bn")]
        parts = [[shares[group] for _, shares in some] for group in GROUPS]
        rare = next(iter(records)).classes_of("minority")
        held = fmean(sum(census["held"][i] > 0 for i in rare) for census, _ in some)
        let_in = fmean(census["written"] for census, _ in some)
        cells = [f"{fmean(part):.1f} +- {stdev(part):.1f} %" for part in parts]
        cells += [f"{held:.1f}", f"{let_in:.0f}", f"{let_in - 100:.0f}"]
        assert f"| {' | '.join([words, *cells])} |" in page
