"""Text of records, data sets and settings is escaped for the terminal and HTML."""

import io
import unicodedata
from pathlib import Path

import pytest
from rich.console import Console

from contnorm.bench.config.schema import from_dict
from contnorm.bench.records import Runs, make_record
from contnorm.cli.records import show_matrices, show_scores
from contnorm.errors import escape_terminal
from contnorm.report import collect_report
from tests.cli.conftest import printed

HOSTILE = "<script>alert(1)</script>|`code`\n# head\r\x1b[2J\x1b]0;title\x07\x9b31m\u202eevil\u2066\u2028{}'\"\t[red]"
CONTROLS = {*map(chr, range(32)), "\x7f", "\x9b", "\u202e", "\u2066", "\u2028"} - {"\n"}


@pytest.fixture
def runs() -> Runs:
    """Two runs with hostile text in all fields that are text."""
    fields = {
        "matrix": {"correct": [[5, None], [4, 6]], "total": [10, 10]},
        "device": {"kind": "cpu", "name": HOSTILE},
        "versions": {"torch": HOSTILE},
        "source": {"name": HOSTILE, "fingerprint": HOSTILE, "images": 3, "published_images": 4},
        "commit": HOSTILE,
    }
    name = "<img src=x>|`a`\u202e$(id)"
    values = {"strategy": {"name": name}, "stream": {"source": name}}
    configs = [from_dict({**values, "norm": {"name": norm}}) for norm in ("bn", "cn")]
    return Runs([make_record(config, seed, fields) for config in configs for seed in range(2)])


@pytest.mark.parametrize("width", [40, 200])
def test_terminal_shows_no_control_characters(runs: Runs, width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    show_scores(runs.records, console)
    show_matrices(runs.records, console)
    text = printed(console)
    assert not CONTROLS & set(text) and "<img" in text and "\\x1b[2J" in text.replace("\n", "").replace(" ", "")


def test_page_has_no_elements_of_records(runs: Runs, tmp_path: Path) -> None:
    runs.save(tmp_path / "runs.jsonl")
    html = collect_report(tmp_path / "runs.jsonl", ["figure3"]).html()
    assert not CONTROLS & set(html) and "<img" not in html and "<script" not in html and "\\x1b[2J" in html


def test_every_invisible_character_is_escaped_once() -> None:
    for code in range(0x110000):
        letter = chr(code)
        if unicodedata.category(letter) in ("Cc", "Zl", "Zp", "Cs"):
            assert escape_terminal(letter).isascii() and escape_terminal(escape_terminal(letter)) == escape_terminal(
                letter
            )
