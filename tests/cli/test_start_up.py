"""Start-up: commands import no library that they do not need."""

import subprocess
import sys
from pathlib import Path

import pytest

from contnorm.bench.config.schema import from_dict
from contnorm.bench.records import Store

# Libraries and modules that are slow to import.
ARRAYS = {"torch", "pandas", "matplotlib", "scipy"}
NEEDLESS = {*ARRAYS, "ssl", "filelock", "tarfile", "PIL", "contnorm.bench.data.registry"}


@pytest.mark.parametrize(
    ("arguments", "needless"),
    [
        (["--help"], {*NEEDLESS, "numpy", "pydantic"}),
        (["run", "--help"], NEEDLESS),
        (["show"], NEEDLESS),
        (["ls"], ARRAYS),
    ],
)
def test_commands_import_only_what_they_need(arguments: list[str], needless: set[str], tmp_path: Path) -> None:
    config = from_dict({"stream": {"source": "mnist"}})
    Store(tmp_path / "runs").save(config, 0, {"matrix": {"correct": [[3, None], [2, 4]], "total": [4, 4]}})
    code = (
        f"import sys; sys.argv = ['contnorm', *{arguments}]\n"
        "from contnorm.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as ended: assert not ended.code\n"
        f"print('imported:', *{needless} & sys.modules.keys(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr.splitlines()[-1] == "imported:", done.stderr
    assert arguments != ["show"] or config.hash in done.stdout
