"""Time of a training step of a network with other norms: your own network, in an ordinary loop, converted from outside.

    python benchmarks/your_model.py plain:resnet18 --norm bn,cn,gn
    python benchmarks/your_model.py timm:resnet50 --size 224 --batch 64 --mode eager,compile
    python benchmarks/your_model.py my_network.py:make --mode first,eager --layout nchw,nhwc

A network is ``plain:resnet18`` or ``plain:resnet50`` (written here with torch's own layers), ``timm:NAME``, or
``FILE.py:FUNCTION``, a function without arguments that returns a `torch.nn.Module`. The first norm is the one that the
others are compared with; ``bn`` leaves the network as it is, and ``cn:analytic`` is CN with that kernel.

Each row is measured in a process of its own, so that nothing is compiled or built before it. *Warm-up* is the time of
the first steps; modes are ``first`` (the steps right after three, before anything is built in the background),
``eager`` (after the C++ path of CN is built), ``compile`` and ``reduce-overhead`` (both of `torch.compile`). Set
``TRITON_CACHE_DIR`` and ``TORCHINDUCTOR_CACHE_DIR`` to empty folders to measure a warm-up with cold caches.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import multiprocessing
import os
import runpy
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import contnorm as cn

MODES = ("first", "eager", "compile", "reduce-overhead")
LAYOUTS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
PRECISIONS = ("fp32", "tf32", "bf16")


@dataclass(frozen=True)
class Case:
    """What is measured: a network with a norm, its input, and how a step is executed."""

    network: str
    norm: str
    mode: str
    batch: int
    size: int
    layout: str
    precision: str


@dataclass(frozen=True)
class Row:
    """Milliseconds of a step (median), seconds of the warm-up, and peak memory in MB (0 on a CPU)."""

    case: Case
    milliseconds: float
    warm_up: float
    peak: float


class Block(nn.Module):
    """A residual block as people write it by hand: separate norm, ReLU and addition."""

    def __init__(self, channels_in: int, width: int, stride: int, kernels: tuple[int, ...], expansion: int) -> None:
        super().__init__()
        widths = [channels_in, *[width] * (len(kernels) - 1), width * expansion]
        strides = (stride, 1) if len(kernels) == 2 else (1, stride, 1)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, kernel, step, kernel // 2, bias=False)
            for a, b, kernel, step in zip(widths, widths[1:], kernels, strides, strict=False)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for channels in widths[1:])
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels_in != widths[-1]:
            projection = nn.Conv2d(channels_in, widths[-1], 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(widths[-1]))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True), 1):
            y = norm(convolution(y))
            if number < len(self.norms):
                y = torch.relu(y)
        return torch.relu(y + self.shortcut(x))


class PlainResNet(nn.Module):
    """ResNet-18 or ResNet-50 with torch's layers alone; small images get a stem without downsampling."""

    def __init__(self, depth: int, size: int, classes: int = 100) -> None:
        super().__init__()
        kernels, expansion, blocks = {18: ((3, 3), 1, (2, 2, 2, 2)), 50: ((1, 3, 1), 4, (3, 4, 6, 3))}[depth]
        small = size <= 64
        stem: list[nn.Module] = [nn.Conv2d(3, 64, 3 if small else 7, 1 if small else 2, 1 if small else 3, bias=False)]
        stem += [nn.BatchNorm2d(64), nn.ReLU(), *([] if small else [nn.MaxPool2d(3, 2, 1)])]
        self.stem, layers, channels = nn.Sequential(*stem), list[nn.Module](), 64
        for stage, count in enumerate(blocks):
            width = 64 * 2**stage
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                layers.append(Block(channels, width, stride, kernels, expansion))
                channels = width * expansion
        self.blocks, self.head = nn.Sequential(*layers), nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def build(network: str, size: int) -> nn.Module:
    """Build the network of a name, with the norms that it has."""
    kind, _, name = network.rpartition(":")
    if kind == "plain":
        return PlainResNet(int(name.removeprefix("resnet")), size)
    if kind == "timm":
        return importlib.import_module("timm").create_model(name)
    made: nn.Module = runpy.run_path(kind)[name]()
    return made


