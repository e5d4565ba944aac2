"""Diagnosis: distances, forgetting caused by moments or by weights, output, and an unchanged model."""

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contnorm as cn
from contnorm.bench.stats import summarize_differences, t_interval
from contnorm.diagnosis.measure import Diagnosis, Distance, LayerDistances, mean_diagnosis, pair_sentence

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
    assert "recover 0.0 of the" in actual.sentence and "no layer's moments have drifted" in actual.sentence
    assert "(Accuracy is that on the data the moments were estimated from.)" in actual.sentence


@pytest.mark.parametrize("norm", ["bn", "cn", "sn", "iabn"])
def test_diagnose_every_norm_with_moments(norm: str) -> None:
    options = {"num_groups": 4} if cn.registry.NORMS[norm].grouped else {}
    model = cn.convert_norm(nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Linear(32, 2)), norm, **options)
    actual = cn.diagnose(model, two_tasks())
    assert [layer.layer for layer in actual.layers] == ["1"]
    assert "CN" not in str(actual) and "continual" not in str(actual).lower()


@pytest.mark.parametrize("broken", [False, True])
def test_diagnose_does_not_change_model_or_generators(broken: bool) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))
    cn.freeze_stats(model[1].eval())
    model[1].register_forward_hook(lambda *_: None)
    tasks = [DataLoader(TensorDataset(torch.randn(40, 6) + i, torch.ones(40).long()), 8, True) for i in (0, 1)]

    def predict(model: nn.Module, x: Tensor, task: int) -> Tensor:
        random.random()
        if broken and task == 1 and not torch.equal(model[3].running_mean, before["3.running_mean"]):
            raise KeyboardInterrupt
        return model(x).argmax(1) + 0 * torch.randint(2, (len(x),))

    def snapshot() -> Any:
        modules = list(model.modules())
        hooks = [(dict(m._forward_pre_hooks), dict(m._forward_hooks)) for m in modules]
        return [m.training for m in modules], hooks, [id(t) for t in (*model.parameters(), *model.buffers())]

    before, rest = copy.deepcopy(model.state_dict()), snapshot()
    chance, python = torch.random.get_rng_state(), random.getstate()
    if broken:
        with pytest.raises(KeyboardInterrupt):
            cn.diagnose(model, tasks, predict=predict)
    else:
        found = cn.diagnose(model, tasks, predict=predict)
        assert [layer.layer for layer in found.layers] == ["1", "3"]  # frozen ones too
    assert snapshot() == rest and torch.equal(torch.random.get_rng_state(), chance) and random.getstate() == python
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


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
        (60.0, 58.0, 78.6, "recover -2.0 of the 18.6 points forgotten;"),
        (60.0, 62.0, 55.0, "recover 2.0 points, and nothing was forgotten;"),
        (60.0, 62.0, None, "recover 1.0 points of accuracy (from 75.0 to 76.0 percent);"),
    ],
)
def test_sentence_matches_numbers(running: float, oracle: float, learned: float | None, message: str) -> None:
    sentence = effect(running, oracle, learned)
    assert sentence.startswith(f"Re-estimated moments {message}") and "the model itself's variance" in sentence


def diagnosis_of_seed(oracle: tuple[float, float], scale: float) -> Diagnosis:
    distance = Distance(1.0 * scale, 2.0 * scale, 3.0 * scale, 4.0 * scale)
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


def diagnosis(
    running: float, oracle: float, learned: float | None = 90.0, tasks: tuple[str, ...] = ("0", "1")
) -> Diagnosis:
    """A diagnosis of two tasks, of which the last is not forgotten."""
    own = (oracle, 90.0)
    before = None if learned is None else (learned, 90.0)
    return Diagnosis("Net", tasks, (), (running, 90.0), own, own, before, held_out=True)


