"""Reports: an HTML page or Markdown files with tables and figures, made from records. Needs no torch."""

from contnorm.report.report import Report, collect_report, write_report

__all__ = ["Report", "collect_report", "write_report"]
