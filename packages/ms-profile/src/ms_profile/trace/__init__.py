"""Read what profilers wrote into columns: Kineto's and Ascend's JSON, plain or gzip."""

from ms_profile.trace.columns import Category, Memory, Thread, Trace
from ms_profile.trace.reader import read_trace

__all__ = ["Category", "Memory", "Thread", "Trace", "read_trace"]
