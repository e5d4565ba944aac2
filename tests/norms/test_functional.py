"""Functional forms: modes as in torch, and argument checks."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from contnorm import functional as F
from contnorm.kernels.triton import availability

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
    """Torch operators, and our kernels if Triton's interpreter is available."""
    if request.param == "triton" and not (availability.INTERPRETED and availability.INSTALLED):
        pytest.skip("Triton's interpreter is for machines without a GPU")
    monkeypatch.setenv("CONTNORM_KERNEL", request.param)
    return str(request.param)


@every_form
def test_without_moments_the_batch_is_used_in_both_modes(name: str) -> None:
    x = torch.randn(6, 4, 3)
    form = MOMENT_FORMS[name]
    torch.testing.assert_close(form(x, None, None, training=False), form(x, None, None, training=True), rtol=0, atol=0)


@every_form
def test_moments_are_updated_in_training_only(name: str) -> None:
    x, mean, var = torch.randn(6, 4, 3) + 3, torch.zeros(4), torch.ones(4)
    MOMENT_FORMS[name](x, mean, var, training=False)
    assert torch.equal(mean, torch.zeros(4)) and torch.equal(var, torch.ones(4))
    MOMENT_FORMS[name](x, mean, var, training=True, momentum=0.0)
    assert torch.equal(mean, torch.zeros(4)) and torch.equal(var, torch.ones(4))
    MOMENT_FORMS[name](x, mean, var, training=True, momentum=0.5)
    assert not torch.equal(var, torch.ones(4))


@every_form
def test_single_moment_raises(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"{name}: running_var is None and the other one is not. Give both, or neither"
    ):
        MOMENT_FORMS[name](torch.randn(6, 4, 3), torch.zeros(4), None)


