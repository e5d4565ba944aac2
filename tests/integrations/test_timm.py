"""`register`: names and classes in timm's factories, norm-and-activation layers, and timm's tools for batch norm."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import contnorm as cn
from contnorm.norm_entry import norm_class
from contnorm.norms.activation import ActivationNorm
from contnorm.registry import NORMS

timm = pytest.importorskip("timm", reason="timm is not installed", exc_type=ImportError)
integration = pytest.importorskip("contnorm.integrations.timm", reason="timm is not installed", exc_type=ImportError)
layers = timm.layers
timm_model_tools = timm.utils.model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

BUILT_IN = [name for name, entry in NORMS.items() if not entry.layers and not entry.standardizes_weights]
WITH_ACT = [name for name in BUILT_IN if not NORMS[name].absorbs_activation]
OWN_ACT = [name for name in BUILT_IN if NORMS[name].absorbs_activation]
KEEP_MOMENTS = [name for name in WITH_ACT if NORMS[name].keeps_moments]

slow = pytest.mark.slow
knows_classes = pytest.mark.skipif(
    not hasattr(layers.create_norm_act, "_NORM_TO_NORM_ACT_MAP"), reason="this timm has a fixed list of classes"
)


@pytest.fixture(autouse=True)
def _registered():
    integration.register()
    yield
    integration.unregister()


def tables() -> list[object]:
    factories = (layers.create_norm, layers.create_norm_act, getattr(layers, "_fx", layers.create_norm))
    found = [
        vars(module)[name]
        for module in factories
        for name in sorted(vars(module))
        if name.startswith(("_NORM", "_leaf"))
    ]
    functions = [
        (name, attribute, value)
        for name in ("timm.layers", "timm.layers.norm_act", "timm.layers.split_batchnorm", "timm.utils.model")
        for attribute, value in sorted(vars(__import__(name, fromlist=["x"])).items())
        if callable(value)
    ]
    return [*(copy.copy(table) for table in found), functions]


def create_model(name: str, **options: Any) -> nn.Module:
    if name not in timm.list_models():
        pytest.skip(f"timm {timm.__version__} has no {name}")
    model: nn.Module = timm.create_model(name, **options)
    return model


def images(device: torch.device | None = None, size: int = 32) -> torch.Tensor:
    return torch.randn(4, 3, size, size, device=device)


# --- names and classes ------------------------------------------------------------------------------------------------


@pytest.mark.feature("timm", "`register()` twice and `unregister()` leave timm as it was")
def test_registration_is_idempotent_and_reversible() -> None:
    integration.unregister()
    before = tables()
    integration.register()
    first = tables()
    integration.register()
    assert tables() == first != before
    integration.unregister()
    assert tables() == before
    assert integration.registered_names() == {}
    integration.unregister()


def test_names_of_timm_keep_their_layers() -> None:
    with_ours = {
        table: dict(getattr(module, table))
        for module, table in ((layers.create_norm, "_NORM_MAP"), (layers.create_norm_act, "_NORM_ACT_MAP"))
    }
    integration.unregister()
    for table, module in (("_NORM_MAP", layers.create_norm), ("_NORM_ACT_MAP", layers.create_norm_act)):
        for name, layer in getattr(module, table).items():
            assert with_ours[table][name] is layer, name


def test_names_that_timm_has_get_a_prefix() -> None:
    names = integration.registered_names()
    assert set(names) == set(BUILT_IN)
    assert {name for name, in_timm in names.items() if name != in_timm} == {"iabn", "frn", "evonorm_s0"}
    assert names["iabn"] == "contnorm_iabn"
    assert layers.get_norm_act_layer("iabn").func is layers.InplaceAbn
    assert layers.get_norm_act_layer("frn").func is layers.FilterResponseNormAct2d
    assert isinstance(layers.create_norm_layer("contnorm_iabn", 8), cn.InstanceAwareBatchNorm2d)


@pytest.mark.feature("timm", "all norms by name in `create_norm_layer` and `create_norm_act_layer`")
@pytest.mark.parametrize("name", WITH_ACT)
def test_layers_by_name_equal_create_norm(name: str, device: torch.device) -> None:
    in_timm = integration.registered_names()[name]
    options = {"num_groups": "auto"} if NORMS[name].grouped else {}
    expected = cn.create_norm(name, 24, **options).to(device)
    plain = layers.create_norm_layer(in_timm, 24, device=device)
    act = layers.create_norm_act_layer(in_timm, 24, act_layer=nn.ReLU, device=device)
    x = torch.randn(4, 24, 5, 5, device=device)
    assert torch.equal(plain(x), expected(x.clone()))
    expected = cn.create_norm(name, 24, **options).to(device)
    assert torch.equal(act(x.clone()), expected(x.clone()).relu())
    assert set(act.state_dict()) == set(expected.state_dict())
    assert repr(act).startswith(type(act).__name__) and "(act): ReLU" in repr(act)


@pytest.mark.parametrize("name", OWN_ACT)
def test_norms_with_an_activation_are_layers_of_both(name: str) -> None:
    in_timm = integration.registered_names()[name]
    options = {"num_groups": "auto"} if NORMS[name].grouped else {}
    x = torch.randn(4, 24, 5, 5)
    for apply_act in (True, False):
        layer = layers.create_norm_act_layer(in_timm, 24, act_layer=nn.SiLU, apply_act=apply_act, inplace=True)
        assert isinstance(layer, ActivationNorm)
        assert torch.equal(layer(x), cn.create_norm(name, 24, apply_act=apply_act, **options)(x))
        assert cn.summarize(nn.Sequential(layer)).rows[0].norm == name
    with pytest.raises(ValueError, match=rf"{name}.*contains an activation.*convert_norm"):
        layers.create_norm_layer(in_timm, 24)
    with pytest.raises(TypeError, match="drop_layer"):
        layers.create_norm_act_layer(in_timm, 24, drop_layer=nn.Dropout)


def test_norm_that_standardizes_weights_is_refused() -> None:
    for create in (layers.create_norm_layer, layers.create_norm_act_layer):
        with pytest.raises(ValueError, match=r"gn_ws.*standardizes the weights.*convert_norm"):
            create("gn_ws", 32)


@pytest.mark.feature("timm", "the number of groups in a name: `norm_layer='cn8'`")
@pytest.mark.parametrize(("name", "groups"), [("cn8", 8), ("cn", 16), ("gn4", 4), ("bn_gn2", 2), ("cn_tied16", 16)])
def test_groups_in_a_name(name: str, groups: int) -> None:
    for layer in (layers.create_norm_layer(name, 32), layers.create_norm_act_layer(name, 32)):
        assert layer.num_groups == groups
        assert cn.summarize(nn.Sequential(layer)).rows[0].norm == name.rstrip("0123456789")
    with pytest.raises(ValueError, match="num_groups=5 does not divide the 32 channels"):
        layers.create_norm_act_layer("cn5", 32)


@knows_classes
@pytest.mark.feature("timm", "classes and partials of them in `get_norm_act_layer`")
def test_classes_and_partials() -> None:
    cases = {
        cn.ContinualNorm2d: integration.ContinualNormAct2d,
        cn.BatchRenorm2d: integration.BatchRenormAct2d,
        cn.GroupNorm2d: integration.GroupNormAct2d,
        cn.BatchNorm2d: layers.BatchNormAct2d,
    }
    for plain, act in cases.items():
        assert type(layers.get_norm_act_layer(plain, "relu")(64)) is act
        assert layers.get_norm_layer(plain) is plain
    partial = functools.partial(cn.ContinualNorm2d, num_groups=8, order="bn_gn", eps=1e-3)
    layer = layers.get_norm_act_layer(partial, nn.SiLU)(64)
    assert (layer.num_groups, layer.order, layer.eps, type(layer.act)) == (8, "bn_gn", 1e-3, nn.SiLU)
    again = layers.get_norm_act_layer(functools.partial(integration.ContinualNormAct2d, num_groups=4), "relu")(64)
    assert type(again) is integration.ContinualNormAct2d and again.num_groups == 4


@knows_classes
def test_class_with_the_name_of_one_of_timm_is_not_replaced_by_it() -> None:
    with pytest.raises(TypeError, match="act_layer"):
        layers.get_norm_act_layer(cn.LayerNorm2d, "relu")(64)
    assert type(layers.get_norm_act_layer(layers.LayerNorm2d, "relu")(64)) is layers.LayerNormAct2d


BUILT = [
    "test_resnet",
    "test_efficientnet",
    *(pytest.param(name, marks=slow) for name in ("resnetv2_18", "densenet121")),
]


@pytest.mark.feature("timm", "`create_model(norm_layer='cn')`")
@pytest.mark.parametrize("architecture", BUILT)
def test_built_model_equals_converted_model(architecture: str, device: torch.device) -> None:
    model = create_model(architecture, num_classes=3, norm_layer="cn").to(device)
    converted = cn.convert_norm(create_model(architecture, num_classes=3), "cn", num_groups="auto").to(device)
    assert {row.norm for row in cn.summarize(model)} == {"cn"}
    assert list(model.state_dict()) == list(create_model(architecture, num_classes=3).state_dict())
    converted.load_state_dict(model.state_dict())
    x = images(device)
    outputs = []
    for each in (model.train(), converted.train()):
        output = each(x)
        output.square().sum().backward()
        outputs.append(output.detach())
    assert torch.equal(*outputs)
    for (name, parameter), other in zip(model.named_parameters(), converted.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name
    assert torch.equal(model.eval()(x), converted.eval()(x))


@pytest.mark.feature("timm", "`features_only=True`, also with torch.fx")
@pytest.mark.parametrize("architecture", ["test_resnet", "test_efficientnet"])
def test_features_are_extracted(architecture: str, device: torch.device) -> None:
    if not hasattr(layers, "_fx"):
        pytest.skip("this timm has its leaves of torch.fx elsewhere")
    for options in ({}, {"feature_cls": "fx"}):
        model = create_model(architecture, norm_layer="cn", features_only=True, **options).to(device)
        features = model(images(device))
        assert [feature.shape[1] for feature in features] == model.feature_info.channels()
    converted = cn.convert_norm(create_model(architecture), "cn", num_groups="auto").to(device)
    pooled = layers.create_feature_extractor(converted, ["global_pool"])(images(device))["global_pool"]
    assert pooled.shape == (4, converted.num_features)


@pytest.mark.parametrize("norm", ["bn", "gn", "in", "ln", "brn", "sn", "rbn", "none", "contnorm_iabn", "adab2n"])
def test_models_with_each_norm(norm: str, device: torch.device) -> None:
    model = create_model("test_efficientnet", num_classes=3, norm_layer=norm).to(device)
    assert {row.norm for row in cn.summarize(model)} == {norm.removeprefix("contnorm_")}
    model(images(device, 64)).sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "bn" in name)


def test_pruned_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"adapt_model_from_string .*convert_norm"):
        create_model("ecaresnet50d_pruned", norm_layer="cn")


def test_network_without_norms_is_refused() -> None:
    model = create_model("test_nfnet", num_classes=3)
    with pytest.raises(ValueError, match="nothing to convert in NormFreeNet"):
        cn.convert_norm(model, "cn")


def test_network_of_tokens_is_refused_at_its_first_input() -> None:
    model = create_model("test_vit", num_classes=3, norm_layer="cn", img_size=32)
    with pytest.raises(ValueError, match=r"ContinualNorm2d: expected an input of shape \(N, C, H, W\)"):
        model(images())


# --- norm-and-activation layers ---------------------------------------------------------------------------------------


def act_class(name: str) -> type[nn.Module]:
    return integration.layers.ACT_CLASSES[norm_class(NORMS[name], 2)]


@pytest.mark.feature("timm", "`ContinualNormAct2d` has the arguments and keys of `BatchNormAct2d`")
def test_arguments_of_batch_norm_act() -> None:
    positional = (32, 1e-3, 0.3, True, True, True, nn.LeakyReLU, {"negative_slope": 0.5}, False)
    layer = integration.ContinualNormAct2d(*positional, drop_layer=nn.Dropout2d, dtype=torch.float64, num_groups=4)
    theirs = layers.BatchNormAct2d(*positional, drop_layer=nn.Dropout2d, dtype=torch.float64)
    assert list(layer.state_dict()) == list(theirs.state_dict())
    assert (layer.eps, layer.momentum, layer.num_groups) == (1e-3, 0.3, 4)
    assert repr(layer.act) == repr(theirs.act) and repr(layer.drop) == repr(theirs.drop)
    assert layer.weight.dtype == torch.float64
    x = torch.randn(4, 32, 3, 3, dtype=torch.float64)
    norm = cn.ContinualNorm2d(32, 1e-3, 0.3, num_groups=4, dtype=torch.float64).eval()
    assert torch.equal(layer.eval()(x), nn.functional.leaky_relu(norm(x), 0.5))
    assert isinstance(integration.ContinualNormAct2d(32, apply_act=False).act, nn.Identity)
    assert isinstance(integration.ContinualNormAct2d(32, act_layer=None).act, nn.Identity)
    with pytest.raises(TypeError, match=r"ContinualNormAct2d: unknown argument 'group_size'.*num_groups"):
        integration.ContinualNormAct2d(32, group_size=4)


def test_default_eps_and_momentum_are_those_of_the_norm() -> None:
    for name in KEEP_MOMENTS:
        if name != "bn":
            expected, layer = cn.create_norm(name, 32), act_class(name)(32)
            assert (layer.eps, layer.momentum) == (expected.eps, expected.momentum), name


def test_drop_is_between_norm_and_activation() -> None:
    layer = integration.ContinualNormAct2d(32, act_layer=nn.Sigmoid, drop_layer=lambda: nn.Dropout(1.0))
    assert torch.equal(layer(torch.randn(2, 32, 3, 3)), torch.full((2, 32, 3, 3), 0.5))


@pytest.mark.parametrize("name", [name for name in WITH_ACT if name != "bn"])
def test_classes_are_pickled_copied_and_recognised(name: str) -> None:
    options = NORMS[name].preset
    layer = act_class(name)(32, act_layer="silu", **options)
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert type(other) is type(layer) and repr(other) == repr(layer)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is type(layer)
    row = cn.summarize(nn.Sequential(layer)).rows[0]
    assert row.norm == name and "then acts" in row.state
    x = torch.randn(4, 32, 3, 3)
    converted = cn.convert_norm(nn.Sequential(layer), "gn", num_groups=8, eps=1e-5)
    torch.testing.assert_close(converted(x), nn.functional.silu(nn.functional.group_norm(x, 8)))


def test_no_norm_does_not_change_its_input() -> None:
    x = -torch.ones(2, 32, 3, 3)
    for layer in (
        integration.NoNormAct2d(32),
        cn.convert_norm(nn.Sequential(layers.BatchNormAct2d(32, inplace=True)), "none"),
    ):
        assert torch.equal(layer(x), torch.zeros_like(x)) and x.max() == -1


def test_running_moments_are_estimated_as_in_a_converted_model() -> None:
    model = create_model("test_efficientnet", num_classes=3, norm_layer="cn")
    converted = cn.convert_norm(create_model("test_efficientnet", num_classes=3), "cn", num_groups="auto")
    converted.load_state_dict(model.state_dict())
    batches = [images() for _ in range(2)]
    for each in (model, converted):
        cn.reestimate(each, batches)
    for (name, buffer), other in zip(model.named_buffers(), converted.buffers(), strict=True):
        assert torch.equal(buffer, other), name


# --- LayerNorm2d ------------------------------------------------------------------------------------------------------


@pytest.mark.feature("timm", "`LayerNorm2d` (ConvNeXt) in `convert_norm`")
def test_layer_norm_of_positions_is_converted(device: torch.device) -> None:
    model = create_model("convnext_atto", num_classes=3, depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)).to(device)
    rows = cn.summarize(model).rows
    assert len(rows) == sum(isinstance(module, nn.LayerNorm) for module in model.modules()) > 4
    assert {(row.norm, row.eps, "each position" in row.state) for row in rows} == {("ln", "1e-06", True)}
    weights = [module.weight for module in model.modules() if isinstance(module, nn.LayerNorm)]
    cn.convert_norm(model, "cn", num_groups="auto")
    norms = [module for module in model.modules() if isinstance(module, cn.ContinualNorm2d)]
    assert [norm.weight for norm in norms] == weights and all(norm.eps == 1e-6 for norm in norms)
    assert model(images(device)).shape == (4, 3)


def test_spec_tells_layer_norms_of_positions_and_of_samples_apart() -> None:
    of_positions = nn.Sequential(nn.Conv2d(3, 8, 1), layers.LayerNorm2d(8))
    of_samples = nn.Sequential(nn.Conv2d(3, 8, 1), cn.LayerNorm2d(8, eps=1e-6))
    with pytest.raises(ValueError, match="per_position"):
        cn.apply_norm_spec(of_samples, cn.norm_spec(of_positions))
    assert type(cn.apply_norm_spec(of_positions, cn.norm_spec(of_samples))[1]) is cn.LayerNorm2d


def test_layer_norm_of_the_last_dimension_is_not_a_norm_of_channels() -> None:
    model = create_model("test_vit", num_classes=3)
    assert len(cn.summarize(model)) == 0
    assert len(cn.summarize(nn.Sequential(layers.LayerNorm(8), layers.LayerNorm(2), nn.LayerNorm(8)))) == 0


@pytest.mark.parametrize("name", ["LayerNorm2d", "LayerNorm2dFp32", "LayerNormAct2d", "GroupNormAct", "GroupNorm1"])
def test_layers_of_timm_are_converted(name: str) -> None:
    if not hasattr(layers, name):
        pytest.skip(f"this timm has no {name}")
    old = getattr(layers, name)(32)
    nn.init.normal_(old.weight), nn.init.normal_(old.bias)
    model = cn.convert_norm(nn.Sequential(nn.Conv2d(3, 32, 1), old), "gn", num_groups=1)
    x = images()
    activate: Callable[[Any], Any] = torch.relu if "Act" in name else lambda y: y
    expected = nn.functional.group_norm(model[0](x), 1, old.weight, old.bias, old.eps)
    torch.testing.assert_close(model(x), activate(expected))


def test_layer_norm_of_positions_with_fast_norm() -> None:
    timm.layers.set_fast_norm(True)
    try:
        assert cn.summarize(nn.Sequential(layers.LayerNorm2d(8))).rows[0].norm == "ln"
    finally:
        timm.layers.set_fast_norm(False)


def test_split_batch_norm_is_not_converted() -> None:
    model = layers.convert_splitbn_model(create_model("test_resnet", num_classes=3))
    with pytest.raises(ValueError, match=r"SplitBatchNorm2d\): it holds 'aux_bn'"):
        cn.convert_norm(model, "cn")


# --- timm's tools for batch norm --------------------------------------------------------------------------------------


def trained(norm: str, device: torch.device, architecture: str = "test_efficientnet", **options: Any) -> nn.Module:
    model = create_model(architecture, num_classes=3, norm_layer=norm, **options).to(device)
    for _ in range(2):
        model.train()(images(device))
    return model


MODELS = ["test_resnet", "test_efficientnet"]  # a norm and an activation module, and a layer of both


@pytest.mark.feature("timm", "`timm.utils.freeze` and `unfreeze`")
@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("norm", ["cn", "bn", "brn", "sn", "rbn"])
def test_frozen_model_uses_constant_moments_in_training(norm: str, architecture: str, device: torch.device) -> None:
    model = trained(norm, device, architecture)
    kinds = [type(module) for module in model.modules()]
    x = images(device)
    expected = model.eval()(x).detach()
    timm_model_tools.freeze(model)
    state = copy.deepcopy(model.state_dict())
    torch.testing.assert_close(model.train()(x), expected, rtol=0, atol=1e-6 if norm == "bn" else 0)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all("constant" in row.state for row in cn.summarize(model))
    timm_model_tools.unfreeze(model)
    assert norm == "bn" or [type(module) for module in model.modules()] == kinds
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not torch.equal(model.train()(x), expected)
    assert any(not torch.equal(value, state[name]) for name, value in model.state_dict().items() if "running" in name)


def test_frozen_model_is_saved_and_loaded(tmp_path: Path, device: torch.device) -> None:
    model = trained("cn", device)
    timm_model_tools.freeze(model)
    cn.save_model(model, tmp_path / "model.safetensors")
    loaded = create_model("test_efficientnet", num_classes=3).to(device)
    loaded = cn.load_model(loaded, tmp_path / "model.safetensors")
    x = images(device)
    assert torch.equal(model.train()(x), loaded.train()(x))


def test_part_of_a_model_is_frozen(device: torch.device) -> None:
    model = trained("cn", device, "test_resnet")
    timm_model_tools.freeze(model, ["bn1", "layer1"])
    frozen = {row.layer for row in cn.summarize(model) if "constant" in row.state}
    assert frozen == {row.layer for row in cn.summarize(model) if row.layer.startswith(("bn1", "layer1"))} != set()
    timm_model_tools.freeze(model, ["layer2"], include_bn_running_stats=False)
    assert not any("constant" in row.state for row in cn.summarize(model) if row.layer.startswith("layer2"))


@pytest.mark.feature("timm", "`freeze_batch_norm_2d` keeps the norm; without `register()` it raises")
@pytest.mark.parametrize("architecture", MODELS)
def test_freeze_batch_norm_2d(architecture: str, device: torch.device) -> None:
    model = trained("cn", device, architecture)
    x = images(device)
    expected = model.eval()(x)
    assert torch.equal(layers.freeze_batch_norm_2d(model).train()(x), expected)
    assert {row.norm for row in cn.summarize(model)} == {"cn"}
    without_moments = create_model(
        architecture, norm_layer=functools.partial(cn.ContinualNorm2d, num_groups=4, track_running_stats=False)
    )
    with pytest.raises(ValueError, match="no running moments"):
        layers.freeze_batch_norm_2d(without_moments)


@pytest.mark.feature("timm", "`convert_sync_batchnorm` keeps group step and activation, or raises")
@pytest.mark.parametrize("architecture", MODELS)
def test_convert_sync_batchnorm(architecture: str, device: torch.device) -> None:
    x = images(device)
    for norm in ("cn", "bn"):
        model = trained(norm, device, architecture).eval()
        expected = model(x)
        model = layers.convert_sync_batchnorm(model)
        assert all("synced" in row.state for row in cn.summarize(model))
        torch.testing.assert_close(model(x), expected)
    model = trained("brn", device, architecture)
    model.conv_stem_norm = nn.BatchNorm2d(8)
    with pytest.raises(ValueError, match=r"BatchRenorm.*no synchronised form"):
        layers.convert_sync_batchnorm(model)
    assert type(model.conv_stem_norm) is nn.BatchNorm2d


@pytest.mark.feature("timm", "`convert_splitbn_model` refuses other norms than batch norm")
@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("norm", ["cn", "brn", "gn"])
def test_convert_splitbn_model(norm: str, architecture: str, device: torch.device) -> None:
    model = trained(norm, device, architecture)
    model.first = nn.BatchNorm2d(8)
    if norm == "gn":  # not a batch norm, so timm leaves it
        assert type(layers.convert_splitbn_model(model).first) is layers.SplitBatchNorm2d
        assert "gn" in {row.norm for row in cn.summarize(nn.Sequential(*list(model.children())[:-1]))}
        return
    with pytest.raises(TypeError, match=r"convert_splitbn_model .* more than a batch norm"):
        layers.convert_splitbn_model(model)
    assert type(model.first) is nn.BatchNorm2d


TOOLS = ("freeze_batch_norm_2d", "convert_sync_batchnorm", "convert_splitbn_model")


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("architecture", MODELS)
def test_tools_refuse_the_layers_without_registration(architecture: str, tool: str, device: torch.device) -> None:
    for norm in ("cn", "brn"):
        model = trained(norm, device, architecture)
        integration.unregister()
        with pytest.raises(TypeError, match=f"{tool} would treat"):
            getattr(layers, tool)(model)
        integration.register()


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("tool", TOOLS)
def test_batch_norm_that_a_conversion_gave_an_activation(tool: str, registered: bool, device: torch.device) -> None:
    """Such a layer applies its activation in a hook, which a new layer does not have."""
    model = cn.convert_norm(trained("cn", device), "bn")
    x = images(device)
    expected = model.eval()(x)
    if not registered:
        integration.unregister()
    if registered and tool != "convert_splitbn_model":
        torch.testing.assert_close(getattr(layers, tool)(model).eval()(x), expected)
        return
    with pytest.raises(TypeError, match=f"{tool} would .*activation" if registered else f"{tool} would treat"):
        getattr(layers, tool)(model)
    with pytest.raises(TypeError, match="convert_sync_batchnorm would treat BatchNorm2d"):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)


@slow
def test_reparameterization_refuses_the_layers(device: torch.device) -> None:
    for architecture in ("mobileone_s1", "repvgg_a0", "levit_128s", "repvit_m1", "fastvit_t8"):
        model = cn.convert_norm(create_model(architecture, num_classes=3), "cn", num_groups="auto")
        with pytest.raises(TypeError, match=r"fuse.* would treat ContinualNorm"):
            timm_model_tools.reparameterize_model(model.eval())
