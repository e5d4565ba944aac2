"""Runs of the evidence on one GPU, in stages: rates on validation tasks, then fresh seeds at the selected rates.

    python -m tools.evidence_runs --list
    timeout --signal=INT 540 python -m tools.evidence_runs STAGE --root DATA --runs FOLDER

A stage continues where it was: what is recorded, in the folder or in docs/records, is not run again, and a run that was
stopped by SIGINT continues at its last checkpoint. So a stage can be run in parts, with the folder kept between them.
Runs with running moments and a memory are also evaluated with moments of the memory. For an archive of the new records,
delete the archives that were copied to the folder, then `contnorm show --runs FOLDER --to FILE.jsonl.gz`.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from contnorm import bench
from contnorm.bench.api.arguments import resolve_run
from contnorm.bench.streams.tasks import STREAMS

RECORDS = Path(__file__).resolve().parents[1] / "docs" / "records"
CIFAR100, MINI, CIFAR10, TINY = "split-cifar100", "split-mini-imagenet", "split-cifar10", "split-tiny-imagenet"
NORMS, STRATEGIES = ("bn", "cn"), ("er", "derpp")
RATES = (0.003, 0.005, 0.01, 0.02, 0.03, 0.1)
FRESH = range(100, 116)
# Selected on the validation tasks of Split CIFAR-100, with both strategies.
CIFAR_RATES = {"bn": 0.005, "cn": 0.01}
RECIPE = {"train.batch": 10, "train.replay": 10, "memory.size": 50, "strategy.forward": "joint"}
VALIDATE, HOLD_OUT = {"stream.part": "validate"}, {"stream.holdout": 0.2}
# Seconds of one run, eight side by side on an H200: those of docs/records. Not recorded: COCOseq with ResNet-50.
SECONDS = {CIFAR100: 2.7, MINI: 10.0, CIFAR10: 15.3, TINY: 42.0, "cocoseq": 135.0}

Experiment = dict[str, Any]


def experiment(norm: str, strategy: str, lr: float | None = None, **settings: Any) -> Experiment:
    """Arguments of `bench.run`; without a rate, it is selected."""
    rate = {} if lr is None else {"lr": lr}
    return {"norm": norm, "strategy": strategy, **rate, "settings": {**settings, "train.precision": "tf32"}}


@dataclass(frozen=True)
class Stage:
    """Experiments on one stream.

    Attributes:
        what: What they are, in words.
        stream: Name of the stream.
        experiments: Arguments of `bench.run`; those without ``lr`` are run at the rate that trials select.
        seeds: Seeds of the experiments.
        rates: Learning rates of the trials.
        trials: Seeds of the trials.
        part: Settings of the trials, such as the validation tasks.
        moments: Evaluation by whose ACC a rate is selected.
        archives: Archives in docs/records with runs of the stage.
    """

    what: str
    stream: str
    experiments: Sequence[Experiment]
    seeds: range = FRESH
    rates: Sequence[float] = (0.003, 0.005, 0.01, 0.02, 0.03)
    trials: range = range(5)
    part: Mapping[str, Any] = field(default_factory=lambda: VALIDATE)
    moments: str = "running"
    archives: Sequence[str] = ()

    def trials_of(self, one: Experiment) -> dict[float, Experiment]:
        """The trials of an experiment, by rate; none if it has a rate."""
        settings = {**one["settings"], **self.part}
        return {} if "lr" in one else {rate: {**one, "lr": rate, "settings": settings} for rate in self.rates}

    def all_trials(self) -> list[Experiment]:
        return [trial for one in self.experiments for trial in self.trials_of(one).values()]

    def selected(self, stream: bench.Stream, runs: bench.Runs) -> Iterator[Experiment]:
        """The experiments with their rates, of equal means the smaller one; without, where no trial has all seeds."""
        by_run = runs.by_run()
        for one in self.experiments:
            means: dict[float, float] = {}
            for rate, trial in self.trials_of(one).items() if by_run else ():
                found = [run for run in by_run.get(hash_of(stream, trial), ()) if run.seed in self.trials]
                if len(found) == len(self.trials):  # none diverged
                    means[rate] = float(np.mean([run.evaluated[self.moments].scores()["acc"] for run in found]))
            yield {**one, "lr": max(means, key=lambda rate: means[rate])} if means else one


def grid(norms: Sequence[str], strategies: Sequence[str], *cases: Mapping[str, Any], **more: Any) -> list[Experiment]:
    """All combinations of norms, strategies and settings."""
    return [experiment(n, s, **{**case, **more}) for s, n, case in product(strategies, norms, cases or ({},))]


def readings(*strategies: str) -> list[Mapping[str, Any]]:
    """One or separate forward passes, one or two updates; ER's losses are summed if the passes are separate."""
    loss = {"strategy.loss": "sum"} if strategies == ("er",) else {}
    passes = ({"strategy.forward": "joint"}, {"strategy.forward": "separate", **loss})
    return [{**RECIPE, **one, **({} if n == 1 else {"train.updates": n})} for one, n in product(passes, (1, 2))]


