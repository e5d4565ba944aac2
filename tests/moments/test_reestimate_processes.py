"""Re-estimation over several processes: pooled data, the same moments everywhere, and no process that waits forever."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contnorm as cn
from tests.norms.processes import together


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


class Stream:
    """Batches without a length, which are read in passes."""

    def __init__(self, data: list[Tensor]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.data)


def failing(model: nn.Module, batch: Tensor) -> None:
    model(batch)
    raise OSError("no more data")


def several_ways(rank: int) -> dict[str, Any]:
    """Re-estimate with one sweep, with passes on one process or on both, approximately, and with errors."""
    data = batches()
    own = [data[0], data[2]] if rank == 0 else [data[1]]
    ways = {
        "sweep": (network(), own, {}),
        "passes": (network(), Stream(own), {}),
        "one in passes": (network(), Stream(own) if rank == 0 else own, {}),
        "approximate": (network(), iter(own), {"exact": False}),
        "failure at the end": (network(), own, {"call": failing if rank == 1 else None}),
        "not finite": (network(), [x * float("nan") for x in own] if rank == 1 else own, {}),
        "sweep again": (network(), own, {}),
    }
    results: dict[str, Any] = {}
    for name, (model, share, options) in ways.items():
        runs: list[int] = []
        model.register_forward_pre_hook(lambda module, args, runs=runs: runs.append(1))
        try:
            cn.reestimate(model, share, process_group=dist.group.WORLD, **options)
            results[name] = len(runs), moments_of(model)
        except Exception as error:
            results[name] = type(error).__name__, str(error)
    return results


@pytest.mark.ddp
@pytest.mark.slow
def test_processes_sweep_together_or_not_at_all() -> None:
    """Both processes sweep, each batch once; if one can't, both read in passes, with the same bits."""
    first, second = together(several_ways, 2)
    for name in ("sweep", "passes", "one in passes", "approximate", "sweep again"):
        assert all(torch.equal(value, second[name][1][key]) for key, value in first[name][1].items()), name
    assert (first["sweep"][0], second["sweep"][0]) == (2, 1)  # batches
    for name in ("passes", "one in passes", "sweep again"):
        assert all(torch.equal(value, first["sweep"][1][key]) for key, value in first[name][1].items()), name
    assert (first["passes"][0], second["passes"][0]) == (1 + 2 * 2, 1 + 2)  # the recorded calls, and two passes
    assert (first["approximate"][0], second["approximate"][0]) == (2, 1)
    assert second["failure at the end"] == ("OSError", "no more data")
    assert first["failure at the end"] == (
        "RuntimeError",
        "reestimate: process 1 of the group failed: OSError: no more data",
    )
    assert first["not finite"][0] == second["not finite"][0] == "NonFiniteMomentsError"


@pytest.mark.ddp
@pytest.mark.slow
def test_process_without_data_is_an_error_of_all() -> None:
    first, second = together(reestimate_share, 2, [[0], []], False)
    assert first[0] == second[0] == "NoLockstepError" and "different layers" in first[1]


def test_process_group_without_processes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"process_group is given, but torch\.distributed is not initialized"):
        cn.reestimate(network(), batches(), process_group=object())
