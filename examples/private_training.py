"""Batch norm before training with differential privacy: ModuleValidator.fix of Opacus beside calibrated conversion.

A network with batch norm learns public digits. It is then trained with differential privacy on private digits, which
are like the public ones, or rotated by a quarter. Opacus does not train batch norm, whose outputs depend on the other
samples of a batch. Its `ModuleValidator.fix` replaces the layers by new group norms. `contnorm.convert_norm` keeps
weights and biases, and sets them with public samples so that the layers' outputs are like before.

    python examples/private_training.py --record mine.json    # minutes on one core
    python examples/private_training.py --quick               # one seed and few samples, to see that it runs

It needs `pip install ".[bench]" opacus`.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contnorm as cn
from contnorm import bench

BATCH, NOISE, CLIP, DELTA = 100, 1.0, 1.0, 1e-4


def calibrated(channels_per_group: int) -> Callable[[nn.Module, list[Tensor]], nn.Module]:
    def convert(model: nn.Module, samples: list[Tensor]) -> nn.Module:
        return cn.convert_norm(model, "gn", channels_per_group=channels_per_group, calibrate=samples)

    return convert


# ModuleValidator.fix has one channel in a group in three of the four layers, and two in the last.
WAYS: dict[str, Callable[[nn.Module, list[Tensor]], nn.Module]] = {
    "ModuleValidator.fix": lambda model, _: ModuleValidator.fix(model),
    "convert_norm, 8 a group": lambda model, _: cn.convert_norm(model, "gn", channels_per_group=8),
    "calibrated, 8 a group": calibrated(8),
    "calibrated, 1 a group": calibrated(1),
}


def load_digits() -> dict[str, tuple[Tensor, Tensor]]:
    """Return 2,000 public digits, 2,000 private ones and 1,000 for tests, in equal shares of the classes."""
    pixels, labels = bench.load_digits()
    x, y = torch.tensor(pixels, dtype=torch.float32).unsqueeze(1) / 255, torch.tensor(labels)
    part = torch.arange(len(y)) % 5
    masks = {"public": part < 2, "private": (part == 2) | (part == 3), "test": part == 4}
    return {name: (x[mask], y[mask]) for name, mask in masks.items()}


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 16, 2), (16, 32, 1), (32, 32, 2), (32, 64, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def train(model: nn.Module, optimizer: Any, loader: Any, epochs: int) -> None:
    model.train()
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return round(100 * float((model.eval()(x).argmax(1) == y).double().mean()), 1)


def compare(seed: int, lr: float, epochs: int, data: dict[str, tuple[Tensor, Tensor]]) -> dict[str, dict[str, float]]:
    """Return accuracies by private data and conversion: public, and private before and after training."""
    torch.manual_seed(seed)
    public = data["public"]
    pretrained = network()
    optimizer = torch.optim.SGD(pretrained.parameters(), 0.1, momentum=0.9)
    train(pretrained, optimizer, DataLoader(TensorDataset(*public), 50, shuffle=True), 4)
    samples = list(torch.split(public[0][::4], BATCH))
    cn.reestimate(pretrained, samples)  # exact moments, which calibration reproduces
    results = {}
    for kind, turns in (("alike", 0), ("rotated", 1)):
        (x, y), (test_x, test_y) = data["private"], data["test"]
        x, test_x = x.rot90(turns, (2, 3)), test_x.rot90(turns, (2, 3))
        results[f"{kind}: batch norm"] = {
            "public": accuracy(pretrained, *public),
            "before": accuracy(pretrained, test_x, test_y),
        }
        for way, convert in WAYS.items():
            torch.manual_seed(seed)
            model = convert(copy.deepcopy(pretrained), samples)
            row = {"public": accuracy(model, *public), "before": accuracy(model, test_x, test_y)}
            engine = PrivacyEngine()
            private, optimizer, loader = engine.make_private(
                module=model.train(),
                optimizer=torch.optim.SGD(model.parameters(), lr),
                data_loader=DataLoader(TensorDataset(x, y), BATCH),
                noise_multiplier=NOISE,
                max_grad_norm=CLIP,
            )
            train(private, optimizer, loader, epochs)
            row |= {"after": accuracy(private, test_x, test_y), "epsilon": round(engine.get_epsilon(DELTA), 2)}
            results[f"{kind}: {way}"] = row
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Batch norm before training with differential privacy.")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="the first seed")
    parser.add_argument("--epochs", type=int, default=4, help="epochs of private training")
    parser.add_argument("--lr", type=float, default=0.5, help="learning rate of private training")
    parser.add_argument("--record", type=Path, help="JSON file for all numbers")
    parser.add_argument("--quick", action="store_true", help="one seed, one epoch, 400 digits: to see that it runs")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Opacus advises about its generator, torch about hooks
    data = load_digits()
    seeds, epochs = (1, 1) if options.quick else (options.seeds, options.epochs)
    if options.quick:
        data = {name: (x[::10], y[::10]) for name, (x, y) in data.items()}
    runs = [compare(options.first_seed + seed, options.lr, epochs, data) for seed in range(seeds)]
    results = {way: {key: [run[way][key] for run in runs] for key in runs[0][way]} for way in runs[0]}
    for way, row in results.items():
        cells = (f"{key} {fmean(v):.1f} ± {stdev(v) if seeds > 1 else 0:.1f}" for key, v in row.items())
        print(f"{way:35} {'   '.join(cells)}")
    versions = {name: version(name) for name in ("torch", "opacus", "contnorm")}
    record: dict[str, Any] = {
        "device": "cpu",
        "machine": platform.machine(),
        "python": platform.python_version(),
        **versions,
    }
    settings = {"batch": BATCH, "noise": NOISE, "clip": CLIP, "delta": DELTA, "lr": options.lr}
    record |= {**versions, "seeds": seeds, "epochs": epochs, **settings, "results": results}
    if options.record is not None:
        options.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
