"""Conformance tests: every norm of the registry in every mode that torch's BatchNorm has.

A norm added to the registry needs no new test, only a formula in `tests/float64_norms.py`. Features that a norm does
not support are declared in its registry entry (`cannot`), with the reason, and the tests check that they fail.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from contnorm.moments.freeze import freeze_stats, frozen_stats
from contnorm.registry import NORMS, NormSpec, create_norm
from tests.contracts.conformance import (
    CHANNELS,
    SHAPES,
    close,
    data,
    f64,
    make,
    reference_eval,
    reference_train,
    setting,
)
from tests.float64_norms import FLOAT64_NORMS

# float64 formulas against float32 arithmetic on values of order 1: a few units in the last place of a sum.
FLOAT32 = 2e-6
# Every norm, and continual normalization also with the implementation that `auto` does not select in training.
EXAMINED = {**NORMS, "cn-analytic": replace(NORMS["cn"], preset={"kernel": "analytic"})}
MOMENTS = {name: spec for name, spec in EXAMINED.items() if spec.keeps_moments}

every_norm = pytest.mark.parametrize("spec", EXAMINED.values(), ids=EXAMINED)
every_moment_norm = pytest.mark.parametrize("spec", MOMENTS.values(), ids=MOMENTS)
every_rank = pytest.mark.parametrize("rank", SHAPES)


def refuses_rank(spec: NormSpec, rank: int) -> bool:
    """If a norm declares a rank as unsupported, check that it raises."""
    if f"rank{rank}" not in spec.cannot:
        return False
    with pytest.raises(ValueError, match="one value per"):
        make(spec, rank)(data(rank).float())
    return True


@every_norm
def test_has_a_float64_reference(spec: NormSpec) -> None:
    assert spec.name in FLOAT64_NORMS, f"write the float64 formula of {spec.name!r} in tests/float64_norms.py"


# --- values ---------------------------------------------------------------------------------------------------


@every_rank
@every_norm
def test_training_matches_the_formula(spec: NormSpec, rank: int, device: torch.device) -> None:
    if refuses_rank(spec, rank):
        return
    layer, x = make(spec, rank).to(device), data(rank).float().to(device)
    expected, mean, var = reference_train(spec, layer, x)
    close(layer(x), expected, FLOAT32)
    if spec.keeps_moments:
        fresh = make(spec, rank).to(device)
        old = f64(fresh.running_mean), f64(fresh.running_var)
        moved = FLOAT64_NORMS[spec.name].moved(old, (mean, var), fresh.momentum)  # type: ignore[union-attr]
        close(layer.running_mean, moved[0], FLOAT32)
        close(layer.running_var, moved[1], FLOAT32)


@every_rank
@every_norm
def test_evaluation_matches_the_formula(spec: NormSpec, rank: int, device: torch.device) -> None:
    if refuses_rank(spec, rank):
        return
    layer = make(spec, rank).to(device)
    for seed in range(3):
        layer(data(rank, seed).float().to(device))
    layer.eval()
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    x = data(rank, seed=9).float().to(device)
    close(layer(x), reference_eval(spec, layer, x), FLOAT32)
    for name, buffer in layer.named_buffers():
        torch.testing.assert_close(buffer, before[name], rtol=0, atol=0)


@every_rank
@every_norm
def test_works_without_affine_or_tracking(spec: NormSpec, rank: int, device: torch.device) -> None:
    if refuses_rank(spec, rank) or spec.name == "none":
        return
    options = {"affine": False} | ({"track_running_stats": False} if spec.keeps_moments else {})
    layer, x = make(spec, rank, **options).to(device), data(rank).float().to(device)
    assert layer.weight is None and layer.bias is None
    expected = reference_train(spec, layer, x)[0]
    close(layer(x), expected, FLOAT32)
    close(layer.eval()(x), expected, FLOAT32)
    if spec.keeps_moments:
        assert layer.running_mean is None and layer.num_batches_tracked is None


@every_moment_norm
def test_moments_with_any_momentum(spec: NormSpec, device: torch.device) -> None:
    for momentum in (0.0, 0.3, 1.0, None):
        layer = make(spec, momentum=momentum).to(device)
        reference: Any = FLOAT64_NORMS[spec.name]
        expected = f64(layer.running_mean), f64(layer.running_var)
        for seed in range(4):
            x = data(seed=seed).float().to(device)
            _, mean, var = reference_train(spec, layer, x)
            expected = reference.moved(expected, (mean, var), 1 / (seed + 1) if momentum is None else momentum)
            layer(x)
        close(layer.running_mean, expected[0], FLOAT32)
        close(layer.running_var, expected[1], FLOAT32)
        assert layer.num_batches_tracked.item() == 4
    with torch.no_grad():
        layer.reset_running_stats()
    assert layer.num_batches_tracked.item() == 0
    torch.testing.assert_close(layer.running_mean, torch.zeros(CHANNELS, device=device))


@every_moment_norm
def test_tracking_disabled_after_construction(spec: NormSpec, device: torch.device) -> None:
    """Other tools set the flag on an existing layer: training then uses the batch and updates nothing."""
    layer, x = make(spec).to(device), data().float().to(device)
    layer(x)
    before = copy.deepcopy(layer.state_dict())
    layer.track_running_stats = False
    close(layer(x), reference_train(spec, layer, x)[0], FLOAT32)
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    close(layer.eval()(x), reference_eval(spec, layer, x), FLOAT32)


# --- layouts, types, sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("rank", [4, 5])
@every_norm
def test_channels_last_is_kept_and_equal(spec: NormSpec, rank: int, training: bool, device: torch.device) -> None:
    layout = torch.channels_last if rank == 4 else torch.channels_last_3d
    results = []
    for memory_format in (torch.contiguous_format, layout):
        layer = make(spec, rank).to(device).train(training)
        x = data(rank).float().to(device).to(memory_format=memory_format).requires_grad_()
        y = layer(x)
        assert y.is_contiguous(memory_format=memory_format)
        y.backward(data(rank, seed=5).float().to(device))
        results.append([y, x.grad, *(p.grad for p in layer.parameters())])
    for plain, last in zip(*results, strict=True):
        torch.testing.assert_close(last, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("rank", [4, 5])
@every_norm
def test_affine_gradients_for_input_without_gradient(
    spec: NormSpec, rank: int, training: bool, device: torch.device
) -> None:
    """As after a frozen network. In channels_last layout, torch's group norm would crash on a CPU."""
    layout = torch.channels_last if rank == 4 else torch.channels_last_3d
    results = []
    for needed in (True, False):
        layer = make(spec, rank).to(device).train(training)
        if not any(True for _ in layer.parameters()):
            return
        y = layer(data(rank).float().to(device).to(memory_format=layout).requires_grad_(needed))
        assert y.is_contiguous(memory_format=layout)
        y.backward(data(rank, seed=5).float().to(device))
        results.append([y, *(p.grad for p in layer.parameters())])
    for expected, outcome in zip(*results, strict=True):
        torch.testing.assert_close(outcome, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@every_norm
def test_dtypes_with_statistics_in_float32_or_better(
    spec: NormSpec, training: bool, dtype: torch.dtype, device: torch.device
) -> None:
    layer = make(spec).to(device).train(training)
    if dtype == torch.float64:
        layer.double()
    x = data().to(dtype).to(device)  # the reference gets the rounded input, so that only the arithmetic is tested
    expected = reference_train(spec, layer, x) if training else (reference_eval(spec, layer, x), None, None)
    old = (f64(layer.running_mean), f64(layer.running_var)) if spec.keeps_moments else None
    y = layer(x)
    assert y.dtype == dtype
    # One rounding of the result in its own type; statistics add float32 errors only.
    close(y, expected[0], {torch.float64: 1e-12, torch.float32: FLOAT32}.get(dtype, torch.finfo(dtype).eps))
    if training and old is not None:
        moved = FLOAT64_NORMS[spec.name].moved(old, expected[1:], layer.momentum)  # type: ignore[union-attr]
        assert layer.running_mean.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        close(layer.running_mean, moved[0], FLOAT32)
        close(layer.running_var, moved[1], FLOAT32)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_norm
def test_whole_layer_in_half_precision(
    spec: NormSpec, dtype: torch.dtype, momentum: float | None, device: torch.device
) -> None:
    options = {"momentum": momentum} if spec.keeps_moments else {}
    layer, x = make(spec, **options).to(device, dtype), data().to(device, dtype)
    for training in (True, False):
        y = layer.train(training)(x)
        assert y.dtype == dtype
        expected = reference_train(spec, layer, x)[0] if training else reference_eval(spec, layer, x)
        close(y, expected, 2 * torch.finfo(dtype).eps)


@every_norm
def test_autocast_dtype_is_that_of_batch_norm(spec: NormSpec, device: torch.device) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        layer, x = make(spec).to(device), data().to(device, dtype).requires_grad_()
        with torch.autocast(device.type, torch.bfloat16):
            y, stock = layer(x), nn.BatchNorm2d(CHANNELS).to(device)(x)
        assert y.dtype == stock.dtype
        close(y, reference_train(spec, layer, x)[0], torch.finfo(dtype).eps + FLOAT32)
        y.sum().backward()
        assert x.grad is not None and x.grad.dtype == dtype


@every_norm
def test_large_mean_is_exact(spec: NormSpec, device: torch.device) -> None:
    """Mean 1e4, standard deviation 1e-2: fails for any arithmetic with cancellation."""
    for training in (True, False):
        layer, exact = make(spec).to(device), make(spec).to(device).double()
        x = (torch.randn(SHAPES[4], generator=torch.Generator().manual_seed(3)) * 1e-2 + 1e4).to(device)
        dy = data(seed=4).to(device)
        if not training:
            for each in (layer, exact):
                each.train()(x.to(next(each.parameters(), x).dtype))
            if spec.keeps_moments:  # from the same moments: those of the float32 layer, as they are
                exact.load_state_dict(layer.state_dict())
        layer.train(training), exact.train(training)
        wide = x.double()
        if spec.name == "none":
            close(layer(x), x, 0.0)
            continue
        expected = reference_train(spec, exact, wide)[0] if training else reference_eval(spec, exact, wide)
        inputs = [t.clone().requires_grad_() for t in (x, wide)]
        outputs = [layer(inputs[0]), exact(inputs[1])]
        if "large_mean" in spec.cannot:
            # Torch's operator. If it becomes accurate, remove the declaration.
            error = (outputs[0].detach().double().cpu() - expected).abs().max().item()
            assert error > 1e-3, f"{spec.name} now gets large means right: take 'large_mean' off its row"
            return
        close(outputs[0], expected, 1e-5)
        close(outputs[1], expected, 1e-9)
        outputs[0].backward(dy.float()), outputs[1].backward(dy)
        scale = inputs[1].grad.abs().max()
        close(inputs[0].grad / scale, inputs[1].grad / scale, 1e-5)
        for a, b in zip(layer.parameters(), exact.parameters(), strict=True):
            size = b.grad.abs().max().clamp_min(1)
            close(a.grad / size, b.grad / size, 1e-5)
        for a, b in zip(layer.buffers(), exact.buffers(), strict=True):
            torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-5)


