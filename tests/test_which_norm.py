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
from statistics import fmean, median
from typing import Any, NamedTuple

import pytest
from tools.comparisons import (
    CIFAR10,
    COCOSEQ,
    FINE_GRID,
    GRID,
    HIGH_RATES,
    MEMORY,
    MINI,
    MORE,
    NAMES,
    PANEL,
    PANEL_TRIALS,
    PANEL_WEIGHTS,
    PERMUTED,
    RIVALS,
    STRATEGIES,
    TABLES,
    TINY,
    WS,
    against,
    cases,
    forgetting_of_others,
    over_rates,
    plain_mean,
    recipe,
    rival,
    selected,
    table2,
)
from tools.doc_figures import verdict_rates
from tools.evidence import RECORDS, Cell, load, plain, staged

from contnorm.bench.config.defaults import complete
from contnorm.bench.config.schema import RunConfig, merge_settings
from contnorm.bench.sequential import ALPHA, FIRST_SEED, MARGIN, STAGES, Decision
from contnorm.bench.spread import spread_ratio
from contnorm.bench.stats import PairedDifference, paired_difference
from contnorm.paper.cells import cells_of, matches, source_of
from contnorm.paper.published import find
from contnorm.paper.recipe import find_recipe
from contnorm.paper.selection import find_selection, with_selection
from contnorm.report.report import collect_report

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = (DOCS / "which-norm.md").read_text()

STREAMS = {
    "split-cifar100": "Split CIFAR-100",
    "split-cifar10": "Split CIFAR-10",
    "split-mini-imagenet": "Split mini-ImageNet",
    "split-tiny-imagenet": "Split Tiny-ImageNet",
    "cocoseq": "part of COCOseq",
    "permuted-mnist": "permuted MNIST",
}
# Samples of the stream and as many of the memory, and their forward passes, as the page states them.
BATCHES = {
    "split-cifar100": (10, "joint"),
    "split-mini-imagenet": (10, "joint"),
    "permuted-mnist": (10, "joint"),
    "cocoseq": (10, "joint"),
    "split-cifar10": (32, "separate"),
    "split-tiny-imagenet": (32, "separate"),
}
SCENARIOS = {"split-cifar100": "task", "split-mini-imagenet": "task", "permuted-mnist": "domain", "cocoseq": "free"}
TITLES = {"CN": "cn", "BN": "bn", "BRN": "brn", "GN": "gn", "SN": "sn", "IN": "in", "no norm": "none"}


class Statement(NamedTuple):
    """Expected text of a statement, and whether the records support its words."""

    text: str
    holds: bool = True


# Statements without a fact about runs: headings, definitions and instructions.
PLAIN = {
    "Which norm should I use?",
    "How many seeds do I need?",
    "The evidence in one picture",
    "| your situation | use | evidence |",
    "A single test with a number of seeds that is fixed before needs [fewer](tutorials/compare-two-norms.ipynb).",
    "`contnorm power` computes both numbers for runs of yours ([example](howto/run-the-bench.md#plan-the-number-of-"
    "seeds)).",
    "The intervals are ordinary ones of 95 %.",
    "The first two rows have a learning rate that was tuned for each norm.",
    "The third and fourth have the mean over rates that are too high, the one of mini-ImageNet a rate that was chosen "
    "on the test tasks, and the others a rate that was not tuned.",
    "BN is batch norm, CN continual norm and GN group norm; ER and DER++ train on samples of a replay memory too.",
    "The evidence by situation",
    "What the paper claims",
    "More situations, exploratory",
    "How to read this page",
    "What contradicts the paper",
    "Where our means differ from the paper, undecided",
    "What agrees with the paper",
    "The panel: each norm at its selected learning rate",
    "If BN is kept",
    "Stability over seeds",
    "What is not known",
    "What is not reached",
    "Undecided claims",
    "The least favourable case is the one that supports the claim least.",
    "| situation | use | because | seeds | records |",
    "| situation | use | CN minus BN | seeds | not known | records |",
    "| claim | table | evidence | least favourable case | to decide it |",
    "| question | what is known |",
    "| what | command | runs | minutes |",
    "| norm, with ER | rate | seeds | ACC | minus BN | minus CN |",
    "| norm, with DER++ | rate | seeds | ACC | minus BN | minus CN |",
    "Newer norms, and BN with other moments in evaluation",
    "Norms of the paper",
    "TBBN with separate forward passes and FRN in a perceptron are not defined; such runs are refused.",
    "RBN is trained from the beginning here, while its authors adapt a trained network with it.",
    "The verdicts are those of the staged rule.",
    "These differences have ordinary intervals and give no verdict.",
    "These runs were planned and have not been made.",
    "A difference is the accuracy of the first norm minus that of the second, paired over seeds.",
    "ACC is the mean accuracy over all tasks at the end, FM the forgetting and LA the accuracy right after learning, "
    "all in percentage points.",
    "This is proven for normally distributed differences; [how a comparison is decided](concepts/deciding.md) has "
    "simulated rates for skewed ones, which are higher.",
    "ER and DER++ are strategies with [replay](howto/run-the-bench.md), and the norms are described in the "
    "[quickstart](quickstart.md) and in [the rivals](concepts/rivals.md).",
    "The verdict *higher* or *lower* means that the interval excludes zero, *equivalent* that it lies within the "
    "margin and contains zero, *undecided* anything else.",
    "Intervals that are marked with 95 % are ordinary ones (Student's t), without a correction for the number of "
    "comparisons or for repeated looks; they are exploratory and give no verdict.",
    "The tables behind each number are in [the results](results/README.md), and how the runs were made is in "
    "[the records](records/README.md).",
    "Every statement of this page is held to the records by a test.",
}


def statements(page: str) -> Iterator[str]:
    """Headings, sentences and table rows of a page, without Markdown's line breaks and figures."""
    page = re.sub(r"<!-- figure: .*?<!-- end -->", "", page, flags=re.DOTALL)  # they have tests of their own
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


