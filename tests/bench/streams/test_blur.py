"""Blurred boundaries between tasks (``stream.blur``)."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contnorm.bench.config.defaults import complete
from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.arrays import array_source
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.plan import make_plan
from contnorm.bench.streams.tasks import build_stream
from contnorm.errors import UserError
from tests.bench.engine.stopped_runs import finish, kill, same_state

IDS = np.repeat([0, 1, 2], [40, 100, 60])  # task of each sample
X, TEST_X = np.arange(200, dtype=np.float32)[:, None], np.arange(200, 206, dtype=np.float32)[:, None]
SOURCE = array_source(
    X, np.arange(200) % 2, TEST_X, np.arange(6) % 2, tasks=None, task_ids=(IDS, np.arange(6) // 2), name="a"
)
FREE = {"name": "split-mnist", "source": "digits", "tasks": 3, "train_per_task": 30, "scenario": "free"}


def own(**groups: Any) -> RunConfig:
    stream, memory = {"name": "arrays", "scenario": "free", "blur": 0.5}, {"kind": "reservoir", "size": 30}
    return complete({"stream": stream, "memory": memory, **groups}, "own")


def test_blurred_tasks_are_the_sharp_ones_mixed_in_windows() -> None:
    share = np.zeros(200)
    for seed in range(200):
        blurred, sharp = (build_stream(replace(own().stream, blur=blur), SOURCE, seed) for blur in (0.5, 0.0))
        for task in range(3):  # the same samples, in the same order
            for name in ("image", "label"):
                parts = [getattr(s.train, name)[s.train.task == task] for s in (blurred, sharp)]
                np.testing.assert_array_equal(*parts)
        share += blurred.train.task
    share /= 200
    # Windows of half the smaller task around 40 and 140: positions 30 to 49, and 125 to 154.
    expected = IDS.astype(float)
    expected[30:50] = (np.arange(20) + 0.5) / 20
    expected[125:155] = 1 + (np.arange(30) + 0.5) / 30
    outside = np.r_[:30, 50:125, 155:200]
    np.testing.assert_array_equal(share[outside], expected[outside])
    assert np.abs(share - expected).max() < 0.15  # 4 standard errors of the mean of 200 draws of 0 or 1


@pytest.mark.parametrize(("partial", "samples"), [("keep", 200), ("drop", 196)])
def test_plan_of_a_blurred_stream_is_that_of_a_plain_count(partial: str, samples: int) -> None:
    config = own(train={"batch": 7, "partial": partial}, strategy={"name": "er", "replay_from": "all"})
    stream = build_stream(config.stream, SOURCE, 3)
    plan, tasks = make_plan(config, stream, 3, draws=1), stream.train.task.tolist()
    counts = [Counter(tasks[i : min(i + 7, samples)]) for i in range(0, samples, 7)]
    assert [Counter(tasks[i] for i in step.stream) for step in plan.steps] == counts
    assert [step.task for step in plan.steps] == [max(of) for of in counts]
    assert plan.ends == tuple(max(n for n, of in enumerate(counts, 1) if task in of) for task in range(3))
    assert sum(len(of) == 2 for of in counts) > 2  # sharp boundaries have one each
    cut = [make_plan(own(train={"batch": 1, "max_steps": n}), stream, 3, draws=0).ends for n in range(31, 50)]
    assert all(list(ends) == sorted(ends) and ends[-1] == n for n, ends in enumerate(cut, 31))


def test_blurred_run_resumes_to_the_bit(tmp_path: Path) -> None:
    values = {"stream": {**FREE, "blur": 0.8}, "strategy": {"name": "derpp"}, "model": {"width": 12}}
    config, source = (
        resolve({**values, "train": {"batch": 6, "replay": 4}}, Path("data")),
        load_source("digits", Path()),
    )
    make, rng = lambda: [Trainer(config, 0, source, torch.device("cpu"))], random.Random(0)
    whole, resumed = make(), make()
    expected = finish(whole)
    for _ in range(3):
        kill(make, [tmp_path], rng)
    assert finish(resumed, [tmp_path]) == expected and same_state(whole[0], resumed[0])


def test_blur_changes_the_hash_and_needs_a_free_stream_in_one_pass() -> None:
    hashes = [resolve({"stream": {**FREE, **blur}}, Path()).hash for blur in ({}, {"blur": 0.0}, {"blur": 0.2})]
    assert hashes[0] == hashes[1] != hashes[2]
    with pytest.raises(UserError, match=r"stream.blur=0.2: needs stream.scenario=free"):
        resolve({"stream": {**FREE, "scenario": "class", "blur": 0.2}}, Path())
    with pytest.raises(UserError, match=r"train.passes=2.*stream.blur=0.2"):
        resolve({"stream": {**FREE, "blur": 0.2}, "train": {"passes": 2}}, Path())
