"""Diagnosis: distances, forgetting caused by moments or by weights, output, and an unchanged model."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contnorm as cn
from contnorm.bench.stats import summarize_differences, t_interval
from contnorm.diagnosis.result import Diagnosis, Distance, LayerDistances, mean_diagnosis, pair_sentence
from tests.models import BatchNormAct2d, ScaledBatchNorm2d, UnknownNorm

Data = list[tuple[Tensor, Tensor]]


def test_distances_match_manual_computation() -> None:
    """Channel 0: task a holds 0, 2 and b holds 4, 6; channel 1: -1, 1 and -3, 3. All variances are unbiased."""
    model = nn.Sequential(nn.BatchNorm1d(2, affine=False, eps=0.0))
    model[0].running_mean.copy_(torch.tensor([5.0, 0.0]))
    model[0].running_var.copy_(torch.tensor([2.0, 18.0]))  # as b's
    tasks: dict[str, Data] = {
        "a": [(torch.tensor([[0.0, -1.0], [2.0, 1.0]]), torch.tensor([0, 1]))],
        "b": [(torch.tensor([[4.0, -3.0], [6.0, 3.0]]), torch.tensor([0, 1]))],
    }
    actual = cn.diagnose(model, tasks, predict=lambda model, x, task: (model(x)[:, 0] > 0).long())
    (layer,) = actual.layers
    # Together: means 3 and 0; squares about them 9 + 1 + 1 + 9 = 20 in both channels, over 3.
    whole = 20 / 3
    assert (actual.tasks, layer.layer) == (("a", "b"), "0")
    close = pytest.approx
    assert (layer.running_oracle.mean, layer.running_oracle.var) == close((2.0, (whole - 2) + (18 - whole)), rel=1e-6)
    a, b = layer.task_running
    assert a is not None and (a.mean, a.var) == close((4.0, 0 + 16), rel=1e-6)
    assert b is not None and (b.mean, b.var) == close((0.0, 0.0), abs=1e-6)
    a, b = layer.task_oracle
    assert a is not None and (a.mean, a.var) == close((2.0, 2 * (whole - 2)), rel=1e-6)
    assert b is not None and (b.mean, b.var) == close((2.0, (whole - 2) + (18 - whole)), rel=1e-6)
    # By the spread of the two channels: sqrt(20/3) twice, 20/3 twice.
    assert layer.running_oracle.mean_scaled == close(2 / (2 * whole**0.5), rel=1e-6)
    assert layer.running_oracle.var_scaled == close(16 / (2 * whole), rel=1e-6)
    # Classes are separated at the mean of channel 0: 5 separates b, 3 neither task, 1 and 5 each its own.
    assert (actual.running, actual.oracle, actual.own) == ((50.0, 100.0), (50.0, 50.0), (100.0, 100.0))


def two_tasks() -> list[Data]:
    """Two distant clusters, each divided into two classes at its centre."""
    g = torch.Generator().manual_seed(0)
    actual: list[Data] = []
    for shift in (0.0, 4.0):
        x = torch.randn(400, 6, generator=g)
        y = (x[:, 0] + x[:, 1] > 0).long()
        actual.append([((x + shift)[i : i + 50], y[i : i + 50]) for i in range(0, 400, 50)])
    return actual


def learned_together(tasks: list[Data]) -> nn.Module:
    """A network that solves both tasks with the moments of both."""
    torch.manual_seed(1)
    layers = [nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, y = (torch.cat([batch[i] for task in tasks for batch in task]) for i in (0, 1))
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    cn.reestimate(model, [x])
    return model


@pytest.fixture(scope="module")
def knowing() -> tuple[nn.Module, list[Data], tuple[float, ...]]:
    tasks = two_tasks()
    model = learned_together(tasks)
    learned = cn.diagnose(model, tasks).running
    assert min(learned) > 95
    return model, tasks, learned


Knowing = tuple[nn.Module, list[Data], tuple[float, ...]]


def test_forgetting_caused_by_moments_is_recovered(knowing: Knowing) -> None:
    """Weights are constant; running moments are updated with batches of the second task."""
    model, tasks, learned = copy.deepcopy(knowing[0]), *knowing[1:]
    model.train()
    with torch.no_grad():
        for _ in range(20):
            for x, _y in tasks[1]:
                model(x)
    actual = cn.diagnose(model, tasks, test_by_task=tasks, learned=learned)
    assert actual.forgotten is not None and actual.forgotten > 15, "or there is nothing to tell"
    assert actual.forgotten == pytest.approx(learned[0] - actual.running[0])
    assert actual.share is not None and 0.95 < actual.share < 1.05
    assert f"of the {actual.forgotten:.1f} points forgotten" in actual.sentence or "more than the" in actual.sentence
    assert "has drifted most." in actual.sentence and "Accuracy is that on" not in actual.sentence
    drift = actual.layers[0].running_oracle
    own = actual.layers[0].task_running
    assert own[0] is not None and own[1] is not None
    assert own[1].mean_scaled < 0.1 < drift.mean_scaled < own[0].mean_scaled, "the moments are the second task's"


def test_forgetting_caused_by_weights_is_not_recovered(knowing: Knowing) -> None:
    model, tasks, learned = copy.deepcopy(knowing[0]), *knowing[1:]
    with torch.no_grad():
        model[6].weight.copy_(model[6].weight.flip(0))  # reverses every prediction, after the last norm
        model[6].bias.copy_(model[6].bias.flip(0))
    actual = cn.diagnose(model, tasks, learned=learned)
    assert actual.forgotten is not None and actual.forgotten > 90
    assert actual.share is not None and abs(actual.share) < 0.01
    assert "recover none of the" in actual.sentence and "no layer's moments have drifted" in actual.sentence
    assert "(Accuracy is that on the data the moments were estimated from.)" in actual.sentence


@pytest.mark.parametrize("norm", ["bn", "cn", "brn", "sn", "bn_gn", "cn_tied", "bnt", "iabn", "rbn"])
def test_diagnose_every_norm_with_moments(norm: str) -> None:
    options = {"num_groups": 4} if cn.registry.NORMS[norm].grouped else {}
    model = cn.convert_norm(nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Linear(32, 2)), norm, **options)
    actual = cn.diagnose(model, two_tasks())
    assert [layer.layer for layer in actual.layers] == ["1"]
    assert "CN" not in str(actual) and "continual" not in str(actual).lower()


class Awkward(nn.Module):
    """Counts its calls in a buffer that it replaces, and draws random numbers in every mode."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        y: Tensor = self.net(x) + torch.rand(()) + random.random()
        return y


