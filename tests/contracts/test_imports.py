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


WINDOWS = """
import importlib, os, pkgutil, signal, sys
import filelock, jinja2, matplotlib.pyplot, pandas, PIL.Image, pydantic, rich, safetensors.torch, scipy.stats
import torch, typer
sys.modules.update(dict.fromkeys(("fcntl", "grp", "posix", "pty", "pwd", "resource", "termios", "triton", "tty")))
for name in ("fork", "getuid", "killpg", "sched_getaffinity", "sched_setaffinity"):
    delattr(os, name)
for name in ("SIGHUP", "SIGKILL", "SIGUSR1", "alarm", "pthread_sigmask", "setitimer"):
    delattr(signal, name)
import contnorm
for module in pkgutil.walk_packages(contnorm.__path__, "contnorm."):
    if not module.name.startswith(("contnorm.integrations", "contnorm.kernels.triton", "contnorm.__main__")):
        importlib.import_module(module.name)
settings = {"stream.source": "digits", "train.max_steps": 2}
print(*contnorm.bench.run("split-mnist", norm="cn4", settings=settings, progress=None).acc > 0)
"""


@pytest.mark.slow
def test_norms_and_a_run_need_no_module_that_windows_lacks(tmp_path: Path) -> None:
    assert python(f"import os; os.chdir({str(tmp_path)!r})\n{WINDOWS}") == "True"
