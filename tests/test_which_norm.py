"""docs/which-norm.md: each of its statements has one check, with the numbers and verdicts of the records.

A statement is a heading, a sentence or a row of a table. `facts` has the expected text of every statement that says
something about runs, with numbers from the archives, and whether the records support its words. `PLAIN` lists the
others. To extend the page, add the statement to both; to update it after new records, copy the texts that the tests
print.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest

from contnorm.bench.sequential import ALPHA, FIRST_SEED, MARGIN, STAGES, Decision
from contnorm.bench.spread import spread_ratio
from contnorm.bench.stats import PairedDifference, paired_difference
from contnorm.paper.comparisons import count_comparisons
from contnorm.paper.published import find
from contnorm.paper.recipe import find_recipe
from tests.evidence import RECORDS, Cell, load, plain, staged

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = (DOCS / "which-norm.md").read_text()

# Archives in docs/records.
FRESH = "runs/split-cifar100-fresh-seeds.jsonl.gz"
MORE = "runs/split-cifar100-fresh-seeds-more-tables.jsonl.gz"
GRID = "split-cifar100-coarse-grid.jsonl.gz"
FINE_GRID = "split-cifar100-fine-grid.jsonl.gz"
CIFAR10 = "split-cifar10-more-seeds.jsonl.gz"
MINI = "runs/split-mini-imagenet.jsonl.gz"
TINY = "runs/split-tiny-imagenet.jsonl.gz"
COCOSEQ = "cocoseq-mini.jsonl.gz"
TABLES = "runs/tables.jsonl.gz"

NAMES = {"er": "ER", "derpp": "DER++", "single": "none", "prs": "PRS", "crs": "CRS (reservoir)"}
STREAMS = {
    "split-cifar100": "Split CIFAR-100",
    "split-cifar10": "Split CIFAR-10",
    "split-mini-imagenet": "Split mini-ImageNet",
    "split-tiny-imagenet": "Split Tiny-ImageNet",
    "cocoseq": "part of COCOseq",
}
HIGH_RATES = (0.01, 0.03, 0.1, 0.3)
TITLES = {"CN": "cn", "BN": "bn", "BRN": "brn", "GN": "gn", "SN": "sn", "IN": "in", "no norm": "none"}


class Statement(NamedTuple):
    """Expected text of a statement, and whether the records support its words."""

    text: str
    holds: bool = True


# Statements without a fact about runs: headings, definitions and instructions.
PLAIN = {
    "Which norm, when",
    "How to read this page",
    "The answer",
    "What contradicts the paper",
    "Where our means differ from the paper, undecided",
    "What agrees with the paper",
    "The panel: each norm at its selected learning rate",
    "Its intervals differ from those above, because the error rate is divided over its own comparisons.",
    "If BN is kept",
    "Stability over seeds",
    "What is not known",
    "Undecided claims",
    "The least favourable case is the one that supports the claim least.",
    "| claim | table | evidence | least favourable case | to decide it |",
    "| replay | stream | task | batch | learning rate | forward | pretrained | use | evidence | not known | records |",
    "A difference is the accuracy of the first norm less that of the second, paired over seeds.",
    "ACC is the mean accuracy over all tasks at the end, FM the forgetting and LA the accuracy right after learning, "
    "all in points of a percent.",
    "The verdict *higher* or *lower* means that the interval excludes zero, *equivalent* that it lies within the "
    "margin and contains zero, *undecided* anything else.",
    "Intervals that are marked with 95 % are ordinary ones (Student's t), without a correction for the number of "
    "comparisons or for repeated looks; they are exploratory and give no verdict.",
    "The tables behind each number are in [the results](results/README.md), and how the runs were made is in "
    "[the records](records/README.md).",
    "Every statement of this page is held to the records by a test.",
}


def statements(page: str) -> Iterator[str]:
    """Headings, sentences and table rows of a page, without Markdown's line breaks."""
    for block in re.split(r"\n\s*\n", page.strip()):
        lines = block.splitlines()
        if lines[0].startswith("|"):
            yield from (line.strip() for line in lines if not re.fullmatch(r"[|\-: ]+", line))
        elif lines[0].startswith("#"):
            yield from (line.lstrip("# ") for line in lines)
        else:
            for item in re.split(r"(?:^|\n)- ", block):
                text = " ".join(item.split())
                yield from filter(None, re.split(r"(?<=[.?!])\s+(?=[A-Z`*\[])", text))


