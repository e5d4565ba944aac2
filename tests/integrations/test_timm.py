"""timm: names and classes in its factories, norm-and-activation layers, and whole architectures."""

import copy
import functools
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import contnorm as cn
from contnorm.registry import NORMS, norm_class

timm = pytest.importorskip("timm", reason="timm is not installed", exc_type=ImportError)
integration = pytest.importorskip("contnorm.integrations.timm", reason="timm is not installed", exc_type=ImportError)
layers = timm.layers

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

NAMES = [e.name for e in NORMS.values() if not (e.layers or e.standardizes_weights or e.absorbs_activation)]
integration.register()
integration.register()


def in_timm(name: str) -> str:
    return "contnorm_iabn" if name == "iabn" else name


@pytest.mark.parametrize("name", NAMES)
def test_layers_by_name_equal_create_norm(name: str, device: torch.device) -> None:
    options: Any = {"num_groups": "auto"} if NORMS[name].grouped else {}
    plain = layers.create_norm_layer(in_timm(name), 24, device=device)
    act = layers.create_norm_act_layer(in_timm(name), 24, act_layer=nn.ReLU, device=device)
    x = torch.randn(4, 24, 5, 5, device=device)
    before = x.clone()
    assert torch.equal(plain(x), cn.create_norm(name, 24, **options).to(device)(x))
    expected = cn.create_norm(name, 24, **options).to(device)
    assert torch.equal(act(x), expected(x).relu()) and torch.equal(x, before)
    assert set(act.state_dict()) == set(expected.state_dict())
    assert cn.summarize(nn.Sequential(act)).rows[0].norm == name


@pytest.mark.parametrize(("name", "groups"), [("cn8", 8), ("cn", 16), ("gn4", 4), ("bn_gn2", 2), ("cn_tied16", 16)])
def test_groups_in_a_name(name: str, groups: int) -> None:
    for layer in (layers.create_norm_layer(name, 32), layers.create_norm_act_layer(name, 32)):
        assert layer.num_groups == groups
        assert cn.summarize(nn.Sequential(layer)).rows[0].norm == name.rstrip("0123456789")


def test_names_of_timm_keep_their_layers_and_classes_work() -> None:
    assert layers.get_norm_act_layer("iabn").func is layers.InplaceAbn
    assert layers.get_norm_act_layer("frn").func is layers.FilterResponseNormAct2d
    assert layers.get_norm_act_layer(cn.ContinualNorm2d).func is integration.ContinualNormAct2d
    partial = functools.partial(cn.ContinualNorm2d, num_groups=4)
    assert layers.get_norm_act_layer(partial)(32).num_groups == 4
    with pytest.raises(TypeError):
        layers.create_norm_act_layer(cn.LayerNorm2d, 32)  # not timm's class of this name


def test_arguments_of_batch_norm_act() -> None:
    options: Any = {"eps": 1e-3, "momentum": 0.3, "drop_layer": nn.Dropout2d, "dtype": torch.float64, "inplace": False}
    options |= {"act_layer": nn.LeakyReLU, "act_kwargs": {"negative_slope": 0.5}}
    layer = integration.ContinualNormAct2d(32, num_groups=4, **options)
    theirs = layers.BatchNormAct2d(32, **options)
    assert list(layer.state_dict()) == list(theirs.state_dict())
    assert (layer.eps, layer.momentum, layer.num_groups) == (1e-3, 0.3, 4)
    assert repr(layer.act) == repr(theirs.act) and repr(layer.drop) == repr(theirs.drop)
    x = torch.randn(4, 32, 3, 3, dtype=torch.float64)
    norm = cn.ContinualNorm2d(32, 1e-3, 0.3, num_groups=4, dtype=torch.float64).eval()
    assert torch.equal(layer.eval()(x), nn.functional.leaky_relu(norm(x), 0.5))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "bn"])
def test_classes_are_pickled_and_converted(name: str) -> None:
    layer: Any = integration.ACT_CLASSES[norm_class(NORMS[name], 2)](32, act_layer="silu", **NORMS[name].preset)
    assert repr(pickle.loads(pickle.dumps(layer))) == repr(layer)
    x = torch.randn(4, 32, 3, 3)
    converted = cn.convert_norm(nn.Sequential(layer), "gn", num_groups=8, eps=1e-5)
    torch.testing.assert_close(converted(x), nn.functional.silu(nn.functional.group_norm(x, 8)))