@every_rank
@every_norm
def test_batch_of_one(spec: NormSpec, rank: int, device: torch.device) -> None:
    if refuses_rank(spec, rank):
        return
    layer, x = make(spec, rank).to(device), data(rank, size=1).float().to(device)
    if rank == 2 and spec.keeps_moments:
        with pytest.raises(ValueError, match="Expected more than 1 value") as stock:
            nn.BatchNorm1d(CHANNELS).to(device)(x)
        message = re.escape(f"{type(layer).__name__}: {stock.value}")  # torch's message, with our name
        with pytest.raises(ValueError, match=message):
            layer(x)
        assert layer.num_batches_tracked.item() == 0
    else:
        close(layer(x), reference_train(spec, layer, x)[0], FLOAT32)
    close(layer.eval()(x), reference_eval(spec, layer, x), FLOAT32)


@every_norm
def test_maps_of_one_position(spec: NormSpec, device: torch.device) -> None:
    """A (N, C, 1, 1) input is an (N, C) input in another shape."""
    flat, square = make(spec, 2).to(device), make(spec, 4).to(device)
    x = data(2).float().to(device)
    if "rank2" in spec.cannot:
        with pytest.raises(ValueError, match="one value per"):
            square(x[:, :, None, None])
        return
    torch.testing.assert_close(square(x[:, :, None, None])[:, :, 0, 0], flat(x), rtol=1e-6, atol=1e-6)


