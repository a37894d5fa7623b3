"""Runs in processes of their own for test_doctor.py."""

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ms_parallel.cluster.connection import join
from ms_parallel.cluster.doctor.examine import examine, judge, measure_links
from ms_parallel.cluster.doctor.measured.clocks import measure_clocks
from ms_parallel.cluster.doctor.measured.folders import measure_folders
from ms_parallel.cluster.doctor.recording.recording import Examined, Machine, Measured, Recording
from ms_parallel.cluster.layout import Layout
from ms_parallel.planner.cluster import write_cluster
from ms_parallel.planner.measuring.machines import measure_cluster


def apart(at: str) -> Any:
    """A clock that is a second ahead, and a folder of its own, on rank 1."""
    join(Layout(data=2), device="cpu")
    ahead_s = float(dist.get_rank())
    clocks = measure_clocks(lambda: time.time() + ahead_s)
    own = Path(at) / f"run-{dist.get_rank()}"
    folders = measure_folders(own, size_bytes=1 << 20, timeout_s=0.5)
    if dist.get_rank() > 0:
        return None
    ranks = [Recording(machine=Machine(rank=rank, host="here")) for rank in range(2)]
    fast = [msgspec.structs.replace(one, write_mb_per_s=None) for one in folders]
    report = judge(Examined(ranks=ranks, measured=Measured(clocks=clocks, folders=fast)))
    return {
        "offset_s": clocks[1].offset_s,
        "uncertainty_s": clocks[1].uncertainty_s,
        "shared": [one.shared for one in folders],
        "findings": msgspec.to_builtins(report.findings),
    }


def silent(report: str) -> Any:
    """Rank 1 leaves rank 0 alone with its messages."""
    join(Layout(data=2), device="cpu")
    if dist.get_rank() > 0:
        time.sleep(5)
        return None
    ranks = [Recording(machine=Machine(rank=rank, host="here")) for rank in range(2)]
    measure_links(
        Examined(ranks=ranks),
        torch.device("cpu"),
        lambda found: Path(report).write_bytes(msgspec.json.encode(found)),
        timeout_s=1.0,
    )
    return None


def far(out: str) -> Any:
    """Each rank is on a machine of its own, by the launcher's numbers."""
    os.environ |= {"GROUP_RANK": os.environ["RANK"], "LOCAL_RANK": "0"}
    join(Layout(data=2), device="cpu")
    examined = examine()
    cluster = measure_cluster(torch.device("cpu"))
    if examined is None or cluster is None:
        return None
    write_cluster(Path(out), cluster)
    machines = list(examined.machines)
    recorded = ["sys/class/net/lo/mtu" in machine.files for machine in machines]
    return {"machines": len(machines), "recorded": recorded}
