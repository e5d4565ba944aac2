"""Tensors as one row of bytes on their device, in the order and with the head of a safetensors file.

A network has a hundred tensors. Brought to the host one by one and put together there, they keep Python busy while it
should send a run's steps; as one row they are one copy, and what is left to do is to hash and to write it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["KINDS", "Packed", "packed"]

KINDS = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Packed:
    """A safetensors file: its head, and the bytes after it, still where the tensors are."""

    head: bytes
    body: Tensor

    @property
    def parts(self) -> tuple[bytes, memoryview]:
        """What is written, one after the other; of a body on the host."""
        return self.head, self.body.numpy().data


def packed(tensors: Mapping[str, Tensor]) -> Packed:
    """A copy of the tensors, all in one; on the GPU where any of them is.

    Example:
        >>> from safetensors.torch import load
        >>> load(b"".join(packed({"a": torch.ones(2), "b": torch.tensor(7)}).parts))["b"]
        tensor(7)
    """
    # The widest numbers first, so that each lies at a multiple of its width.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    device = next((t.device for t in tensors.values() if t.is_cuda), torch.device("cpu"))
    rows = [tensors[name].detach().to(device).reshape(-1).view(torch.uint8) for name in names]
    body = torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8)
    return Packed(_head(tensors, names), body)


def _head(tensors: Mapping[str, Tensor], names: list[str]) -> bytes:
    described, start = {}, 0
    for name in names:
        tensor = tensors[name]
        end = start + tensor.numel() * tensor.element_size()
        described[name] = {"dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