@every_rank
@every_norm
def test_empty_batch_changes_nothing(spec: NormSpec, rank: int, device: torch.device) -> None:
    layer, x = make(spec, rank).to(device), data(rank, size=0).float().to(device).requires_grad_()
    before = copy.deepcopy(layer.state_dict())
    for training in (True, False):
        y = layer.train(training)(x)
        assert y.shape == x.shape and y.dtype == x.dtype
        y.sum().backward()
    for parameter in layer.parameters():
        torch.testing.assert_close(parameter.grad, torch.zeros_like(parameter))
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@every_norm
def test_nan_stays_visible(spec: NormSpec, training: bool, device: torch.device) -> None:
    layer, x = make(spec).to(device).train(training), data().float().to(device)
    for place in ((0, 0, 0, 0), (2, 5, 3, 1)):  # a value used for the pivot, and one that is not
        bad = x.clone()
        bad[place] = float("nan")
        y = layer(bad)
        assert y[place].isnan()
        if spec.keeps_moments and training:
            assert layer.running_mean[place[1]].isnan() and layer.running_var[place[1]].isnan()
        if training and spec.keeps_moments:
            layer.reset_running_stats()


# --- derivatives ----------------------------------------------------------------------------------------------


def differentiable(layer: nn.Module, spec: NormSpec) -> Any:
    names = [name for name, _ in layer.named_parameters()]

    def function(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        with frozen_stats(layer):
            result: torch.Tensor = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))
        return result

    return function


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("rank", [2, 3, 4])
@every_norm
def test_first_and_second_derivatives(spec: NormSpec, rank: int, training: bool, device: torch.device) -> None:
    if refuses_rank(spec, rank):
        return
    # r and d of BRN have no gradient; at the start of the schedule they are 1 and 0, so the numeric gradient agrees.
    layer = make(spec, rank).to(device).double()
    layer(data(rank, seed=8).to(device))
    layer.train(training)
    # Small slices: the numeric Jacobian costs a forward for each number.
    x = data(rank).to(device)[:3, ..., :2] if rank > 2 else data(rank).to(device)[:4]
    if rank == 4:
        x = x[:, :, :2]
    x = x.clone().requires_grad_()
    values = tuple(p.detach().clone().requires_grad_() for p in layer.parameters())
    function = differentiable(layer, spec)
    assert torch.autograd.gradcheck(function, (x, *values))
    assert torch.autograd.gradgradcheck(function, (x, *values))