def situation(cells: list[Cell], rate: str) -> str:
    """Strategy and stream of some cells, with a text for their learning rates.

    The other settings are those that the page states for the stream, which is checked.
    """
    configs = [record.config for cell in cells for record in cell.runs()]

    def only(value: Callable[[Any], Any]) -> Any:
        """The value that all runs have."""
        (found,) = {value(config) for config in configs}
        return found

    stream, strategy = only(lambda c: c.stream.name), only(lambda c: c.strategy.name)
    batch, forward = BATCHES[stream]
    assert only(lambda c: c.model.weights) is None and only(lambda c: c.train.batch) == batch
    if strategy != "single":
        assert (only(lambda c: c.train.replay), only(lambda c: c.strategy.forward)) == (batch, forward)
    if stream in ("split-cifar10", "split-tiny-imagenet"):
        (known,) = {cell.matrix == "matrix_task" for cell in cells}
        rate = f"task {'known' if known else 'unknown'}, {rate}"
    else:
        assert only(lambda c: c.stream.scenario) == SCENARIOS[stream]
    return f"{NAMES[strategy]}, {STREAMS[stream]}, {rate}"


def links(cells: list[Cell]) -> str:
    """Links to the archives of some cells."""
    archives = dict.fromkeys(cell.archive for cell in cells)
    return ", ".join(f"[records](records/{name})" for name in archives)


def row(*columns: str) -> str:
    return f"| {' | '.join(columns)} |"


def difference(decision: Decision) -> str:
    """A staged decision as text, without its number of seeds."""
    return f"{decision.mean:+.2f} ({decision.interval}): {decision.verdict}"


def exploratory_row(cells: list[Cell], rate: str, use: str, pair: PairedDifference, unknown: str) -> str:
    """A row of the exploratory situations."""
    seeds = str(len(pair.differences))
    return row(situation(cells, rate), use, f"{pair.mean:+.2f} (95 %: {pair.t})", seeds, unknown, links(cells))


def rates_of(cell: Cell) -> str:
    """Learning rates of the runs, as text."""
    return " and ".join(f"{rate:g}" for rate in sorted({record.config.train.lr for record in cell.runs()}))


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
        lacks = needs.removesuffix(", with this mean and spread") or "fresh seeds of all its cells"
        table = row.table.replace("](", "](results/")
        found[str(number)] = Statement(
            f"| {row.claim} ({row.score}) | {table} | {row.evidence} | {case} | {lacks} |",
            bool(needs) or row.evidence.startswith("exploratory"),
        )
    return found


def introduction() -> dict[str, Statement]:
    count = outcomes()
    stages = ", ".join(map(str, STAGES))
    return {
        "undecided": Statement(
            f"**{count['undecided']} of {count.total()} claims of the paper are undecided** by our runs, "
            f"{count['holds']} hold and {count['does not hold']} do not ([claims](results/claims.md)); with five seeds "
            "of each run, 21 of 37 were undecided.",
            count.keys() == {"undecided", "holds", "does not hold"},
        ),
        "rule": Statement(
            f"Verdicts use seeds from {FIRST_SEED} on, which no setting was chosen with, in stages of {stages} seeds; "
            f"all verdicts of a table together are wrong with a probability of at most {100 * ALPHA:g} %, over "
            "all stages."
        ),
        "margin": Statement(f"The margin is {MARGIN:g} point."),
        "batch": Statement(
            "A batch has 10 samples of the stream and with replay 10 of the memory, in one forward pass; on Split "
            "CIFAR-10 and Split Tiny-ImageNet 32 and 32, each in its own."
        ),
        "known": Statement(
            "On Split CIFAR-100 and Split mini-ImageNet, the task of a test image is known (task-incremental); on the "
            "part of COCOseq it is not."
        ),
        "late rule": Statement(
            "This rule was fixed when 32 seeds of Table 2 were known, by their 95 % intervals; the stages of 8, 16 and "
            "32 seeds were computed afterwards.",
        ),
    }


def replays_ten(strategy: str) -> bool:
    """Whether a batch of the tuned BN and CN has 10 samples of the stream and 10 of the memory."""
    cells = [selected(norm, strategy) for norm in ("bn", "cn")]
    return {(run.config.train.batch, run.config.train.replay) for cell in cells for run in cell.runs()} == {(10, 10)}


def short() -> dict[str, Statement]:
    """The answers at the top, and the number of seeds."""
    return {**short_of_paper(), **short_of_panel(), **seeds_needed()}


def short_of_paper() -> dict[str, Statement]:
    """Answers with BN, CN and GN."""
    er, derpp = (table2("cn", "bn", strategy) for strategy in STRATEGIES)
    high = {strategy: over_rates("cn", "bn", strategy) for strategy in STRATEGIES}
    spread = spread_ratio(selected("bn", "er").scores(), selected("cn", "er").scores())
    forgetting = forgetting_of_others()
    return {
        "tuned": Statement(
            row(
                "online replay, batch of 10, learning rate tuned",
                "**BN**",
                f"CN is equivalent with ER ({er.seeds} seeds) and {-derpp.mean:.2f} points lower with DER++ "
                f"({derpp.seeds} seeds)",
            ),
            er.verdict == "equivalent" and derpp.verdict == "lower" and all(map(replays_ten, STRATEGIES)),
        ),
        "high": Statement(
            row(
                "the same, learning rate not tuned and perhaps too high",
                "**CN**",
                f"at rates of 0.03 to 0.3, it is {high['er'].mean:.2f} points above BN with ER and "
                f"{high['derpp'].mean:.2f} with DER++ (3 seeds, exploratory)",
            ),
            excludes_zero(high["er"]) and high["derpp"].mean > 0 and (HIGH_RATES[0], HIGH_RATES[-1]) == (0.03, 0.3),
        ),
        "stable": Statement(
            row(
                "ER, results must vary little between seeds",
                "**CN**",
                f"BN varies {spread.deviation.value:.2f} times as much ({er.seeds} seeds)",
            ),
            spread.verdict == "larger" and er.verdict == "equivalent",
        ),
        "without": Statement(
            row(
                "no replay, little forgetting matters most",
                "**GN**",
                f"it forgets {forgetting['BN'].mean:.2f} points less than BN and {forgetting['CN'].mean:.2f} less than "
                f"CN ({forgetting['BN'].seeds} seeds)",
            ),
            forgets_less(),
        ),
    }


