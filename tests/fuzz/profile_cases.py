"""What ms-profile reads: traces, event logs, measured links."""

import gzip
import json
import shutil
from functools import partial
from pathlib import Path

from fuzz.case import Case, command

run = partial(command, "ms_profile")
TRACES = Path(__file__).parents[2] / "packages" / "ms-profile" / "tests" / "traces"


def traces(folder: Path) -> None:
    """Two ranks of a real step, packed."""
    shutil.copytree(TRACES / "ddp", folder / "traces")


def plain_trace(folder: Path) -> None:
    """One rank, unpacked."""
    (folder / "traces").mkdir()
    packed = TRACES / "ddp" / "rank-00000.json.gz"
    (folder / "traces" / "rank-00000.json").write_bytes(gzip.decompress(packed.read_bytes()))


def steps(folder: Path) -> None:
    """Six steps of one rank, made up."""
    events = []
    for step in range(6):
        at = {"ph": "X", "pid": 1, "tid": 1, "ts": 1e6 + step * 1000.0}
        name = f"ProfilerStep#{step}"
        events.append({**at, "cat": "user_annotation", "name": name, "dur": 990.0})
        events.append({**at, "cat": "cpu_op", "name": "aten::mm", "dur": 500.0 + step})
    place = {"rank": 0, "world_size": 1, "backend": "gloo"}
    head = {"schemaVersion": 1, "baseTimeNanoseconds": 0, "distributedInfo": place}
    trace = {**head, "traceEvents": events}
    for name in ("before", "after"):
        (folder / name).mkdir()
        (folder / name / "rank-00000.json").write_text(json.dumps(trace, indent=1))


def log(folder: Path) -> None:
    """The event logs of two ranks."""
    from ms_profile import EventLog

    for rank in range(2):
        with EventLog(folder / "events", rank=rank) as one:
            for step in range(30):
                one("step", {"step": step, "loss": 1 / (step + 1), "note": f"step {step}"})


def links(folder: Path) -> None:
    """Traces and measured links."""
    import msgspec

    from ms_profile.links.fit import fit_link
    from ms_profile.links.matrix import LinkMatrix, PairLink

    traces(folder)
    sizes, times = (1024, 65536, 1 << 20), (2e-5, 3e-5, 1e-4)
    pair = PairLink(first=0, second=1, sizes_bytes=sizes, times_s=times, fit=fit_link(sizes, times))
    matrix = LinkMatrix(world_size=2, backend="gloo", hosts=("a", "a"), pairs=(pair,))
    (folder / "links.json").write_bytes(msgspec.json.encode(matrix))


CASES = (
    Case(
        name="report packed",
        make=traces,
        files=("traces/*.gz",),
        run=run("report", "traces", "--out", "report.html"),
        share=1.5,
    ),
    Case(
        name="report plain",
        make=plain_trace,
        files=("traces/*.json",),
        run=run("report", "traces", "--out", "report.html", "--perfetto", "all.json"),
        share=1.5,
    ),
    Case(
        name="report with links",
        make=links,
        files=("links.json",),
        run=run("report", "traces", "--out", "report.html", "--links", "links.json"),
    ),
    Case(
        name="compare",
        make=steps,
        files=("after/*.json",),
        run=run("compare", "before", "after", "--most-wait", "1"),
    ),
    Case(
        name="logs",
        make=log,
        files=("events/*",),
        run=run("logs", "events", "--json"),
        share=3,
        sealed=True,
        one_may_miss=True,
    ),
    Case(
        name="tensorboard",
        make=log,
        files=("events/*",),
        run=run("logs", "events", "--tensorboard", "board"),
    ),
)
