"""Seconds to re-estimate running moments from data, as a record.

Run: ``python benchmarks/reestimate.py docs/records/reestimate-cpu.json``, or on a GPU
``python benchmarks/reestimate.py FILE.json --device cuda``.

``update_bn`` is torch's function, whose moments are approximate; ``once`` is ``reestimate(exact=False)``; ``passes`` is
``reestimate`` of batches without a length, which it reads once per depth of norm layers; ``sweep`` is ``reestimate`` of
a list of the same batches. All ways take turns, after one turn that is not counted, so that other load on the machine
affects all of them. A row has medians and minima over the turns, the number of forward passes for each batch, and
whether passes and sweep give the same bits.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import contnorm as cn
from contnorm.bench.models.networks import DeepResNet, ResNet18

TURNS = 5
BATCH = 100
SIZE = 32  # of the images
# network, norm, filters of the stem, images
CASES = [("resnet18", "bn", 20, 5000), ("resnet50", "bn", 64, 400), ("resnet18", "cn", 64, 200)]


class Unsized:
    """Batches without a length."""

    def __init__(self, data: list[Tensor]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.data)


WAYS: dict[str, Callable[[nn.Module, list[Tensor]], object]] = {
    "update_bn": lambda model, data: update_bn(data, model),
    "once": lambda model, data: cn.reestimate(model, iter(data), exact=False),
    "passes": lambda model, data: cn.reestimate(model, Unsized(data)),
    "sweep": lambda model, data: cn.reestimate(model, data),
}


def network(name: str, norm: str, width: int) -> nn.Module:
    torch.manual_seed(0)
    layer: Any = nn.BatchNorm2d if norm == "bn" else lambda channels: cn.CN(channels, num_groups=32)
    return ResNet18(3, 10, width, layer) if name == "resnet18" else DeepResNet(name, 3, 10, width, layer)


def measured(name: str, norm: str, width: int, images: int, device: torch.device) -> dict[str, object]:
    model = network(name, norm, width).to(device)
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(BATCH, 3, SIZE, SIZE, generator=generator).to(device) for _ in range(images // BATCH)]
    calls: list[int] = []
    next(m for m in model.modules() if isinstance(m, nn.Conv2d)).register_forward_pre_hook(lambda *_: calls.append(1))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    forwards: dict[str, float] = {}
    moments: dict[str, list[Tensor]] = {}
    for turn in range(1 + TURNS):
        for way, run in WAYS.items():
            calls.clear()
            synchronize(device)
            started = time.perf_counter()
            run(model, data)
            synchronize(device)
            if turn:
                seconds[way].append(time.perf_counter() - started)
            forwards[way] = round(len(calls) / len(data), 2)
            moments[way] = [buffer.clone() for buffer in model.buffers() if buffer.is_floating_point()]
    row = {"network": name, "norm": norm, "width": width, "images": images, "batch": BATCH, "forwards": forwards}
    row |= {"median": {way: round(median(values), 3) for way, values in seconds.items()}}
    row |= {"min": {way: round(min(values), 3) for way, values in seconds.items()}}
    row["equal_bits"] = all(torch.equal(*pair) for pair in zip(moments["passes"], moments["sweep"], strict=True))
    print(row, flush=True)
    return row


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    args = parser.parse_args()
    on_gpu = args.device.type == "cuda"
    about = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    about |= {"device": torch.cuda.get_device_name(args.device) if on_gpu else "CPU", "turns": TURNS}
    rows = [measured(*case, args.device) for case in CASES]
    record = {"what": f"re-estimation of moments, float32 images {SIZE}x{SIZE}, seconds", **about, "rows": rows}
    args.path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