def short_of_panel() -> dict[str, Statement]:
    """Answers with other norms, and what was not run."""
    memory = {strategy: plain(rival(MEMORY, strategy), selected("bn", strategy)) for strategy in STRATEGIES}
    standardized = {strategy: plain(rival(WS, strategy), selected("gn", strategy)) for strategy in STRATEGIES}
    norms = [entry for entry, where in RIVALS.items() if where["norm"] != "bn"]
    return {
        "memory": Statement(
            row(
                "replay, and evaluation may use the memory",
                "**BN with [moments of the memory](howto/moments-from-memory.md)**",
                f"it has the highest mean, {memory['er'].mean:.2f} points above BN with ER and "
                f"{memory['derpp'].mean:.2f} with DER++; undecided (16 seeds)",
            ),
            all(has_no_rival(s) and against(MEMORY, "BN", s).verdict == "undecided" for s in STRATEGIES)
            and all(len(rival(MEMORY, strategy).scores()) == STAGES[1] for strategy in STRATEGIES),
        ),
        "independent": Statement(
            row(
                "replay, and no batch statistics are allowed",
                f"**{WS}**",
                f"it is {standardized['er'].mean:.2f} points above GN with ER and {standardized['derpp'].mean:.2f} "
                "with DER++ (exploratory)",
            ),
            all(pair.mean > 0 and excludes_zero(pair) for pair in standardized.values()),
        ),
        "newer": Statement(
            row(
                "a norm of a newer paper is considered, with ER or DER++",
                "**BN**",
                f"none of {len(norms)} [newer norms](concepts/rivals.md) is shown to be above it (8 or 16 seeds)",
            ),
            all(has_no_rival(strategy) for strategy in STRATEGIES),
        ),
        "unknown": Statement(
            row("a pretrained network, another batch size, separate forward passes", "not known", "not compared yet"),
            all(config.model.weights is None for config in all_configs()),
        ),
    }


def seeds_needed() -> dict[str, Statement]:
    """How many seeds a comparison takes, from the simulated table of its page."""
    rates = verdict_rates()
    page = " ".join((DOCS / "concepts" / "deciding.md").read_text().split())
    return {
        "seeds": Statement(
            f"Decided in stages, nine of ten comparisons show a difference of 1 point with {enough(rates['1'])} seeds "
            f"of each norm; 2 points need {enough(rates['2'])}, and half a point needs {enough(rates['0.5'])}."
        ),
        "spread of seeds": Statement(
            "This holds if the difference varies between seeds by 1.33 points (standard deviation); see [the "
            "simulation](concepts/deciding.md#how-many-seeds-it-takes).",
            "normal ones with a standard deviation of 1.33 points" in page,
        ),
    }


def enough(rate_by_seeds: dict[int, float]) -> int:
    """Seeds that give a verdict in nine of ten comparisons."""
    return min(seeds for seeds, rate in rate_by_seeds.items() if rate >= 0.9)


def has_no_rival(strategy: str) -> bool:
    """Whether no entry of the panel is higher than BN, and BN with moments of the memory has the highest mean."""
    means = {entry: rival(entry, strategy).mean() for entry in RIVALS}
    return (
        not any(against(entry, "BN", strategy).verdict.startswith("higher") for entry in RIVALS)
        and max(means, key=lambda entry: means[entry]) == MEMORY
        and means[MEMORY] > max(plain_mean("bn", strategy), plain_mean("cn", strategy))
    )


def forgets_less() -> bool:
    return all(one.verdict == "higher" for one in forgetting_of_others().values())


def answer() -> dict[str, Statement]:
    """The table by situation."""
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
                situation(cells, f"selected rates {rates}"),
                use,
                f"CN minus BN {difference(decision)}",
                str(decision.seeds),
                links(cells),
            ),
            decision.verdict in supported,
        )
    bn, cn = (selected(norm, "er") for norm in ("bn", "cn"))
    spread = spread_ratio(bn.scores(), cn.scores()).deviation
    found["stable"] = Statement(
        row(
            "the same with ER, and results that must vary little",
            "CN",
            f"mean absolute deviation of BN {spread.value:.2f} times that of CN (95 % by bootstrap: "
            f"{spread.interval.low:.2f} to {spread.interval.high:.2f})",
            str(len(bn.scores())),
            links([bn]),
        ),
        spread.interval.low > 1,
    )
    found |= {f"{strategy} {name}": one for strategy in STRATEGIES for name, one in panel_situations(strategy).items()}
    for strategy in ("er", "derpp"):
        grid = [Cell(GRID, {"norm": n, "strategy": strategy, "lr": r}) for n in ("cn", "bn") for r in HIGH_RATES]
        pair = over_rates("cn", "bn", strategy)
        found[f"{strategy} high rate"] = Statement(
            row(
                situation(grid, "rates not tuned: mean of " + ", ".join(map(str, HIGH_RATES))),
                "CN" if excludes_zero(pair) else "CN, by its mean",
                f"CN minus BN {pair.mean:+.2f} (95 %: {pair.t}) on the validation tasks",
                str(len(pair.differences)),
                links(grid),
            ),
            pair.mean > 0,
        )
    gn, bn, cn = (recipe(norm, "single") for norm in ("gn", "bn", "cn"))
    found["single fm"] = Statement(
        row(
            situation([gn, bn, cn], "rate 0.03 not tuned"),
            "GN for little forgetting",
            "; ".join(f"FM of {name} minus GN {difference(one)}" for name, one in forgetting_of_others().items()),
            str(forgetting_of_others()["BN"].seeds),
            links([gn]),
        ),
        forgets_less(),
    )
    acc, gain = staged(cn, bn, cases("table10")), plain(gn, bn)
    found["single acc"] = Statement(
        row(
            "the same, and ACC matters most",
            "no preference",
            f"ACC of CN minus BN {difference(acc)}; of GN minus BN {gain.mean:+.2f} (95 %: {gain.t})",
            str(acc.seeds),
            links([cn]),
        ),
        not acc.is_decided and not excludes_zero(gain),
    )
    for tasks, words in ((None, "17 tasks"), (4, "four tasks")):
        cells = [recipe("cn", tasks=tasks), bn_4("matrix_running") if tasks else recipe("bn")]
        decision = staged(*cells, cases("table9"))
        found[words] = Statement(
            row(
                situation(cells, f"{words}, rate 0.03 not tuned"),
                "no preference",
                f"CN minus BN {difference(decision)}",
                str(decision.seeds),
                links(cells),
            ),
            decision.verdict == "undecided",
        )
    return found


