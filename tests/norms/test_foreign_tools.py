"""Tools that look for torch's batch norms leave norms that are more than a batch norm alone; `bn` is one to them."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.optim.swa_utils import update_bn

import contnorm as cn
from contnorm.registry import NORMS

LEFT_ALONE = [name for name, entry in NORMS.items() if entry.keeps_moments and name != "bn"]
left_alone = pytest.mark.parametrize("norm", LEFT_ALONE)


def network(norm: str) -> nn.Sequential:
    torch.manual_seed(0)
    options = {"num_groups": 4} if NORMS[norm].grouped else {}
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        cn.create_norm(norm, 16, **options),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def batch(seed: int = 0) -> Tensor:
    return torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) * 2 + 1


@left_alone
def test_tools_leave_the_layer_and_reestimate_sets_its_moments(norm: str) -> None:
    model, batches = network(norm), [batch(1), batch(2)]
    before = copy.deepcopy(model.state_dict())
    update_bn(batches, model)
    assert nn.SyncBatchNorm.convert_sync_batchnorm(model)[1] is model[1]
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    cn.reestimate(model, batches)
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])


@left_alone
def test_freezing_by_class_is_without_effect_and_freeze_stats_has_one(norm: str) -> None:
    model = network(norm)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    model(batch())
    assert model[1].training and model[1].num_batches_tracked == 1
    cn.freeze_stats(model)
    model(batch())
    assert model[1].num_batches_tracked == 1


def test_tools_work_on_our_batch_norm() -> None:
    model = network("bn")
    update_bn([batch()], model)
    assert model[1].num_batches_tracked == 1
    model.eval()
    folded = fuse_conv_bn_eval(model[0], model[1])
    torch.testing.assert_close(folded(batch(1)), model[:2](batch(1)), rtol=1e-4, atol=1e-4)
    assert isinstance(nn.SyncBatchNorm.convert_sync_batchnorm(model)[1], nn.SyncBatchNorm)


@pytest.mark.parametrize("norm", ["bn", *LEFT_ALONE])
def test_checkpoint_of_batch_norm_without_a_counter_loads(norm: str) -> None:
    """As torchvision's first weights, which are plain dicts without version."""
    if "batch_norm_keys" in NORMS[norm].cannot:
        pytest.skip(NORMS[norm].cannot["batch_norm_keys"])
    stock = nn.BatchNorm2d(16)
    stock(torch.randn(4, 16, 3, 3))
    state = {name: value for name, value in stock.state_dict().items() if name != "num_batches_tracked"}
    layer = network(norm)[1]
    layer.load_state_dict(state)
    assert torch.equal(layer.running_var, stock.running_var) and layer.num_batches_tracked == 0
    state = dict(stock.state_dict())
    layer.load_state_dict(state)
    assert layer.num_batches_tracked == 1
