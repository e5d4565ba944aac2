"""Tables of the README, which-norm.md, evidence.md and convert-a-model.md in docs, and the line about speed."""

from __future__ import annotations

import csv
import json
from statistics import fmean, stdev
from textwrap import fill
from typing import Any

from tools.comparisons import (
    NAMES,
    NEWER,
    STRATEGIES,
    WS,
    comparisons,
    sections,
    verdicts,
)
from tools.doc_figures import layer_ratios
from tools.evidence import RECORDS, Comparison

__all__ = ["answers_table", "calibration_table", "evidence_tables", "fine_tuning_table", "results_table", "speed_line"]

ROOT = RECORDS.parents[1]
SCORES = {"acc": "ACC", "aia": "mean over the stream", "fm": "FM", "la": "LA", "map": "mAP"}
CIFAR10_CASES = [f"cifar10 {size} {known}" for size in (500, 2560) for known in ("unknown", "known")]
NOT_RUN = "records/README.md#not-run"
MINI_RATES = [f"mini derpp {rate}" for rate in (0.003, 0.005, 0.01, 0.03)]


def _row(*columns: str) -> str:
    return f"| {' | '.join(columns)} |"


def _points(*names: str, score: str = "aia") -> str:
    """Mean differences, the lowest and the highest of several: ``+2.36 to +7.50``."""
    means = [comparisons()[name].difference(score).mean for name in names]
    texts = list(dict.fromkeys(f"{mean:+.2f}" for mean in (min(means), max(means))))
    return " to ".join(texts)


def _seeds(*names: str) -> str:
    *others, most = sorted({comparisons()[name].seeds for name in names})
    return f"{', '.join(map(str, others))} or {most}" if others else str(most)


def results_table() -> str:
    """What the moments of the memory gain, and CN minus BN, by stream: the README's results."""
    rows = {
        "BN with moments of the memory - the same networks with running moments": [
            ("Split CIFAR-100", "memory"),
            ("Split CIFAR-100, class order by seed", "order bn"),
            ("Split mini-ImageNet", "mini bn"),
            ("Split MNIST, class-incremental", "class bn"),
        ],
        "CN - BN, running moments": [
            ("Split CIFAR-100", "tuned"),
            ("Split CIFAR-100, class order by seed", "order"),
            ("Split mini-ImageNet", "mini tuned"),
            ("Split mini-ImageNet, best rates on test tasks", "mini 0.01"),
            ("Split CIFAR-10, class-incremental, memory of 2,560, both at 0.03", "cifar10"),
        ],
        "CN - BN, moments of the memory, rates selected with running moments": [
            ("Split CIFAR-100, class order by seed", "order both"),
            ("Split mini-ImageNet", "mini both"),
        ],
    }
    other_names = {"mini 0.01 derpp": "mini derpp 0.01", "cifar10 derpp": "cifar10 2560 unknown"}
    lines = [_row("points, mean over the stream", "ER", "DER++", "seeds"), "|---|---|---|---|"]
    for title, some in rows.items():
        lines.append(_row(f"**{title}**", "", "", ""))
        for text, question in some:
            names = [other_names.get(name, name) for name in (f"{question} {strategy}" for strategy in STRATEGIES)]
            found = [comparisons().get(name) for name in names]
            exploratory = any(one is not None and one.basis.startswith("exploratory") for one in found)
            seeds = ", ".join(dict.fromkeys(str(one.seeds) for one in found if one is not None))
            cells = ["-" if one is None else one.text("aia") for one in found]
            lines.append(_row(text, *cells, seeds + ", exploratory" * exploratory))
    return "\n".join(lines)