def test_pair_sentence_has_an_interval_for_several_seeds() -> None:
    """Student's interval of the differences 1, 2 and 3: 2 -+ 4.303 / sqrt(3), with two degrees of freedom."""
    assert pair_sentence([(diagnosis(71.4, 74.5), diagnosis(80.0, 80.4))], "bn", "cn32") == (
        "Re-estimated moments recover 0.4 of 10.0 points forgotten with cn32 and 3.1 of 18.6 with bn: 2.7 less."
    )
    with pytest.raises(ValueError, match="different tasks"):
        pair_sentence([(diagnosis(70.0, 71.0), diagnosis(70.0, 71.0, tasks=("a", "b")))], "bn", "cn")
    pairs = [(diagnosis(70.0, 70.0 + gain), diagnosis(70.0, 70.0)) for gain in (1.0, 2.0, 3.0)]
    sentence = pair_sentence(pairs, "bn", "cn", interval=lambda differences: summarize_differences(differences).t)
    assert sentence.endswith("2.0 less, over 3 seeds; the 95 % interval of the difference is -0.48 to +4.48.")
    assert pair_sentence(pairs, "bn", "cn").endswith("2.0 less, over 3 seeds.")


def test_figure_and_json(tmp_path: Path, knowing: Knowing) -> None:
    found = cn.diagnose(knowing[0], knowing[1], learned=knowing[2])
    raw = json.loads(json.dumps(found.as_dict()))
    assert raw["sentence"] == found.sentence and raw["layers"][1]["task_oracle"][0]["var"] > 0
    for picture in ("effect.svg", "again.svg"):
        found.draw(tmp_path / picture)
    assert len(found.plot().axes) == 4, "three panels and a color bar"
    assert found.plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    assert (tmp_path / "effect.svg").read_text() == (tmp_path / "again.svg").read_text()


X, Y = torch.zeros(4, 3), torch.zeros(4).long()


@pytest.mark.parametrize(
    ("tasks", "options", "message"),
    [
        ([[(X, Y)], []], {}, "task 1 has no samples"),
        ([[(X, Y)]], {"learned": [90, 80]}, "learned has the tasks"),
        ([[(X, Y)]], {"test_by_task": {"a": [(X, Y)]}}, "test_by_task has the tasks"),
        ([[(X, X)]], {}, "Give predict="),
        ([[(X * float("nan"), Y)]], {}, "NaN or infinite"),
    ],
)
def test_wrong_input_raises(tasks: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cn.diagnose(nn.BatchNorm1d(3), tasks, **options)


@pytest.mark.parametrize("kind", ["tensors", "pairs", "loader", "generator"])
def test_new_data_without_tasks_is_measured_layer_by_layer(kind: str, tmp_path: Path) -> None:
    """Of a frozen model; the second norm is measured behind the first one with the moments of the data."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Tanh(), nn.BatchNorm1d(2)).double()
    x = torch.randn(60, 2).double() * 2 + 1
    cn.freeze_norms(model)
    chance = torch.random.get_rng_state()
    batches: Any = list(x.split(20)) if kind != "generator" else (part for part in [x])
    if kind in ("pairs", "loader"):
        batches = [(part, torch.zeros(20).long()) for part in batches]
    found = cn.diagnose(model, DataLoader(TensorDataset(x), 20, shuffle=True) if kind == "loader" else batches)
    second = ((x - x.mean(0)) / (x.var(0, False) + 1e-5).sqrt()).tanh()
    for layer, signal in zip(found.layers, (x, second), strict=True):
        mean, var = signal.mean(0), signal.var(0)
        assert layer.running_oracle.mean == pytest.approx(mean.abs().sum().item(), rel=1e-9, abs=1e-12)
        assert layer.running_oracle.var == pytest.approx((var - 1).abs().sum().item(), rel=1e-9)
        assert layer.running_oracle.var_scaled == pytest.approx(((var - 1).abs().sum() / (var + 1e-5).sum()).item())
    assert (found.tasks, found.running, list(found.as_dict()["layers"][0]["task_running"])) == ((), (), [])
    assert "NaN" not in json.dumps(found.as_dict()) and found.sentence in " ".join(str(found).split())
    assert torch.equal(torch.random.get_rng_state(), chance) and torch.equal(model[0].running_mean, torch.zeros(2))
    found.draw(tmp_path / "drift.svg")
    assert len(found.plot().axes) == 1


def test_generators_and_labels_without_tasks_are_refused() -> None:
    model, x = nn.BatchNorm1d(3), torch.randn(4, 3)
    with pytest.raises(TypeError, match="diagnose: task 0 is a one-shot iterator"):
        cn.diagnose(model, [iter([(x, Y)])])
    with pytest.raises(ValueError, match="need labelled batches of each task"):
        cn.diagnose(model, [x], learned=[90])
