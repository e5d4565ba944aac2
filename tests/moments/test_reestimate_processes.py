"""Re-estimation over several processes: pooled data, the same moments everywhere, and no process that waits forever."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contnorm as cn
from tests.layers.processes import together


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), cn.CN(4, num_groups=2)]
    return nn.Sequential(*layers).double()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 3, 6, 6, generator=generator, dtype=torch.float64) * (1 + n) + n for n in (2, 5, 1)]


def weights(batch: Tensor) -> float:
    return float(len(batch))


def moments_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if "running" in name}


def reestimate_share(rank: int, shares: list[list[int]], weighted: bool) -> Any:
    """Re-estimate from the batches of this process; return the moments, or the error."""
    model, data = network(), batches()
    try:
        cn.reestimate(
            model,
            [data[i] for i in shares[rank]],
            weights=weights if weighted else None,
            process_group=dist.group.WORLD,
        )
    except Exception as error:
        return type(error).__name__, str(error)
    return moments_of(model)


@pytest.mark.ddp
@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_two_processes_have_moments_of_all_data(weighted: bool) -> None:
    """Merged in another order than by one process, in float64: equal up to rounding; bit-equal between processes."""
    first, second = together(reestimate_share, 2, [[0, 2], [1]], weighted)
    model = network()
    cn.reestimate(model, batches(), weights=weights if weighted else None)
    assert len(first) == 4
    torch.testing.assert_close(first, moments_of(model), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.ddp
@pytest.mark.slow
def test_failure_of_one_process_is_raised_by_all() -> None:
    first, second = together(reestimate_share, 2, [[0], []], False)
    assert first == ("RuntimeError", "reestimate: process 1 of the group failed: ValueError: " + second[1])
    assert second[0] == "ValueError" and "batches is empty" in second[1]


def test_process_group_without_processes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"process_group is given, but torch\.distributed is not initialized"):
        cn.reestimate(network(), batches(), process_group=object())
