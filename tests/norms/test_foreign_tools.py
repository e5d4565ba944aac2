"""Tools of other libraries that look for batch norms by class, on layers that are more than a batch norm.

Each tool imitates the original: which layers it selects, and what it reads and sets.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

import contnorm as cn
from tests.models import BatchNormAct2d, FrozenBatchNorm2d

GUARDED = ("cn4", "bn_gn4", "cn_tied4", "brn", "sn", "bnt", "iabn", "rbn")
guarded = pytest.mark.parametrize("norm", GUARDED)


def network(norm: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        cn.create_norm(norm, 16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def batch(seed: int = 0) -> Tensor:
    return torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) * 2 + 1


# --- tools that fold or replace: they raise -------------------------------------------------------------------


class ConvNorm(nn.Sequential):
    """A convolution and its norm that can be folded into one, as in LevIT."""

    def fuse(self) -> nn.Conv2d:
        conv, norm = self
        scale = norm.weight / (norm.running_var + norm.eps) ** 0.5
        folded = nn.Conv2d(conv.in_channels, conv.out_channels, conv.kernel_size)
        folded.weight.data = conv.weight * scale[:, None, None, None]
        folded.bias.data = norm.bias + (conv.bias - norm.running_mean) * scale
        return folded


def reparameterize(model: nn.Module) -> None:
    for name, child in model.named_children():
        if hasattr(child, "fuse"):
            setattr(model, name, child.fuse())
        else:
            reparameterize(child)


def _fuse_bn_tensor(conv: nn.Conv2d, norm: nn.Module) -> Tensor:
    return conv.weight * (norm.weight / (norm.running_var + norm.eps).sqrt())[:, None, None, None]


def convert_splitbn_model(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return nn.BatchNorm2d(module.num_features, module.eps, module.momentum, module.affine)
    for name, child in module.named_children():
        module.add_module(name, convert_splitbn_model(child))
    return module


def freeze_batch_norm_2d(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.BatchNorm2d | nn.SyncBatchNorm):
        constant = FrozenBatchNorm2d(module.num_features)
        constant.running_mean, constant.running_var = module.running_mean, module.running_var
        constant.eps = module.eps
        return constant
    for name, child in module.named_children():
        module.add_module(name, freeze_batch_norm_2d(child))
    return module


@guarded
def test_folding_into_a_convolution_raises(norm: str) -> None:
    model = network(norm).eval()
    with pytest.raises(TypeError, match=r"fuse_conv_bn_eval .* plain batch norm"):
        fuse_conv_bn_eval(model[0], model[1])
    with pytest.raises(TypeError, match="_fuse_bn_tensor"):
        _fuse_bn_tensor(model[0], model[1])


@guarded
def test_tools_with_ambiguous_names_raise_in_known_libraries(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(norm).eval()
    block = nn.Sequential(ConvNorm(model[0], model[1]))
    monkeypatch.setitem(ConvNorm.fuse.__globals__, "__name__", "timm.models.levit")
    with pytest.raises(TypeError, match="fuse would treat"):
        reparameterize(block)
    assert isinstance(block[0], ConvNorm)


@guarded
def test_folding_into_a_linear_layer_raises(norm: str) -> None:
    with pytest.raises(TypeError, match="fuse_linear_bn_eval"):
        fuse_linear_bn_eval(nn.Linear(3, 16).eval(), cn.create_norm(norm, 16, dim=1).eval())


def test_folding_works_for_our_batch_norm() -> None:
    model = network("bn")
    model(batch())
    model.eval()
    folded = fuse_conv_bn_eval(model[0], model[1])
    torch.testing.assert_close(folded(batch(1)), model[:2](batch(1)), rtol=1e-4, atol=1e-4)
    block = nn.Sequential(ConvNorm(model[0], model[1]))
    reparameterize(block)
    torch.testing.assert_close(block(batch(1)), model[:2](batch(1)), rtol=1e-4, atol=1e-4)


def test_tools_that_would_drop_the_activation_of_a_batch_norm_raise() -> None:
    """A conversion gives the layer the activation of a norm-then-activation layer, which it applies in a hook."""
    model = cn.convert_norm(nn.Sequential(nn.Conv2d(3, 16, 1), BatchNormAct2d(16)), "bn").eval()
    assert isinstance(model[1], cn.BatchNorm2d) and model[1].eps == 1e-5
    with pytest.raises(TypeError, match=r"fuse_conv_bn_eval .* activation"):
        fuse_conv_bn_eval(model[0], model[1])
    with pytest.raises(TypeError, match=r"convert_sync_batchnorm .*contnorm\.convert_sync"):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)


@pytest.fixture
def quantization() -> Any:
    return pytest.importorskip("torch.ao.quantization", reason="this torch has no torch.ao.quantization")


def test_torch_fuse_modules_ignores_the_layers(quantization: Any) -> None:
    with pytest.raises((AssertionError, NotImplementedError)):
        quantization.fuse_modules(network("cn4").eval(), ["0", "1"])


@pytest.mark.parametrize(
    ("norm", "advice"),
    [("cn8", r"contnorm\.convert_sync"), ("brn", "convert it to 'bn'"), ("sn", "convert it to 'bn'")],
)
def test_torch_sync_conversion_raises_with_advice(norm: str, advice: str) -> None:
    model = network(norm)
    with pytest.raises(TypeError, match=f"convert_sync_batchnorm .*{advice}"):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert not isinstance(model[1], nn.SyncBatchNorm)


def test_torch_sync_conversion_works_for_our_batch_norm() -> None:
    assert isinstance(nn.SyncBatchNorm.convert_sync_batchnorm(network("bn"))[1], nn.SyncBatchNorm)


@guarded
def test_replacing_by_split_or_constant_batch_norm_raises(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(convert_splitbn_model.__globals__, "__name__", "timm.layers.split_batchnorm")
    layer = network(norm)[1]
    model = nn.Sequential(layer)
    with pytest.raises(TypeError, match="convert_splitbn_model"):
        convert_splitbn_model(model)
    with pytest.raises(TypeError, match=r"freeze_batch_norm_2d .* contnorm\.freeze_stats"):
        freeze_batch_norm_2d(model)
    assert model[0] is layer


def merge_models(model: nn.Module) -> list[float]:
    result = []
    for module in model.modules():
        if hasattr(module, "eps"):
            result.append(module.eps)
    return result


def convert_my_bn(layer: nn.Module) -> nn.Module:
    return nn.GroupNorm(4, layer.num_features, eps=layer.eps)


@guarded
def test_user_functions_with_similar_names_get_a_warning(norm: str) -> None:
    model = network(norm)
    with pytest.warns(UserWarning, match=r"merge_models reads eps .* more than a batch norm") as caught:
        assert merge_models(model) == [model[1].eps]
    assert all(warning.filename == __file__ for warning in caught)
    with pytest.warns(UserWarning, match="convert_my_bn"):
        assert convert_my_bn(model[1]).eps == model[1].eps
    with pytest.warns(UserWarning, match="fuse reads eps"):
        ConvNorm(model[0], model[1]).fuse()


@pytest.mark.filterwarnings("error")
def test_methods_of_a_subclass_may_read_eps() -> None:
    class Scaled(cn.ContinualNorm2d):
        def fuse_step(self, x: Tensor) -> Tensor:
            return x * self.eps

        def forward(self, input: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
            return self.fuse_step(super().forward(input, residual, relu))

    def fold(model: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = model(x)
        return y

    x = torch.randn(4, 16, 3, 3, generator=torch.Generator().manual_seed(0))
    assert fold(Scaled(16, num_groups=4), x).shape == x.shape


@guarded
def test_eps_is_a_plain_attribute_elsewhere(norm: str) -> None:
    layer = network(norm)[1]
    layer.eps = 0.25
    assert layer.eps == 0.25 and "eps=0.25" in repr(layer)
    twin = copy.deepcopy(layer)
    assert twin.eps == pickle.loads(pickle.dumps(layer)).eps == 0.25
    twin.eps = 0.5
    assert layer.eps == 0.25


def test_eps_is_stored_under_another_name_and_old_pickles_load() -> None:
    layer = cn.ContinualNorm2d(8, eps=0.25, num_groups=4)
    # torch 2.11's compiler resolves `__dict__["eps"]` to the property, in infinite recursion.
    assert "eps" not in vars(layer) and pickle.loads(pickle.dumps(layer)).eps == 0.25
    state = {**vars(layer), "eps": 0.5}
    del state["_eps"]  # as version 0.1 pickled it
    old = cn.ContinualNorm2d.__new__(cn.ContinualNorm2d)
    old.__setstate__(state)
    assert old.eps == 0.5 and "eps" not in vars(old)
    torch.testing.assert_close(old.eval()(torch.ones(2, 8, 3, 3)), torch.zeros(2, 8, 3, 3))


# --- tools that change a setting: they work -------------------------------------------------------------------


class TrackingOff:
    """Disables tracking for BatchNorm1d and BatchNorm2d layers, as mammoth's `bn_track_stats`."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]

    def __enter__(self) -> None:
        for layer in self.layers:
            layer.track_running_stats = False

    def __exit__(self, *error: object) -> None:
        for layer in self.layers:
            layer.track_running_stats = True


