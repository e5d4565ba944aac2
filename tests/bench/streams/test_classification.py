"""Streams: the same seed gives the same items, tasks are whole and apart, and labels are what a scenario says."""

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from contnorm.bench.config.schema import StreamConfig
from contnorm.bench.data.dataset import Source
from contnorm.bench.data.registry import load_source
from contnorm.bench.streams.device import DeviceStream, crop_and_flip
from contnorm.bench.streams.tasks import STREAMS, TaskSequence, build_stream, check_stream, find_stream
from contnorm.errors import UserError
from tests.datasets import small_cifar100, small_mnist


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return load_source("mnist", small_mnist(tmp_path_factory.mktemp("mnist")))


@pytest.fixture(scope="module")
def cifar100(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return load_source("cifar100", small_cifar100(tmp_path_factory.mktemp("cifar")))


def split(source: Source, seed: int = 0, **options: object) -> TaskSequence:
    settings = {"name": "split-cifar100", "scenario": "task", "part": "learn", **options}
    return build_stream(StreamConfig(**settings), source, seed)  # type: ignore[arg-type]


def test_permuted_tasks_have_different_pixel_orders(mnist: Source) -> None:
    stream = build_stream(StreamConfig("permuted-mnist", train_per_task=50, test_per_task=30), mnist, 0)
    assert stream.tasks == 5 and len(stream.train) == 250 and len(stream.test) == 150
    assert stream.permutations is not None
    for order in stream.permutations:
        assert sorted(order.tolist()) == list(range(784))
    assert len({tuple(order) for order in stream.permutations}) == 5
    data = DeviceStream(stream, torch.device("cpu"))
    item = torch.tensor([60])  # of task 1
    x = data.train_x(item).flatten()
    image = torch.from_numpy(mnist.train_images[stream.train.image[60]].astype(np.float32)).flatten() / 255
    torch.testing.assert_close(x, image[torch.from_numpy(stream.permutations[1])])


def test_seeds_change_order_and_subset_but_not_the_tasks(mnist: Source) -> None:
    config = StreamConfig("permuted-mnist", train_per_task=50)
    a, b, c = (build_stream(config, mnist, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(a.train.image, b.train.image)
    assert not np.array_equal(a.train.image, c.train.image)
    np.testing.assert_array_equal(a.permutations, c.permutations)  # type: ignore[arg-type]
    np.testing.assert_array_equal(a.test.image, c.test.image)
    seeded = build_stream(StreamConfig("permuted-mnist", train_per_task=50, class_order="seed"), mnist, 1)
    assert not np.array_equal(seeded.permutations, c.permutations)  # type: ignore[arg-type]


def test_split_cifar100_has_three_and_seventeen_tasks_of_five(cifar100: Source) -> None:
    learn, validate, everything = (split(cifar100, part=part) for part in ("learn", "validate", "all"))
    assert (learn.tasks, validate.tasks, everything.tasks) == (17, 3, 20)
    assert (learn.outputs, validate.outputs) == (85, 15)
    first = {int(c) for c in cifar100.train_labels[learn.train.image[learn.train.task == 0]]}
    assert first == {43, 24, 81, 80, 1}  # as the stream's published order has it
    classes = [set(cifar100.train_labels[s.train.image].tolist()) for s in (learn, validate)]
    assert len(classes[0]) == 85 and len(classes[1]) == 15 and not classes[0] & classes[1]


@pytest.mark.parametrize("scenario", ["task", "class", "domain"])
def test_labels_and_competing_outputs(cifar100: Source, scenario: str) -> None:
    stream = split(cifar100, scenario=scenario)
    assert stream.outputs == (5 if scenario == "domain" else 85)
    for task in range(stream.tasks):
        labels = set(stream.train.label[stream.train.task == task].tolist())
        assert labels == set(range(5)) if scenario == "domain" else labels == set(range(5 * task, 5 * task + 5))
        expected = set(range(5 * task, 5 * task + 5)) if scenario == "task" else set(range(stream.outputs))
        assert set(np.flatnonzero(stream.competing[task]).tolist()) == expected
    by_class = {}
    for items, truth in ((stream.train, cifar100.train_labels), (stream.test, cifar100.test_labels)):
        for image, label in zip(items.image, items.label, strict=True):
            assert by_class.setdefault(int(truth[image]), int(label)) == label, "a class has one label, in both splits"


def test_every_image_of_the_classes_occurs_once(cifar100: Source) -> None:
    stream = split(cifar100, part="all")
    assert sorted(stream.train.image.tolist()) == list(range(600))
    assert sorted(stream.test.image.tolist()) == list(range(200))
    other = split(cifar100, part="all", class_order="seed", seed=3)
    assert not np.array_equal(other.train.label, stream.train.label)


def test_crops_and_flips_follow_their_offsets() -> None:
    x = torch.arange(2 * 1 * 6 * 6).view(2, 1, 6, 6)
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4))
    views = torch.tensor([[0, 8, 0], [3, 5, 1]])
    y = crop_and_flip(x, views, padding=4)
    torch.testing.assert_close(y[0], padded[0, :, 0:6, 8:14])
    torch.testing.assert_close(y[1], padded[1, :, 3:9, 5:11].flip(-1))


def test_common_aliases_of_streams_are_known() -> None:
    assert find_stream("seq-cifar10").name == "split-cifar10" and find_stream("perm-mnist").name == "permuted-mnist"
    with pytest.raises(UserError, match=r"unknown stream 'split-cifar1000'\. Did you mean 'split-cifar100'"):
        find_stream("split-cifar1000")
    assert all(spec.defaults for spec in STREAMS.values())


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("split-cifar100", {"part": "learn", "tasks": 18}, r"stream\.tasks=18 must be 1 to 17"),
        ("split-cifar100", {"train_per_task": 31}, "task 0 has 30 train samples, and needs 31"),
        ("permuted-mnist", {"scenario": "task"}, "all tasks of a permuted stream have the same classes"),
        ("permuted-mnist", {"tasks": 1001}, "must be 1 to 1000"),
    ],
)
def test_settings_that_do_not_apply_are_refused(
    cifar100: Source, name: str, options: dict[str, Any], said: str
) -> None:
    def build(config: StreamConfig) -> None:
        check_stream(config)
        build_stream(config, cifar100, 0)

    with pytest.raises(UserError, match=said):
        build(StreamConfig(name, **options))


