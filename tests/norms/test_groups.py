"""The choice of ``num_groups="auto"``, and errors about a number that does not divide the channels."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import contnorm as cn
from contnorm.bench.config.defaults import complete
from contnorm.bench.config.schema import ModelConfig, NormConfig, from_dict
from contnorm.bench.models.build import build_model
from contnorm.bench.models.norm_layers import norm_maker
from contnorm.checks import auto_groups
from contnorm.errors import UserError

# channels, groups on maps, groups on a single position
TABLE = [(1, 1, 1), (8, 4, 1), (9, 3, 1), (16, 8, 2), (37, 1, 1), (64, 32, 8), (74, 2, 2), (100, 25, 10), (512, 32, 32)]


@pytest.mark.parametrize(("channels", "on_maps", "on_one_position"), TABLE)
def test_auto_groups_by_number_of_channels(channels: int, on_maps: int, on_one_position: int) -> None:
    assert (auto_groups(channels), auto_groups(channels, one_position=True)) == (on_maps, on_one_position)
    for norm in ("cn", "gn"):
        assert cn.create_norm(norm, channels, num_groups="auto").num_groups == on_maps
        flat = cn.create_norm(norm, channels, dim=1, num_groups="auto")
        if channels > 1:
            assert flat(torch.randn(4, channels)).shape == (4, channels)


@pytest.mark.parametrize(("one_position", "least"), [(False, 2), (True, 8)])
def test_auto_gives_large_groups_or_one(one_position: bool, least: int) -> None:
    for channels in range(1, 300):
        groups = auto_groups(channels, one_position)
        assert channels % groups == 0 and groups <= 32 and (groups == 1 or channels // groups >= least)


def test_summary_marks_groups_that_are_layer_or_instance_norm() -> None:
    model = nn.Sequential(
        cn.CN(37, num_groups="auto"), cn.CN(8, num_groups=8), cn.CN(8, num_groups=4), cn.LayerNorm2d(8)
    )
    assert [row.state for row in cn.summarize(model)] == [
        "train, one group", "train, one channel a group", "train", "train"
    ]  # fmt: skip


# --- in the settings of a run ---------------------------------------------------------------------------------


def test_config_hash_depends_on_the_rule() -> None:
    stream = {"name": "split-cifar10"}
    new = complete({"stream": stream, "norm": {"name": "cn", "groups": "auto"}}, "cifar10")
    assert new.norm.auto_channels == 2
    old = replace(new, norm=replace(new.norm, auto_channels=1))
    assert old.hash != new.hash
    assert complete({"stream": stream, "norm": {"name": "cn", "groups": "auto", "auto_channels": 1}}, "cifar10") == old
    raw = old.as_dict()
    del raw["norm"]["auto_channels"]  # as version 0.1 recorded it
    assert from_dict(raw) == old
    for norm in ({"name": "cn", "groups": 8}, {"name": "cn8"}, {"name": "bn", "groups": "auto"}):
        assert complete({"stream": stream, "norm": norm}, "cifar10").norm.auto_channels == 1


def test_config_hash_ignores_notation_of_the_norm() -> None:
    stream = {"name": "split-cifar10"}
    norms = ({"name": "cn", "groups": 2}, {"name": "cn2"}, {"name": "CN2", "groups": 2})
    configs = [complete({"stream": stream, "norm": norm}, "cifar10") for norm in norms]
    assert {config.hash for config in configs} == {configs[0].hash}
    assert (configs[1].norm.name, configs[1].norm.groups) == ("cn", 2)


@pytest.mark.parametrize(("rule", "groups"), [(1, [16, 20, 32, 31]), (2, [8, 10, 32, 1])])
def test_networks_use_the_rule_of_their_settings(rule: int, groups: list[int]) -> None:
    make = norm_maker(NormConfig("cn", groups="auto", auto_channels=rule), 2, 100)  # type: ignore[arg-type]
    assert [make(channels).num_groups for channels in (16, 20, 64, 31)] == groups
    flat = norm_maker(NormConfig("cn", groups="auto", auto_channels=rule), 1, 100)  # type: ignore[arg-type]
    assert [flat(channels).num_groups for channels in (16, 100)] == [2, 10]


@pytest.mark.parametrize("norm", [NormConfig("cn32"), NormConfig("gn", groups=32)])
def test_error_suggests_groups_for_all_layers(norm: NormConfig) -> None:
    for name, width, fits in (("resnet18", 20, 10), ("mlp", 100, 25)):
        words = rf"norm\.groups=32 does not divide .* such as {fits}"
        with pytest.raises(UserError, match=words):
            build_model(ModelConfig(name, width=width), norm, (3, 32, 32), 10, 100)
