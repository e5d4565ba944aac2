"""Remembered draws of initial weights: the same bits as drawn ones, and the same state of the generator."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from contnorm.bench.config.schema import ModelConfig, NormConfig
from contnorm.bench.models import weight_draws
from contnorm.bench.models.build import build_model
from contnorm.bench.models.weight_draws import WeightDraws


def _built(
    norm: str, seed: int, draws: WeightDraws | None, width: int = 32
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the weights of a new network, and numbers drawn after it."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        with nullcontext() if draws is None else draws:
            network = build_model(ModelConfig("resnet18", width, "pool"), NormConfig(norm, 16), (3, 32, 32), 10, 100)
        return network.state_dict(), torch.rand(3)


def test_remembered_weights_are_those_that_would_be_drawn() -> None:
    draws = WeightDraws()
    for norm, seed in (("cn", 0), ("bn", 0), ("cn", 1), ("none", 0), ("gn", 1), ("cn", 0)):
        expected, actual = _built(norm, seed, None), _built(norm, seed, draws)
        assert expected[0].keys() == actual[0].keys() and torch.equal(expected[1], actual[1])
        assert all(torch.equal(tensor, actual[0][name]) for name, tensor in expected[0].items())
    assert 0 < len(draws) == 2 * len({name for name in expected[0] if expected[0][name].numel() >= weight_draws.SMALL})


def test_remembered_weights_are_copies() -> None:
    draws = WeightDraws()
    first = _built("bn", 0, draws)[0]
    for tensor in first.values():
        tensor.zero_()
    assert all(
        torch.equal(tensor, other)
        for tensor, other in zip(*(_built("bn", 0, d)[0].values() for d in (draws, None)), strict=True)
    )


def test_weights_beyond_the_limit_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_draws, "LIMIT", 2 * 4 * 128 * 128)
    draws = WeightDraws()
    with draws, torch.random.fork_rng([]):
        for seed in (0, 1, 2, 0):
            torch.manual_seed(seed)
            nn.Linear(128, 128)
    assert len(draws) == 2


def test_other_generators_and_bounds_are_kept_apart() -> None:
    draws, own = WeightDraws(), torch.Generator()
    with draws, torch.random.fork_rng([]):
        values = []
        for bound in (1.0, 2.0, 1.0):
            torch.manual_seed(0)
            values.append(torch.empty(200, 200).uniform_(0.0, bound))
        drawn = [torch.empty(200, 200).uniform_(generator=own.manual_seed(0)) for _ in range(2)]
    assert len(draws) == 2 and torch.equal(values[0], values[2]) and torch.equal(2 * values[0], values[1])
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], values[0])


class _CountingDraws(WeightDraws):
    """Counts the draws of each thread."""

    def __init__(self, seeds: range) -> None:
        super().__init__(seeds)
        self.of_main_thread = self.of_others = 0

    def _remember(self, *result: Any) -> None:
        super()._remember(*result)
        is_main = threading.current_thread() is threading.main_thread()
        self.of_main_thread, self.of_others = self.of_main_thread + is_main, self.of_others + (not is_main)


@pytest.mark.parametrize("guess_is_right", [True, False])
def test_weights_that_are_drawn_ahead_are_those_that_would_be_drawn(guess_is_right: bool) -> None:
    draws = _CountingDraws(range(3))
    for seed, width in enumerate((32, *((32, 32) if guess_is_right else (48, 48)))):
        expected, actual = (_built("cn", seed, each, width) for each in (None, draws))
        assert torch.equal(expected[1], actual[1])  # the generator goes on as it would
        assert all(torch.equal(tensor, actual[0][name]) for name, tensor in expected[0].items())
    large = sum(tensor.numel() >= weight_draws.SMALL for tensor in expected[0].values())
    assert draws.of_others > 0
    assert draws.of_main_thread == (draws.of_others // 2 if guess_is_right else draws.of_others // 2 + 2 * large)


def test_error_of_a_draw_ahead_leaves_it_to_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(WeightDraws, "_draw_all", broken)
    draws = WeightDraws(range(2))
    for seed in range(2):
        expected, actual = (_built("cn", seed, each)[0] for each in (None, draws))
        assert all(torch.equal(tensor, actual[name]) for name, tensor in expected.items())