def stages(model: str | None = None, weights: str | None = None) -> dict[str, Stage]:
    """All stages by name, in the order of their value; ``model`` and ``weights`` are those of pretrained networks."""
    mini = ("split-mini-imagenet-validation", "runs/split-mini-imagenet-fresh-seeds")
    tables = ["runs/split-cifar100-fresh-seeds", "runs/split-cifar100-fresh-seeds-more-tables"]
    tuned = [experiment(n, s, CIFAR_RATES[n], **RECIPE) for s, n in product(STRATEGIES, NORMS)]
    sizes = {500: (0.2, 0.5), 2560: (0.1, 1.0), 5120: (0.1, 1.0)}  # alpha and beta of DER++ in Tables 4 and 11
    cifar10 = [
        {"memory.size": size, "strategy.alpha": alpha, "strategy.beta": beta, "evaluate.ahead": True}
        for size, (alpha, beta) in sizes.items()
    ]
    network: Mapping[str, Any] = {} if model is None else {"model.name": model, "model.weights": weights}
    weight = {**RECIPE, "strategy.forward": "separate", "strategy.loss": "sum"}
    class_incremental = {**RECIPE, "stream.scenario": "class", "memory.kind": "reservoir", "memory.size": 1000}
    sizes_of_batches = [{**RECIPE, "train.batch": n, "train.replay": n} for n in (1, 4, 64)]
    three = ("bn", "cn", "gn_ws")
    return {
        "a1": Stage("tuned by running moments", MINI, grid(NORMS, STRATEGIES, RECIPE), rates=RATES, archives=mini),
        "a1-memory": Stage("tuned by moments of the memory", MINI, grid(NORMS, STRATEGIES, RECIPE), rates=RATES,
                           moments="memory", archives=mini),
        "a2": Stage("class order by seed", CIFAR100,
                    [{**one, "settings": {**one["settings"], "stream.class_order": "seed"}} for one in tuned],
                    range(100, 132), archives=["runs/split-cifar100-class-order"]),
        "a2-memory": Stage("tuned by moments of the memory", CIFAR100, grid(NORMS, STRATEGIES, RECIPE), rates=RATES,
                           moments="memory"),
        "a3": Stage("test tasks at all rates; nothing is selected", CIFAR100,
                    [experiment(n, s, lr, **RECIPE) for s, n, lr in product(STRATEGIES, NORMS, RATES)],
                    range(100, 108), archives=["split-cifar100-profile"]),
        "b1": Stage("readings of the protocol with the paper's norms, test tasks", CIFAR100,
                    [experiment(n, "er", lr, **case) for case, n, lr in
                     product(readings("er"), ("none", "bn", "gn", "cn"), (0.003, 0.01, 0.03, 0.1))],
                    range(100, 103), archives=tables),
        "b2-er": Stage("readings, ER, tuned", CIFAR100, grid(NORMS, ["er"], *readings("er")),
                       archives=[*tables, "split-cifar100-fine-grid", "split-cifar100-coarse-grid"]),
        "b2-derpp": Stage("readings, DER++, tuned", CIFAR100, grid(NORMS, ["derpp"], *readings("derpp")),
                          archives=[*tables, "split-cifar100-fine-grid", "split-cifar100-coarse-grid"]),
        "c-fixed": Stage("DER++, three memories, 0.03", CIFAR10, grid(NORMS, ["derpp"], *cifar10, lr=0.03)),
        "c-tuned": Stage("DER++, three memories, tuned", CIFAR10, grid(NORMS, ["derpp"], *cifar10),
                         rates=(0.01, 0.02, 0.03, 0.05, 0.1), trials=range(3), part=HOLD_OUT),
        "d": Stage("pretrained (--model, --weights), PRS and a reservoir of 2,000", "cocoseq",
                   [experiment(n, s, 1e-4, **network, **{"memory.size": 2000}) for s, n in
                    product(("prs", "crs"), NORMS)], range(100, 105)),
        "e-class": Stage("class-incremental, reservoir of 1,000, tuned", CIFAR100,
                         grid(three, ("er", "er-ace", "derpp"), class_incremental), trials=range(3)),
        "e-batch": Stage("batches of 1, 4 and 64, and replay of 50, tuned", CIFAR100,
                         grid(three, ["er"], *sizes_of_batches, {**RECIPE, "train.replay": 50}), trials=range(3)),
        "f": Stage("pretrained (--model, --weights): BN, frozen after a task, CN, GN; tuned", CIFAR100,
                   [*grid(("bn", "cn", "gn"), ["er"], {**RECIPE, **network}),
                    *grid(("bn",), ["er"], {**RECIPE, **network, "norm.freeze_after": 1})], range(100, 108)),
        "g-memory": Stage("tuned by running moments, with both matrices", CIFAR100, tuned),
        "g-momentum": Stage("running moments with a weight of 0.5, tuned", CIFAR100,
                            grid(NORMS, STRATEGIES, {**RECIPE, "norm.momentum": 0.5})),
        "g-iabn": Stage("IABN at its selected rates, with both matrices", CIFAR100,
                        [experiment("iabn", s, lr, **RECIPE) for s, lr in (("er", 0.01), ("derpp", 0.005))]),
        "g-table12": Stage("Table 12 with separate passes", CIFAR100,
                           [experiment("bn", "er", 0.03, **weight, **({} if m is None else {"norm.momentum": m}))
                            for m in ("cumulative", 0.01, 0.05, None, 0.5, 0.9)], range(100, 105)),
        "g-tiny": Stage("DER++, memory of 500, 0.03", TINY, grid(NORMS, ["derpp"], cifar10[0], lr=0.03)),
    }  # fmt: skip


