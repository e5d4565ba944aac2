"""Re-estimated moments (BN*) equal those of one training-mode forward over all data with momentum 1."""

import contextvars
import copy
import gc
import pickle
import weakref
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import contnorm as cn
from contnorm.moments.pooling import NonFiniteMomentsError
from contnorm.moments.reestimate import Reestimated
from tests.models import FrozenBatchNorm2d, ResNet, ScaledBatchNorm2d, UnknownNorm

VARIABLE = contextvars.ContextVar("VARIABLE", default=0)


def batches(sizes: tuple[int, ...] = (10, 10, 7, 3), shape: tuple[int, ...] = (3, 16, 16)) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    return [torch.randn(n, *shape, generator=g) * (1 + i) + i for i, n in enumerate(sizes)]


def giant(model: nn.Module, data: list[Tensor]) -> dict[str, Tensor]:
    """The definition of the exact moments: one forward over all data."""
    twin = copy.deepcopy(model).train()
    for module in twin.modules():
        if hasattr(module, "running_mean"):
            module.momentum = 1.0
    with torch.no_grad():
        twin(torch.cat(data))
    return {name: b for name, b in twin.named_buffers() if "running" in name}


def check(model: nn.Module, data: list[Tensor], tolerance: float = 1e-5) -> Reestimated:
    expected = giant(model, data)
    done = cn.reestimate(model, data)
    for name, buffer in model.named_buffers():
        if "running" in name:
            torch.testing.assert_close(buffer, expected[name], rtol=tolerance, atol=tolerance)
    return done


def trained() -> nn.Module:
    torch.manual_seed(0)
    model = ResNet()
    for _ in range(3):
        model(torch.randn(8, 3, 16, 16))
    return model


