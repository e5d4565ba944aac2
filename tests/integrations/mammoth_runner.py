"""Runs `python -m contnorm.integrations.mammoth ARGUMENTS` in mammoth's folder, and writes what it did to a JSON file.

mammoth reads all its data sets at the start, and one of them downloads a network through open_clip, which the runs
here do not use: the module is replaced if it is not installed. torchvision compares its files of CIFAR-10 with the
published checksums, which files in the same layout, but written here, do not have.

Usage: python mammoth_runner.py REPORT.json main.py --model derpp ...
"""

import importlib
import importlib.util
import json
import runpy
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


def replace_open_clip() -> None:
    if importlib.util.find_spec("open_clip") is None:
        module: Any = ModuleType("open_clip")
        module.create_model_and_transforms = lambda *args, **kwargs: (None, None, None)
        sys.modules["open_clip"] = module


def accept_cifar_files() -> None:
    cifar = importlib.import_module("torchvision.datasets.cifar")
    cifar.check_integrity = lambda path, md5=None: Path(path).is_file()


def observe_backbones(report: dict[str, Any]) -> list[Any]:
    """Report the layers of each network that mammoth builds by name; returns the networks."""
    backbone, built = importlib.import_module("backbone"), []
    build = backbone.get_backbone

    def get_backbone(args: Any) -> Any:
        network = build(args)
        built.append(network)
        report["backbone"] = args.backbone
        report["norm_layers"] = Counter(type(m).__name__ for m in network.modules() if "Norm" in type(m).__name__)
        report["num_groups"] = sorted({m.num_groups for m in network.modules() if hasattr(m, "num_groups")})
        return network

    backbone.get_backbone = get_backbone
    return built


def observe_training(report: dict[str, Any]) -> None:
    """Report the loss of each step, and the accuracies by task after each."""
    continual_model = importlib.import_module("models.utils.continual_model").ContinualModel
    observe = continual_model.meta_observe
    losses = report["losses"] = []
    dataset = importlib.import_module("datasets.utils.continual_dataset").ContinualDataset
    evaluate = dataset.evaluate
    accuracies = report["class_incremental_accuracy"] = []

    def meta_observe(self: Any, *args: Any, **kwargs: Any) -> float:
        losses.append(round(float(observe(self, *args, **kwargs)), 4))
        return losses[-1]

    def measure(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        accuracies.append([round(float(value), 2) for value in result[0]])
        return result

    continual_model.meta_observe = meta_observe
    dataset.evaluate = staticmethod(measure)


def main() -> None:
    path, arguments = Path(sys.argv[1]), sys.argv[2:]
    report: dict[str, Any] = {}
    # Only here, not at the import by a collection of tests: these folders have modules "datasets" and "models".
    sys.path.insert(0, str(Path.cwd()))
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # mammoth has a package "tests" too
    importlib.import_module("torchvision_operators").declare()
    # mammoth sets two threads, which wait for each other for long where other processes use the cores.
    torch.set_num_threads(1)
    torch.set_num_threads = lambda number: None  # type: ignore[assignment]
    replace_open_clip()
    accept_cifar_files()
    built = observe_backbones(report)
    observe_training(report)
    sys.argv = ["contnorm.integrations.mammoth", *arguments]
    runpy.run_module("contnorm.integrations.mammoth", run_name="__main__", alter_sys=True)
    moments = [m.running_mean for m in built[0].modules() if getattr(m, "running_mean", None) is not None]
    report["moments_moved"] = sum(bool(mean.abs().sum() > 0) for mean in moments)
    report["bn_track_stats"] = importlib.import_module("utils.batch_norm").bn_track_stats.__module__
    path.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