def cases(table: str) -> int:
    return count_comparisons(find_recipe(table))


def number(decision: Decision) -> str:
    """A staged decision as text, with its verdict."""
    if decision.interval is None:
        return f"{decision.seeds} seeds, {decision.verdict}"
    diverged = f" with {decision.diverged} diverged" if decision.diverged else ""
    return f"{decision.mean:+.2f} ({decision.interval}; {decision.seeds} seeds{diverged}): {decision.verdict}"


def exploratory(pair: PairedDifference) -> str:
    """An ordinary interval as text, without a verdict."""
    return f"{pair.mean:+.2f} (95 %: {pair.t}; {len(pair.differences)} seeds)"


def excludes_zero(pair: PairedDifference) -> bool:
    return pair.t is not None and not pair.t.holds(0.0)


def selected(norm: str, strategy: str, **where: Any) -> Cell:
    """A norm at its selected learning rate, with fresh seeds."""
    schedule = {"schedule": where.pop("schedule", "published")} if norm == "brn" else {}
    return Cell(FRESH, {"norm": norm, "strategy": strategy, **schedule, **where})


def recipe(norm: str, strategy: str = "er", tasks: int | None = None, **where: Any) -> Cell:
    """A norm at the learning rate of the recipes, with fresh seeds."""
    weight = {"momentum": None} if norm == "bn" else {}
    return Cell(MORE, {"norm": norm, "strategy": strategy, "tasks": tasks, **weight, **where})


def table2(first: str, second: str, strategy: str, score: str = "acc", **where: Any) -> Decision:
    return staged(selected(first, strategy), selected(second, strategy, **where), cases("table2"), score)


def row(cells: list[Cell], rate: str, use: str, evidence: str, open_question: str) -> str:
    """A row of the answer; the situation and the records are those of the cells."""
    configs = [record.config for cell in cells for record in cell.runs()]

    def only(value: Callable[[Any], Any]) -> Any:
        """The value that all runs have."""
        (found,) = {value(config) for config in configs}
        return found

    strategy, scenario = only(lambda c: c.strategy.name), only(lambda c: c.stream.scenario)
    (known,) = {scenario == "task" or cell.matrix == "matrix_task" for cell in cells}
    batch, replay = only(lambda c: c.train.batch), only(lambda c: c.train.replay)
    without = strategy == "single"
    archives = dict.fromkeys(cell.archive for cell in cells)
    return "| {} |".format(
        " | ".join(
            [
                "none" if without else NAMES[strategy],
                STREAMS[only(lambda c: c.stream.name)],
                "known" if known else "unknown",
                str(batch) if without else f"{batch} + {replay}",
                rate,
                "-" if without else only(lambda c: c.strategy.forward),
                "no" if only(lambda c: c.model.weights) is None else "yes",
                use,
                evidence,
                open_question,
                ", ".join(f"[{Path(name).name.partition('.')[0]}](records/{name})" for name in archives),
            ]
        )
    )


def rates_of(cell: Cell) -> str:
    """Learning rates of the runs, as text."""
    return " and ".join(f"{rate:g}" for rate in sorted({record.config.train.lr for record in cell.runs()}))


def over_rates(first: str, second: str, strategy: str) -> PairedDifference:
    """Difference on the validation tasks, averaged for each seed over the learning rates that are high for BN."""
    a, b = (
        [Cell(GRID, {"norm": norm, "strategy": strategy, "lr": rate}).scores() for rate in HIGH_RATES]
        for norm in (first, second)
    )
    mean_a, mean_b = ({seed: fmean(scores[seed] for scores in by_rate) for seed in by_rate[0]} for by_rate in (a, b))
    pair = paired_difference(mean_a, mean_b)
    assert pair is not None
    return pair


class ClaimRow(NamedTuple):
    """A row of the page of claims that the report writes."""

    outcome: str
    claim: str
    score: str
    table: str
    evidence: str
    cases: str
    least_favourable: str


