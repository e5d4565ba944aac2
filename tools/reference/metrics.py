"""Page of all metrics: formulas, ranges, and the definitions of other libraries, with a worked example."""

from __future__ import annotations

from typing import NamedTuple

from contnorm.bench.label_metrics import LABEL_SCORES
from contnorm.bench.metrics import FORGETTING, SCORES, AccuracyMatrix, score
from tools.reference.markdown import code, table

__all__ = ["ACCURACIES", "LABEL_METRICS", "METRICS", "UNTRAINED", "Metric", "page"]


class Metric(NamedTuple):
    """Formula, range and direction of a metric."""

    formula: str
    range: str
    better: str


# Accuracies of the worked example: row i after task i, in percent. Its scores all differ, and entries above the
# diagonal are measured too.
ACCURACIES = [[90, 30, 20, 10], [70, 80, 65, 20], [72, 84, 60, 15], [75, 60, 70, 85]]
UNTRAINED = [10, 10, 10, 10]

_FROM_BEST = "from -100 to 100"
METRICS = {
    "acc": Metric("mean over j of a(T, j)", "0 to 100", "higher"),
    "aia": Metric("mean over i of (mean over j = 1 ... i of a(i, j))", "0 to 100", "higher"),
    "fm": Metric("mean over j < T of (max over i = j ... T-1 of a(i, j)) - a(T, j)", _FROM_BEST, "lower"),
    "la": Metric("mean over i of a(i, i)", "0 to 100", "higher"),
    "fm_ctn": Metric("mean over j < T of (max over i = 1 ... T-1 of a(i, j)) - a(T, j)", _FROM_BEST, "lower"),
    "fm_facil": Metric("as fm_ctn, with a(i, j) = 0 where nothing was measured", _FROM_BEST, "lower"),
    "fm_mammoth": Metric("mean over j < T of (max over i = 1 ... T of a(i, j)) - a(T, j)", "0 to 100", "lower"),
    "fm_raptor": Metric("as fm_mammoth, but the mean over j = 1 ... T", "0 to 100", "lower"),
    "fm_first": Metric("mean over j < T of a(j, j) - a(T, j)", _FROM_BEST, "lower"),
    "bwt": Metric("mean over j < T of a(T, j) - a(j, j)", _FROM_BEST, "higher"),
    "fwt": Metric("mean over j > 1 of a(j-1, j) - a(0, j)", _FROM_BEST, "higher"),
}
LABEL_METRICS = {
    "c_f1": Metric("2 P R / (P + R), with the means over classes P of tp / predicted, R of tp / positive", "0 to 100",
                   "higher"),
    "o_f1": Metric("2 sum of tp / (sum of predicted + sum of positive)", "0 to 100", "higher"),
    "map": Metric("mean over classes of the average precision", "0 to 100", "higher"),
    "fm_c_f1": Metric("mean over j < T of (best - final) / best of task j's C-F1", "up to 100", "lower"),
    "fm_o_f1": Metric("the same of O-F1", "up to 100", "lower"),
    "fm_map": Metric("the same of mAP", "up to 100", "lower"),
}  # fmt: skip

_ELSEWHERE = [
    ("average accuracy", "`acc`", "the same, as *Class-IL* and *Task-IL* accuracy",
     "`Top1_Acc_Stream`: over all test samples, so tasks with more samples weigh more; a fraction of 1"),
    ("forgetting", "`fm`: best since the task was learned, without the last row",
     "`fm_mammoth`: best over all rows, the last included, so never negative",
     "`StreamForgetting` is `fm_first`: from the accuracy right after the task was learned; a fraction of 1"),
    ("backward transfer", "`bwt`", "the same", "`StreamBWT`: the same; a fraction of 1"),
    ("forward transfer", "`fwt`", "the same", "`StreamForwardTransfer`: the same; a fraction of 1"),
    ("learning accuracy", "`la`", "none", "none"),
]  # fmt: skip


