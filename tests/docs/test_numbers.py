"""Numbers in the documentation are those of the records."""

from __future__ import annotations

import json
import re

from tests.docs.pages import ROOT


def test_expected_gain_of_cn_matches_table() -> None:
    page = " ".join((ROOT / "docs" / "concepts" / "why-bn-forgets.md").read_text().split())
    table = (ROOT / "docs" / "results" / "table2.md").read_text()
    alike, chosen, fresh = re.findall(r"^## [^\n]*: CN is over BN in ACC .*?(?=^## )", table, re.MULTILINE | re.DOTALL)
    for claim, sentence in (
        (alike, "has {} points with CN under ER and {} under DER++"),
        (chosen, "of its own, {} and {}"),
        (fresh, "with fresh seeds, {} and {}"),
    ):
        differences = re.findall(r"^\| split-cifar100 (?:er|derpp) cn32 against bn \| (\S+)", claim, re.MULTILINE)
        assert len(differences) == 2 and sentence.format(*differences) in page


def test_cpu_times_match_record() -> None:
    page = (ROOT / "docs" / "deviations.md").read_text()
    record = json.loads((ROOT / "docs" / "records" / "cn-on-cpu.json").read_text())
    times: dict[str, list[str]] = {}
    for row in record["rows"]:
        times.setdefault("x".join(map(str, row["shape"])), []).append(f"{row['p50']:.1f}")
    assert len(times) == 5
    for shape, cells in times.items():
        assert f"| {shape} | {' | '.join(cells)} |" in page
