"""Avalanche: a plugin that converts a strategy's norms, a metric of the norm effect, and streams as benchmarks.

Example:
    >>> from avalanche.training import Replay
    >>> from contnorm.integrations.avalanche import NormPlugin
    >>> network = nn.Sequential(nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.Flatten(), nn.Linear(32 * 26 * 26, 10))
    >>> strategy = Replay(
    ...     model=network,
    ...     optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
    ...     criterion=nn.CrossEntropyLoss(),
    ...     mem_size=200,
    ...     plugins=[NormPlugin("cn", num_groups=8)],
    ... )
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import torch
from avalanche.benchmarks import CLScenario, benchmark_from_datasets, with_classes_timeline, with_task_labels
from avalanche.benchmarks.utils import (
    DataAttribute,
    TaskAwareSupervisedClassificationDataset,
    TaskLabels,
    TransformGroups,
)
from avalanche.benchmarks.utils.flat_data import ConstantSequence
from avalanche.core import SupervisedPlugin
from avalanche.evaluation import PluginMetric
from avalanche.evaluation.metric_results import MetricValue
from avalanche.evaluation.metric_utils import get_metric_name
from avalanche.models import avalanche_forward
from avalanche.models.utils import is_multi_task_module
from torch import Tensor, nn
from torch.utils.data import DataLoader

from contnorm.bench.api.stream import Stream, TaskDataset
from contnorm.bench.streams.device import DeviceStream
from contnorm.convert import convert_norm, norm_layers
from contnorm.moments.pooling import Moments, keeps_moments, read_moments, write_moments
from contnorm.moments.reestimate import ChainedBatches, Reestimated, reestimate
from contnorm.registry import LayerFactory, NormInfo

__all__ = ["NormEffect", "NormPlugin", "RandomCropAndFlip", "to_avalanche"]


class NormPlugin(SupervisedPlugin):
    """Plugin that converts the norms of a strategy's model, and can evaluate with moments of the replay buffer.

    The model is converted in place before the first training or evaluation. Parameters stay the same objects, so the
    optimizer and its state stay valid. Norm layers that the model's adaptation adds later are converted too. Norms that
    need tags of the batch (``adab2n``, ``tbbn``, ``bnt``) can't be trained, since Avalanche's loops do not give these.

    With ``reestimate_from``, exact moments of the stored samples replace the running moments during each evaluation
    (`contnorm.reestimate`), and the running moments are restored afterwards. Training is not affected. An empty
    buffer, as before the first experience, leaves the running moments.

    Args:
        to: Name of the new norm, or a class or function, as in `contnorm.convert_norm`; None to keep the norms.
        reestimate_from: ``"buffer"`` for the replay buffer of the strategy (``Replay``, ``DER``, ``ER_ACE``, ...) or of
            its first plugin with a buffer; a plugin or a storage policy whose buffer is used; None for running moments.
        weights: Function of a batch of the buffer that returns one weight per sample, as in `contnorm.reestimate`.
        **options: Arguments of the new norm, such as ``num_groups=8``.

    Example:
        >>> plugin = NormPlugin("cn", reestimate_from="buffer", num_groups=8)
        >>> batch_norm_with_buffer_moments = NormPlugin(None, reestimate_from="buffer")
    """

    def __init__(
        self,
        to: str | LayerFactory | NormInfo | None = "cn",
        reestimate_from: Any = None,
        *,
        weights: Callable[[Any], Tensor] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.to, self.reestimate_from, self.weights, self.options = to, reestimate_from, weights, options
        self._converted: list[nn.Module] = []
        self._moments: Reestimated | None = None

    def before_training(self, strategy: Any, **kwargs: Any) -> None:
        """Restore moments that an interrupted evaluation left, and convert the model."""
        self.after_eval(strategy)
        self._convert(strategy)

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Convert norms that the model's adaptation added, and pass parameters of new norms to the optimizer."""
        before = {id(parameter) for parameter in strategy.model.parameters()}
        self._convert(strategy)
        if any(id(parameter) not in before for parameter in strategy.model.parameters()):
            strategy.make_optimizer()

    def before_eval(self, strategy: Any, **kwargs: Any) -> None:
        """Convert the model if it was not trained yet, and set the moments of the buffer."""
        self.after_eval(strategy)
        self._convert(strategy)
        if self.reestimate_from is None or not keeps_moments(strategy.model):
            return
        owner = self.reestimate_from
        if owner == "buffer":
            owner = next(each for each in (strategy, *strategy.plugins) if hasattr(each, "storage_policy"))
        buffer = getattr(owner, "storage_policy", owner).buffer
        if len(buffer):
            self._moments = reestimate(
                strategy.model,
                _batches_of(strategy, buffer),
                weights=self.weights,
                call=_forward_on(strategy.device),
                frozen="lift",
            )

    def after_eval(self, strategy: Any, **kwargs: Any) -> None:
        """Restore the running moments."""
        if self._moments is not None:
            self._moments.restore()
            self._moments = None

    def _convert(self, strategy: Any) -> None:
        """Convert the norms that were not there after the last conversion."""
        known = set(self._converted)
        names = [layer.name for layer in norm_layers(strategy.model) if layer.module not in known]
        if self.to is not None and (names or not known):
            # It would warn of the optimizer, which Avalanche makes again for each experience.
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                strategy.model = convert_norm(strategy.model, self.to, only=names or None, **self.options)
            self._converted = [layer.module for layer in norm_layers(strategy.model)]