@every_form
@pytest.mark.parametrize(("mean", "var"), [((4,), (2,)), ((4, 2), (4, 2)), ((4,), (4, 1))], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_moments_of_wrong_shape_raise(
    name: str, mean: tuple[int, ...], var: tuple[int, ...], training: bool, kernel: str
) -> None:
    """A kernel would write past their end."""
    with pytest.raises(ValueError, match=rf"{name}: running_mean has shape \({str(mean)[1:-1]}\) and running_var"):
        MOMENT_FORMS[name](torch.randn(6, 4, 3), torch.zeros(mean), torch.ones(var), training=training)


@pytest.mark.parametrize("name", ["batch_renorm", "continual_norm", "the other order", "switch_norm"])
@pytest.mark.parametrize("nothing", [0.0, 0, np.float32(0)], ids=["float", "int", "numpy"])
def test_momentum_zero_leaves_the_moments(name: str, nothing: float, kernel: str) -> None:
    """Zero times NaN would be NaN, which torch's batch norm has."""
    x, mean, var = torch.randn(6, 4, 3), torch.zeros(4), torch.ones(4)
    x[0] = float("nan")
    forms = MOMENT_FORMS | {"the other order": partial(MOMENT_FORMS["continual_norm"], order="bn_gn")}
    forms[name](x, mean, var, training=True, momentum=nothing)
    assert torch.equal(mean, torch.zeros(4)) and torch.equal(var, torch.ones(4))


@every_form
def test_numpy_numbers_are_accepted(name: str, kernel: str) -> None:
    """For example from a grid of settings."""
    x = torch.randn(6, 4, 3)
    result = []
    for number in (np.float32, float):
        mean, var = torch.zeros(4), torch.ones(4)
        eps, momentum = (number(np.float32(value)) for value in (1e-3, 0.3))
        result.append((MOMENT_FORMS[name](x, mean, var, training=True, eps=eps, momentum=momentum), mean, var))
    for ours, expected in zip(*result, strict=True):
        assert torch.equal(ours, expected)


def test_mixture_weights_of_wrong_size_raise(kernel: str) -> None:
    x, three = torch.randn(6, 4, 3), torch.ones(3)
    for name, logits in (("mean_weight", (torch.ones(2), three)), ("var_weight", (three, torch.ones(3, 1)))):
        with pytest.raises(ValueError, match=f"switch_norm: {name} has shape .* three logits: instance, layer, batch"):
            F.switch_norm(x, None, None, None, None, *logits)


@every_form
def test_zero_eps_in_training_raises(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: eps must be above 0 when training, got 0\.0"):
        MOMENT_FORMS[name](torch.randn(6, 4, 3), None, None, training=True, eps=0.0)


@every_form
@pytest.mark.parametrize("momentum", [-1.0, 1.5, float("nan"), float("inf"), True, None, "0.1", 2, torch.tensor([0.1])])
def test_momentum_outside_0_to_1_raises(name: str, momentum: Any) -> None:
    mean, var = torch.zeros(4), torch.ones(4)
    for training in (True, False):
        with pytest.raises(ValueError, match=f"{name}: momentum"):
            MOMENT_FORMS[name](torch.randn(6, 4, 3), mean, var, training=training, momentum=momentum)
    assert torch.equal(mean, torch.zeros(4)) and torch.equal(var, torch.ones(4))


@every_form
@pytest.mark.parametrize("momentum", [0.0, 0, 0.3, 1.0, 1, torch.tensor(0.3)])
def test_momentum_from_0_to_1_is_accepted(name: str, momentum: Any) -> None:
    x, mean, whole = torch.randn(6, 4, 3) + 5, torch.zeros(4), torch.zeros(4)
    MOMENT_FORMS[name](x, mean, torch.ones(4), training=True, momentum=momentum)
    MOMENT_FORMS[name](x, whole, torch.ones(4), training=True, momentum=1.0)
    torch.testing.assert_close(mean, float(momentum) * whole)
    MOMENT_FORMS[name](x, None, None, training=True, momentum=momentum)


@pytest.mark.parametrize("name", [*MOMENT_FORMS, "group_norm", "layer_norm", "instance_norm"])
@pytest.mark.parametrize("eps", [-1e-5, float("nan"), float("inf"), True, None, "1e-5"])
def test_wrong_eps_raises(name: str, eps: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}: eps"):
        getattr(F, name)(torch.randn(6, 4, 3), eps=eps, **required(name))


def required(name: str) -> dict[str, Any]:
    """The arguments without defaults, and groups that divide four channels."""
    options: dict[str, Any] = {"num_groups": 2} if name in ("continual_norm", "group_norm") else {}
    if name in ("continual_norm", "switch_norm"):
        options |= {"running_mean": None, "running_var": None}
    if name == "switch_norm":
        options |= {"weight": None, "bias": None, "mean_weight": MIXTURE[0], "var_weight": MIXTURE[1]}
    return options


@pytest.mark.parametrize("name", ["batch_renorm", "continual_norm", "switch_norm"])
@pytest.mark.parametrize("kernel", ["", "fast", "AUTO", 0, False, []])
@pytest.mark.parametrize("shape", [(6, 4, 3), (6, 4), (0, 4)], ids=str)
def test_unknown_kernel_raises(name: str, kernel: Any, shape: tuple[int, ...]) -> None:
    """Also where the input determines the implementation: one position, or none."""
    with pytest.raises(ValueError, match=re.escape(f"{name}: kernel={kernel!r} is unknown. Use one of auto,")):
        MOMENT_FORMS[name](torch.randn(shape), None, None, training=True, kernel=kernel)


def test_empty_environment_variable_means_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTNORM_KERNEL", "")
    assert MOMENT_FORMS["continual_norm"](torch.randn(6, 4, 3), None, None, training=True).shape == (6, 4, 3)


def test_unknown_order_raises() -> None:
    with pytest.raises(ValueError, match="continual_norm: order='bn' is unknown"):
        MOMENT_FORMS["continual_norm"](torch.randn(6, 4, 3), None, None, training=True, order="bn")


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"r_max": 0.5}, "r_max=0.5"),
        ({"r_max": float("nan")}, "r_max=nan"),
        ({"d_max": -1}, "d_max=-1"),
        ({"d_max": None}, "d_max=None"),
        ({"r": torch.ones(1)}, r"r has shape \(1,\)"),
        ({"d": torch.ones(6, 4)}, r"d has shape \(6, 4\)"),
    ],
)
def test_wrong_limits_of_batch_renorm_raise(option: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=f"batch_renorm: {match}"):
        F.batch_renorm(torch.randn(6, 4, 3), torch.zeros(4), torch.ones(4), training=True, **option)


