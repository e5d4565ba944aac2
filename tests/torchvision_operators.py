"""Lets torchvision be imported beside a torch build that its compiled operators do not fit.

timm, Avalanche and torchmetrics import torchvision, for its transforms and data sets. A torchvision built for another
variant of torch (CUDA or CPU) can't load its C++ operators and then fails to import, since it adds to two of them.
Declared here without an implementation, they let the Python part be imported; a call of them still fails.
"""

import importlib.util
from pathlib import Path

import torch

__all__ = ["declare"]

_libraries: list[torch.library.Library] = []  # an operator exists as long as its library object


def declare() -> None:
    """Declare the operators, if torchvision is installed and its own do not load. Call it before any import of it."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _libraries:
        return
    for compiled in (*Path(spec.origin).parent.glob("_C*.so"), *Path(spec.origin).parent.glob("_C*.pyd")):
        try:
            torch.ops.load_library(str(compiled))
        except OSError:
            continue
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)