def panel_situations(strategy: str) -> dict[str, Statement]:
    """Situations in which an entry of the panel is of use."""
    memory, ws = rival(MEMORY, strategy), rival(WS, strategy)
    bn, cn, gn = (selected(norm, strategy) for norm in ("bn", "cn", "gn"))
    pairs = {other: plain(memory, cell) for other, cell in (("BN", bn), ("CN", cn))}
    verdicts = {other: against(MEMORY, other, strategy).verdict for other in pairs}
    found = {
        "memory": Statement(
            row(
                f"the same with {NAMES[strategy]}, and evaluation may use the memory",
                "BN with moments of the memory, by its mean",
                "; ".join(f"minus {o} {pair.mean:+.2f} (95 %: {pair.t}), {verdicts[o]}" for o, pair in pairs.items()),
                str(len(memory.scores())),
                links([memory]),
            ),
            all(pair.mean > 0 and excludes_zero(pair) for pair in pairs.values()),
        )
    }
    pairs = {other: plain(ws, cell) for other, cell in (("BN", bn), ("GN", gn))}
    found["independent"] = Statement(
        row(
            f"the same with {NAMES[strategy]}, and a norm without batch statistics is needed",
            WS,
            "; ".join(f"minus {other} {pair.mean:+.2f} (95 %: {pair.t})" for other, pair in pairs.items()),
            str(len(ws.scores())),
            links([ws]),
        ),
        excludes_zero(pairs["GN"]) and pairs["GN"].mean > 0,
    )
    return found


def bn_4(matrix: str) -> Cell:
    """BN on four tasks: with running moments, or with exact ones (``"matrix"``)."""
    return Cell(MORE, {"norm": "bn", "strategy": "er", "tasks": 4, "evaluate.moments": "oracle"}, matrix)


def more_situations() -> dict[str, Statement]:
    """The table of exploratory situations."""
    return {**permuted(), **larger_batches(), **other_streams()}


def permuted() -> dict[str, Statement]:
    """Fresh seeds of a comparison that no claim makes, so that the staged rule does not cover it."""
    found = {}
    for strategy in ("er", "single"):
        cells = [Cell(PERMUTED, {"norm": norm, "strategy": strategy}, "matrix_running") for norm in ("cn", "bn")]
        pair = plain(*cells)
        unknown = "the effect of a selected rate"
        found[f"permuted {strategy}"] = Statement(
            exploratory_row(cells, "MLP, rate 0.03 not tuned", "CN", pair, unknown),
            pair.mean > 0 and excludes_zero(pair),
        )
    return found


def larger_batches() -> dict[str, Statement]:
    found = {}
    for size in (500, 2560):
        for matrix in ("matrix", "matrix_task"):
            cells = [Cell(CIFAR10, {"norm": norm, "buffer": size}, matrix) for norm in ("cn", "bn")]
            pair = plain(*cells)
            use, rate = "CN" if size == 2560 else "no preference", f"memory of {size:,}, rate 0.03 not tuned"
            found[f"cifar10 {size} {matrix}"] = Statement(
                exploratory_row(cells, rate, use, pair, "the effect of a selected rate"),
                (pair.mean > 0 and excludes_zero(pair)) == (size == 2560),
            )
    for matrix in ("matrix", "matrix_task"):
        cells = [Cell(TINY, {"norm": norm}, matrix) for norm in ("cn", "bn")]
        pair = plain(*cells)
        unknown = "the sign of the difference, and other memory sizes"
        found[f"tiny {matrix}"] = Statement(
            exploratory_row(cells, "memory of 500, rate 0.03 not tuned", "no preference", pair, unknown),
            not excludes_zero(pair),
        )
    return found


def other_streams() -> dict[str, Statement]:
    found = {}
    cn = Cell(MINI, {"norm": "cn", "lr": 0.03})
    for rate in (0.03, 0.01):
        cells = [cn, Cell(MINI, {"norm": "bn", "lr": rate})]
        pair = plain(*cells)
        rates = f"rates 0.03 (CN) and {rate} (BN), chosen on test tasks"
        found[f"mini {rate}"] = Statement(
            exploratory_row(cells, rates, "no preference", pair, "the sign, and rates selected on validation tasks"),
            not excludes_zero(pair),
        )
    for memory in ("prs", "reservoir"):
        cells = [Cell(COCOSEQ, {"norm": norm, "memory": memory}) for norm in ("cn", "bn")]
        pair = plain(*cells, "map")
        rate = f"several labels per image (mAP), rate {rates_of(cells[0])} not tuned"
        found[f"cocoseq {memory}"] = Statement(
            exploratory_row(cells, rate, "no preference", pair, "the complete COCOseq"), not excludes_zero(pair)
        )
    return found


@cache
def all_records() -> list[Any]:
    """All recorded runs."""
    archives = sorted(path.relative_to(RECORDS) for path in RECORDS.rglob("*.jsonl.gz"))
    return [record for archive in archives for record in load(str(archive))]


@cache
def all_configs() -> list[Any]:
    """Settings of all recorded runs."""
    return [record.config for record in all_records()]


def contradictions() -> dict[str, Statement]:
    er, derpp = (table2("cn", "bn", strategy) for strategy in ("er", "derpp"))
    tiny = plain(*(Cell(TINY, {"norm": norm}) for norm in ("cn", "bn")), "fm")
    return {
        "main": Statement(
            "The main claim, that CN has the best ACC of all norms, does not hold on Split CIFAR-100 with a learning "
            f"rate selected for each norm: with DER++, where the paper has CN {published_gain('derpp'):.2f} points "
            f"above BN, CN minus BN is {number(derpp)}.",
            derpp.verdict.startswith("lower"),
        ),
        "er": Statement(
            f"With ER, where the paper has CN {published_gain('er'):.2f} points above BN, CN minus BN is {number(er)}.",
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
            f"CN minus BN {exploratory(tiny)}.",
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
            "minus "
            + "; minus ".join(f"`{norm}` {number(staged(*cells, cases('table8')))}" for norm, cells in variants.items())
            + ".",
            all(decision.mean < 0 and not decision.is_decided for decision in decisions),
        ),
        "la": Statement(
            "The paper claims that exact moments hardly change LA of BN; on permuted MNIST without replay they lower "
            f"it by about the margin, so that it is open whether by less: {number(exact_moments('la', 'single'))}.",
            exact_moments("la", "single").verdict == "lower",
        ),
        "single": Statement(
            f"Without replay, the paper has CN {published_gain('single', '10'):.2f} points above BN; ours is "
            f"{number(staged(*single, cases('table10')))}.",
            staged(*single, cases("table10")).mean < 0,
        ),
    }


def exact_moments(score: str, strategy: str) -> Decision:
    """Table 1: BN with exact minus with running moments on permuted MNIST; of FM, running minus exact."""
    where = {"norm": "bn", "strategy": strategy}
    exact, running = (Cell(PERMUTED, where, matrix) for matrix in ("matrix", "matrix_running"))
    cells = (running, exact) if score == "fm" else (exact, running)
    return staged(*cells, cases("table1"), score)


