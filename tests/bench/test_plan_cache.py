"""Runs that are shown the same share a plan; those that are not, do not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contnorm.bench.config.resolve import resolve
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.plan import Plan, PlanCache
from tests.datasets import small_cifar100

ER: dict[str, Any] = {
    "stream": {"name": "split-cifar100", "tasks": 3},
    "strategy": {"name": "er"},
    "norm": {"name": "bn"},
    "model": {"width": 8},
}
SAME = {
    "another norm": {"norm": {"name": "cn", "groups": 4}},
    "another learning rate": {"train": {"lr": 0.3}},
    "another precision": {"train": {"precision": "bf16"}},
    "another way to sum losses": {"strategy": {"name": "er", "loss": "sum"}},
    "another network": {"model": {"width": 16}},
}
OTHER = {
    "no replay": {"strategy": {"name": "single"}},
    "two draws": {"strategy": {"name": "derpp"}},
    "replay from all tasks": {"strategy": {"name": "er", "replay_from": "all"}},
    "another memory": {"memory": {"size": 13}},
    "smaller batches": {"train": {"batch": 5}},
    "less replay": {"train": {"replay": 5}},
    "fewer steps": {"train": {"max_steps": 7}},
    "two passes": {"train": {"passes": 2}},
    "fewer tasks": {"stream": {"name": "split-cifar100", "tasks": 2}},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_cifar100(tmp_path_factory.mktemp("data"), per_class=8)


def plans_of(root: Path, change: dict[str, Any], seed: int = 0) -> tuple[Any, Any, Any]:
    """The plan of ER with BN, that of a changed run from the same shelf, and the changed run's own."""
    plans = PlanCache(load_source("cifar100", root))
    first, second = (
        Trainer(resolve(values, root), number, plans.source, torch.device("cpu"), plans=plans)
        for values, number in ((ER, 0), (ER | change, seed))
    )
    alone = Trainer(resolve(ER | change, root), seed, plans.source, torch.device("cpu"))
    return first.plan, second.plan, alone.plan


def samples(plan: Plan) -> str:
    """All that a plan shows at its steps, and writes."""
    return str([[np.asarray(part).tolist() for part in (step.stream, step.write, *step.replay)] for step in plan.steps])


@pytest.mark.parametrize("change", SAME)
def test_plan_is_shared_by_runs_with_the_same_samples(root: Path, change: str) -> None:
    first, second, alone = plans_of(root, SAME[change])
    assert second is first
    assert samples(alone) == samples(second)


@pytest.mark.parametrize("change", OTHER)
def test_plan_is_not_shared_if_samples_differ(root: Path, change: str) -> None:
    first, second, alone = plans_of(root, OTHER[change])
    assert second is not first
    assert samples(alone) == samples(second) != samples(first)


def test_seeds_have_different_orders(root: Path) -> None:
    first, second, _ = plans_of(root, {}, seed=1)
    assert samples(first) != samples(second)
