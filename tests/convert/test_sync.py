"""Synchronized layers: conversion to them, back, and to other norms."""

import copy

import pytest
import torch
from torch import Tensor, nn

import contnorm as cn
from contnorm.registry import NORMS

X = torch.randn(6, 3, 6, 6, generator=torch.Generator().manual_seed(5))
SYNCED = ("bn", "cn", "bn_gn", "cn_tied", "bn_gn_tied")


def network(norm: str = "bn") -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 8), nn.BatchNorm1d(8)]
    model = nn.Sequential(*layers)
    return model if norm == "bn" else cn.convert_norm(model, norm, **groups(norm))


def groups(norm: str) -> dict[str, int]:
    return {"num_groups": 2} if NORMS[norm].grouped else {}


def outputs(model: nn.Module) -> list[Tensor]:
    model = copy.deepcopy(model)
    return [model.train(training)(X).detach() for training in (False, True, False)]


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


@pytest.mark.parametrize("norm", SYNCED)
def test_revert_sync_restores_the_local_layers(norm: str) -> None:
    model = network(norm)
    model(X)
    cn.freeze_stats(model[1])
    model[5].eval()
    spec, before, expected = cn.norm_spec(model), tensors(model), outputs(model)
    cn.convert_sync(model)
    assert all(entry["synced"] for entry in cn.norm_spec(model)["norms"].values())
    assert cn.revert_sync(model) is model
    assert cn.norm_spec(model) == spec and not model[5].training
    after = tensors(model)
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in after)
    assert all(torch.equal(a, b) for a, b in zip(outputs(model), expected, strict=True))
    assert [type(model[i]).__name__[-2:] for i in (1, 5)] == ["2d", "1d"]


def test_dimension_is_an_argument_or_that_of_the_convolutions() -> None:
    assert isinstance(cn.revert_sync(nn.Sequential(nn.SyncBatchNorm(4)), dim=3)[0], nn.BatchNorm3d)
    model = nn.Sequential(nn.Conv3d(1, 4, 1), nn.SyncBatchNorm(4))
    assert isinstance(cn.revert_sync(model)[1], nn.BatchNorm3d)
    model = nn.Sequential(nn.Conv3d(1, 4, 1), nn.Conv2d(1, 4, 1), nn.SyncBatchNorm(4))
    with pytest.raises(ValueError, match="Give dim=1, 2 or 3"):
        cn.revert_sync(model)
    recorded = cn.convert_sync(nn.Sequential(nn.BatchNorm2d(4)))
    assert isinstance(cn.revert_sync(recorded, dim=3)[0], nn.BatchNorm2d)  # the layer that it was


@pytest.mark.parametrize("to", NORMS)
@pytest.mark.parametrize("start", ["bn", "bn_gn_tied"])
def test_synchronized_layers_convert_to_every_norm(start: str, to: str) -> None:
    """Norms without moments need no synchronization; others stay synchronized, or are reached through `revert_sync`."""
    model = cn.convert_sync(network(start))
    model(X)
    local = cn.revert_sync(copy.deepcopy(model))
    options = {**groups(to), **({"apply_act": False} if NORMS[to].absorbs_activation else {})}
    skip = {"skip": "5"} if to in ("in", "frn") else {}  # not defined for (N, C) input
    if NORMS[to].keeps_moments and to not in SYNCED:
        before = cn.norm_spec(model)
        with pytest.raises(ValueError, match=f"{to!r} has no synchronized form"):
            cn.convert_norm(model, to, **options)
        assert cn.norm_spec(model) == before
        cn.revert_sync(model)
    cn.convert_norm(model, to, **options, **skip)
    cn.convert_norm(local, to, **options, **skip)
    converted = [entry for path, entry in cn.norm_spec(model)["norms"].items() if path not in skip.values()]
    assert {entry["synced"] for entry in converted} == {to in SYNCED}
    for a, b in zip(outputs(model), outputs(local), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    back = cn.convert_norm(model, start, **groups(start))
    assert torch.isfinite(back(X)).all()


def test_convert_norm_keeps_frozen_synchronized_layers() -> None:
    model = cn.freeze_stats(cn.convert_sync(network()))
    cn.convert_norm(model, "cn", num_groups=2)
    assert all(entry["frozen"] and entry["synced"] for entry in cn.norm_spec(model)["norms"].values())
    assert {entry["dim"] for entry in cn.norm_spec(cn.convert_norm(model, "gn", num_groups=2))["norms"].values()} == {
        1,
        2,
    }