def measure(case: Case, device: str, steps: int, warm_up: int) -> Row:
    """Measure one case; called in a process of its own."""
    if case.mode == "first":
        os.environ["CONTNORM_EAGER"] = "python"  # the path of the first steps, also where the C++ path was built before
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = case.precision == "tf32"
    model = build(case.network, case.size)
    if case.norm != "bn":
        norm, _, kernel = case.norm.partition(":")
        cn.convert_norm(model, norm, num_groups="auto", **({"kernel": kernel} if kernel else {}))
    model = model.to(device, memory_format=LAYOUTS[case.layout]).train()
    x = torch.rand(case.batch, 3, case.size, case.size, device=device).to(memory_format=LAYOUTS[case.layout])
    with torch.no_grad():
        outputs = model.eval()(x[:2]).shape[1]
    model.train()
    target = torch.randint(0, outputs, (case.batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    forward: Callable[[Tensor], Tensor] = model
    if case.mode in ("compile", "reduce-overhead"):
        forward = torch.compile(model, mode=None if case.mode == "compile" else case.mode)
    autocast: Any = contextlib.nullcontext()
    if case.precision == "bf16":
        autocast = torch.autocast(torch.device(device).type, torch.bfloat16)

    def step() -> float:
        wait = torch.cuda.synchronize if x.is_cuda else lambda: None
        wait()
        started = time.perf_counter()
        optimizer.zero_grad()
        with autocast:
            loss = nn.functional.cross_entropy(forward(x), target)
        loss.backward()
        optimizer.step()
        wait()
        return time.perf_counter() - started

    started = time.perf_counter()
    for _ in range(3 if case.mode == "first" else warm_up):
        step()
    elapsed = time.perf_counter() - started
    if case.mode == "eager" and case.norm == "cn" and x.is_cuda:
        importlib.import_module("contnorm.kernels.triton.eager").activate()
        for _ in range(3):
            step()
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(step() for _ in range(steps))
    return Row(case, 1e3 * seconds, elapsed, torch.cuda.max_memory_allocated() / 2**20 if x.is_cuda else 0.0)


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table, each with its ratio to the first norm of its case."""
    first: dict[Case, Row] = {}
    lines = ["| mode | batch | size | layout | precision | norm | ms a step | ratio | warm-up, s | peak, MB | ratio |"]
    lines.append("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        case = row.case
        base = first.setdefault(Case(**{**asdict(case), "norm": ""}), row)
        memory = f"{row.peak:.0f} | {row.peak / base.peak:.2f}" if base.peak else "- | -"
        lines.append(
            f"| {case.mode} | {case.batch} | {case.size} | {case.layout} | {case.precision} | {case.norm} | "
            f"{row.milliseconds:.2f} | {row.milliseconds / base.milliseconds:.2f} | {row.warm_up:.1f} | {memory} |"
        )
    worst = max(rows, key=lambda row: row.milliseconds / first[Case(**{**asdict(row.case), "norm": ""})].milliseconds)
    if worst.case.norm != rows[0].case.norm:
        shape = f"{worst.case.batch} images of {worst.case.size}x{worst.case.size}, {worst.case.layout}"
        lines.append(f"\nThe worst case: {worst.case.norm}, {worst.case.mode}, {shape}, {worst.case.precision}.")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure all cases and print one table."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network")
    parser.add_argument("--norm", default="bn,cn,gn", help="norms, the first of which is the base of the ratios")
    parser.add_argument("--mode", default="first,eager", help=f"some of {', '.join(MODES)}")
    parser.add_argument("--batch", default="20,128", help="images a step")
    parser.add_argument("--size", default="32", help="height and width of images")
    parser.add_argument("--layout", default="nhwc", help=f"some of {', '.join(LAYOUTS)}")
    parser.add_argument("--precision", default="tf32" if gpu else "fp32", help=f"some of {', '.join(PRECISIONS)}")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=8)
    parser.add_argument("--out", type=Path, help="write device, versions and rows to this JSON file, after each row")
    given = parser.parse_args(arguments)
    if not given.network.startswith(("plain:resnet18", "plain:resnet50", "timm:")) and ".py:" not in given.network:
        parser.error(f"{given.network}: use plain:resnet18, plain:resnet50, timm:NAME, or FILE.py:FUNCTION.")
    for name, allowed in (("mode", MODES), ("layout", LAYOUTS), ("precision", PRECISIONS)):
        if wrong := set(getattr(given, name).split(",")) - set(allowed):
            parser.error(f"--{name}: {', '.join(sorted(wrong))} is not one of {', '.join(allowed)}")
    axes = [getattr(given, name).split(",") for name in ("mode", "batch", "size", "layout", "precision", "norm")]
    rows: list[Row] = []
    for mode, batch, size, layout, precision, norm in itertools.product(*axes):
        case = Case(given.network, norm, mode, int(batch), int(size), layout, precision)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as worker:
            rows.append(worker.submit(measure, case, given.device, given.steps, given.warm_up).result())
        print(f"{len(rows)}: {mode}, {batch}x{size}x{size}, {layout}, {precision}, {norm}", flush=True)
        if given.out is not None:
            device = torch.cuda.get_device_name() if gpu else "CPU"
            versions = {"torch": torch.__version__, "contnorm": cn.__version__}
            content = {"device": device, **versions, "steps": given.steps, "rows": [asdict(row) for row in rows]}
            given.out.write_text(json.dumps(content, indent=1), encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
