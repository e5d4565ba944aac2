"""Synchronized continual normalization on two processes equals one process on the whole batch."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import contnorm as cn
from contnorm.registry import NORMS
from tests.norms.processes import together

pytestmark = pytest.mark.ddp

VARIANTS = ["cn", "cn_tied", "bn_gn", "bn_gn_tied"]
# Distribution of twelve samples over two processes: even, uneven, all on one, a single sample on one.
SPLITS = [(6, 6), (9, 3), (12, 0), (11, 1)]


def model(norm: str, momentum: float | None) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 3),
        cn.create_norm(norm, 8, num_groups=2, momentum=momentum),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        cn.create_norm(norm, 8, num_groups=4, momentum=momentum),
    ]
    return nn.Sequential(*layers).double()


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(12, 3, 7, 7, generator=g, dtype=torch.float64) * 2 + 1
    return x, torch.randn(12, 8, 3, 3, generator=g, dtype=torch.float64)


def facts(net: nn.Module, y: Tensor, x: Tensor) -> dict[str, Any]:
    inner = net.module if isinstance(net, DistributedDataParallel) else net
    return {
        "y": y.detach(),
        "dx": x.grad,
        "grads": {name: p.grad for name, p in inner.named_parameters()},
        "buffers": copy.deepcopy(dict(inner.named_buffers())),
    }


def step(net: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Any]:
    for _ in range(2):  # twice, so that the second batch sees updated buffers
        net.zero_grad()
        x = x.detach().clone().requires_grad_()
        y = net(x)
        (y * dy).sum().backward()
    return facts(net, y, x)


def one_rank(rank: int, norm: str, momentum: float | None, split: tuple[int, int]) -> dict[str, Any]:
    net = DistributedDataParallel(cn.convert_sync(model(norm, momentum)))
    x, dy = (t.split(list(split))[rank] for t in data())
    result = step(net, x, dy)
    # DDP averages over processes; the whole-batch loss is their sum.
    result["grads"] = {name: grad * 2 for name, grad in result["grads"].items()}
    return result


def all_cases(rank: int) -> dict[Any, Any]:
    cases = [(norm, 0.1, split) for norm in VARIANTS for split in SPLITS] + [("cn", None, (9, 3))]
    return {case: one_rank(rank, *case) for case in cases}


@pytest.mark.slow
def test_two_processes_equal_one_on_the_whole_batch() -> None:
    ranks = together(all_cases, 2)
    assert len(ranks[0]) == 17
    for case in ranks[0]:
        norm, momentum, _ = case
        whole = step(model(norm, momentum), *data())
        parts = [rank[case] for rank in ranks]
        for name in ("y", "dx"):
            torch.testing.assert_close(torch.cat([part[name] for part in parts]), whole[name], msg=str(case))
        for part in parts:
            torch.testing.assert_close(part["grads"], whole["grads"], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(part["buffers"], whole["buffers"])


def far_from_zero() -> Tensor:
    return torch.randn(8, 8, 5, 5, generator=torch.Generator().manual_seed(0)) * 1e-2 + 1e4


def special_batches(rank: int) -> dict[str, Any]:
    """Batches with a large mean, an empty batch on all processes, and two that raise in one process."""
    found: dict[str, Any] = {}
    for norm in ("cn", "bn_gn"):
        layer: Any = cn.convert_sync(cn.create_norm(norm, 8, num_groups=2))
        found[norm] = layer(far_from_zero().split([5, 3])[rank]).detach()
    empty = cn.SyncContinualNorm(8, num_groups=2)
    y = empty(torch.zeros(0, 8, 3, 3))
    found["empty"] = int(empty.num_batches_tracked), empty.running_mean + y.sum()
    found["errors"] = []
    for groups, samples in ((8, 4), (2, 1 - rank)):
        layer = cn.SyncContinualNorm(8, num_groups=groups)
        with pytest.raises(ValueError) as error:  # noqa: PT011 - compared by the test
            layer(torch.randn(samples, 8))
        found["errors"].append(str(error.value))
        assert layer.num_batches_tracked == 0
    return found


@pytest.mark.slow
def test_large_means_empty_batches_and_errors() -> None:
    ranks = together(special_batches, 2)
    for norm in ("cn", "bn_gn"):  # large means do not cancel between processes
        exact = cn.create_norm(norm, 8, num_groups=2).double()(far_from_zero().double())
        parts = torch.cat([rank[norm] for rank in ranks])
        torch.testing.assert_close(parts.double(), exact, rtol=1e-5, atol=1e-5)
    for rank in ranks:
        counted, mean = rank["empty"]
        assert counted == 0 and not mean.any()
        one_value_a_group, one_value_in_all = rank["errors"]
        assert "num_groups=8 leaves one value" in one_value_a_group
        assert "Expected more than 1 value per channel" in one_value_in_all


def plain_ddp(rank: int) -> dict[str, Any]:
    """Every norm under DDP with local statistics: one step, averaged gradients, no deadlock."""
    result = {}
    for name, spec in NORMS.items():
        torch.manual_seed(0)
        options = {"num_groups": 2} if spec.grouped else {}
        net = nn.Sequential(nn.Conv2d(3, 8, 3), cn.create_norm(name, 8, **options), nn.Flatten(), nn.Linear(200, 2))
        twin = copy.deepcopy(net)
        wrapped = DistributedDataParallel(net)
        x = torch.randn(4, 3, 7, 7, generator=torch.Generator().manual_seed(rank))
        wrapped(x).square().sum().backward()
        twin(x).square().sum().backward()
        result[name] = ([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    return result


@pytest.mark.slow
def test_every_norm_trains_under_ddp() -> None:
    ranks = together(plain_ddp, 2)
    for name in ranks[0]:
        local = [rank[name][1] for rank in ranks]
        for averaged, *parts in zip(ranks[0][name][0], *local, strict=True):
            torch.testing.assert_close(averaged, sum(parts) / 2, rtol=1e-4, atol=1e-4, msg=name)