@pytest.mark.parametrize("broken", [False, True])
def test_diagnose_does_not_change_model_or_generators(broken: bool) -> None:
    torch.manual_seed(3)
    model = Awkward()
    model.net[1].eval()
    model.net[0].weight.grad = torch.ones_like(model.net[0].weight)
    model.net[1].register_forward_hook(lambda *_: None)
    tasks = [DataLoader(TensorDataset(torch.randn(40, 6) + i, torch.ones(40).long()), 8, True) for i in (0, 1)]

    def snapshot() -> Any:
        modules = list(model.modules())
        hooks = [(dict(m._forward_pre_hooks), dict(m._forward_hooks)) for m in modules]
        return [m.training for m in modules], hooks, [id(t) for t in (*model.parameters(), *model.buffers())]

    def fail(model: nn.Module, x: Tensor, task: int) -> Tensor:
        if task == 1 and not torch.equal(model.net[1].running_mean, before["net.1.running_mean"]):
            raise KeyboardInterrupt
        return model(x).argmax(1)

    before, rest = copy.deepcopy(model.state_dict()), snapshot()
    chance, python = torch.random.get_rng_state(), random.getstate()
    if broken:
        with pytest.raises(KeyboardInterrupt):
            cn.diagnose(model, tasks, predict=fail)
    else:
        cn.diagnose(model, tasks)
    assert snapshot() == rest and torch.equal(torch.random.get_rng_state(), chance) and random.getstate() == python
    assert torch.equal(model.net[0].weight.grad, torch.ones(8, 6))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_custom_predict_and_call() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2, affine=False))
    x = torch.tensor([[1.0, -1.0], [-1.0, 1.0]] * 3)
    tasks = {"up": [(x, x.argmax(1))], "down": [(x, x.argmin(1))]}

    def by_head(model: nn.Module, x: Tensor, task: str) -> Tensor:
        return model(x).argmax(1) if task == "up" else model(x).argmin(1)

    assert cn.diagnose(model, tasks, predict=by_head).running == (100.0, 100.0)
    assert cn.diagnose(model, tasks).running == (100.0, 0.0)
    named = {task: [({"x": x}, y) for x, y in batches] for task, batches in tasks.items()}
    assert cn.diagnose(model, named, call=lambda m, batch: m(batch[0]["x"])).running == (100.0, 0.0)


