"""StepTable say of each step what the plan says, slot by slot."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from contnorm.bench.config.schema import from_dict
from contnorm.bench.data.dataset import Source
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine.trainer import build_step_table, stretch_end, table_of
from contnorm.bench.memories import NOT_STORED
from contnorm.bench.plan import Step, make_plan
from contnorm.bench.streams.tasks import build_stream
from tests.datasets import small_cifar100

SPARE = 999


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return load_source("cifar100", small_cifar100(tmp_path_factory.mktemp("data"), per_class=8))


def written(step: Step) -> list[int]:
    """The slot of each sample of the stream: of two in one slot only the later is written."""
    later = [set(step.write[i + 1 :].tolist()) for i in range(len(step.write))]
    return [SPARE if s == NOT_STORED or s in after else s for s, after in zip(step.write.tolist(), later, strict=True)]


def joined(*parts: NDArray[np.int64]) -> list[int]:
    return [number for part in parts for number in part.ravel().tolist()]


@pytest.mark.parametrize(
    ("memory", "draws", "augment"),
    [
        ({"kind": "ring", "size": 3}, 1, True),  # batches of 5: two of each are overwritten at once
        ({"kind": "reservoir", "size": 6}, 2, False),
        ({"kind": "reservoir", "size": 6}, 0, True),
    ],
)
def test_every_value_of_every_row(source: Source, memory: dict[str, Any], draws: int, augment: bool) -> None:
    stream = {"name": "split-cifar100", "scenario": "class", "part": "all", "tasks": 3, "augment": augment}
    groups = {"stream": stream, "memory": memory, "strategy": {"name": "er", "replay_from": "all"}}
    config = from_dict(groups | {"train": {"batch": 5, "replay": 4}})
    shown = build_stream(config.stream, source, 1)
    plan, items, start = make_plan(config, shown, 1, draws), shown.train, 0
    seen = overwritten = 0
    while start < len(plan.steps):
        steps = plan.steps[start : stretch_end(plan.steps, start)]
        all_samples = table_of(steps, lambda step: (step.stream, *step.replay))
        places = list(items.image[all_samples])
        rows = build_step_table(steps, all_samples, places, items, SPARE, torch.device("cpu"))
        for number, step in enumerate(steps):
            row, samples = rows.at(number), joined(step.stream, *step.replay)
            assert row.sizes == step.sizes and row.image.tolist() == items.image[samples].tolist()
            assert row.label.tolist() == items.label[samples].tolist()
            assert row.task.tolist() == items.task[samples].tolist()
            assert row.slots.tolist() == [*written(step), *joined(*step.replay_slots)]
            if augment:
                assert step.stream_views is not None and step.replay_views is not None and row.views is not None
                assert row.views.ravel().tolist() == joined(step.stream_views, *step.replay_views)
            else:
                assert row.views is None
            overwritten += len(set(step.write.tolist()) - {NOT_STORED}) < (step.write != NOT_STORED).sum()
        seen, start = seen + len(steps), start + len(steps)
    assert seen == len(plan.steps) and (overwritten > 0 or memory["kind"] != "ring")


def test_row_by_index_tensor(source: Source) -> None:
    config = from_dict({"stream": {"name": "split-cifar100", "scenario": "class", "part": "all"}})
    shown = build_stream(config.stream, source, 0)
    steps = make_plan(config, shown, 0, draws=0).steps[:3]
    images = [step.stream for step in steps]
    rows = build_step_table(steps, np.array(images), images, shown.train, SPARE, torch.device("cpu"))
    assert torch.equal(rows.at(2).label, rows.at(torch.tensor([2])).label)