def page() -> str:
    """All metrics with formulas and a worked example."""
    matrix = AccuracyMatrix(ACCURACIES, [100] * len(ACCURACIES), UNTRAINED)
    names = {function: definition for definition, function in FORGETTING.items()}
    rows = [
        (
            code(name),
            (function.__doc__ or "").strip(),
            code(METRICS[name].formula),
            METRICS[name].range,
            METRICS[name].better,
            code(names[function]) if function in names else "",
            f"{score(matrix, name):.2f}",
        )
        for name, function in SCORES.items()
    ]
    lines = [_INTRODUCTION, ""]
    lines += table(("name", "meaning", "formula", "range", "better", "`definition=`", "example"), rows)
    lines += ["", _EXAMPLE, "", "## The same names in mammoth and Avalanche", ""]
    lines += [_OTHERS.format(**{name: score(matrix, name) for name in SCORES}), ""]
    lines += table(("metric", "here", "mammoth", "Avalanche"), _ELSEWHERE)
    lines += ["", _IMPLEMENTATIONS, "", "## Multi-label scores", "", _MULTI_LABEL, ""]
    label_rows = [(code(name), code(m.formula), m.range, m.better) for name, m in LABEL_METRICS.items()]
    assert list(LABEL_METRICS) == list(LABEL_SCORES)
    lines += table(("name", "formula", "range", "better"), label_rows)
    rest = _DIAGNOSIS.replace("@DIAGNOSIS@", "\n".join(table(("name", "formula", "range", "better"), _OF_DIAGNOSIS)))
    rest = rest.replace("@SPREAD@", "\n".join(table(("name", "formula", "range", "meaning"), _OF_SPREAD)))
    return "\n".join([*lines, "", _LABEL_EXAMPLE, "", rest])


_INTRODUCTION = """\
# Metrics

`a(i, j)` is the accuracy in percent on the test samples of task j after learning task i, for tasks 1 to T; `a(0, j)` is
that of the untrained network. A record has the counts, so that every score can be computed later. Scores are in percent
and differences in percentage points. `contnorm show --columns acc,aia,bwt` shows them, and so do `result.scores` and
`record.scores` in Python. A single task has no forgetting: the score is NaN.

Two scores stand in every table beside forgetting and learning accuracy: **ACC**, `acc`, after the last task, and the
**mean over the stream**, `aia`, which uses all tasks and varies less over seeds.

"Forgetting" has several definitions in the literature; each has its own name here. **FM is `fm`** unless a text says
otherwise. Entries above the diagonal (tasks that are not learned yet) are measured with `evaluate.ahead=true` only;
`fwt` and `fm_ctn` need them.

The last column is the score of the worked example below. This page is generated from the code of the scores and their
docstrings; `python -m tools.reference` writes it.

## Scores of the accuracy matrix"""

_EXAMPLE = f"""\
The worked example, with each formula written out:

```python
from contnorm.bench import metrics
from contnorm.bench.metrics import AccuracyMatrix, forgetting

a = {ACCURACIES}  # a[i][j], indices from 0
untrained = {UNTRAINED}
last = len(a) - 1


def mean(values):
    values = list(values)
    return sum(values) / len(values)


matrix = AccuracyMatrix(correct=a, total=[100] * len(a), before=untrained)
expected = {{
    "paper": mean(max(a[i][j] for i in range(j, last)) - a[last][j] for j in range(last)),  # fm
    "literal": mean(max(a[i][j] for i in range(last)) - a[last][j] for j in range(last)),  # fm_ctn
    "facil": mean(max(a[i][j] for i in range(last)) - a[last][j] for j in range(last)),  # fm_facil
    "max": mean(max(a[i][j] for i in range(last + 1)) - a[last][j] for j in range(last)),  # fm_mammoth
    "max_all_tasks": mean(max(a[i][j] for i in range(last + 1)) - a[last][j] for j in range(last + 1)),  # fm_raptor
    "after_learning": mean(a[j][j] - a[last][j] for j in range(last)),  # fm_first
}}
assert expected.keys() == metrics.FORGETTING.keys()
for definition, value in expected.items():
    assert abs(forgetting(matrix, definition) - value) < 1e-9, definition

assert metrics.average_accuracy(matrix) == mean(a[last])  # acc
assert metrics.learning_accuracy(matrix) == mean(a[i][i] for i in range(last + 1))  # la
assert metrics.backward_transfer(matrix) == mean(a[last][j] - a[j][j] for j in range(last))  # bwt
assert metrics.forward_transfer(matrix) == mean(a[j - 1][j] - untrained[j] for j in range(1, last + 1))  # fwt
assert metrics.average_incremental_accuracy(matrix) == mean(mean(a[i][: i + 1]) for i in range(last + 1))  # aia

# Without the entries above the diagonal: fm_facil and fm_mammoth take 0 for them.
lower = [row[: i + 1] for i, row in enumerate(a)]
assert forgetting(lower, "facil") == forgetting(lower, "paper") == forgetting(matrix, "paper")
```"""

