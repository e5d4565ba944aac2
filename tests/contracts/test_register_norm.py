"""Registered norms: names, layers by dimension, metadata, and use by every function that takes a name."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import contnorm as cn
from contnorm.registry import NORMS, find_norm, norm_names
from tests.testing.norms import CenteredNorm


class Grouped(nn.GroupNorm):
    """Group norm with the number of channels first."""

    def __init__(self, num_features: int, num_groups: int = 4) -> None:
        super().__init__(num_groups, num_features)


@pytest.fixture(autouse=True)
def _registry_restored() -> Iterator[None]:
    before = set(NORMS)
    yield
    for name in set(NORMS) - before:
        cn.unregister_norm(name)


def test_class_serves_all_dimensions() -> None:
    assert cn.register_norm("centered", CenteredNorm, citation="Someone, 2026") is CenteredNorm
    spec = NORMS["centered"]
    assert (spec.title, spec.summary) == ("centered", "Subtracts the mean over the channels and scales")
    assert not spec.grouped and not spec.keeps_moments and "centered" in norm_names()
    for dim, shape in ((1, (4, 6)), (2, (4, 6, 3, 3)), (3, (4, 6, 2, 2, 2))):
        layer: Any = cn.create_norm("centered", 6, dim=dim, scale=2.0)  # type: ignore[arg-type]
        x = torch.randn(shape)
        torch.testing.assert_close(layer(x), 2 * (x - x.mean(1, keepdim=True)))


def test_metadata_is_read_from_the_class() -> None:
    cn.register_norm("grouped", Grouped)
    cn.register_norm("running", nn.BatchNorm2d, title="Running")
    assert NORMS["grouped"].grouped and NORMS["running"].keeps_moments and NORMS["running"].title == "Running"
    assert find_norm("grouped2")[1] == 2
    assert cn.create_norm("grouped2", 8).num_groups == 2
    with pytest.raises(ValueError, match="'running' has no layer for 1d input"):
        cn.create_norm("running", 8, dim=1)


def test_layers_by_dimension_and_decorator() -> None:
    cn.register_norm("split", layers={1: nn.BatchNorm1d, 2: nn.BatchNorm2d})
    assert type(cn.create_norm("split", 8, dim=1)) is nn.BatchNorm1d

    @cn.register_norm("decorated", cannot={"vmap": "it reads values"})
    def make(channels: int, eps: float = 1e-3) -> nn.Module:
        return nn.GroupNorm(1, channels, eps)

    assert cn.create_norm("decorated", 8).eps == 1e-3
    assert NORMS["decorated"].cannot == {"vmap": "it reads values"}
    assert make(4).num_channels == 4


@pytest.mark.parametrize("name", ["cn", "Mine", "mine2", ""])
def test_bad_names_are_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="can't be used"):
        cn.register_norm(name, CenteredNorm)


def test_taken_name_needs_permission() -> None:
    cn.register_norm("mine", CenteredNorm)
    with pytest.raises(ValueError, match="'mine' is already registered"):
        cn.register_norm("mine", Grouped)
    cn.register_norm("mine", Grouped, exist_ok=True)
    assert type(cn.create_norm("mine", 8)) is Grouped


@pytest.mark.parametrize(
    "layer",
    [
        3,
        {},
        {4: CenteredNorm},
        nn.BatchNorm2d(4),
        nn.GroupNorm,
        lambda channels: channels,
        lambda channels: [][0],
    ],
    ids=["number", "dict", "keys", "layer", "group norm", "no layer", "error"],
)
def test_bad_layers_are_rejected_and_not_registered(layer: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        cn.register_norm("mine", **({"layers": layer} if isinstance(layer, dict) else {"layer": layer}))
    assert "mine" not in NORMS


def test_registration_draws_no_random_numbers() -> None:
    class Drawing(CenteredNorm):
        def __init__(self, num_features: int) -> None:
            super().__init__(num_features)
            nn.init.normal_(self.weight)

    before = torch.random.get_rng_state()
    cn.register_norm("drawing", Drawing)
    assert torch.equal(before, torch.random.get_rng_state())


def test_factories_may_need_certain_channels() -> None:
    cn.register_norm("of-wide", lambda channels: nn.GroupNorm(32, channels))
    cn.register_norm("of-fifteen", lambda channels: nn.GroupNorm(15, channels), keeps_moments=False)  # not tried
    cn.register_norm("by-size", lambda channels: nn.GroupNorm(channels // 16, channels))
    assert cn.create_norm("by-size", 48).num_groups == 3


def test_unknown_options_are_named() -> None:
    cn.register_norm("mine", CenteredNorm)
    with pytest.raises(ValueError, match="norm 'mine' does not accept 'scal', only scale"):
        cn.create_norm("mine", 8, scal=2)


# --- conversion ----------------------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LazyLinear(8), nn.BatchNorm1d(8))


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
    with pytest.raises(ValueError, match=r"can't convert '0' \(Renamed\).*overrides forward"):
        cn.convert_norm(model, "bn")  # unknown to detect_norm
    cn.register_norm("renamed", Renamed)
    assert cn.summarize(model).rows[0].norm == "renamed"
    assert cn.convert_norm(model, "bn")[0].running_mean is mean


def test_factory_is_detected_if_registered() -> None:
    cn.register_norm("made", lambda channels: nn.GroupNorm(4, channels))
    model = cn.convert_norm(network(), "made")
    assert [row.norm for row in cn.summarize(model).rows] == ["made", "made"]
    assert type(cn.convert_norm(model, "gn", num_groups=2)[4]) is cn.GroupNorm1d
    assert cn.summarize(nn.Sequential(nn.GroupNorm(4, 8))).rows[0].norm == "gn"  # not made by the factory


def test_layer_without_channels_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self, num_features: int) -> None:
            super().__init__()

    cn.register_norm("bare", Bare)
    with pytest.raises(ValueError, match="its number of channels is unknown; store it as the attribute num_features"):
        cn.convert_norm(nn.Sequential(Bare(8)), "bn")


def test_groups_of_a_grouped_class() -> None:
    model = cn.convert_norm(network(), Grouped, num_groups=2)
    assert [model[1].num_groups, model[4].num_groups] == [2, 2]
    assert cn.convert_norm(network(), Grouped, num_groups="auto")[1].num_groups == 4
    with pytest.raises(ValueError, match="num_groups=3"):
        cn.convert_norm(network(), Grouped, num_groups=3)
    assert cn.convert_norm(network(), Grouped)[1].num_groups == 4  # the default of the class


def test_class_of_one_dimension_does_not_replace_others() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"layer '4' \(BatchNorm1d\).*no layer for 1d input.*The model is unchanged"):
        cn.convert_norm(model, nn.BatchNorm2d)
    assert type(cn.convert_norm(model, nn.BatchNorm2d, only="1")[1]) is nn.BatchNorm2d


def test_moments_of_a_registered_norm_are_frozen_and_estimated() -> None:
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
    with cn.frozen_stats(nn.Sequential(layer := Halved(4))) as model:
        model(x)
    assert layer.running_mean is not None and layer.running_mean.count_nonzero() == 0
    with pytest.raises(ValueError, match=r"does not define batch_moments\(x\)"):
        cn.reestimate(nn.Sequential(Halved(4)), [x])
    measured = nn.Sequential(Measured(4))
    cn.reestimate(measured, [x])
    torch.testing.assert_close(measured[0].running_mean, (x / 2).mean((0, 2, 3)))
    torch.testing.assert_close(measured[0].running_var, (x / 2).var((0, 2, 3)))


def test_layers_are_copied_and_pickled_with_their_norm() -> None:
    cn.register_norm("centered", CenteredNorm)
    layer = cn.create_norm("centered", 8, dim=1)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for twin in (pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)):
        assert type(cn.convert_norm(nn.Sequential(twin), "gn", num_groups=2)[0]) is cn.GroupNorm1d
