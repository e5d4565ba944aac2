"""Reports: tables, figures and HTML pages made from record files. Needs no torch.

Public names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from contnorm.lazy_names import lazy_names

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
__getattr__, __dir__ = lazy_names(__name__, _NAMES_BY_MODULE, extra="bench")
