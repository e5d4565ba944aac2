"""Names that the examples in docstrings may use without importing them, and how Triton runs in tests."""

import os
from importlib.util import find_spec

import pytest
import torch
from torch import nn

# Before anything imports Triton or our package: both take its mode at import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
collect_ignore_glob = (
    []
    if find_spec("triton")
    else [
        f"src/contnorm/kernels/triton/{name}.py"
        for name in ("continual/tiles", "continual/forward", "continual/backward", "*_device")
    ]
)


@pytest.fixture(autouse=True)
def _names_for_examples(doctest_namespace: dict[str, object]) -> None:
    doctest_namespace.update(torch=torch, nn=nn)
    torch.manual_seed(0)
