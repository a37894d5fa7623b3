"""All ranks in one trace that ui.perfetto.dev and chrome://tracing open, on one clock."""

import gzip
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ms_profile.analysis.whole_run import Analysis, RankAnalysis
from ms_profile.errors import RecordError
from ms_profile.files.untrusted import check_path
from ms_profile.log.manifest import whole_file
from ms_profile.trace.columns import EXPORT

ROWS = 20_000


def export_perfetto(analysis: Analysis, path: str | os.PathLike[str]) -> int:
    """Write every span of every rank, a process a rank, gzip where the name ends in `.gz`.

    Returns:
        How many spans were written.

    Raises:
        RecordError: no system takes the path, or something else stands there.
        OSError: the file cannot be written; what stood there before stays.
    """
    check_path("path", path, error=RecordError, written="file")
    target = Path(path)
    encode = msgspec.json.Encoder().encode
    written, separator = 0, b""
    with whole_file(target) as raw, _packed(raw, target) as file:
        head = {"displayTimeUnit": "ms", "otherData": {"producer": EXPORT}}
        file.write(encode(head)[:-1] + b',"traceEvents":[')
        for events in filter(None, _batches(analysis)):
            file.write(separator + encode(events)[1:-1])
            separator = b",\n"
            written += sum(event["ph"] == "X" for event in events)
        file.write(b"]}")
    return written


def _packed(file: BinaryIO, target: Path) -> AbstractContextManager[BinaryIO | gzip.GzipFile]:
    if target.suffix.lower() == ".gz":
        return gzip.GzipFile(fileobj=file, mode="wb", compresslevel=4)
    return nullcontext(file)


def _batches(analysis: Analysis) -> Iterator[list[dict[str, Any]]]:
    starts = [one.trace.span_ns[0] for one in analysis.ranks.values() if len(one.trace)]
    origin = min(starts, default=0)
    for one in analysis.ranks.values():
        yield _tracks(one)
        for begin in range(0, len(one.trace), ROWS):
            yield _spans(one, slice(begin, begin + ROWS), origin)


def _tracks(one: RankAnalysis) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": one.rank, "args": {"name": f"rank {one.rank}"}},
        {
            "ph": "M",
            "name": "process_sort_index",
            "pid": one.rank,
            "args": {"sort_index": one.rank},
        },
    ]
    for number, thread in enumerate(one.trace.threads):
        shown = f"{thread.process_name} {thread.name or thread.thread}".strip()
        events.append(
            {"ph": "M", "name": "thread_name", "pid": one.rank, "tid": number,
             "args": {"name": shown}}
        )  # fmt: skip
    return events


def _spans(one: RankAnalysis, rows: slice, origin: int) -> list[dict[str, Any]]:
    trace = one.trace
    start = one.on_common_clock(trace.start_ns[rows])
    columns = (
        ((start - origin) / 1e3).tolist(),
        (trace.duration_ns[rows] / 1e3).tolist(),
        trace.name[rows].tolist(),
        trace.thread[rows].tolist(),
    )
    return [
        {
            "ph": "X",
            "name": trace.names[name],
            "pid": one.rank,
            "tid": thread,
            "ts": at,
            "dur": long,
        }
        for at, long, name, thread in zip(*columns, strict=True)
    ]