def agreements() -> dict[str, Statement]:
    found = {}
    for score, words in (
        ("acc", "exact moments of all past data give ACC back to BN: with exact minus with running moments"),
        ("fm", "BN forgets less with exact moments: FM with running minus with exact moments"),
    ):
        decisions = {strategy: exact_moments(score, strategy) for strategy in ("single", "er")}
        found[f"table 1 {score}"] = Statement(
            f"On permuted MNIST, {words} "
            + ", ".join(f"({NAMES[strategy]}) {number(one)}" for strategy, one in decisions.items())
            + ".",
            all(one.verdict.startswith("higher") for one in decisions.values()),
        )
    for strategy in ("er", "derpp"):
        against = {
            name: table2("cn", norm, strategy) for name, norm in TITLES.items() if norm not in ("cn", "bn", "brn")
        }
        found[f"others {strategy}"] = Statement(
            f"With {NAMES[strategy]}, CN is higher than other norms: CN minus "
            + ", minus ".join(f"{name} {number(decision)}" for name, decision in against.items())
            + ".",
            all(decision.verdict == "higher" for decision in against.values()),
        )
        brn = table2("bn", "brn", strategy)
        found[f"brn {strategy}"] = Statement(
            f"With {NAMES[strategy]}, BRN with its published limits is below BN: BN minus BRN {number(brn)}.",
            brn.verdict == "higher",
        )
        fm = table2("bn", "gn", strategy, "fm")
        found[f"fm {strategy}"] = Statement(
            f"With {NAMES[strategy]}, GN forgets less than BN: FM of BN minus GN {number(fm)}.", fm.verdict == "higher"
        )
        la = table2("bn", "gn", strategy, "la")
        found[f"la {strategy}"] = Statement(
            f"With {NAMES[strategy]}, BN learns new tasks better than GN: LA of BN minus GN {number(la)}.",
            la.verdict == "higher",
        )
    fm_bn, fm_cn = (staged(recipe(n, "single"), recipe("gn", "single"), cases("table10"), "fm") for n in ("bn", "cn"))
    found["fm single"] = Statement(
        f"Without replay, GN forgets less than BN and than CN: FM minus that of GN {number(fm_bn)} and "
        f"{number(fm_cn)}.",
        fm_bn.verdict == fm_cn.verdict == "higher",
    )
    agree, of = re.search(r"Of (\d+) numbers: (\d+) agree", (DOCS / "results" / "table4.md").read_text()).groups()[::-1]
    found["table 4"] = Statement(
        f"Of the {of} numbers of Table 4 that were run, at the one learning rate of its protocol, {agree} agree with "
        "the published ones."
    )
    return found


def memory_trials(strategy: str, rate: float, weights: str = "plain") -> Cell:
    """BN with moments of the memory on the validation tasks at one learning rate."""
    return Cell(PANEL_TRIALS, {"strategy": strategy, "lr": rate, **RIVALS[MEMORY], "evaluate.weights": weights})


def has_question(entry: str, other: str) -> bool:
    """Whether a question of the panel compares an entry with BN or CN."""
    return other == "BN" or entry not in ("BN, frozen after the first task", "BN, moments of each task")


def rival_rows(strategy: str) -> dict[str, Statement]:
    """The table of newer norms with one strategy, by their mean; with BN and CN on the seeds of the second stage."""
    rows = {}
    for other in ("BN", "CN"):
        mean = plain_mean(other.lower(), strategy)
        rate = rates_of(selected(other.lower(), strategy))
        rows[mean, other] = row(other, rate, str(STAGES[1]), f"{mean:.2f}", "-", "-")
    for entry in RIVALS:
        cell = rival(entry, strategy)
        seeds = STAGES[1] if entry in LONGER[strategy] else STAGE
        assert sorted(cell.scores()) == list(range(FIRST_SEED, FIRST_SEED + seeds))
        columns = []
        for other in ("BN", "CN"):
            pair = plain(cell, selected(other.lower(), strategy))
            verdict = f"; {against(entry, other, strategy).verdict}" if has_question(entry, other) else ""
            columns.append(f"{pair.mean:+.2f} (95 %: {pair.t}){verdict}")
        rows[cell.mean(), entry] = row(entry, rates_of(cell), str(seeds), f"{cell.mean():.2f}", *columns)
    return {f"{strategy} {entry}": Statement(text) for (_, entry), text in sorted(rows.items(), reverse=True)}


WORDS = {"higher": "higher than", "lower": "lower than", "equivalent": "equivalent to"}


def decided() -> dict[str, Statement]:
    """The decided comparisons of the newer norms, a statement for each verdict."""
    found = {}
    for strategy in STRATEGIES:
        for other in ("BN", "CN"):
            asked = [entry for entry in RIVALS if has_question(entry, other)]
            verdicts = {entry: against(entry, other, strategy).verdict for entry in asked}
            for verdict, words in WORDS.items():
                if entries := [entry for entry in asked if verdicts[entry] == verdict]:
                    found[f"{strategy} {verdict} {other}"] = Statement(
                        f"With {NAMES[strategy]}, {words} {other}: {'; '.join(entries)}.",
                        set(verdicts.values()) <= {*WORDS, "undecided"},
                    )
    return found


def with_verdict(entry: str, other: str, strategy: str) -> str:
    """An ordinary interval, and the verdict of the staged rule, with its interval if it decides."""
    decision = against(entry, other, strategy)
    by = f" by the staged rule ({decision.interval})" if decision.is_decided else ""
    pair = plain(rival(entry, strategy), selected(other.lower(), strategy))
    return f"minus {other} {exploratory(pair)}, {decision.verdict}{by}"


def memory_advantage(strategy: str) -> dict[str, Statement]:
    """What BN with moments of the memory shows."""
    running = rival(MEMORY, strategy, "matrix_running")
    own, rate = plain(rival(MEMORY, strategy), running), plain(running, selected("bn", strategy))
    name = NAMES[strategy]
    return {
        f"memory {strategy}": Statement(
            f"With {name}, BN with moments of the memory has the highest mean: "
            f"{with_verdict(MEMORY, 'BN', strategy)}; {with_verdict(MEMORY, 'CN', strategy)}.",
            has_no_rival(strategy),
        ),
        f"evaluation {strategy}": Statement(
            f"With {name}, this is due to the evaluation: the same networks with moments of the memory minus with "
            f"running ones {exploratory(own)}; with running ones minus BN at its selected rate {exploratory(rate)}.",
            excludes_zero(own) and own.mean > 0 and not excludes_zero(rate) and rate.mean < 0,
        ),
    }


