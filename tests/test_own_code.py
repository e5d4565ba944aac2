"""Code of a user's own: valid code loads whatever it does, and what is wrong with it is one line with its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from contnorm.config import StrategyConfig
from contnorm.errors import UserError
from contnorm.own_code import load_own_code
from contnorm.strategies import build_strategy

STRATEGY = "from contnorm.strategies import Strategy\n"


LATE = """
from __future__ import annotations
from dataclasses import dataclass, field
from typing import ClassVar
@dataclass
class Mine:
    where: ClassVar[str] = "{folder}"
    many: list[int] = field(default_factory=list)
"""


def test_a_file_with_dataclasses_and_late_annotations_loads(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(LATE.format(folder=folder))
    found = [load_own_code(f"{tmp_path / folder / 'mine.py'}:Mine", "thing") for folder in ("a", "b")]
    assert [getattr(thing, "where", None) for thing in found] == ["a", "b"], "of two files of one name each is itself"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("x = 1\ndef broken(:\n", ", line 2: SyntaxError: invalid syntax"),
        ("x = 1\nimport no_such_module\n", ", line 2: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def f():\n    return 1 / 0\nf()\n", ", line 2: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit('so long')\n", ", line 2: SystemExit: so long"),
        ("raise ValueError('two\\nlines')\n", ", line 1: ValueError: two lines"),
    ],
)
def test_a_file_that_does_not_load_is_one_line(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(content)
    with pytest.raises(UserError, match=re.escape(f"strategy '{file}:W': it can't be loaded: {file}{said}")) as told:
        load_own_code(f"{file}:W", "strategy")
    assert "\n" not in str(told.value)


def test_a_strategy_that_can_not_be_made_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{STRATEGY}class W(Strategy):\n    def __init__(self, config):\n        self.x = config.nosuch\n")
    with pytest.raises(UserError, match=r"called with its settings: .*mine\.py, line 4: AttributeError: .*nosuch"):
        build_strategy(StrategyConfig(f"{file}:W"))