def test_accuracy_uses_test_data_if_given() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2, affine=False))
    x = torch.tensor([[1.0, -1.0], [-1.0, 1.0]] * 3)
    actual = cn.diagnose(model, [[(x, x.argmax(1))]], test_by_task=[[(x, x.argmin(1))]], learned=[80])
    assert actual.running == (0.0,) and actual.forgotten == 80.0 and actual.held_out


def test_model_without_moments_gives_a_sentence() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Linear(8, 2))
    actual = cn.diagnose(model, two_tasks(), learned=[90, 90])
    assert actual.sentence.startswith("Sequential has no norm layer with running moments that could be re-estimated:")
    assert actual.layers == () and "oracle" not in actual.table() and actual.oracle == actual.running


def effect(running: float, oracle: float, learned: float | None) -> str:
    layers = cn.diagnose(nn.BatchNorm1d(2), [[(torch.zeros(4, 2), torch.zeros(4).long())]]).layers
    past = None if learned is None else (learned, 90.0)
    return Diagnosis("Net", ("0", "1"), layers, (running, 90.0), (oracle, 90.0), (oracle, 90.0), past, True).sentence


@pytest.mark.parametrize(
    ("running", "oracle", "learned", "message"),
    [
        (60.0, 63.1, 78.6, "recover 3.1 of the 18.6 points forgotten;"),
        (60.0, 60.01, 78.6, "recover none of the 18.6 points forgotten;"),
        (60.0, 58.0, 78.6, "recover none of the 18.6 points forgotten, and cost 2.0 more;"),
        (60.0, 80.0, 78.6, "bring 20.0 points, more than the 18.6 forgotten;"),
        (60.0, 62.0, 55.0, "recover 2.0 points of accuracy, and nothing was forgotten;"),
        (60.0, 62.0, None, "recover 1.0 points of accuracy (from 75.0 to 76.0 percent);"),
        (60.0, 50.0, None, "cost 5.0 points of accuracy (from 75.0 to 70.0 percent);"),
        (60.0, 60.0, None, "leave the accuracy as it is (from 75.0 to 75.0 percent);"),
    ],
)
def test_sentence_matches_numbers(running: float, oracle: float, learned: float | None, message: str) -> None:
    sentence = effect(running, oracle, learned)
    assert sentence.startswith(f"Re-estimated moments {message}") and "the model itself's variance" in sentence


@pytest.mark.parametrize(
    ("last", "message"),
    [(88.0, "loses 2.0 points"), (91.5, "gains 1.5 points"), (90.0, "does not change"), (90.01, "does not change")],
)
@pytest.mark.parametrize("learned", [(78.6, 90.0), None])
def test_sentence_always_has_the_change_of_the_last_task(
    last: float, message: str, learned: tuple[float, float] | None
) -> None:
    layers = cn.diagnose(nn.BatchNorm1d(2), [[(torch.zeros(4, 2), torch.zeros(4).long())]]).layers
    actual = Diagnosis("Net", ("0", "1"), layers, (60.0, 90.0), (63.1, last), (70.0, 90.0), learned, True)
    assert f"; the last task {message}; " in actual.sentence
    assert actual.as_dict()["last_task_change"] == pytest.approx(last - 90)


def diagnosis_of_seed(oracle: tuple[float, float], scale: float) -> Diagnosis:
    distance = Distance(scale, 2 * scale, 3 * scale, 4 * scale)
    layers = (LayerDistances("1", distance, (distance, None), (None, distance)),)
    return Diagnosis("Net", ("0", "1"), layers, (60.0, 90.0), oracle, (70.0, 90.0), (80.0, 90.0), True)


