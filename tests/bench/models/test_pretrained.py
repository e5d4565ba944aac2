"""Pretrained weights: what is loaded, what is newly initialized, and what is refused."""

import hashlib
import logging
import os
import pickle
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import contnorm as cn
from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import ModelConfig, NormConfig, RunConfig
from contnorm.bench.models import pretrained
from contnorm.bench.models.build import build_model
from contnorm.bench.models.pretrained import locate_weights, read_weights, weights_hash
from contnorm.errors import UserError
from tests.datasets import small_mnist

State = dict[str, Tensor]
WIDTH = 4


def made(norm: str = "bn", outputs: int = 5, name: str = "resnet34", weights: Path | None = None) -> nn.Module:
    config = ModelConfig(name, width=WIDTH, weights=None if weights is None else str(weights))
    return build_model(config, NormConfig(norm), (3, 32, 32), outputs, 1)


@pytest.fixture
def state() -> State:
    """A state dict no fresh network has: of a training that left its marks everywhere, 5 outputs."""
    torch.manual_seed(7)
    trained = made().state_dict()
    for name, tensor in trained.items():
        trained[name] = torch.rand_like(tensor) + 0.5 if tensor.is_floating_point() else torch.tensor(1234)
    return trained


@pytest.fixture
def file(tmp_path: Path, state: State) -> Path:
    save_file(state, tmp_path / "trained.safetensors")
    return tmp_path / "trained.safetensors"


def saved(path: Path, content: object, old: bool = False) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=not old)
    return path


def same(network: nn.Module, state: State, but: tuple[str, ...] = ()) -> bool:
    own = network.state_dict()
    return all(torch.equal(own[name], state[name]) for name in own if not name.startswith(but))


@pytest.mark.parametrize("kind", ["safetensors", "torch", "old torch", "checkpoint"])
def test_weights_load_from_every_file_format(kind: str, tmp_path: Path, state: State) -> None:
    path = tmp_path / "weights"
    if kind == "safetensors":
        save_file(state, path)
    elif kind == "checkpoint":
        saved(path, {"epoch": 90, "state_dict": state, "optimizer": {"lr": 0.1}})
    else:
        saved(path, state, old=kind == "old torch")
    assert same(made(weights=path), state)
    assert not same(made(), state)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module."])
def test_prefixes_of_wrappers_are_removed(prefix: str, tmp_path: Path, state: State) -> None:
    path = saved(tmp_path / "w.pth", {prefix + name: tensor for name, tensor in state.items()})
    assert same(made(weights=path), state)


@pytest.mark.parametrize("norm", ["cn4", "brn", "bn_gn2", "cn_tied4"])
def test_bn_weights_load_into_other_norms(norm: str, file: Path, state: State) -> None:
    network = made(norm, weights=file)
    own = network.state_dict()
    assert set(state) <= set(own) and all(torch.equal(own[name], state[name]) for name in state)
    assert own["layer4.2.bn2.running_var"].min() > 0.4 and own["bn1.num_batches_tracked"] == 1234
    if norm == "cn4":
        assert {m.num_groups for m in network.modules() if hasattr(m, "num_groups")} == {4}


def test_missing_moments_keep_their_initial_values(tmp_path: Path, state: State) -> None:
    """An older file has no batch counts; one of group norm has no moments at all. Affine parameters it must have."""
    older = {name: t for name, t in state.items() if not name.endswith("num_batches_tracked")}
    network = made("cn4", weights=saved(tmp_path / "older.pth", older))
    assert network.state_dict()["bn1.num_batches_tracked"] == 0
    assert torch.equal(network.state_dict()["bn1.running_mean"], state["bn1.running_mean"])
    grouped = {name: t for name, t in older.items() if "running" not in name}
    network = made("cn4", weights=saved(tmp_path / "gn.pth", grouped))
    assert network.state_dict()["bn1.running_mean"].eq(0).all()
    del grouped["bn1.weight"]
    with pytest.raises(UserError, match=r"1 missing \(bn1\.weight\)"):
        made("cn4", weights=saved(tmp_path / "gn.pth", grouped))


