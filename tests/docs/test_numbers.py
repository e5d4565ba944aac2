"""Numbers in the documentation are those of the records."""

import json
from statistics import fmean, median, stdev

from tests.docs.pages import ROOT


def test_cpu_times_match_record() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
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


def test_times_of_reestimation_match_record() -> None:
    page = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    record = json.loads((ROOT / "docs" / "records" / "reestimate-cpu.json").read_text())
    names = {"resnet18": "ResNet-18", "resnet50": "ResNet-50"}
    ways = ("update_bn", "once", "passes", "sweep")
    assert len(record["rows"]) == 3
    for row in record["rows"]:
        cells = " | ".join(f"{row['median'][way]:.2f}" for way in ways)
        network = f"{names[row['network']]}, width {row['width']}, {row['norm'].upper()}"
        assert f"| {network} | {row['images']:,} | {cells} |" in page
        assert (
            row["equal_bits"] and row["forwards"]["sweep"] == row["forwards"]["once"] == 1 < row["forwards"]["passes"]
        )

    def span(slow: str, fast: str) -> str:
        ratios = [row["median"][slow] / row["median"][fast] for row in record["rows"]]
        return f"{min(ratios):.1f} to {max(ratios):.1f} times"

    assert f"takes {span('sweep', 'update_bn')} as long as `update_bn` of torch in one sweep" in page
    assert f"and {span('once', 'update_bn')} with `exact=False`" in page
    assert f"One sweep is {span('passes', 'sweep')} as fast as a pass for each depth" in page
    assert f"medians of {record['turns']} turns" in page


def test_accuracies_on_corrupted_images_match_record() -> None:
    page = " ".join((ROOT / "docs" / "howto" / "diagnose-a-model.md").read_text().split())
    rows = json.loads((ROOT / "docs" / "records" / "shift-cifar10.json").read_text())["rows"]

    def cells(tool: str, *severities: int) -> str:
        by_severity = [[fmean(r["accuracy"][tool]) for r in rows if r["severity"] == s] for s in severities]
        return " | ".join(f"{fmean(values):.1f}" for values in by_severity)

    def at_five(tool: str) -> str:
        five = {row["corruption"]: fmean(row["accuracy"][tool]) for row in rows if row["severity"] == 5}
        return " | ".join(f"{five[corruption]:.1f}" for corruption in ("noise", "blur", "contrast"))

    assert len(rows) == 16
    titles = {"nothing": "nothing", "ema 50": "EMA, batches of 50", "batch 200": "moments of each batch of 200"}
    titles |= {"batch 10": "moments of each batch of 10", "reestimate 200, mix=1.0": "`reestimate`, 200 images"}
    titles |= {f"reestimate 200, mix={mix}": f"`reestimate`, 200 images, `mix={mix}`" for mix in (0.8, 0.5, 0.2)}
    titles |= {"reestimate 32, mix=1.0": "`reestimate`, 32 images"}
    titles |= {f"reestimate 32, mix={mix}": f"`reestimate`, 32 images, `mix={mix}`" for mix in (0.5, 0.2)}
    for tool, title in titles.items():
        assert f"| {title} | {cells(tool, 0, 1, 2, 3, 4, 5)} |" in page
    for tool in ("nothing", "reestimate 200, mix=0.5", "batch 200", "ema 50"):
        assert f"| {titles[tool]} | {at_five(tool)} |" in page
    for tool in ("batch 200", "ema 50"):
        assert f"| {titles[tool]}, sorted by class | {at_five(f'{tool}, by class')} |" in page
    mixed, full = ([row["accuracy"][f"reestimate 200, mix={mix}"] for row in rows] for mix in (0.5, 1.0))
    gains = [fmean(a) - fmean(b) for a, b in zip(mixed, full, strict=True)]
    assert f"`mix=0.5` has {min(gains):.1f} to {max(gains):.1f} points more in the 16 cases" in page
    assert all(a > b for pair in zip(mixed, full, strict=True) for a, b in zip(*pair, strict=True))
    spread = median(stdev(values) for row in rows for values in row["accuracy"].values())
    assert f"has a median of {spread:.1f} points" in page
    drift = {row["corruption"]: row["drift"] for row in rows if row["severity"] in (0, 5)}
    claim = "is {none:.3f} at severity 0 and rises with each severity, to {noise:.3f} with noise, {blur:.3f} with blur "
    assert f"{claim}and {{contrast:.3f}} with contrast".format(**drift) in page
    ordered = [row["drift"] for row in rows if row["corruption"] != "none"]
    assert all(
        drift["none"] < min(ordered[i : i + 5]) and ordered[i : i + 5] == sorted(ordered[i : i + 5]) for i in (0, 5, 10)
    )
    chosen = [row for row in rows if (row["corruption"], row["severity"]) in (("noise", 2), ("contrast", 3))]
    costs = {r["corruption"]: fmean(rows[0]["accuracy"]["nothing"]) - fmean(r["accuracy"]["nothing"]) for r in chosen}
    assert {f"{row['drift']:.2f}" for row in chosen} == {"0.12"}
    assert f"0.12 costs {costs['noise']:.0f} points with noise (severity 2) and {costs['contrast']:.0f} with" in page