@pytest.mark.parametrize("norm", [None, "bn", "cn", "bn_gn", "cn_tied", "bn_gn_tied"])
def test_reestimate_equals_one_forward_over_all_data(norm: str | None) -> None:
    model = trained()
    if norm:
        cn.convert_norm(model, norm, **({} if norm == "bn" else {"num_groups": 4}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    assert len(check(model, batches()).moments) == 20


@pytest.mark.parametrize("norm", ["brn", "sn", "bnt", "iabn", "rbn"])
def test_reestimate_norms_with_other_moments(norm: str) -> None:
    """BRN with r = 1 and d = 0; SN has its own batch variance, and IABN normalizes with the unbiased one."""
    model = cn.convert_norm(trained(), norm, eps=1e-3)
    check(model, batches())


def test_reestimate_changes_only_moments() -> None:
    model = trained()
    model.stages[1].eval()
    model.stem[0].weight.grad = torch.ones_like(model.stem[0].weight)
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    random = torch.random.get_rng_state()
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    cn.reestimate(model, batches())
    assert [m.training for m in model.modules()] == modes
    assert [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()] == hooks
    assert torch.equal(torch.random.get_rng_state(), random)
    assert torch.equal(model.stem[0].weight.grad, torch.ones_like(model.stem[0].weight))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == ("running" not in name), name


def test_context_manager_restores_the_old_moments() -> None:
    model = trained()
    before = copy.deepcopy(model.state_dict())
    with cn.reestimate(model, batches()) as done:
        assert not torch.equal(model.stem[1].running_mean, before["stem.1.running_mean"])
        inside = model.stem[1].running_mean.clone()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(done.moments["stem.1"].new_mean, inside)
    assert torch.equal(done.moments["stem.1"].old_mean, before["stem.1.running_mean"])


class Passes:
    """Data that counts how often it is iterated."""

    def __init__(self, data: list[Tensor]) -> None:
        self.data, self.count = data, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.count += 1
        return iter(self.data)


class Counting(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x


@pytest.mark.parametrize(("wrap", "runs"), [(list, (3, 3, 3)), (Passes, (1 + 3 + 3, 1 + 3, 1))])
def test_batches_are_read_once_or_in_passes_that_stop_at_a_layer(wrap: Any, runs: tuple[int, ...]) -> None:
    first, second, last = Counting(), Counting(), Counting()
    model = nn.Sequential(first, nn.BatchNorm1d(4), second, nn.BatchNorm1d(4), last)
    cn.reestimate(model, wrap(batches((5, 5, 5), (4,))))
    assert (first.runs, second.runs, last.runs) == runs


@pytest.mark.parametrize("norm", ["bn", "cn", "sn"])
@pytest.mark.parametrize("sizes", [(30,), (10, 10, 7, 3)])
def test_one_sweep_gives_the_bits_of_the_passes(norm: str, sizes: tuple[int, ...]) -> None:
    swept, passed = trained(), trained()
    groups = {"num_groups": 4} if norm == "cn" else {}
    cn.convert_norm(swept, norm, **groups)
    cn.convert_norm(passed, norm, **groups)
    passed.load_state_dict(swept.state_dict())
    data = batches(sizes)
    cn.reestimate(swept, data)
    cn.reestimate(passed, Passes(data))  # of unknown length, so one pass for each layer
    for name, value in swept.state_dict().items():
        assert torch.equal(value, passed.state_dict()[name]), name


class ByBatchSize(nn.Module):
    """The order of the two norms depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        layers = [self.one, self.two] if len(x) == 10 else [self.two, self.one]
        return sum(layer(x) for layer in layers)


def test_batches_that_call_layers_in_another_order_are_read_in_passes() -> None:
    data = batches((10, 7), (4,))
    model = ByBatchSize()
    cn.reestimate(model, data)
    for layer in (model.one, model.two):
        torch.testing.assert_close(layer.running_mean, torch.cat(data).mean(0))
        torch.testing.assert_close(layer.running_var, torch.cat(data).var(0))


def test_sweep_without_room_for_all_batches_reads_them_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("contnorm.moments.reestimate._free_memory", lambda model, processes: 0)
    check(trained(), batches())


def test_sweep_keeps_the_modes_and_context_of_the_caller() -> None:
    seen = []

    def call(model: nn.Module, batch: Tensor) -> None:
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.empty(0).is_meta, VARIABLE.get()))
        model(batch)

    model, data = nn.BatchNorm1d(4), batches((5, 5), (4,))
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        contextvars.Context().run(lambda: (VARIABLE.set(3), cn.reestimate(model, data, call=call)))
    assert seen == [(True, False, True, 3)] * 2


class Siamese(nn.Module):
    """One norm called twice on different inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.after = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.norm(x) + self.norm(3 * x + 1))
        return y


def test_layer_called_twice_pools_its_calls() -> None:
    model, data = Siamese(), batches((20, 11), (4,))
    passes = Passes(data)
    cn.reestimate(model, passes)
    whole = torch.cat(data)
    pooled = torch.cat([whole, 3 * whole + 1])
    torch.testing.assert_close(model.norm.running_mean, pooled.mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.norm.running_var, pooled.var(0), rtol=1e-5, atol=1e-5)
    z = (pooled - pooled.mean(0)) / (pooled.var(0, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(model.after.running_mean, (z[:31] + z[31:]).mean(0), rtol=1e-4, atol=1e-5)
    assert passes.count == 3


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data() -> None:
    """At most one batch is alive when the next one is requested."""
    alive: list[weakref.ref[Tensor]] = []

    class Fresh:
        def __iter__(self) -> Iterator[Tensor]:
            for seed in range(4):
                gc.collect()
                assert sum(ref() is not None for ref in alive) <= 1
                batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
                alive.append(weakref.ref(batch))
                yield batch
                del batch

    cn.reestimate(nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4)), Fresh())
    assert len(alive) == 8


def test_dropout_is_off_and_unreached_layers_keep_their_moments() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.9), nn.BatchNorm2d(4))
    twin = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Identity(), nn.BatchNorm2d(4))
    twin.load_state_dict(model.state_dict())
    expected = giant(twin, batches())
    model[0].idle = nn.BatchNorm1d(4)
    assert list(cn.reestimate(model, batches()).moments) == ["1", "3"]
    torch.testing.assert_close(model[3].running_var, expected["3.running_var"], rtol=1e-5, atol=1e-5)
    assert torch.equal(model[0].idle.running_var, torch.ones(4))


def test_instance_norms_with_running_statistics_normalize_instances() -> None:
    model = nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True), nn.ReLU(), nn.BatchNorm2d(3))
    model(batches()[2])
    own = model[0].running_mean.clone()
    expected = giant(model, batches())
    cn.reestimate(model, batches())
    torch.testing.assert_close(model[2].running_var, expected["2.running_var"], rtol=1e-5, atol=1e-5)
    assert torch.equal(model[0].running_mean, own) and not model[0]._forward_pre_hooks


def test_constant_layers_are_not_changed() -> None:
    model = nn.Sequential(FrozenBatchNorm2d(3), nn.BatchNorm2d(3))
    done = cn.reestimate(model, batches())
    assert list(done.moments) == ["1"] and torch.equal(model[0].running_mean, torch.full((3,), 0.3))


