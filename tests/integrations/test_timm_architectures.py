"""Architectures of timm with continual norm: built or converted, trained a step, saved with their spec, and loaded."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import contnorm as cn
from tests.integrations.timm_architectures import ARCHITECTURES, PAGE, Architecture, replace_table

timm = pytest.importorskip("timm", reason="timm is not installed", exc_type=ImportError)
integration = pytest.importorskip("contnorm.integrations.timm", reason="timm is not installed", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _registered():
    integration.register()
    yield
    integration.unregister()


def create_model(architecture: Architecture, **options: Any) -> nn.Module:
    if architecture.name not in timm.list_models():
        pytest.skip(f"timm {timm.__version__} has no {architecture.name}")
    model: nn.Module = timm.create_model(architecture.name, num_classes=4, **architecture.options, **options)
    return model


def model_with_continual_norms(architecture: Architecture) -> nn.Module:
    if architecture.how == "conversion":
        return cn.convert_norm(create_model(architecture), "cn", num_groups="auto")
    by_name = architecture.how == "name"
    norm = "cn" if by_name else functools.partial(cn.ContinualNorm2d, num_groups="auto")
    return create_model(architecture, norm_layer=norm)


def train_step(model: nn.Module, x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    logits = model.train()(x)
    logits = logits[0] if isinstance(logits, tuple) else logits
    nn.functional.cross_entropy(logits.float(), torch.tensor([0, 3], device=x.device)).backward()
    optimizer.step()


@pytest.mark.slow
@pytest.mark.feature("timm", "architectures: built or converted, trained a step, saved with their spec, loaded")
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.name)
def test_trained_model_is_loaded_bit_for_bit(architecture: Architecture, tmp_path: Path, device: torch.device) -> None:
    model = model_with_continual_norms(architecture).to(device)
    norms = cn.summarize(model)
    assert len(norms) > 0 and {row.norm for row in norms} == {"cn"}
    x = torch.randn(2, 3, architecture.size, architecture.size, device=device)
    before = [buffer.clone() for name, buffer in model.named_buffers() if name.endswith("running_mean")]
    train_step(model, x)
    moments = [buffer for name, buffer in model.named_buffers() if name.endswith("running_mean")]
    assert all(not torch.equal(old, new) for old, new in zip(before, moments, strict=True))
    cn.save_model(model, tmp_path / "model.safetensors")

    loaded = create_model(architecture).to(device)  # with its own norms and other weights
    loaded = cn.load_model(loaded, tmp_path / "model.safetensors")
    assert cn.norm_spec(loaded) == cn.norm_spec(model)
    with torch.no_grad():
        expected, output = model.eval()(x), loaded.eval()(x)
    assert torch.isfinite(expected).all() and torch.equal(output, expected)


def test_page_has_the_table_of_architectures() -> None:
    page = PAGE.read_text()
    assert len(ARCHITECTURES) >= 60
    assert replace_table(page) == page, "run `python -m tests.integrations.timm_architectures`"
