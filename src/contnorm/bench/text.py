"""Text of scores and remarks on records, for the terminal, pages and files. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from contnorm.bench.data.dataset import compare_fingerprints, not_comparable
from contnorm.bench.records import Record, spread_over_seeds

LABEL_FORGETTING = "FM is normalized: the share of its best score that a task has lost at the end."
MOST_NAMED = 6  # rows or cases to name in one remark


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


def named(names: Sequence[str], what: str = "") -> str:
    """List the first few of many names.

    Example:
        >>> named(["a", "b"]), named(["bn"] * 8, "rows")
        ('a, b', 'bn, bn, bn, bn, bn, bn and 2 more rows')
    """
    more = f" and {len(names) - MOST_NAMED} more {what}".rstrip() if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def data_part(record: Record) -> str:
    """Describe which images of a published data set a run used; empty if it used all or the data set is not published.

    Example:
        >>> from contnorm.bench.config.schema import RunConfig
        >>> from contnorm.bench.records import make_record
        >>> source = {"name": "cocoseq", "images": 1520, "published_images": 41438}
        >>> data_part(make_record(RunConfig(), 0, {"matrix": {"correct": [[1]], "total": [2]}, "source": source}))
        '1,520 of the 41,438 published images of cocoseq'
    """
    source = record.source
    images, published = source.get("images"), source.get("published_images")
    if images is None or published is None or (images == published and not source.get("missing_images")):
        return ""
    if extra := source.get("extra_images"):
        return f"{images:,} images of {source['name']} ({extra:,} of them not among the {published:,} published ones)"
    return f"{images:,} of the {published:,} published images of {source['name']}"


def digits_remarks(records: Iterable[Record]) -> list[str]:
    """One remark for each stream that was run on the embedded digits instead of MNIST.

    Example:
        >>> from contnorm.bench.config.schema import from_dict
        >>> from contnorm.bench.records import make_record
        >>> config = from_dict({"stream": {"source": "digits"}})
        >>> digits_remarks([make_record(config, 0, {"matrix": {"correct": [[1]], "total": [2]}})])
        ['permuted-mnist (digits): the data are the included 5,000 digits, not MNIST.']
    """
    streams = dict.fromkeys(record.config.stream.name for record in records if record.config.stream.source == "digits")
    return [f"{stream} (digits): the data are the included 5,000 digits, not MNIST." for stream in streams]


def data_remarks(records: Iterable[Record]) -> list[str]:
    """One remark for each stream on the embedded digits, and for each data set whose records (may) use different data.

    Example:
        >>> from contnorm.bench.config.schema import RunConfig, StreamConfig
        >>> from contnorm.bench.records import make_record
        >>> config = RunConfig(stream=StreamConfig(source="mnist"))
        >>> counts = {"matrix": {"correct": [[1]], "total": [2]}}
        >>> sources = [{"fingerprint": text} for text in ("2:0a", "2:0b")]
        >>> data_remarks(make_record(config, i, {**counts, "source": one}) for i, one in enumerate(sources))
        ['mnist: the runs used different data, with fingerprints 2:0a, 2:0b.']
    """
    records = list(records)
    by_source: dict[str, dict[str, None]] = {}
    for record in records:
        fingerprint = record.source.get("fingerprint")
        if isinstance(fingerprint, str):
            by_source.setdefault(str(record.config.stream.source), {})[fingerprint] = None
    lines = digits_remarks(records)
    for source, fingerprints in by_source.items():
        matches = {compare_fingerprints(a, b) for a, b in combinations(fingerprints, 2)}
        if "different" in matches:
            lines.append(f"{source}: the runs used different data, with fingerprints {', '.join(fingerprints)}.")
        elif matches:
            lines.append(f"{source}: the runs may have used different data: {not_comparable(*list(fingerprints)[:2])}.")
    return lines


def divergence_text(reasons: Mapping[int, str], finished: int) -> str:
    """Describe how many seeds of a run diverged and why.

    Args:
        reasons: Diverged seeds, each with the reason.
        finished: Number of seeds that finished.

    Example:
        >>> divergence_text({3: "seed 3: the loss is nan at step 9 of 60 (task 2)."}, finished=4)
        '1 of 5 seeds diverged and is not counted. seed 3: the loss is nan at step 9 of 60 (task 2).'
    """
    count = len(reasons)
    if finished:
        what = f"{count} of {count + finished} seeds diverged and {'is' if count == 1 else 'are'} not counted"
    else:
        what = {1: "its only seed diverged", 2: "both seeds diverged"}.get(count, f"all {count} seeds diverged")
    return " ".join(filter(None, [f"{what}.", *reasons.values()]))