class NormEffect(PluginMetric[float]):
    """Metric of the cross-task normalization effect: the accuracy that exact moments would add in each evaluation.

    The model is evaluated a second time, with exact moments of the training data of all experiences so far (BN*) in
    place of the running moments; weights do not change. The effect is the accuracy with exact moments minus the
    accuracy of the evaluation, as fractions like Avalanche's accuracies, so ``Top1_Acc_Exp`` plus the effect is the
    accuracy with exact moments. It is positive if the moments that the evaluation uses make the model forget. Those are
    the running moments, or, with a `NormPlugin`, the moments of the buffer: then the effect is what remains. It is 0
    for models without moments.

    Logged values, with the names of Avalanche's metrics:

    - ``NormEffect_Exp/eval_phase/test_stream/Task000/Exp000``: effect on each evaluated experience;
    - ``NormEffect_Stream/eval_phase/test_stream/Task000``: effect over all samples of the evaluated stream.

    Nothing is logged before the first training. The training data is read once, or once for each norm layer if it does
    not fit into memory; limit it with ``samples`` if that takes too long.

    Args:
        samples: Number of training samples of each experience that moments are computed from, evenly spaced over its
            data; None for all.

    Example:
        >>> from avalanche.training.plugins import EvaluationPlugin
        >>> from avalanche.evaluation.metrics import accuracy_metrics
        >>> from avalanche.logging import InteractiveLogger
        >>> metrics = accuracy_metrics(experience=True, stream=True), NormEffect(samples=1000)
        >>> evaluator = EvaluationPlugin(*metrics, loggers=[InteractiveLogger()])
    """

    def __init__(self, *, samples: int | None = None) -> None:
        super().__init__()
        self.samples = samples
        self._data: dict[int, Any] = {}  # training data by experience
        self.reset()

    def reset(self) -> None:
        """Start a new evaluation."""
        self._exact_moments: dict[str, Moments] | None = None  # those of all data, in one evaluation
        self._count = self._exact = self._used = 0
        self._correct = self._seen = 0

    def result(self) -> float | None:
        """Return the effect over the samples that were evaluated since the last reset; None if there are none."""
        return (self._exact - self._used) / self._count if self._count else None

    def __str__(self) -> str:
        return "NormEffect"

    def before_training_exp(self, strategy: Any) -> None:
        """Remember the training data of the experience, once if it is trained several times."""
        experience, data = strategy.experience, strategy.experience.dataset
        if self.samples is not None and len(data) > self.samples:
            data = data.subset(np.linspace(0, len(data) - 1, self.samples).astype(int).tolist())
        self._data[int(experience.current_experience)] = data

    def before_eval(self, strategy: Any) -> None:
        """Start a new evaluation."""
        self.reset()

    def before_eval_exp(self, strategy: Any) -> None:
        """Start the count of the experience."""
        self._correct = self._seen = 0

    def after_eval_iteration(self, strategy: Any) -> None:
        """Count the correct predictions of the evaluation itself."""
        self._correct += _correct(strategy.mb_output, strategy.mb_y)
        self._seen += len(strategy.mb_y)

    def after_eval_exp(self, strategy: Any) -> list[Any] | None:
        """Evaluate the experience with exact moments, and log the effect."""
        if not self._data or not self._seen:
            return None
        exact = self._correct
        if keeps_moments(strategy.model):
            if self._exact_moments is None:
                batches = ChainedBatches([_batches_of(strategy, data) for data in self._data.values()])
                with reestimate(strategy.model, batches, call=_forward_on(strategy.device), frozen="lift") as done:
                    self._exact_moments = {name: (each.new_mean, each.new_var) for name, each in done.moments.items()}
            layers = {name: strategy.model.get_submodule(name) for name in self._exact_moments}
            old = read_moments(layers)
            try:
                write_moments(layers, self._exact_moments)
                exact = _evaluate(strategy)
            finally:
                write_moments(layers, old)
        self._exact, self._used, self._count = self._exact + exact, self._used + self._correct, self._count + self._seen
        return [self._value(strategy, "Exp", (exact - self._correct) / self._seen)]

    def after_eval(self, strategy: Any) -> list[Any] | None:
        """Log the effect over the stream."""
        effect = self.result()
        return None if effect is None else [self._value(strategy, "Stream", effect)]

    def _value(self, strategy: Any, level: str, value: float) -> Any:
        name = get_metric_name(f"{self}_{level}", strategy, add_experience=level == "Exp", add_task=True)
        return MetricValue(self, name, value, strategy.clock.train_iterations)