@guarded
@pytest.mark.parametrize("dim", [1, 2])
def test_disabling_tracking_by_class_stops_updates(norm: str, dim: int) -> None:
    model = nn.Sequential(cn.create_norm(norm, 16, dim=dim))  # type: ignore[arg-type]
    x = torch.randn(6, 16, *[4] * dim, generator=torch.Generator().manual_seed(0)) + 3
    model(x)
    before = copy.deepcopy(model.state_dict())
    with TrackingOff(model):
        model(x * 5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    model(x * 5)
    assert not torch.equal(model[0].running_mean, before["0.running_mean"])


# --- quantization: the layers stay as they are ----------------------------------------------------------------

quantizes = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:UserWarning")


@quantizes
@guarded
def test_dynamic_quantization_leaves_the_layer(norm: str, quantization: Any) -> None:
    model = network(norm)
    model(batch())
    quantized = quantization.quantize_dynamic(model.eval(), {nn.Linear})
    assert type(quantized[1]) is type(model[1]) and type(quantized[5]) is not nn.Linear
    torch.testing.assert_close(quantized[:5](batch(1)), model[:5](batch(1)), rtol=0, atol=0)
    assert not hasattr(quantized[1], "qconfig")


@quantizes
@guarded
def test_quantization_aware_training_leaves_the_layer(norm: str, quantization: Any) -> None:
    model = nn.Sequential(
        quantization.QuantStub(), nn.Conv2d(3, 16, 3), quantization.DeQuantStub(), cn.create_norm(norm, 16)
    )
    model.qconfig = quantization.get_default_qat_qconfig(torch.backends.quantized.engine)
    prepared = quantization.prepare_qat(model.train())
    for seed in range(3):
        prepared(batch(seed)).square().mean().backward()
    converted = quantization.convert(prepared.eval())
    assert type(converted[3]) is type(model[3]) and type(converted[1]) is not nn.Conv2d
    y = converted(batch(9))
    assert y.isfinite().all()
    torch.testing.assert_close(y, prepared[3](converted[:3](batch(9))), rtol=0, atol=0)


@quantizes
def test_quantized_model_loads_its_state(quantization: Any) -> None:
    quantized = quantization.quantize_dynamic(network("cn4").eval(), {nn.Linear})
    stored = io.BytesIO()
    torch.save(quantized.state_dict(), stored)
    stored.seek(0)
    quantized.load_state_dict(torch.load(stored, weights_only=True))
