"""Functional forms: modes as in torch, and argument checks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from contnorm import functional as F
from contnorm.kernels.triton import launcher

MOMENT_FORMS: dict[str, Callable[..., torch.Tensor]] = {
    "batch_norm": F.batch_norm,
    "batch_renorm": F.batch_renorm,
    "continual_norm": partial(F.continual_norm, num_groups=2),
    "switch_norm": partial(F.switch_norm, weight=None, bias=None, mean_weight=torch.ones(3), var_weight=torch.ones(3)),
}
every_form = pytest.mark.parametrize("name", MOMENT_FORMS)


@pytest.fixture(params=["auto", "triton"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Torch operators, and our kernels if Triton's interpreter is available."""
    if request.param == "triton" and not (launcher.INTERPRETED and launcher.INSTALLED):
        pytest.skip("Triton's interpreter is for machines without a GPU")
    monkeypatch.setenv("CONTNORM_KERNEL", request.param)
    return str(request.param)


@every_form
def test_modes_are_those_of_torch(name: str) -> None:
    """Without moments, the batch is used in both modes; moments are updated in training only."""
    x, mean, var = torch.randn(6, 4, 3) + 3, torch.zeros(4), torch.ones(4)
    form = MOMENT_FORMS[name]
    torch.testing.assert_close(form(x, None, None, training=False), form(x, None, None, training=True), rtol=0, atol=0)
    form(x, mean, var, training=False)
    assert torch.equal(mean, torch.zeros(4)) and torch.equal(var, torch.ones(4))
    form(x, mean, var, training=True, momentum=0.5)
    assert not torch.equal(var, torch.ones(4))


@pytest.mark.parametrize("name", [*MOMENT_FORMS, "group_norm"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_wrong_arguments_raise(name: str, training: bool, kernel: str) -> None:
    """A kernel would write past the end of moments that are too short, and torch would broadcast parameters."""
    form, usual = partial(F.group_norm, num_groups=2), {}
    wrong: list[dict[str, Any]] = [{"weight": torch.ones(1)}, {"bias": torch.ones(6, 4)}]
    wrong += [{"eps": -1e-5}, {"eps": float("nan")}, {"eps": 2}]  # the last is a number of groups
    if name != "group_norm":
        form = MOMENT_FORMS[name]  # type: ignore[assignment]
        usual = {"running_mean": torch.zeros(4), "running_var": torch.ones(4), "training": training}
        wrong += [{"running_mean": torch.zeros(2), "running_var": torch.ones(2)}, {"running_var": torch.ones(4, 1)}]
        wrong += [{"running_var": None}, {"momentum": 1.5}, {"momentum": float("nan")}]
    for arguments in wrong:
        with pytest.raises(ValueError):  # noqa: PT011 - each names its own value
            form(torch.randn(6, 4, 3), **{**usual, **arguments})


@pytest.mark.parametrize("name", ["batch_renorm", "continual_norm", "the other order", "switch_norm"])
def test_momentum_zero_leaves_the_moments(name: str, kernel: str) -> None:
    """Zero times NaN would be NaN, which torch's batch norm has."""
    x, mean, var = torch.randn(6, 4, 3), torch.zeros(4), torch.ones(4)
    x[0] = float("nan")
    forms = MOMENT_FORMS | {"the other order": partial(MOMENT_FORMS["continual_norm"], order="bn_gn")}
    for nothing in (0.0, 0, np.float32(0)):
        forms[name](x, mean, var, training=True, momentum=nothing)
        assert torch.equal(mean, torch.zeros(4)) and torch.equal(var, torch.ones(4))


@every_form
def test_zero_eps_in_training_raises(name: str) -> None:
    with pytest.raises(ValueError, match="eps must be above 0"):
        MOMENT_FORMS[name](torch.randn(6, 4, 3), None, None, training=True, eps=0.0)


@every_form
@pytest.mark.parametrize("momentum", [0, 0.3, np.float32(0.3), 1, torch.tensor(0.3)])
def test_momentum_from_0_to_1_is_accepted(name: str, momentum: Any) -> None:
    x, mean, whole = torch.randn(6, 4, 3) + 5, torch.zeros(4), torch.zeros(4)
    MOMENT_FORMS[name](x, mean, torch.ones(4), training=True, momentum=momentum)
    MOMENT_FORMS[name](x, whole, torch.ones(4), training=True, momentum=1.0)
    torch.testing.assert_close(mean, float(momentum) * whole)
    MOMENT_FORMS[name](x, None, None, training=True, momentum=momentum)


def test_empty_environment_variable_means_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTNORM_KERNEL", "")
    assert MOMENT_FORMS["continual_norm"](torch.randn(6, 4, 3), None, None, training=True).shape == (6, 4, 3)


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        (F.continual_norm, {"order": "bn"}),
        (F.continual_norm, {"kernel": "fast"}),
        (F.continual_norm, {"num_groups": 3}),
        (F.continual_norm, {"residual": torch.zeros(1, 4, 3)}),  # would be broadcast
        (F.batch_renorm, {"r_max": 0.5}),
        (F.batch_renorm, {"d_max": -1}),
        (F.instance_aware_batch_norm, {"k": -1}),
        (F.adaptive_balance_norm, {"sample_weight": torch.ones(4)}),
        (F.task_balanced_batch_norm, {"stream_size": 3, "parts": 2}),
    ],
    ids=lambda value: value.__name__ if callable(value) else next(iter(value)),
)
def test_wrong_options_raise(function: Any, wrong: dict[str, Any]) -> None:
    options = {"num_groups": 2} if function is F.continual_norm else {}
    with pytest.raises(ValueError):  # noqa: PT011 - each names its own value
        function(torch.randn(6, 4, 3), torch.zeros(4), torch.ones(4), training=True, **{**options, **wrong})


def test_instance_and_layer_norm_are_group_norm() -> None:
    x = torch.randn(3, 6, 5)
    torch.testing.assert_close(F.group_norm(x, 6), F.instance_norm(x))
    torch.testing.assert_close(F.group_norm(x, 1), F.layer_norm(x))
    torch.testing.assert_close(F.group_norm(x, "auto"), F.group_norm(x, 3))
