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
        times.setdefault(f"{'x'.join(map(str, row['shape']))} | {row['layout']}", []).append(f"{row['p50']:.1f}")
    assert len(times) == 14
    for where, cells in times.items():
        assert f"| {where} | {' | '.join(cells)} |" in page
    large = ([20, 64, 32, 32], [128, 64, 32, 32], [20, 64, 84, 84], [128, 128, 16, 16])
    rows = [row for row in record["rows"] if row["layer"] == "cpp" and row["shape"] in large]
    assert len(rows) == 8
    medians, minima = [row["p50_over_bn"] for row in rows], [row["min_over_bn"] for row in rows]
    claim = (
        f"`cpp` takes {min(medians):.1f} to {max(medians):.1f} times as long as torch's BatchNorm2d (by the fastest "
        f"steps of each, {min(minima):.1f} to {max(minima):.1f})."
    )
    assert claim in " ".join(page.split())
