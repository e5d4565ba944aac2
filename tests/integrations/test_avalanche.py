"""The integration with Avalanche, in its own training loops."""

import json
import pickle
import re
import runpy
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import contnorm as cn
from contnorm import bench

pytest.importorskip("avalanche", reason="Avalanche is not installed: pip install contnorm[avalanche]")

from avalanche.benchmarks import nc_benchmark
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.models import DynamicModule, MultiHeadClassifier, MultiTaskModule
from avalanche.training import ICaRL, JointTraining, Naive, Replay
from avalanche.training.plugins import EvaluationPlugin, ReplayPlugin
from avalanche.training.supervised import DER, ER_ACE

from contnorm.bench.memories import StreamInfo
from contnorm.integrations.avalanche import NormEffect, NormPlugin, to_avalanche

ROOT = Path(__file__).resolve().parent.parent.parent
EXP, STREAM = "eval_phase/test_stream/Task000/Exp{:03}", "eval_phase/test_stream/Task000"

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Avalanche 0.6 calls functions that it deprecates
    pytest.mark.filterwarnings("ignore:No loggers specified"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def stream() -> bench.Stream:
    return bench.load_stream(
        "split-mnist", source="digits", scenario="class", tasks=3, train_per_task=60, test_per_task=40
    )


@pytest.fixture(scope="module")
def benchmark(stream: bench.Stream) -> Any:
    return to_avalanche(stream)


def network(classifier: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, stride=3), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()),
        classifier or nn.Linear(144, 10),
    )


def learner(kind: type, model: nn.Module, *plugins: Any, metrics: Any = (), **options: Any) -> Any:
    memory = {} if kind in (Naive, JointTraining) else {"mem_size": 30}
    return kind(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=10,
        eval_mb_size=32,
        plugins=list(plugins),
        evaluator=EvaluationPlugin(accuracy_metrics(experience=True, stream=True), *metrics, loggers=[]),
        **{**memory, **options},
    )


def learn(strategy: Any, benchmark: Any) -> dict[str, float]:
    torch.manual_seed(1)
    for experience in benchmark.train_stream:
        strategy.train(experience)
    return strategy.eval(benchmark.test_stream)


def batch_moments(model: nn.Module) -> list[torch.Tensor]:
    return [b.clone() for name, b in model.named_buffers() if "running" in name]


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def accuracies(model: nn.Module, benchmark: Any) -> list[float]:
    """Accuracy on each test experience by a plain loop."""
    model.eval()
    found = []
    for experience in benchmark.test_stream:
        samples = [experience.dataset[i] for i in range(len(experience.dataset))]
        x, y = torch.stack([sample[0] for sample in samples]), torch.tensor([sample[1] for sample in samples])
        found.append(float((model(x).argmax(1) == y).float().mean()))
    return found


def loaded(dataset: Any) -> torch.Tensor:
    data = dataset.eval()
    return torch.stack([data[i][0] for i in range(len(data))])


@pytest.mark.parametrize("kind", [Naive, DER])
def test_plugin_converts_and_trains(kind: type, benchmark: Any) -> None:
    model = network()
    before, parameters = weights(model), list(model.parameters())
    strategy = learner(kind, model, NormPlugin("cn", num_groups=4))
    logged = learn(strategy, benchmark)
    norms = [m for m in strategy.model.modules() if isinstance(m, cn.ContinualNorm2d)]
    assert [m.num_groups for m in norms] == [4, 4]
    assert all(p is q for p, q in zip(strategy.model.parameters(), parameters, strict=True))
    optimized = {id(p) for group in strategy.optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in strategy.model.parameters()}
    assert not any(torch.equal(p, q) for p, q in zip(weights(strategy.model), before, strict=True))
    assert max(logged[f"Top1_Acc_Exp/{EXP.format(i)}"] for i in range(3)) > 0.5


def test_plugin_equals_conversion_before_the_strategy(benchmark: Any) -> None:
    plugged = learner(Replay, network(), NormPlugin("cn", num_groups=4))
    converted = learner(Replay, cn.convert_norm(network(), "cn", num_groups=4))
    assert learn(plugged, benchmark) == learn(converted, benchmark)
    assert equal(weights(plugged.model), weights(converted.model))


