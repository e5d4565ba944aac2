"""Runs of the evidence on one GPU: rates on validation tasks, then fresh seeds at the selected rates.

    python tools/evidence_runs.py STAGE --root DATA --runs FOLDER [--seeds 16] [--lanes 8]

Stages: `mini-validate` and `mini-fresh` (Split mini-ImageNet, validation tasks and the other 17), `cifar-order` (Split
CIFAR-100 with a class order by seed) and `cifar-profile` (its test tasks at all rates; nothing is selected by it). All
runs are also evaluated with the moments of the replay memory. A stage that is interrupted continues where it was.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from contnorm import bench

NORMS, STRATEGIES = ("bn", "cn"), ("er", "derpp")
RATES = (0.003, 0.005, 0.01, 0.02, 0.03, 0.1)
VALIDATION_SEEDS, FRESH_SEED = 5, 100
# Selected on the validation tasks of Split CIFAR-100, with both strategies.
CIFAR_RATES = {"bn": 0.005, "cn": 0.01}
RECIPE: dict[str, Any] = {"train.batch": 10, "train.replay": 10, "memory.size": 50, "strategy.forward": "joint",
                          "train.precision": "tf32"}  # fmt: skip


def experiment(norm: str, strategy: str, lr: float, **settings: Any) -> dict[str, Any]:
    """Return the arguments of one experiment."""
    return {"norm": norm, "strategy": strategy, "lr": lr, "settings": {**RECIPE, **settings}}


def selected_rates(runs: Path) -> dict[tuple[str, str], float]:
    """Return the rate with the highest mean ACC on the validation tasks, by strategy and norm."""
    scores: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in bench.load_runs(runs).records:
        config = record.config
        if config.stream.name == "split-mini-imagenet" and config.stream.part == "validate":
            value = record.scores["acc"] if record.status == "finished" else float("-inf")
            scores[config.strategy.name, config.norm.name][config.train.lr].append(value)
    for place, by_rate in sorted(scores.items()):
        row = "  ".join(
            f"{lr:g}: {np.mean(v):.2f} ({np.std(v, ddof=1):.2f}, {len(v)})" for lr, v in sorted(by_rate.items())
        )
        print(*place, row, flush=True)
    return {
        place: max(sorted(by_rate), key=lambda lr: float(np.mean(by_rate[lr]))) for place, by_rate in scores.items()
    }


def main() -> None:
    """Run one stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("mini-validate", "mini-fresh", "cifar-order", "cifar-profile"))
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--max-steps", type=int)
    args = parser.parse_args()
    cells = [(norm, strategy) for strategy in STRATEGIES for norm in NORMS]
    more = {} if args.max_steps is None else {"train.max_steps": args.max_steps}
    fresh = range(FRESH_SEED, FRESH_SEED + args.seeds)
    stream = "split-mini-imagenet" if args.stage.startswith("mini") else "split-cifar100"
    if args.stage == "mini-validate":
        seeds, more = range(VALIDATION_SEEDS), {**more, "stream.part": "validate"}
        experiments = [experiment(*cell, lr, **more) for cell in cells for lr in RATES]
    elif args.stage == "mini-fresh":
        seeds, rates = fresh, selected_rates(args.runs)
        experiments = [experiment(norm, strategy, rates[strategy, norm], **more) for norm, strategy in cells]
    elif args.stage == "cifar-order":
        seeds, more = fresh, {**more, "stream.class_order": "seed"}
        experiments = [experiment(norm, strategy, CIFAR_RATES[norm], **more) for norm, strategy in cells]
    else:
        seeds = range(FRESH_SEED, FRESH_SEED + 8)
        experiments = [experiment(*cell, lr, **more) for cell in cells for lr in RATES]
    bench.run_all(bench.load_stream(stream, root=args.root), experiments, seeds=seeds, runs=args.runs,
                  device=args.device, lanes=args.lanes, memory_moments=True)  # fmt: skip


if __name__ == "__main__":
    main()
