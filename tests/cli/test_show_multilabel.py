"""`contnorm show` and `contnorm compare` for multi-label runs: scores by group of labels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from contnorm.bench.config.schema import from_dict, merge_settings
from contnorm.bench.label_metrics import LabelMatrix, LabelStats, c_f1, o_f1
from contnorm.bench.records import Record, Store
from contnorm.bench.streams.tasks import STREAMS
from contnorm.cli.show import show_matrices, show_scores
from tests.cli.test_show import printed
from tests.cli.test_show import records as records_of_one_label

GROUPS = ["majority", "moderate", "minority"]


def stats(tp: tuple[int, ...], ap: tuple[float, ...]) -> LabelStats:
    return LabelStats(10, tp, (4, 4, 4), (4, 4, 4), ap)


def counts(seed: int) -> LabelMatrix:
    """Two tasks of three labels: of label 0 half is lost of the first task, of the others nothing."""
    first, then = stats((4, 3, 2), (1.0, 0.6, 0.4)), stats((2, 3, 2), (0.5, 0.6, 0.4))
    end = stats((2, 3, seed + 1), (0.5, 0.25, 0.125))
    return LabelMatrix([[first, None], [then, first]], [first, end])


def records(where: Path, seeds: int = 2, **groups: Any) -> list[Record]:
    own: dict[str, Any] = {"stream": {"name": "cocoseq", "source": "cocoseq"}, "strategy": {"name": "prs"}}
    own["memory"] = {"kind": "prs"}
    config = from_dict(merge_settings(merge_settings(STREAMS["cocoseq"].defaults, own), groups))
    store = Store(where)
    for seed in range(seeds):
        source = {"name": "cocoseq", "fingerprint": "0", "images": 1520, "published_images": 41438}
        classes = {"names": ["a", "b", "c"], "groups": GROUPS}
        store.save(config, seed, {"labels": counts(seed).to_json(), "classes": classes, "source": source})
    return list(store.find(config.hash))


def test_scores_of_all_labels_and_each_group(tmp_path: Path) -> None:
    found = records(tmp_path)
    _, head, *rows = printed(show_scores, found, width=200).splitlines()
    assert re.search(r"C-F1 +O-F1 +mAP +FM C-F1 +FM O-F1 +FM mAP", head)
    assert [re.search(r"running  2 +(\w+)", row)[1] for row in rows[:4]] == ["overall", *GROUPS]  # type: ignore[index]
    tallies = [counts(seed).tally[-1] for seed in range(2)]
    overall = sum(c_f1(tally) for tally in tallies) / 2
    minority = sum(o_f1(tally, [2]) for tally in tallies) / 2
    assert f"  {overall:.2f} +- " in rows[0] and f"  {minority:.2f} +- " in rows[3]
    assert "50.00 +- 0.00" in rows[1] and rows[1].count("50.00 +- 0.00") == 6, "majority: half right, and half lost"
    assert rows[3].endswith("0.00 +- 0.00")
    assert any(row.endswith(": used 1,520 of the 41,438 published images of cocoseq.") for row in rows)


def test_multilabel_changed_settings_are_shown(tmp_path: Path) -> None:
    plain, changed = records(tmp_path), records(tmp_path, train={"passes": 20}, memory={"size": 100})
    assert "memory.kind" not in printed(show_scores, plain), "PRS brings its memory"
    shown = printed(show_scores, changed, width=200)
    assert "memory.size=100" in shown and "train.passes=20" in shown


def test_single_label_runs_come_first(tmp_path: Path) -> None:
    both = [*records(tmp_path / "a"), *records_of_one_label(tmp_path / "b")]
    shown = printed(show_scores, both)
    assert shown.index("ACC") < shown.index("C-F1") and "split-mnist" in shown.split("C-F1")[0]


def test_map_by_task(tmp_path: Path) -> None:
    shown = printed(show_matrices, records(tmp_path, seeds=1))
    assert re.search(r"after +task 0 +task 1\ntask 0 +66\.7 +-\ntask 1 +50\.0 +66\.7", shown)
