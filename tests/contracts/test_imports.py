"""Importing costs next to nothing, and the parts that need no torch do without it."""

import subprocess
import sys

import pytest


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


BLOCKED = "import sys; sys.modules['torch'] = None\n"


@pytest.mark.parametrize("module", ["contnorm", "contnorm.catalog", "contnorm.report", "contnorm.report.cubes"])
def test_imports_with_torch_blocked(module: str) -> None:
    python(f"{BLOCKED}import {module}")


def test_the_block_is_real() -> None:
    with pytest.raises(AssertionError, match="torch"):
        python(f"{BLOCKED}import contnorm.layers.batch")


def test_all_names_add_under_fifty_milliseconds_to_torch() -> None:
    """Every public name resolved; the best of five, since the machine may be busy."""
    code = (
        "import torch, time; started = time.perf_counter(); import contnorm\n"
        "for name in contnorm.__all__: getattr(contnorm, name)\n"
        "print(time.perf_counter() - started)"
    )
    assert min(float(python(code)) for _ in range(5)) < 0.05
