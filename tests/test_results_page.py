"""The numbers on the results page are those of the records it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix, score
from contnorm.bench.records import Record, Store, spread_over_seeds

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "results" / "first-runs.md").read_text()
STORE = Store(ROOT / "docs" / "records" / "runs")
ROWS = re.findall(r"^\| `([0-9a-f]{12})` \| (.*) \|$", PAGE, re.MULTILINE)


def first_seeds(name: str) -> list[Record]:
    """Records of a run without fresh seeds, which are from 100 on."""
    return [record for record in STORE.find(name) if record.seed < 100]


def shown(values: list[float]) -> str:
    return "{:.2f} +- {:.2f}".format(*spread_over_seeds(values))


def scores(records: list[Record], key: str) -> list[str]:
    matrices = [AccuracyMatrix(**record.raw[key]) for record in records]
    return [shown([score(matrix, name) for matrix in matrices]) for name in ("acc", "fm", "la")]


def drift(records: list[Record]) -> list[str]:
    last = [record.drift["by_task"][-1] for record in records]
    places = [("norm1", "mean"), ("norm2", "mean"), ("norm1", "var"), ("norm2", "var")]
    return [shown([float(by_layer[layer][moment]) for by_layer in last]) for layer, moment in places]


@pytest.mark.parametrize("row", ROWS, ids=[" ".join([name, *text.split(" | ")[:2]]) for name, text in ROWS])
def test_a_row_is_what_its_records_say(row: tuple[str, str]) -> None:
    name, cells = row[0], row[1].split(" | ")
    records = first_seeds(name)
    assert len(records) == 5
    ours = [cell for cell in cells if "+-" in cell]
    if len(ours) == 4:
        assert ours == drift(records)
        return
    running = "matrix_running" in records[0].raw and "BN*" not in cells
    assert ours == scores(records, "matrix_running" if running else "matrix")


def test_the_page_has_rows_and_states_the_paired_difference() -> None:
    assert len(ROWS) == 10
    bn, cn = (first_seeds(name) for name in ("ba9df79f047e", "85d5f7c04f8c"))
    gain = [b.score("acc") - a.score("acc") for a, b in zip(bn, cn, strict=True)]
    assert f"above BN by {spread_over_seeds(gain)[0]:.2f} points" in PAGE


def test_every_record_obeys_the_identity_of_its_scores() -> None:
    for record in STORE.load_all():
        tasks = record.matrix.tasks
        assert record.score("la") - record.score("acc") <= (tasks - 1) / tasks * record.score("fm") + 1e-9, record.path
