"""The Hub mixin: models that keep their norms in ``save_pretrained`` and ``from_pretrained``.

The annotations here are objects, as huggingface_hub needs them to decode a dataclass of the configuration.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import contnorm as cn
from contnorm.registry import NORMS, norm_names
from tests.convert.test_spec import Network, X, assert_same, trained

huggingface_hub = pytest.importorskip("huggingface_hub")
from contnorm.integrations.hub import NormHubMixin  # noqa: E402

feature = pytest.mark.feature


class HubNetwork(Network, NormHubMixin):
    def __init__(self, seed: int = 0, width: int = 16) -> None:
        super().__init__(seed)
        self.width = width


class AnyArguments(Network, NormHubMixin):
    def __init__(self, seed: int = 0, **options: object) -> None:
        super().__init__(seed)
        self.options = options


@dataclass
class Shape:
    seed: int = 0
    width: int = 16


class WithConfig(Network, NormHubMixin):
    def __init__(self, config: Shape) -> None:
        super().__init__(config.seed)
        self.config = config


class WithDict(Network, NormHubMixin):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config["seed"])
        self.config = config


@feature("hub", "norms and freeze of every norm kept by from_pretrained")
@pytest.mark.parametrize("name", norm_names())
def test_norms_are_kept(name: str, tmp_path: Path) -> None:
    groups: dict[str, object] = {"num_groups": 4} if NORMS[name].grouped else {}
    model = trained(cn.convert_norm(HubNetwork(seed=3), name, example_input=X, **groups))
    cn.freeze_stats(model.block)
    model.save_pretrained(tmp_path / "saved")
    loaded = HubNetwork.from_pretrained(tmp_path / "saved")
    assert_same(model, loaded)
    assert cn.norm_spec(loaded) == cn.norm_spec(model)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["seed"] == 3 and config["norm_spec"] == cn.norm_spec(model)


@feature("hub", "constructors with a config, a dict or any arguments")
@pytest.mark.parametrize(
    "model", [lambda: AnyArguments(1, depth=3), lambda: WithConfig(Shape(1, 24)), lambda: WithDict({"seed": 1})]
)
def test_constructors_do_not_get_the_spec(model: Any, tmp_path: Path) -> None:
    saved = cn.convert_norm(model(), "bn_gn", num_groups=8)
    saved.save_pretrained(tmp_path)
    loaded = type(saved).from_pretrained(tmp_path)
    assert_same(saved, loaded)
    if isinstance(saved, AnyArguments):
        assert loaded.options == {"depth": 3}
    else:
        assert loaded.config == saved.config


@feature("hub", "a loaded model saved again after a conversion")
def test_loaded_models_are_saved_with_their_new_norms(tmp_path: Path) -> None:
    cn.convert_norm(HubNetwork(), "cn", num_groups=4).save_pretrained(tmp_path / "a")
    model = HubNetwork.from_pretrained(tmp_path / "a")
    cn.convert_norm(model, "gn", num_groups=2).save_pretrained(tmp_path / "b", config={"seed": 2})
    assert_same(model, HubNetwork.from_pretrained(tmp_path / "b"))
    assert json.loads((tmp_path / "b" / "config.json").read_text())["seed"] == 2


@feature("hub", "push_to_hub and download of a repository")
def test_pushed_repositories_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two calls of the Hub are replaced by a folder: what is uploaded is what is downloaded."""
    repository = tmp_path / "repository"

    class Created:
        repo_id = "user/model"

    def upload(self: Any, *, folder_path: Path, **options: Any) -> str:
        os.rename(folder_path, repository)
        return "commit"

    def download(repo_id: str, filename: str, **options: Any) -> str:
        assert repo_id == "user/model"
        return str(repository / filename)

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda self, **options: Created())
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", download)
    model = trained(cn.convert_norm(HubNetwork(seed=1), "cn", num_groups=4))
    model.push_to_hub("user/model")
    assert_same(model, HubNetwork.from_pretrained("user/model"))


@feature("hub", "repositories without a spec give a warning")
def test_repository_without_a_spec_gives_a_warning(tmp_path: Path) -> None:
    class Plain(Network, huggingface_hub.PyTorchModelHubMixin):
        pass

    plain = Plain(seed=2)
    plain.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"config\.json has no 'norm_spec'.*HubNetwork keeps those that it is built"):
        loaded = HubNetwork.from_pretrained(tmp_path)
    assert torch.equal(loaded.eval()(X), plain.eval()(X))


def test_weights_in_a_pickle_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository with ``pytorch_model.bin`` in place of a safetensors file."""
    model = cn.convert_norm(HubNetwork(), "cn", num_groups=4)
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    loaded = HubNetwork._load_as_pickle(HubNetwork(seed=1), str(tmp_path / "pytorch_model.bin"), "cpu", True)
    assert_same(model, loaded)


def test_spec_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    HubNetwork().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["norm_spec"]["norms"]["stem.1"]["num_features"] = 99
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"'stem\.1': 99 channels in the spec, and 16 in the model"):
        HubNetwork.from_pretrained(tmp_path)


def test_mixin_has_a_tag() -> None:
    assert "contnorm" in HubNetwork()._hub_mixin_info.model_card_data.tags
    assert issubclass(HubNetwork, nn.Module) and issubclass(HubNetwork, huggingface_hub.PyTorchModelHubMixin)
