"""The registry of norms: its entries, lookup and creation by name, and norms of users in every function."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import contnorm as cn
from contnorm.registry import NORMS, find_norm, norm_class
from contnorm.testing import NORM_CHECKS
from tests.testing.norms import CenteredNorm


@pytest.mark.parametrize("name", NORMS)
def test_entry_is_complete(name: str) -> None:
    spec = NORMS[name]
    assert spec.name == name and spec.title and spec.summary and spec.citation
    for dim in (1, 2, 3):
        cls = norm_class(spec, dim)  # type: ignore[arg-type]
        assert getattr(cn, cls.__name__) is cls, "a public name"


def test_declared_limitations_are_tested() -> None:
    declared = {cell for spec in NORMS.values() for cell in spec.cannot}
    assert {cell for cell in declared if not cell.startswith("rank")} <= set(NORM_CHECKS)


def test_find_norm_by_name_and_groups() -> None:
    paper = ("none", "bn", "ln", "in", "gn", "brn", "sn", "cn", "bn_gn", "cn_tied", "bn_gn_tied")
    assert tuple(NORMS)[: len(paper)] == paper
    assert {"adab2n", "tbbn", "bnt", "iabn", "rbn", "evonorm_s0", "frn", "gn_ws"} <= NORMS.keys()
    assert find_norm(" CN32 ") == (NORMS["cn"], 32)
    assert find_norm("bn_gn_tied4") == (NORMS["bn_gn_tied"], 4)
    assert find_norm("evonorm_s0") == (NORMS["evonorm_s0"], None)
    assert find_norm("evonorm_s0-8") == (NORMS["evonorm_s0"], 8)
    with pytest.raises(ValueError, match="unknown norm 'cn-8'"):
        find_norm("cn-8")
    with pytest.raises(ValueError, match="'bn' has no groups"):
        find_norm("bn8")
    with pytest.raises(ValueError, match=r"unknown norm 'xyz'\. There are: none, bn"):
        find_norm("xyz")


def test_create_norm_passes_options() -> None:
    layer = cn.create_norm("bn_gn_tied", 16, dim=3, num_groups=4, eps=1e-3, momentum=None, dtype=torch.float64)
    assert type(layer) is cn.ContinualNorm3d
    assert (layer.order, layer.tied, layer.num_groups) == ("bn_gn", True, 4)
    assert (layer.eps, layer.momentum, layer.weight.dtype) == (1e-3, None, torch.float64)


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("gn", {"momentum": 0.1}, TypeError, "momentum"),
        ("cn", {"num_group": 4}, TypeError, "num_group"),
        ("cn8", {"num_groups": 4}, ValueError, "num_groups"),
        ("cn_tied", {"tied": False}, ValueError, "tied"),
        ("cn", {"dim": 4}, ValueError, "4d"),
        ("ContinualNorm2d", {}, ValueError, "unknown norm"),
    ],
)
def test_create_norm_rejects_wrong_options(
    name: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        cn.create_norm(name, 64, **options)


# --- norms of users -------------------------------------------------------------------------------------------------


class Grouped(nn.GroupNorm):
    """Group norm with the number of channels first."""

    def __init__(self, num_features: int, num_groups: int = 4) -> None:
        super().__init__(num_groups, num_features)


@pytest.fixture
def _registry_restored() -> Iterator[None]:
    before = set(NORMS)
    yield
    for name in set(NORMS) - before:
        cn.unregister_norm(name)


restored = pytest.mark.usefixtures("_registry_restored")


@restored
def test_class_serves_all_dimensions() -> None:
    cn.register_norm("centered", CenteredNorm, citation="Someone, 2026")
    spec = NORMS["centered"]
    assert (spec.title, spec.summary) == ("centered", "Subtracts the mean over the channels and scales")
    assert spec.citation == "Someone, 2026" and "centered" in NORMS
    assert not spec.grouped and not spec.keeps_moments
    for dim, shape in ((1, (4, 6)), (2, (4, 6, 3, 3)), (3, (4, 6, 2, 2, 2))):
        layer: Any = cn.create_norm("centered", 6, dim=dim, scale=2.0)  # type: ignore[arg-type]
        x = torch.randn(shape)
        torch.testing.assert_close(layer(x), 2 * (x - x.mean(1, keepdim=True)))


@restored
def test_facts_are_read_from_the_class() -> None:
    cn.register_norm("grouped", Grouped)
    cn.register_norm("running", nn.BatchNorm2d, title="Running", cannot={"vmap": "it reads values"})
    assert NORMS["grouped"].grouped and NORMS["running"].keeps_moments and NORMS["running"].title == "Running"
    assert NORMS["running"].cannot == {"vmap": "it reads values"}
    assert find_norm("grouped2")[1] == 2
    assert cn.create_norm("grouped2", 8).num_groups == 2
    with pytest.raises(ValueError, match="'running' has no layer for 1d input"):
        cn.create_norm("running", 8, dim=1)
    cn.register_norm("split", {1: nn.BatchNorm1d, 2: nn.BatchNorm2d})
    assert type(cn.create_norm("split", 8, dim=1)) is nn.BatchNorm1d


@restored
@pytest.mark.parametrize("name", ["cn", "Mine", "mine2", "", "taken"])
def test_bad_or_taken_name_is_rejected(name: str) -> None:
    cn.register_norm("taken", CenteredNorm)
    with pytest.raises(ValueError, match=f"{name!r} is already registered" if name == "taken" else "can't be used"):
        cn.register_norm(name, Grouped)
    cn.register_norm("taken", Grouped, exist_ok=True)
    assert type(cn.create_norm("taken", 8)) is Grouped


@pytest.mark.parametrize("layer", [3, {}, {4: CenteredNorm}, nn.GroupNorm, lambda channels: channels])
def test_bad_layers_are_rejected_and_not_registered(layer: Any) -> None:
    with pytest.raises(TypeError):
        cn.register_norm("mine", layer)
    assert "mine" not in NORMS


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LazyLinear(8), nn.BatchNorm1d(8))


@restored
def test_conversion_to_a_class_and_back_keeps_parameters_and_output() -> None:
    cn.register_norm("centered", CenteredNorm)
    model = network()
    x = torch.randn(4, 3, 6, 6)
    for _ in range(3):
        model(x)
    expected = model.eval()(x)
    weights, kinds = [model[1].weight, model[4].weight], [type(model[1]), type(model[4])]
    cn.convert_norm(model, CenteredNorm, scale=3.0)
    assert [type(layer) for layer in (model[1], model[4])] == [CenteredNorm, CenteredNorm]
    assert model[1].weight is weights[0] and model[4].weight is weights[1] and model[1].scale == 3.0
    assert not model[1].training
    cn.convert_norm(model, "bn")  # the dimension of each layer is known, although the class serves all
    assert [type(model[1]), type(model[4])] == [cn.BatchNorm2d, cn.BatchNorm1d] != kinds
    assert model[1].weight is weights[0]
    assert model(x).shape == expected.shape  # running moments are lost: CenteredNorm has none


@restored
def test_conversion_keeps_moments_and_options() -> None:
    class Renamed(nn.BatchNorm2d):
        """A batch norm that may compute anything."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    model = nn.Sequential(nn.BatchNorm2d(8, eps=1e-3, momentum=0.3))
    model(torch.randn(4, 8, 2, 2))
    mean = model[0].running_mean
    cn.convert_norm(model, Renamed)
    assert type(model[0]) is Renamed and model[0].running_mean is mean
    assert (model[0].eps, model[0].momentum) == (1e-3, 0.3)
    with pytest.raises(ValueError, match="overrides forward"):
        cn.convert_norm(model, "bn")  # unknown to detect_norm
    cn.register_norm("renamed", Renamed)
    assert cn.summarize(model).rows[0].norm == "renamed"
    assert cn.convert_norm(model, "bn")[0].running_mean is mean


