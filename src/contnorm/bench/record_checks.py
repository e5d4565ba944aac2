"""Validation of a record's content: types and ranges of all fields that other modules read.

A record is checked once, when it is loaded. Code that scores, compares or plots records needs no further checks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix
from contnorm.bench.metrics.multilabel import LabelMatrix

__all__ = ["LONGEST_TEXT", "check_fields", "check_reason", "check_whole", "checked_counts", "finite_drift"]

_LARGEST_COUNT = 10**15
LONGEST_TEXT = 2000  # characters of a name, a version or a fingerprint


def checked_counts(raw: Mapping[str, Any]) -> AccuracyMatrix | LabelMatrix:
    """Validate and return the counts of a record; its other matrices must have the same tasks and classes.

    Raises:
        ValueError: If a matrix is missing or invalid.

    Example:
        >>> checked_counts({"matrix": {"correct": [[5]], "total": [10]}}).tasks
        1
        >>> checked_counts({"matrix": {"correct": [[11]], "total": [10]}})
        Traceback (most recent call last):
        ValueError: AccuracyMatrix: 11 right answers in row 0, task 0, of 10 samples.
    """
    if "labels" in raw:
        labels = _label_matrix(raw["labels"], "labels")
        for key in ("labels_running", "labels_memory"):
            if raw.get(key) is not None:
                _same_tasks(_label_matrix(raw[key], key), labels, key)
        _check_classes(raw.get("classes"), labels.tally[0].classes)
        if "census" in raw:
            _check_census(raw["census"], labels.tasks, labels.tally[0].classes)
        return labels
    matrix = _accuracy_matrix(raw["matrix"], "matrix")
    for key in ("matrix_running", "matrix_memory", "matrix_task", "matrix_task_running", "matrix_task_memory"):
        if raw.get(key) is not None:
            _same_tasks(_accuracy_matrix(raw[key], key), matrix, key)
    return matrix


def check_fields(raw: Mapping[str, Any]) -> None:
    """Check the fields of a record other than its settings and counts.

    Raises:
        ValueError: With the name of the field, its value and the expected type or range.

    Example:
        >>> check_fields({"commit": 3})
        Traceback (most recent call last):
        ValueError: commit=3 must be a text
    """
    _check_drift(raw.get("drift", {}))
    _check_seconds(raw.get("seconds", {}))
    _check_task_ends(raw.get("task_ends", []))
    if raw.get("parameters") is not None:
        check_whole(raw["parameters"], "parameters")
    if "renorm" in raw:
        _number(_group(raw["renorm"], "renorm").get("corrected_share"), "renorm.corrected_share")
    for key in ("versions", "device", "source", "reached"):
        _check_facts(_group(raw.get(key, {}), key), key)
    if "images" in raw.get("source", {}):
        _text(raw["source"].get("name"), "source.name")
    for key in ("commit", "precision"):
        if raw.get(key) is not None:
            _text(raw[key], key)


def check_reason(value: Any) -> str:
    """Return the reason of a divergence if it is a text of valid length.

    Example:
        >>> check_reason("seed 1: the loss is nan.")
        'seed 1: the loss is nan.'
    """
    return _text(value, "reason")


def finite_drift(drift: Mapping[str, Any]) -> Mapping[str, Any]:
    """Drift of a record; empty if a distance is not finite, since it could be neither averaged nor plotted.

    Example:
        >>> finite_drift({"by_task": [{"norm1": {"mean": float("inf"), "var": 1.0}}]})
        {}
    """
    rows = drift.get("by_task", [])
    values = (value for row in rows for layer in row.values() for value in layer.values())
    return drift if all(map(math.isfinite, values)) else {}


def check_whole(value: Any, name: str, least: int = 0, most: int = _LARGEST_COUNT) -> int:
    """Return the value if it is an integer within its limits; booleans are rejected.

    Example:
        >>> check_whole(float("inf"), "seed")
        Traceback (most recent call last):
        ValueError: seed=inf must be a whole number from 0 to 1000000000000000
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}={_format_value(value)} must be a whole number from {least} to {most}")
    return value


def _accuracy_matrix(raw: Any, name: str) -> AccuracyMatrix:
    parts = _group(raw, name)
    total, correct = _whole_numbers(parts.get("total"), f"{name}.total"), _list(parts.get("correct"), f"{name}.correct")
    before = parts.get("before")
    rows = [*correct, *([before] if before is not None else [])]
    for row in rows:
        _whole_numbers(row, f"a row of {name}", gaps=True)
    matrix = AccuracyMatrix(correct, total, before)
    if any(None in row[: i + 1] for i, row in enumerate(correct)):
        raise ValueError(f"{name}: every task needs to be measured from when it was learned on")
    return matrix


