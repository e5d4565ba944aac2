"""The stateless forms by themselves: torch's rule for modes, and what they refuse."""

from collections.abc import Callable

import pytest
import torch

from contnorm import functional as F

MIXTURE = (torch.ones(3), torch.ones(3))
MOMENT_FORMS: dict[str, Callable[..., torch.Tensor]] = {
    "batch_norm": F.batch_norm,
    "batch_renorm": F.batch_renorm,
    "continual_norm": lambda x, m, v, **k: F.continual_norm(x, m, v, num_groups=2, **k),
    "switch_norm": lambda x, m, v, **k: F.switch_norm(x, m, v, None, None, *MIXTURE, **k),
}
every_form = pytest.mark.parametrize("name", MOMENT_FORMS)


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