_OTHERS = """\
Numbers of different libraries can be compared only if their definitions agree. For the worked example, FM is
{fm:.2f} here, {fm_mammoth:.2f} in mammoth and {fm_first:.2f} in Avalanche. To compare with mammoth, use `fm_mammoth`;
with Avalanche, `fm_first`: `contnorm show --columns acc,fm,fm_mammoth,fm_first`."""

_IMPLEMENTATIONS = """\
mammoth: `utils/metrics.py`. Avalanche 0.6: `evaluation/metrics/forgetting_bwt.py`, `forward_transfer.py` and
`accuracy.py`. Avalanche counts experiences that were evaluated after they were learned and after a later one, which
are all tasks but the last."""

_MULTI_LABEL = """\
For each class, `tp` is the number of images that have it and for which it is predicted, `predicted` and `positive` are
the numbers of images for which it is predicted and that have it. A class is predicted if its logit is above 0. Classes
that no test image has are left out, and a class that is never predicted has precision 0. Scores are measured on the
test images of all tasks so far; forgetting, on those of each task, relative to its best score before the last task (if
the best is 0: 100 if the final score is 0 too, otherwise minus the final score). See
[multi-label scores](../howto/long-tail.md#how-the-scores-are-computed) for an example by hand and for groups of
classes. mammoth and Avalanche have no multi-label scores; `c_f1`, `o_f1` and `map` are the CF1, OF1 and mAP of the
literature."""

_LABEL_EXAMPLE = """\
```python
from contnorm.bench.label_metrics import LabelMatrix, LabelStats, label_score

# Four images, two classes: logits, and labels.
first = LabelStats.of([[2, -1], [1, -2], [-1, 3], [-2, 1]], [[1, 0], [1, 0], [0, 1], [0, 1]])
final = LabelStats.of([[2, 1], [-1, -2], [1, 3], [-2, -1]], [[1, 0], [1, 0], [0, 1], [0, 1]])
matrix = LabelMatrix(own=[[first, None], [final, first]], tally=[first, final])
assert (final.tp, final.predicted, final.positive) == ((1, 1), (2, 2), (2, 2))
precision, recall = (1 / 2 + 1 / 2) / 2, (1 / 2 + 1 / 2) / 2
assert label_score(matrix, "c_f1") == 100 * 2 * precision * recall / (precision + recall) == 50
assert label_score(matrix, "o_f1") == 100 * 2 * (1 + 1) / (2 + 2 + 2 + 2) == 50
class_0, class_1 = (1 / 1 + 2 / 3) / 2, (1 / 1 + 2 / 3) / 2  # precision at the rank of each image with the class
assert abs(label_score(matrix, "map") - 100 * (class_0 + class_1) / 2) < 1e-3
assert label_score(matrix, "fm_c_f1") == 100 * (100 - 50) / 100
assert label_score(matrix, "fm_o_f1") == 100 * (100 - 50) / 100
assert abs(label_score(matrix, "fm_map") - (100 - label_score(matrix, "map"))) < 1e-9
```"""

