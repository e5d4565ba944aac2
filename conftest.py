"""Names that the examples in docstrings may use without importing them."""

import pytest
import torch
from torch import nn


@pytest.fixture(autouse=True)
def _names_for_examples(doctest_namespace: dict[str, object]) -> None:
    doctest_namespace.update(torch=torch, nn=nn)
    torch.manual_seed(0)
