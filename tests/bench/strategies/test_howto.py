"""The example of docs/howto/bring-your-own-strategy.md, run as the page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from contnorm.bench.records import Store
from contnorm.bench.strategies import STRATEGIES, settings_owner
from tests.datasets import small_mnist

PAGE = Path(__file__).resolve().parents[3] / "docs" / "howto" / "bring-your-own-strategy.md"


@pytest.mark.slow
def test_example_strategy_of_the_docs_runs(tmp_path: Path) -> None:
    page = PAGE.read_text()
    code = re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    command = re.search(r"^contnorm (run .*)$", page, re.MULTILINE)
    assert code and command
    named = re.search(r"--strategy (\w+\.py):(\w+)", command[1])
    assert named
    (tmp_path / named[1]).write_text(code[1])
    small_mnist(tmp_path / "data")
    more = ["--data-root", "data", "--set", "stream.train_per_task=40", "--set", "stream.tasks=2"]
    done = subprocess.run(
        [sys.executable, "-m", "contnorm", *command[1].split(), *more],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (record,) = Store(tmp_path / "runs")
    assert dict(record.config.strategy.options) == {"weight": 2.0}
    assert record.config.strategy.name.endswith(f":{named[2]}")
    assert record.score("la") > 20


@pytest.mark.parametrize("name", [name for name, spec in STRATEGIES.items() if spec.own_settings])
def test_own_settings_in_the_docs_and_the_registry_are_the_defaults(name: str) -> None:
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{name}` |"))
    defaults = vars(settings_owner(name).Settings())  # type: ignore[attr-defined]
    assert defaults == STRATEGIES[name].own_settings
    assert re.findall(r"`(\w+)=([\d.]+)`", row) == [(key, str(value)) for key, value in defaults.items()]
