"""Names that docstring examples may use without importing them, files without their library, and how Triton runs."""

import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests import torchvision_operators
from torch import nn

from contnorm import registry
from contnorm.bench import components

# Before anything imports Triton or our kernels: both take its mode at import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
collect_ignore_glob = (
    []
    if find_spec("triton")
    else [
        f"src/contnorm/kernels/triton/{name}.py"
        for name in ("continual/tiles", "continual/forward", "continual/backward", "convolution/device", "*_device")
    ]
)
# The module that each integration imports; that of mammoth is found in a checkout alone, and has its own test.
FRAMEWORKS = {
    "avalanche": "avalanche",
    "hub": "huggingface_hub",
    "lightning": "lightning",
    "mammoth": "backbones",
    "optuna": "optuna",
    "timm": "timm",
    "transformers": "transformers",
}
collect_ignore = [
    f"src/contnorm/integrations/{integration}{ending}"
    for integration, framework in FRAMEWORKS.items()
    for ending in ("", ".py")
    if find_spec(framework) is None
]
torchvision_operators.declare()
# Tests with frameworks are slow: to import these takes as long as to collect all other tests.
WITH_FRAMEWORKS = {"integrations", "test_mlflow.py", "test_wandb.py"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if "not slow" in config.option.markexpr and collection_path.name in WITH_FRAMEWORKS else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not WITH_FRAMEWORKS.isdisjoint(item.path.parts):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _unchanged_process() -> Iterator[None]:
    """Forget what a test or an example registers, and restore the level of the logger that examples set."""
    known, level = (dict(components._registered), dict(registry._NORMS)), logging.getLogger("contnorm").level
    yield
    logging.getLogger("contnorm").setLevel(level)
    for table, content in zip((components._registered, registry._NORMS), known, strict=True):
        table.clear()
        table.update(content)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _names_for_examples(doctest_namespace: dict[str, object]) -> None:
    doctest_namespace.update(torch=torch, nn=nn)
    torch.manual_seed(0)
