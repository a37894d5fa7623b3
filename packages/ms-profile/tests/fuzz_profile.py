"""Fuzz cases: every file that ms-profile reads, with the command that reads it.

A driver writes a case's valid input with `make`, damages the returned file, and runs the command,
in whose arguments `{folder}` is the folder. For any damage the command must exit within seconds
with 0, 1 or 2 and print no traceback.
"""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from attrs import frozen
from memory_snapshots import train
from profiler_databases import simulate, write_ascend_db, write_nsys

from ms_profile.clocks.clock_pair import ClockPair
from ms_profile.links.fit import fit_link
from ms_profile.links.matrix import LinkMatrix, PairLink
from ms_profile.log.event_log import EventLog
from ms_profile.log.manifest import (
    RankManifest,
    RunManifest,
    TraceFile,
    TraceSchedule,
    encode,
    rank_path,
    ring_path,
    trace_path,
    write_atomically,
)
from ms_profile.log.ring import Kind, Ring

__all__ = ["FuzzCase", "cases"]


@frozen(kw_only=True)
class FuzzCase:
    """One kind of file and one command that reads it."""

    name: str
    make: Callable[[Path], Path]
    """Write a valid input into a folder and return the file to damage."""
    command: tuple[str, ...]
    """Arguments of `python -m ms_profile`."""


def cases() -> tuple[FuzzCase, ...]:
    """Return all cases."""
    report = ("report", "{folder}", "--out", "{folder}/page.html")
    perfetto = (*report, "--perfetto", "{folder}/all.json.gz")
    logs = ("logs", "{folder}")
    return (
        FuzzCase(name="trace-kineto", make=_trace(indent=2), command=perfetto),
        FuzzCase(name="trace-compact", make=_trace(indent=None), command=report),
        FuzzCase(name="trace-gzip", make=_gzip, command=report),
        FuzzCase(name="trace-ascend", make=_ascend, command=report),
        FuzzCase(name="nsys", make=_nsys, command=report),
        FuzzCase(name="ascend-database", make=_ascend_database, command=report),
        FuzzCase(
            name="memory-snapshot",
            make=lambda folder: train(blocks=2, steps=1).write(folder / "snapshot.pickle"),
            command=("memory", "{folder}/snapshot.pickle", "--out", "{folder}/page.html"),
        ),
        FuzzCase(name="run-trace", make=_run("traces/rank-00001.000.json"), command=report),
        FuzzCase(name="run-manifest", make=_run("manifest.json"), command=report),
        FuzzCase(name="run-rank", make=_run("ranks/rank-00001.json"), command=report),
        FuzzCase(name="run-ring", make=_run("ring/rank-00001.ring"), command=report),
        FuzzCase(name="ring", make=_ring, command=report),
        FuzzCase(name="events", make=_events, command=logs),
        FuzzCase(name="events-json", make=_events, command=(*logs, "--json")),
        FuzzCase(
            name="events-tensorboard",
            make=_events,
            command=(*logs, "--tensorboard", "{folder}/board"),
        ),
        FuzzCase(
            name="compare-events",
            make=_run("events/rank-00000.000000.events"),
            command=("compare", "{folder}", "{folder}", "--max-wait", "1", "--json"),
        ),
        FuzzCase(
            name="compare-traces",
            make=_trace(indent=2),
            command=("compare", "{folder}/rank-0.json", "{folder}/rank-0.json"),
        ),
        FuzzCase(
            name="links",
            make=_links,
            command=(*report, "--links", "{folder}/links"),
        ),
    )


