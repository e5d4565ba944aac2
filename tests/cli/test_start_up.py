"""Start-up: commands that only read records import no library that they do not need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Libraries and modules that are slow to import.
NEEDLESS = (
    "torch",
    "pandas",
    "matplotlib",
    "scipy",
    "ssl",
    "filelock",
    "tarfile",
    "PIL",
    "contnorm.bench.data.registry",
)


@pytest.mark.parametrize("arguments", [["show"], ["show", "--help"]])
def test_show_imports_only_what_it_needs(arguments: list[str], tmp_path: Path) -> None:
    code = (
        f"import sys; sys.argv = ['contnorm', *{arguments}]\n"
        "from contnorm.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"print(*[name for name in {NEEDLESS} if name in sys.modules], file=sys.stderr, sep=',', end='')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True, cwd=tmp_path
    )
    assert done.stderr.splitlines()[1 if arguments == ["show"] else 0 :] == [], done.stderr