def _evaluate(strategy: Any) -> int:
    """Return the number of correct predictions on the current experience, with the strategy's own forward pass."""
    before = strategy.mbatch, strategy.mb_output
    correct = 0
    try:
        with torch.random.fork_rng(devices=[]):  # the data loader draws a seed
            for batch in strategy.dataloader:
                strategy.mbatch = batch
                strategy._unpack_minibatch()
                correct += _correct(strategy.forward(), strategy.mb_y)
    finally:
        strategy.mbatch, strategy.mb_output = before
    return correct


def _correct(scores: Tensor, y: Tensor) -> int:
    return int((scores.argmax(1) == y).sum())


def _forward_on(device: torch.device) -> Callable[[nn.Module, Any], object]:
    """Return a function that runs a model on the inputs, and where it takes them the task labels, of a batch."""

    def forward(model: nn.Module, batch: Any) -> object:
        tasks = batch[2].to(device) if len(batch) > 2 else None
        return avalanche_forward(model, batch[0].to(device), tasks)

    return forward


def _batches_of(strategy: Any, dataset: Any) -> DataLoader[Any]:
    """Return the samples of a data set in batches that can be read repeatedly, with the transforms of evaluation.

    A multi-task model calls its layers once for each task of a batch, so its batches have samples of one task.
    """
    data = dataset.eval() if hasattr(dataset, "eval") else dataset
    size = strategy.eval_mb_size
    indices = [np.arange(len(data))]
    if is_multi_task_module(strategy.model):
        tasks = np.asarray([int(task) for task in dataset.targets_task_labels])
        indices = [np.flatnonzero(tasks == task) for task in np.unique(tasks)]
    batches = [part[start : start + size].tolist() for part in indices for start in range(0, len(part), size)]
    # A generator of its own: reading the data must not advance the one that training draws from.
    return DataLoader(
        data, batch_sampler=batches, collate_fn=getattr(data, "collate_fn", None), generator=torch.Generator()
    )


# --- streams of the bench -------------------------------------------------------------------------------------------


