"""Records with hostile text in every text field are escaped in every format."""

from __future__ import annotations

import csv
import html.parser
import io
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from contnorm.bench.config.schema import from_dict
from contnorm.bench.escape import (
    code_fence,
    escape_csv,
    escape_html,
    escape_latex,
    escape_latex_comment,
    escape_markdown,
    escape_markdown_line,
    escape_terminal,
)
from contnorm.bench.records import Store
from contnorm.cli.compare import show_comparison
from contnorm.cli.show import show_diverged, show_matrices, show_scores
from contnorm.paper.recipe import find_recipe, parse_recipe
from contnorm.report.recipe_records import RecordFolders
from contnorm.report.report import FORMATS, collect_report, report_files, report_text
from tests.cli.terminal import printed
from tests.report.record_samples import make_records

HOSTILE = (
    "=cmd()<script>alert(1)</script>![x](http://example.org/p.png)|`code`\n# heading\r\x1b[2J\x1b]0;title\x07"
    "\x9b31m\u202eevil\u2066\u2028\u2029^^4d\\input{x}%&_#$~{}'\"\ud800\t[red]"
)
LINK = re.compile(r"(?<!\\)\]\(http")  # one that is not escaped
RAW_CONTROLS = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]"
)


def hostile_text(value: Any) -> Any:
    """The same values with hostile text in place of every text."""
    if isinstance(value, dict):
        return {key: hostile_text(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [hostile_text(inner) for inner in value]
    return HOSTILE if isinstance(value, str) else value


KEPT = ("matrix", "matrix_running", "matrix_task", "labels", "labels_running", "census", "precision")
SAVED = ("schema", "status", "config", "hash", "seed", "checksum", "seal")  # what saving a record adds


def make_hostile(root: Path, path: Path) -> Path:
    """Leave what is checked when a record is read, and put hostile text everywhere else; gives its new file."""
    raw = json.loads(path.read_text())
    config, groups, seed = raw["config"], raw.get("classes", {}).get("groups"), raw["seed"]
    raw = {key: value if key in KEPT else hostile_text(value) for key, value in raw.items() if key not in SAVED}
    config["model"]["name"] = config["strategy"]["name"] = "<img src=x>|`a`^^4d\u202e$(id)"
    config["stream"]["source"] = "=1+1<b>\u2066|x"
    if groups is not None:
        raw["classes"]["groups"] = groups
    if "drift" in raw:
        rows = [list(row.values()) for row in raw["drift"]["by_task"]]
        raw["drift"] = {"by_task": [{f"{HOSTILE}{i}": layer for i, layer in enumerate(row)} for row in rows]}
    path.unlink()
    return Store(root).save(from_dict(config), seed, raw)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one label a picture, and two of several, all with hostile text; and a hostile note of a lost run."""
    root = tmp_path_factory.mktemp("runs")
    make_records(find_recipe("table1"), root, seeds=2)
    make_records(find_recipe("table5"), root, seeds=1, only=lambda cell: cell.place["norm"] in ("bn", "cn"))
    paths = [make_hostile(root, path) for path in sorted(root.glob("*/*.json"))]
    (paths[0].parent / "7.lost.json").write_text(json.dumps({"schema": 1, "lost": HOSTILE}))
    return root


def assert_visible(text: str) -> None:
    assert not (found := RAW_CONTROLS.search(text)), repr(text[max(0, found.start() - 40) : found.end() + 40])


def test_hostile_records_are_read(runs: Path) -> None:
    found = Store(runs).load_all()
    assert found.records and not found.problems and found.diverged
    assert {record.multi_label for record in found.records} == {False, True}


@pytest.mark.parametrize("width", [40, 200])
def test_terminal_shows_no_control_characters(runs: Path, width: int) -> None:
    found = Store(runs).load_all()
    console = Console(file=io.StringIO(), width=width)
    show_scores(found.records, console)
    show_diverged(found.records, found.diverged, console)
    show_matrices(found.records, console)
    one = [record for record in found.records if not record.multi_label]
    runs_of_one = list({record.config.hash: [record] for record in one}.values())
    show_comparison(runs_of_one[0], runs_of_one[1], console)
    text = printed(console)
    assert_visible(text)
    assert "<img" in text and "\\x1b[2J" in text.replace("\n", "").replace(" ", "")


class Elements(html.parser.HTMLParser):
    """All elements of a page, and their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: dict[str, set[str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, set()).add(value or "")


@pytest.mark.slow
def test_html_has_no_foreign_elements(runs: Path) -> None:
    text = report_text(collect_report(RecordFolders([runs])), "html")
    assert_visible(text)
    page = Elements()
    page.feed(text)
    assert not page.tags & {"script", "img"}
    assert all(link.startswith("#") for link in page.attributes["href"])
    assert not page.attributes.get("src") and not [name for name in page.attributes if name.startswith("on")]
    assert "<script" not in text and "<img" not in text and "<b>\\u2066" not in text


def test_markdown_has_no_markup_of_records(runs: Path) -> None:
    report = collect_report(RecordFolders([runs]))
    for text in (report_text(report, "md"), *report_files(report, "md").values()):
        assert_visible(text)
        outside = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
        assert "<script" not in outside and "<img" not in outside
        assert not LINK.search(outside) and not re.search(r"(?<!\\)`code", outside)
        assert not re.search(r"^# heading", outside, re.MULTILINE)
        tables = [block for block in outside.split("\n\n") if block.startswith("|")]
        assert tables or "claims" in text
        for table in tables:
            columns = {len(re.findall(r"(?<!\\)\|", row.replace("\\\\", ""))) for row in table.splitlines()}
            assert len(columns) == 1, table


def test_latex_has_no_commands_of_records(runs: Path) -> None:
    text = report_text(collect_report(RecordFolders([runs])), "latex")
    assert_visible(text)
    assert "^^" not in text
    for line in text.splitlines():
        if not line.startswith("%"):
            assert "\\input" not in line and "<" not in line and not re.search(r"(?<!\\)[%#]", line)


@pytest.mark.parametrize("part", ["runs", "tables", "claims"])
def test_csv_has_no_formulas(runs: Path, part: str) -> None:
    text = report_text(collect_report(RecordFolders([runs])), "csv", part)
    assert_visible(text)
    rows = list(csv.reader(io.StringIO(text)))
    assert {len(row) for row in rows} == {len(rows[0])}
    for cell in (cell for row in rows for cell in row):
        assert not cell.startswith(("=", "@", "\t", "\r")), cell
        assert not cell.startswith(("+", "-")) or float(cell) is not None


@pytest.mark.slow
def test_every_format_can_be_encoded(runs: Path, tmp_path: Path) -> None:
    report = collect_report(RecordFolders([runs]))
    for form in FORMATS:
        assert report_text(report, form).encode()


def test_hostile_text_in_a_recipe_is_escaped(runs: Path, tmp_path: Path) -> None:
    """Its title, note and claims are text of the recipe's author."""
    quoted = json.dumps(HOSTILE.replace("\ud800", ""))
    recipe = f"title = {quoted}\nnote = {quoted}\n" + (
        '[scores]\nacc = "acc"\n[[runs]]\nstreams = ["permuted-mnist"]\nstrategies = ["single"]\nnorms = ["bn", "cn"]\n'
        f'[[claims]]\nsays = {quoted}\nkind = "above"\nscore = "acc"\n'
        'cells = { norm = "cn" }\nthan = { norm = "bn" }\n'
    )
    path = tmp_path / "x$(id) y.toml"
    path.write_text(recipe)
    make_records(parse_recipe("mine", recipe, "mine.toml"), tmp_path / "own", seeds=2)
    report = collect_report(RecordFolders([tmp_path / "own"]), [str(path)])
    assert report.sections
    for form in FORMATS:
        for text in report_files(report, form).values():
            assert_visible(text)
            assert form in ("latex", "csv") or "<script" not in text
            assert form != "md" or not LINK.search(text)
            assert form != "latex" or "^^" not in text
    assert "'x$(id) y.toml'" not in report.sections[0].command and "y.toml'" in report.sections[0].command


@pytest.mark.parametrize(
    ("function", "text", "escaped"),
    [
        (escape_terminal, "plain text, naïve 日本 ±", "plain text, naïve 日本 ±"),
        (escape_terminal, "\x1b]8;;http://x\x1b\\", "\\x1b]8;;http://x\\x1b\\"),
        (escape_terminal, "\u0645\u06cc\u200c\u062e", "\u0645\u06cc\u200c\u062e"),
        (escape_html, "'\"<&>", "&#x27;&quot;&lt;&amp;&gt;"),
        (escape_markdown, "cn_tied 5 % & more -", "cn_tied 5 % & more -"),
        (escape_markdown, "&lt;", "&amp;lt;"),
        (escape_markdown_line, "- x", "\\- x"),
        (escape_markdown_line, "12. x", "12\\. x"),
        (escape_latex, "[3pt] x", "{}[3pt] x"),
        (escape_latex_comment, "^^^", "^ ^ ^"),
        (escape_csv, "-1", "-1"),
        (escape_csv, "+1.5e-3", "+1.5e-3"),
        (escape_csv, "-1+cmd", "'-1+cmd"),
        (escape_csv, " =1", "' =1"),
        (escape_csv, "\t=1", "'\\t=1"),
        (escape_csv, -1.5, -1.5),
        (escape_csv, None, None),
    ],
)
def test_escape_functions(function: Any, text: object, escaped: object) -> None:
    assert function(text) == escaped


def test_every_invisible_character_is_escaped_once() -> None:
    for code in range(0x110000):
        letter = chr(code)
        if unicodedata.category(letter) in ("Cc", "Zl", "Zp", "Cs"):
            assert escape_terminal(letter).isascii() and escape_terminal(escape_terminal(letter)) == escape_terminal(
                letter
            )


def test_fence_is_longer_than_any_in_the_code() -> None:
    assert code_fence("a ```` b\n```", "bash").splitlines() == ["`````bash", "a ```` b\\n```", "`````"]
