"""Conversion of norms: which layers are converted, what they keep, and errors that leave the model unchanged."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import contnorm as cn
from contnorm.norms.base import NormLayer
from contnorm.registry import NORMS
from tests.models import ResNet


def trained(model: nn.Module | None = None) -> nn.Module:
    """A network with moments and affine parameters other than the initial ones."""
    torch.manual_seed(0)
    model = model or ResNet()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for _ in range(3):
            model(torch.randn(6, 3, 16, 16))
    return model


def norms(model: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in model.named_modules() if isinstance(m, NormLayer | nn.modules.batchnorm._BatchNorm)}


def tensors_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*layer.named_parameters(), *layer.named_buffers()])


def test_convert_keeps_parameter_objects_for_an_existing_optimizer() -> None:
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: id(p) for name, p in model.named_parameters()}
    cn.convert_norm(model, "cn", num_groups=4)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    old = model.stem[1].weight.clone()
    model(torch.randn(4, 3, 16, 16)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.stem[1].weight, old)


def test_convert_keeps_options_mode_and_dtype() -> None:
    layer = nn.BatchNorm2d(8, eps=1e-3, momentum=0.3, dtype=torch.float64).eval()
    layer.weight.requires_grad_(False)
    tensors = tensors_of(layer)
    new = cn.convert_norm(nn.Sequential(layer), "cn", num_groups=2)[0]
    assert (new.eps, new.momentum, new.training) == (1e-3, 0.3, False)
    assert not new.weight.requires_grad and new.bias.requires_grad
    assert tensors_of(new).keys() == tensors.keys()
    for name, tensor in tensors_of(new).items():
        assert tensor is tensors[name]


def test_batch_norm_to_cn_and_back_is_bit_exact() -> None:
    model = trained()
    x = torch.randn(6, 3, 16, 16)
    expected_eval = copy.deepcopy(model).eval()(x)
    expected_train = copy.deepcopy(model).train()(x)
    keys = list(model.state_dict())
    cn.convert_norm(model, "cn", num_groups=4)
    assert not torch.equal(copy.deepcopy(model).eval()(x), expected_eval)
    cn.convert_norm(model, "bn")
    assert list(model.state_dict()) == keys
    assert torch.equal(copy.deepcopy(model).eval()(x), expected_eval)
    assert torch.equal(copy.deepcopy(model).train()(x), expected_train)


def options_for(norm: str) -> dict[str, Any]:
    options: dict[str, Any] = {"num_groups": 4} if NORMS[norm].grouped else {}
    return {**options, "apply_act": False} if NORMS[norm].absorbs_activation else options


@pytest.mark.parametrize("source", NORMS)
def test_convert_any_norm_to_any_norm(source: str) -> None:
    for target in NORMS:
        old = nn.Sequential(cn.create_norm(source, 8, **({"num_groups": 4} if NORMS[source].grouped else {})))
        for parameter in old.parameters():
            nn.init.normal_(parameter)
        x = torch.randn(5, 8, 4, 4)
        old(x)
        saved = tensors_of(old[0])
        new = cn.convert_norm(old, target, **options_for(target))[0]
        assert cn.summarize(new).rows[0].norm == target
        shared = tensors_of(new).keys() & saved.keys()
        shared -= {"r_limit", "d_limit", "mean_weight", "var_weight"}
        for name in shared:
            assert tensors_of(new)[name] is saved[name], (target, name)
        if NORMS[source].keeps_moments and NORMS[target].keeps_moments:
            assert {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"} <= shared, target
        assert new(x).isfinite().all(), target


def test_shared_layer_stays_shared() -> None:
    shared = nn.BatchNorm2d(8)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.ModuleList([shared, nn.BatchNorm2d(8)])})
    cn.convert_norm(model, "cn", num_groups=2)
    assert model["a"][0] is model["b"][0]
    assert isinstance(model["a"][0], cn.ContinualNorm2d) and model["b"][1] is not model["b"][0]


@pytest.mark.parametrize(
    ("only", "skip", "left"),
    [
        ("stem.*", None, 19),
        (None, "stem.*", 1),
        (["stem.*", "stages.0.*"], "*.bn2", 17),
        (lambda name, module: module.num_features == 64, None, 15),
        ([nn.GroupNorm, "stem.1"], "*.nothing", 19),
    ],
    ids=["one pattern", "skipped", "several", "predicate", "class or name"],
)
def test_filters_select_layers(only: object, skip: object, left: int) -> None:
    model = cn.convert_norm(ResNet(), "cn", num_groups=4, only=only, skip=skip)  # type: ignore[arg-type]
    assert sum(not isinstance(m, cn.ContinualNorm2d) for m in norms(model).values()) == left


def test_dim_from_class_or_convolutions() -> None:
    for dim, conv in ((1, nn.Conv1d), (2, nn.Conv2d), (3, nn.Conv3d)):
        model = nn.Sequential(conv(3, 8, 3), nn.GroupNorm(2, 8))  # type: ignore[operator]
        assert type(cn.convert_norm(model, "cn")[1]).__name__ == f"ContinualNorm{dim}d"
        assert model[1].num_groups == 2
    assert isinstance(cn.convert_norm(nn.Sequential(nn.Linear(3, 8), nn.GroupNorm(2, 8)), "bn")[1], cn.BatchNorm1d)
    mixed = nn.Sequential(nn.Conv1d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8))
    with pytest.raises(ValueError, match=r"layer '2' \(GroupNorm\).*Give dim=1, 2 or 3"):
        cn.convert_norm(mixed, "cn")
    assert isinstance(cn.convert_norm(mixed, "cn", dim=1)[2], cn.ContinualNorm1d)


def test_frozen_moments_stay_frozen() -> None:
    model = cn.freeze_stats(nn.Sequential(nn.BatchNorm2d(8)))
    cn.convert_norm(model, "cn", num_groups=2)
    model.train()(torch.randn(4, 8, 3, 3) + 5)
    assert torch.equal(model[0].running_mean, torch.zeros(8))
    cn.freeze_stats(model, False)(torch.randn(4, 8, 3, 3))
    assert model[0].num_batches_tracked == 1


def test_synchronized_layers_stay_synchronized() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SyncBatchNorm(8))
    cn.convert_norm(model, "cn", num_groups=2)
    assert isinstance(model[1], cn.SyncContinualNorm)
    assert isinstance(cn.convert_norm(model, "bn")[1], nn.SyncBatchNorm)
    assert isinstance(cn.convert_norm(model, "gn", num_groups=2)[1], cn.GroupNorm2d)
    with pytest.raises(ValueError, match="'sn' has no synchronized form"):
        cn.convert_norm(nn.Sequential(nn.SyncBatchNorm(8)), "sn")


def test_convert_sync_supports_cn_and_bn_only() -> None:
    model = nn.Sequential(cn.CN(8, num_groups=2, tied=True), nn.BatchNorm2d(8), cn.GroupNorm2d(8, num_groups=2))
    weight = model[0].weight
    cn.convert_sync(model)
    assert isinstance(model[0], cn.SyncContinualNorm) and model[0].tied and model[0].weight is weight
    assert isinstance(model[1], nn.SyncBatchNorm) and isinstance(model[2], cn.GroupNorm2d)
    with pytest.raises(ValueError, match="'brn' has no synchronized form"):
        cn.convert_sync(nn.Sequential(cn.BatchRenorm2d(8)))


def test_norm_with_an_activation_is_for_networks_built_with_it() -> None:
    model = ResNet()
    with pytest.raises(ValueError, match=r"'frn' contains an activation.*apply_act=False"):
        cn.convert_norm(model, "frn")
    cn.convert_norm(model, "frn", apply_act=False)
    assert {row.norm for row in cn.summarize(model)} == {"frn"} and model(torch.randn(2, 3, 16, 16)).isfinite().all()
    built = nn.Sequential(cn.create_norm("frn", 8))
    assert cn.convert_norm(built, "evonorm_s0", num_groups=2)[0].apply_act


@pytest.mark.parametrize(
    "options",
    [{"skip": "first"}, {"only": ["first.0", "Second"]}, {"only": nn.GroupNorm}, {"num_groups": 6}],
    ids=["a module", "misspelt", "no such layer", "groups do not divide"],
)
def test_wrong_arguments_raise_and_change_nothing(options: dict[str, Any]) -> None:
    model = nn.ModuleDict({"first": nn.Sequential(nn.BatchNorm2d(12)), "second": nn.BatchNorm2d(8)})
    with pytest.raises(ValueError, match="convert_norm"):
        cn.convert_norm(model, "cn", **{"num_groups": 2, **options})
    assert not any(isinstance(module, cn.ContinualNorm2d) for module in model.modules())


def test_layers_that_would_stay_in_use_raise() -> None:
    hooked, listed = nn.Sequential(nn.BatchNorm2d(8)), nn.Sequential(nn.BatchNorm2d(8), nn.BatchNorm2d(8))
    hooked[0].register_forward_hook(lambda *args: None)
    listed.order = [listed[1]]  # type: ignore[assignment]
    compiled = nn.Sequential(torch.compile(nn.BatchNorm2d(8)))  # type: ignore[arg-type]
    for model, reason in ((hooked, "it has hooks"), (listed, "the attribute 'order'"), (compiled, "it is compiled")):
        with pytest.raises(ValueError, match=reason):
            cn.convert_norm(model, "cn", num_groups=2)
    assert type(listed[0]) is nn.BatchNorm2d
    cn.convert_norm(listed, "cn", num_groups=2, skip=["1"])
    cn.convert_norm(torch.compile(nn.Sequential(nn.BatchNorm2d(8))), "cn", num_groups=2)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("library", "name"), [("timm", "efficientnet_b0"), ("torchvision.models", "resnet18")])
def test_models_of_torchvision_and_timm(library: str, name: str) -> None:
    """Converted there and back, with gradients for all parameters in between."""
    models = pytest.importorskip(library, reason=f"{library} is not installed")
    torch.manual_seed(0)
    model = models.create_model(name) if library == "timm" else getattr(models, name)(weights=None)
    x = torch.randn(2, 3, 64, 64)
    expected, count = copy.deepcopy(model).eval()(x), len(norms(model))
    cn.convert_norm(model, "cn", num_groups="auto")
    assert [row.norm for row in cn.summarize(model)] == ["cn"] * count
    copy.deepcopy(model).train()(x).square().mean().backward()
    assert torch.equal(cn.convert_norm(model, "bn").eval()(x), expected)
