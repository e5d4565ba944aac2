"""Writes all generated pages of docs/reference; run it from the root of the repository."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools.reference import commands, datasets, metrics, record, settings

__all__ = ["FOLDER", "PAGES", "main"]

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands.page,
    "datasets.md": datasets.page,
    "metrics.md": metrics.page,
    "record.md": record.page,
    "settings.md": settings.page,
}


def main() -> None:
    """Write the pages that have changed, and name them."""
    for name, make in PAGES.items():
        path, text = FOLDER / name, make()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(FOLDER.parents[1])}: written")


if __name__ == "__main__":
    main()
