"""Averages of state dicts: weights, pooled variances and integer counters."""

import pytest
import torch
from torch import nn

import contnorm as cn


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def clients() -> list[nn.Sequential]:
    models = [network() for _ in range(3)]
    with torch.no_grad():
        for number, model in enumerate(models):
            model[1].running_mean.normal_()  # type: ignore[operator, union-attr]
            model[1].running_var.uniform_(0.5, 2)  # type: ignore[operator, union-attr]
            model[1].num_batches_tracked.fill_(10 + number)  # type: ignore[operator, union-attr]
    return models


def test_pooled_moments_are_those_of_all_data() -> None:
    """The clients' biased moments of parts of unequal size, pooled, against the moments of the whole."""
    x = torch.randn(60, 4, dtype=torch.float64) * 2 + torch.arange(60.0).view(-1, 1)
    parts = x.split([10, 30, 20])
    states = [{"norm.running_mean": p.mean(0), "norm.running_var": p.var(0, unbiased=False)} for p in parts]
    state = cn.average_state_dicts(states, [10, 30, 20])
    torch.testing.assert_close(state["norm.running_mean"], x.mean(0))
    torch.testing.assert_close(state["norm.running_var"], x.var(0, unbiased=False))
    average = cn.average_state_dicts(states, [10, 30, 20], moments="average")["norm.running_var"]
    torch.testing.assert_close(
        average,
        (10 * states[0]["norm.running_var"] + 30 * states[1]["norm.running_var"] + 20 * states[2]["norm.running_var"])
        / 60,
    )
    assert (average < 0.5 * state["norm.running_var"]).all()


def test_weights_are_averaged_and_counters_stay_integers() -> None:
    models = clients()
    state = cn.average_state_dicts([m.state_dict() for m in models], [1, 2, 1])
    expected = (models[0][0].weight + 2 * models[1][0].weight + models[2][0].weight) / 4  # type: ignore[operator]
    torch.testing.assert_close(state["0.weight"], expected.detach())  # type: ignore[union-attr]
    assert state["1.num_batches_tracked"].dtype == torch.int64 and state["1.num_batches_tracked"] == 12
    loaded = network()
    assert str(loaded.load_state_dict(state)) == "<All keys matched successfully>"
    assert not state["0.weight"].requires_grad and state["0.weight"].dtype == torch.float32


@pytest.mark.parametrize("weights", [None, [5, 5, 5]])
def test_equal_models_average_to_themselves(weights: list[float] | None) -> None:
    model = clients()[0].half()
    state = cn.average_state_dicts([model.state_dict()] * 3, weights)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert state["1.running_var"].dtype == torch.float16


@pytest.mark.parametrize("weights", [[1], [1, -1], [0, 0], [1, float("nan")]])
def test_wrong_arguments_raise(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="'pooled' must be"):
        cn.average_state_dicts([{"x": torch.ones(2)}] * 2, moments="pooled")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weights"):
        cn.average_state_dicts([{"x": torch.ones(2)}] * 2, weights)
