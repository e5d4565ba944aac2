"""Forward and backward of continual normalization on a CPU: batch norm and CN's kernels, medians, as a record.

Run: ``python benchmarks/cn_on_cpu.py docs/records/cn-on-cpu.json``
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import torch

import contnorm as cn

SHAPES = [(20, 64, 32, 32), (20, 128, 16, 16), (20, 256, 8, 8), (20, 512, 4, 4), (128, 64, 32, 32)]
KERNELS = ("reference", "pivoted", "analytic")
REPEATS = 30


def timed(step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds: the 20, 50 and 80 % quantiles after a warm-up."""
    for _ in range(5):
        step()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - started))
    p20, _, _, p80 = quantiles(times, n=5)
    return {"p20": round(p20, 3), "p50": round(median(times), 3), "p80": round(p80, 3)}


def step_of(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], None]:
    return lambda: layer(x).backward(dy)


def main(path: Path) -> None:
    rows = []
    for shape in SHAPES:
        x, dy = torch.randn(shape, requires_grad=True), torch.randn(shape)
        layers = {"bn": cn.BatchNorm2d(shape[1])} | {k: cn.CN(shape[1], num_groups=32, kernel=k) for k in KERNELS}
        for name, layer in layers.items():
            rows.append({"shape": shape, "layer": name, **timed(step_of(layer, x, dy))})
            print(rows[-1])
    about = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    record = {"what": "forward and backward, float32, ms", "repeats": REPEATS, **about, "rows": rows}
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