def weights_on_test_tasks() -> dict[str, Statement]:
    """BN with moments of the memory and other weights of its samples; both on the same networks."""
    by_task, as_batch, running = (
        Cell(PANEL_WEIGHTS, {"strategy": "er", "evaluate.weights": weights}, matrix)
        for weights, matrix in (("task", "matrix"), ("batch", "matrix"), ("task", "matrix_running"))
    )
    also_running = Cell(PANEL_WEIGHTS, {"strategy": "er", "evaluate.weights": "batch"}, "matrix_running")
    pair, bn = plain(by_task, as_batch), selected("bn", "er")
    return {
        "weights on test tasks": Statement(
            f"They hardly matter on the test tasks with ER either: by task minus as a batch {exploratory(pair)}; by "
            f"task minus BN {exploratory(plain(by_task, bn))}, as a batch {exploratory(plain(as_batch, bn))}, both "
            "undecided; with DER++, only equal weights were run there.",
            running.scores() == also_running.scores()
            and abs(pair.mean) < MARGIN
            and all(staged(one, bn, cases("panel")).verdict == "undecided" for one in (by_task, as_batch)),
        )
    }


def rivals() -> dict[str, Statement]:
    """What the newer norms show."""
    weights = {(s, w): memory_trials(s, 0.003, w).scores() for s in STRATEGIES for w in ("plain", "task", "batch")}
    equal, batch = (fmean(weights["er", one].values()) for one in ("plain", "batch"))
    alike = fmean(weights["derpp", "plain"].values())
    found = {
        **decided(),
        **{name: one for strategy in STRATEGIES for name, one in memory_advantage(strategy).items()},
        "weights": Statement(
            f"The weights of the memory's samples hardly matter on the validation tasks: with ER, ACC {equal:.2f} with "
            "equal weights and by task (the memory has as many samples of each task, so they are the same), "
            f"{batch:.2f} as a batch; with DER++, {alike:.2f} with all three (at the end of three tasks they are the "
            "same; 3 seeds).",
            weights["er", "plain"] == weights["er", "task"]
            and weights["derpp", "plain"] == weights["derpp", "task"] == weights["derpp", "batch"]
            and abs(equal - batch) < MARGIN
            and len(weights["er", "plain"]) == 3,
        ),
        **weights_on_test_tasks(),
    }
    for strategy in STRATEGIES:
        gain, rest = gap(strategy)
        found[f"gap {strategy}"] = Statement(
            f"At rates that are not tuned with {NAMES[strategy]} (mean of {', '.join(map(str, GAP_RATES))} on the "
            f"validation tasks), moments of the memory give back {gain.mean:.2f} of the {gain.mean + rest.mean:.2f} "
            f"points that BN is below CN: minus BN {exploratory(gain)}; CN minus it {exploratory(rest)}.",
            gain.mean > 0 and rest.mean > 0,
        )
    return {**found, **balancing(), **close_norms()}


def balancing() -> dict[str, Statement]:
    """AdaB2N, TBBN and BNT."""
    pairs = {(e, s): plain(rival(e, s), selected("bn", s)) for e in ("AdaB2N", "TBBN", "BNT") for s in STRATEGIES}
    trials = {rate: Cell(PANEL_TRIALS, {"strategy": "derpp", "norm": "tbbn", "lr": rate}) for rate in GAP_RATES}
    bn = {rate: Cell(GRID, {"strategy": "derpp", "norm": "bn", "lr": rate}).scores() for rate in GAP_RATES}
    same = all(cell.scores()[seed] == bn[rate][seed] for rate, cell in trials.items() for seed in range(3))
    return {
        "balance": Statement(
            "AdaB2N, TBBN and BNT balance the moments of tasks in training, and none of them is shown to be above BN: "
            + "; ".join(
                f"with {NAMES[s]} minus BN "
                + ", ".join(f"{e} {pairs[e, s].mean:+.2f}" for e in ("AdaB2N", "TBBN", "BNT"))
                for s in STRATEGIES
            )
            + ".",
            all(against(e, "BN", s).verdict == "undecided" for e, s in pairs),
        ),
        "tbbn": Statement(
            "With DER++, TBBN is BN in the first tasks, so that the validation tasks can't tell them apart: they have "
            "the same accuracy there.",
            same,
        ),
    }


def close_norms() -> dict[str, Statement]:
    """The norms that are close to BN or CN."""
    found = {}
    for strategy in STRATEGIES:
        means = {entry: rival(entry, strategy).mean() for entry in RIVALS}
        less_bn, less_gn = (plain(rival(WS, strategy), selected(norm, strategy)) for norm in ("bn", "gn"))
        found[f"independent {strategy}"] = Statement(
            f"With {NAMES[strategy]}, GN with weight standardization is the only norm close to BN of those that are "
            f"independent of the batch: minus BN {exploratory(less_bn)}, minus GN {exploratory(less_gn)}.",
            means[WS] > max(means["EvoNorm-S0"], means["FRN"])
            and not excludes_zero(less_bn)
            and excludes_zero(less_gn)
            and all(excludes_zero(plain(rival(e, strategy), selected("bn", strategy))) for e in ("EvoNorm-S0", "FRN")),
        )
    found["iabn"] = Statement(
        f"IABN is equivalent to CN with ER: {with_verdict('IABN', 'CN', 'er')}; with DER++ it has a higher mean: "
        f"{with_verdict('IABN', 'CN', 'derpp')}.",
        against("IABN", "CN", "er").verdict == "equivalent"
        and against("IABN", "CN", "derpp").verdict == "undecided"
        and against("IABN", "CN", "derpp").mean > 0,
    )
    return found


def gap(strategy: str) -> tuple[PairedDifference, PairedDifference]:
    """At rates that are not tuned, BN with moments of the memory minus BN, and CN minus it, on the validation tasks."""
    by_norm = {
        MEMORY: [memory_trials(strategy, rate).scores() for rate in GAP_RATES],
        **{
            n: [Cell(GRID, {"norm": n, "strategy": strategy, "lr": r}).scores() for r in GAP_RATES]
            for n in ("bn", "cn")
        },
    }
    means = {
        n: {seed: fmean(scores[seed] for scores in by_rate) for seed in range(3)} for n, by_rate in by_norm.items()
    }
    first, second = paired_difference(means[MEMORY], means["bn"]), paired_difference(means["cn"], means[MEMORY])
    assert first is not None and second is not None
    return first, second


def longer(strategy: str) -> set[str]:
    """Entries of the panel with the seeds of the second stage."""
    return {entry for entry in RIVALS if len(rival(entry, strategy).scores()) == STAGES[1]}