def answers_table() -> str:
    """What to do in which situation: the table of docs/which-norm.md."""
    of = comparisons()
    again = of["memory again"]
    spread = [cell.std() for cell in (again.second, again.first, of["tuned er"].first)]  # type: ignore[union-attr]
    widest = max(_half(of[f"{entry} {s}"]) for entry in NEWER for s in STRATEGIES)
    narrowest = min(_half(of[f"{entry} {s}"]) for entry in NEWER for s in STRATEGIES)
    fm, la, aia = ([_points("gn bn", score=one), _points("gn cn", score=one)] for one in ("fm", "la", "aia"))
    asked = [f"{question} {s}" for question in ("memory", "order bn", "mini bn") for s in STRATEGIES]
    rows = [
        (
            "a replay memory, task-incremental",
            "[re-estimate](howto/moments-from-memory.md) moments from it before you evaluate",
            f"BN on Split CIFAR-100: {_by_strategy('memory')}; class order by seed: {_by_strategy('order bn')}; on "
            f"Split mini-ImageNet: {_by_strategy('mini bn')}. CN on Split CIFAR-100, class order by seed: "
            f"{_by_strategy('order cn')}; on Split mini-ImageNet: {_by_strategy('mini cn')}",
            f"BN {_words(*asked)} in six of six, the same networks, {_seeds(*asked)} fresh seeds",
        ),
        (
            "a replay memory, class-incremental",
            "keep running moments, or [weight samples](howto/moments-from-memory.md#in-the-benchmark) as in a batch",
            f"re-estimated, BN: {_by_strategy('class bn')}, CN: {_by_strategy('class cn')}; weighted, BN: "
            f"{_by_strategy('class batch bn')}, CN: {_by_strategy('class batch cn')}",
            f"Split MNIST with an MLP only, {_seeds('class bn er', 'class cn derpp')} fresh seeds, one rate",
        ),
        (
            "re-estimated moments: BN or CN?",
            "BN on Split CIFAR-100",
            f"CN - BN: {_by_strategy('order both')}; on Split mini-ImageNet: {_by_strategy('mini both')}",
            f"{_seeds('order both er', 'mini both er')} fresh seeds, at rates selected with running moments; at other "
            "rates not known",
        ),
        (
            "running moments, tuned rates, Split CIFAR-100 or ER on Split mini-ImageNet",
            "BN",
            f"CN - BN: {_by_strategy('tuned', True)}; class order by seed: {_by_strategy('order', True)}; on Split "
            f"mini-ImageNet: {_by_strategy('mini tuned', True)}",
            f"{_seeds('tuned er', 'tuned derpp', 'mini tuned er')} fresh seeds; one "
            "[reading](deviations.md#readings-of-the-protocol) of the protocol",
        ),
        (
            "running moments, DER++ on Split mini-ImageNet or Split CIFAR-10",
            "CN",
            f"CN - BN: {_points(*MINI_RATES)} on Split mini-ImageNet, at four rates of BN; {_points(*CIFAR10_CASES)} "
            "on Split CIFAR-10",
            f"exploratory: {_seeds(*MINI_RATES)} seeds, rates compared on test tasks; {_seeds(*CIFAR10_CASES)} seeds, "
            "one rate",
        ),
        (
            "running moments, the rate is not tuned",
            "CN, or tune it",
            f"CN - BN at 0.03 on Split CIFAR-100: {_by_strategy('one rate')}; on Split mini-ImageNet: ER "
            f"{_points('mini er 0.03')}, DER++ "
            f"{_points('mini derpp one rate')}",
            f"{_seeds('one rate er')} fresh seeds for ER on Split CIFAR-100; others exploratory, "
            f"{_seeds('one rate derpp', 'mini er 0.03', 'mini derpp one rate')} seeds",
        ),
        (
            "a small or a large memory",
            "no difference is shown",
            f"CN - BN with 500, 2,560 and 5,120 samples: class-incremental {_by_size('unknown')}; task-incremental "
            f"{_by_size('known')}",
            f"exploratory: DER++ on Split CIFAR-10, {_seeds(*CIFAR10_CASES)} seeds; "
            f"{_seeds('cifar10 5120 unknown')} with 5,120",
        ),
        ("another batch size than 10 with 10, or a pretrained network", "not known", "-", f"[not run]({NOT_RUN})"),
        (
            "several labels per image",
            "either",
            f"CN - BN in mAP: PRS {_points('coco prs', score='map')}, reservoir "
            f"{_points('coco reservoir', score='map')}",
            f"exploratory: a part of COCOseq, {_seeds('coco prs', 'coco reservoir')} seeds; intervals contain zero",
        ),
        (
            "results must vary little between seeds",
            "re-estimate",
            f"deviation of ACC: BN {spread[0]:.2f}, the same networks with moments of the memory {spread[1]:.2f}; CN "
            f"{spread[2]:.2f}",
            f"exploratory: ER on Split CIFAR-100, {again.seeds} seeds; {of['tuned er'].seeds} of CN",
        ),
        (
            "no replay, and old tasks matter most",
            "GN",
            f"GN - BN: forgetting {fm[0]}, learning accuracy {la[0]}, over the stream {aia[0]}; GN - CN: {fm[1]}, "
            f"{la[1]}, {aia[1]}",
            f"{_seeds('gn bn', 'gn cn')} seeds, one rate for all",
        ),
        (
            "no batch statistics allowed",
            WS,
            f"over GN: {_by_strategy('ws')}; over BN: {_by_strategy(WS)}",
            f"{of['ws er'].seeds} seeds with ER, {of['ws derpp'].seeds} with DER++",
        ),
        (
            "a norm of a [newer paper](concepts/rivals.md)",
            "BN",
            f"of {len(NEWER)}, none is shown to have a higher ACC; over the stream {_above_bn()}, uncorrected",
            f"{_seeds(*(f'{e} {s}' for e in NEWER for s in STRATEGIES))} seeds; 95 % intervals of ACC of "
            f"±{narrowest:.1f} to ±{widest:.1f}: smaller gains are not known",
        ),
    ]
    return "\n".join([_row("if", "do", "gain", "sure?"), "|---|---|---|---|", *(_row(*one) for one in rows)])


