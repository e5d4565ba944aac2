"""A validation part that is cut from the training samples of any stream (``stream.holdout``)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from contnorm import bench
from contnorm.bench.config.defaults import apply_defaults
from contnorm.bench.data.arrays import array_source
from contnorm.bench.data.dataset import MultiLabelSource, Source
from contnorm.bench.streams.tasks import build_stream
from contnorm.errors import UserError

RNG = np.random.default_rng(0)
LABELS = np.repeat(np.arange(10), 20)
IMAGES = RNG.integers(0, 256, (200, 1, 4, 4), dtype=np.uint8)
SOURCE = Source("digits", IMAGES, LABELS, IMAGES[:10], np.arange(10), 10, "f")


@pytest.mark.parametrize("scenario", ["task", "class", "domain", "free"])
def test_split_streams_hold_out_the_same_share_of_each_class(scenario: str) -> None:
    config = apply_defaults({"stream": {"name": "split-mnist", "scenario": scenario, "holdout": 0.25}}).stream
    sequence = build_stream(config, SOURCE, seed=3)
    train, test = sequence.train.image, sequence.test.image
    assert sequence.held_out and set(train) | set(test) == set(range(200)) and not set(train) & set(test)
    assert np.bincount(LABELS[test]).tolist() == [5] * 10
    whole = build_stream(replace(config, holdout=None), SOURCE, seed=3)
    for items in (sequence.train, sequence.test):  # labels and tasks are those of the stream without a holdout
        label = dict(zip(whole.train.image.tolist(), whole.train.label.tolist(), strict=True))
        task = dict(zip(whole.train.image.tolist(), whole.train.task.tolist(), strict=True))
        assert items.label.tolist() == [label[i] for i in items.image.tolist()]
        assert items.task.tolist() == [task[i] for i in items.image.tolist()]


def test_held_out_samples_do_not_depend_on_the_seed() -> None:
    config = apply_defaults({"stream": {"name": "permuted-mnist", "train_per_task": 30, "holdout": 0.1}}).stream
    first, second = (build_stream(config, SOURCE, seed) for seed in (0, 1))
    assert set(first.test.image) == set(second.test.image) and len(set(first.test.image)) == 20
    assert not set(first.train.image) & set(first.test.image)


def test_tasks_of_samples_are_each_held_out() -> None:
    x, ids = np.arange(80, dtype=np.float32)[:, None], np.arange(80) % 2
    source = array_source(
        x, np.arange(80) // 2 % 2, x, np.arange(80) // 2 % 2, tasks=None, task_ids=(ids, ids), name="a"
    )
    config = apply_defaults({"stream": {"name": "arrays", "scenario": "domain", "holdout": 0.2}}).stream
    sequence = build_stream(config, source, 0)
    assert np.bincount(sequence.test.task * 2 + sequence.test.label).tolist() == [4, 4, 4, 4]


def test_multi_label_streams_hold_out_a_share_of_each_task() -> None:
    task = np.repeat([0, 1], [30, 20])
    labels = RNG.integers(0, 2, (50, 3)).astype(np.uint8)
    images = np.zeros((50, 3, 8, 8), dtype=np.uint8)
    groups = ("majority",) * 3
    source = MultiLabelSource("m", images, labels, images, labels, 3, "f", task, task, 2, ("a", "b", "c"), groups)
    config = apply_defaults({"stream": {"name": "multi-label", "holdout": 0.1}}).stream
    sequence = build_stream(config, source, 0)
    assert np.bincount(sequence.test.task).tolist() == [3, 2] and len(sequence.train) == 45


def test_inputs_of_held_out_samples_are_training_images() -> None:
    x, y = np.arange(40, dtype=np.float32)[:, None], np.arange(40) % 4
    stream = bench.Stream.from_arrays(x, y, -x, y, tasks=2, holdout=0.2)
    values = torch.cat([task.test[i][0] for task in stream.tasks for i in range(len(task.test))])
    assert (values >= 0).all() and len(values) == 8  # -x are the test samples of the data set
    assert [task.classes for task in stream.tasks] == [(0, 1), (2, 3)]
    result = bench.run(stream, norm="bn", seeds=1, runs=None, lanes=1, settings={"train.max_steps": 4})
    assert 0 <= result.acc.mean() <= 100


def test_a_share_that_leaves_a_part_empty_is_rejected() -> None:
    config = apply_defaults({"stream": {"name": "split-mnist", "holdout": 0.01}}).stream
    with pytest.raises(UserError, match=r"stream\.holdout=0\.01: class 0 of digits has 20 .* 0 would be held out"):
        build_stream(config, SOURCE, 0)
    for share in (0, 1, -0.1, True):
        with pytest.raises(UserError, match=r"stream\.holdout="):
            apply_defaults({"stream": {"name": "split-mnist", "holdout": share}})