def claims() -> list[ClaimRow]:
    """The claims of the paper with their outcomes."""
    lines = (DOCS / "results" / "claims.md").read_text().splitlines()
    rows = [ClaimRow(*line.strip("| ").split(" | ")) for line in lines if line.startswith("| ")]
    assert rows[0].outcome == "outcome" and rows[0].evidence == "evidence"
    return [row for row in rows[1:] if row.table.startswith(("[Table", "[Figure"))]  # without questions of our own


def outcomes() -> Counter[str]:
    """Number of the claims by outcome."""
    return Counter(row.outcome.partition(",")[0] for row in claims())


def undecided_claims() -> dict[str, Statement]:
    """A row for each undecided claim: its least favourable case, and what would decide it."""
    found = {}
    for number, row in enumerate(row for row in claims() if row.outcome.startswith("undecided")):
        case, _, needs = row.least_favourable.partition("; ")
        lacks = needs.removesuffix(", with this mean and spread") or "no fresh seeds were run"
        table = row.table.replace("](", "](results/")
        found[str(number)] = Statement(
            f"| {row.claim} ({row.score}) | {table} | {row.evidence} | {case} | {lacks} |",
            bool(needs) or row.evidence.startswith("exploratory"),
        )
    return found


def introduction() -> dict[str, Statement]:
    count = outcomes()
    stages = ", ".join(map(str, STAGES))
    er, derpp = (table2("cn", "bn", strategy) for strategy in ("er", "derpp"))
    return {
        "undecided": Statement(
            f"**{count['undecided']} of {count.total()} claims of the paper are undecided** by our runs; with five "
            "seeds of each run it was 21 of 37."
        ),
        "outcomes": Statement(
            f"Of the others, {count['holds']} hold, {count['does not hold']} do not, {count['holds in part']} hold in "
            f"part and {count['equivalent']} are equivalent within the margin ([claims](results/claims.md))."
        ),
        "selected": Statement(
            "**With replay and a learning rate that is selected for each norm, use BN**: CN is equivalent to it with "
            "ER and lower with DER++.",
            er.verdict == "equivalent" and derpp.verdict.startswith("lower"),
        ),
        "high": Statement(
            "**With replay and a learning rate that may be too high, use CN**: it is higher than BN on the validation "
            "tasks.",
            excludes_zero(over_rates("cn", "bn", "er")) and over_rates("cn", "bn", "derpp").mean > 0,
        ),
        "without": Statement(
            "**Without replay, use GN if little forgetting matters most**: it forgets less than BN and CN.",
            without_replay()["single"].holds,
        ),
        "rule": Statement(
            f"Verdicts use seeds from {FIRST_SEED} on, which no setting was chosen with, in stages of {stages} seeds; "
            f"all verdicts of a table together are wrong with a probability of at most {100 * ALPHA:g} %, over "
            "all stages."
        ),
        "margin": Statement(f"The margin is {MARGIN:g} point."),
        "late rule": Statement(
            "This rule was fixed when 32 seeds of Table 2 were known, by their 95 % intervals; the stages of 8, 16 and "
            "32 seeds were computed afterwards.",
        ),
    }


def answer() -> dict[str, Statement]:
    return {**with_replay(), **larger_batches(), **without_replay(), **other_streams()}


def with_replay() -> dict[str, Statement]:
    found = {}
    for strategy, use, supported in (
        ("er", "BN or CN", ("equivalent",)),
        ("derpp", "BN", ("lower", "lower, within the margin")),
    ):
        cells = [selected(norm, strategy) for norm in ("cn", "bn")]
        rates = " and ".join(f"{rates_of(cell)} ({cell.where['norm'].upper()})" for cell in cells)
        decision = table2("cn", "bn", strategy)
        found[strategy] = Statement(
            row(
                cells,
                f"selected: {rates}",
                use,
                f"CN less BN {number(decision)}",
                "whether it is the same on other streams with selected rates",
            ),
            decision.verdict in supported,
        )
        grid = [Cell(GRID, {"norm": n, "strategy": strategy, "lr": r}) for n in ("cn", "bn") for r in HIGH_RATES]
        pair = over_rates("cn", "bn", strategy)
        found[f"{strategy} high rate"] = Statement(
            row(
                grid,
                "not tuned: " + ", ".join(map(str, HIGH_RATES)),
                "CN" if excludes_zero(pair) else "CN, by its mean",
                f"mean over these rates on the validation tasks: CN less BN {exploratory(pair)}",
                "a verdict: few seeds, and validation tasks only",
            ),
            pair.mean > 0,
        )
    for tasks, words in ((None, "17 tasks"), (4, "four tasks")):
        cells = [recipe("cn", tasks=tasks), bn_4("matrix_running") if tasks else recipe("bn")]
        decision = staged(*cells, cases("table9"))
        found[words] = Statement(
            row(
                cells,
                "not tuned: 0.03",
                "no preference",
                f"{words}: CN less BN {number(decision)}",
                "the sign of the difference",
            ),
            decision.verdict == "undecided",
        )
    return found


