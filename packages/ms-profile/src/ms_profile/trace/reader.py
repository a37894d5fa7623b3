"""`read_trace`: read a profiler's JSON or SQLite database into columns, in bounded memory."""

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
from ms_profile.trace.database import is_database, read_database
from ms_profile.trace.json_chunks import TraceText

RANK_IN_NAME = re.compile(r"rank[-_ ]?([0-9]{1,7})(?![0-9])", re.IGNORECASE)


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read one trace: Kineto or Ascend JSON, plain or gzip, or an Ascend or nsys database.

    Damaged or missing parts are skipped, with a line in `Trace.warnings`. The rank is read from the
    trace, or else from the file name (`rank-3`, `rank3`); None if neither has one.

    Raises:
        TraceError: the file does not exist, is empty, or is not a trace.
    """
    check_path("a trace", path, error=TraceError)
    source = Path(path)
    if not source.is_file():
        raise TraceError(f"trace {source} does not exist; pass a file that a profiler wrote")
    with gc_paused():
        trace = read_database(source) if is_database(source) else _read_json(source)
    if not len(trace) and not len(trace.memory.at_ns):
        raise TraceError(f"{source} has no spans; was the profiler stopped before a step ended?")
    match = RANK_IN_NAME.search(source.name)
    if trace.rank is None and match:
        return evolve(trace, rank=int(match.group(1)))
    return trace


def _read_json(source: Path) -> Trace:
    text = TraceText(source)
    builder = TraceBuilder()
    for records in text.records():
        builder.add(records)
        del records
    return builder.finish(
        text.header,
        text.warnings,
        source.stat().st_size,
        damaged=text.damaged,
        name=source.name,
    )


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector, which would visit all records though they have no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
