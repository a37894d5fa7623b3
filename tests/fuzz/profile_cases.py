"""Inputs of ms-profile: traces, event logs, measured links."""

import gzip
import json
import shutil
from functools import partial
from pathlib import Path

from fuzz.case import Case, command

run = partial(command, "ms_profile")
TRACES = Path(__file__).parents[2] / "packages" / "ms-profile" / "tests" / "traces"


def traces(folder: Path) -> None:
    """Copy compressed traces of a real step on two ranks."""
    shutil.copytree(TRACES / "ddp", folder / "traces")


def plain_trace(folder: Path) -> None:
    """Write an uncompressed trace of one rank."""
    (folder / "traces").mkdir()
    compressed = TRACES / "ddp" / "rank-00000.json.gz"
    (folder / "traces" / "rank-00000.json").write_bytes(gzip.decompress(compressed.read_bytes()))


def steps(folder: Path) -> None:
    """Write synthetic traces of six steps on one rank."""
    events = []
    for step in range(6):
        event = {"ph": "X", "pid": 1, "tid": 1, "ts": 1e6 + step * 1000.0}
        name = f"ProfilerStep#{step}"
        events.append({**event, "cat": "user_annotation", "name": name, "dur": 990.0})
        events.append({**event, "cat": "cpu_op", "name": "aten::mm", "dur": 500.0 + step})
    distributed_info = {"rank": 0, "world_size": 1, "backend": "gloo"}
    header = {"schemaVersion": 1, "baseTimeNanoseconds": 0, "distributedInfo": distributed_info}
    trace = {**header, "traceEvents": events}
    for name in ("before", "after"):
        (folder / name).mkdir()
        (folder / name / "rank-00000.json").write_text(json.dumps(trace, indent=1))


def log(folder: Path) -> None:
    """Write the event logs of two ranks."""
    from ms_profile import EventLog

    for rank in range(2):
        with EventLog(folder / "events", rank=rank) as event_log:
            for step in range(30):
                event_log("step", {"step": step, "loss": 1 / (step + 1), "note": f"step {step}"})


def links(folder: Path) -> None:
    """Write traces and measured links."""
    import msgspec

    from ms_profile.links.fit import fit_link
    from ms_profile.links.matrix import LinkMatrix, PairLink

    traces(folder)
    sizes, times = (1024, 65536, 1 << 20), (2e-5, 3e-5, 1e-4)
    pair = PairLink(first=0, second=1, sizes_bytes=sizes, times_s=times, fit=fit_link(sizes, times))
    matrix = LinkMatrix(world_size=2, backend="gloo", hosts=("a", "a"), pairs=(pair,))
    (folder / "links.json").write_bytes(msgspec.json.encode(matrix))


MACHINE = {
    "host": "a",
    "cores": 8,
    "backends": ["gloo"],
    "packages": {"ms-data": "1", "torch": "2"},
}
MEASURED = {
    "backend": "gloo",
    "clocks": [{"rank": 0, "offset_s": 0.0, "uncertainty_s": 0.0}],
    "folders": [{"rank": 0, "path": "/run", "shared": None, "write_mb_per_s": 900.0}],
}
SMI = """Driver Version                            : 580.95.05
GPU 00000000:18:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
        Link Width
            Max                           : 16x
            Current                       : 16x
"""
NPU = "| npu-smi 25.5.0   Version: 25.5.0 |\n| 0     910B2               | OK            | 86.9 |\n"


def recording(folder: Path) -> None:
    """Write a `doctor --record` recording: facts, files and tool outputs of one rank."""
    rank_folder = folder / "recording" / "rank-0"
    port = "files/sys/class/infiniband/mlx5_0/ports/1"
    facts = {**MACHINE, "torchrun": "/usr/bin/torchrun", "torch_cuda": "13.0", "accelerators": []}
    texts = {
        "machine.json": json.dumps(facts),
        "../measured.json": json.dumps({"type": "doctor-measured-1", **MEASURED}),
        f"{port}/state": "4: ACTIVE\n",
        f"{port}/rate": "400 Gb/sec (4X NDR)\n",
        "files/sys/class/net/eth0/mtu": "1500\n",
        "files/sys/class/net/eth0/operstate": "up\n",
        "files/proc/self/limits": "Max open files            65536    65536    files\n",
        "files/proc/self/cgroup": "0::/job\n",
        "files/sys/fs/cgroup/job/memory.max": "68719476736\n",
        "files/etc/nccl.conf": "NCCL_DEBUG=WARN\n",
        "commands/nvidia-smi -q.txt": SMI,
        "commands/npu-smi info.txt": NPU,
        "commands/hccn_tool -i 0 -speed -g.txt": "Speed: 200000 Mb/s\n",
        "commands/ibstat.txt": "CA 'mlx5_0'\n\tPort 1:\n\t\tState: Active\n\t\tRate: 400\n",
    }
    for path, text in texts.items():
        (rank_folder / path).parent.mkdir(parents=True, exist_ok=True)
        (rank_folder / path).write_text(text)


CASES = (
    Case(
        name="report packed",
        make=traces,
        files=("traces/*.gz",),
        run=run("report", "traces", "--out", "report.html"),
        weight=1.5,
    ),
    Case(
        name="report plain",
        make=plain_trace,
        files=("traces/*.json",),
        run=run("report", "traces", "--out", "report.html", "--perfetto", "all.json"),
        weight=1.5,
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
        run=run("compare", "before", "after", "--max-wait", "1"),
    ),
    Case(
        name="logs",
        make=log,
        files=("events/*",),
        run=run("logs", "events", "--json"),
        weight=3,
        sealed=True,
        may_be_missing=True,
    ),
    Case(
        name="tensorboard",
        make=log,
        files=("events/*",),
        run=run("logs", "events", "--tensorboard", "board"),
    ),
    Case(
        name="doctor",
        make=recording,
        files=("recording/**/*",),
        run=run("doctor", "--from", "recording", "--json"),
        weight=2,
        exit_code=1,  # torch sees no device there, and CANN is missing
        may_be_missing=True,
    ),
)