def bn_4(matrix: str) -> Cell:
    """BN on four tasks: with running moments, or with exact ones (``"matrix"``)."""
    return Cell(MORE, {"norm": "bn", "strategy": "er", "tasks": 4, "evaluate.moments": "oracle"}, matrix)


def larger_batches() -> dict[str, Statement]:
    found = {}
    for size in (500, 2560):
        for matrix in ("matrix", "matrix_task"):
            cells = [Cell(CIFAR10, {"norm": norm, "buffer": size}, matrix) for norm in ("cn", "bn")]
            pair = plain(*cells)
            found[f"cifar10 {size} {matrix}"] = Statement(
                row(
                    cells,
                    "not tuned: 0.03",
                    "CN" if size == 2560 else "no preference",
                    f"memory of {size:,}: CN less BN {exploratory(pair)}",
                    "the effect of a selected rate",
                ),
                (pair.mean > 0 and excludes_zero(pair)) == (size == 2560),
            )
    for matrix in ("matrix", "matrix_task"):
        cells = [Cell(TINY, {"norm": norm}, matrix) for norm in ("cn", "bn")]
        pair = plain(*cells)
        found[f"tiny {matrix}"] = Statement(
            row(
                cells,
                "not tuned: 0.03",
                "no preference",
                f"memory of 500: CN less BN {exploratory(pair)}",
                "the sign of the difference, and other memory sizes",
            ),
            not excludes_zero(pair),
        )
    return found


def without_replay() -> dict[str, Statement]:
    gn, bn, cn = (recipe(norm, "single") for norm in ("gn", "bn", "cn"))
    forgetting = [staged(cell, gn, cases("table10"), "fm") for cell in (bn, cn)]
    acc, gain = staged(cn, bn, cases("table10")), plain(gn, bn)
    return {
        "single": Statement(
            row(
                [gn, bn, cn],
                "not tuned: 0.03",
                "GN for least forgetting; no preference for ACC",
                f"FM of BN less GN {number(forgetting[0])}; FM of CN less GN {number(forgetting[1])}; ACC of CN less "
                f"BN {number(acc)}; ACC of GN less BN {exploratory(gain)}",
                "the effect of a selected rate",
            ),
            {one.verdict for one in forgetting} == {"higher"} and not acc.is_decided and not excludes_zero(gain),
        ),
    }


def other_streams() -> dict[str, Statement]:
    cn = Cell(MINI, {"norm": "cn", "lr": 0.03})
    bn = {rate: Cell(MINI, {"norm": "bn", "lr": rate}) for rate in (0.03, 0.01)}
    mini = {rate: plain(cn, cell) for rate, cell in bn.items()}
    found = {
        "mini": Statement(
            row(
                [cn, *bn.values()],
                "chosen on test tasks: 0.03 (CN), 0.03 and 0.01 (BN)",
                "no preference",
                "; ".join(f"CN less BN at {rate} {exploratory(pair)}" for rate, pair in mini.items()),
                "the sign of the difference, and rates selected on validation tasks",
            ),
            not any(map(excludes_zero, mini.values())),
        )
    }
    for memory in ("prs", "reservoir"):
        cells = [Cell(COCOSEQ, {"norm": norm, "memory": memory}) for norm in ("cn", "bn")]
        pair = plain(*cells, "map")
        found[f"cocoseq {memory}"] = Statement(
            row(
                cells,
                f"not tuned: {rates_of(cells[0])}",
                "no preference",
                f"several labels per image: mAP of CN less BN {exploratory(pair)}",
                "the complete COCOseq",
            ),
            not excludes_zero(pair),
        )
    found["pretrained"] = Statement(
        "| any | any | any | any | any | any | yes | no recommendation | none | everything: no pretrained network was "
        "run | none |",
        all(config.model.weights is None for config in all_configs()),
    )
    return found