@pytest.mark.parametrize("kind", [Replay, ER_ACE])
def test_buffer_moments_change_the_evaluation_alone(kind: type, benchmark: Any) -> None:
    plain, plugged = learner(kind, network()), learner(kind, network(), NormPlugin(None, reestimate_from="buffer"))
    learn(plain, benchmark)
    logged = learn(plugged, benchmark)
    assert equal(weights(plain.model), weights(plugged.model))
    assert equal(batch_moments(plain.model), batch_moments(plugged.model))
    policy = getattr(plugged, "storage_policy", None) or next(
        p.storage_policy for p in plugged.plugins if isinstance(p, ReplayPlugin)
    )
    with cn.reestimate(plain.model, [loaded(policy.buffer)]):
        expected = accuracies(plain.model, benchmark)
    assert [logged[f"Top1_Acc_Exp/{EXP.format(i)}"] for i in range(3)] == pytest.approx(expected, abs=1e-6)


def test_interrupted_evaluation_is_restored(benchmark: Any) -> None:
    class Interrupt(NormEffect):
        armed = False

        def after_eval_iteration(self, strategy: Any) -> None:
            if self.armed:
                raise KeyboardInterrupt

    metric = Interrupt()
    strategy = learner(Replay, network(), NormPlugin(None, reestimate_from="buffer"), metrics=[metric])
    strategy.train(benchmark.train_stream[0])
    running = batch_moments(strategy.model)
    metric.armed = True
    with pytest.raises(KeyboardInterrupt):
        strategy.eval(benchmark.test_stream)
    assert not equal(batch_moments(strategy.model), running)
    metric.armed = False
    strategy.eval(benchmark.test_stream)
    assert equal(batch_moments(strategy.model), running)


