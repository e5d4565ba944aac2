"""Safetensors files that say which norms a model has."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import contnorm as cn
from contnorm import atomic_files
from contnorm.bench.engine.checkpoint import load_weights, save_weights
from contnorm.errors import UserError
from contnorm.registry import NORMS, norm_names
from tests.test_model_norms import FrozenBatchNorm2d, Network, X, assert_same, trained


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        stored: dict[str, str] = file.metadata()
        return stored


@pytest.mark.parametrize("name", norm_names())
def test_every_norm_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    groups: dict[str, object] = {"num_groups": 4} if NORMS[name].grouped else {}
    model = trained(cn.convert_norm(Network(), name, example_input=X, **groups))
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


def test_weights_are_cast_to_the_model(tmp_path: Path) -> None:
    cn.save_model(Network(), tmp_path / "m")
    model = cn.load_model(Network(seed=1).double(), tmp_path / "m")
    assert model.head.weight.dtype is torch.float64
    assert torch.equal(model.head.weight.float(), Network().head.weight)


def test_torch_save_with_a_spec(tmp_path: Path) -> None:
    model = cn.freeze_stats(cn.convert_norm(Network(), "bn_gn", num_groups=8))
    torch.save({"model": model.state_dict(), "norms": cn.norm_spec(model)}, tmp_path / "m.pt")
    saved = torch.load(tmp_path / "m.pt", weights_only=True)
    loaded = cn.apply_norm_spec(Network(seed=1), saved["norms"])
    loaded.load_state_dict(saved["model"])
    assert_same(model, loaded)


# --- what is refused ------------------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> list[Any]:
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    return [list(model.modules()), [type(m) for m in model.modules()], cn.norm_spec(model), tensors]


def assert_unchanged(model: nn.Module, before: list[Any]) -> None:
    after = state_of(model)
    assert after[:3] == before[:3] and after[3].keys() == before[3].keys()
    assert all(torch.equal(after[3][name], value) for name, value in before[3].items())


def wider() -> nn.Module:
    model = Network()
    model.head = nn.Linear(16, 7)
    return model


def deeper() -> nn.Module:
    model = Network()
    model.more = nn.Linear(2, 2, bias=False)  # type: ignore[assignment]
    return model


def smaller() -> nn.Module:
    model = Network()
    model.head = nn.Identity()  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("start", [None, "frn", "gn_ws", "cn"])
@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (wider, r"'head\.weight': of shape \(7, 16\) in the file, and \(5, 16\) in the model; 'head\.bias'"),
        (deeper, r"'more\.weight': in the file, and not in the model"),
        (smaller, r"'head\.weight', 'head\.bias': in the model, and not in the file"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(
    saved: Callable[[], nn.Module], words: str, start: str | None, tmp_path: Path
) -> None:
    """The norms fit and would be converted; the weights of another layer do not fit."""
    for norm in ("evonorm_s0", "cn", "gn_ws"):
        other = saved()
        cn.convert_norm(other.stem, norm, num_groups=4)
        cn.save_model(cn.freeze_stats(other), tmp_path / "m")
        model = Network()
        if start is not None:
            groups = {} if start == "frn" else {"num_groups": 2}
            cn.convert_norm(model, start, example_input=X, **groups)
        before = state_of(model)
        absorbed = [getattr(m, "absorbed", ()) for m in model.modules()]
        with pytest.raises(ValueError, match=r"load_model: the weights in .* do not fit Network: .*" + words):
            cn.load_model(model, tmp_path / "m")
        assert_unchanged(model, before)
        assert [getattr(m, "absorbed", ()) for m in model.modules()] == absorbed


def test_norms_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    cn.save_model(nn.Sequential(nn.BatchNorm2d(8)), tmp_path / "m")
    model = Network()
    before = state_of(model)
    with pytest.raises(ValueError, match="the spec does not fit Network: '0': not in the model"):
        cn.load_model(model, tmp_path / "m")
    assert_unchanged(model, before)


def test_file_without_a_spec_is_refused(tmp_path: Path) -> None:
    save_file(Network().state_dict(), tmp_path / "stock")
    with pytest.raises(ValueError, match=r"stock has no norm spec, .* safetensors\.torch\.load_model\(model, path\)"):
        cn.load_model(Network(), tmp_path / "stock")


def test_damaged_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file .*absent"):
        cn.load_model(Network(), tmp_path / "absent")
    (tmp_path / "text").write_text("not tensors, and more than eight bytes")
    for path in (tmp_path / "text", tmp_path):
        with pytest.raises(ValueError, match=r"can't be read as a safetensors file"):
            cn.load_model(Network(), path)
    for text in ("{", "3", "[" * 100_000):
        save_file({}, tmp_path / "spec", metadata={"contnorm.norm_spec": text})
        with pytest.raises(ValueError, match=r"the norm spec in .*spec is damaged"):
            cn.load_model(Network(), tmp_path / "spec")


def test_meta_models_are_refused(tmp_path: Path) -> None:
    cn.save_model(Network(), tmp_path / "m")
    with pytest.raises(ValueError, match=r"on the meta device, without data; call model\.to_empty"):
        cn.load_model(Network().to("meta"), tmp_path / "m")
    loaded = cn.load_model(Network().to("meta").to_empty(device="cpu"), tmp_path / "m")
    assert torch.equal(loaded.head.weight, Network().head.weight)


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"count": 3}


def test_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'0\._extra_state' of the state dict is not a tensor.*torch\.save"):
        cn.save_model(nn.Sequential(WithExtraState(2, 2)), tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m"
    cn.save_model(Network(), path)
    content = path.read_bytes()

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        cn.save_model(Network(seed=1), path)
    assert path.read_bytes() == content and list(tmp_path.iterdir()) == [path]


def test_missing_safetensors_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def absent(name: str, package: str | None = None) -> Any:
        if name.startswith("safetensors"):
            raise ModuleNotFoundError("No module named 'safetensors'", name="safetensors")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", absent)
    for call in (cn.save_model, cn.load_model):
        with pytest.raises(ModuleNotFoundError, match=r'needs safetensors\. .* pip install "contnorm\[bench\]"'):
            call(copy.deepcopy(Network()), tmp_path / "m")


# --- weights of the bench -------------------------------------------------------------------------------------------


def test_weights_of_a_run_say_which_norms_they_have(tmp_path: Path) -> None:
    model = trained(cn.convert_norm(Network(), "cn", num_groups=4))
    save_weights(model, tmp_path / "0.json")
    assert_same(model, cn.load_model(Network(seed=1), tmp_path / "0.safetensors"))
    again = cn.freeze_stats(cn.convert_norm(Network(seed=1), "cn", num_groups=4))
    load_weights(again, tmp_path / "0.safetensors", "")
    assert torch.equal(again.head.weight, model.head.weight)


@pytest.mark.parametrize(
    ("norm", "options", "words"),
    [
        ("bn", {}, "norm is 'cn', and 'bn' here"),
        ("cn", {"num_groups": 8}, "num_groups is 4, and 8 here"),
        ("cn_tied", {"num_groups": 4}, "norm is 'cn', and 'cn_tied' here"),
    ],
)
def test_weights_of_other_norms_are_refused(norm: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    cn.save_model(cn.convert_norm(Network(), "cn", num_groups=4), tmp_path / "m")
    model = cn.convert_norm(Network(seed=1), norm, **options)
    before = state_of(model)
    with pytest.raises(
        UserError, match=rf"m: has the weights of a network with other norms: 'stem\.1'.*{words}.* Advice"
    ):
        load_weights(model, tmp_path / "m", "Advice.")
    assert_unchanged(model, before)


def test_damaged_spec_in_weights_is_a_user_error(tmp_path: Path) -> None:
    save_file(Network().state_dict(), tmp_path / "m", metadata={"contnorm.norm_spec": "[]"})
    with pytest.raises(UserError, match="is not a safetensors file with the weights of this network"):
        load_weights(Network(), tmp_path / "m", "")


def test_folder_as_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=r"is a folder. Give a file, such as .*model.safetensors"):
        cn.save_model(nn.Sequential(nn.BatchNorm2d(4)), tmp_path)
    assert not list(tmp_path.iterdir())


def test_equal_models_give_equal_bytes(tmp_path: Path) -> None:
    model = cn.convert_norm(Network(), "cn", num_groups=2)
    contents = set()
    for i in range(8):  # safetensors would order three entries of metadata in one of six ways
        cn.save_model(model, tmp_path / f"{i}")
        contents.add((tmp_path / f"{i}").read_bytes())
    assert len(contents) == 1