def panel_intro() -> dict[str, Statement]:
    budget = Counter(record.config.strategy.name for record in [*load(PANEL_TRIALS), *load(PANEL_TRIALS).diverged])
    older = [r.config for grid in (GRID, FINE_GRID) for r in [*load(grid), *load(grid).diverged]]
    runs = Counter((config.strategy.name, config.norm.name, config.norm.schedule) for config in older)
    return {
        "cases": Statement(
            f"The panel divides the error rate over {cases('panel')} comparisons, so that its intervals differ from "
            "those above."
        ),
        "seeds": Statement(
            f"The newer entries have {STAGE} seeds, the first stage, which can only show large differences, or "
            f"{STAGES[1]}: BN with moments of the memory, and with ER TBBN, GN with weight standardization and IABN.",
            all(set(LONGER[strategy]) == longer(strategy) for strategy in STRATEGIES),
        ),
        "longer": Statement(
            f"The entries with {STAGES[1]} seeds were chosen when the first stage with ER was known, and no score on "
            f"test tasks with DER++; BN and CN have {STAGES[1]} seeds in the tables, and differences are over the "
            "seeds of the entry."
        ),
        "budget": Statement(
            f"Each had {budget['er'] // len(RIVALS)} runs on the validation tasks to select its settings, and each "
            f"norm of the paper {' or '.join(map(str, sorted(set(runs.values()))))}.",
            budget["er"] % len(RIVALS) == 0 and budget["er"] == budget["derpp"],
        ),
    }


def panel() -> dict[str, Statement]:
    """BN compared with the other norms of the paper at selected rates; cases of the recipe `panel`."""
    found = {}
    for strategy in ("er", "derpp"):
        bn = selected("bn", strategy)
        others = {name: selected(norm, strategy) for name, norm in TITLES.items() if norm != "bn"}
        others["BRN with scaled limits"] = selected("brn", strategy, schedule="scaled")
        decisions = {name: staged(bn, cell, cases("panel")) for name, cell in others.items()}
        found[strategy] = Statement(
            f"With {NAMES[strategy]}: BN minus "
            + "; minus ".join(f"{name} {number(decision)}" for name, decision in decisions.items())
            + ".",
            not any(decision.verdict.startswith("lower") for decision in decisions.values()),
        )
    return found