def _by_strategy(question: str, verdict: bool = False) -> str:
    """Mean differences, and verdicts of the rule: ``ER -0.24 (equivalent), DER++ -0.48 (undecided)``."""
    names = {s: f"{question} {s}" for s in STRATEGIES if f"{question} {s}" in comparisons()}
    texts = [f"{NAMES[s]} {_points(name)}" + (f" ({_words(name)})" if verdict else "") for s, name in names.items()]
    return ", ".join(texts)


def _by_size(known: str) -> str:
    """Differences on Split CIFAR-10 by size of the memory."""
    return ", ".join(_points(f"cifar10 {size} {known}") for size in (500, 2560, 5120))


def _above_bn() -> str:
    """Newer norms whose 95 % interval of the mean over the stream lies above that of BN."""
    above = [(f"{entry} {s}", entry, NAMES[s]) for s in STRATEGIES for entry in NEWER]
    found = [one for one in above if comparisons()[one[0]].excludes_zero("aia") and _points(one[0])[0] == "+"]
    return ", ".join(f"{entry} {_points(name)} ({strategy})" for name, entry, strategy in found)


def _words(*names: str) -> str:
    """Verdicts of the rule on the mean over the stream."""
    return " or ".join(dict.fromkeys(verdicts("aia")[name].partition(",")[0] for name in names))


def _half(comparison: Comparison) -> float:
    """Half the width of the 95 % interval of ACC."""
    interval = comparison.difference("acc").t
    assert interval is not None
    return (interval.high - interval.low) / 2


def _links(comparison: Comparison) -> str:
    return ", ".join(f"[{number}](../records/{name})" for number, name in enumerate(comparison.archives, 1))


def _verdict(name: str) -> str:
    """Verdicts of the rule, over the stream and at the end, of a primary question."""
    return f"{verdicts('aia')[name]}; at the end {verdicts('acc')[name]}" if name in verdicts("aia") else "-"


def evidence_tables() -> str:
    """One row for each comparison: the tables of docs/results/evidence.md."""
    parts = []
    for title, rows in sections().items():
        lines = [
            f"## {title}\n",
            _row(
                "comparison",
                "situation",
                "seeds",
                "mean over the stream",
                "ACC at the end",
                "verdict",
                "basis",
                "records",
            ),
            "|---|---|---|---|---|---|---|---|",
        ]
        for name, one in rows.items():
            others = "".join(
                f"; {SCORES[score]} {one.text(score)}" for score in one.scores if score not in ("acc", "aia")
            )
            both = [one.text(score) if score in one.scores else "-" for score in ("aia", "acc")]
            both[1] = (both[1] + others).removeprefix("-; ")
            lines.append(_row(one.what, one.situation, str(one.seeds), *both, _verdict(name), one.basis, _links(one)))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def eager_ratios(path: str) -> list[float]:
    """Time of a training step with CN over that with BN in an eager loop, for each batch size."""
    rows = list(csv.DictReader((ROOT / "benchmarks" / "results" / "eager.csv").read_text().splitlines()))
    times = {(row["layer"], row["path"], row["batch"]): float(row["p50_us"]) for row in rows}
    return [times["cn", path, batch] / times["bn", "torch", batch] for batch in sorted({row["batch"] for row in rows})]