def to_avalanche(stream: Stream, seed: int = 0) -> CLScenario:
    """Return a stream as an Avalanche benchmark, with one training and one test experience for each task.

    Samples, labels and their order are those of `bench.run` with the same seed. Inputs are tensors as the networks of
    the bench receive them (scaled to [0, 1], permuted and normalized as the stream defines it). If the stream has
    augmentation, the training transforms are its random crops and flips, drawn from torch's global generator; replay
    buffers draw new ones each time. Labels are output indices: classes are numbered in the order of the tasks.

    Task labels are the numbers of the tasks for scenario ``"task"``, and 0 for ``"class"`` and ``"domain"``. Avalanche
    has no rule by which only the outputs of a task compete: use a multi-head model for scenario ``"task"``.

    Args:
        stream: Stream with one label per sample.
        seed: Seed of the stream: of the class order, the permutations and the order of samples, where these are random.

    Returns:
        A benchmark with the streams ``train_stream`` and ``test_stream``.

    Raises:
        ValueError: For multi-label and for task-free streams, which Avalanche's benchmarks can't represent.

    Example:
        >>> import numpy as np
        >>> x, y = np.random.default_rng(0).normal(size=(80, 8)), np.arange(80) % 4
        >>> benchmark = to_avalanche(Stream.from_arrays(x, y, x, y, tasks=2))
        >>> [experience.classes_in_this_experience for experience in benchmark.train_stream]
        [[0, 1], [2, 3]]
    """
    sequence = stream.sequence(seed)
    if sequence.multi_label or sequence.task_free:
        raise ValueError(
            f"to_avalanche: {stream.name} has several labels per sample or no boundaries of tasks, which Avalanche's "
            f"benchmarks can't represent. Use another stream, or scenario='class'."
        )
    data = DeviceStream(sequence, torch.device("cpu"))
    is_task_aware = not sequence.competing.all()
    experiences = {
        name: [_experience(data, task, name == "test", task if is_task_aware else 0) for task in range(sequence.tasks)]
        for name in ("train", "test")
    }
    benchmark = with_classes_timeline(with_task_labels(benchmark_from_datasets(**experiences)))
    for experience in chain(benchmark.train_stream, benchmark.test_stream):
        # A list, because Avalanche's MultiHeadClassifier uses the classes as an index.
        experience.classes_in_this_experience = sorted(experience.classes_in_this_experience)
        experience.benchmark = benchmark
    # ICaRL reads the classes from the benchmark, as those of nc_benchmark have them.
    classes = [experience.classes_in_this_experience for experience in benchmark.train_stream]
    benchmark.n_classes_per_exp = [len(each) for each in classes]
    benchmark.classes_order = list(chain.from_iterable(classes))
    return benchmark


def _experience(data: DeviceStream, task: int, test: bool, task_label: int) -> Any:
    items, sequence = data.sequence.test if test else data.sequence.train, data.sequence
    labels = items.label[items.task == task].tolist()
    augment = None
    if not test and sequence.padding is not None:
        mean, std = (torch.tensor(values or default) for values, default in ((sequence.mean, [0]), (sequence.std, [1])))
        augment = RandomCropAndFlip(sequence.padding, (-mean / std).view(-1, 1, 1))
    return TaskAwareSupervisedClassificationDataset(
        [TaskDataset(data, task, test)],
        # A ConstantSequence, as in Avalanche's own benchmarks: its ICaRL can't join another sequence with its memory.
        data_attributes=[DataAttribute(labels, "targets"), TaskLabels(ConstantSequence(task_label, len(labels)))],
        transform_groups=TransformGroups({"train": augment, "eval": None}, current_group="eval" if test else "train"),
    )


class RandomCropAndFlip:
    """Transform of a stream's augmentation: pad with black pixels, crop to the old size, and flip half of the images.

    Args:
        padding: Pixels on each side.
        black: Value of a black pixel in each channel, (C, 1, 1).

    Example:
        >>> RandomCropAndFlip(1, torch.zeros(1, 1, 1))(torch.ones(3, 8, 8)).shape
        torch.Size([3, 8, 8])
    """

    def __init__(self, padding: int, black: Tensor) -> None:
        self.padding, self.black = padding, black

    def __call__(self, x: Tensor) -> Tensor:
        channels, height, width = x.shape
        padded = self.black.expand(channels, height + 2 * self.padding, width + 2 * self.padding).clone()
        padded[:, self.padding : self.padding + height, self.padding : self.padding + width] = x
        down, right = torch.randint(0, 2 * self.padding + 1, (2,)).tolist()
        view = padded[:, down : down + height, right : right + width]
        return view.flip(-1) if torch.rand(()) < 0.5 else view