def test_classifier_with_other_outputs_is_reinitialized_with_a_warning(
    file: Path, tmp_path: Path, state: State, caplog: pytest.LogCaptureFixture
) -> None:
    pretrained._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # one warning
            torch.manual_seed(3)
            network = made(outputs=9, weights=file)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"{file}: ") and "fc" in warning and "5 outputs and the run has 9" in warning
    torch.manual_seed(3)
    assert torch.equal(network.fc.weight, made(outputs=9).fc.weight), "the seed's own"  # type: ignore[union-attr,arg-type]
    assert same(network, state, but=("fc.",))
    headless = saved(tmp_path / "headless.pth", {n: t for n, t in state.items() if not n.startswith("fc.")})
    assert same(made(weights=headless), state, but=("fc.",))
    assert "the file has no classifier" in caplog.records[-1].getMessage()


def test_mismatched_weights_are_refused_and_change_nothing(file: Path, tmp_path: Path, state: State) -> None:
    with pytest.raises(UserError) as caught:
        made(name="resnet50", weights=file)
    message = str(caught.value)
    assert message.startswith(f"{file}: the weights do not fit model 'resnet50' of width 4: ") and "\n" not in message
    assert "missing (layer1." in message and "with another shape (" in message and len(message) < 600
    with pytest.raises(UserError, match=r"2 unexpected \(extra\.weight, head\.weight\)"):
        made(weights=saved(tmp_path / "w.pth", {**state, "extra.weight": torch.ones(1), "head.weight": torch.ones(2)}))
    narrow = {**state, "fc.weight": torch.ones(5, 7)}
    with pytest.raises(UserError, match=r"1 with another shape \(fc\.weight\)"):
        made(weights=saved(tmp_path / "w.pth", narrow))
    network = made()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    config = ModelConfig("resnet34", WIDTH, weights=str(tmp_path / "w.pth"))
    with pytest.raises(UserError):
        pretrained.load_pretrained(network, config)
    assert same(network, before)


class Mischief:
    """What a pickle does on being read, if it may: leave a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("kind", ["torch", "old torch", "plain pickle"])
def test_files_with_code_are_refused_and_not_run(kind: str, tmp_path: Path, state: State) -> None:
    mark, path = tmp_path / "mark", tmp_path / "w.pth"
    content = {**state, "fc.bias": Mischief(mark)}
    if kind == "plain pickle":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        saved(path, content, old=kind == "old torch")
    with pytest.raises(UserError) as caught:
        made(weights=path)
    assert not mark.exists() and "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.pth': there is no such file\..* torchvision:IMAGENET1K_V1, "):
        made(weights=tmp_path / "gone.pth")


# By name.


@pytest.fixture
def published(tmp_path: Path, state: State, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A server of our own that has one published file, and a folder of torch's to keep it in; gives the former's."""
    there = tmp_path / "there"
    there.mkdir()
    plain = saved(tmp_path / "plain", state).read_bytes()
    name = f"resnet34-{hashlib.sha256(plain).hexdigest()[:8]}.pth"
    (there / name).write_bytes(plain)
    monkeypatch.setitem(pretrained.PUBLISHED["torchvision:IMAGENET1K_V1"], "resnet34", name)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(there))) as http:
        monkeypatch.setattr(pretrained, "BASE", f"http://127.0.0.1:{http.server_port}/")
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield there / name
        http.shutdown()


NAMED = "torchvision:IMAGENET1K_V1"


def test_published_weights_are_downloaded_once_into_torchs_cache(published: Path, tmp_path: Path, state: State) -> None:
    network = build_model(ModelConfig("resnet34", WIDTH, weights=NAMED), NormConfig(), (3, 32, 32), 5, 1)
    assert same(network, state)
    kept = tmp_path / "home" / "hub" / "checkpoints" / published.name
    assert kept.read_bytes() == published.read_bytes()
    published.unlink()
    assert locate_weights(NAMED, "resnet34") == kept
    kept.write_bytes(b"spoilt")
    with pytest.raises(UserError, match=rf"{published.name}: is damaged: .*SHA-256.*Delete it"):
        locate_weights(NAMED, "resnet34")


