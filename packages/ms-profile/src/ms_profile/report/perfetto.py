"""Export all ranks on one clock as a trace for ui.perfetto.dev and chrome://tracing."""

import gzip
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ms_profile.analysis.whole_run import Analysis, RankAnalysis
from ms_profile.arguments import check_type
from ms_profile.errors import RecordError, TraceError
from ms_profile.files.untrusted import check_path
from ms_profile.log.manifest import atomic_file
from ms_profile.trace.columns import EXPORT

ROWS = 20_000


def export_perfetto(analysis: Analysis, path: str | os.PathLike[str]) -> int:
    """Write every span of every rank, one process per rank; gzip if the name ends in `.gz`.

    Returns:
        The number of spans written.

    Raises:
        RecordError: the path is invalid, or something other than a file exists there.
        OSError: the file cannot be written; an earlier file stays unchanged.
    """
    check_path("path", path, error=RecordError, written="file")
    check_type("analysis", analysis, Analysis, "an Analysis, as analyse returns", error=TraceError)
    target = Path(path)
    encode = msgspec.json.Encoder().encode
    written, separator = 0, b""
    with atomic_file(target) as raw, _maybe_gzip(raw, target) as file:
        head = {"displayTimeUnit": "ms", "otherData": {"producer": EXPORT}}
        # The object and its list stay open; batches are added without their own brackets.
        file.write(encode(head)[:-1] + b',"traceEvents":[')
        for events in filter(None, _batches(analysis)):
            file.write(separator + encode(events)[1:-1])
            separator = b",\n"
            written += sum(event["ph"] == "X" for event in events)
        file.write(b"]}")
    return written


def _maybe_gzip(file: BinaryIO, target: Path) -> AbstractContextManager[BinaryIO | gzip.GzipFile]:
    if target.suffix.lower() == ".gz":
        return gzip.GzipFile(fileobj=file, mode="wb", compresslevel=4)
    return nullcontext(file)


def _batches(analysis: Analysis) -> Iterator[list[dict[str, Any]]]:
    starts = [rank.trace.span_ns[0] for rank in analysis.ranks.values() if len(rank.trace)]
    origin = min(starts, default=0)
    for rank in analysis.ranks.values():
        yield _tracks(rank)
        for begin in range(0, len(rank.trace), ROWS):
            yield _spans(rank, slice(begin, begin + ROWS), origin)


def _tracks(rank: RankAnalysis) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {
            "ph": "M",
            "name": "process_name",
            "pid": rank.rank,
            "args": {"name": f"rank {rank.rank}"},
        },
        {
            "ph": "M",
            "name": "process_sort_index",
            "pid": rank.rank,
            "args": {"sort_index": rank.rank},
        },
    ]
    for number, thread in enumerate(rank.trace.threads):
        label = f"{thread.process_name} {thread.name or thread.thread}".strip()
        events.append(
            {"ph": "M", "name": "thread_name", "pid": rank.rank, "tid": number,
             "args": {"name": label}}
        )  # fmt: skip
    return events


def _spans(rank: RankAnalysis, rows: slice, origin: int) -> list[dict[str, Any]]:
    trace = rank.trace
    start = rank.on_common_clock(trace.start_ns[rows])
    columns = (
        ((start - origin) / 1e3).tolist(),  # the format has microseconds
        (trace.duration_ns[rows] / 1e3).tolist(),
        trace.name[rows].tolist(),
        trace.thread[rows].tolist(),
    )
    return [
        {
            "ph": "X",
            "name": trace.names[name],
            "pid": rank.rank,
            "tid": thread,
            "ts": start_us,
            "dur": duration_us,
        }
        for start_us, duration_us, name, thread in zip(*columns, strict=True)
    ]
