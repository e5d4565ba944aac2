"""Shared by the tests of integrations: convolutions on a GPU that repeat their bits."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _exact_convolutions(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cuDNN use algorithms that repeat their bits, in full float32: many tests compare two models bit for bit.

    In TF32 a difference of the last bit before a convolution can become one of 1e-3 after it.
    """
    if device.type == "cuda":
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
