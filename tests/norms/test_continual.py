"""Continual normalization layers: identities, groups, kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import contnorm as cn
from contnorm.kernels.cpp import unavailable_reason


def test_is_group_norm_then_batch_norm() -> None:
    layer, x = cn.CN(64, num_groups=8), torch.randn(10, 64, 4, 4)
    torch.testing.assert_close(layer(x), nn.BatchNorm2d(64)(F.group_norm(x, 8)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("groups", "first"), [(6, F.instance_norm), (1, lambda x: F.layer_norm(x, x.shape[1:]))])
def test_extreme_groups_are_instance_and_layer_norm(groups: int, first) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(5, 6, 4, 4, dtype=torch.float64)
    expected = F.batch_norm(first(x), None, None, training=True)
    torch.testing.assert_close(cn.ContinualNorm2d(6, num_groups=groups).double()(x), expected)


def test_evaluation_is_group_norm_and_constant_affine_map() -> None:
    layer = cn.CN(8, num_groups=2).double()
    layer(torch.randn(4, 8, 3, 3, dtype=torch.float64) * 2 + 1)
    layer.eval()
    x, z = torch.randn(2, 1, 8, 3, 3, dtype=torch.float64)
    slope = (layer(x) - layer(z)) / (F.group_norm(x, 2) - F.group_norm(z, 2))
    torch.testing.assert_close(slope, slope.mean((0, 2, 3), keepdim=True).expand_as(slope))


def test_auto_groups_depend_on_the_rank() -> None:
    flat = cn.ContinualNorm1d(100, num_groups="auto")
    assert flat.num_groups == "auto"
    x = torch.randn(10, 100, 6)
    same = cn.ContinualNorm1d(100, num_groups=25)
    torch.testing.assert_close(flat(x), same(x), rtol=0, atol=0)
    torch.testing.assert_close(flat(x[..., 0]), cn.ContinualNorm1d(100, num_groups=10)(x[..., 0]), rtol=0, atol=0)
    assert cn.ContinualNorm2d(100, num_groups="auto").num_groups == 25
    assert cn.ContinualNorm2d(48, num_groups="auto").num_groups == 24
    assert cn.ContinualNorm1d(5, num_groups="auto")(torch.randn(4, 5)).shape == (4, 5)  # too few for two groups


def test_groups_of_one_value_raise() -> None:
    with pytest.raises(ValueError, match=r"num_groups=32 leaves one value.*such as 4"):
        cn.ContinualNorm1d(32)(torch.randn(4, 32))


def test_kernel_is_resolved_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTNORM_KERNEL", "reference")
    layer = cn.CN(8, num_groups=2)
    monkeypatch.delenv("CONTNORM_KERNEL")
    assert "kernel='reference'" in repr(layer)
    x = torch.randn(4, 8, 3, 3)
    expected = F.batch_norm(F.group_norm(x, 2), None, None, layer.weight, layer.bias, training=True)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
    assert cn.CN(8, num_groups=2).kernel == "auto"
    assert cn.CN(8, num_groups=2, kernel="analytic").kernel == "analytic"


@pytest.mark.parametrize("kernel", ["auto", "reference", "pivoted", "analytic", "cpp"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_relu_and_residual_follow_the_norm_with_every_kernel(kernel: str, training: bool) -> None:
    if kernel == "cpp" and (reason := unavailable_reason()) is not None:
        pytest.skip(reason)
    layer, twin = (cn.CN(8, num_groups=2, kernel=kernel).train(training) for _ in range(2))  # type: ignore[arg-type]
    x, shortcut = torch.randn(2, 4, 8, 3, 3)
    assert torch.equal(layer(x, shortcut, relu=True), torch.relu(twin(x) + shortcut))
    assert torch.equal(layer(x, relu=True), torch.relu(twin(x)))
    assert torch.equal(layer.running_var, twin.running_var)
    assert int(layer.num_batches_tracked) == (2 if training else 0)
    empty = layer(x[:0], shortcut[:0], relu=True)
    assert empty.shape == (0, 8, 3, 3)