def test_mean_over_seeds_has_intervals() -> None:
    gains, changes = [10.0, 12.0, 17.0], [-2.0, -1.0, -4.5]
    several = {
        seed: diagnosis_of_seed((60 + gain, 90 + change), seed)
        for seed, gain, change in zip((1, 2, 6), gains, changes, strict=True)
    }
    mean = mean_diagnosis(several, t_interval)
    for actual, values in ((mean.recovered_interval, gains), (mean.last_task_interval, changes)):
        assert actual == pytest.approx(stats.ttest_1samp(values, 0).confidence_interval(0.95))
    low, high = stats.ttest_1samp(gains, 0).confidence_interval(0.95)
    text = f"recover 13.0 of the 20.0 points forgotten (95 % interval {low:+.1f} to {high:+.1f} over 3 seeds); the last"
    assert text in mean.sentence and "the last task loses 2.5 points (95 % interval " in mean.sentence
    assert mean.seeds == (1, 2, 6) and "mean over 3 seeds" in mean.table() and "73.0" in mean.table()
    (layer,) = mean.layers
    assert layer.running_oracle == Distance(3.0, 6.0, 9.0, 12.0), "of scales 1, 2 and 6"
    assert layer.task_running == (Distance(3.0, 6.0, 9.0, 12.0), None)
    assert json.loads(json.dumps(mean.as_dict()))["recovered_interval"] == [pytest.approx(low), pytest.approx(high)]


def test_mean_of_different_networks_is_rejected() -> None:
    one = diagnosis_of_seed((60.0, 90.0), 1.0)
    with pytest.raises(ValueError, match="different norm layers"):
        mean_diagnosis({0: one, 1: replace(one, layers=())}, t_interval)
    with pytest.raises(ValueError, match="different tasks"):
        mean_diagnosis({0: one, 1: replace(one, tasks=("0", "2"))}, t_interval)


