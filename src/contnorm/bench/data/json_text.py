"""Parse JSON from untrusted files: every problem raises a ValueError."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

__all__ = ["parse_json"]


def parse_json(text: bytes, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Parse like ``json.loads``, but raise a ValueError, not a RecursionError, for deeply nested lists.

    Example:
        >>> parse_json(b"[" * 100_000)
        Traceback (most recent call last):
        ValueError: it is nested too deeply
    """
    try:
        return json.loads(text, object_hook=object_hook)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
