"""Moments of batch norm after weights were averaged or pruned: update_bn of torch beside cn.reestimate.

A small convolutional network learns the digits. Its weights are averaged over the last epochs (SWA), over steps (EMA)
or over fine-tuned copies (a model soup), or the smallest of them are set to zero. None of this gives running moments
that fit: this script evaluates the same weights with the moments that they come with, with averaged ones, and with the
ones of ``torch.optim.swa_utils.update_bn`` and ``cn.reestimate``, on shuffled batches and on batches of sorted images.

    python examples/averaged_weights.py              # two norms, five seeds: minutes on one core
    python examples/averaged_weights.py --quick      # one seed, few steps, to see that it runs
    python examples/averaged_weights.py --norms bn --seeds 2 --record mine.json

It uses the 5,000 digits that are included, with NumPy and more: `pip install "contnorm[bench]"`.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import contnorm as cn
from contnorm import bench

NORMS = {"bn": "BN", "cn8": "CN"}  # batch norm; continual norm with 8 groups
BATCH, LEARNING_RATE, EMA_DECAY, SOUP, PRUNED = 50, 0.1, 0.98, 4, 0.8
Batches = list[Tensor]


def load_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 400 training and 100 test digits of each class. They are sorted by class, and every fifth is for tests."""
    pixels, labels = bench.load_digits()
    x, y = torch.tensor(pixels, dtype=torch.float32).unsqueeze(1) / 255, torch.tensor(labels)
    test = torch.arange(len(y)) % 5 == 0
    return x[~test], y[~test], x[test], y[test]


def network(norm: str) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 16, 2), (16, 32, 1), (32, 32, 2), (32, 64, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return cn.convert_norm(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)), norm)


def train(
    model: nn.Module, x: Tensor, y: Tensor, epochs: int, lr: float, generator: torch.Generator,
    after_step: Callable[[], None] = lambda: None, after_epoch: Callable[[int], None] = lambda epoch: None,
) -> None:  # fmt: skip
    optimizer = torch.optim.SGD(model.train().parameters(), lr, momentum=0.9)
    for epoch in range(epochs):
        for rows in torch.split(torch.randperm(len(y), generator=generator), BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            after_step()
        after_epoch(epoch)


def changed_weights(norm: str, x: Tensor, y: Tensor, seed: int, epochs: int) -> dict[str, dict[str, nn.Module]]:
    """Train, and return networks with averaged or pruned weights: with the last moments, and with averaged ones."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = network(norm)
    swa, swa_moments = (AveragedModel(model, use_buffers=use) for use in (False, True))
    average = get_ema_multi_avg_fn(EMA_DECAY)  # type: ignore[no-untyped-call]
    ema, ema_moments = (AveragedModel(model, multi_avg_fn=average, use_buffers=use) for use in (False, True))

    def after_step() -> None:
        ema.update_parameters(model)
        ema_moments.update_parameters(model)

    def after_epoch(epoch: int) -> None:
        if epoch >= epochs // 2:
            swa.update_parameters(model)
            swa_moments.update_parameters(model)

    train(model, x, y, epochs, LEARNING_RATE, generator, after_step, after_epoch)
    copies = [copy.deepcopy(model) for _ in range(SOUP)]
    for i, fine_tuned in enumerate(copies):
        train(fine_tuned, x, y, max(1, epochs // 4), LEARNING_RATE / 2**i, generator)
    soup, soup_moments = copy.deepcopy(copies[-1]), copy.deepcopy(copies[-1])
    averaged = cn.average_state_dicts([one.state_dict() for one in copies], moments="average")
    soup_moments.load_state_dict(averaged)
    soup.load_state_dict({name: value for name, value in averaged.items() if "running" not in name}, strict=False)
    pruned = copy.deepcopy(model)
    convolutions = [(layer, "weight") for layer in pruned.modules() if isinstance(layer, nn.Conv2d)]
    prune.global_unstructured(convolutions, prune.L1Unstructured, amount=PRUNED)
    return {
        "trained": {"last": model},
        "SWA": {"last": swa, "averaged": swa_moments},
        "EMA": {"last": ema, "averaged": ema_moments},
        "soup": {"last": soup, "averaged": soup_moments},
        "pruned": {"last": pruned},
    }


def batches_of(x: Tensor, y: Tensor, seed: int) -> dict[str, Batches]:
    """Return the training images in shuffled batches, and in batches sorted by class as a folder of images is read."""
    shuffled = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    by_class = y.argsort(stable=True)
    return {order: list(torch.split(x[rows], BATCH)) for order, rows in (("", shuffled), (", sorted", by_class))}


TOOLS: dict[str, Callable[[nn.Module, Iterable[Any]], object]] = {
    "update_bn": lambda model, batches: update_bn(batches, model),
    "reestimate": lambda model, batches: cn.reestimate(model, batches),
}


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return 100 * float((model.eval()(x).argmax(1) == y).double().mean())


def run(norms: Sequence[str], seeds: int, epochs: int, digits: tuple[Tensor, ...]) -> dict[str, Any]:
    """Run all norms with all seeds, and return accuracies of each seed and the median CPU seconds of each tool."""
    x, y, test_x, test_y = digits
    results: dict[str, dict[str, list[float]]] = {}
    seconds: dict[str, list[float]] = {}
    for norm in norms:
        for seed in range(seeds):
            for weights, given in changed_weights(norm, x, y, seed, epochs).items():
                scores = {moments: accuracy(model, test_x, test_y) for moments, model in given.items()}
                for order, batches in batches_of(x, y, seed).items():
                    for tool, set_moments in TOOLS.items():
                        model = copy.deepcopy(given["last"])
                        started = time.process_time()
                        set_moments(model, batches)
                        seconds.setdefault(f"{NORMS[norm]}, {tool}", []).append(time.process_time() - started)
                        scores[tool + order] = accuracy(model, test_x, test_y)
                for moments, score in scores.items():
                    row = results.setdefault(f"{NORMS[norm]}, {weights}", {})
                    row.setdefault(moments, []).append(round(score, 2))
    settings = {"epochs": epochs, "batch": BATCH, "lr": LEARNING_RATE, "ema_decay": EMA_DECAY, "pruned": PRUNED}
    times = {name: round(median(values), 3) for name, values in seconds.items()}
    return {"seeds": seeds, **settings, "soup": SOUP, "results": results, "cpu_seconds": times}


def environment() -> dict[str, Any]:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "contnorm": cn.__version__}
    return {"device": "cpu", "machine": platform.machine(), "threads": torch.get_num_threads(), **versions}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Moments of batch norm after weights were averaged or pruned.")
    parser.add_argument("--norms", default=",".join(NORMS), help=f"some of {', '.join(NORMS)}")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--epochs", type=int, default=8, help="epochs of training")
    parser.add_argument("--record", type=Path, help="JSON file for all numbers")
    parser.add_argument("--quick", action="store_true", help="one seed, two epochs and 400 digits, to see that it runs")
    options = parser.parse_args(arguments)
    seeds, epochs = (1, 2) if options.quick else (options.seeds, options.epochs)
    torch.set_num_threads(1)
    x, y, test_x, test_y = load_digits()
    kept = slice(None, None, 10) if options.quick else slice(None)
    record = {**environment(), **run(options.norms.split(","), seeds, epochs, (x[kept], y[kept], test_x, test_y))}
    print(f"Accuracy in percent, of {seeds} seeds:")
    for name, scores in record["results"].items():
        for moments, values in scores.items():
            print(f"{name:12} {moments:20} {sum(values) / len(values):6.2f}   {values}")
    if options.record is not None:
        options.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
