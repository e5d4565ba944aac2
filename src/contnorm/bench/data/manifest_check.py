"""Check the manifest of a built data set: types of all fields, and consistency of the counts.

The folder of a manifest can be from an untrusted source, so nothing in it is used before it is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contnorm.bench.data.multilabel import GROUPS
from contnorm.bench.data.multilabel_manifest import SPLITS
from contnorm.bench.data.safe_paths import is_plain_name

__all__ = ["manifest_problem"]

MAX_SIDE = 2**14


def manifest_problem(raw: Mapping[str, Any]) -> str:
    """Return the problem of a manifest that has all of its keys, as the end of a sentence; empty if it is valid."""
    checks = {
        "version": _is_count(raw["version"]),
        "name": _is_text(raw["name"]),
        "complete": type(raw["complete"]) is bool,
        "size": _is_count(raw["size"]) and 0 < raw["size"] <= MAX_SIDE,
        "fingerprint": _is_text(raw["fingerprint"]),
        "made_of": _is_text(raw["made_of"]),
        "folder": is_plain_name(raw["folder"]),
        "published": raw["published"] is None or _is_published(raw["published"]),
        "task_names": _are_texts(raw["task_names"]),
        "class_names": _are_texts(raw["class_names"]),
        "class_groups": _are_texts(raw["class_groups"]) and set(raw["class_groups"]) <= set(GROUPS),
    }
    wrong = [key for key, passed in checks.items() if not passed]
    if wrong:
        return f"has an unusable value of {wrong[0]!r}"
    if len(raw["class_groups"]) != len(raw["class_names"]):
        return "does not have one group per class"
    for part in ("images", "missing"):
        if not isinstance(raw[part], dict) or not all(_are_counts(raw[part].get(split), raw) for split in SPLITS):
            return f"has counts in {part!r} that do not fit its tasks and classes"
    return ""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_text(value: Any) -> bool:
    return type(value) is str and value.isprintable()


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is_text, value))


def _is_published(value: Any) -> bool:
    return isinstance(value, dict) and _is_count(value.get("images")) and type(value.get("lists_as_published")) is bool


def _are_counts(value: Any, raw: Mapping[str, Any]) -> bool:
    if not isinstance(value, dict) or not all(_is_count(value.get(key)) for key in ("images", "unlabelled")):
        return False
    by_task, by_class = value.get("by_task"), value.get("by_class")
    if not isinstance(by_task, list) or not isinstance(by_class, dict):
        return False
    counted = all(map(_is_count, by_task)) and all(map(_is_count, by_class.values()))
    return counted and len(by_task) == len(raw["task_names"]) and set(by_class) == set(raw["class_names"])
