"""The report: one HTML file that needs no network, and what goes into it."""

from ms_profile.report.facts import build_facts
from ms_profile.report.page import write_report
from ms_profile.report.payload import pack_columns, unpack_columns

__all__ = ["build_facts", "pack_columns", "unpack_columns", "write_report"]
