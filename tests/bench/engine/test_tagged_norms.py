"""AdaB2N and TBBN in runs: tags with the split of a batch, settings, resumed runs, several trainers at once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine.trainer import Trainer
from contnorm.norms import balanced
from contnorm.norms.balanced import AdaptiveBalanceNormBase, TaskBalancedNormBase
from tests.bench.engine.stopped_runs import finish

CPU = torch.device("cpu")
NORMS = ("adab2n", "tbbn")


def settings(
    norm: str,
    strategy: str = "er",
    scenario: str = "class",
    forward: str = "joint",
    options: dict[str, Any] | None = None,
    memory: str = "ring",
) -> RunConfig:
    """Three tasks of 28 samples in batches of 8 + 4, the last one of a task of 4 + 4."""
    values: dict[str, Any] = {
        "stream": {"name": "split-mnist", "tasks": 3, "train_per_task": 28, "source": "digits", "scenario": scenario},
        "model": {"name": "mlp", "width": 12},
        "norm": {"name": norm, **(options or {})},
        "strategy": {"name": strategy, "forward": forward, "replay_from": "past" if scenario != "free" else "all"},
        "train": {"batch": 8, "replay": 4},
        "memory": {"kind": memory, "size": 20},
    }
    return resolve(values, Path("data"))


def trainer_of(config: RunConfig, seed: int = 0) -> Trainer:
    return Trainer(config, seed, load_source("digits", Path("data")), CPU)


def train(*trainers: Trainer) -> None:
    finish(list(trainers))


@pytest.mark.parametrize("scenario", ["class", "task"])
@pytest.mark.parametrize("strategy", ["er", "derpp", "er-ace", "single"])
@pytest.mark.parametrize("norm", NORMS)
def test_runs_with_every_strategy(norm: str, strategy: str, scenario: str) -> None:
    trainer = trainer_of(settings(norm, strategy, scenario))
    train(trainer)
    assert trainer.done == len(trainer.plan.steps)
    assert trainer.nonfinite_tensor() is None


def test_balance_is_learned_for_the_tasks_of_the_stream() -> None:
    trainer = trainer_of(settings("adab2n"))
    train(trainer)
    layers = [module for module in trainer.model.modules() if isinstance(module, AdaptiveBalanceNormBase)]
    assert layers
    for layer in layers:
        assert layer.phi[:3].all() and not layer.phi[3:].any()
        assert layer.started.tolist() == [1] * 3 + [0] * 97


def test_parts_follow_the_batches_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(settings("tbbn"))
    seen: list[tuple[int, int, int]] = []
    step = balanced._balanced_step

    def recorded(x: torch.Tensor, *arguments: Any) -> Any:
        *_, stream, parts = arguments
        seen.append((len(x), stream, parts))
        return step(x, *arguments)

    monkeypatch.setattr(balanced, "_balanced_step", recorded)
    train(trainer)
    layers = sum(isinstance(module, TaskBalancedNormBase) for module in trainer.model.modules())
    # Batches of 8 + 4: 2 and 4 parts. The last ones of 4 + 4: 1 part, which is batch norm, and 2 parts.
    expected = [(12, 8, 2)] * 3 + [(12, 8, 4)] * 3 + [(8, 4, 2)]
    assert seen == [each for each in expected for _ in range(layers)]


def _train_until(trainer: Trainer, stop: int) -> None:
    task = 0
    while trainer.done < stop:
        trainer.start_task(task)
        while trainer.done < min(stop, trainer.plan.ends[task]):
            trainer.step()
        if trainer.done == trainer.plan.ends[task]:
            trainer.end_task(task)
            task += 1


class _NoHostCopies(TorchDispatchMode):
    """Raises for what a captured step can't do: values on the host, and shapes that depend on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        masks = [i for i in args[1] if i is not None] if name.startswith("aten::index.Tensor") else []
        if name in FORBIDDEN or any(mask.dtype == torch.bool for mask in masks):
            raise AssertionError(f"a step calls {name}")
        return func(*args, **(kwargs or {}))


FORBIDDEN = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2")


@pytest.mark.parametrize("norm", NORMS)
def test_step_needs_no_value_on_the_host(norm: str) -> None:
    trainer = trainer_of(settings(norm, options={"kappa": 0.4, "ada_t0": 1} if norm == "adab2n" else None))
    _train_until(trainer, trainer.plan.ends[1] + 1)  # one step of the third task, before a capture would begin
    with _NoHostCopies():
        trainer.step()
    with pytest.raises(AssertionError, match="_local_scalar_dense"), _NoHostCopies():
        torch.ones(()).item()