def bn_settings() -> dict[str, Statement]:
    own = recipe("bn")
    cumulative = staged(own, recipe("bn", momentum="cumulative"), cases("table12"))
    weights = {weight: number(staged(own, recipe("bn", momentum=weight), cases("table12"))) for weight in WEIGHTS}
    half = staged(own, recipe("bn", momentum=0.5), cases("table12"))
    exact = staged(bn_4("matrix"), bn_4("matrix_running"), cases("table9"))
    return {
        "cumulative": Statement(
            "Do not use a cumulative average of the moments: at 0.03, BN with its weight of 0.1 minus BN with a "
            f"cumulative average is {number(cumulative)}.",
            cumulative.verdict == "higher",
        ),
        "weights": Statement(
            "The paper's claim that a weight of 0.1 is best is not decided: BN with 0.1 minus BN with another weight "
            + "is "
            + "; ".join(f"for {weight} {text}" for weight, text in weights.items())
            + ".",
            not half.is_decided and half.mean < 0,
        ),
        "exact": Statement(
            "Exact moments of all past data, which are not available in practice, minus running ones on four tasks: "
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
    """The table of open questions."""
    configs = all_configs()
    sizes = {(c.train.batch, c.train.replay if c.strategy.name != "single" else 0) for c in configs}
    scaled = {
        strategy: number(
            staged(selected("bn", strategy), selected("brn", strategy, schedule="scaled"), cases("table2"))
        )
        for strategy in ("er", "derpp")
    }
    return {
        "pretrained": Statement(
            row("a pretrained network", "nothing: none was run"), all(c.model.weights is None for c in configs)
        ),
        "batch": Statement(
            row(
                "batch size", "the runs had 10 stream samples without replay, 10 with 10 of the memory, and 32 with 32"
            ),
            sizes == {(10, 0), (10, 10), (32, 32)},
        ),
        "forward": Statement(
            row("joint or separate forward passes", "no stream was run with both"),
            all(
                len({c.strategy.forward for c in configs if c.stream.name == stream and c.strategy.name != "single"})
                <= 1
                for stream in {c.stream.name for c in configs}
            ),
        ),
        "rates": Statement(
            row("selected learning rates elsewhere", "rates were selected on validation tasks of Split CIFAR-100 only"),
            {c.stream.name for c in configs if c.stream.part == "validate"} == {"split-cifar100"},
        ),
        "newer": Statement(
            row("newer norms elsewhere", "they were run on Split CIFAR-100 only"),
            {c.stream.name for c in configs if is_newer(c)} == {"split-cifar100"},
        ),
        "brn": Statement(
            row(
                "BRN with limits that are scaled to the run",
                "BN minus it is " + "; ".join(f"with {NAMES[strategy]} {text}" for strategy, text in scaled.items()),
            )
        ),
    }


STAGE = STAGES[0]
# Runs that were planned and not made: description, recipe, and the cells.
PLANNED = (
    ("other weights of the samples of the memory with DER++", "panel", {"norm": "bn", "strategy": "derpp"}),
    ("separate forward passes, and ER-ACE", "panel-forward", {}),
    ("the panel on Split CIFAR-10", "panel-cifar10", {}),
    ("batches of 1 to 64, and the number of replayed samples", "panel-batch", {}),
    ("stock SN in Table 3", "table3", {"norm": "sn", "layers": "stock"}),
    ("Table 9, BN with exact moments on 17 tasks", "table9", {"norm": "bn"}),
    ("Table 4 on Split CIFAR-10", "table4", {"stream": "split-cifar10"}),
    ("Table 11 on Split CIFAR-10", "table11", {"stream": "split-cifar10"}),
    ("Table 2 at one learning rate", "table2", {"stream": "split-cifar100"}),
)


@cache
def seconds_per_run(stream: str, strategy: str, exact: bool) -> float:
    """Median time of a run on the test tasks, among others that share the device."""
    found = [
        record.raw["seconds"]["together"] / record.raw["seconds"]["lanes"]
        for record in all_records()
        if record.config.stream.name == stream and record.config.strategy.name == strategy
        if record.config.stream.part != "validate" and record.config.stream.tasks is None
        if (record.config.evaluate.moments == "oracle") == exact and not is_newer(record.config)
        if "together" in record.raw.get("seconds", {})
    ]
    return median(found)


def is_newer(config: RunConfig) -> bool:
    """Whether a run is of a newer entry of the panel."""
    newer = {where["norm"] for where in RIVALS.values()} - {"bn"}
    return config.norm.name in newer or config.evaluate.moments in ("memory", "task")


@cache
def slower(strategy: str) -> float:
    """Time of a run of the newer entries relative to one of the others, on Split CIFAR-100."""
    seconds = [record.raw["seconds"] for record in load(PANEL) if record.config.strategy.name == strategy]
    own = median(one["together"] / one["lanes"] for one in seconds)
    return own / seconds_per_run("split-cifar100", strategy, False)


def planned_runs(recipe_name: str, only: dict[str, str]) -> list[RunConfig]:
    """Settings of the cells of a recipe, each once, without those that have the seeds of the first stage."""
    recipe = find_recipe(recipe_name)
    if selection := find_selection(recipe_name, refined=True) if recipe.ours else None:
        recipe = with_selection(recipe, selection)
    cells = [cell for cell in cells_of(recipe) if matches(cell.place, only)]
    tf32 = {"train": {"precision": "tf32"}}
    configs = [complete(merge_settings(cell.values, tf32), source_of(cell)) for cell in cells]
    seeds = Counter(record.config.hash for record in all_records() if record.seed >= FIRST_SEED)
    distinct = {config.hash: config for config in configs}.values()
    return [config for config in distinct if recipe_name == "table3" or seeds[config.hash] < STAGE]


def minutes(configs: list[RunConfig], seeds: int) -> float:
    """Estimated time on one H200: that of recorded runs of the stream and strategy, for as many steps."""
    total = 0.0
    for config in configs:
        strategy = "er" if config.strategy.name == "er-ace" else config.strategy.name
        batch = 32 if config.stream.name == "split-cifar10" else 10
        exact = config.evaluate.moments == "oracle"
        seconds = seconds_per_run(config.stream.name, strategy, exact) * batch / config.train.batch
        total += seconds * (slower(strategy) if is_newer(config) else 1.0)
    return total * seeds / 60


def plan() -> dict[str, Statement]:
    return {
        "estimate": Statement(
            f"The number of runs is that of the first stage, {STAGE} seeds (Table 3: {TIMED_SEEDS}), without those "
            "that are recorded; the time is that on one H200, at the median time of recorded runs of the same "
            "stream and strategy, scaled to the number of steps; rates that are not selected yet take `contnorm "
            "tune panel` or `contnorm tune panel-forward` before."
        )
    }


def not_reached() -> dict[str, Statement]:
    found = {}
    undecided = [
        (entry, strategy)
        for strategy in STRATEGIES
        for entry in RIVALS
        if any(not against(entry, o, strategy).is_decided for o in ("BN", "CN") if has_question(entry, o))
    ]
    more = [rival(entry, strategy) for entry, strategy in undecided]
    missing = [next(stage for stage in STAGES if stage > len(one.scores())) - len(one.scores()) for one in more]
    time = sum(minutes([next(iter(one.runs())).config], seeds) for one, seeds in zip(more, missing, strict=True))
    command = "`contnorm paper panel --device cuda --until-decided`"
    found["more seeds"] = Statement(
        row(
            f"the next stage of the {len(more)} undecided cells of newer norms, {STAGES[1]} or {STAGES[2]} seeds",
            command,
            f"{sum(missing)}",
            f"{time:.0f}",
        ),
        {len(one.scores()) for one in more} == {STAGES[0], STAGES[1]},
    )
    for what, name, only in PLANNED:
        configs, seeds = planned_runs(name, only), TIMED_SEEDS if name == "table3" else STAGE
        words = ["contnorm paper", name, *(f"--only {key}={value}" for key, value in only.items())]
        words += ["--lr one"] if name == "table2" else []
        words += ["--device cuda", f"--seeds {seeds}" if name == "table3" else f"--until-decided --max-seeds {STAGE}"]
        time = minutes(configs, seeds)
        found[what] = Statement(
            row(what, f"`{' '.join(words)}`", f"{len(configs) * seeds}", f"{time:.0f}" if time >= 1 else "under 1"),
            bool(configs),
        )
    return found


TIMED_SEEDS = 2


# Entries with the seeds of the second stage, by strategy.
LONGER = {"er": {MEMORY, "TBBN", WS, "IABN"}, "derpp": {MEMORY}}
GAP_RATES = (0.01, 0.03, 0.1)
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
        "short": short(),
        "answer": answer(),
        "more": more_situations(),
        "contradicts": contradictions(),
        "open": open_differences(),
        "agrees": agreements(),
        "panel intro": panel_intro(),
        **{f"rival rows {strategy}": rival_rows(strategy) for strategy in STRATEGIES},
        "rivals": rivals(),
        "panel": panel(),
        "bn": bn_settings(),
        "stability": stability(),
        "unknown": unknown(),
        "plan": plan(),
        "not reached": not_reached(),
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
def test_page_of_the_rivals_states_what_the_panel_decides() -> None:
    norms = [entry for entry, where in RIVALS.items() if where["norm"] != "bn"]
    verdicts = {(e, o, s): against(e, o, s).verdict for e in norms for o in ("BN", "CN") for s in STRATEGIES}
    assert not any(verdict.startswith("higher") for verdict in verdicts.values())
    below = {o: [e for e in norms if all(verdicts[e, o, s] == "lower" for s in STRATEGIES)] for o in ("BN", "CN")}
    assert below == {"BN": ["FRN", "RBN"], "CN": ["EvoNorm-S0", "FRN", "RBN"]}
    text = " ".join((DOCS / "concepts" / "rivals.md").read_text().split())
    assert "With ER and DER++ on Split CIFAR-100, none of them is shown to be above BN or CN" in text
    assert "FRN and robust batch norm are below both, and EvoNorm-S0 is below CN." in text
    assert "batch norm with DER++: runs of both have the same accuracy" in text and balancing()["tbbn"].holds
    assert verdicts["EvoNorm-S0", "BN", "er"] == "undecided" and verdicts["EvoNorm-S0", "BN", "derpp"] == "lower"


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


def test_report_names_the_page() -> None:
    """A report is a file on a user's disk, from which the page can't be linked."""
    (path,) = re.findall(r"docs/\S+\.md", collect_report(RECORDS / COCOSEQ).html())
    assert DOCS.parent / path == DOCS / "which-norm.md"