def _label_matrix(raw: Any, name: str) -> LabelMatrix:
    parts = _group(raw, name)
    rows = [_list(row, f"a row of {name}.own") for row in _list(parts.get("own"), f"{name}.own")]
    entries = [entry for row in rows for entry in row if entry is not None]
    for stats in (*entries, *_list(parts.get("tally"), f"{name}.tally")):
        counts = _group(stats, f"an entry of {name}")
        check_whole(counts.get("samples"), f"{name}: samples")
        for key in ("tp", "predicted", "positive", "ap"):
            _text(counts.get(key), f"{name}: {key}", longest=None)
    matrix = LabelMatrix.from_json(parts)
    if not matrix.tally[0].classes:
        raise ValueError(f"{name} has no classes")
    return matrix


def _same_tasks(matrix: AccuracyMatrix | LabelMatrix, reference: AccuracyMatrix | LabelMatrix, name: str) -> None:
    if matrix.tasks != reference.tasks:
        raise ValueError(f"{name} has {matrix.tasks} tasks, the other counts have {reference.tasks}")
    if isinstance(matrix, LabelMatrix) and isinstance(reference, LabelMatrix):
        _same_classes(matrix.tally[0].classes, reference.tally[0].classes, name)


def _same_classes(actual: int, expected: int, name: str) -> None:
    if actual != expected:
        raise ValueError(f"{name} and labels are not of the same labels: {actual} and {expected} of them")


def _check_classes(raw: Any, classes: int) -> None:
    parts = _group(raw, "classes")
    for key in ("names", "groups"):
        if key == "groups" or key in parts:
            values = _list(parts.get(key), f"classes.{key}")
            for text in values:
                _text(text, f"classes.{key}")
            _same_classes(len(values), classes, "classes")


def _check_census(raw: Any, tasks: int, classes: int) -> None:
    parts = _group(raw, "census")
    check_whole(parts.get("capacity"), "census.capacity")
    for key in ("held", "shown"):
        for line in _list(parts.get(key), f"census.{key}", tasks):
            counts = [int(word) for word in _text(line, f"census.{key}", longest=None).split()]
            _same_classes(len(_whole_numbers(counts, f"census.{key}")), classes, "census")
    for key in ("written", "evicted"):
        _whole_numbers(_list(parts.get(key), f"census.{key}", tasks), f"census.{key}")


def _check_drift(raw: Any) -> None:
    rows = _list(_group(raw, "drift").get("by_task", []), "drift.by_task")
    names: list[str] | None = None
    for row in rows:
        layers = _group(row, "a row of drift.by_task")
        names = list(layers) if names is None else names
        if list(layers) != names:
            raise ValueError("the rows of drift.by_task are not of the same layers")
        for layer, moments in layers.items():
            for moment in ("mean", "var"):
                value = _group(moments, f"drift of {layer}").get(moment)
                if type(value) not in (int, float):
                    raise ValueError(f"drift of {layer}: {moment}={_format_value(value)} must be a number")


def _check_seconds(raw: Any) -> None:
    seconds = _group(raw, "seconds")
    if "train" in seconds:
        _number(seconds["train"], "seconds.train")
    for value in _list(seconds.get("train_by_task", []), "seconds.train_by_task"):
        _number(value, "seconds.train_by_task")


def _check_task_ends(raw: Any) -> None:
    ends = [check_whole(value, "task_ends") for value in _list(raw, "task_ends")]
    if ends != sorted(ends):
        raise ValueError(f"task_ends={_format_value(ends)} must not decrease")


def _check_facts(facts: Mapping[str, Any], name: str) -> None:
    """Check the values of a group that reports print: all versions, and known names and counts of other groups."""
    for key, value in facts.items():
        if value is not None and (key in _TEXTS or name == "versions"):
            _text(value, f"{name}.{key}")
        elif value is not None and key in _COUNTS:
            check_whole(value, f"{name}.{key}")


_TEXTS = ("name", "kind", "fingerprint", "instructions", "cn_kernel")
_COUNTS = ("images", "published_images", "missing_images", "extra_images", "threads", "tasks", "of")


def _group(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name}={_format_value(value)} must be a group of values")
    return value


def _list(value: Any, name: str, length: int | None = None) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name}={_format_value(value)} must be a list")
    if length is not None and len(value) != length:
        raise ValueError(f"{name} has {len(value)} entries, {length} are expected")
    return value


def _whole_numbers(value: Any, name: str, gaps: bool = False) -> Sequence[Any]:
    for count in _list(value, name):
        if not (gaps and count is None):
            check_whole(count, name)
    return value  # type: ignore[no-any-return]


def _number(value: Any, name: str) -> None:
    if type(value) not in (int, float) or not 0 <= value <= _LARGEST_COUNT:
        raise ValueError(f"{name}={_format_value(value)} must be a finite number, 0 or more")


def _text(value: Any, name: str, longest: int | None = LONGEST_TEXT) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}={_format_value(value)} must be a text")
    if longest is not None and len(value) > longest:
        raise ValueError(f"{name} has {len(value)} characters, more than {longest}")
    return value


def _format_value(value: Any) -> str:
    """Short text of a value for an error message."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _LARGEST_COUNT:
        return f"<a number of {value.bit_length()} bits>"
    if isinstance(value, list | dict):
        return f"<a {type(value).__name__} of {len(value)} entries>"
    return repr(value) if len(str(value)) <= 80 else f"{str(value)[:60]!r}..."
