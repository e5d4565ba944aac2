"""What a command printed."""

from __future__ import annotations

import io

from rich.console import Console

__all__ = ["printed"]


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
