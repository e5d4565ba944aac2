"""The tables of the benchmark page are made from the rows that were kept."""

import json
import re
from pathlib import Path

from benchmarks import page

ROOT = Path(__file__).resolve().parent.parent


def test_tables_are_those_of_the_rows() -> None:
    text = page.PAGE.read_text()
    assert page.filled(text) == text
    assert set(re.findall(r"<!-- rows: (\w+) -->", text)) == set(page.TABLES)


def test_numbers_told_in_words_are_in_the_rows() -> None:
    text = " ".join(page.PAGE.read_text().split())  # a line may end between a number and its unit
    eager = {(row["layer"], row["path"]): row for row in page.rows("eager") if row["batch"] == "20"}
    for case in (("bn", "torch"), ("cn", "cpp")):
        assert f"{float(eager[case]['p50_us']) / 1000:.1f} ms" in text
        assert f"{int(eager[case]['peak_bytes']) / 1e6:.1f} MB" in text
    runs = {(r["strategy"], r["norm"], r["kernels"]): float(r["seconds"]) for r in page.rows("run")}
    assert f"{runs['er', 'cn', 'cached']:.1f} s" in text and f"{runs['derpp', 'bn', 'cached']:.1f} s" in text


def test_savings_of_mechanisms_are_those_of_the_record() -> None:
    text = page.PAGE.read_text()
    measured = json.loads((ROOT / "docs" / "records" / "mechanisms-nvidia-h200.json").read_text())["rows"]
    seconds = {(row["norm"], row["off"]): row["seconds"] for row in measured}  # the last 'all on' of CN is warm
    shown = re.findall(r"^\| (CN|BN|BRN) \| ([\d.]+) \| ([\w -]+) \| ([\d.]+) \| (\d+) % \|", text, re.MULTILINE)
    names = {"convolution tables": "convolution tables", "side streams for weight gradients": "side streams"}
    names |= {"augmentation in one kernel": "augment kernel", "max-pooling kernel": "pool kernel"}
    names |= {"shared draws of initial weights": "shared draws", "kernels of batch renorm": "reference kernels"}
    assert len(shown) == 7
    for norm, on, off, without, saved in shown:
        all_on, one_off = seconds[norm.lower(), "all on"], seconds[norm.lower(), names[off]]
        assert (on, without) == (f"{all_on:.2f}", f"{one_off:.2f}")
        assert saved == f"{max(0, 1 - all_on / one_off):.0%}".removesuffix("%")


def test_own_network_on_a_cpu_is_that_of_the_record() -> None:
    rows = json.loads((ROOT / "docs" / "records" / "own-network-cpu.json").read_text())["rows"]
    times = {(r["case"]["mode"], r["case"]["layout"], r["case"]["norm"]): r["milliseconds"] for r in rows}
    for mode in ("eager", "compile"):
        ratios = [f"{times[mode, layout, 'cn'] / times[mode, layout, 'bn']:.2f}" for layout in ("nchw", "nhwc")]
        assert f"{' and '.join(ratios)} times" in " ".join(page.PAGE.read_text().split())
