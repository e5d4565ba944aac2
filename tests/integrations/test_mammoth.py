"""The integration with mammoth, in a checkout of it, which the environment variable CONTNORM_MAMMOTH names.

The requirements of mammoth must be importable. CIFAR-10 is read from the folder that CONTNORM_MAMMOTH_DATA names, in
torchvision's layout; without it, small files of random images in the same layout are used.
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import contnorm as cn
from contnorm.integrations import mammoth

ROOT = Path(__file__).resolve().parent.parent.parent
RECORD = ROOT / "docs" / "records" / "integrations" / "mammoth-seq-cifar10.json"
CHECKOUT, DATA = os.environ.get("CONTNORM_MAMMOTH"), os.environ.get("CONTNORM_MAMMOTH_DATA")
COMMAND = (
    "main.py --model derpp --dataset seq-cifar10 --backbone {backbone} --num_filters 8 --buffer_size 50 --alpha 0.1 "
    "--beta 0.5 --lr 0.03 --n_epochs 1 --batch_size 16 --stop_after 2 --debug_mode 1 --num_workers 0 --seed 0"
)

needs_checkout = pytest.mark.skipif(
    CHECKOUT is None, reason="CONTNORM_MAMMOTH does not name a checkout of https://github.com/aimagelab/mammoth"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with CIFAR10/cifar-10-batches-py, as torchvision has it."""
    if DATA is not None:
        return Path(DATA)
    root = tmp_path_factory.mktemp("data")
    folder = root / "CIFAR10" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        images = {"data": rng.integers(0, 256, (100, 3072), dtype=np.uint8), "labels": (np.arange(100) % 10).tolist()}
        (folder / name).write_bytes(pickle.dumps(images))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class {i}" for i in range(10)]}))
    return root


def run(arguments: list[str], folder: Path, data: Path) -> dict[str, Any]:
    """Run mammoth's command in its folder, and return what was observed."""
    assert CHECKOUT is not None
    report = folder / "report.json"
    runner = ROOT / "tests" / "integrations" / "mammoth_runner.py"
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-W", "ignore", str(runner), str(report), *arguments, "--base_path", str(data)]
    command += ["--results_path", str(folder / "results")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MAMMOTH_TEST": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(report.read_text())


@needs_checkout
@pytest.mark.slow
def test_command_trains_a_backbone_with_cn(tmp_path: Path, data: Path) -> None:
    arguments = COMMAND.format(backbone="resnet18-cn").split()
    seen = run(arguments, tmp_path, data)
    assert seen["backbone"] == "resnet18-cn"
    assert seen["norm_layers"] == {"ContinualNorm2d": 20}
    assert seen["num_groups"] == [4, 8, 16, 32]  # 8 to 64 channels, 2 in each group
    assert len(seen["losses"]) >= 8 and np.isfinite(seen["losses"]).all()
    assert seen["moments_moved"] == 20
    assert [len(row) for row in seen["class_incremental_accuracy"]] == [1, 2]
    assert seen["bn_track_stats"] == "contnorm.integrations.mammoth"


def test_recorded_run_is_the_one_of_the_page() -> None:
    record = json.loads(RECORD.read_text())
    page = (ROOT / "docs" / "integrations" / "mammoth.md").read_text()
    seen = record["seen"]
    assert seen["norm_layers"] == {"ContinualNorm2d": 20} and seen["moments_moved"] == 20
    assert record["command"].endswith(COMMAND.format(backbone="resnet18-cn"))
    assert record["mammoth"][:7] in page and f"{len(seen['losses'])} steps" in page
    first, second = np.array_split(seen["losses"], 2)
    for losses in (first, second):
        assert f"from {losses[0]:.2f} to {losses[-1]:.2f}" in " ".join(page.split())


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Modules with the registry of mammoth, as far as `register_backbones` uses it."""
    registered: dict[str, Any] = {}
    backbone: Any = ModuleType("backbone")
    backbone.REGISTERED_BACKBONES = registered
    backbone.__file__ = __file__

    def register_backbone(name: str) -> Any:
        def add(build: Any) -> Any:
            assert name not in registered
            registered[name.replace("_", "-")] = {"class": build}
            return build

        return add

    backbone.register_backbone = register_backbone
    batch_norm: Any = ModuleType("utils.batch_norm")
    batch_norm.bn_track_stats = object()
    model: Any = ModuleType("models.icarl")
    model.bn_track_stats = batch_norm.bn_track_stats
    register_backbone("tiny_resnet")(tiny_resnet)
    register_backbone("plain")(nn.Identity)
    for module in (backbone, batch_norm, model):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "utils", ModuleType("utils"))
    return {"registered": registered, "batch_norm": batch_norm, "model": model}


def tiny_resnet(num_classes: int, num_filters: int = 20) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, num_filters, 3), nn.BatchNorm2d(num_filters), nn.ReLU())


def test_names_signatures_and_groups(modules: dict[str, Any]) -> None:
    names = mammoth.register_backbones()
    assert "tiny-resnet-cn" in names and "tiny-resnet-bn-gn" in names and "tiny-resnet-gn-ws" in names
    assert not any(part in name for name in names for part in ("adab2n", "tbbn", "bnt", "frn", "evonorm", "plain"))
    assert "tiny-resnet-bn" not in names
    build = modules["registered"]["tiny-resnet-cn"]["class"]
    signature = mammoth.inspect.signature(build)
    assert list(signature.parameters) == ["num_classes", "num_filters", "num_groups"]
    groups = signature.parameters["num_groups"]
    assert groups.default == "auto" and [groups.annotation(text) for text in ("auto", "4")] == ["auto", 4]
    assert list(mammoth.inspect.signature(modules["registered"]["tiny-resnet-brn"]["class"]).parameters) == [
        "num_classes",
        "num_filters",
    ]
    assert build(num_classes=10)[1].num_groups == 10
    assert build(num_classes=10, num_groups=4)[1].num_groups == 4
    assert isinstance(build(10, num_filters=8)[1], cn.ContinualNorm2d)
    assert isinstance(modules["registered"]["tiny-resnet-gn-ws"]["class"](10)[1], cn.WSGroupNorm2d)


def test_tracking_is_replaced_where_it_was_imported(modules: dict[str, Any]) -> None:
    mammoth.register_backbones()
    assert modules["batch_norm"].bn_track_stats is mammoth.bn_track_stats
    assert modules["model"].bn_track_stats is mammoth.bn_track_stats


@pytest.mark.parametrize(("norm", "dim"), [("bn", 1), ("cn", 3), ("brn", 2)])
def test_tracking_keeps_moments_and_freezes(norm: str, dim: int) -> None:
    layer = cn.create_norm(norm, 4, dim=dim, **({"num_groups": 2} if norm == "cn" else {}))
    frozen = cn.freeze_stats(nn.BatchNorm2d(4))
    model, x = nn.ModuleList([layer, frozen]), torch.randn(6, 4, *[3] * (dim - 1 if dim == 1 else dim))
    with mammoth.bn_track_stats(model, True):
        layer(x)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with mammoth.bn_track_stats(model, False):
        layer(x)
        frozen(torch.randn(2, 4, 3, 3))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    frozen(torch.randn(2, 4, 3, 3))
    assert torch.equal(frozen.running_mean, torch.zeros(4))  # what was frozen before stays frozen
    layer(x)
    assert not torch.equal(layer.running_mean, before["0.running_mean"])