@pytest.mark.parametrize("architecture", ["test_resnet", "test_efficientnet"])
def test_built_model_equals_converted_model(architecture: str, device: torch.device) -> None:
    model = timm.create_model(architecture, num_classes=3, norm_layer="cn").to(device)
    converted = cn.convert_norm(timm.create_model(architecture, num_classes=3), "cn", num_groups="auto").to(device)
    assert {row.norm for row in cn.summarize(model)} == {"cn"}
    assert list(model.state_dict()) == list(timm.create_model(architecture, num_classes=3).state_dict())
    converted.load_state_dict(model.state_dict())
    x = torch.randn(4, 3, 32, 32, device=device)
    assert torch.equal(model.train()(x), converted.train()(x))
    assert torch.equal(model.eval()(x), converted.eval()(x))
    features = timm.create_model(architecture, norm_layer="cn", features_only=True, feature_cls="fx").to(device)
    assert [feature.shape[1] for feature in features(x)] == features.feature_info.channels()


def test_layer_norm_of_positions() -> None:
    model = timm.create_model("convnext_atto", num_classes=3, depths=(1, 1, 1, 1), dims=(8, 16, 24, 32))
    rows = cn.summarize(model).rows
    assert {(row.norm, "each position" in row.state) for row in rows} == {("ln", True)}
    weights = [module.weight for module in model.modules() if isinstance(module, nn.LayerNorm)]
    of_samples = cn.norm_spec(nn.Sequential(cn.LayerNorm2d(8, eps=1e-6)))
    with pytest.raises(ValueError, match="per_position"):
        cn.apply_norm_spec(nn.Sequential(cn.LayerNorm2d(8)), cn.norm_spec(nn.Sequential(layers.LayerNorm2d(8))))
    assert type(cn.apply_norm_spec(nn.Sequential(layers.LayerNorm2d(8)), of_samples)[0]) is cn.LayerNorm2d
    cn.convert_norm(model, "cn", num_groups="auto")
    assert [m.weight for m in model.modules() if isinstance(m, cn.ContinualNorm2d)] == weights
    assert len(cn.summarize(timm.create_model("test_vit", num_classes=3))) == 0


def test_tools_for_batch_norm_leave_continual_norms_alone() -> None:
    model = timm.create_model("test_resnet", num_classes=3, norm_layer="cn")
    kinds = [type(module) for module in model.modules()]
    for tool in (layers.freeze_batch_norm_2d, layers.convert_sync_batchnorm, layers.convert_splitbn_model):
        assert [type(module) for module in tool(copy.deepcopy(model)).modules()] == kinds


# --- architectures ----------------------------------------------------------------------------------------------------


BY_NAME = (
    "resnet10t resnetv2_18 regnety_002 efficientnet_b0 mobilenetv2_035 densenet121 repvgg_a0 convnext_atto "
    "mobilevit_xxs test_efficientnet_gn inception_v3"
)
BY_CONVERSION = (
    "skresnet18 mobilenetv3_small_050 mobilenetv4_conv_small_035 hrnet_w18_small efficientvit_b0 test_byobnet vgg11_bn "
    "levit_128s coatnet_pico_rw_224"
)
ARCHITECTURES: dict[str, Any] = {  # how all norms become continual norms
    **dict.fromkeys(BY_NAME.split(), "cn"),
    "xception41": functools.partial(cn.ContinualNorm2d, num_groups="auto"),
    **dict.fromkeys(BY_CONVERSION.split()),
}
SIZES = {"inception_v3": 80, "xception41": 32, "vgg11_bn": 32, "levit_128s": 224}  # of images, if not 64
OPTIONS: dict[str, dict[str, Any]] = {"vgg11_bn": {"mlp_ratio": 1 / 64}, "coatnet_pico_rw_224": {"img_size": 64}}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trained_model_is_loaded_bit_for_bit(name: str, tmp_path: Path, device: torch.device) -> None:
    if name not in timm.list_models():
        pytest.skip(f"timm {timm.__version__} has no {name}")
    build = functools.partial(timm.create_model, name, num_classes=4, **OPTIONS.get(name, {}))
    norm = ARCHITECTURES[name]
    model = build(norm_layer=norm) if norm is not None else cn.convert_norm(build(), "cn", num_groups="auto")
    model.to(device)
    assert {row.norm for row in cn.summarize(model)} == {"cn"}
    x = torch.randn(2, 3, *[SIZES.get(name, 64)] * 2, device=device)
    logits = model.train()(x)
    (logits[0] if isinstance(logits, tuple) else logits).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    cn.save_model(model, tmp_path / "model.safetensors")
    loaded = build().to(device)  # with its own norms and other weights
    loaded = cn.load_model(loaded, tmp_path / "model.safetensors")
    assert cn.norm_spec(loaded) == cn.norm_spec(model)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(x), model.eval()(x))


def test_page_names_the_architectures() -> None:
    page = (Path(__file__).parents[2] / "docs/integrations/timm.md").read_text()
    assert set(re.findall(r"`(\w+)`", page[page.index("## Tested architectures") :])) >= set(ARCHITECTURES)
