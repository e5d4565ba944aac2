"""Start-up: commands that only read records import no library that they do not need; garbage collection."""

from __future__ import annotations

import atexit
import gc
import subprocess
import sys
from pathlib import Path

import pytest

from contnorm.bench.config.schema import from_dict
from contnorm.bench.records import Store
from contnorm.cli.common import collection_paused
from contnorm.cli.main import main

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


IMPORTED = "imported: "


def _needless_imports(arguments: list[str], folder: Path) -> tuple[str, list[str]]:
    """Run a command in a new process; returns its output and the needless modules that it imports."""
    code = (
        f"import sys; sys.argv = ['contnorm', *{arguments}]\n"
        "from contnorm.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"print({IMPORTED!r}, *[name for name in {NEEDLESS} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True, cwd=folder
    )
    return done.stdout, done.stderr.splitlines()[-1].removeprefix(IMPORTED).split()


@pytest.mark.parametrize(
    "arguments",
    [["show"], ["show", "--help"], ["--help"], ["run", "--help"]],
)
def test_commands_import_only_what_they_need(arguments: list[str], tmp_path: Path) -> None:
    assert _needless_imports(arguments, tmp_path)[1] == []


def test_show_of_records_imports_only_what_it_needs(tmp_path: Path) -> None:
    config = from_dict({"stream": {"source": "mnist"}})
    Store(tmp_path / "runs").save(config, 0, {"matrix": {"correct": [[3, None], [2, 4]], "total": [4, 4]}})
    shown, needless = _needless_imports(["show"], tmp_path)
    assert config.hash in shown and needless == []


@pytest.mark.parametrize("arguments", [["ls"], ["compare", "--help"]])
def test_listing_and_comparing_need_no_arrays(arguments: list[str], tmp_path: Path) -> None:
    assert not {"torch", "scipy", "pandas", "matplotlib"} & set(_needless_imports(arguments, tmp_path)[1])


def test_collection_is_suspended_during_an_import_and_skipped_at_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() > 0
    gc.unfreeze()
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(sys, "argv", ["contnorm", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert gc.freeze in registered
