"""`read_trace`: a profiler's JSON into columns, in memory that hardly grows with the file."""

import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import evolve

from ms_profile.errors import TraceError
from ms_profile.files.untrusted import check_path
from ms_profile.trace.builder import TraceBuilder
from ms_profile.trace.columns import Trace
from ms_profile.trace.json_chunks import TraceText

RANK_IN_NAME = re.compile(r"rank[-_ ]?([0-9]{1,7})(?![0-9])", re.IGNORECASE)


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read one trace of Kineto or of the Ascend profiler, plain or gzip, of any size.

    What is damaged or cut off is left out, with a line in `Trace.warnings`. The rank is the one
    that the trace names, else the one in the file's name (`rank-3`, `rank3`), else None.

    Raises:
        TraceError: there is no such file, it is empty, or it is no trace.
    """
    check_path("a trace", path, error=TraceError)
    source = Path(path)
    if not source.is_file():
        raise TraceError(f"there is no trace {source}; give a file that a profiler wrote")
    text = TraceText(source)
    builder = TraceBuilder()
    with _without_collection():
        for records in text.records():
            builder.add(records)
            del records
    trace = builder.finish(
        text.header,
        text.warnings,
        source.stat().st_size,
        damaged=text.damaged,
        name=source.name,
    )
    if not len(trace) and not len(trace.memory.at_ns):
        raise TraceError(f"{source} has no spans; was the profiler stopped before a step ended?")
    named = RANK_IN_NAME.search(source.name)
    if trace.rank is None and named:
        return evolve(trace, rank=int(named.group(1)))
    return trace


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause Python's garbage collector: records have no cycles, and it would visit them all."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
