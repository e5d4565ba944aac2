"""Importing is fast, and the parts that do not need torch do not import it."""

import subprocess
import sys

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


WITHOUT_TORCH = [
    "contnorm",
    *(
        f"contnorm.{name}"
        for name in (
            "registry",
            "bench.strategies",
            "bench.models",
            "errors",
            "bench.config.sources",
            "bench.config.schema",
            "bench.rng",
            "bench.records",
            "bench.loggers",
            "bench.metrics",
            "bench.label_metrics",
            "bench.stats",
            "bench.sequential",
            "bench.memories",
            "bench.plan",
            "bench.components",
            "bench.streams.tasks",
            "bench.data.registry",
            "bench.data.multilabel",
            "report.report",
            "report.runs",
            "cli.main",
            "cli.data",
            "bench.config.defaults",
            "cli.show",
            "cli.compare",
            "cli.report",
            "paper.recipe",
            "paper.selection",
            "paper.tables",
            "paper.cells",
            "paper.claims",
        )
    ),
]


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_imports_with_torch_blocked(module: str) -> None:
    assert python(f"{BLOCKED}import {module}; print('done')") == "done"


def test_blocking_torch_works() -> None:
    with pytest.raises(AssertionError, match="torch"):
        python(f"{BLOCKED}import contnorm.norms.batch")


@pytest.mark.slow
def test_layer_imports_only_torch_and_the_norm_library() -> None:
    """So that importing is fast: no other library, and neither the bench nor its reports."""
    code = (
        "import sys, torch; before = set(sys.modules); from contnorm.norms.continual import ContinualNorm2d\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    brought = python(code).split()
    assert "contnorm.norms.continual" in brought
    rooms = {"checks", "errors", "kernels", "norms"}
    assert {tuple(name.split(".")[:2]) for name in brought} == {("contnorm",), *(("contnorm", room) for room in rooms)}


def test_missing_library_of_the_bench_is_named() -> None:
    code = (
        "import sys; sys.modules['pydantic'] = None\n"
        "from contnorm import bench\n"
        "try:\n    bench.load_stream\n"
        "except ImportError as error:\n    print(error)"
    )
    message = python(code)
    assert "needs pydantic" in message and 'pip install "contnorm[bench]"' in message