def speed_line() -> str:
    """Speed of CN compared with that of BN: in the bench's network, and in one converted from outside."""
    ratios = [ratio for by_case in layer_ratios().values() for ratio in by_case.values()]
    faster = sum(ratio < 1 for ratio in ratios)
    record = json.loads((RECORDS / "own-network-nvidia-h200.json").read_text())
    hosts = record["bench_eager_20_images"]
    compiled, eager = (
        [round(one["cn"] / one["bn"], 1) for one in record["steps"] if one["mode"].startswith(mode)]
        for mode in ("torch.compile", "eager")
    )
    slowest = max(eager_ratios("cpp"))
    text = (
        f"**Speed** on one H200: alone in a CUDA graph, CN is faster than BN in {faster} of {len(ratios)} cases. An "
        f"eager step of the bench's own network took at most {slowest:.2f} times as long with CN as with BN on one "
        f"host, and with 20 images {hosts['lowest']} to {hosts['highest']} times on several. A plain ResNet-18, "
        f"converted, took {min(compiled)} to {max(compiled)} times as long under `torch.compile`, and "
        f"{min(eager)} to {max(eager)} times in its first forty eager steps, before the C++ path is built. "
        "See the [benchmarks](docs/benchmarks.md)."
    )
    return fill(text, 120)


NETWORKS = {
    "resnet20": "ResNet-20, CIFAR-10",
    "resnet32": "ResNet-32, CIFAR-10",
    "resnet44": "ResNet-44, CIFAR-10",
    "resnet56": "ResNet-56, CIFAR-10",
    "resnet50": "ResNet-50, ImageNet",
    "lite0": "EfficientNet-Lite0, ImageNet",
}


def _calibrated() -> Any:
    return json.loads((RECORDS / "examples" / "calibrated-conversion.json").read_text())


def _accuracy(rows: list[Any], **wanted: object) -> str:
    """Accuracy of the rows with these values and no others: a number, mean and deviation over seeds, or a dash."""
    keys = {*wanted, "seed", "accuracy"}
    values = [
        row["accuracy"] for row in rows if set(row) | {"seed"} == keys and all(row[k] == v for k, v in wanted.items())
    ]
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{fmean(values):.1f}{spread}" if values else "-"


def calibration_table() -> str:
    """Accuracy of trained networks after a conversion, by the number of images for the calibration."""
    rows = _calibrated()["rows"]
    heads = ["network", "before", "to", "converted", *(f"{count:,} images" for count in (100, 500, 2000))]
    lines = [_row(*heads), _row(*["---"] * len(heads))]
    for network, name in NETWORKS.items():
        before = _accuracy(rows, network=network, to="bn")
        for to in dict.fromkeys(row["to"] for row in rows if row["network"] == network and row["to"] != "bn"):
            cells = [_accuracy(rows, network=network, to=to, images=count) for count in (0, 100, 500, 2000)]
            lines.append(_row(name, before, to, *cells))
    return "\n".join(lines)


def fine_tuning_table() -> str:
    """Accuracy after fine-tuning, plain and calibrated, by learning rate; for batch norm, of the trained network."""
    rows = _calibrated()["rows"]
    tuned = [row for row in rows if "steps" in row]
    rates = sorted({row["rate"] for row in tuned})
    heads = [f"{kind}, {rate}" for rate in rates for kind in ("plain", "calibrated")]
    lines = [_row("network", "norm", "calibrated, no step", *heads), _row(*["---"] * (3 + len(heads)))]
    for network, name in NETWORKS.items():
        norms = dict.fromkeys(row["to"] for row in tuned if row["network"] == network)
        for to in sorted(norms, key=lambda to: to != "bn"):
            wanted: dict[str, Any] = {"network": network, "to": to}
            start = _accuracy(rows, **wanted) if to == "bn" else _accuracy(rows, **wanted, images=500)
            after = [
                _accuracy(rows, **wanted, images=count, steps=tuned[0]["steps"], rate=rate)
                for rate in rates
                for count in (0, 500)
            ]
            lines.append(_row(name, to, start, *after))
    return "\n".join(lines)
