"""The report of an evaluation: one table as text, one page that needs no network."""

from ms_compress.report.page import render
from ms_compress.report.results import Report, Result
from ms_compress.report.table import table

__all__ = ["Report", "Result", "render", "table"]
