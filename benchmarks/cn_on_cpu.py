"""Forward and backward of batch norm and of continual normalization's kernels on a CPU, in both layouts, as a record.

Run: ``python benchmarks/cn_on_cpu.py docs/records/cn-on-cpu.json``

All layers of an input take turns, six steps each, of which the first is not counted, so that other load on the machine
affects all of them, and each has the caches and the free memory that its own steps leave. All inputs are measured
several times. The rows of an input are those of the attempt in which batch norm was fastest. ``bn`` is torch's
BatchNorm2d, and ``torch.compile`` the compiled layer, whose graph is that of ``analytic``. Gradients are those of
input, weight and bias. They are not added to earlier ones, which would cost each layer another pass.
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

SHAPES = [
    (20, 64, 32, 32),
    (128, 64, 32, 32),
    (20, 64, 84, 84),
    (128, 128, 16, 16),
    (20, 128, 16, 16),
    (20, 256, 8, 8),
    (20, 512, 4, 4),
]
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
KERNELS = ("reference", "pivoted", "analytic", "cpp")
ATTEMPTS = 2
ROUNDS = 6
STEPS = 5  # of a layer in a round, after one that is not counted


def layers_for(channels: int) -> dict[str, torch.nn.Module]:
    layers: dict[str, torch.nn.Module] = {"bn": torch.nn.BatchNorm2d(channels)}
    layers |= {kernel: cn.CN(channels, num_groups=32, kernel=kernel) for kernel in KERNELS}
    torch.compiler.reset()
    layers["torch.compile"] = torch.compile(cn.CN(channels, num_groups=32), dynamic=False)
    return layers


def step_of(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        torch.autograd.grad(layer(x), [x, *layer.parameters()], dy)

    return step


def timed(steps: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Milliseconds of each step, after one round of all of them that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(1 + ROUNDS):
        for name, step in steps.items():
            for number in range(1 + STEPS):
                started = time.perf_counter()
                step()
                if round_number and number:
                    times[name].append(1000 * (time.perf_counter() - started))
    return times


def measured(shape: tuple[int, ...], layout: str) -> list[dict[str, object]]:
    """The rows of an input: quantiles and minimum, and medians and minima over those of batch norm."""
    x, dy = (torch.randn(shape).to(memory_format=LAYOUTS[layout]) for _ in range(2))
    x.requires_grad_()
    times = timed({name: step_of(layer, x, dy) for name, layer in layers_for(shape[1]).items()})
    rows = []
    for name, values in times.items():
        p20, _, _, p80 = quantiles(values, n=5)
        summary = {"p20": p20, "p50": median(values), "p80": p80, "min": min(values)}
        summary["p50_over_bn"] = median(values) / median(times["bn"])
        summary["min_over_bn"] = min(values) / min(times["bn"])
        rows.append({"shape": shape, "layout": layout, "layer": name, **{k: round(v, 3) for k, v in summary.items()}})
        print(rows[-1], flush=True)
    return rows


def main(path: Path) -> None:
    best: dict[tuple[tuple[int, ...], str], list[dict[str, object]]] = {}
    for _ in range(ATTEMPTS):
        for key in [(shape, layout) for shape in SHAPES for layout in LAYOUTS]:
            rows = measured(*key)
            best[key] = min(best.get(key, rows), rows, key=lambda rows: rows[0]["p50"])
            write(path, [row for rows in best.values() for row in rows])


def write(path: Path, rows: list[dict[str, object]]) -> None:
    about = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    about |= {"instructions": torch.backends.cpu.get_cpu_capability(), "attempts": ATTEMPTS}
    record = {"what": "forward and backward, float32, ms", "repeats": ROUNDS * STEPS, **about, "rows": rows}
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
