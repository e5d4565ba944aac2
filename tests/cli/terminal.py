"""Helper: printed text of a command."""

from __future__ import annotations

import io

from rich.console import Console


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
