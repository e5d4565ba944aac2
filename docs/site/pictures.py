"""Hook of MkDocs: a ``<picture>`` with a light and a dark figure becomes two images, of which the site shows one.

On a code host, ``<picture>`` follows the system. On the site, the reader can choose the scheme, and Material hides the
image whose address ends with ``#only-light`` or ``#only-dark``.
"""

from __future__ import annotations

import re
from html import unescape

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

__all__ = ["on_page_markdown", "with_images"]

PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="(?P<dark>[^"]+)">\s*'
    r'<img src="(?P<light>[^"]+)" width="(?P<width>\d+)" alt="(?P<alt>[^"]*)">\s*</picture>'
)


def with_images(text: str) -> str:
    """Return the text of a page with two Markdown images for each picture, which MkDocs checks like other links.

    Example:
        >>> with_images('<picture><source srcset="d.svg"><img src="l.svg" width="9" alt="A"></picture>')
        '![A](l.svg#only-light){ width=9 } ![A](d.svg#only-dark){ width=9 }'
    """

    def images(match: re.Match[str]) -> str:
        alt = re.sub(r"([\[\]*_`])", r"\\\1", unescape(match["alt"]))
        return " ".join(f"![{alt}]({match[s]}#only-{s}){{ width={match['width']} }}" for s in ("light", "dark"))

    return PICTURE.sub(images, text)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the pictures of a page."""
    return with_images(markdown)
