"""The comparisons that the documentation states: cells of the archives in docs/records, by name.

Seeds from 100 on of the tables on Split CIFAR-100 and permuted MNIST are fresh: no setting was chosen with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from contnorm.bench.metrics import score
from contnorm.bench.sequential import decide_differences, decide_family
from tools.evidence import RECORDS, Cell, Comparison, MeanCell, load

# Archives in docs/records.
FRESH = "runs/split-cifar100-fresh-seeds.jsonl.gz"
MORE = "runs/split-cifar100-fresh-seeds-more-tables.jsonl.gz"
EXPLORATORY = "split-cifar100-exploratory.jsonl.gz"
GRID = "split-cifar100-coarse-grid.jsonl.gz"
MOMENTS = "split-cifar100-er-memory-moments.jsonl.gz"
CIFAR10 = ("runs/split-cifar10.jsonl.gz", "runs/split-cifar10-more-seeds.jsonl.gz")
CIFAR10_SMALL = ("runs/tables.jsonl.gz", "runs/split-cifar10-more-seeds.jsonl.gz")
ORDER = "runs/split-cifar100-class-order.jsonl.gz"
MINI = "runs/split-mini-imagenet.jsonl.gz"
MINI_FRESH = "runs/split-mini-imagenet-fresh-seeds.jsonl.gz"
MINI_DERPP = "split-mini-imagenet-derpp.jsonl.gz"
TINY = "runs/split-tiny-imagenet.jsonl.gz"
COCOSEQ = "cocoseq-mini.jsonl.gz"
MNIST = "split-mnist-class-memory-moments.jsonl.gz"
TABLES = "runs/tables.jsonl.gz"
PANEL = "runs/split-cifar100-panel.jsonl.gz"
PERMUTED = "runs/permuted-mnist-fresh-seeds.jsonl.gz"
NAMES = {"er": "ER", "derpp": "DER++", "single": "no replay", "prs": "PRS", "reservoir": "reservoir"}
STRATEGIES = ("er", "derpp")
MEMORY = "BN, moments of the memory"
WS = "GN with weight standardization"
HIGH_RATES = (0.03, 0.1, 0.3)  # above the rates selected for BN and for CN
# Entries of the panel that are not norms of the paper, by their settings.
RIVALS: dict[str, dict[str, Any]] = {
    MEMORY: {"norm": "bn", "evaluate.moments": "memory"},
    "AdaB2N": {"norm": "adab2n"},
    "TBBN": {"norm": "tbbn"},
    "BNT": {"norm": "bnt"},
    WS: {"norm": "gn_ws"},
    "EvoNorm-S0": {"norm": "evonorm_s0"},
    "FRN": {"norm": "frn"},
    "IABN": {"norm": "iabn"},
    "RBN": {"norm": "rbn"},
    "BN, frozen after the first task": {"norm": "bn", "freeze_after": 1},
    "BN, moments of each task": {"norm": "bn", "evaluate.moments": "task"},
}
NEWER = [entry for entry, where in RIVALS.items() if where["norm"] != "bn"]

# What the seeds and learning rates of a comparison were chosen by.
SELECTED = "fresh seeds, rates selected on validation tasks"
FIXED = "fresh seeds, one rate for all"
ONE_RATE = "exploratory: one rate for all"
TEST_TASKS = "exploratory: rates compared on test tasks"
AFTERWARDS = "exploratory: question asked afterwards"
OTHER_ORDER = "fresh seeds, rates selected with another class order"
SAME = "the same networks"
BOTH = "CN - BN, both with moments of the memory"


def selected(norm: str, strategy: str, **where: Any) -> Cell:
    """A norm at its selected learning rate, with fresh seeds."""
    schedule = {"schedule": where.pop("schedule", "published")} if norm == "brn" else {}
    return Cell((FRESH,), {"norm": norm, "strategy": strategy, **schedule, **where})


def recipe(norm: str, strategy: str = "er", tasks: int | None = None, **where: Any) -> Cell:
    """A norm at the learning rate of the recipes, with fresh seeds."""
    weight = {"momentum": None} if norm == "bn" else {}
    return Cell((MORE,), {"norm": norm, "strategy": strategy, "tasks": tasks, **weight, **where})


def rival(entry: str, strategy: str, matrix: str = "matrix") -> Cell:
    """An entry of the panel at its selected setting, with fresh seeds."""
    return Cell((PANEL,), {"strategy": strategy, **RIVALS[entry]}, matrix)


def order(norm: str, strategy: str, moments: str = "") -> Cell:
    """A norm on Split CIFAR-100 with a class order by seed, evaluated with running moments or those of the memory."""
    return Cell((ORDER,), {"norm": norm, "strategy": strategy}, f"matrix{moments}")


def mini(norm: str, strategy: str, moments: str = "") -> Cell:
    """A norm on Split mini-ImageNet at the rate of 0.005 that it selected, with fresh seeds."""
    return Cell((MINI_FRESH,), {"norm": norm, "strategy": strategy}, f"matrix{moments}")


def _cn_less_bn(situation: str, cn: Cell | MeanCell, bn: Cell | MeanCell, basis: str) -> Comparison:
    return Comparison("CN - BN", situation, cn, bn, basis)


def _split_cifar100() -> Iterator[tuple[str, Comparison]]:
    """CN and BN on Split CIFAR-100."""
    for strategy in STRATEGIES:
        name = NAMES[strategy]
        cn, bn = selected("cn", strategy), selected("bn", strategy)
        yield f"tuned {strategy}", _cn_less_bn(f"{name}, CN at 0.01, BN at 0.005", cn, bn, SELECTED)
    for strategy in STRATEGIES:
        situation = f"{NAMES[strategy]}, class order by seed, CN at 0.01, BN at 0.005"
        pair = order("cn", strategy), order("bn", strategy)
        yield f"order {strategy}", _cn_less_bn(situation, *pair, OTHER_ORDER)
    again = [
        Cell((EXPLORATORY,), {"norm": norm, "strategy": "er", "lr": rate})
        for norm, rate in (("cn", 0.01), ("bn", 0.005))
    ]
    yield "again er", _cn_less_bn("ER, the same rates, seeds 0 to 39", again[0], again[1], TEST_TASKS)
    yield "one rate er", _cn_less_bn("ER, both at 0.03", recipe("cn"), recipe("bn"), FIXED)
    where = {"strategy": "derpp", "stream": "split-cifar100", "lr": 0.03}
    cells = [Cell((TABLES,), {"norm": norm, **where}) for norm in ("cn", "bn")]
    yield "one rate derpp", _cn_less_bn("DER++, both at 0.03", cells[0], cells[1], ONE_RATE)
    for strategy in STRATEGIES:
        means = [
            MeanCell([Cell((GRID,), {"norm": norm, "strategy": strategy, "lr": rate}) for rate in HIGH_RATES])
            for norm in ("cn", "bn")
        ]
        rates = f"{NAMES[strategy]}, mean over the rates {', '.join(f'{rate:g}' for rate in HIGH_RATES)}"
        basis = "exploratory: three validation tasks"
        yield f"high {strategy}", _cn_less_bn(rates, means[0], means[1], basis)
    cn, bn = recipe("cn", "single"), recipe("bn", "single")
    yield "single", _cn_less_bn("no replay, both at 0.03", cn, bn, FIXED)


def _other_streams() -> Iterator[tuple[str, Comparison]]:
    """CN and BN on other streams."""

    def at_rate(norm: str, strategy: str, rate: float) -> Cell:
        return Cell((MINI_DERPP if strategy == "derpp" else MINI,), {"norm": norm, "strategy": strategy, "lr": rate})

    stream = "Split mini-ImageNet"
    yield "mini tuned er", _cn_less_bn(f"{stream}, ER, both at 0.005", mini("cn", "er"), mini("bn", "er"), SELECTED)
    for rate in (0.003, 0.005, 0.01, 0.03):
        pair = at_rate("cn", "derpp", 0.01), at_rate("bn", "derpp", rate)
        yield f"mini derpp {rate}", _cn_less_bn(f"{stream}, DER++, CN at 0.01, BN at {rate}", *pair, TEST_TASKS)
    pair = at_rate("cn", "derpp", 0.03), at_rate("bn", "derpp", 0.03)
    yield "mini derpp one rate", _cn_less_bn(f"{stream}, DER++, both at 0.03", *pair, TEST_TASKS)
    for rate in (0.01, 0.03):
        pair = at_rate("cn", "er", 0.03), at_rate("bn", "er", rate)
        yield f"mini er {rate}", _cn_less_bn(f"{stream}, ER, CN at 0.03, BN at {rate}", *pair, TEST_TASKS)
    for size in (500, 2560, 5120):
        for matrix, known in (("matrix", "unknown"), ("matrix_task", "known")):
            archives = {500: CIFAR10_SMALL, 5120: CIFAR10[:1]}.get(size, CIFAR10)
            where = {"stream": "split-cifar10", "strategy": "derpp", "buffer": size}
            groups: dict[str, dict[str, Any]] = {"cn": {"groups": 32}, "bn": {}}
            cells = [Cell(archives, {"norm": norm, **where, **groups[norm]}, matrix) for norm in ("cn", "bn")]
            situation = f"Split CIFAR-10, DER++, memory of {size:,}, task {known}, both at 0.03"
            yield f"cifar10 {size} {known}", _cn_less_bn(situation, cells[0], cells[1], ONE_RATE)
    for matrix, known in (("matrix", "unknown"), ("matrix_task", "known")):
        cells = [Cell((TINY,), {"norm": norm}, matrix) for norm in ("cn", "bn")]
        situation = f"Split Tiny-ImageNet, DER++, memory of 500, task {known}, both at 0.03"
        scores = ("acc", "aia", "fm")
        yield f"tiny {known}", Comparison("CN - BN", situation, cells[0], cells[1], ONE_RATE, scores)
    for strategy in ("er", "single"):
        cells = [Cell((PERMUTED,), {"norm": norm, "strategy": strategy}, "matrix_running") for norm in ("cn", "bn")]
        situation = f"permuted MNIST, {NAMES[strategy]}, both at 0.03"
        yield f"permuted {strategy}", _cn_less_bn(situation, cells[0], cells[1], FIXED)
    for memory in ("prs", "reservoir"):
        cells = [Cell((COCOSEQ,), {"norm": norm, "memory": memory}) for norm in ("cn", "bn")]
        situation = f"a part of COCOseq, {NAMES[memory]}, both at 0.0001"
        yield f"coco {memory}", Comparison("CN - BN", situation, cells[0], cells[1], ONE_RATE, ("map",))


def _moments() -> Iterator[tuple[str, Comparison]]:
    """BN with moments of the memory, and the same networks with running moments; then CN."""
    what = "BN: moments of the memory - running"
    for strategy in STRATEGIES:
        situation = f"{NAMES[strategy]}, BN at 0.003"
        pair = rival(MEMORY, strategy), rival(MEMORY, strategy, "matrix_running")
        yield f"memory {strategy}", Comparison(what, situation, *pair, f"{SELECTED}; {SAME}")
    new = {"Split CIFAR-100, class order by seed": (order, OTHER_ORDER), "Split mini-ImageNet": (mini, SELECTED)}
    for norm in ("bn", "cn"):
        for stream, (cell, basis) in new.items():
            for strategy in STRATEGIES if cell is order or norm == "bn" else ("er",):
                name, both = f"{cell.__name__} {norm} {strategy}", f"{norm.upper()}: moments of the memory - running"
                pair = cell(norm, strategy, "_memory"), cell(norm, strategy)
                yield name, Comparison(both, f"{stream}, {NAMES[strategy]}", *pair, f"{basis}; {SAME}")
    for stream, (cell, basis) in new.items():
        for strategy in STRATEGIES if cell is order else ("er",):
            pair = cell("cn", strategy, "_memory"), cell("bn", strategy, "_memory")
            situation = f"{stream}, {NAMES[strategy]}"
            yield f"{cell.__name__} both {strategy}", Comparison(BOTH, situation, *pair, f"{basis} by running moments")
    for norm in ("bn", "cn"):
        for strategy in STRATEGIES:
            of = {"norm": norm, "strategy": strategy, "evaluate.moments": "running"}
            pair = Cell((MNIST,), of, "matrix_memory"), Cell((MNIST,), of)
            situation = f"Split MNIST, class-incremental, {NAMES[strategy]}, at 0.03"
            both = f"{norm.upper()}: moments of the memory - running"
            yield f"class {norm} {strategy}", Comparison(both, situation, *pair, f"{FIXED}; {SAME}")
            of = {"norm": norm, "strategy": strategy, "evaluate.moments": "memory"}
            pair = Cell((MNIST,), of), Cell((MNIST,), of, "matrix_running")
            both = f"{norm.upper()}: moments of the memory, weighted as a batch - running"
            yield f"class batch {norm} {strategy}", Comparison(both, situation, *pair, f"{FIXED}; {SAME}")
    where = {"norm": "bn", "strategy": "er", "lr": 0.005}
    other = Cell((MOMENTS,), where), Cell((MOMENTS,), where, "matrix_running")
    yield "memory again", Comparison(what, "ER, BN at 0.005, 32 other seeds", *other, f"{AFTERWARDS}; {SAME}")
    for strategy in STRATEGIES:
        situation = f"{NAMES[strategy]}, BN at 0.003, CN at 0.01"
        pair = rival(MEMORY, strategy), selected("cn", strategy)
        yield f"memory cn {strategy}", Comparison("BN, moments of the memory - CN", situation, *pair, SELECTED)
    exact = "BN: exact moments - running"
    for strategy in ("single", "er"):
        cells = [Cell((PERMUTED,), {"norm": "bn", "strategy": strategy}, m) for m in ("matrix", "matrix_running")]
        situation = f"permuted MNIST, {NAMES[strategy]}, at 0.03"
        yield f"exact {strategy}", Comparison(exact, situation, cells[0], cells[1], f"{FIXED}; {SAME}")
    cells = [Cell((MORE,), {"norm": "bn", "tasks": 4}, m) for m in ("matrix", "matrix_running")]
    situation = "Split CIFAR-100, four tasks, ER, at 0.03"
    yield "exact cifar100", Comparison(exact, situation, cells[0], cells[1], f"{FIXED}; {SAME}")


def _other_norms() -> Iterator[tuple[str, Comparison]]:
    """Other norms on Split CIFAR-100."""
    for strategy in STRATEGIES:
        for entry in [*NEWER, "BN, frozen after the first task", "BN, moments of each task"]:
            situation = NAMES[strategy]
            pair = rival(entry, strategy), selected("bn", strategy)
            yield f"{entry} {strategy}", Comparison(f"{entry} - BN", situation, *pair, SELECTED)
        pair = rival(WS, strategy), selected("gn", strategy)
        yield f"ws {strategy}", Comparison(f"{WS} - GN", NAMES[strategy], *pair, SELECTED)
    gn = recipe("gn", "single")
    for norm in ("bn", "cn"):
        pair = gn, recipe(norm, "single")
        what = f"GN - {norm.upper()}"
        yield f"gn {norm}", Comparison(what, "no replay, both at 0.03", *pair, FIXED, ("acc", "aia", "fm", "la"))


SECTIONS = {
    "CN and BN on Split CIFAR-100": _split_cifar100,
    "CN and BN on other streams": _other_streams,
    "Moments in evaluation": _moments,
    "Other norms on Split CIFAR-100": _other_norms,
}


@cache
def sections() -> dict[str, dict[str, Comparison]]:
    """All comparisons by section and name."""
    return {title: dict(make()) for title, make in SECTIONS.items()}


@cache
def comparisons() -> dict[str, Comparison]:
    """All comparisons by name."""
    return {name: one for part in sections().values() for name, one in part.items()}


# The primary questions of each stream, of which each score is a family of four (docs/concepts/deciding.md).
PRIMARY = (
    ("tuned er", "tuned derpp", "memory er", "memory derpp"),
    ("order er", "order derpp", "order bn er", "order bn derpp"),
    ("mini tuned er", "mini bn er", "mini bn derpp"),  # CN with DER++ has not been run
)


@cache
def verdicts(score: str) -> dict[str, str]:
    """Verdicts of the rule on the primary questions: ``aia``, or ``acc``."""
    found: dict[str, str] = {}
    for family in PRIMARY:
        alone = {name: decide_differences(comparisons()[name].by_seed(score)) for name in family}
        found |= {name: verdict.outcome for name, verdict in decide_family(alone, size=4).items()}
    return found


@cache
def on_test_tasks(stream: str, strategy: str, norm: str, moments: str) -> dict[float, dict[int, tuple[float, float]]]:
    """ACC and mean over the stream by learning rate and seed, of all recorded runs with the settings of Table 2.

    Args:
        stream: Name of the stream.
        strategy: Name of the strategy.
        norm: ``bn`` or ``cn``.
        moments: ``running`` or ``memory``.
    """
    found: dict[float, dict[int, tuple[float, float]]] = {}
    for path in sorted(RECORDS.rglob("*.jsonl.gz")):
        for run in load(str(path.relative_to(RECORDS))):
            c = run.config
            if (c.stream.name, c.strategy.name, c.norm.name) != (stream, strategy, norm) or c.stream.part != "learn":
                continue
            plain = c.norm.momentum is None and c.norm.freeze_after is None and c.evaluate.weights == "plain"
            if (
                not plain
                or c.stream.class_order != "fixed"
                or c.stream.tasks is not None
                or c.strategy.forward != "joint"
                or c.memory.size != 50
            ):
                continue
            counts = run.matrix_of("matrix" if c.evaluate.moments == moments else f"matrix_{moments}")
            if counts is not None:
                found.setdefault(c.train.lr, {})[run.seed] = (score(counts, "acc"), score(counts, "aia"))
    return dict(sorted(found.items()))
