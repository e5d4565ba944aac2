"""TBBN: float64 formulas, numbers of the released code, the number of parts, the order of a batch, conversion."""

import copy
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import contnorm as cn
from contnorm.norms.balanced import feasible_parts, task_balanced_batch_norm
from contnorm.tags import BatchTags, batch_tags


def batch(step: int) -> Tensor:
    place = torch.arange(16 * 2 * 2, dtype=torch.float64).reshape(16, 2, 2, 1)
    return torch.sin(place * 1.7 + step * 0.9) * 2 + 0.1 * place.remainder(7)


def tags_of(stream: int, memory: int, counted: bool = True) -> BatchTags:
    replayed = torch.arange(stream + memory) >= stream
    return BatchTags(replayed, (~replayed).long(), stream_size=stream if counted else None)


def make_layer(**options: Any) -> cn.TaskBalancedNorm2d:
    layer = cn.TaskBalancedNorm2d(2, dtype=torch.float64, **options)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.5, -0.5]))
        layer.bias.copy_(torch.tensor([0.1, -0.2]))
    return layer


def test_number_of_parts_is_that_of_the_released_code() -> None:
    """Of csm9493/TaskBalancedBN, src/networks/tbbn.py at commit c4a939c5, with its default batch of 48 + 16."""
    assert [feasible_parts(48, 16, task) for task in range(10)] == [1, 2, 4, 8, 8, 8, 16, 16, 16, 16]
    assert [feasible_parts(12, 4, task) for task in range(3)] == [1, 2, 4]


def test_parts_divide_both_counts_and_stay_below_the_ratio() -> None:
    for memory, stream, past in product((0, 1, 4, 10, 20), range(13), range(12)):
        parts = feasible_parts(stream, memory, past)
        if parts > 1:
            assert stream % parts == memory % parts == 0 and parts <= stream / memory * past
        larger = [r for r in range(parts + 1, 40) if memory and stream % r == memory % r == 0]
        assert all(r > stream / memory * past for r in larger if stream)


# Of the same code, in float64: four steps of SGD with a learning rate of 0.05 on batches of 12 + 4 samples in tasks 0,
# 1, 1, 2. For each step: the number of parts, the loss, an output of a stream and of a memory sample, the gradients of
# a stream and of a memory sample, and the running moments. Then weight and bias.
RELEASED: list[tuple[Any, ...]] = [
    (
        1,
        0.7536331519659695,
        [0.984593584991357, 0.09995359027263878],
        [1.737459599470883, 0.08570330946429239],
        [-0.19641925193072068, -0.07564056968480308, 0.0005145939730218053, 0.0014567188956258964],
        [-0.19479612873304986, -0.18909866070094522, 0.00620646351844789, -0.0019121750406093244],
        [0.056414086300468284, 0.003640974269860429],
        [1.1015700074302641, 1.1005375845753735],
    ),
    (
        2,
        1.713446637714644,
        [1.7167394884846245, 0.295706825825677],
        [-0.08174028566932559, -0.48225257960950974],
        [-0.013535852684698362, 0.1196572820318006, -0.02979873561635394, -0.031338292467963526],
        [-0.17852777605421882, 0.05521416444810148, 0.019858983265946824, -0.0488162306988095],
        [0.10749351287832386, 0.015440254679461592],
        [1.1965423454319137, 1.2022651271631468],
    ),
    (
        2,
        1.3533003483944501,
        [1.4388620545325492, 0.06324867418020666],
        [-1.3145582537829488, -0.6500462606244155],
        [0.1447633661957451, 0.08568534873070463, -0.02285117968529491, -0.005130627769585467],
        [0.0242985083092108, 0.21799776870613868, -0.012292714820144657, -0.03709572780395432],
        [0.11633378402241887, 0.06415652688746129],
        [1.2950760040487572, 1.2970250792216067],
    ),
    (
        4,
        -1.2318345513160938,
        [0.44106742164113566, -0.20087530701168055],
        [-1.3374355033033396, -0.4525671540499003],
        [0.038696576647378494, 0.033247095323602045, 0.0035588871552147375, -0.000798300011399996],
        [0.045499021324385665, 0.02332775878293309, -0.01642461843748772, -0.012807689339457995],
        [0.077324507587559, 0.14983162783378007],
        [1.3553794810632416, 1.3499195581638164],
    ),
]
RELEASED_AFFINE = [1.3519789853998656, -0.24724640270277423], [-0.008152713021109443, -0.08256953081201408]


def test_training_matches_the_released_code() -> None:
    layer = make_layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    for step, (task, expected) in enumerate(zip((0, 1, 1, 2), RELEASED, strict=True)):
        layer.on_task_start(task)
        x = batch(step).requires_grad_()
        optimizer.zero_grad()
        with batch_tags(tags_of(12, 4)):
            y = layer(x)
        loss = (y * batch(step + 10)).mean() + (y[3] * y[13]).sum()
        loss.backward()
        optimizer.step()
        assert x.grad is not None and layer.running_mean is not None and layer.running_var is not None
        assert layer.parts(12, 4) == expected[0]
        actual = loss, y[1, :, 0, 0], y[13, :, 1, 0], x.grad[5], x.grad[14], layer.running_mean, layer.running_var
        for value, number in zip(actual, expected[1:], strict=True):
            np.testing.assert_allclose(value.detach().flatten().numpy(), np.ravel(number), rtol=1e-10, atol=1e-12)
    for parameter, number in zip((layer.weight, layer.bias), RELEASED_AFFINE, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), number, rtol=1e-10)