@pytest.mark.parametrize("name", [*MOMENT_FORMS, "group_norm"])
@pytest.mark.parametrize("wrong", [(1,), (6, 4), (4, 1), (3,), ()], ids=str)
@pytest.mark.parametrize("which", ["weight", "bias"])
def test_parameters_of_wrong_shape_raise(name: str, which: str, wrong: tuple[int, ...]) -> None:
    """Some of them would broadcast: (1,) over channels, (N, C) over samples."""
    affine = {"weight": torch.ones(4), "bias": torch.zeros(4)} | {which: torch.ones(wrong)}
    with pytest.raises(ValueError, match=rf"{name}: {which} has shape|{name}: built for \d channels"):
        getattr(F, name)(torch.randn(6, 4, 3), **(required(name) | affine))


# --- residuals of continual norm --------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("size", [6, 0], ids=["batch", "empty batch"])
@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        (torch.randn(4, 3), ValueError, r"residual has shape \(4, 3\)"),
        (torch.randn(1, 4, 3), ValueError, r"residual has shape \(1, 4, 3\)"),
        (torch.randn(2, 6, 4, 3), ValueError, "residual has shape"),
        (torch.tensor(1.0), ValueError, r"residual has shape \(\)"),
        ("double", ValueError, "residual is torch.float64 and the input torch.float32"),
        ("bfloat16", ValueError, "residual is torch.bfloat16"),
        ("int64", ValueError, "residual is torch.int64"),
        ("meta", ValueError, "residual is on meta and the input on cpu"),
        (0.5, TypeError, "residual must be a tensor, got float"),
    ],
)
def test_residual_unlike_the_input_raises(
    wrong: Any, error: type[Exception], match: str, training: bool, size: int
) -> None:
    x = torch.randn(size, 4, 3)
    if isinstance(wrong, str):
        wrong = x.to(wrong if wrong == "meta" else getattr(torch, wrong))
    mean, var = torch.zeros(4), torch.ones(4)
    with pytest.raises(error, match=f"continual_norm: {match}"):
        MOMENT_FORMS["continual_norm"](x, mean, var, training=training, residual=wrong)
    assert torch.equal(mean, torch.zeros(4))


def test_residual_of_other_dtype_raises_on_device_without_autocast() -> None:
    x = torch.randn(6, 4, 3, device="meta")
    with pytest.raises(ValueError, match=r"residual is torch\.float64"):
        MOMENT_FORMS["continual_norm"](x, None, None, training=True, residual=x.double())


@pytest.mark.parametrize("relu", [False, True])
def test_residual_is_cast_under_autocast(relu: bool, kernel: str) -> None:
    """The output has the input's type, as without a residual; both get gradients in their own types."""
    norm = MOMENT_FORMS["continual_norm"]
    for types in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        x, residual = (torch.randn(6, 4, 3).to(dtype).requires_grad_() for dtype in types)
        with torch.autocast("cpu", torch.bfloat16):
            y = norm(x, None, None, training=True, residual=residual, relu=relu)
            expected = norm(x, None, None, training=True, residual=residual.to(x.dtype), relu=relu)
            with pytest.raises(ValueError, match=r"residual is torch\.int64"):
                norm(x, None, None, training=True, residual=residual.long())
        assert y.dtype == x.dtype and torch.equal(y, expected)
        y.sum().backward()
        assert residual.grad is not None and residual.grad.dtype == residual.dtype


def test_instance_and_layer_norm_are_group_norm() -> None:
    x = torch.randn(3, 6, 5)
    torch.testing.assert_close(F.group_norm(x, 6), F.instance_norm(x))
    torch.testing.assert_close(F.group_norm(x, 1), F.layer_norm(x))
    torch.testing.assert_close(F.group_norm(x, "auto"), F.group_norm(x, 3))
    assert F.group_norm(torch.randn(4, 2, 3, 3, 3), 2).shape == (4, 2, 3, 3, 3)
    with pytest.raises(ValueError, match=r"group_norm: num_groups=4 does not divide the 6 channels"):
        F.group_norm(x, 4)


@pytest.mark.parametrize("function", [F.continual_norm, F.batch_norm])
def test_integer_moments_raise(function: Any) -> None:
    mean, var = torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    options = {"num_groups": 2} if function is F.continual_norm else {}
    with pytest.raises(ValueError, match="floating-point"):
        function(torch.randn(6, 4, 2, 2), mean, var, training=True, **options)