def _events_of(rank: int) -> list[dict[str, Any]]:
    """Return six steps in Kineto's format, with operators, a collective, a batch and memory."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": 0.0, "args": {"name": "py"}}
    ]
    for step in range(6):
        at = 5_000.0 * step + 10.0 * rank
        events += [
            _span("user_annotation", f"ProfilerStep#{step}", at, 4_900.0),
            _span("user_annotation", "enumerate(DataLoader)#_Next.__next__", at + 10, 90.5),
            _span("cpu_op", "aten::addmm", at + 200, 1_000.125, step, dims=[[4, 8], [8, 8]]),
            _span("cuda_runtime", "cudaLaunchKernel", at + 300, 5.0, step),
            _span("kernel", "gemm", at + 400, 900.0, step, tid=20),
            _span("user_annotation", "gloo:all_reduce", at + 2_000, 700.0, tid=9, dims=[[64]]),
            {"ph": "i", "name": "[memory]", "pid": 7, "tid": 7, "ts": at + 250,
             "args": {"Bytes": 512, "Total Allocated": 512 * step, "Total Reserved": 4096,
                      "Device Type": 0, "Device Id": -1}},
        ]  # fmt: skip
    return events


def _span(
    label: str, name: str, at: float, length: float, number: int = -1, *, tid: int = 7,
    dims: list[list[int]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    arguments: dict[str, Any] = {"External id": number, "correlation": number}
    if dims is not None:
        arguments |= {"Input Dims": dims, "Input type": ["float"] * len(dims)}
    return {"ph": "X", "cat": label, "name": name, "pid": 7, "tid": tid, "ts": at, "dur": length,
            "args": arguments}  # fmt: skip


def _document(rank: int) -> dict[str, Any]:
    return {
        "schemaVersion": 1,
        "baseTimeNanoseconds": 1_760_000_000_000_000_000,
        "host_name": "here",
        "distributedInfo": {"rank": rank, "world_size": 2,
                            "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]},
        "ms_profile_groups": {"names": ["gloo:all_reduce"], "groups": ["0"],
                              "entries": [[0, 0, 64, step] for step in range(6)]},
        "traceEvents": _events_of(rank),
        "traceName": "made",
    }  # fmt: skip


def _trace(indent: int | None) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for rank in (0, 1):
            text = json.dumps(_document(rank), indent=indent)
            (folder / f"rank-{rank}.json").write_text(text)
        return folder / "rank-0.json"

    return make


def _gzip(folder: Path) -> Path:
    path = folder / "rank-0.json.gz"
    path.write_bytes(gzip.compress(json.dumps(_document(0), indent=1).encode()))
    return path


def _ascend(folder: Path) -> Path:
    def named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}

    def span(name: str, pid: int, offset_us: int, **fields: Any) -> dict[str, Any]:
        instant = f"{1_700_000_000_000_000 + offset_us}.125"
        return {"ph": "X", "name": name, "pid": pid, "tid": 1, "ts": instant, "dur": 2.5, **fields}

    events = [named("process_name", 1, 0, "Python"), named("process_name", 3, 0, "Ascend Hardware")]
    events += [named("process_name", 4, 0, "Communication(HCCL)")]
    events += [named("thread_name", 4, 1, "Group 0 Communication")]
    for offset_us in range(0, 80, 10):
        events += [span("aten::mm", 1, offset_us, cat="cpu_op"), span("MatMulV3", 3, offset_us + 3)]
        events += [span("hcom_allReduce__721_0_1", 4, offset_us + 6)]
    path = folder / "trace_view.json"
    path.write_text(json.dumps(events))
    return path


def _nsys(folder: Path) -> Path:
    return write_nsys(folder / "rank0.sqlite", simulate("cuda", steps=2))


def _ascend_database(folder: Path) -> Path:
    return write_ascend_db(folder / "ascend_pytorch_profiler_0.db", simulate("npu", steps=2))


def _run(damaged: str) -> Callable[[Path], Path]:
    """Write a run folder of two ranks."""

    def make(folder: Path) -> Path:
        clock = ClockPair(1_000_000_000, 1_760_000_000_000_000_000, 90)
        manifest = RunManifest(
            world_size=2, metrics=("communication_time", "memory"), script="train.py",
            started_wall_ns=clock.wall_ns, schedule=TraceSchedule(), versions={"python": "3.11"},
        )  # fmt: skip
        write_atomically(folder / "manifest.json", encode(manifest))
        for rank in (0, 1):
            trace = trace_path(folder, rank, 0)
            write_atomically(trace, json.dumps(_document(rank), indent=2).encode())
            name = trace.relative_to(folder).as_posix()
            file = TraceFile(path=name, first_step=0, steps=6, size_bytes=trace.stat().st_size)
            rank_manifest = RankManifest(
                rank=rank, local_rank=rank, world_size=2, host="here", pid=7, device="cpu",
                status="done", exit_code=0, start=clock, steps=6, traces=(file,),
            )  # fmt: skip
            write_atomically(rank_path(folder, rank), encode(rank_manifest))
            _record(ring_path(folder, rank), rank)
            _log(folder / "events", rank)
        return folder / damaged

    return make


def _record(path: Path, rank: int) -> Path:
    ring = Ring(path, capacity=64, rank=rank)
    for step in range(6):
        ring.step = step
        spans = [ring.begin(ring.name(kind.name.lower()), kind) for kind in Kind]
        for span in reversed(spans):
            ring.end(span)
    ring.begin(ring.name("open"), Kind.FORWARD)
    ring.close()
    return path


def _ring(folder: Path) -> Path:
    return _record(folder / "rank-00000.ring", 0)


def _log(folder: Path, rank: int) -> Path:
    with EventLog(folder, rank=rank, world_size=2, flush_interval_s=100) as log:
        for step in range(12):
            log("step", {"step": step, "step_time_s": 0.1 + step / 1e3, "cpu_wait_s": 0.01})
            if step % 4 == 3:
                log.flush()
        log("end", {"why": "done"})
    return folder / f"rank-{rank:05d}.000000.events"


def _events(folder: Path) -> Path:
    _log(folder, 1)
    return _log(folder, 0)


def _links(folder: Path) -> Path:
    _trace(indent=None)(folder)
    sizes, times = (8, 1024, 1_048_576), (1e-5, 1.1e-5, 1.2e-4)
    pairs = tuple(
        PairLink(first=a, second=b, fit=fit_link(sizes, times), sizes_bytes=sizes, times_s=times)
        for a, b in ((0, 1), (0, 2), (1, 2))
    )
    path = folder / "links"
    hosts = ("here", "here", "there")
    path.write_bytes(
        msgspec.json.encode(LinkMatrix(world_size=3, backend="gloo", hosts=hosts, pairs=pairs))
    )
    return path
