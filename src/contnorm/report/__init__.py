"""Reports: an HTML page or Markdown files with tables and figures, made from records. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contnorm.report.report import Report, collect_report, write_report

__all__ = ["Report", "collect_report", "write_report"]


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    """Import the report on first use: `contnorm show` needs its tables without pandas and matplotlib."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. Public names: {', '.join(__all__)}")
    from contnorm.report import report

    return getattr(report, name)
