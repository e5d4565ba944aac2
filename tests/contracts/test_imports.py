"""Importing is fast, and the parts that do not need torch do not import it."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked")
sys.meta_path.insert(0, Block())
"""


PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
CONTRACTS = PROJECT["tool"]["importlinter"]["contracts"]
WITHOUT_TORCH = [
    *next(contract["source_modules"] for contract in CONTRACTS if contract.get("forbidden_modules") == ["torch"]),
    "contnorm",
    "contnorm.bench.models",
    "contnorm.bench.plan",
    "contnorm.bench.streams.tasks",
    "contnorm.bench.data.registry",
    "contnorm.bench.data.multilabel",
    "contnorm.cli.main",
    "contnorm.cli.data",
]


def test_imports_with_torch_blocked() -> None:
    code = "".join(f"import {module}\n" for module in WITHOUT_TORCH)
    assert python(f"{BLOCKED}{code}print('done')") == "done"


@pytest.mark.slow
def test_layer_imports_only_torch_and_the_norm_library() -> None:
    """So that importing is fast: no other library, and neither the bench nor its reports."""
    code = (
        "import sys, torch; before = set(sys.modules); from contnorm.norms.continual import ContinualNorm2d\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    brought = python(code).split()
    assert "contnorm.norms.continual" in brought
    rooms = {"checks", "errors", "kernels", "norms", "registry"}
    assert {tuple(name.split(".")[:2]) for name in brought} == {("contnorm",), *(("contnorm", room) for room in rooms)}