@cache
def all_configs() -> list[Any]:
    """Settings of all recorded runs."""
    archives = [path.relative_to(RECORDS) for path in RECORDS.rglob("*.jsonl.gz")]
    return [record.config for archive in archives for record in load(str(archive))]


def contradictions() -> dict[str, Statement]:
    er, derpp = (table2("cn", "bn", strategy) for strategy in ("er", "derpp"))
    tiny = plain(*(Cell(TINY, {"norm": norm}) for norm in ("cn", "bn")), "fm")
    return {
        "main": Statement(
            "The main claim, that CN has the best ACC of all norms, does not hold on Split CIFAR-100 with a learning "
            f"rate selected for each norm: with DER++, where the paper has CN {published_gain('derpp'):.2f} points "
            f"above BN, CN less BN is {number(derpp)}.",
            derpp.verdict.startswith("lower"),
        ),
        "er": Statement(
            f"With ER, where the paper has CN {published_gain('er'):.2f} points above BN, CN less BN is {number(er)}.",
            er.verdict == "equivalent",
        ),
        "untuned": Statement(
            "The paper does not report learning rates by norm; its BN with ER has "
            f"{published('er', 'bn'):.1f}, ours {BN_UNTUNED.mean():.1f} at 0.03 and {selected('bn', 'er').mean():.1f} "
            "at the selected rate, so that its BN may not have been tuned as far as its CN.",
            abs(published("er", "bn") - BN_UNTUNED.mean()) < abs(published("er", "bn") - selected("bn", "er").mean()),
        ),
        "tiny": Statement(
            "On Split Tiny-ImageNet, class-incrementally, CN forgets more than BN in these five seeds, not less: FM of "
            f"CN less BN {exploratory(tiny)}.",
            tiny.mean > 0 and excludes_zero(tiny),
        ),
    }


def open_differences() -> dict[str, Statement]:
    """Undecided cases in which our mean is far from the paper's, or of the other sign."""
    variants = {norm: (recipe("cn"), recipe(norm)) for norm in VARIANTS}
    single = recipe("cn", "single"), recipe("bn", "single")
    decisions = [staged(*cells, cases("table8")) for cells in variants.values()]
    return {
        "variants": Statement(
            "The paper has CN above its variants on Split mini-ImageNet; on Split CIFAR-100 it has the lowest mean: CN "
            "less "
            + "; less ".join(f"`{norm}` {number(staged(*cells, cases('table8')))}" for norm, cells in variants.items())
            + ".",
            all(decision.mean < 0 and not decision.is_decided for decision in decisions),
        ),
        "single": Statement(
            f"Without replay, the paper has CN {published_gain('single', '10'):.2f} points above BN; ours is "
            f"{number(staged(*single, cases('table10')))}.",
            staged(*single, cases("table10")).mean < 0,
        ),
    }


def agreements() -> dict[str, Statement]:
    found = {}
    for strategy in ("er", "derpp"):
        against = {
            name: table2("cn", norm, strategy) for name, norm in TITLES.items() if norm not in ("cn", "bn", "brn")
        }
        found[f"others {strategy}"] = Statement(
            f"With {NAMES[strategy]}, CN is higher than other norms: CN less "
            + ", less ".join(f"{name} {number(decision)}" for name, decision in against.items())
            + ".",
            all(decision.verdict == "higher" for decision in against.values()),
        )
        brn = table2("bn", "brn", strategy)
        found[f"brn {strategy}"] = Statement(
            f"With {NAMES[strategy]}, BRN with its published limits is below BN: BN less BRN {number(brn)}.",
            brn.verdict == "higher",
        )
        fm = table2("bn", "gn", strategy, "fm")
        found[f"fm {strategy}"] = Statement(
            f"With {NAMES[strategy]}, GN forgets less than BN: FM of BN less GN {number(fm)}.", fm.verdict == "higher"
        )
        la = table2("bn", "gn", strategy, "la")
        found[f"la {strategy}"] = Statement(
            f"With {NAMES[strategy]}, BN learns new tasks better than GN: LA of BN less GN {number(la)}.",
            la.verdict == "higher",
        )
    fm_bn, fm_cn = (staged(recipe(n, "single"), recipe("gn", "single"), cases("table10"), "fm") for n in ("bn", "cn"))
    found["fm single"] = Statement(
        f"Without replay, GN forgets less than BN and than CN: FM less that of GN {number(fm_bn)} and {number(fm_cn)}.",
        fm_bn.verdict == fm_cn.verdict == "higher",
    )
    agree, of = re.search(r"Of (\d+) numbers: (\d+) agree", (DOCS / "results" / "table4.md").read_text()).groups()[::-1]
    found["table 4"] = Statement(
        f"Of the {of} numbers of Table 4 that were run, at the one learning rate of its protocol, {agree} agree with "
        "the published ones."
    )
    return found


