"""Pages of docs/reference: they are generated from the code, complete, and led to by the first page."""

import re

import pytest
from tools.reference.__main__ import FOLDER, PAGES
from tools.reference.errors import ADVICE, INTERNAL, exceptions


@pytest.mark.parametrize("name", PAGES)
def test_page_is_current(name: str) -> None:
    committed = (FOLDER / name).read_text(encoding="utf-8")
    assert committed == PAGES[name](), "run `python -m tools.reference`"


def test_all_pages_are_generated_and_listed() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in FOLDER.glob("*.md")} - {"README.md"}
    assert pages == set(PAGES)
    assert pages <= set(re.findall(r"\]\((\w+\.md)\)", index))


def test_every_exception_has_advice_or_is_internal() -> None:
    assert {one.name for one in exceptions()} == ADVICE.keys() | INTERNAL
