"""The conformance table is current: every feature was recorded, with the pinned versions, and nothing failed."""

from __future__ import annotations

import re

import pytest

from tests.integrations.conformance import (
    BEGIN,
    END,
    FRAMEWORKS,
    PAGE,
    ROOT,
    Outcomes,
    load_records,
    marked_features,
    replace_table,
    table,
    write_records,
)


def test_page_has_the_table_of_the_records() -> None:
    page = PAGE.read_text()
    assert replace_table(page, table(load_records())) == page, "run `python -m tests.integrations.conformance`"


def test_every_marked_feature_is_recorded() -> None:
    recorded = {(raw["framework"], feature) for raw in load_records() for feature in raw["features"]}
    assert recorded == marked_features(), "run `make test-integrations`"


@pytest.mark.parametrize("raw", load_records(), ids=lambda raw: f"{raw['framework']}-{raw['device']}")
def test_recorded_run_has_passed(raw: dict[str, object]) -> None:
    features = raw["features"]
    assert isinstance(features, dict) and features
    for feature, counts in features.items():
        assert counts.get("passed", 0) > 0 and "failed" not in counts, feature


def test_recorded_versions_are_the_pinned_ones() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for raw in load_records():
        distribution = FRAMEWORKS[raw["framework"]][1]
        if distribution is not None and raw["device"] == "CPU":
            assert raw["version"] == pins[distribution], raw["framework"]


def test_a_framework_whose_tests_were_skipped_keeps_its_record(tmp_path) -> None:
    outcomes = Outcomes()
    outcomes.add("timm", "saves", "skipped")
    assert write_records(outcomes, "cpu", tmp_path) == []
    outcomes.add("timm", "builds", "passed")
    (path,) = write_records(outcomes, "cpu", tmp_path) if _has("timm") else (None,)
    if path is not None:
        (raw,) = load_records(tmp_path)
        assert raw["features"] == {"builds": {"passed": 1}, "saves": {"skipped": 1}}
        assert "| builds | 1 |" in table([raw]) and "| saves | 0 (1 skipped) |" in table([raw])
        assert table([raw]) in replace_table(f"# A page\n{BEGIN}\nold\n{END}\nrest", table([raw]))


def _has(name: str) -> bool:
    return bool(pytest.importorskip(name, reason=f"{name} is not installed"))