def panel() -> dict[str, Statement]:
    """BN compared with all other norms that were run at selected rates; cases of the recipe `panel`."""
    found = {}
    for strategy in ("er", "derpp"):
        bn = selected("bn", strategy)
        others = {name: selected(norm, strategy) for name, norm in TITLES.items() if norm != "bn"}
        others["BRN with scaled limits"] = selected("brn", strategy, schedule="scaled")
        decisions = {name: staged(bn, cell, cases("panel")) for name, cell in others.items()}
        found[strategy] = Statement(
            f"With {NAMES[strategy]}: BN less "
            + "; less ".join(f"{name} {number(decision)}" for name, decision in decisions.items())
            + "."
        )
        found[f"{strategy} highest"] = Statement(
            f"No norm is shown to be above BN with {NAMES[strategy]}.",
            not any(decision.verdict.startswith("lower") for decision in decisions.values()),
        )
    return found


def bn_settings() -> dict[str, Statement]:
    own, cumulative = recipe("bn"), plain(recipe("bn"), recipe("bn", momentum="cumulative"))
    weights = {weight: number(staged(own, recipe("bn", momentum=weight), cases("table12"))) for weight in WEIGHTS}
    half = staged(own, recipe("bn", momentum=0.5), cases("table12"))
    exact = staged(bn_4("matrix"), bn_4("matrix_running"), cases("table9"))
    return {
        "cumulative": Statement(
            "Do not use a cumulative average of the moments: at 0.03, BN with its weight of 0.1 less BN with a "
            f"cumulative average is {exploratory(cumulative)}.",
            cumulative.mean > 0 and excludes_zero(cumulative),
        ),
        "weights": Statement(
            "The paper's claim that a weight of 0.1 is best is not decided: BN with 0.1 less BN with another weight is "
            + "; ".join(f"for {weight} {text}" for weight, text in weights.items())
            + ".",
            not half.is_decided and half.mean < 0,
        ),
        "exact": Statement(
            "Exact moments of all past data, which are not available in practice, less running ones on four tasks: "
            f"{number(exact)}.",
        ),
    }


def stability() -> dict[str, Statement]:
    found = {}
    for strategy, expected in (("er", "larger"), ("derpp", "undecided")):
        bn, cn = (selected(norm, strategy).scores() for norm in ("bn", "cn"))
        spread = spread_ratio(bn, cn)
        found[strategy] = Statement(
            f"With {NAMES[strategy]}, the mean absolute deviation of ACC over {spread.seeds} seeds is "
            f"{spread.deviation.value:.2f} times as large with BN as with CN (95 % by bootstrap: "
            f"{spread.deviation.interval.low:.2f} to {spread.deviation.interval.high:.2f}), and without the "
            f"{spread.extremes} lowest and highest seeds of each {spread.deviation_without_extremes.value:.2f} times "
            f"({spread.deviation_without_extremes.interval.low:.2f} to "
            f"{spread.deviation_without_extremes.interval.high:.2f}): {spread.verdict}.",
            spread.verdict == expected,
        )
    return found


