"""Text blocks of the documentation: the output that a page shows is the one that its code prints."""

import re
from pathlib import Path

import pytest

from contnorm.bench.data.multilabel import build, list_csv
from tests.docs.pages import ROOT


@pytest.mark.slow
def test_quickstart_table_is_the_printed_one(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    first = re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shown = re.search(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert first and shown
    exec(compile(first[1], "quickstart", "exec"), {})
    assert capsys.readouterr().out == shown[1]


def test_csv_example_builds(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    page = (ROOT / "docs" / "howto" / "long-tail.md").read_text()
    shown = re.search(r"^```text\n(image,split.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert shown
    (tmp_path / "labels.csv").write_text(shown[1])
    for picture in re.findall(r"^\S+\.jpg", shown[1], re.MULTILINE):
        (tmp_path / picture).parent.mkdir(exist_ok=True)
        image.new("RGB", (20, 10)).save(tmp_path / picture)
    manifest = build(list_csv("beaches", tmp_path / "labels.csv", tmp_path), tmp_path / "beaches", side=8)
    assert manifest["about"]["complete"] and manifest["class_names"] == ["palm", "sea", "sky"]
