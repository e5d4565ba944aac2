"""Reports: tables, figures and HTML pages made from record files. Needs no torch.

Public names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contnorm.report.report import Report, collect_report, report_files, report_text, write_report


__all__ = [
    "Report",
    "collect_report",
    "report_files",
    "report_text",
    "write_report",
]

_NAMES_BY_MODULE = {
    "contnorm.report.report": (
        "Report",
        "collect_report",
        "report_files",
        "report_text",
        "write_report",
    ),
}
_MODULE_BY_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'contnorm.report' has no attribute {name!r}. Public names: {', '.join(__all__)}.")
    return getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