def unknown() -> dict[str, Statement]:
    configs = all_configs()
    sizes = {(c.train.batch, c.train.replay if c.strategy.name != "single" else 0) for c in configs}
    scaled = {
        strategy: number(
            staged(selected("bn", strategy), selected("brn", strategy, schedule="scaled"), cases("table2"))
        )
        for strategy in ("er", "derpp")
    }
    return {
        "batch": Statement(
            "*Batch size.* The runs had 10 stream samples without replay, 10 with 10 of the memory, and 32 with 32.",
            sizes == {(10, 0), (10, 10), (32, 32)},
        ),
        "forward": Statement(
            "*Joint or separate forward passes.* No stream was run with both, so that their effect is not known.",
            all(
                len({c.strategy.forward for c in configs if c.stream.name == stream and c.strategy.name != "single"})
                <= 1
                for stream in {c.stream.name for c in configs}
            ),
        ),
        "rates": Statement(
            "*Selected learning rates elsewhere.* Learning rates were selected on validation tasks of Split CIFAR-100 "
            "only.",
            {c.stream.name for c in configs if c.stream.part == "validate"} == {"split-cifar100"},
        ),
        "brn": Statement(
            "*BRN with limits that are scaled to the run.* BN less it is "
            + "; ".join(f"with {NAMES[strategy]} {text}" for strategy, text in scaled.items())
            + ".",
        ),
        "rivals": Statement(
            "*Other norms.* Norms beyond those of the paper have not been run.",
            {c.norm.name for c in configs}
            <= {"none", "bn", "brn", "in", "gn", "sn", "cn", "bn_gn", "cn_tied", "bn_gn_tied"},
        ),
    }


VARIANTS = ("bn_gn", "cn_tied", "bn_gn_tied")
WEIGHTS = (0.01, 0.05, 0.5, 0.9)
BN_UNTUNED = Cell(
    TABLES,
    {
        "norm": "bn",
        "strategy": "er",
        "stream": "split-cifar100",
        "tasks": None,
        "momentum": None,
        "lr": 0.03,
        "evaluate.moments": "running",
    },
)


def published(strategy: str, norm: str, table: str = "2") -> float:
    """ACC of a norm on Split CIFAR-100 in the paper."""
    (found,) = find(table=table, dataset="split-cifar100", strategy=strategy, norm=norm, metric="acc")
    assert found.mean is not None
    return found.mean


def published_gain(strategy: str, table: str = "2") -> float:
    return published(strategy, "cn", table) - published(strategy, "bn", table)


@cache
def facts() -> dict[str, Statement]:
    """Expected statements by name."""
    parts = {
        "intro": introduction(),
        "answer": answer(),
        "contradicts": contradictions(),
        "open": open_differences(),
        "agrees": agreements(),
        "panel": panel(),
        "bn": bn_settings(),
        "stability": stability(),
        "unknown": unknown(),
        "undecided claims": undecided_claims(),
    }
    return {f"{part}: {name}": statement for part, some in parts.items() for name, statement in some.items()}


@pytest.mark.slow
def test_every_statement_of_the_page_has_one_check() -> None:
    expected = Counter(statement.text for statement in facts().values())
    assert max(expected.values()) == 1 and not expected.keys() & PLAIN
    on_page = Counter(statements(PAGE))
    assert [text for text in on_page if text not in expected and text not in PLAIN] == [], "statements without a check"
    assert {text: count for text, count in on_page.items() if count > 1} == {}
    assert [text for text in {*expected, *PLAIN} if text not in on_page] == [], "not on the page as the records have it"


@pytest.mark.slow
def test_words_of_the_page_are_supported_by_the_records() -> None:
    assert [name for name, statement in facts().items() if not statement.holds] == []


def test_plain_statements_state_no_number() -> None:
    assert [text for text in PLAIN if re.search(r"\d", text.replace("95 %", ""))] == []


@pytest.mark.parametrize(
    ("change", "found"),
    [("One. Two more.\n\n- A.\n  B.\n- C 0.5 of\n  it.", ["One.", "Two more.", "A.", "B.", "C 0.5 of it."])],
)
def test_statements_are_sentences_and_rows(change: str, found: list[str]) -> None:
    page = f"# Title\n\n{change}\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    assert list(statements(page)) == ["Title", *found, "| a | b |", "| 1 | 2 |"]


def test_page_links_to_the_records_it_names() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", PAGE)
    assert links and all((DOCS / link).is_file() for link in links)


@pytest.mark.parametrize(
    ("page", "link"),
    [(DOCS / "results" / "README.md", "../which-norm.md"), (DOCS.parent / "README.md", "docs/which-norm.md")],
)
def test_page_is_linked_first(page: Path, link: str) -> None:
    assert re.findall(r"\]\(([^)]+)\)", page.read_text())[0] == link
