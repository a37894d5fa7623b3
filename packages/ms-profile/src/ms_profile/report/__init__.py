"""The HTML report: one file that works offline, and the summary it shows."""

from ms_profile.report.page import write_report
from ms_profile.report.summary import build_summary

__all__ = ["build_summary", "write_report"]
