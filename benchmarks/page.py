"""Fill the tables of docs/benchmarks.md from the rows in benchmarks/results.

    python benchmarks/page.py

Text stands in the page; what lies between `<!-- rows: name -->` and `<!-- end -->` is written here.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
Row = dict[str, str]
LEAST_SHARE = {"train": 0.85, "eval": 1 / 1.2}
COLUMNS = [(dtype, layout) for dtype in ("fp32", "bf16") for layout in ("nchw", "nhwc")]


def rows(name: str) -> list[Row]:
    return list(csv.DictReader((RESULTS / f"{name}.csv").read_text().splitlines()))


def table(heads: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *lines])


def by_case(mode: str) -> dict[str, dict[tuple[str, str], dict[str, Row]]]:
    """shape -> (dtype, layout) -> layer -> row."""
    found: dict[str, dict[tuple[str, str], dict[str, Row]]] = {}
    for row in rows("layers"):
        if row["mode"] == mode:
            found.setdefault(row["shape"], {}).setdefault((row["dtype"], row["layout"]), {})[row["layer"]] = row
    return found


def layers(mode: str) -> str:
    """Microseconds of CN and of BN, and their ratio."""
    lines = []
    for shape, cases in by_case(mode).items():
        cells = []
        for column in COLUMNS:
            ours, bn = cases[column]["cn"], cases[column]["bn"]
            ratio = float(ours["over_bn"])
            shown = f"{float(ours['p50_us']):.1f} / {float(bn['p50_us']):.1f} = {ratio:.2f}"
            cells.append(f"**{shown}**" if ratio > (1.0 if mode == "train" else 1.1) else shown)
        lines.append([shape, *cells])
    return table(["shape", *(f"{dtype} {layout}" for dtype, layout in COLUMNS)], lines)


def stock() -> str:
    """The two stock calls over BN, for comparison."""
    lines = [
        [shape, *(f"{float(cases[c]['cn_stock']['over_bn']):.1f}" for c in COLUMNS)]
        for shape, cases in by_case("train").items()
    ]
    return table(["shape", *(f"{dtype} {layout}" for dtype, layout in COLUMNS)], lines)


def large() -> str:
    """Shares of the time a copy would take for the same passes, where tensors have 64 MB or more."""
    lines = []
    for mode in ("train", "eval"):
        for shape, cases in by_case(mode).items():
            n, c, h, w = map(int, shape.split("x"))
            for (dtype, layout), found in cases.items():
                if n * c * h * w * (4 if dtype == "fp32" else 2) >= 64 * 2**20:
                    ours, bn = (f"{100 * float(found[layer]['share_of_floor']):.0f} %" for layer in ("cn", "bn"))
                    missed = float(found["cn"]["share_of_floor"]) < LEAST_SHARE[mode]
                    lines.append([mode, shape, dtype, layout, f"**{ours}**" if missed else ours, bn])
    return table(["mode", "shape", "type", "layout", "CN", "BN"], lines)


STRATEGIES = {"er": "ER", "derpp": "DER++"}


def step() -> str:
    lines = []
    for row in rows("step"):
        exact = "yes" if row["deterministic"] == "True" else "no"
        task = f"{STRATEGIES[row['strategy']]}, {row['size']}x{row['size']}"
        cells = [task, row["norm"].upper(), row["stem"], row["precision"], row["lanes"], exact]
        lines.append([*cells, f"{float(row['p50_us']) / 1000:.3f}", row["contnorm"]])
    heads = [
        "step",
        "norm",
        "stem",
        "precision",
        "seeds side by side",
        "deterministic",
        "ms a step and seed",
        "version",
    ]
    return table(heads, lines)


PATHS = {"torch": "torch", "python": "Python", "cpp": "C++", "compiled": "torch.compile"}


def eager() -> str:
    """Milliseconds of an eager step, and their ratio to those of BN with the same batch."""
    found = rows("eager")
    bn = {row["batch"]: float(row["p50_us"]) for row in found if row["layer"] == "bn"}
    lines = []
    for row in found:
        ratio = float(row["p50_us"]) / bn[row["batch"]]
        cells = [row["batch"], row["layer"].upper(), PATHS[row["path"]], f"{float(row['p50_us']) / 1000:.2f}"]
        lines.append([*cells, f"{ratio:.2f}", f"{int(row['peak_bytes']) / 1e6:.1f}"])
    return table(["batch", "norm", "host path", "ms a step", "over BN", "peak memory, MB"], lines)


def host() -> str:
    """Microseconds of the host per layer."""
    by_case: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows("host"):
        by_case.setdefault((row["layer"], row["path"]), {})[row["direction"]] = float(row["p50_us"])
    lines = [
        [layer.upper(), PATHS[path], f"{us['forward']:.1f}", f"{us['backward']:.1f}", f"{sum(us.values()):.1f}"]
        for (layer, path), us in by_case.items()
    ]
    return table(["norm", "host path", "forward", "backward", "both"], lines)


RECIPES = {"": "", "table2": "Table 2: "}


def run() -> str:
    lines = [
        [r["stream"], RECIPES[r["recipe"]] + r["strategy"], r["norm"].upper(), r["seeds"], r["precision"], r["data"],
         r["kernels"], f"{float(r['seconds']):.1f}", r["contnorm"]]
        for r in rows("run")
    ]  # fmt: skip
    heads = ["stream", "strategy", "norm", "seeds", "precision", "images", "kernels", "seconds", "version"]
    return table(heads, lines)


def startup() -> str:
    lines = [
        [f"`{r['command']}`" if r["until"] == "end" else r["command"], r["until"], r["repeats"],
         f"{float(r['seconds']):.2f}", f"{float(r['least']):.2f}"]
        for r in rows("startup")
    ]  # fmt: skip
    return table(["command", "until", "repeats", "seconds, median", "least"], lines)


TABLES: dict[str, Callable[[], str]] = {
    "train": lambda: layers("train"),
    "eval": lambda: layers("eval"),
    "stock": stock,
    "large": large,
    "eager": eager,
    "host": host,
    "step": step,
    "run": run,
    "startup": startup,
}


def filled(page: str) -> str:
    """The page with its tables written anew."""

    def made(match: re.Match[str]) -> str:
        return f"<!-- rows: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- rows: (\w+) -->\n.*?<!-- end -->", made, page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
    print(f"wrote {PAGE.relative_to(ROOT)}")