def test_unknown_published_weights_are_refused() -> None:
    with pytest.raises(UserError, match=r"unknown weights of mlp"):
        weights_hash(NAMED, "mlp")
    with pytest.raises(UserError, match=r"unknown weights of resnet34 'torchvision:IMAGENET1K_V2'.*IMAGENET1K_V1"):
        weights_hash("torchvision:IMAGENET1K_V2", "resnet34")


# As a setting of a run.


def test_config_hash_depends_on_content_of_weights(file: Path, tmp_path: Path) -> None:
    root = small_mnist(tmp_path / "data", train=40, test=20)
    asked = {"stream": {"name": "split-mnist"}, "model": {"name": "resnet34", "weights": str(file)}}
    config = resolve(asked, root)
    assert config.model.weights_hash == hashlib.sha256(file.read_bytes()).hexdigest()[:8]
    assert config.hash != resolve({**asked, "model": {"name": "resnet34"}}, root).hash
    copied = tmp_path / "elsewhere"
    copied.write_bytes(file.read_bytes())
    elsewhere = resolve({**asked, "model": {"name": "resnet34", "weights": str(copied)}}, root)
    assert elsewhere.hash == config.hash, "the same weights, wherever they lie"
    copied.write_bytes(file.read_bytes() + b" ")
    assert resolve({**asked, "model": {"name": "resnet34", "weights": str(copied)}}, root).hash != config.hash
    with pytest.raises(UserError, match=r"model\.weights_hash='0' .*can't be set"):
        resolve({"model": {"weights_hash": "0"}}, root)
    with pytest.raises(UserError, match="there is no such file"):
        resolve({**asked, "model": {"weights": "nowhere.pth"}}, root)
    assert resolve({"model": {"name": "resnet50", "weights": NAMED}}, root).model.weights_hash == "0676ba61"


def test_config_hash_without_weights_is_unchanged() -> None:
    """The hash of all defaults, as it was before weights were a setting."""
    assert RunConfig().hash == "571ff2d1447a"


def test_weights_changed_since_the_start_are_refused(file: Path, state: State) -> None:
    config = ModelConfig("resnet34", WIDTH, weights=str(file), weights_hash=weights_hash(str(file), "resnet34"))
    assert same(build_model(config, NormConfig(), (3, 32, 32), 5, 1), state)
    other = replace(config, weights_hash="01234567")
    with pytest.raises(UserError, match=r"have changed since the run started \(model\.weights_hash was 01234567"):
        build_model(other, NormConfig(), (3, 32, 32), 5, 1)
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(UserError, match="have changed since the run started"):
        build_model(config, NormConfig(), (3, 32, 32), 5, 1)


def test_user_networks_load_weights(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def make(shape, outputs, norm):\n"
        "    return nn.Sequential(nn.Conv2d(shape[0], 4, 3), norm(4), nn.Flatten(), nn.Linear(4 * 9, outputs))\n"
    )
    config = ModelConfig(f"{tmp_path}/net.py:make")
    trained = build_model(config, NormConfig("bn"), (3, 5, 5), 6, 1).state_dict()
    path = saved(tmp_path / "w.pth", trained)
    network = build_model(replace(config, weights=str(path)), NormConfig("cn4"), (3, 5, 5), 8, 1)
    own = network.state_dict()
    assert torch.equal(own["0.weight"], trained["0.weight"]) and own["3.weight"].shape == (8, 36)
    assert read_weights(path).keys() == own.keys()


@pytest.mark.parametrize("there", ["resnet50, stem=pool", "resnet50-v1.5, stem=plain"])
def test_weights_of_another_variant_are_refused(there: str, tmp_path: Path) -> None:
    """Weights of a ResNet-50 with the stride in its 1x1 convolutions, or another stem, have the same shapes."""
    network: Any = made(name="resnet50")
    path = tmp_path / "weights.safetensors"
    cn.save_model(network, path)
    assert same(made(name="resnet50", weights=path), network.state_dict())
    network.architecture = there
    cn.save_model(network, path)
    words = re.escape(f"{there!r}, and the model is 'resnet50-v1.5, stem=pool'")
    for load in (partial(made, name="resnet50", weights=path), partial(cn.load_model, made(name="resnet50"), path)):
        with pytest.raises((ValueError, UserError), match=words):
            load()