# --- as a module ---------------------------------------------------------------------------------------------


@every_norm
def test_copies_and_pickles_are_equal(spec: NormSpec, device: torch.device) -> None:
    layer, x = make(spec).to(device), data().float().to(device)
    layer(x)
    freeze_stats(layer)
    expected = layer(x)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    twins = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)]
    for twin in twins:
        torch.testing.assert_close(twin(x), expected, rtol=0, atol=0)
        assert repr(twin) == repr(layer)
        for (name, a), b in zip(layer.state_dict().items(), twin.state_dict().values(), strict=True):
            assert a.data_ptr() != b.data_ptr(), name
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@every_moment_norm
def test_state_dict_is_compatible_with_batch_norm(spec: NormSpec, device: torch.device) -> None:
    stock, ours = nn.BatchNorm2d(CHANNELS).to(device), make(spec).to(device)
    stock(data().float().to(device))
    if "batch_norm_keys" in spec.cannot:
        with pytest.raises(RuntimeError, match="Missing key"):
            ours.load_state_dict(stock.state_dict())
        with pytest.raises(RuntimeError, match="Unexpected key"):
            stock.load_state_dict(ours.state_dict())
        return
    assert list(ours.state_dict()) == list(stock.state_dict())
    ours.load_state_dict(stock.state_dict())
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, stock.state_dict()[name], rtol=0, atol=0)
    other = nn.BatchNorm2d(CHANNELS).to(device)
    other.load_state_dict(ours.state_dict())
    torch.testing.assert_close(other.running_var, stock.running_var, rtol=0, atol=0)