def hash_of(stream: bench.Stream, one: Experiment) -> str:
    return resolve_run(stream, one, recorded=False).config.hash


def load_stream(stage: Stage, root: Path) -> bench.Stream:
    """The stream of a stage; its data set need not be there until it is used."""
    source = STREAMS[stage.stream].sources[:1]
    return bench.load_stream(stage.stream, root, allow_missing=True, **({"source": source[0]} if source else {}))


def restore(stage: Stage, folder: Path) -> None:
    """Copy the archives of a stage to the folder of its runs, so that they count as recorded."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in stage.archives:
        shutil.copy(RECORDS / f"{name}.jsonl.gz", folder)


def run(stage: Stage, stream: bench.Stream, folder: Path, **options: Any) -> None:
    """Run the trials of a stage that are missing, then its experiments."""
    restore(stage, folder)

    def execute(experiments: list[Experiment], seeds: range) -> None:
        try:
            bench.run_all(stream, experiments, seeds=seeds, runs=folder, memory_moments=True, **options)
        except bench.DivergedError as error:  # of one experiment; the others were run
            print(error, flush=True)

    if trials := stage.all_trials():
        execute(trials, stage.trials)
    chosen = list(stage.selected(stream, bench.load_runs(folder)))
    for one in chosen:
        print(one["norm"], one["strategy"], one.get("lr", "no rate finished with all seeds"), flush=True)
    execute([one for one in chosen if "lr" in one], stage.seeds)


def seconds_of(stage: Stage, one: Experiment) -> float:
    """Estimated seconds of a run on the GPU, from those of the recorded runs of its stream."""
    settings = one["settings"]
    steps: float = settings.get("train.updates", 1) * max(1.0, 10 / settings.get("train.batch", 10))
    separate = 1.3 if settings.get("strategy.forward") == "separate" and stage.stream == CIFAR100 else 1.0
    tasks = 0.18 if settings.get("stream.part") == "validate" else 1.0
    return SECONDS[stage.stream] * steps * separate * tasks


def missing(stage: Stage) -> tuple[int, int, float]:
    """Runs of a stage, how many of them docs/records has, and estimated minutes of the others."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        restore(stage, folder)
        stream, runs = load_stream(stage, folder), bench.load_runs(folder) if stage.archives else bench.Runs.of([])
        known = {run: {record.seed for record in found} for run, found in runs.by_run().items()}
        total, recorded, seconds = 0, 0, 0.0
        for experiments, seeds in ((stage.all_trials(), stage.trials), (stage.selected(stream, runs), stage.seeds)):
            for one in experiments:
                done = len(known.get(hash_of(stream, one), set()) & set(seeds)) if known and "lr" in one else 0
                total, recorded = total + len(seeds), recorded + done
                seconds += (len(seeds) - done) * seconds_of(stage, one)
    return total, recorded, seconds / 60


def missing_table() -> str:
    """What is not recorded, with its command and cost: a table of docs/records/README.md."""
    lines = ["| stage | stream | runs | recorded | minutes, about |", "|---|---|---|---|---|"]
    for name, stage in stages().items():
        total, recorded, minutes = missing(stage)
        lines.append(f"| `{name}`: {stage.what} | {stage.stream} | {total} | {recorded} | {minutes:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Run one stage, or list all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", nargs="?", choices=list(stages()))
    parser.add_argument("--list", action="store_true", help="list the stages, with what is recorded")
    parser.add_argument("--root", type=Path, help="folder of data sets")
    parser.add_argument("--runs", type=Path, help="folder of records and checkpoints")
    parser.add_argument("--seeds", type=int, help="number of seeds, from 100 on")
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", help="network, as FILE.py:NAME")
    parser.add_argument("--weights", help="file of its weights")
    parser.add_argument("--max-steps", type=int, help="smoke test: two rates, one trial, so many steps")
    args = parser.parse_args()
    if args.list:
        print(missing_table())
        return
    if None in (args.stage, args.root, args.runs):
        parser.error("a stage needs --root and --runs")
    stage = stages(args.model, args.weights)[args.stage]
    if args.seeds is not None:
        stage = replace(stage, seeds=range(100, 100 + args.seeds))
    if args.max_steps is not None:
        smoke = {"train.max_steps": args.max_steps}
        more = [{**one, "settings": {**one["settings"], **smoke}} for one in stage.experiments]
        stage = replace(stage, experiments=more, rates=stage.rates[:2], trials=range(1))
    logging.basicConfig(level=logging.WARNING)
    try:
        run(stage, load_stream(stage, args.root), args.runs, device=args.device, lanes=args.lanes)
    except KeyboardInterrupt as error:  # the runs are saved
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
