"""Approximate moments in one pass (`exact=False`): each batch is normalized with its own moments, as in training."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import contnorm as cn
from tests.models import ResNet

NORMS = ["bn", "cn"]


def images(sizes: tuple[int, ...] = (10, 10, 7, 3)) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    return [torch.randn(n, 3, 16, 16, generator=g) * (1 + i) + i for i, n in enumerate(sizes)]


def rows(sizes: tuple[int, ...] = (9, 6, 4)) -> list[Tensor]:
    g = torch.Generator().manual_seed(6)
    return [torch.randn(n, 4, generator=g) * (1 + i) + i for i, n in enumerate(sizes)]


def network(norm: str = "bn") -> Any:
    torch.manual_seed(0)
    model = ResNet()
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.weight.uniform_(0.5, 1.5)
                layer.bias.uniform_(-1, 1)
    return cn.convert_norm(model, norm, **({"num_groups": 4} if norm.startswith("cn") else {}))


def deep() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4))


def moments(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if "running" in name}


def inputs_in_training(model: nn.Module, data: list[Tensor]) -> dict[str, list[np.ndarray]]:
    """The inputs of torch's batch norms in training mode, batch by batch."""
    twin = copy.deepcopy(model).train()
    found: dict[str, list[np.ndarray]] = {}
    for name, layer in twin.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            own = found.setdefault(name, [])
            layer.register_forward_pre_hook(lambda _, args, own=own: own.append(args[0].double().numpy()))
    with torch.no_grad():
        for batch in data:
            twin(batch)
    return found


def test_moments_are_those_of_training_mode_inputs_of_all_batches() -> None:
    """NumPy's mean and unbiased variance of the concatenated inputs of each layer."""
    model = network()
    done = cn.reestimate(model, iter(images()), exact=False)
    inputs = inputs_in_training(model, images())
    assert len(inputs) == len(done.moments) == 20
    for name, values in inputs.items():
        channels = np.concatenate([v.swapaxes(0, 1).reshape(v.shape[1], -1) for v in values], axis=1)
        np.testing.assert_allclose(done.moments[name].new_mean, channels.mean(1), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(done.moments[name].new_var, channels.var(1, ddof=1), rtol=1e-4)


def average_moments(batches: list[Tensor], model: nn.Module) -> None:
    """As torch's ``update_bn``, which changes only torch's batch norms."""
    layers = [module for module in model.modules() if hasattr(module, "running_mean")]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None
    for batch in batches:
        model.train()(batch)


@pytest.mark.parametrize("norm", NORMS)
def test_one_batch_has_the_moments_of_update_bn_and_of_the_exact_mode(norm: str) -> None:
    model, (batch, *_) = network(norm), images()
    expected, exact = copy.deepcopy(model), copy.deepcopy(model)
    average_moments([batch], expected)
    cn.reestimate(exact, [batch])
    cn.reestimate(model, [batch], exact=False)
    torch.testing.assert_close(moments(model), moments(expected), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, moments(exact)[name]) for name, value in moments(model).items())


@pytest.mark.parametrize("norm", ["bn", "cn", "brn", "sn", "iabn"])
def test_layers_without_a_norm_before_them_have_exact_moments(norm: str) -> None:
    torch.manual_seed(1)
    branches = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)) for _ in range(2)]
    options: Any = {"num_groups": 2} if norm == "cn" else {}
    model = cn.convert_norm(Sum(branches), norm, **options)
    exact = copy.deepcopy(model)
    cn.reestimate(exact, images())
    cn.reestimate(model, (batch for batch in images()), exact=False)
    assert len(moments(model)) == 4
    assert all(torch.equal(value, moments(exact)[name]) for name, value in moments(model).items())


class Sum(nn.Module):
    """The sum of branches."""

    def __init__(self, branches: list[nn.Sequential]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([branch(x) for branch in self.branches]).sum(0)


def test_weights_of_samples_are_respected() -> None:
    """Both layers by hand: the first with the weighted moments of all data, the second of batches normalized alone."""
    model, data = deep().double(), [x.double() for x in rows()]
    weights = [torch.tensor([1.0, 3.0, 0.0] * 3).double()[: len(x)] for x in data]
    cn.reestimate(model, list(zip(data, weights, strict=True)), weights=lambda batch: batch[1], exact=False)
    seconds = []
    for x, w in zip(data, weights, strict=True):
        mean, var, _ = by_hand(x.numpy(), w.numpy())
        normal = torch.from_numpy((x.numpy() - mean) / np.sqrt(var + 1e-5))
        seconds.append(model[1](normal).relu().detach().numpy())
    all_weights = torch.cat(weights).numpy()
    for layer, values in ((model[0], torch.cat(data).numpy()), (model[3], np.concatenate(seconds))):
        mean, var, factor = by_hand(values, all_weights)
        np.testing.assert_allclose(layer.running_mean, mean, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(layer.running_var, var * factor, rtol=1e-9)


def by_hand(values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Weighted mean, biased variance and the factor of the unbiased one, of (N, C)."""
    mean = (weights[:, None] * values).sum(0) / weights.sum()
    var = (weights[:, None] * (values - mean) ** 2).sum(0) / weights.sum()
    effective = weights.sum() ** 2 / (weights**2).sum()
    return mean, var, effective / (effective - 1)


def test_batches_without_weight_or_samples_add_nothing() -> None:
    model, expected, (one, two, three) = deep(), deep(), rows()
    cn.reestimate(expected, [one, three], exact=False)
    cn.reestimate(model, iter([one, two, three]), weights=lambda batch: float(batch is not two), exact=False)
    torch.testing.assert_close(moments(model), moments(expected))
    cn.reestimate(model, iter([one, two[:0], three]), exact=False)
    torch.testing.assert_close(moments(model), moments(expected))
    with pytest.raises(ValueError, match="no data reached"):
        cn.reestimate(model, iter([one, two, three]), weights=lambda batch: 0.0, exact=False)


def broken(error: Exception) -> Iterator[Tensor]:
    yield rows()[0]
    raise error


@pytest.mark.parametrize(
    ("batches", "match"),
    [
        (iter([]), "no data reached"),
        (iter([rows()[0], torch.zeros(1, 4)]), r"a batch has one value per channel at layer '0'.*give larger batches"),
        (iter([rows()[0], torch.full((3, 4), torch.nan)]), "layer '0' are NaN or infinite"),
        (broken(ValueError("the stream ended")), "the stream ended"),
    ],
)
def test_errors_restore_the_moments(batches: Iterator[Tensor], match: str) -> None:
    model = deep()
    model[0].running_mean.fill_(0.5)
    before = moments(model)
    with pytest.raises(ValueError, match=match):
        cn.reestimate(model, batches, exact=False)
    assert all(torch.equal(value, before[name]) for name, value in moments(model).items())
