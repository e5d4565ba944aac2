"""Layers and tools on a device without float64, simulated on the CPU: inputs of layers stay in float32."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import contnorm as cn
from contnorm.checks import in_float64, widest
from contnorm.registry import NORMS


class Float32Device(TorchDispatchMode):
    """Refuses float64 tensors with more than ``dims`` dimensions; those with one are sums of channels, on the host."""

    def __init__(self, dims: int = 1) -> None:
        super().__init__()
        self.dims = dims

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        assert not any(tensor.dtype == torch.float64 and tensor.dim() > self.dims for tensor in tensors), func
        return result


def data() -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(n, 3, 6, 6, generator=g) * (1 + n) + n for n in (2, 5, 1)]


@pytest.fixture
def no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("contnorm.checks.WITHOUT_FLOAT64", ("cpu",))


def network(norm: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    options: Any = {"num_groups": 4} if norm == "cn" else {}
    return cn.convert_norm(model, norm, **options)


@pytest.mark.parametrize(("norm", "weighted", "exact"), [("bn", True, False), ("cn", False, True), ("brn", True, True)])
def test_moments_without_float64(norm: str, weighted: bool, exact: bool, request: pytest.FixtureRequest) -> None:
    model = network(norm)
    expected = copy.deepcopy(model)
    options: Any = {"exact": exact}
    if weighted:
        options["weights"] = lambda batch: torch.arange(1.0, 1 + len(batch))
    cn.reestimate(expected, data(), **options)
    with pytest.raises(AssertionError, match="aten"), Float32Device():  # the mode refuses what the device has not
        torch.zeros(2, 2).double()
    request.getfixturevalue("no_float64")

    def call(model: nn.Module, batch: Tensor) -> None:
        with Float32Device():  # the forward passes may run in other threads
            model(batch)

    cn.reestimate(model, data(), call=call, **options)
    for ours, other in zip(model.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("no_float64")
def test_sums_are_pooled_in_float64() -> None:
    x = torch.ones(2, dtype=torch.bfloat16)
    assert (widest(x).dtype, in_float64(x).dtype) == (torch.float32, torch.float64)
    assert in_float64(torch.ones(2, dtype=torch.complex64)).dtype == torch.complex128
    layer = nn.BatchNorm1d(1)
    cn.reestimate(layer, [torch.tensor([[1e4], [1e4 + 1]]) for _ in range(200)])  # sums in float32 would drift
    assert layer.running_mean is not None and layer.running_mean.item() == 10000.5
    assert layer.running_var is not None and layer.running_var.item() == pytest.approx(0.25 * 400 / 399, rel=1e-6)


@pytest.mark.parametrize("norm", [name for name, entry in NORMS.items() if not entry.standardizes_weights])
def test_layers_without_float64(norm: str, request: pytest.FixtureRequest) -> None:
    """Forward, backward, moments and evaluation; the results are those with float64, up to rounding."""
    options: Any = {"num_groups": 4} if NORMS[norm].grouped else {}
    options |= {"kernel": "pivoted"} if norm == "cn" else {}  # the C++ kernel is of CPUs, which have float64
    layers = [cn.create_norm(norm, 8, **options)]
    layers.append(copy.deepcopy(layers[0]))
    results = []
    for layer in layers:
        x = torch.randn(4, 8, 3, 3, generator=torch.Generator().manual_seed(0)).add(3).requires_grad_()
        with Float32Device(dims=-1 if results else 4):
            outputs = [layer(x), layer(2 * x), layer.eval()(x)]
            sum(output.pow(3).sum() for output in outputs).backward()
        results.append([*outputs, x.grad, *layer.buffers(), *(p.grad for p in layer.parameters())])
        request.getfixturevalue("no_float64")
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("no_float64")
def test_diagnosis_without_float64() -> None:
    model = nn.Sequential(network("brn"), nn.Flatten(), nn.LazyLinear(2))
    model(data()[0])
    tasks = {str(i): [(batch, torch.zeros(len(batch), dtype=torch.int64))] for i, batch in enumerate(data()[:2])}
    with Float32Device():
        assert len(cn.diagnose(model, tasks).layers) == 2