class GrowingModel(DynamicModule):
    """A model whose adaptation adds a layer with batch norm for each experience."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.BatchNorm2d(1)])
        self.linear = nn.Linear(784, 10)

    def adaptation(self, experience: Any) -> None:
        if self.training:
            self.layers.append(nn.BatchNorm2d(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.linear(x.flatten(1))


def test_layers_of_adaptation_are_converted(benchmark: Any) -> None:
    strategy = learner(Replay, GrowingModel(), NormPlugin("sn"))
    learn(strategy, benchmark)
    assert {type(layer) for layer in strategy.model.layers} == {cn.SwitchNorm2d}
    assert len(strategy.model.layers) >= 4
    optimized = {id(p) for group in strategy.optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in strategy.model.parameters()}


def test_plugin_of_a_checkpoint_goes_on(benchmark: Any) -> None:
    strategy = learner(Replay, network(), NormPlugin("cn", num_groups=4))
    strategy.train(benchmark.train_stream[0])
    model, plugin = pickle.loads(pickle.dumps((strategy.model, strategy.plugins[0])))
    norm = model[1]
    learner(Replay, model, plugin).train(benchmark.train_stream[1])
    assert model[1] is norm and isinstance(norm, cn.ContinualNorm2d)  # not converted a second time


class MultiHead(MultiTaskModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = network()[:-1]
        self.head = MultiHeadClassifier(144, 10)

    def forward(self, x: torch.Tensor, task_labels: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x), task_labels)


def test_multi_head_model_with_buffer_moments() -> None:
    stream = bench.load_stream("split-mnist", source="digits", tasks=3, train_per_task=60, test_per_task=40)
    benchmark = to_avalanche(stream)
    assert [experience.task_labels for experience in benchmark.test_stream] == [[0], [1], [2]]
    strategy = learner(Replay, MultiHead(), NormPlugin("cn", "buffer", num_groups=4), metrics=[NormEffect()])
    logged = learn(strategy, benchmark)
    assert logged["Top1_Acc_Exp/eval_phase/test_stream/Task001/Exp001"] > 0.6
    assert "NormEffect_Exp/eval_phase/test_stream/Task001/Exp001" in logged


def by_task(benchmark: Any, split: str) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    experiences = getattr(benchmark, f"{split}_stream")
    return [[(loaded(e.dataset), torch.tensor(list(e.dataset.targets)))] for e in experiences]


def test_norm_effect_equals_diagnosis(benchmark: Any) -> None:
    strategy = learner(Naive, network(), metrics=[NormEffect()])
    strategy.train(benchmark.train_stream[0])
    strategy.eval(benchmark.test_stream)  # moments of this evaluation must not be used in the next
    logged = learn(strategy, benchmark)
    found = cn.diagnose(strategy.model, by_task(benchmark, "train"), test_by_task=by_task(benchmark, "test"))
    expected = [(a - b) / 100 for a, b in zip(found.oracle, found.running, strict=True)]
    assert [logged[f"NormEffect_Exp/{EXP.format(i)}"] for i in range(3)] == pytest.approx(expected, abs=1e-6)
    assert logged[f"NormEffect_Stream/{STREAM}"] == pytest.approx(fmean(expected), abs=1e-6)
    assert any(abs(a - b) > 1 for a, b in zip(found.oracle, found.running, strict=True))


def test_norm_effect_leaves_the_training_unchanged(benchmark: Any) -> None:
    plain, measured = learner(Replay, network()), learner(Replay, network(), metrics=[NormEffect(samples=20)])
    for strategy in (plain, measured):
        torch.manual_seed(1)
        for experience in benchmark.train_stream:
            strategy.train(experience)
            strategy.eval(benchmark.test_stream)
    assert equal(weights(plain.model), weights(measured.model))
    assert equal(batch_moments(plain.model), batch_moments(measured.model))


def test_icarl_learns_a_stream(benchmark: Any) -> None:
    model = network()
    strategy = ICaRL(
        feature_extractor=model[:-1],
        classifier=model[-1],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        memory_size=30,
        buffer_transform=None,
        fixed_memory=True,
        train_mb_size=10,
        train_epochs=1,
        eval_mb_size=32,
        plugins=[NormPlugin("cn", num_groups=4)],
        evaluator=EvaluationPlugin(accuracy_metrics(stream=True), loggers=[]),
    )
    assert learn(strategy, benchmark)[f"Top1_Acc_Stream/{STREAM}"] > 1 / 3
    assert any(isinstance(module, cn.ContinualNorm2d) for module in strategy.model.modules())


def test_benchmark_has_samples_of_stream(stream: bench.Stream, benchmark: Any) -> None:
    for task, train, test in zip(stream.tasks, benchmark.train_stream, benchmark.test_stream, strict=True):
        for ours, theirs in ((task.train, train.dataset), (task.test, test.dataset)):
            assert len(ours) == len(theirs)
            for i in (0, len(ours) // 2, len(ours) - 1):
                x, y = ours[i]
                assert torch.equal(x, theirs[i][0])
                assert (y, 0) == tuple(map(int, theirs[i][1:]))
        assert train.classes_in_this_experience == [2 * task.index, 2 * task.index + 1]


def test_augmentation_of_stream_is_in_training_transforms() -> None:
    x = np.arange(2 * 3 * 16 * 16, dtype=np.uint8).reshape(2, 3, 16, 16) // 2 + 64
    stream = bench.Stream.from_arrays(x, [0, 1], x, [0, 1], tasks=1, augment=True)
    (experience,) = to_avalanche(stream).train_stream
    plain = loaded(experience.dataset)
    views = [experience.dataset[0][0] for _ in range(40)]
    assert {tuple(view.shape) for view in views} == {(3, 16, 16)}
    assert len({view.numpy().tobytes() for view in views}) > 20
    padding = stream.sequence().padding
    assert padding is not None
    padded = nn.functional.pad(plain[0], (padding,) * 4)
    crops = [padded[:, i : i + 16, j : j + 16] for i in range(2 * padding + 1) for j in range(2 * padding + 1)]
    for view in views:
        assert any(torch.equal(view, crop) or torch.equal(view.flip(-1), crop) for crop in crops)


def test_streams_that_benchmarks_cannot_represent() -> None:
    free = bench.load_stream("split-mnist", source="digits", scenario="free")
    with pytest.raises(ValueError, match="no boundaries of tasks"):
        to_avalanche(free)


@pytest.mark.parametrize("scenario", ["class", "task", "domain"])
def test_stream_of_benchmark_and_back(scenario: str) -> None:
    stream = bench.load_stream(
        "split-mnist", source="digits", scenario=scenario, tasks=2, train_per_task=30, test_per_task=20
    )
    back = bench.Stream.from_avalanche(to_avalanche(stream), name="mine")
    assert back.settings["scenario"] == scenario
    assert back.name == "mine" and back.num_outputs == stream.num_outputs
    for ours, theirs in zip(stream.tasks, back.tasks, strict=True):
        for a, b in ((ours.train, theirs.train), (ours.test, theirs.test)):
            samples = [{(x.numpy().tobytes(), y) for x, y in (d[i] for i in range(len(d)))} for d in (a, b)]
            assert samples[0] == samples[1]
    result = bench.run(back, norm="cn", settings={"norm.groups": 4, "train.batch": 10})
    assert result.scores()["acc"] > 0


class Images:
    """A data set of Pillow images with targets, as torchvision has them."""

    def __init__(self, seed: int) -> None:
        self.arrays = np.random.default_rng(seed).integers(0, 256, (24, 6, 6, 3), dtype=np.uint8)
        self.targets = (np.arange(24) % 4).tolist()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.arrays[index]), self.targets[index]


def to_bytes(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def to_floats(image: Image.Image) -> torch.Tensor:
    return to_bytes(image).float() / 255


@pytest.mark.parametrize("local_labels", [False, True])
def test_benchmark_of_avalanche_from_images(local_labels: bool) -> None:
    train, test = Images(0), Images(1)
    transforms = dict.fromkeys(("train_transform", "eval_transform"), to_bytes if local_labels else to_floats)
    labels = {"task_labels": True, "class_ids_from_zero_in_each_exp": True} if local_labels else {"task_labels": False}
    order = {"fixed_class_order": [2, 0, 3, 1], "shuffle": False}
    stream = bench.Stream.from_avalanche(nc_benchmark(train, test, 2, **labels, **order, **transforms))
    assert stream.settings["scenario"] == ("task" if local_labels else "class")
    assert [task.classes for task in stream.tasks] == (
        [("0:0", "0:1"), ("1:0", "1:1")] if local_labels else [(0, 2), (1, 3)]
    )
    for task, classes in zip(stream.tasks, ([2, 0], [3, 1]), strict=True):
        for split, source in ((task.train, train), (task.test, test)):
            wanted = {source.arrays[i].tobytes() for i in range(24) if source.targets[i] in classes}
            got = [split[i][0] for i in range(len(split))]
            assert {(x * 255).round().byte().permute(1, 2, 0).numpy().tobytes() for x in got} == wanted


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / "avalanche_split_mnist.py"))


def test_example_runs_all_variants(example: dict[str, Any], stream: bench.Stream) -> None:
    runs = {variant: example["train"](stream, variant, 0, 20) for variant in example["VARIANTS"]}
    assert len(runs) == 3
    for run in runs.values():
        assert len(run["accuracy"]) == len(run["effect"]) == 3
        assert run["accuracy"][-1] > 50
    assert runs["BN"]["accuracy"] != runs["CN"]["accuracy"]


def test_recorded_split_mnist_is_the_one_of_the_page(example: dict[str, Any]) -> None:
    record = json.loads((ROOT / "docs/records/integrations/avalanche-split-mnist.json").read_text())
    page = (ROOT / "docs/integrations/avalanche.md").read_text()
    assert record["settings"] == example["SETTINGS"] and record["network"] == example["NETWORK"]
    assert list(record["variants"]) == list(example["VARIANTS"])
    for variant, values in record["variants"].items():
        cells = []
        for score in ("accuracy", "effect"):
            by_seed = [fmean(run[score]) for run in values["runs"]]
            assert values[score]["mean"] == pytest.approx(fmean(by_seed), abs=0.006)
            assert values[score]["std"] == pytest.approx(stdev(by_seed), abs=0.006)
            cells.append(f"{values[score]['mean']:.2f} ± {values[score]['std']:.2f}")
        assert re.search(rf"^\| {re.escape(variant)} \| {re.escape(cells[0])} \| {re.escape(cells[1])} \|$", page, re.M)
    bn, cn_ = ([fmean(run["accuracy"]) for run in record["variants"][name]["runs"]] for name in ("BN", "CN"))
    gains = [b - a for a, b in zip(bn, cn_, strict=True)]
    wins = sum(gain > 0 for gain in gains)
    assert f"CN is {fmean(gains):.2f} points above BN ({wins} of {len(gains)} seeds)" in page
    seeds = [run["seed"] for run in record["variants"]["BN"]["runs"]]
    assert f"{len(seeds)} seeds" in page and record["versions"]["avalanche-lib"] in page


def test_recorded_memories_are_those_of_the_page(example: dict[str, Any]) -> None:
    record = json.loads((ROOT / "docs/records/integrations/er-memories-split-mnist.json").read_text())
    page = (ROOT / "docs/integrations/avalanche.md").read_text()
    assert record["settings"] == example["SETTINGS"] and list(record["variants"]) == list(example["memories"]())
    for memory, norms in record["variants"].items():
        cells = []
        for values in norms.values():
            assert len(values["accuracy"]) == 5 and example["summary"](values["accuracy"]).items() <= values.items()
            cells.append(f"{values['mean']:.2f} ± {values['std']:.2f}")
        assert f"| {memory} | {' | '.join(cells)} |" in page


def test_memory_of_the_example_shares_its_slots_among_earlier_tasks(example: dict[str, Any]) -> None:
    memory = example["ExperienceBalanced"](20).bind(StreamInfo(outputs=10, tasks=4), np.random.default_rng(0))
    owner = np.full(40, -1)  # the task of the sample in each slot
    for task in range(4):
        for _ in range(15):
            slots = memory.offer(np.zeros(7, dtype=np.int64), task)
            owner[slots[slots >= 0]] = task
            counts = np.bincount(owner[memory.readable()], minlength=task + 1)
            assert counts.tolist() == [20 // max(task, 1)] * task + [0]
