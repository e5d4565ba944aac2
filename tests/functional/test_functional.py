"""The stateless forms by themselves: torch's rule for modes, and what they refuse."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from contnorm import functional as F
from contnorm.kernels import triton_here

MIXTURE = (torch.ones(3), torch.ones(3))
MOMENT_FORMS: dict[str, Callable[..., torch.Tensor]] = {
    "batch_norm": F.batch_norm,
    "batch_renorm": F.batch_renorm,
    "continual_norm": lambda x, m, v, **k: F.continual_norm(x, m, v, num_groups=2, **k),
    "switch_norm": lambda x, m, v, **k: F.switch_norm(x, m, v, None, None, *MIXTURE, **k),
}
every_form = pytest.mark.parametrize("name", MOMENT_FORMS)


@pytest.fixture(params=["auto", "triton"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """In torch's operators, and in our kernels where Triton's interpreter is there to run them."""
    if request.param == "triton" and not (triton_here.INTERPRETED and triton_here.INSTALLED):
        pytest.skip("Triton's interpreter is for machines without a GPU")
    monkeypatch.setenv("CONTNORM_KERNEL", request.param)
    return str(request.param)


@every_form
def test_without_moments_the_batch_is_used_in_both_modes(name: str) -> None:
    x = torch.randn(6, 4, 3)
    form = MOMENT_FORMS[name]
    torch.testing.assert_close(form(x, None, None, training=False), form(x, None, None, training=True), rtol=0, atol=0)


@every_form
def test_moments_move_in_training_only(name: str) -> None:
    x, mean, var = torch.randn(6, 4, 3) + 3, torch.zeros(4), torch.ones(4)
    MOMENT_FORMS[name](x, mean, var, training=False)
    assert torch.equal(mean, torch.zeros(4)) and torch.equal(var, torch.ones(4))
    MOMENT_FORMS[name](x, mean, var, training=True, momentum=0.0)
    assert torch.equal(mean, torch.zeros(4)) and torch.equal(var, torch.ones(4))
    MOMENT_FORMS[name](x, mean, var, training=True, momentum=0.5)
    assert not torch.equal(var, torch.ones(4))


@every_form
def test_one_moment_without_the_other_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: running_var is None and its partner is not. Give both, or neither"):
        MOMENT_FORMS[name](torch.randn(6, 4, 3), torch.zeros(4), None)


@every_form
@pytest.mark.parametrize(("mean", "var"), [((4,), (2,)), ((4, 2), (4, 2)), ((4,), (4, 1))], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_moments_of_another_shape_are_named(
    name: str, mean: tuple[int, ...], var: tuple[int, ...], training: bool, kernel: str
) -> None:
    """A kernel would write past their end."""
    with pytest.raises(ValueError, match=rf"{name}: running_mean has shape \({str(mean)[1:-1]}\) and running_var"):
        MOMENT_FORMS[name](torch.randn(6, 4, 3), torch.zeros(mean), torch.ones(var), training=training)


@pytest.mark.parametrize("name", ["batch_renorm", "continual_norm", "the other order", "switch_norm"])
@pytest.mark.parametrize("nothing", [0.0, 0, np.float32(0)], ids=["float", "int", "numpy"])
def test_a_batch_that_weighs_nothing_leaves_the_moments_whatever_it_holds(
    name: str, nothing: float, kernel: str
) -> None:
    """Zero times what is not a number is not a number; batch norm alone has that from torch."""
    x, mean, var = torch.randn(6, 4, 3), torch.zeros(4), torch.ones(4)
    x[0] = float("nan")
    forms = MOMENT_FORMS | {"the other order": partial(MOMENT_FORMS["continual_norm"], order="bn_gn")}
    forms[name](x, mean, var, training=True, momentum=nothing)
    assert torch.equal(mean, torch.zeros(4)) and torch.equal(var, torch.ones(4))


@every_form
def test_numbers_may_be_numpys(name: str, kernel: str) -> None:
    """As they come out of a grid of settings."""
    x = torch.randn(6, 4, 3)
    found = []
    for number in (np.float32, float):
        mean, var = torch.zeros(4), torch.ones(4)
        eps, momentum = (number(np.float32(value)) for value in (1e-3, 0.3))
        found.append((MOMENT_FORMS[name](x, mean, var, training=True, eps=eps, momentum=momentum), mean, var))
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)


def test_a_mixture_of_other_than_three_is_named(kernel: str) -> None:
    x, three = torch.randn(6, 4, 3), torch.ones(3)
    for name, logits in (("mean_weight", (torch.ones(2), three)), ("var_weight", (three, torch.ones(3, 1)))):
        with pytest.raises(ValueError, match=f"switch_norm: {name} has shape .* three logits: instance, layer, batch"):
            F.switch_norm(x, None, None, None, None, *logits)


@every_form
def test_no_eps_in_training_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: eps must be above 0 when training, got 0\.0"):
        MOMENT_FORMS[name](torch.randn(6, 4, 3), None, None, training=True, eps=0.0)


def test_group_forms_are_one_family() -> None:
    x = torch.randn(3, 6, 5)
    torch.testing.assert_close(F.group_norm(x, 6), F.instance_norm(x))
    torch.testing.assert_close(F.group_norm(x, 1), F.layer_norm(x))
    torch.testing.assert_close(F.group_norm(x, "auto"), F.group_norm(x, 6))
    assert F.group_norm(torch.randn(4, 2, 3, 3, 3), 2).shape == (4, 2, 3, 3, 3)
    with pytest.raises(ValueError, match=r"group_norm: num_groups=4 does not divide the 6 channels"):
        F.group_norm(x, 4)
