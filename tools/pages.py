"""Write the figures of the documentation, and the parts of its pages that are made from the records.

    make figures

A part stands between ``<!-- figure: NAME -->`` or ``<!-- made: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path

from tools.doc_figures import FIGURES, social_preview
from tools.evidence import RECORDS
from tools.evidence_runs import missing_table
from tools.headline import (
    answers_table,
    calibration_table,
    evidence_tables,
    fine_tuning_table,
    results_table,
    speed_line,
)
from tools.svg import SCHEMES, svg_file

__all__ = ["figure_file", "filled", "pages", "preview_png"]

ROOT = RECORDS.parents[1]
FOLDER = ROOT / "docs" / "figures"
PREVIEW = FOLDER / "social-preview.png"
PARTS = {
    "answers": answers_table,
    "calibration": calibration_table,
    "evidence": evidence_tables,
    "fine-tuning": fine_tuning_table,
    "missing": missing_table,
    "results": results_table,
    "speed": speed_line,
}
PART = re.compile(r"<!-- (figure|made): ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)
SHOWN_WIDTH = 560  # pixels, on a wide screen


def pages() -> list[Path]:
    """Pages that have parts to fill."""
    candidates = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in candidates if PART.search(page.read_text())]


@cache
def figure_file(name: str, scheme: str) -> str:
    """Content of the file of a figure."""
    return svg_file(FIGURES[name].draw(), FIGURES[name].describe(), scheme)


def preview_png() -> bytes:
    """Content of the social preview."""
    file = io.BytesIO()
    social_preview().savefig(file, format="png", dpi=100, metadata={"Software": None})
    return file.getvalue()


def _picture(name: str, page: Path) -> str:
    """Light or dark figure, as the reader's system prefers it."""
    light, dark = (os.path.relpath(FOLDER / f"{name}-{scheme}.svg", page.parent) for scheme in SCHEMES)
    return (
        "<picture>\n"
        f'  <source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
        f'  <img src="{light}" width="{SHOWN_WIDTH}" alt="{escape(FIGURES[name].describe())}">\n'
        "</picture>"
    )


def filled(page: Path) -> str:
    """Text of a page with its parts made again."""

    def part(match: re.Match[str]) -> str:
        kind, name = match.groups()
        text = _picture(name, page) if kind == "figure" else PARTS[name]()
        return f"<!-- {kind}: {name} -->\n{text}\n<!-- end -->"

    return PART.sub(part, page.read_text())


def write() -> Iterator[Path]:
    """Write the files that are not current, and yield them."""
    contents = {FOLDER / f"{name}-{scheme}.svg": figure_file(name, scheme) for name in FIGURES for scheme in SCHEMES}
    contents |= {page: filled(page) for page in pages()}
    for path, text in contents.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            yield path
    preview = preview_png()
    if not PREVIEW.exists() or PREVIEW.read_bytes() != preview:
        PREVIEW.write_bytes(preview)
        yield PREVIEW


if __name__ == "__main__":
    for written in write():
        print(f"wrote {written.relative_to(ROOT)}")
