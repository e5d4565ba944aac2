"""The public stream of tasks: by name, from arrays or from a folder of images."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from contnorm.bench.components import Component, components, find_component, user_code_errors
from contnorm.bench.config.defaults import stream_name
from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig, flatten_settings, from_dict, with_setting
from contnorm.bench.data.arrays import array_source, read_class_folders, read_npz
from contnorm.bench.data.dataset import ArraySource, Source, find_stored, list_stored, read_manifest
from contnorm.bench.data.registry import data_root, load_source
from contnorm.bench.plan import Plan, make_plan
from contnorm.bench.rng import list_seeds
from contnorm.bench.strategies import build_strategy
from contnorm.bench.strategies.base import Batch, OutputMask
from contnorm.bench.streams.device import DeviceStream
from contnorm.bench.streams.tasks import ALIASES, STREAMS, TaskSequence, build_stream, find_stream
from contnorm.errors import UserError, unknown

CPU = torch.device("cpu")
MOST_SHOWN = 20  # tasks of a stream, and classes of a task, in the table of a notebook


class TaskDataset(Dataset[tuple[Tensor, int]]):
    """The samples of one task: ``(x, label)``, where ``x`` is the input of a network.

    Images are scaled to [0, 1] and normalized with the mean and standard deviation of the stream, if it has one;
    permuted streams permute the pixels. There is no augmentation. Labels are output indices; multi-label streams have
    a tensor of 0 and 1 per output.

    Example:
        >>> x, y = np.zeros((8, 3)), np.arange(8) % 4
        >>> sample, label = Stream.from_arrays(x, y, x, y, tasks=2).tasks[1].test[0]
        >>> sample.shape, label
        (torch.Size([3]), 2)
    """

    def __init__(self, data: DeviceStream, task: int, test: bool) -> None:
        self._data, self._test = data, test
        items = data.sequence.test if test else data.sequence.train
        self._items = np.flatnonzero(items.task == task)
        self._labels = items.label[self._items]

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"TaskDataset({len(self)} {'test' if self._test else 'training'} samples)"

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        items = torch.from_numpy(self._items[[index]])
        x = self._data.test_x(items) if self._test else self._data.train_x(items)
        label = self._labels[index]
        return x[0], torch.from_numpy(label.copy()) if self._labels.ndim == 2 else int(label)


@dataclass(frozen=True)
class Task:
    """One task of a stream.

    Attributes:
        index: Number of the task, from 0.
        classes: Its classes, as the data set names them, in the order of the network's outputs.
        train: Training samples, in the order of presentation.
        test: Test samples.

    Example:
        >>> x, y = np.zeros((8, 3)), np.arange(8) % 4
        >>> task = Stream.from_arrays(x, y, x, y, tasks=2).tasks[1]
        >>> task.index, task.classes, len(task.train)
        (1, (2, 3), 4)
    """

    index: int
    classes: tuple[Any, ...]
    train: TaskDataset
    test: TaskDataset


class Stream:
    """A stream of tasks. Build it with `load_stream`, or from your data with a method such as `from_arrays`.

    Label space: outputs of a network are numbered in the order of the tasks. With scenario ``"class"`` all outputs
    compete, with ``"task"`` only those of the sample's task do, with ``"domain"`` all tasks share the outputs, and
    with ``"free"`` (task-free) training has no task boundaries.

    Attributes:
        settings: The ``stream.*`` settings that differ from the defaults.
        root: The folder of data sets; None for a stream whose data is in memory.

    Example:
        >>> x, y = np.random.default_rng(0).normal(size=(80, 8)), np.arange(80) % 4
        >>> stream = Stream.from_arrays(x, y, x, y, tasks=2)
        >>> stream.num_tasks, stream.num_classes, stream.tasks[1].classes, stream.input_shape
        (2, 4, (2, 3), (8,))
        >>> batch = next(stream.batches(batch_size=10, seed=0))
        >>> batch.x.shape, batch.task.unique()
        (torch.Size([10, 8]), tensor([0]))
    """

    def __init__(
        self, settings: Mapping[str, Any], root: Path | None, source: Source | None = None, allow_missing: bool = False
    ) -> None:
        self.settings, self.root, self.allow_missing = dict(settings), root, allow_missing
        if source is not None:
            self.__dict__["source"] = source  # replaces the cached property
        self._spec = find_stream(from_dict({"stream": self.settings}).stream.name)  # invalid settings fail here

    @classmethod
    def from_arrays(
        cls,
        x: object,
        y: object,
        x_test: object,
        y_test: object,
        *,
        tasks: int | Sequence[Sequence[Any]] | None = None,
        task_ids: tuple[object, object] | None = None,
        name: str = "arrays",
        **settings: Any,
    ) -> Stream:
        """Make a stream from NumPy arrays or tensors.

        Arrays of type uint8 are images, scaled to [0, 1]. Other numbers are used as they are, in float32.

        Args:
            x, x_test: Samples of any shape: (samples, features), (samples, height, width) or
                (samples, channels, height, width).
            y, y_test: The label of each sample: integers or strings.
            tasks: Number of tasks, over which the classes are split in sorted order; or a list of the classes of each
                task.
            task_ids: Instead of ``tasks``: the task of each training and of each test sample, numbered from 0.
            name: Name of the data in tables and records.
            **settings: Settings of the stream, such as ``scenario="task"`` or ``class_order="seed"``. The default
                scenario is ``"class"``, or ``"domain"`` with ``task_ids``.
        """
        source = array_source(x, y, x_test, y_test, tasks=tasks, task_ids=task_ids, name=name, copy=True)
        return cls._of_user("arrays", source, settings)

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        tasks: int | Sequence[Sequence[Any]],
        size: int | None = None,
        test_share: float = 0.2,
        **settings: Any,
    ) -> Stream:
        """Make a stream from a folder of images with one label each.

        Args:
            folder: Folder with ``train/<class>/*`` and ``test/<class>/*``; or with ``<class>/*``, of which a share of
                each class is the test split.
            tasks: As in `from_arrays`; classes are named as their folders.
            size: Height and width that images are resized and center-cropped to; None if all have the same size.
            test_share: Share of the images of each class that is the test split, if there is no folder ``test``.
            **settings: Settings of the stream, as in `from_arrays`.
        """
        path = Path(folder).expanduser()
        arrays: tuple[Any, ...] = read_class_folders(path, size, test_share)
        source = array_source(*arrays, tasks=tasks, task_ids=None, name=path.resolve().name)
        return cls._of_user("folder", source, settings)

    @classmethod
    def from_npz(
        cls,
        path: str | Path,
        *,
        tasks: int | Sequence[Sequence[Any]] | None = None,
        test_share: float = 0.2,
        **settings: Any,
    ) -> Stream:
        """Make a stream from an ``.npz`` file of arrays.

        Args:
            path: File with ``x_train``, ``y_train``, ``x_test`` and ``y_test``; optionally with ``task_train`` and
                ``task_test``, the task of each sample. The arrays are as in `from_arrays`.
            tasks: As in `from_arrays`; not with tasks of the samples.
            test_share: Share of the samples of each class that is the test split, if there is no ``x_test``.
            **settings: Settings of the stream, as in `from_arrays`.
        """
        file = Path(path).expanduser()
        source = read_npz(file, tasks=tasks, test_share=test_share, name=file.resolve().stem)
        return cls._of_user("arrays", source, settings)

    @classmethod
    def from_datasets(
        cls,
        train: Any,
        test: Any,
        *,
        tasks: int | Sequence[Sequence[Any]] | None = None,
        name: str = "datasets",
        **settings: Any,
    ) -> Stream:
        """Make a stream from two PyTorch data sets, whose samples are ``(x, label)``.

        All samples are read into memory, once and in order, so random transforms are applied once; set
        ``augment=True`` for random crops and flips in every batch.

        Args:
            train, test: Map-style data sets with samples of one shape: tensors, arrays or images.
            tasks: As in `from_arrays`.
            name: Name of the data in tables and records.
            **settings: Settings of the stream, as in `from_arrays`.
        """
        arrays = *_read_samples(train), *_read_samples(test)
        source = array_source(*arrays, tasks=tasks, task_ids=None, name=name)
        return cls._of_user("arrays", source, settings)

    @classmethod
    def from_avalanche(cls, benchmark: Any, *, name: str = "avalanche", **settings: Any) -> Stream:
        """Make a stream from a benchmark of Avalanche, with one task for each training experience.

        The scenario follows from the task labels. If every experience has a different one, it is ``"task"``; a class
        index that several experiences use is then a class of its own in each, named as ``"3:0"`` (experience 3, class
        0). If all have the same one, it is ``"class"``, or ``"domain"`` if experiences share classes.

        All samples are read into memory, with the benchmark's transforms of evaluation, also those of training. Images
        of type uint8 (without a transform to a tensor) are scaled to [0, 1]; other values are used as they are.

        Args:
            benchmark: Benchmark with a ``train_stream`` and a ``test_stream`` of as many experiences.
            name: Name of the data in tables and records.
            **settings: Settings of the stream, as in `from_arrays`. ``augment=True`` applies the random crops and flips
                of the bench in training, ``augment=False`` no augmentation.

        Raises:
            UserError: If a stream can't represent the benchmark: several tasks in an experience, task labels that are
                neither all equal nor all different, or labels that are no classes.
        """
        experiences = list(zip(benchmark.train_stream, benchmark.test_stream, strict=True))
        splits = [[_read_samples(_in_evaluation(pair[i].dataset)) for pair in experiences] for i in (0, 1)]
        task_labels = [label for one, _ in experiences for label in set(getattr(one, "task_labels", None) or [0])]
        classes = [list(dict.fromkeys(sorted(labels))) for _, labels in splits[0]]
        shared = len(set(chain(*classes))) < len(list(chain(*classes)))
        if len(task_labels) == len(experiences) == len(set(task_labels)) > 1:
            scenario = "task"
        elif len(set(task_labels)) == 1:
            scenario = "domain" if shared and len(experiences) > 1 else "class"
        else:
            raise UserError(f"from_avalanche: use one task label, or one for each experience, not {task_labels}.")
        if scenario == "task" and shared:  # each experience has classes of its own
            splits = [[(x, [f"{i}:{y}" for y in labels]) for i, (x, labels) in enumerate(split)] for split in splits]
            classes = [[f"{i}:{y}" for y in labels] for i, labels in enumerate(classes)]
        arrays = [part for split in splits for part in (np.concatenate([x for x, _ in split]),
                                                        list(chain(*(labels for _, labels in split))))]  # fmt: skip
        ids = [np.repeat(np.arange(len(split)), [len(labels) for _, labels in split]) for split in splits]
        by_id = scenario == "domain"
        tasks, task_ids = (None, (ids[0], ids[1])) if by_id else (classes, None)
        source = array_source(*arrays, tasks=tasks, task_ids=task_ids, name=name)
        return cls._of_user("arrays", source, {"scenario": scenario, **settings})

    @classmethod
    def _of_user(cls, kind: str, source: ArraySource, settings: Mapping[str, Any]) -> Stream:
        """Make a stream of a data set in memory."""
        for key in ("name", "source"):
            if key in settings:
                raise UserError(f"stream.{key} of a stream from {kind} is filled in. Leave it out.")
        scenario = {} if source.task_classes is not None else {"scenario": "domain"}
        return cls({"name": kind, "source": source.name, **scenario, **settings}, None, source)

    @cached_property
    def _config(self) -> RunConfig:
        return resolve({"stream": self.settings}, self.root or Path("data"))

    @property
    def name(self) -> str:
        """Name of the stream in tables: that of the data, if these are the user's own."""
        return stream_name(self._config.stream)

    @cached_property
    def source(self) -> Source:
        """The data set; it is loaded on first use."""
        name = self._config.stream.source
        assert name is not None and self.root is not None
        return load_source(name, self.root, allow_missing=self.allow_missing)

    @property
    def is_loaded(self) -> bool:
        """Whether the data set is in memory."""
        return "source" in self.__dict__

    @property
    def defaults(self) -> dict[str, Any]:
        """Default network of a user's data: ResNet-18 for color images of at least 16 pixels, otherwise an MLP."""
        if self._spec.kind != "user":
            return {}
        shape = self.input_shape
        images = len(shape) == 3 and shape[0] >= 3 and min(shape[1:]) >= 16
        return {"model": {"name": "resnet18", "width": 20} if images else {"name": "mlp"}}

    def sequence(self, seed: int = 0) -> TaskSequence:
        """Build the tasks for a seed: indices into the data set."""
        return build_stream(self._config.stream, self.source, seed)

    @cached_property
    def _data(self) -> DeviceStream:
        return DeviceStream(self.sequence(), CPU)

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return self._data.sequence.tasks

    @property
    def num_classes(self) -> int:
        """Number of classes of all tasks."""
        return len({name for task in self.tasks for name in task.classes})

    @property
    def num_outputs(self) -> int:
        """Number of outputs that a network needs."""
        return self._data.sequence.outputs

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.source.train_images.shape[1:])

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks for seed 0. Streams that draw their samples or classes by seed differ for other seeds."""
        sequence = self._data.sequence
        return tuple(
            Task(
                i, _class_names(self.source, sequence, i), *(TaskDataset(self._data, i, test) for test in (False, True))
            )
            for i in range(sequence.tasks)
        )

    def batches(
        self,
        batch_size: int | None = None,
        seed: int = 0,
        *,
        settings: Mapping[str, Any] | None = None,
        device: str | torch.device = "cpu",
    ) -> Iterator[Batch]:
        """Yield the batches of one online pass, in the order in which `bench.run` presents them.

        Args:
            batch_size: Samples per batch; None for the default of the stream.
            seed: Seed of the order and of the augmentation.
            settings: Further settings by dotted key. The augmentation of a run depends on its replay draws, since
                they share a random generator: with ``{"strategy.name": "er"}`` the augmentation is that of ER, without
                it that of training without replay.
            device: Device of the tensors.
        """
        sequence, plan = self._sequence_and_plan(seed, {"train.batch": batch_size, **(settings or {})})
        data = DeviceStream(sequence, torch.device(device))
        for step in plan.steps:
            items = torch.from_numpy(step.stream).to(data.device)
            views = None if step.stream_views is None else torch.from_numpy(step.stream_views).to(data.device)
            yield Batch(data.train_x(items, views), data.train.label[items], data.train.task[items])

    def plan(self, seed: int = 0, *, settings: Mapping[str, Any] | None = None) -> Plan:
        """Return the samples of each training step of a run: of the stream, and of each replay draw.

        The steps are those of `bench.run` with the same seed and settings, so that a loop of your own can repeat the
        run. Samples are rows of ``stream.sequence(seed).train``, whose ``image`` is the index in the data set. The
        extra batch that some norms request is not part of it.

        Args:
            seed: Seed of the run.
            settings: Settings of the run by dotted key, such as ``{"strategy.name": "er", "train.updates": 2}``.

        Example:
            >>> x, y = np.zeros((80, 8)), np.arange(80) % 4
            >>> stream = Stream.from_arrays(x, y, x, y, tasks=2)
            >>> plan = stream.plan(settings={"strategy.name": "er", "train.updates": 2})
            >>> len(plan.steps), plan.ends  # 80 samples in batches of 10, with 2 steps each
            (16, (8, 16))
            >>> first, second = plan.steps[8:10]  # the first batch of the second task
            >>> first.stream.tolist() == second.stream.tolist(), [len(draw) for draw in first.replay]
            (True, [10])
            >>> stream.sequence().train.image[first.stream].shape  # the rows of ``x``
            (10,)
        """
        return self._sequence_and_plan(seed, settings or {})[1]

    def _sequence_and_plan(self, seed: int, settings: Mapping[str, Any]) -> tuple[TaskSequence, Plan]:
        values: dict[str, Any] = {"stream": self.settings}
        for key, value in flatten_settings(settings).items():
            if value is not None or key != "train.batch":
                values = with_setting(values, key, value.item() if isinstance(value, np.generic) else value)
        config = resolve(values, self.root or Path("data"))
        (seed,) = list_seeds([seed])
        sequence = self.sequence(seed)
        return sequence, make_plan(config, sequence, seed, build_strategy(config.strategy).draws)

    def __repr__(self) -> str:
        config = self._config.stream
        if not self.is_loaded:
            return f"Stream({config.name!r}, source={config.source!r}, scenario={config.scenario!r}, not loaded)"
        sequence, shape = self._data.sequence, "x".join(map(str, self.input_shape))
        return (
            f"Stream({config.name!r}, source={config.source!r}, scenario={config.scenario!r}, {self.num_tasks} tasks, "
            f"{self.num_classes} classes, {len(sequence.train)} training and {len(sequence.test)} test samples of "
            f"shape {shape})"
        )

    def _repr_html_(self) -> str:
        """Show the tasks as a table; the data is loaded for it."""
        rows = []
        for task in self.tasks[:MOST_SHOWN]:
            names = ", ".join(str(name) for name in task.classes[:MOST_SHOWN])
            names += ", ..." if len(task.classes) > MOST_SHOWN else ""
            rows.append((task.index, names, f"{len(task.train):,}", f"{len(task.test):,}"))
        heads = "".join(f"<th>{name}</th>" for name in ("task", "classes", "training samples", "test samples"))
        lines = ("".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows)
        table = "".join(f"<tr>{line}</tr>" for line in (heads, *lines))
        rest = f"<p>... {self.num_tasks} tasks</p>" if self.num_tasks > MOST_SHOWN else ""
        return f"<p>{html.escape(repr(self))}</p><table>{table}</table>{rest}"


def _read_samples(dataset: Any) -> tuple[np.ndarray, list[Any]]:
    """Return the samples of a map-style data set of ``(x, label, ...)`` as one array, and their labels."""
    samples, labels = [], []
    for i in range(len(dataset)):
        x, label = dataset[i][:2]
        array = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
        is_picture = hasattr(x, "getbands") and array.ndim == 3  # a picture of Pillow has channels last
        samples.append(array.transpose(2, 0, 1) if is_picture else array)
        labels.append(label.item() if hasattr(label, "item") else label)
    return np.stack(samples), labels


def _in_evaluation(dataset: Any) -> Any:
    """Return a data set of Avalanche with its transforms of evaluation; one without groups of transforms as it is."""
    change = getattr(dataset, "eval", None)
    return change() if callable(change) else dataset


def load_stream(name: str, root: str | Path | None = None, *, allow_missing: bool = False, **settings: Any) -> Stream:
    """Load a stream by name.

    Args:
        name: Name of the stream, as in ``contnorm ls streams``, or of a data set that `add_dataset` added or
            `register` registered.
        root: Folder of data sets; None for the environment variable ``CONTNORM_DATA``, or ``./data``.
        allow_missing: Accept a published data set with other image counts than published.
        **settings: Settings of the stream, such as ``tasks=3`` or ``scenario="class"``.

    Example:
        >>> load_stream("split-mnist", source="digits").num_tasks
        5
    """
    folder = data_root(None if root is None else Path(root).expanduser())
    if not isinstance(name, str) or name.lower() in {*STREAMS, *ALIASES}:
        return Stream({"name": name, **settings}, folder, allow_missing=allow_missing)
    if (stored := find_stored(name, folder)) is not None:
        manifest = read_manifest(stored)
        kind = manifest["about"]["stream"]
        source = name if kind == "multi-label" else manifest["name"]
        scenario = {"scenario": "domain"} if manifest.get("task_classes", ()) is None else {}
        return Stream({"name": kind, "source": source, **scenario, **settings}, folder)
    if (component := find_component("dataset", name)) is not None:
        return _make_registered(component, folder, settings)
    registered = [component.name for component in components("dataset")]
    raise unknown("stream", name, [*STREAMS, *registered, *list_stored(folder)])


def _make_registered(component: Component, root: Path, settings: Mapping[str, Any]) -> Stream:
    make: Any = component.load()
    settings = {key: value for key, value in settings.items() if value is not None}
    with user_code_errors(f"dataset {component.name!r}", "called with (root, **settings)"):
        stream = make(root, **settings)
    if not isinstance(stream, Stream) or stream.source.name.partition("@")[0] != component.name:
        raise UserError(
            f"dataset {component.name!r} of {component.origin}: must return a bench.Stream of data with the name "
            f"{component.name!r}, not {stream!r}."
        )
    return stream


def _class_names(source: Source, sequence: TaskSequence, task: int) -> tuple[Any, ...]:
    """Return the names of the classes of a task, in the order of their outputs."""
    names = getattr(source, "class_names", None) or range(source.classes)
    class_of: dict[int, int] = {}
    test_labels = source.train_labels if sequence.held_out else source.test_labels
    for items, labels in ((sequence.train, source.train_labels), (sequence.test, test_labels)):
        of_task = items.task == task
        classes = np.asarray(labels)[items.image[of_task]]
        if sequence.multi_label:  # outputs are the classes
            class_of |= {int(label): int(label) for label in np.flatnonzero(classes.any(axis=0))}
        else:
            outputs, first = np.unique(items.label[of_task], return_index=True)
            class_of |= dict(zip(outputs.tolist(), classes[first].tolist(), strict=True))
    return tuple(names[class_of[output]] for output in sorted(class_of))


def evaluate(
    model: nn.Module, stream: Stream, *, tasks: int | None = None, seed: int = 0, batch_size: int = 1000
) -> NDArray[np.float64]:
    """Return the accuracy of a network on the test samples of each task, in percent.

    The network is evaluated as `bench.run` does it: in evaluation mode, and among the outputs that the scenario of the
    stream allows. Its mode is restored afterwards.

    Args:
        model: A network with one output per class of the stream (`Stream.num_outputs`).
        stream: The stream; not a multi-label one.
        tasks: Number of tasks to evaluate, from the first; None for all.
        seed: Seed of the run that the network was trained in.
        batch_size: Samples per forward pass.

    Example:
        >>> stream = Stream.from_arrays(np.eye(4), [0, 1, 2, 3], np.eye(4), [0, 1, 2, 3], tasks=2)
        >>> evaluate(nn.Identity(), stream)
        array([100., 100.])
    """
    parameter = next(iter(model.parameters()), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    data = DeviceStream(stream.sequence(seed), device)
    if data.sequence.multi_label:
        raise UserError("evaluate: a multi-label stream has no accuracies. Use bench.run, whose results have scores().")
    mask = OutputMask(data.competing)
    was_training = model.training
    model.eval()
    correct = np.zeros(data.sequence.tasks)
    total = np.bincount(data.sequence.test.task, minlength=data.sequence.tasks)
    try:
        with torch.no_grad():
            for items in torch.split(torch.arange(len(data.sequence.test), device=device), batch_size):
                task, label = data.test.task[items], data.test.label[items]
                logits = model(data.test_x(items))
                if logits.shape != (len(items), data.sequence.outputs):
                    raise UserError(
                        f"the network returns {tuple(logits.shape)} for {len(items)} samples. The stream has "
                        f"{data.sequence.outputs} outputs (Stream.num_outputs)."
                    )
                right = mask(logits.float(), task).argmax(1) == label
                np.add.at(correct, task.cpu().numpy(), right.cpu().numpy())
    finally:
        model.train(was_training)
    return (100 * correct / total)[:tasks]
