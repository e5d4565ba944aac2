"""Conversion of norms: which layers are converted, what they keep, and errors that leave the model unchanged."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import contnorm as cn
from contnorm.norms.base import NormLayer
from contnorm.registry import NORMS
from tests.models import BatchNormAct2d, FrozenBatchNorm2d, RenamedBatchNorm2d, ResNet, ScaledBatchNorm2d

timm_or_torchvision = [
    pytest.param("timm", "resnet18", id="timm resnet18"),
    pytest.param("timm", "efficientnet_b0", id="timm efficientnet_b0"),
    pytest.param("torchvision", "resnet18", id="torchvision resnet18"),
    pytest.param("torchvision", "mobilenet_v3_small", id="torchvision mobilenet_v3_small"),
]


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


def test_convert_reaches_nested_layers() -> None:
    model = cn.convert_norm(ResNet(), "cn", num_groups=4)
    assert len(norms(model)) == 20
    assert all(isinstance(m, cn.ContinualNorm2d) and m.num_groups == 4 for m in norms(model).values())
    assert model.train()(torch.randn(4, 3, 16, 16)).shape == (4, 5)


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


def test_convert_keeps_an_explicit_kernel_only(monkeypatch: pytest.MonkeyPatch) -> None:
    layer: nn.Module = cn.SwitchNorm2d(8, kernel="reference")
    monkeypatch.setenv("CONTNORM_KERNEL", "pivoted")
    for name in ("brn", "cn2", "bn_gn2", "sn", "cn4"):
        layer = cn.convert_norm(layer, name)
        assert layer.kernel == "reference", name
    for norm in ("bn", "gn2", "none"):  # these have a single kernel
        layer = cn.create_norm(norm, 8)
        assert cn.convert_norm(layer, "cn2").kernel == "pivoted", norm
    assert cn.convert_norm(nn.BatchNorm2d(8), "brn").kernel == "pivoted"


def test_options_override_those_of_the_old_layer() -> None:
    new = cn.convert_norm(nn.Sequential(nn.BatchNorm2d(8, eps=1e-3)), "cn", num_groups=2, eps=1e-4, momentum=None)[0]
    assert (new.eps, new.momentum) == (1e-4, None)


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


@pytest.mark.parametrize("target", NORMS)
@pytest.mark.parametrize("source", NORMS)
def test_convert_any_norm_to_any_norm(source: str, target: str) -> None:
    torch.manual_seed(0)
    groups = {"num_groups": 4}
    old = nn.Sequential(cn.create_norm(source, 8, **(groups if NORMS[source].grouped else {})))
    for parameter in old.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(5, 8, 4, 4)
    old(x)
    saved = tensors_of(old[0])
    new = cn.convert_norm(old, target, **(groups if NORMS[target].grouped else {}))[0]
    assert cn.summarize(new).rows[0].norm == target
    shared = tensors_of(new).keys() & saved.keys()
    shared -= {"r_limit", "d_limit", "mean_weight", "var_weight"}
    for name in shared:
        assert tensors_of(new)[name] is saved[name]
    if NORMS[source].keeps_moments and NORMS[target].keeps_moments:
        assert {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"} <= shared
    assert new(x).isfinite().all()


def test_shared_layer_stays_shared() -> None:
    shared = nn.BatchNorm2d(8)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.ModuleList([shared, nn.BatchNorm2d(8)])})
    cn.convert_norm(model, "cn", num_groups=2)
    assert model["a"][0] is model["b"][0]
    assert isinstance(model["a"][0], cn.ContinualNorm2d) and model["b"][1] is not model["b"][0]


def test_convert_a_single_layer_returns_its_replacement() -> None:
    assert isinstance(cn.convert_norm(nn.BatchNorm1d(16), "cn4"), cn.ContinualNorm1d)


@pytest.mark.parametrize(
    ("only", "skip", "left"),
    [
        ("stem.*", None, 19),
        (None, "stem.*", 1),
        (["stem.*", "stages.0.*"], "*.bn2", 17),
        (lambda name, module: module.num_features == 64, None, 15),
    ],
    ids=["one pattern", "skipped", "several", "predicate"],
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


def test_groups_that_do_not_divide_raise_and_change_nothing() -> None:
    model = nn.Sequential(nn.BatchNorm2d(64), nn.BatchNorm2d(48))
    with pytest.raises(
        ValueError,
        match=r"layer '1' \(BatchNorm2d\).*num_groups=32 does not divide the 48 .*num_groups=16, .*all 2 layers",
    ):
        cn.convert_norm(model, "cn")
    assert type(model[0]) is nn.BatchNorm2d
    with pytest.raises(ValueError, match=r"num_groups=6 does not divide the 20 channels\. Use num_groups=5, or"):
        cn.convert_norm(nn.Sequential(nn.BatchNorm2d(20)), "cn", num_groups=6)


def test_nothing_to_convert_raises() -> None:
    with pytest.raises(
        ValueError, match="convert_norm: nothing to convert in Sequential: it has no norm over channels"
    ):
        cn.convert_norm(nn.Sequential(nn.Linear(3, 3)), "cn")
    with pytest.raises(ValueError, match="nothing to convert in ResNet: only= and skip= exclude all 20 norm layers"):
        cn.convert_norm(ResNet(), "cn", only="nowhere")


def test_list_of_filters_matches_name_class_or_function() -> None:
    model = nn.Sequential(nn.BatchNorm2d(8), nn.BatchNorm1d(8), nn.GroupNorm(2, 8), nn.BatchNorm2d(8))
    cn.convert_norm(model, "none", dim=2, only=[nn.BatchNorm1d, "0", lambda name, module: name == "2"])
    assert [row.norm for row in cn.summarize(model)] == ["none", "none", "none", "bn"]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            nn.BatchNorm2d(8),
            {"only": 3},
            r"convert_norm: only=3: give names or patterns of layers, classes, or f\(name",
        ),
        (nn.BatchNorm2d(8), {"skip": ["a", None, 1]}, "convert_norm: skip=1: give names"),
        (nn.BatchNorm2d(8), {"dim": 5}, "convert_norm: dim=5 must be 1, 2 or 3"),
        (
            nn.BatchNorm2d(8),
            {"groups": 2},
            "convert_norm: norm 'cn' does not accept 'groups'. Did you mean 'num_groups'",
        ),
        ("net", {}, "convert_norm: expected a torch.nn.Module as model, got str"),
        (torch.jit.script(nn.BatchNorm2d(8)), {}, "it is scripted or traced and can't be changed"),
        (nn.LayerNorm(8), {}, "it has no norm over channels .*torch's LayerNorm"),
        (nn.BatchNorm2d(8), {"only": "nowhere"}, "only= and skip= exclude all 1 norm layers"),
    ],
)
def test_wrong_arguments_raise(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        cn.convert_norm(model, "cn", **options)


def test_unknown_norm_suggests_similar_names() -> None:
    with pytest.raises(ValueError, match=r"unknown norm 'cnn'\. Did you mean 'cn'.*There are \d+: none, bn, ln"):
        cn.convert_norm(ResNet(), "cnn")


@pytest.mark.parametrize(
    "add",
    [
        lambda m: m.register_forward_hook(lambda *a: None),
        lambda m: m.register_forward_pre_hook(lambda *a: None),
        lambda m: m.register_full_backward_hook(lambda *a: None),
        lambda m: m.register_state_dict_post_hook(lambda *a: None),
        lambda m: m.register_load_state_dict_post_hook(lambda *a: None),
    ],
    ids=["forward", "pre", "backward", "state dict", "load"],
)
def test_layer_with_hooks_raises(add: Callable[[nn.Module], object]) -> None:
    model = ResNet()
    add(model.stages[1][0].bn2)
    with pytest.raises(ValueError, match=r"'stages.1.0.bn2' \(BatchNorm2d\): it has hooks"):
        cn.convert_norm(model, "cn", num_groups=4)
    assert type(model.stem[1]) is nn.BatchNorm2d
    cn.convert_norm(model, "cn", num_groups=4, skip="stages.1.0.bn2")


def test_unsupported_layers_raise() -> None:
    with pytest.raises(ValueError, match=r"'0' \(ScaledBatchNorm2d\): its output differs"):
        cn.convert_norm(nn.Sequential(ScaledBatchNorm2d(8)), "cn")
    with pytest.raises(ValueError, match="has no channels yet; run a batch"):
        cn.convert_norm(nn.Sequential(nn.LazyBatchNorm2d()), "cn")
    with pytest.raises(ValueError, match="parametrization"):
        cn.convert_norm(nn.Sequential(weight_norm(nn.BatchNorm2d(8), dim=None)), "cn")


def test_lazy_layer_is_converted_after_a_batch() -> None:
    model = nn.Sequential(nn.LazyBatchNorm2d())
    model(torch.randn(2, 8, 4, 4))
    assert isinstance(cn.convert_norm(model, "cn", num_groups=2)[0], cn.ContinualNorm2d)


def test_renamed_subclass_is_converted() -> None:
    assert isinstance(cn.convert_norm(nn.Sequential(RenamedBatchNorm2d(64)), "cn")[0], cn.ContinualNorm2d)


def test_norm_act_layer_keeps_its_activation() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), BatchNormAct2d(8, nn.SiLU()))
    x = torch.randn(4, 3, 6, 6)
    model(x)
    expected, keys = copy.deepcopy(model)(x), list(model.state_dict())
    cn.convert_norm(model, "cn", num_groups=2)
    plain = cn.CN(8, num_groups=2)
    torch.testing.assert_close(model(x), nn.functional.silu(plain(model[0](x))))
    twin = copy.deepcopy(model)
    assert list(twin.state_dict()) == keys and "then acts" in str(cn.summarize(twin))
    cn.convert_norm(twin, "bn")
    with torch.no_grad():
        assert torch.equal(twin(x), expected)


def test_frozen_batch_norm_stays_constant() -> None:
    model = nn.Sequential(FrozenBatchNorm2d(8))
    x = torch.randn(4, 8, 5, 5)
    expected = model(x)
    cn.convert_norm(model, "bn")
    assert torch.equal(model.train()(x), expected)
    assert not any(p.requires_grad for p in model.parameters())
    cn.convert_norm(model, "cn", num_groups=2).train()
    before = model[0].running_mean.clone()
    assert torch.equal(model(x), copy.deepcopy(model).eval()(x))
    assert torch.equal(model[0].running_mean, before)


def test_weight_without_bias_gets_no_bias() -> None:
    layer = nn.BatchNorm2d(8)
    layer.bias = None
    new = cn.convert_norm(nn.Sequential(layer), "cn", num_groups=2)[0]
    assert new.bias is None and new.weight is layer.weight
    assert new(torch.randn(4, 8, 3, 3)).shape == (4, 8, 3, 3)


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
    with pytest.raises(ValueError, match="it is synchronised, and 'sn' has no synchronised form"):
        cn.convert_norm(nn.Sequential(nn.SyncBatchNorm(8)), "sn")


@pytest.mark.slow
def test_layers_with_extra_behaviour_raise() -> None:
    replaced = nn.BatchNorm2d(8)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    extra = nn.BatchNorm2d(8)
    extra.register_buffer("fisher", torch.zeros(8))

    class Pinned(nn.BatchNorm2d):
        def train(self, mode: bool = True) -> nn.Module:
            return super().train(False)

    for layer, words in (
        (replaced, "its forward was replaced on the object"),
        (extra, "it holds 'fisher'"),
        (Pinned(8), "overrides train"),
        (nn.InstanceNorm2d(8, track_running_stats=True), "instance norm with running statistics"),
        (torch.compile(nn.Sequential(nn.BatchNorm2d(8))), ""),
        (torch.compile(nn.BatchNorm2d(8)), "it is compiled separately"),
    ):
        model = nn.Sequential(layer)
        if words:
            with pytest.raises(ValueError, match=words):
                cn.convert_norm(model, "cn", num_groups=2)
        else:
            cn.convert_norm(model, "cn", num_groups=2)


@dataclass
class Holder:
    layer: nn.Module


def _closure(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        y: Tensor = layer(x)
        return y

    return run


@pytest.mark.parametrize(
    "hold",
    [
        lambda layer: [layer],
        lambda layer: {"first": ({1: layer},)},
        Holder,
        functools.partial,
        lambda layer: layer.forward,
        _closure,
    ],
    ids=["list", "nested", "object", "partial", "method", "closure"],
)
def test_layer_referenced_outside_the_module_tree_raises(hold: Callable[[nn.Module], object]) -> None:
    model = nn.Sequential(nn.BatchNorm2d(8))
    model.order = hold(model[0])
    with pytest.raises(ValueError, match=r"'0' \(BatchNorm2d\): the attribute 'order' refers to it"):
        cn.convert_norm(model, "cn", num_groups=2)
    cn.convert_norm(nn.Sequential(model, nn.BatchNorm2d(8)), "cn", num_groups=2, skip="0.0")


def test_layer_set_without_registration_raises() -> None:
    model = nn.Sequential(nn.BatchNorm2d(8))
    object.__setattr__(model, "first", model[0])
    with pytest.raises(ValueError, match="the attribute 'first' refers to it"):
        cn.convert_norm(model, "cn", num_groups=2)


def test_unrelated_attributes_do_not_prevent_conversion() -> None:
    model = nn.Sequential(nn.BatchNorm2d(8))
    deleted = Holder(model)
    model.weak = weakref.proxy(deleted)
    del deleted
    model.parent, model.loop = Holder(model), []
    model.loop.append(model.loop)
    model[0].compile(backend="eager")  # leaves references of the layer to itself
    cn.convert_norm(model, "cn", num_groups=2)
    assert isinstance(model[0], cn.ContinualNorm2d)


def test_filter_by_class() -> None:
    model = nn.Sequential(nn.BatchNorm2d(8), nn.GroupNorm(2, 8))
    cn.convert_norm(model, "cn", num_groups=2, only=nn.BatchNorm2d)
    assert isinstance(model[0], cn.CN) and isinstance(model[1], nn.GroupNorm)


def test_trivial_subclass_of_our_layer_is_converted() -> None:
    class Renamed(cn.ContinualNorm2d):
        """A subclass that changes nothing."""

    assert cn.summarize(Renamed(64)).rows[0].norm == "cn"
    assert type(cn.convert_norm(nn.Sequential(Renamed(64)), "bn")[0]) is cn.BatchNorm2d


def test_new_tensors_use_device_and_dtype_of_neighbours() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)).double()
    x = torch.randn(2, 3, 4, 4).double()
    expected = cn.convert_norm(cn.convert_norm(model, "none"), "bn")(x)
    assert expected.dtype == torch.float64 and model[1].weight.dtype == torch.float64


def test_options_of_synchronized_layers_are_checked() -> None:
    with pytest.raises(ValueError, match=r"does not accept 'num_grups'. Did you mean 'num_groups'"):
        cn.convert_norm(nn.Sequential(cn.SyncContinualNorm(64)), "cn", num_grups=8)


def test_converted_layer_accepts_keyword_call() -> None:
    for norm in NORMS:
        layer = cn.convert_norm(nn.BatchNorm2d(8), norm, **({"num_groups": 2} if NORMS[norm].grouped else {}))
        assert layer(input=torch.randn(2, 8, 3, 3)).shape == (2, 8, 3, 3)


def test_convert_sync_keeps_frozen_and_skips_constant_layers() -> None:
    model = cn.freeze_stats(nn.Sequential(nn.BatchNorm2d(8), cn.CN(8, num_groups=2)))
    cn.convert_sync(model)
    assert "frozen, synced" in str(cn.summarize(model)) and str(cn.summarize(model)).count("frozen") == 2
    assert cn.freeze_stats(model, False)[0].track_running_stats
    with pytest.raises(ValueError, match="nothing to convert in Sequential: none of its 1 norm layers"):
        cn.convert_sync(nn.Sequential(FrozenBatchNorm2d(8)))


def test_convert_sync_supports_cn_and_bn_only() -> None:
    model = nn.Sequential(cn.CN(8, num_groups=2, tied=True), nn.BatchNorm2d(8), cn.GroupNorm2d(8, num_groups=2))
    weight = model[0].weight
    cn.convert_sync(model)
    assert isinstance(model[0], cn.SyncContinualNorm) and model[0].tied and model[0].weight is weight
    assert isinstance(model[1], nn.SyncBatchNorm) and isinstance(model[2], cn.GroupNorm2d)
    with pytest.raises(ValueError, match=r"layer '0' \(BatchRenorm2d\): 'brn' has no synchronised form"):
        cn.convert_sync(nn.Sequential(cn.BatchRenorm2d(8)))


@pytest.mark.parametrize(("library", "name"), timm_or_torchvision)
def test_convert_models_of_torchvision_and_timm(library: str, name: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    make = _maker(library)
    torch.manual_seed(0)
    model = make(name)
    x = torch.randn(2, 3, 64, 64)
    expected = copy.deepcopy(model).eval()(x)
    count = len(norms(model))
    cn.convert_norm(model, "cn", num_groups="auto")
    assert {row.norm for row in cn.summarize(model)} == {"cn"} and len(cn.summarize(model)) == count
    model.train()(x).square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
    model = cn.convert_norm(cn.convert_norm(make(name), "cn", num_groups="auto"), "bn")
    torch.manual_seed(0)
    fresh = make(name)
    model.load_state_dict(fresh.state_dict())
    torch.testing.assert_close(model.eval()(x), expected, rtol=0, atol=0)


def _maker(library: str) -> Callable[[str], nn.Module]:
    if library == "timm":
        timm = pytest.importorskip("timm")
        return lambda name: timm.create_model(name, pretrained=False)
    models = pytest.importorskip("torchvision.models")
    return lambda name: getattr(models, name)(weights=None)


def test_convert_torchvision_frozen_batch_norm() -> None:
    ops = pytest.importorskip("torchvision.ops", reason="torchvision is not installed")
    model = nn.Sequential(ops.FrozenBatchNorm2d(8))
    x = torch.randn(2, 8, 4, 4)
    expected = model(x)
    torch.testing.assert_close(cn.convert_norm(model, "bn").train()(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"skip": "first"}, r"skip='first' is not the name of a norm layer. .*'first\.\*'"),
        ({"skip": ["first.0", "first.9"]}, "skip='first.9' is not the name of a norm layer"),
        ({"only": ["first.0", "Second"]}, "only='Second' is not the name of a norm layer"),
    ],
)
def test_filter_with_unknown_layer_name_raises(filters: dict[str, Any], message: str) -> None:
    model = nn.ModuleDict({"first": nn.Sequential(nn.BatchNorm2d(8)), "second": nn.BatchNorm2d(8)})
    with pytest.raises(ValueError, match=message):
        cn.convert_norm(model, "cn", num_groups=2, **filters)
    assert not any(isinstance(module, cn.ContinualNorm2d) for module in model.modules())


def test_pattern_without_match_is_allowed() -> None:
    model = cn.convert_norm(nn.Sequential(nn.BatchNorm2d(8)), "cn", num_groups=2, skip="*.downsample.*")
    assert isinstance(model, nn.Sequential) and isinstance(model[0], cn.ContinualNorm2d)
