"""The table of results and the line about speed of the README, from the records."""

from __future__ import annotations

import csv
from statistics import fmean

from contnorm.bench.stats import PairedDifference
from tools.comparisons import (
    GRID,
    HIGH_RATES,
    MEMORY,
    NAMES,
    RIVALS,
    STRATEGIES,
    against,
    forgetting_of_others,
    over_rates,
    rival,
    selected,
    table2,
)
from tools.doc_figures import layer_ratios
from tools.evidence import RECORDS, Cell, plain

__all__ = ["results_table", "speed_line"]

ROOT = RECORDS.parents[1]
TUNED = {
    "equivalent": "CN and BN are equivalent",
    "lower": "BN is better than CN",
    "lower, within the margin": "BN is slightly better than CN",
    "higher": "CN is better than BN",
    "higher, within the margin": "CN is slightly better than BN",
    "undecided": "undecided",
}


def _row(*columns: str) -> str:
    return f"| {' | '.join(columns)} |"


def _excludes_zero(pair: PairedDifference) -> bool:
    return pair.t is not None and not pair.t.holds(0.0)


def _tuned(strategy: str) -> str:
    decision = table2("cn", "bn", strategy)
    return _row(
        f"{NAMES[strategy]}, learning rate tuned for each norm",
        TUNED[decision.verdict],
        f"CN - BN: {decision.mean:+.2f} points ({decision.interval}, {decision.seeds} seeds)",
    )


def _mean_over_rates(norm: str, strategy: str) -> float:
    return fmean(Cell(GRID, {"norm": norm, "strategy": strategy, "lr": rate}).mean() for rate in HIGH_RATES)


def _high_rate(strategy: str) -> str:
    pair = over_rates("cn", "bn", strategy)
    above = "CN" if pair.mean > 0 else "BN"
    means = ", ".join(f"{norm.upper()} {_mean_over_rates(norm, strategy):.1f}" for norm in ("cn", "bn"))
    return _row(
        f"{NAMES[strategy]}, learning rate too high ({HIGH_RATES[0]:g} to {HIGH_RATES[-1]:g})",
        f"{above} is better (exploratory)" if _excludes_zero(pair) else f"{above} has the higher mean",
        f"{means} percent; CN - BN: {pair.mean:+.2f} points (95 %: {pair.t}, {len(pair.differences)} seeds)",
    )


def _forgetting() -> str:
    decisions = forgetting_of_others()
    less = all(one.verdict == "higher" for one in decisions.values())
    more = ", ".join(f"{norm} - GN: {one.mean:+.2f} ({one.interval})" for norm, one in decisions.items())
    return _row(
        "no replay",
        "GN forgets less than BN and CN" if less else "undecided which norm forgets least",
        f"points of forgetting: {more}; {decisions['BN'].seeds} seeds",
    )


def _has_highest_mean(strategy: str) -> bool:
    """Whether BN with moments of the memory has the highest mean of the panel, and a higher one than BN and CN."""
    means = {entry: rival(entry, strategy).mean() for entry in RIVALS}
    pairs = [plain(rival(MEMORY, strategy), selected(other, strategy)) for other in ("bn", "cn")]
    return means[MEMORY] == max(means.values()) and all(pair.mean > 0 for pair in pairs)


def _memory_moments(strategy: str) -> str:
    memory = rival(MEMORY, strategy)
    parts = []
    for other in ("BN", "CN"):
        pair = plain(memory, selected(other.lower(), strategy))
        parts.append(f"{pair.mean:+.2f} points over {other} ({against(MEMORY, other, strategy).verdict})")
    return _row(
        f"{NAMES[strategy]}, BN evaluated with moments of the memory",
        "it has the highest mean of all norms" if _has_highest_mean(strategy) else "no gain in the mean",
        f"{', '.join(parts)}; {len(memory.scores())} seeds",
    )


def _newer_norms() -> str:
    newer = [entry for entry, where in RIVALS.items() if where["norm"] != "bn"]
    above = [
        entry
        for entry in newer
        if any(against(entry, "BN", strategy).verdict.startswith("higher") for strategy in STRATEGIES)
    ]
    seeds = sorted({len(rival(entry, strategy).scores()) for entry in newer for strategy in STRATEGIES})
    return _row(
        f"{len(newer)} newer norms, ER and DER++",
        f"above BN: {', '.join(above)}" if above else "none is shown to be above BN",
        f"each with {' or '.join(map(str, seeds))} seeds",
    )


def results_table() -> str:
    """What was found on Split CIFAR-100, one row for each question."""
    rows = [
        _row("on Split CIFAR-100", "result", "evidence"),
        "|---|---|---|",
        *(_tuned(strategy) for strategy in STRATEGIES),
        *(_high_rate(strategy) for strategy in STRATEGIES),
        _forgetting(),
        *(_memory_moments(strategy) for strategy in STRATEGIES),
        _newer_norms(),
    ]
    return "\n".join(rows)


def eager_ratios(path: str) -> list[float]:
    """Time of a training step with CN over that with BN in an eager loop, for each batch size."""
    rows = list(csv.DictReader((ROOT / "benchmarks" / "results" / "eager.csv").read_text().splitlines()))
    times = {(row["layer"], row["path"], row["batch"]): float(row["p50_us"]) for row in rows}
    return [times["cn", path, batch] / times["bn", "torch", batch] for batch in sorted({row["batch"] for row in rows})]


def speed_line() -> str:
    """Speed of CN compared with that of BN."""
    ratios = [ratio for by_case in layer_ratios().values() for ratio in by_case.values()]
    slowest, without = max(eager_ratios("cpp")), max(eager_ratios("python"))
    faster = sum(ratio < 1 for ratio in ratios)
    return (
        f"**Speed** on one H200: in a CUDA graph, CN is faster than BN in {faster} of {len(ratios)} cases.\n"
        f"In an eager loop, a training step with CN takes up to {slowest:.2f} times as long as with BN; without a C++\n"
        f"compiler, up to {without:.1f} times.\n"
        "See the [benchmarks](docs/benchmarks.md)."
    )
