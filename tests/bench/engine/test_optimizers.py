"""Plain gradient descent is torch's to the bit, and costs a run nothing at its start."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from contnorm.bench.engine.trainer import PlainSGD
from tests.datasets import small_mnist


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5), nn.Linear(5, 5))


def learned(device: torch.device, ours: bool) -> list[Tensor]:
    model = network().to(device)
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    lr = 0.037
    optimizer = PlainSGD(model.parameters(), lr) if ours else torch.optim.SGD(model.parameters(), lr=lr)
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(5):
        optimizer.zero_grad()
        model[:-1](x).square().sum().backward()  # the last layer never has a gradient
        optimizer.step()
    return list(model.parameters())


def test_optimizers_equal_torch_bitwise(device: torch.device) -> None:
    fresh = list(network().to(device).parameters())
    for new, old, ours in zip(learned(device, ours=True), fresh, learned(device, ours=False), strict=True):
        assert torch.equal(new, ours)
        assert torch.equal(new, old) == (new.shape in {(5, 5)} or old is fresh[-1])


@pytest.mark.slow
def test_run_does_not_import_torchs_compiler(tmp_path: Path) -> None:
    """In a process of its own, since a test before this one may have brought it; on digits that are written here."""
    small_mnist(tmp_path, train=2000, test=20)
    code = (
        "import sys\n"
        "from contnorm.cli.main import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    asked = ["--stream=permuted-mnist", "--strategy=er", "--norm=cn", "--seeds=1", "--max-steps=3"]
    places = [f"--data-root={tmp_path}", f"--runs={tmp_path / 'runs'}"]
    command = [sys.executable, "-c", code, "run", *asked, *places]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "runs").glob("*/0.json"))) == 1
