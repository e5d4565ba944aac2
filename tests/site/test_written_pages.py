"""Pages that are written by hand and repeat something: the first result, the version, and the data of the citation."""

import re
from pathlib import Path

import pytest

import contnorm

ROOT = Path(__file__).resolve().parents[2]


def test_cite_page_has_the_data_of_the_citation_file() -> None:
    page, citation = (ROOT / "docs" / "index.md").read_text(), (ROOT / "CITATION.cff").read_text()
    for key in ("version", "license", "title"):
        value = re.search(rf"^{key}: \"?(.*?)\"?$", citation, re.MULTILINE)
        assert value and f"{{{value[1]}}}" in page, key
    for name in re.findall(r"family-names: (\w+)", citation):
        assert name in page


def test_version_of_the_changelog_is_that_of_the_package() -> None:
    heading = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert heading in (contnorm.__version__.partition(".dev")[0], "Unreleased")


@pytest.mark.slow
def test_first_result_of_the_start_page_is_the_printed_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same words; the scores within three points, since the last digits depend on the machine."""
    page = (ROOT / "docs" / "index.md").read_text()
    section = page[page.index("## The first result") :]
    code = re.search(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    shown = re.search(r"^```text\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert code and shown
    monkeypatch.chdir(tmp_path)
    exec(compile(code[1], "index.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()[:2]
    expected = shown[1].splitlines()[:2]
    number = r"\d+\.\d+"
    assert [re.sub(number, "#", line) for line in printed] == [re.sub(number, "#", line) for line in expected]
    for line, other in zip(printed, expected, strict=True):
        pairs = zip(re.findall(number, line), re.findall(number, other), strict=True)
        assert all(abs(float(a) - float(b)) < 3 for a, b in pairs)