def formula(x: np.ndarray, stream: int, parts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The output, and the mean and unbiased variance to track, from one batch per part."""
    memory = x[stream:]
    y, means, variances = np.zeros_like(x), [], []
    axes = (0, *range(2, x.ndim))
    for part in range(parts):
        chosen = [i for i in range(stream) if i % parts == part]
        both = np.concatenate([x[chosen], memory])
        mean, var = both.mean(axes, keepdims=True), both.var(axes, keepdims=True)
        normalized = (both - mean) / np.sqrt(var + 1e-5)
        y[chosen] = normalized[: len(chosen)]
        y[stream:] += normalized[len(chosen) :] / parts
        means.append(mean.ravel())
        variances.append(both.var(axes, ddof=1).ravel())
    return y, np.mean(means, 0), np.mean(variances, 0)


@pytest.mark.parametrize(("stream", "memory", "parts"), [(4, 8, 4), (6, 2, 2)])
@pytest.mark.parametrize("shape", [(4,), (4, 3, 2)])
def test_training_matches_the_formula(shape: tuple[int, ...], stream: int, memory: int, parts: int) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn((stream + memory, *shape), generator=generator, dtype=torch.float64) * 2 + 1
    mean, var = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    y = task_balanced_batch_norm(x, mean, var, training=True, momentum=1.0, stream_size=stream, parts=parts)
    for actual, expected in zip((y, mean, var), formula(x.numpy(), stream, parts), strict=True):
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_are_those_of_numeric_differentiation(layout: torch.memory_format) -> None:
    layer = make_layer(track_running_stats=False)
    layer.on_task_start(3)
    x = torch.randn(8, 2, 3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = x.to(memory_format=layout).requires_grad_()

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with batch_tags(tags_of(4, 4)):
            y: Tensor = torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))
        return y

    assert layer.parts(4, 4) == 2
    values = (x, layer.weight, layer.bias)
    assert torch.autograd.gradcheck(run, values)
    assert torch.autograd.gradgradcheck(run, values)
    assert run(*values).is_contiguous(memory_format=layout)


def test_order_of_the_batch_does_not_matter() -> None:
    """Without a count, the stream samples are found by the mask, and keep their order among themselves."""
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    stream_first = torch.argsort((order >= 12).to(torch.uint8), stable=True)
    layer, other = make_layer(), make_layer()
    for each in (layer, other):
        each.on_task_start(2)
    x, tags = batch(0)[order], tags_of(12, 4)
    with batch_tags(BatchTags(tags.replayed[order], tags.task[order])):
        mixed = layer(x)
    with batch_tags(tags):
        sorted_batch = other(x[stream_first])
    torch.testing.assert_close(mixed[stream_first], sorted_batch)
    torch.testing.assert_close(layer.running_var, other.running_var)


@pytest.mark.parametrize(("task", "stream", "memory"), [(0, 12, 4), (3, 16, 0), (3, 0, 16), (3, 15, 1)])
def test_one_part_is_batch_norm(task: int, stream: int, memory: int) -> None:
    """In the first task, without memory samples, and where the counts have no common divisor, as in a last batch."""
    layer, stock = make_layer(), nn.BatchNorm2d(2, dtype=torch.float64)
    stock.load_state_dict(layer.state_dict(), strict=False)
    layer.on_task_start(task)
    with batch_tags(tags_of(stream, memory)):
        assert torch.equal(layer(batch(0)), stock(batch(0)))
    assert torch.equal(layer.running_var, stock.running_var)
    assert torch.equal(layer.eval()(batch(1)), stock.eval()(batch(1)))


def test_number_of_past_tasks_is_in_the_state_dict() -> None:
    layer, other = make_layer(), make_layer()
    layer.on_task_start(2)
    other.load_state_dict(layer.state_dict())
    assert other.parts(12, 4) == copy.deepcopy(layer).parts(12, 4) == 4
    other.load_state_dict(make_layer().state_dict())
    assert other.parts(12, 4) == 1


def test_conversion_to_and_from_batch_norm() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2))
    old = model[0]
    layer: Any = cn.convert_norm(model, "tbbn")[0]
    assert type(layer) is cn.TaskBalancedNorm2d and layer.running_mean is old.running_mean
    layer.on_task_start(2)
    again: Any = cn.convert_norm(nn.Sequential(layer), "tbbn", momentum=0.3)[0]
    assert again.past_tasks is layer.past_tasks and again.parts(12, 4) == 4 and again.momentum == 0.3
    back: Any = cn.convert_norm(nn.Sequential(layer), "bn")[0]
    assert back.weight is old.weight and set(back.state_dict()) == set(old.state_dict())
