"""The example of docs/howto/bring-your-own-memory.md, run as the page says, and mistakes on the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from contnorm.bench.records import Store
from tests.datasets import small_mnist

PAGE = Path(__file__).resolve().parents[3] / "docs" / "howto" / "bring-your-own-memory.md"
SMALL = ["--data-root", "data", "--set", "stream.train_per_task=40", "--set", "stream.tasks=2"]


def contnorm(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "contnorm", *arguments, *SMALL]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_example_memory_of_the_docs_runs(tmp_path: Path) -> None:
    page = PAGE.read_text()
    code = re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    command = re.search(r"^contnorm (run .*)$", page, re.MULTILINE)
    assert code and command
    (tmp_path / "thinned.py").write_text(code[1])
    small_mnist(tmp_path / "data")
    done = contnorm(tmp_path, *command[1].split())
    assert done.returncode == 0, done.stderr
    (record,) = Store(tmp_path / "runs")
    assert record.config.memory.kind == "thinned.py:ThinnedQueue" and record.config.memory.size == 200
    assert record.config.memory.options == (("probability", 0.2),) and record.config.memory.code


@pytest.mark.slow
def test_slot_out_of_range_is_one_line_on_the_command_line(tmp_path: Path) -> None:
    """With two lanes; the module of its folder is imported, though the current folder is another one."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "slots.py").write_text("SLOT = 50\n")
    (tmp_path / "mine" / "memory.py").write_text(
        "import numpy as np\nimport slots\nfrom contnorm import bench\n\n\nclass Mine(bench.Memory):\n"
        "    def offer(self, labels, task):\n        return np.full(len(labels), slots.SLOT)\n"
    )
    small_mnist(tmp_path / "data")
    named = ("run", "--stream", "permuted-mnist", "--memory", "mine/memory.py:Mine", "--buffer", "50")
    done = contnorm(tmp_path, *named, "--seeds", "2", "--lanes", "2")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("contnorm: memory 'mine/memory.py:Mine': ") and "offer() returned [50, 50" in line
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert not done.stdout.strip()