@restored
def test_factory_is_detected_if_registered() -> None:
    cn.register_norm("made", lambda channels: nn.GroupNorm(4, channels))
    model = cn.convert_norm(network(), "made")
    assert [row.norm for row in cn.summarize(model).rows] == ["made", "made"]
    assert type(cn.convert_norm(model, "gn", num_groups=2)[4]) is cn.GroupNorm1d
    assert cn.summarize(nn.Sequential(nn.GroupNorm(4, 8))).rows[0].norm == "gn"  # not made by the factory


@restored
def test_groups_of_a_grouped_class() -> None:
    model = cn.convert_norm(network(), Grouped, num_groups=2)
    assert [model[1].num_groups, model[4].num_groups] == [2, 2]
    assert cn.convert_norm(network(), Grouped, num_groups="auto")[1].num_groups == 4
    assert cn.convert_norm(network(), Grouped)[1].num_groups == 4  # the default of the class


@restored
def test_class_of_one_dimension_does_not_replace_others() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"layer '4' \(BatchNorm1d\).*no layer for 1d input.*The model is unchanged"):
        cn.convert_norm(model, nn.BatchNorm2d)
    assert type(cn.convert_norm(model, nn.BatchNorm2d, only="1")[1]) is nn.BatchNorm2d


@restored
def test_layers_are_pickled_with_their_norm() -> None:
    cn.register_norm("centered", CenteredNorm)
    layer = pickle.loads(pickle.dumps(cn.create_norm("centered", 8, dim=1)))
    assert type(cn.convert_norm(nn.Sequential(layer), "gn", num_groups=2)[0]) is cn.GroupNorm1d


@restored
def test_moments_of_a_registered_norm_are_estimated() -> None:
    class Halved(nn.BatchNorm2d):
        """Batch norm of half the input."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x / 2)

    class Measured(Halved):
        def batch_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = x.double() / 2
            return x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)

    cn.register_norm("halved", Halved)
    cn.register_norm("measured", Measured)
    x = torch.randn(16, 4, 3, 3) + 5
    with pytest.raises(ValueError, match=r"does not define batch_moments\(x\)"):
        cn.reestimate(nn.Sequential(Halved(4)), [x])
    model = nn.Sequential(Measured(4))
    cn.reestimate(model, [x])
    torch.testing.assert_close(model[0].running_mean, (x / 2).mean((0, 2, 3)))
    torch.testing.assert_close(model[0].running_var, (x / 2).var((0, 2, 3)))
