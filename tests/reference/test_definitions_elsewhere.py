"""Definitions of other libraries on the page of metrics: their code gives what the page says."""

import numpy as np
import pytest
from tools.reference.metrics import ACCURACIES

from contnorm.bench.metrics import AccuracyMatrix, score

MATRIX = AccuracyMatrix(ACCURACIES, [100] * len(ACCURACIES))


def test_forgetting_of_mammoth() -> None:
    """Its rows are padded with zeros; the maximum is over all of them."""
    rows = [row[: i + 1] + [0] * (len(row) - i - 1) for i, row in enumerate(ACCURACIES)]
    best = np.max(np.array(rows), axis=0)
    lower = [[*row[: i + 1], *[None] * (len(row) - i - 1)] for i, row in enumerate(ACCURACIES)]
    matrix = AccuracyMatrix(lower, [100] * len(lower))
    assert score(matrix, "fm_mammoth") == pytest.approx(np.mean([best[j] - rows[-1][j] for j in range(3)]))


@pytest.mark.slow
def test_forgetting_and_transfer_of_avalanche() -> None:
    metrics = pytest.importorskip("avalanche.evaluation.metrics.forgetting_bwt", reason="Avalanche is not installed")
    forgetting, bwt = metrics.Forgetting(), metrics.BWT()
    for metric in (forgetting, bwt):
        for task, row in enumerate(ACCURACIES):
            metric.reset_last()  # as its plugin does before each evaluation
            metric.update(task, row[task], initial=True)
            for earlier in range(task):
                metric.update(earlier, row[earlier])
    assert sorted(forgetting.result()) == [0, 1, 2], "all tasks but the last"
    assert np.mean(list(forgetting.result().values())) == pytest.approx(score(MATRIX, "fm_first"))
    assert np.mean(list(bwt.result().values())) == pytest.approx(score(MATRIX, "bwt"))
