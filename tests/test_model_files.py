"""Safetensors files that say which norms a model has."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import contnorm as cn
from contnorm.bench.engine.checkpoint import load_weights, pack_weights
from contnorm.errors import UserError
from contnorm.registry import NORMS
from tests.convert.test_spec import Network, X, assert_same, converted, trained
from tests.models import FrozenBatchNorm2d


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        stored: dict[str, str] = file.metadata()
        return stored


@pytest.mark.parametrize("name", NORMS)
def test_every_norm_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model = trained(converted(name))
    cn.freeze_stats(model.block)
    cn.save_model(model, tmp_path / "model.safetensors")
    loaded = Network(seed=1)
    assert cn.load_model(loaded, str(tmp_path / "model.safetensors")) is loaded
    assert_same(model, loaded)
    assert cn.norm_spec(loaded) == cn.norm_spec(model)


def test_keys_are_those_of_batch_norm(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cn.safetensors"
    model = cn.convert_norm(Network(), "cn", num_groups=4)
    cn.save_model(model, path)
    tensors = load_file(path)
    assert tensors.keys() == Network().state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in tensors.items())
    assert json.loads(metadata(path)["contnorm.norm_spec"]) == cn.norm_spec(model)
    assert metadata(path)["contnorm.version"] == cn.__version__ and metadata(path)["format"] == "pt"


def test_optimizer_goes_on_with_the_loaded_model(tmp_path: Path) -> None:
    cn.save_model(cn.convert_norm(Network(), "cn", num_groups=4), tmp_path / "m")
    model = Network(seed=1)
    parameters = list(model.parameters())
    cn.load_model(model, tmp_path / "m")
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(model.head.weight, Network().head.weight)


class Tied(nn.Module):
    """Two linear layers with one weight, and a norm layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.again = self.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.again(self.second(self.norm(self.first(x))))
        return y


def test_shared_tensors_and_layers_are_saved_once(tmp_path: Path) -> None:
    model = cn.convert_norm(Tied(), "cn", num_groups=2)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    model(x)
    cn.save_model(model, tmp_path / "m")
    assert len(load_file(tmp_path / "m")) == len(model.state_dict()) - 1 - 5
    loaded = cn.load_model(Tied(), tmp_path / "m")
    assert loaded.norm.num_batches_tracked == model.norm.num_batches_tracked == 2
    assert loaded.norm is loaded.again and loaded.first.weight is loaded.second.weight
    assert torch.equal(loaded.eval()(x), model.eval()(x))


def test_a_model_that_is_a_norm_is_returned(tmp_path: Path) -> None:
    layer = cn.ContinualNorm2d(8, num_groups=2)
    nn.init.uniform_(layer.weight)
    cn.save_model(layer, tmp_path / "m")
    loaded = cn.load_model(nn.BatchNorm2d(8), tmp_path / "m")
    assert isinstance(loaded, cn.ContinualNorm2d) and torch.equal(loaded.weight, layer.weight)


def test_constant_layers_are_loaded_into_batch_norm(tmp_path: Path) -> None:
    """Layers with constant moments have no batch counter, and the model that they are loaded into has one."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), FrozenBatchNorm2d(8))
    model[1].running_mean.fill_(0.3)
    cn.save_model(model, tmp_path / "m")
    loaded = cn.load_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), tmp_path / "m")
    assert torch.allclose(loaded(X), model(X), atol=1e-6)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_file_without_a_spec_is_refused(tmp_path: Path) -> None:
    save_file(Network().state_dict(), tmp_path / "stock")
    with pytest.raises(ValueError, match=r"stock has no norm spec, .* safetensors\.torch\.load_model\(model, path\)"):
        cn.load_model(Network(), tmp_path / "stock")


# --- weights of the bench -------------------------------------------------------------------------------------------


def test_weights_of_a_run_say_which_norms_they_have(tmp_path: Path) -> None:
    model = trained(cn.convert_norm(Network(), "cn", num_groups=4))
    (tmp_path / "0.safetensors").write_bytes(pack_weights(model))
    assert_same(model, cn.load_model(Network(seed=1), tmp_path / "0.safetensors"))
    again = cn.freeze_stats(cn.convert_norm(Network(seed=1), "cn", num_groups=4))
    load_weights(again, tmp_path / "0.json")
    assert torch.equal(again.head.weight, model.head.weight)


def test_weights_of_other_norms_are_refused(tmp_path: Path) -> None:
    cn.save_model(cn.convert_norm(Network(), "cn", num_groups=4), tmp_path / "m.safetensors")
    model = cn.convert_norm(Network(seed=1), "cn", num_groups=8)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError, match="num_groups is 4 in the spec, and 8 here"):
        load_weights(model, tmp_path / "m.json")
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_equal_models_give_equal_bytes(tmp_path: Path) -> None:
    model = cn.convert_norm(Network(), "cn", num_groups=2)
    contents = set()
    for i in range(8):  # safetensors would order three entries of metadata in one of six ways
        cn.save_model(model, tmp_path / f"{i}")
        contents.add((tmp_path / f"{i}").read_bytes())
    assert len(contents) == 1