@pytest.mark.parametrize("stop_at", [1, 3, 9])
def test_interruption_restores_everything(stop_at: int) -> None:
    model = trained()
    before = copy.deepcopy(model.state_dict())
    calls = 0

    def interrupted(m: nn.Module, batch: Any) -> object:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise KeyboardInterrupt
        return m(batch)

    with pytest.raises(KeyboardInterrupt):
        cn.reestimate(model, Passes(batches()) if stop_at > 4 else batches(), call=interrupted)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("model", "data", "error"),
    [
        (nn.BatchNorm1d(4), iter(batches((3,), (4,))), TypeError),
        (nn.BatchNorm1d(4), torch.zeros(3, 4), TypeError),
        (nn.BatchNorm1d(4), [], ValueError),
        (nn.GroupNorm(2, 4), batches((3,), (4,)), ValueError),
        (ScaledBatchNorm2d(3), batches(), ValueError),
        (UnknownNorm(4), batches((3,), (4,)), ValueError),
        (nn.BatchNorm1d(4), [torch.zeros(0, 4)] * 3, ValueError),
        (nn.BatchNorm1d(4, track_running_stats=False), batches((3,), (4,)), ValueError),
    ],
)
def test_what_can_not_be_measured_raises(model: nn.Module, data: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="reestimate"):
        cn.reestimate(model, data)


@pytest.mark.parametrize(("norm", "value"), [(None, float("nan")), ("cn", -float("inf"))])
def test_non_finite_data_raises_and_model_is_unchanged(norm: str | None, value: float) -> None:
    model = trained()
    if norm:
        cn.convert_norm(model, norm, **({"num_groups": 4} if norm == "cn" else {}))
    data = batches()
    data[2][1, 0, 3, 3] = value
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NonFiniteMomentsError, match=r"layer 'stem\.1'.*NaN or infinite") as error:
        cn.reestimate(model, data)
    assert error.value.layer == "stem.1" and isinstance(error.value, ValueError)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_moments_that_overflow_the_buffer_dtype_raise() -> None:
    """Finite in float64 but not in float32; for a deeper layer, the first layer has already been written."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NonFiniteMomentsError, match="layer '0'"):
        cn.reestimate(model, [torch.tensor([[1e30, 0.0], [-1e30, 1.0]])])
    with torch.no_grad():
        model[1].weight.fill_(float("nan"))
    before["1.weight"].fill_(float("nan"))
    with pytest.raises(NonFiniteMomentsError, match="layer '2'"):
        cn.reestimate(model, [torch.randn(5, 2)])
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


def test_reestimate_works_with_a_compiled_model(capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    with cn.reestimate(model, [x]):
        plain = model[1].running_mean.clone()  # type: ignore[union-attr, operator]
    with cn.reestimate(torch.compile(model, backend="eager"), [x]):  # type: ignore[arg-type]
        torch.testing.assert_close(model[1].running_mean, plain)
    assert "dynamo" not in capfd.readouterr().err


def test_single_value_per_channel_raises() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match=r"one value per channel with a weight above 0 at layer '0'"):
        cn.reestimate(model, [torch.randn(1, 4), torch.randn(0, 4)])
    assert torch.equal(model[0].running_var, torch.ones(4))
    cn.reestimate(model, [torch.randn(1, 4), torch.randn(1, 4)])


# --- batches that are mappings: passed as keyword arguments ---------------------------------------------------------


class Classifier(nn.Module):
    """Takes a batch as the image models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, pixel_values: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        assert labels is None, "the labels are not needed"
        return {"features": self.norm(pixel_values if mask is None else pixel_values * mask)}


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel, lambda m: torch.compile(m, backend="eager")])
def test_mapping_is_passed_without_labels_and_other_keys(wrap: Any) -> None:
    x = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(3)) * 2 + 1
    task = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1])
    model = wrap(Classifier())
    batches = [
        UserDict({"pixel_values": x[part], "mask": torch.full((1, 1, 1, 1), 3.0), "labels": 1, "task": task[part]})
        for part in (slice(5), slice(5, 8))
    ]
    with cn.reestimate(model, batches) as done:
        torch.testing.assert_close(next(iter(done.moments.values())).new_mean, 3 * x.mean((0, 2, 3)))
    shares = torch.tensor([1 / 6, 1 / 2])
    with cn.reestimate(model, batches, weights=lambda batch: shares[batch["task"]]) as done:
        mean = 3 * (x[:6].mean((0, 2, 3)) + x[6:].mean((0, 2, 3))) / 2
        torch.testing.assert_close(next(iter(done.moments.values())).new_mean, mean)