@every_norm
def test_to_moves_all_tensors(spec: NormSpec) -> None:
    layer = make(spec).to(torch.float64)
    assert {t.dtype for t in layer.state_dict().values()} <= {torch.float64, torch.int64}
    layer.to("meta")
    assert {t.device.type for t in (*layer.parameters(), *layer.buffers())} <= {"meta"}
    assert layer(torch.empty(SHAPES[4], device="meta", dtype=torch.float64)).shape == SHAPES[4]


@every_norm
def test_constructed_with_device_and_dtype(spec: NormSpec) -> None:
    layer = make(spec, device="meta", dtype=torch.float64)
    for tensor in (*layer.parameters(), *layer.buffers()):
        assert tensor.device.type == "meta"
    assert all(parameter.dtype == torch.float64 for parameter in layer.parameters())


@every_norm
def test_repr_shows_class_and_options(spec: NormSpec) -> None:
    shown = repr(make(spec))
    assert str(CHANNELS) in shown
    assert not spec.grouped or "num_groups=2" in shown
    assert all(f"{key}={value!r}" in shown for key, value in spec.preset.items())


@every_norm
def test_functional_call_with_other_parameters(spec: NormSpec, device: torch.device) -> None:
    layer, x = make(spec).to(device), data().float().to(device)
    other = {name: p * 2 for name, p in layer.named_parameters()}
    expected = make(spec).to(device)
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(torch.func.functional_call(layer, other, (x,)), expected(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("training", [True, False], ids=["untracked", "eval"])
@every_norm
def test_vmap_over_an_ensemble_and_its_gradients(spec: NormSpec, training: bool, device: torch.device) -> None:
    options = {"track_running_stats": False} if training and spec.keeps_moments else {}
    layers = [make(spec, **options).to(device).train(training) for _ in range(3)]
    for i, layer in enumerate(layers):
        with torch.no_grad():
            for tensor in (*layer.parameters(), *(b for b in layer.buffers() if b.is_floating_point())):
                tensor.add_(0.1 * i)
    parameters, buffers = torch.func.stack_module_state(layers) if list(layers[0].parameters()) else ({}, {})
    batches = torch.stack([data(seed=i).float() for i in range(3)]).to(device)
    slope = data(seed=20).float().to(device)

    def loss(parameters: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.func.functional_call(layers[0], (parameters, buffers), (x,))
        return (y * slope).sum()

    together = torch.func.vmap(torch.func.grad(loss, argnums=2), in_dims=(0, 0, 0))(parameters, buffers, batches)
    for i, layer in enumerate(layers):
        x = batches[i].clone().requires_grad_()
        (layer(x) * slope).sum().backward()
        torch.testing.assert_close(together[i], x.grad, rtol=1e-4, atol=1e-5)


@every_moment_norm
def test_frozen_moments_do_not_change_in_any_mode(spec: NormSpec, device: torch.device) -> None:
    layer, x = make(spec).to(device), data().float().to(device)
    layer(x)
    before = copy.deepcopy(layer.state_dict())
    freeze_stats(layer)
    for mode in (True, False, True):
        layer.train(mode)(data(seed=3).float().to(device))
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="frozen and can't be reset"):
        layer.reset_running_stats()
    freeze_stats(layer, False)
    layer(data(seed=3).float().to(device))
    assert layer.num_batches_tracked.item() == 2
    assert not torch.equal(layer.running_mean, before["running_mean"])


@every_moment_norm
def test_use_running_normalizes_with_constants(spec: NormSpec, device: torch.device) -> None:
    """`use_running`, the conversion of FrozenBatchNorm2d: training equals evaluation, and nothing is updated."""
    layer, x = make(spec).to(device), data().float().to(device)
    layer(x)
    before = copy.deepcopy(layer.state_dict())
    layer.use_running = True
    close(layer.train()(x), reference_eval(spec, layer, x), FLOAT32)
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@every_moment_norm
def test_batch_that_raises_is_not_counted(spec: NormSpec) -> None:
    layer = make(spec, 2, **({"num_groups": CHANNELS} if spec.grouped else {}))
    bad = [torch.zeros(1, CHANNELS), torch.zeros(3, CHANNELS + 1), torch.zeros(3, CHANNELS, dtype=torch.int64)]
    for x in bad + ([torch.randn(4, CHANNELS)] if spec.grouped else []):
        with pytest.raises(ValueError, match=type(layer).__name__):
            layer(x)
    assert layer.num_batches_tracked.item() == 0
    assert torch.equal(layer.running_mean, torch.zeros(CHANNELS))


@every_moment_norm
def test_update_bn_updates_the_moments(spec: NormSpec, device: torch.device) -> None:
    """`swa_utils.update_bn` computes the plain average over the loader, and restores momentum."""
    model = nn.Sequential(make(spec)).to(device)
    batches = [data(seed=seed).float().to(device) for seed in range(3)]
    torch.optim.swa_utils.update_bn(batches, model, device=device)
    outcome = [reference_train(spec, model[0], x)[1:] for x in batches]
    close(model[0].running_mean, np.mean([mean for mean, _ in outcome], axis=0), FLOAT32)
    assert model[0].num_batches_tracked.item() == 3
    assert model[0].momentum == make(spec).momentum


# --- compiled and exported ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.1, None])
@every_norm
def test_compiles_as_one_graph(spec: NormSpec, momentum: float | None, device: torch.device) -> None:
    """No graph break in forward and backward, including moments; test_parity compiles CN with the default backend."""
    if momentum is None and not spec.keeps_moments:
        return
    torch._dynamo.reset()
    options = {"momentum": momentum} if spec.keeps_moments else {}
    plain, twin = make(spec, **options).to(device), make(spec, **options).to(device)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for training in (True, False):
        results = []
        for module, layer in ((plain, plain), (compiled, twin)):
            layer.train(training).zero_grad()
            x = data().float().to(device).requires_grad_()
            y = module(x)
            (y * data(seed=2).float().to(device)).sum().backward()
            results.append([y, x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()])
        for expected, actual in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@every_norm
def test_torch_export_with_a_dynamic_batch(spec: NormSpec, device: torch.device) -> None:
    layer = make(spec).to(device)
    layer(data().float().to(device))
    layer.eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(layer, (data().float().to(device),), dynamic_shapes=({0: batch},))
    x = data(seed=1, size=7).float().to(device)
    torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@every_norm
def test_onnxruntime_reproduces_the_export(spec: NormSpec) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    layer = make(spec)
    layer(data().float())
    layer.eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.onnx.export(layer, (data().float(),), dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    assert program is not None
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for size in (2, 7):
        x = data(seed=1, size=size).float()
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        close(torch.from_numpy(y), reference_eval(spec, layer, x), 1e-5)


# --- bad input ------------------------------------------------------------------------------------------------


@every_norm
def test_wrong_input_raises(spec: NormSpec) -> None:
    layer = make(spec)
    name = type(layer).__name__
    with pytest.raises(
        ValueError, match=rf"{name}: expected an input of shape \(N, C, H, W\), got \(6, 8\). Use {name[:-2]}1d"
    ):
        layer(data(2).float())
    with pytest.raises(ValueError, match=rf"{name}: built for 8 channels, got an input of shape \(2, 3, 4, 4\) with 3"):
        layer(torch.zeros(2, 3, 4, 4))
    with pytest.raises(
        ValueError, match=rf"{name}: expected float16, bfloat16, float32 or float64 input, got torch.int64"
    ):
        layer(torch.zeros(2, 8, 4, 4, dtype=torch.int64))
    for dtype in (torch.complex64, torch.float8_e4m3fn, torch.bool):
        with pytest.raises(ValueError, match=rf"{name}: expected float16, .* got {dtype}"):
            layer(torch.zeros(2, 8, 4, 4).to(dtype))
    for layout in (torch.zeros(2, 8, 4, 4).to_sparse(), torch.nested.nested_tensor([torch.zeros(8, 4, 4)] * 2)):
        with pytest.raises(ValueError, match=rf"{name}: expected a dense input"):
            layer(layout)
    for other in (None, [1.0], np.zeros((2, 8, 4, 4), np.float32)):
        with pytest.raises(TypeError, match=rf"{name}: expected a torch\.Tensor as input, got {type(other).__name__}"):
            layer(other)


@every_moment_norm
def test_layers_without_batch_counter_match_torch(spec: NormSpec) -> None:
    """Torch's batch norm accepts a counter of None: moments are updated, and nothing is counted."""
    layer, twin, x = make(spec), make(spec), data().float()
    layer.num_batches_tracked = None
    close(layer(x), twin(x), 0.0)
    assert torch.equal(layer.running_mean, twin.running_mean)
    cumulative = make(spec, momentum=None)
    cumulative.num_batches_tracked = None
    with pytest.raises(ValueError, match=f"{type(layer).__name__}: momentum=None averages"):
        cumulative(x)


@every_norm
def test_autocast_dtype_different_from_input(spec: NormSpec, device: torch.device) -> None:
    layer, twin = make(spec).to(device), make(spec).to(device)
    for tensors, lower in ((torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)):
        x = data().to(device, tensors)
        with torch.autocast(device.type, lower):
            y = layer(x)
        assert y.dtype == tensors
        close(y, twin(x), 4 * torch.finfo(tensors).eps)


@every_norm
def test_wrong_arguments_raise(spec: NormSpec) -> None:
    name = type(make(spec)).__name__
    with pytest.raises(ValueError, match=rf"{name}: num_features=0 must be a whole number of channels"):
        create_norm(spec.name, 0)
    if spec.name != "none":
        with pytest.raises(ValueError, match=rf"{name}: eps=-1e-05 must be 0 or more"):
            make(spec, eps=-1e-5)
        with pytest.raises(ValueError, match=rf"{name}: eps='small' must be 0 or more"):
            make(spec, eps="small")
    if spec.keeps_moments:
        with pytest.raises(ValueError, match=rf"{name}: momentum=1.5 must lie in \[0, 1\]"):
            make(spec, momentum=1.5)
        with pytest.raises(ValueError, match=rf"{name}: momentum='slow' must lie in \[0, 1\]"):
            make(spec, momentum="slow")
    if spec.grouped:
        with pytest.raises(ValueError, match=rf"{name}: num_groups=3 does not divide the 8 channels.*: 1, 2, 4, 8"):
            make(spec, num_groups=3)


def test_float64_references_have_all_parameters() -> None:
    """The reference gets each parameter of each norm; add a new kind of parameter to `setting`."""
    for spec in NORMS.values():
        layer = make(spec)
        known = {"weight", "bias", *setting(layer, spec).extra}
        assert {name for name, _ in layer.named_parameters()} <= known