def test_docs_page_matches_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Words must be equal; numbers may differ a little, since rounding can change a few of 400 predictions."""
    page = (Path(__file__).parents[2] / "docs" / "howto" / "diagnose-a-model.md").read_text()
    first, second = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[:2]
    shown = re.search(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(compile(first + second, "diagnose-a-model", "exec"), {})
    assert shown
    words, numbers = zip(*(parted(text) for text in (capsys.readouterr().out, shown[1])), strict=True)
    assert words[0] == words[1] and numbers[0] == pytest.approx(numbers[1], abs=2.0)


def parted(text: str) -> tuple[str, list[float]]:
    """Return the words and the numbers of a text."""
    number = r"\d+(?:\.\d+)?"
    return " ".join(re.sub(number, "#", text).split()), [float(actual) for actual in re.findall(number, text)]


@pytest.mark.slow
def test_table_json_and_figure(tmp_path: Path, knowing: Knowing) -> None:
    image = pytest.importorskip("PIL.Image")
    actual = cn.diagnose(knowing[0], knowing[1], learned=knowing[2])
    rows = [line.split() for line in actual.table().splitlines()]
    assert ["task", "learned", "running", "oracle", "task's", "own"] in rows
    assert rows[3][0] == "0" and float(rows[3][1]) == pytest.approx(knowing[2][0], abs=0.06)
    assert any(row[:1] == ["4"] for row in rows), "a row a layer"
    raw = json.loads(json.dumps(actual.as_dict()))
    assert raw["sentence"] == actual.sentence and raw["layers"][1]["task_oracle"][0]["var"] > 0
    for picture in ("effect.png", "effect.svg", "again.svg"):
        actual.draw(tmp_path / picture)
    with image.open(tmp_path / "effect.png") as png:
        png.load()
        assert png.width > png.height > 400
    drawn = (tmp_path / "effect.svg").read_text()
    assert len(actual.plot().axes) == 4, "three panels and a color bar"
    assert actual.plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    assert drawn == (tmp_path / "again.svg").read_text() and "running to oracle moments" in drawn


def test_figure_keeps_the_backend_of_a_notebook(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    before = matplotlib.get_backend()
    matplotlib.use("svg")
    try:
        Diagnosis("Net", ("0",), (), (60.0,), (60.0,), (60.0,)).draw(tmp_path / "effect.png")
        assert matplotlib.get_backend() == "svg"
    finally:
        matplotlib.use(before)


class Once:
    """Data that can be iterated once but is not an iterator."""

    def __init__(self, data: Data) -> None:
        self.rest = iter(data)

    def __iter__(self) -> Iterator[Any]:
        yield from self.rest


X, Y = torch.zeros(4, 3), torch.zeros(4).long()
GOOD: Any = [[(X, Y)]]


@pytest.mark.parametrize(
    ("model", "tasks", "options", "message"),
    [
        (nn.BatchNorm1d(3), [(b for b in [(X, Y)])], {}, r"task 0: its batches are a one-shot iterator \(generator\)"),
        (nn.BatchNorm1d(3), ([(X, Y)] for _ in range(2)), {}, "batches_by_task is a generator. Give a list with an"),
        (nn.BatchNorm1d(3), [Once([(X, Y)])], {}, "task 0: the first pass over its data had 1 batches and a later one"),
        (nn.BatchNorm1d(3), [], {}, "batches_by_task is empty"),
        (nn.BatchNorm1d(3), [[(X, Y)], []], {}, "task 1 has no samples"),
        (nn.BatchNorm1d(3), [(X, Y)], {}, r"task 0: a batch is a Tensor; expected \(x, y\)"),
        (nn.BatchNorm1d(3), [X], {}, r"task 0: its batches are a Tensor. Give a list of batches: \[\(x, y\)\]"),
        (nn.BatchNorm1d(3), GOOD, {"learned": [0.9]}, r"learned=\[0.9\]: accuracies must be in percent, 0 to 100"),
        (nn.BatchNorm1d(3), GOOD, {"learned": [90, 80]}, r"learned has \[0, 1\] and the tasks are \[0\]"),
        (nn.BatchNorm1d(3), GOOD, {"test_by_task": {"a": [(X, Y)]}}, r"test_by_task has the tasks \['a'\]"),
        (
            nn.Sequential(nn.BatchNorm1d(3), nn.Flatten(0)),
            GOOD,
            {},
            r"returned a tensor of shape \(12,\).*Give predict=",
        ),
        (nn.BatchNorm1d(3), [[(X, X)]], {}, r"labels have shape \(4, 3\) and predictions \(4,\). Give predict="),
        (cn.freeze_stats(nn.BatchNorm1d(3)), GOOD, {}, "its moments are frozen. Call contnorm.freeze_stats"),
        (ScaledBatchNorm2d(3), GOOD, {}, r"layer '' \(ScaledBatchNorm2d\).*output differs.*replace the layer"),
        (nn.Sequential(UnknownNorm(3)), GOOD, {}, r"layer '0' \(UnknownNorm\).*not a known norm"),
        ("net", GOOD, {}, "diagnose: expected a torch.nn.Module as model, got str"),
        (nn.BatchNorm1d(3), [[{"x": X, "y": Y}]], {}, r"a batch is a dict.*x may be anything that predict= or call="),
        (nn.BatchNorm1d(3), [[(X, Y.tolist())]], {}, r"the labels of a batch are a list.*torch.as_tensor\(y\)"),
        (nn.BatchNorm1d(3), GOOD, {"predict": lambda m, x, task: [0]}, "task 0: predict= returned a list. It must"),
        (nn.BatchNorm1d(3), GOOD, {"learned": 90}, "learned=90 must be a list with one accuracy for each task"),
        (nn.BatchNorm1d(3), GOOD, {"learned": [None]}, r"learned=\[None\]: accuracies must be numbers, in percent"),
    ],
)
def test_wrong_input_raises(model: nn.Module, tasks: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        cn.diagnose(model, tasks, **options)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_moments_raise_with_task_and_layer(value: float) -> None:
    """Otherwise every prediction would be the first class, and a NaN distance would look like none."""
    model, bad = nn.Sequential(nn.BatchNorm1d(3)), X.clone()
    bad[1, 2] = value
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="task 'second': the moments of its data at layer '0' are not finite"):
        cn.diagnose(model, {"first": [(X, Y)], "second": [(X, Y), (bad, Y)]})
    assert all(torch.equal(unforgotten, model.state_dict()[key]) for key, unforgotten in before.items())
    model[0].running_var[1] = value
    with pytest.raises(ValueError, match="the running moments of layer '0' are not finite: the model has diverged"):
        cn.diagnose(model, GOOD)


def test_output_fits_80_columns(knowing: Knowing) -> None:
    model, tasks, learned = knowing
    actual = cn.diagnose(model, tasks, learned=learned)
    lines = str(actual).splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(lines[-2:]).endswith("(Accuracy is that on the data the moments were estimated from.)")
    drift = actual.layers[1].running_oracle
    row = next(i for i, line in enumerate(lines) if line.startswith("4 "))
    assert lines[row].split()[:4] == ["4", "mean", f"{drift.mean:.3g}", f"({drift.mean_scaled:.2f})"]
    assert lines[row + 1].split()[:3] == ["var", f"{drift.var:.3g}", f"({drift.var_scaled:.2f})"]


def test_diagnose_layers_of_other_libraries() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    tasks = [[(torch.randn(6, 3, 8, 8) + i, torch.zeros(6).long())] for i in range(3)]
    (layer,) = cn.diagnose(model, tasks).layers
    assert layer.layer == "1" and len(layer.task_running) == 3 and layer.running_oracle.var > 0


def diagnosis(
    running: float, oracle: float, learned: float | None = 90.0, tasks: tuple[str, ...] = ("0", "1")
) -> Diagnosis:
    """A diagnosis of two tasks, of which the last is not forgotten."""
    own = (oracle, 90.0)
    before = None if learned is None else (learned, 90.0)
    return Diagnosis("Net", tasks, (), (running, 90.0), own, own, before, held_out=True)


def test_pair_sentence_compares_recovered_points() -> None:
    bn, cn32 = diagnosis(71.4, 74.5), diagnosis(80.0, 80.4)
    assert bn.compare_with(cn32, "bn", "cn32") == (
        "With cn32 re-estimated moments recover 0.4 of the 10.0 points forgotten, with bn 3.1 of 18.6: 2.7 less."
    )
    assert cn32.compare_with(bn).endswith("with this model 0.4 of 10.0: 2.7 more.")
    assert bn.compare_with(bn).endswith(": as much.")


def test_pair_sentence_if_nothing_was_forgotten() -> None:
    """One network forgot nothing, or both; improved accuracy counts as not forgotten."""
    bn, unforgotten, better = diagnosis(71.4, 74.5), diagnosis(90.0, 90.0), diagnosis(91.0, 91.3)
    assert bn.compare_with(unforgotten, "bn", "cn32") == (
        "With cn32 nothing was forgotten, and re-estimated moments leave the accuracy as it is; with bn they "
        "recover 3.1 of the 18.6 points forgotten."
    )
    assert unforgotten.compare_with(bn, "cn32", "bn") == bn.compare_with(unforgotten, "bn", "cn32"), (
        "whichever is the first"
    )
    assert "and re-estimated moments recover 0.3 points of accuracy; with bn they" in bn.compare_with(
        better, "bn", "cn32"
    )
    assert better.compare_with(unforgotten, "bn", "cn32") == (
        "Nothing was forgotten, neither with cn32 nor with bn; with cn32 re-estimated moments recover 0.0 points of "
        "accuracy, with bn 0.3: 0.3 less."
    )
    sentence = pair_sentence([(bn, unforgotten)] * 2, "bn", "cn")
    assert sentence.endswith("3.1 of the 18.6 points forgotten, over 2 seeds.")


def test_pair_sentence_of_several_seeds_has_an_interval() -> None:
    """Student's interval of the differences 1, 2 and 3: 2 -+ 4.303 / sqrt(3), with two degrees of freedom."""
    pairs = [(diagnosis(70.0, 70.0 + gain), diagnosis(70.0, 70.0)) for gain in (1.0, 2.0, 3.0)]
    sentence = pair_sentence(pairs, "bn", "cn", interval=lambda differences: summarize_differences(differences).t)
    assert sentence.endswith("2.0 less, over 3 seeds; the 95 % interval of the difference is -0.48 to +4.48.")
    assert pair_sentence(pairs, "bn", "cn").endswith("2.0 less, over 3 seeds.")


def test_pair_with_different_tasks_raises() -> None:
    with pytest.raises(ValueError, match="different tasks: 0, 1 and a, b"):
        diagnosis(70.0, 71.0).compare_with(diagnosis(70.0, 71.0, tasks=("a", "b")))
    with pytest.raises(ValueError, match="known for only one of them"):
        diagnosis(70.0, 71.0).compare_with(diagnosis(70.0, 71.0, learned=None))
