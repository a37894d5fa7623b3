"""The report: one HTML file that needs no network, and what goes into it."""

from ms_profile.report.page import write_report
from ms_profile.report.summary import build_summary

__all__ = ["build_summary", "write_report"]
