"""Links between the pages of the documentation, with their anchors."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, page_name, prose


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_and_anchors_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" not in target:
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page_name(page)} links to {target}"
            assert not anchor or anchor in anchors(linked), f"{page_name(page)} links to {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
