"""The Hub mixin: models that keep their norms in ``save_pretrained`` and ``from_pretrained``.

The annotations here are objects, as huggingface_hub needs them to decode a dataclass of the configuration.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import contnorm as cn
from tests.convert.test_spec import Network, X, assert_same, trained

huggingface_hub = pytest.importorskip("huggingface_hub")
from contnorm.integrations.hub import NormHubMixin  # noqa: E402


class HubNetwork(Network, NormHubMixin):
    def __init__(self, seed: int = 0, width: int = 16) -> None:
        super().__init__(seed)
        self.width = width


class AnyArguments(Network, NormHubMixin):
    def __init__(self, seed: int = 0, **options: object) -> None:
        super().__init__(seed)
        self.config = options


@dataclass
class Shape:
    seed: int = 0
    width: int = 16


class WithConfig(Network, NormHubMixin):
    def __init__(self, config: Shape) -> None:
        super().__init__(config.seed)
        self.config = config


@pytest.mark.parametrize("norm", ["cn", "sn", "gn_ws"])
def test_norms_and_freeze_are_kept(norm: str, tmp_path: Path) -> None:
    model = trained(cn.convert_norm(HubNetwork(seed=3), norm, **({} if norm == "sn" else {"num_groups": 4})))
    cn.freeze_stats(model.block)
    model.save_pretrained(tmp_path)
    loaded = HubNetwork.from_pretrained(tmp_path)
    assert_same(model, loaded)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["seed"] == 3 and config["norm_spec"] == cn.norm_spec(model) == cn.norm_spec(loaded)


@pytest.mark.parametrize("make", [lambda: AnyArguments(1, depth=3), lambda: WithConfig(Shape(1, 24))])
def test_constructors_do_not_get_the_spec(make: Any, tmp_path: Path) -> None:
    saved = cn.convert_norm(make(), "bn_gn", num_groups=8)
    saved.save_pretrained(tmp_path)
    loaded = type(saved).from_pretrained(tmp_path)
    assert_same(saved, loaded)
    assert loaded.config == saved.config


def test_repository_without_a_spec_gives_a_warning(tmp_path: Path) -> None:
    class Plain(Network, huggingface_hub.PyTorchModelHubMixin):
        pass

    plain = Plain(seed=2)
    plain.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"config\.json has no 'norm_spec'"):
        loaded = HubNetwork.from_pretrained(tmp_path)
    assert torch.equal(loaded.eval()(X), plain.eval()(X))