_OF_DIAGNOSIS = [
    ("`forgotten`", "`mean over j < T of learned(j) - running(j)`", "-100 to 100", "lower"),
    (
        "`recovered`",
        "`mean over j < T of oracle(j) - running(j)`; over all tasks if `learned` is unknown",
        "-100 to 100",
        "a large value means that the moments cause the forgetting",
    ),
    ("`share`", "`recovered / forgotten`; none if nothing was forgotten", "any", "as `recovered`"),
    ("`last_task_change`", "`oracle(T) - running(T)`", "-100 to 100", "none"),
    ("`mean`, `var` of a layer", "`sum over channels of abs(difference of the moments)`", "0 or more", "lower"),
    ("`mean_scaled`", "`mean / sum over channels of sqrt(oracle variance + eps)`", "0 or more", "lower"),
    ("`var_scaled`", "`var / sum over channels of (oracle variance + eps)`", "0 or more", "lower"),
]
_MORE = "above 1: a varies more"
_OF_SPREAD = [
    ("`variance`", "`var(a) / var(b)`, sample variances", "above 0", _MORE),
    ("`deviation`", "`mad(a) / mad(b)`, mean absolute deviations from the median", "above 0", _MORE),
    (
        "`variance_without_extremes`, `deviation_without_extremes`",
        "the same without the lowest and the highest 5 % of the seeds of each, at least one",
        "above 0",
        _MORE,
    ),
]
_DIAGNOSIS = """\
## Diagnosis

`contnorm diagnose` and `contnorm.diagnose` evaluate the final network three times: with its running moments, with the
exact moments of the data of all tasks (*oracle*), and for each task with those of its own data. `learned(j)` is the
accuracy on task j right after it was learned.

@DIAGNOSIS@

```python
import torch
from torch import nn

import contnorm as cn

model = nn.Sequential(nn.BatchNorm1d(2, affine=False, eps=0.0))  # predicts the larger of two features
with torch.no_grad():
    model[0].running_mean.copy_(torch.tensor([5.0, 0.0]))  # drifted from 0
x = torch.tensor([[1.0, -1.0], [-1.0, 1.0]] * 5)
tasks = [[(x, x.argmax(1))], [(2 * x, x.argmax(1))]]
d = cn.diagnose(model, tasks, test_by_task=tasks, learned=[100.0, 50.0])
assert d.running == (50.0, 50.0) and d.oracle == (100.0, 100.0)
assert d.forgotten == 100 - 50 and d.recovered == 100 - 50 and d.share == 1 and d.last_task_change == 100 - 50
drift = d.layers[0].running_oracle
variance = torch.cat([x, 2 * x]).var(0, correction=1)
assert drift.mean == 5.0 and abs(drift.mean_scaled - 5.0 / float(variance.sqrt().sum())) < 1e-6
assert abs(drift.var_scaled - float((variance - 1).abs().sum() / variance.sum())) < 1e-6
```

A record has the same distances as `drift`, measured after each task on the data of the tasks so far.

## Spread over seeds

`+-` in tables is the sample standard deviation over seeds. `contnorm compare` also compares the spreads of two runs
with eight or more shared seeds:

@SPREAD@

Intervals are 95 % bootstrap intervals over pairs of seeds. The outcome is *larger* or *smaller* if the intervals of
both ratios of deviations lie on the same side of 1, and *undecided* otherwise. How differences of means are decided is
in [deciding](../concepts/deciding.md).

```python
import statistics

from contnorm.bench.stats import spread_ratio

a = {seed: 60 + 2.0 * ((3 * seed) % 8) for seed in range(8)}
b = {seed: 60 + 0.5 * ((5 * seed) % 8) for seed in range(8)}
spread = spread_ratio(a, b)


def mad(values):
    return statistics.fmean(abs(value - statistics.median(values)) for value in values)


assert abs(spread.variance.value - statistics.variance(a.values()) / statistics.variance(b.values())) < 1e-9
assert abs(spread.deviation.value - mad(a.values()) / mad(b.values())) < 1e-9
```
"""