def test_memory_of_a_stream_is_that_of_its_items(mnist: Source) -> None:
    """Each task draws a few of all images; the rest of the draw must not stay in memory."""
    config = StreamConfig("permuted-mnist", tasks=1000, train_per_task=2, test_per_task=1)
    tracemalloc.start()
    try:
        stream = build_stream(config, mnist, 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert stream.permutations is not None
    assert peak < 1.4 * stream.permutations.nbytes, "the largest part are the orders of the pixels"


def test_first_tasks_do_not_depend_on_the_number_of_tasks(mnist: Source) -> None:
    few, many = (
        build_stream(StreamConfig("permuted-mnist", tasks=tasks, train_per_task=20, test_per_task=10), mnist, 3)
        for tasks in (3, 40)
    )
    assert few.permutations is not None and many.permutations is not None
    np.testing.assert_array_equal(few.permutations, many.permutations[:3])
    np.testing.assert_array_equal(few.train.image, many.train.image[:60])
    np.testing.assert_array_equal(few.test.image, many.test.image[:30])


def test_task_without_samples_is_refused(mnist: Source) -> None:
    present = ~np.isin(mnist.test_labels, [2, 3])
    source = replace(mnist, test_images=mnist.test_images[present], test_labels=mnist.test_labels[present])
    with pytest.raises(UserError, match="task 1 has 0 test samples"):
        build_stream(StreamConfig("split-mnist", scenario="task"), source, 0)
    assert build_stream(StreamConfig("split-mnist", scenario="task", tasks=1), source, 0).tasks == 1
