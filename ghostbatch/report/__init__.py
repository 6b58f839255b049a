"""Run folders in; tables, figures and one HTML page out."""

from ghostbatch.report.page import write_report

__all__ = ["write_report"]
