"""Packing of tensors into one byte tensor on their device, in the layout of a safetensors file.

A network has about a hundred tensors. Copying them to the host one by one would keep Python from launching training
steps. One packed tensor needs a single copy; the host then only hashes and writes it.
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
    """The content of a safetensors file: its header, and the data on the device of the tensors."""

    head: bytes
    body: Tensor

    @property
    def parts(self) -> tuple[bytes, memoryview]:
        """The bytes of the file, in order. The body must be on the host."""
        return self.head, self.body.numpy().data


def packed(tensors: Mapping[str, Tensor]) -> Packed:
    """Pack a copy of the tensors into one; on the GPU if any of them is there.

    Example:
        >>> from safetensors.torch import load
        >>> load(b"".join(packed({"a": torch.ones(2), "b": torch.tensor(7)}).parts))["b"]
        tensor(7)
    """
    # Largest element size first, so that every tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    device = next((t.device for t in tensors.values() if t.is_cuda), torch.device("cpu"))
    rows = [tensors[name].detach().to(device).reshape(-1).view(torch.uint8) for name in names]
    body = torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8)
    return Packed(_head(tensors, names), body)


def _head(tensors: Mapping[str, Tensor], names: list[str]) -> bytes:
    entries, start = {}, 0
    for name in names:
        tensor = tensors[name]
        end = start + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
