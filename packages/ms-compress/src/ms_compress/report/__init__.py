"""The report of an evaluation: a text table and an HTML page that works offline."""

from ms_compress.report.page import render
from ms_compress.report.results import Report, Result
from ms_compress.report.table import table

__all__ = ["Report", "Result", "render", "table"]
