"""AdaB2N: float64 formulas, numbers of the released code, task boundaries, the auxiliary loss, conversion."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import contnorm as cn
from contnorm.tags import BatchTags, batch_tags
from contnorm.testing import check_norm

# The tasks of the samples of four batches, and the current task of each; the last batch has no sample of task 1.
TASKS = [[0] * 8, [1, 1, 1, 1, 0, 0, 0, 1], [2, 2, 2, 2, 2, 0, 1, 1], [2, 2, 2, 2, 2, 0, 0, 0]]
CURRENT = [0, 1, 2, 2]


def batch(step: int) -> Tensor:
    place = torch.arange(8 * 3 * 4, dtype=torch.float64).reshape(8, 3, 2, 2)
    return torch.sin(place * 1.7 + step * 0.9) * 2 + 0.1 * place.remainder(7)


def tags_of(tasks: list[int], current: int, **options: Any) -> BatchTags:
    task = torch.tensor(tasks)
    replayed = task < current
    replayed[-1] |= len(set(tasks)) > 1  # the memory may have a sample of the current task
    return BatchTags(replayed, task, **options)


def make_layer(**options: Any) -> cn.AdaptiveBalanceNorm2d:
    layer = cn.AdaptiveBalanceNorm2d(3, dtype=torch.float64, **options)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.5, 0.5, -1.0]))
        layer.bias.copy_(torch.tensor([0.1, -0.2, 0.3]))
    return layer


# Of lvyilin/AdaB2N, models/utils/adab2n.py at commit 9aaba7e4, in float64: four steps of SGD with a learning rate of
# 0.05 and a loss of mean(y * batch(step + 10)) + 0.5 * distance. For each kappa: the losses, the distances, φ, the
# running mean and variance, and weight and bias after the last step.
RELEASED: dict[float, tuple[list[float], ...]] = {
    0.4: (
        [-0.155880680376852, -0.3225740195834603, -0.42405239847467036, -0.5149755445320264],
        [0.4466111200567072, 0.19364896500466725, 0.0843172484273223, 0.014177905433192306],
        [0.0006451771956746919, 0.001750914752643538, -0.0003746474521315468],
        [0.2039106697790378, 0.22050642281333804, 0.2104101328097756],
        [1.6921246097766587, 1.756217494339512, 1.6727249949847738],
        [1.5858608173239854, 0.5833825390639635, -0.9139098339867261],
        [0.08129603948922143, -0.2206244327239982, 0.2803716321471676],
    ),
    1.0: (
        [0.12009611288364824, -0.05164809498373779, -0.20988909935045963, -0.3930169798666576],
        [0.9985647065777077, 0.7355008142041123, 0.512645781730913, 0.2580940720447023],
        [0.0011451674054040455, 0.004998196650876976, -0.001005453722950512],
        [0.0947042949373765, 0.10238435128264448, 0.09775200850765048],
        [1.319345791575662, 1.3498845846038396, 1.3116852849636684],
        [1.585860858998749, 0.5833825100270503, -0.9139098077161378],
        [0.08129603948922143, -0.2206244327239982, 0.2803716321471676],
    ),
}


@pytest.mark.parametrize(("kappa", "num_tasks"), [(0.4, 3), (1.0, 100)])
def test_training_matches_the_released_code(kappa: float, num_tasks: int) -> None:
    layer = make_layer(kappa=kappa, lam=0.5, num_tasks=num_tasks)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    losses, distances = [], []
    for step, (tasks, current) in enumerate(zip(TASKS, CURRENT, strict=True)):
        layer.on_task_start(current)
        optimizer.zero_grad()
        with batch_tags(tags_of(tasks, current)):
            y = layer(batch(step))
        penalty = layer.auxiliary_loss()
        loss = (y * batch(step + 10)).mean() + penalty
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        distances.append(penalty.item() / 0.5)
    actual = losses, distances, layer.phi[:3], layer.running_mean, layer.running_var, layer.weight, layer.bias
    for value, expected in zip(actual, RELEASED[kappa], strict=True):
        np.testing.assert_allclose(
            value if isinstance(value, list) else value.detach().numpy(), expected, rtol=1e-10, atol=1e-12
        )
    assert not layer.phi[3:].any()


def formula(x: np.ndarray, tasks: list[int], phi: list[float], renormalize: bool) -> tuple[np.ndarray, ...]:
    """The output, mean and variance, with explicit loops over samples and tasks."""
    counts = [tasks.count(task) for task in range(len(phi))]
    shares = [np.exp(value) + count for value, count in zip(phi, counts, strict=True)]
    weights = np.array([shares[task] / sum(shares) / counts[task] for task in tasks])
    if renormalize:
        weights = weights / weights.sum()
    flat = x.reshape(x.shape[0], x.shape[1], -1)
    mean = sum(w * sample.mean(1) for w, sample in zip(weights, flat, strict=True))
    var = sum(w * ((sample - mean[:, None]) ** 2).mean(1) for w, sample in zip(weights, flat, strict=True))
    y = (flat - mean[None, :, None]) / np.sqrt(var[None, :, None] + 1e-5)
    return y.reshape(x.shape), mean, var


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("shape", [(8, 4), (8, 4, 3, 2)])
def test_training_matches_the_formula_in_all_ranks(shape: tuple[int, ...], renormalize: bool) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 2 + 1
    phi = [0.3, -1.0, 0.7]
    dim: Any = max(1, len(shape) - 2)
    layer: Any = cn.create_norm("adab2n", 4, dim=dim, momentum=1.0, renormalize=renormalize, dtype=torch.float64)
    layer.on_task_start(2)
    with torch.no_grad():
        layer.phi[:3] = torch.tensor(phi, dtype=torch.float64)
    for tasks in TASKS[2:]:
        with batch_tags(tags_of(tasks, 2)):
            y = layer(x)
        for actual, expected in zip(
            (y, layer.running_mean, layer.running_var), formula(x.numpy(), tasks, phi, renormalize), strict=True
        ):
            np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kappa", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("momentum", [0.0, 0.1, 1.0])
def test_modified_momentum_follows_its_recursion(kappa: float, momentum: float) -> None:
    layer = make_layer(kappa=kappa, momentum=momentum)
    eta = momentum**kappa
    for step in range(200):
        assert float(layer._weight_of_moving_batch()) == pytest.approx(eta, rel=1e-9, abs=1e-12), step
        layer.num_batches_tracked += 1
        eta = eta / (eta + (1 - momentum) ** kappa) if eta else 0.0


def test_first_task_and_evaluation_are_batch_norm_without_bessel_correction() -> None:
    layer, stock = make_layer(), nn.BatchNorm2d(3, dtype=torch.float64)
    stock.load_state_dict(layer.state_dict(), strict=False)
    layer.on_task_start(0)
    with batch_tags(tags_of(TASKS[0], 0)):
        torch.testing.assert_close(layer(batch(0)), stock(batch(0)))
    torch.testing.assert_close(layer.running_mean, stock.running_mean)
    torch.testing.assert_close(layer.running_var - 0.9, (stock.running_var - 0.9) * 31 / 32)  # 8 * 2 * 2 values
    stock.load_state_dict(layer.state_dict(), strict=False)
    with batch_tags(tags_of(TASKS[1], 1)):
        assert torch.equal(layer.eval()(batch(1)), stock.eval()(batch(1)))


@pytest.mark.parametrize("stream_size", [None, 8])
def test_batch_without_replayed_samples_is_not_weighted(stream_size: int | None) -> None:
    layer, plain = make_layer(), make_layer()
    layer.on_task_start(3)
    tags = BatchTags(torch.zeros(8, dtype=torch.bool), torch.full((8,), 3), stream_size=stream_size)
    with batch_tags(tags):
        y = layer(batch(0))
    torch.testing.assert_close(y, plain(batch(0)))


def test_auxiliary_loss_starts_with_its_task() -> None:
    layer = make_layer(ada_t0=1, lam=2.0)
    losses = []
    for current in (0, 1):
        layer.on_task_start(current)
        layer.reset_running_stats()
        layer(batch(0))
        losses.append(layer.auxiliary_loss().item())
    assert losses[0] == 0
    expected = layer.running_mean / 0.1 * 0.9, (layer.running_var - 0.9) / 0.1 - layer.running_var
    assert losses[1] == pytest.approx(2 * sum(d.square().mean().item() for d in expected))
    assert layer.auxiliary_loss().item() == 0  # no pass since the last call


def test_auxiliary_loss_adds_the_passes_of_a_step() -> None:
    """Separate forward passes of stream and memory: the second one changes the buffers before the backward pass."""
    layer, alone = make_layer(), make_layer()
    single = []
    for step in range(2):
        layer(batch(step))
        alone(batch(step))
        single.append(alone.auxiliary_loss())
    total = layer.auxiliary_loss()
    torch.testing.assert_close(total, single[0] + single[1])
    total.backward()


def test_pending_losses_are_not_copied() -> None:
    layer = make_layer()
    for step in range(20):
        layer(batch(step).requires_grad_())
    assert len(layer._distances) < 20  # a loop that never calls auxiliary_loss does not keep all graphs
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copied.auxiliary_loss().item() == 0
        assert torch.equal(copied.running_mean, layer.running_mean)


def test_conforms_in_a_later_task() -> None:
    def norm(num_features: int, momentum: float | None = 0.1, kappa: float = 1.0) -> nn.Module:
        layer: Any = cn.create_norm("adab2n", num_features, momentum=momentum, kappa=kappa)
        layer.on_task_start(2)
        return layer  # type: ignore[no-any-return]

    checks = ["gradients", "channels_last", "autocast", "half_precision", "tags", "auxiliary_loss", "momentum"]
    assert len(check_norm({2: norm}, checks=checks).passed) == len(checks)


def test_conversion_keeps_options_and_the_learned_balance() -> None:
    model = nn.Sequential(make_layer(kappa=0.4, lam=0.2, ada_t0=1, num_tasks=7, renormalize=True))
    old: Any = model[0]
    old.on_task_start(1)
    converted: Any = cn.convert_norm(model, "adab2n", lam=3.0)[0]
    assert (converted.kappa, converted.lam, converted.ada_t0) == (0.4, 3.0, 1)
    assert (converted.num_tasks, converted.renormalize) == (7, True)
    assert converted.phi is old.phi and converted.started is old.started and converted.weight is old.weight
    longer: Any = cn.convert_norm(nn.Sequential(converted), "adab2n", num_tasks=9)[0]
    assert longer.phi.shape == longer.started.shape == (9,)
    back: Any = cn.convert_norm(nn.Sequential(converted), "bn")[0]
    assert type(back) is cn.BatchNorm2d and back.running_var is old.running_var
    assert "phi" not in back.state_dict()
