"""docs/results/README.md: its numbers on the PRS and reservoir memories are those of the records."""

from collections import defaultdict
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


def test_memories_evict_in_every_run(records: list[Record]) -> None:
    assert {(r.config.memory.kind, r.config.norm.name) for r in records} == {
        (kind, norm) for kind in ("prs", "reservoir") for norm in ("bn", "cn", "bn_gn", "cn_tied", "bn_gn_tied")
    }
    for record in records:
        census, _ = final_memory(record)
        assert census["evicted"] == census["written"] - 100 > 200


def test_prs_has_more_rare_classes_than_a_reservoir(records: list[Record]) -> None:
    rare: dict[int, dict[str, float]] = defaultdict(dict)
    for record in records:
        census, shares = final_memory(record)
        rare[record.seed][record.config.memory.kind] = shares["minority"]
        rare[record.seed]["stream"] = share_shown(record, census)
    assert set(rare) == set(range(5))
    for by_kind in rare.values():
        assert by_kind["prs"] > by_kind["reservoir"] and by_kind["prs"] > 2 * by_kind["stream"]


def share_shown(record: Record, census: dict[str, Any]) -> float:
    shown = census["shown"]
    return 100 * sum(shown[i] for i in record.classes_of("minority")) / sum(shown)


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
