"""Functions that test_doctor.py and test_doctor_measure.py run in several ranks."""

import io
import json
import os
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ms_profile.cli import main
from ms_profile.doctor import cluster
from ms_profile.doctor.clocks import measure_clocks
from ms_profile.doctor.cluster import measure_cluster
from ms_profile.doctor.examine import connect, examine, examine_links
from ms_profile.doctor.output_folder import measure_folders
from ms_profile.doctor.recording import Examined, Machine, MachineRecording, Measured
from ms_profile.doctor.report import judge

CPU = torch.device("cpu")
RECORDINGS = tuple(
    MachineRecording(machine=Machine(rank=rank, host="localhost")) for rank in range(2)
)


def separate_clocks_and_folders(root: str) -> Any:
    """Rank 1's clock is a second ahead, and the ranks use different folders."""
    connect("cpu")
    ahead_s = float(dist.get_rank())
    clocks = measure_clocks(lambda: time.time() + ahead_s)
    folder = Path(root) / f"run-{dist.get_rank()}"
    folders = measure_folders(folder, size_bytes=1 << 20, timeout_s=0.5)
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank > 0:
        return None
    unmeasured = [msgspec.structs.replace(result, write_mb_per_s=None) for result in folders]
    measured = Measured(clocks=clocks, folders=unmeasured)
    report = judge(Examined(ranks=RECORDINGS, measured=measured))
    return {
        "offset_s": clocks[1].offset_s,
        "uncertainty_s": clocks[1].uncertainty_s,
        "shared": [result.shared for result in folders],
        "findings": msgspec.to_builtins(report.findings),
    }


def silent_rank(report: str) -> Any:
    """Rank 1 does not answer rank 0's messages."""
    connect("cpu")
    if dist.get_rank() > 0:
        time.sleep(5)
        return None
    examine_links(
        Examined(ranks=RECORDINGS),
        CPU,
        lambda examined, lost: Path(report).write_bytes(
            msgspec.json.encode(judge(examined, [lost]))
        ),
        timeout_s=1.0,
    )
    return None


def two_nodes(out: str) -> Any:
    """The launcher's variables place the ranks on different machines."""
    os.environ |= {"GROUP_RANK": os.environ["RANK"], "LOCAL_RANK": "0"}
    connect("cpu")
    examined = examine(CPU, None, lambda examined, lost: None)
    cluster = measure_cluster(CPU)
    dist.destroy_process_group()
    if examined is None or cluster is None:
        return None
    Path(out).write_text(cluster)
    machines = examined.machines
    recorded = ["sys/class/net/lo/mtu" in machine.files for machine in machines]
    return {"machines": len(machines), "recorded": recorded}


def measure_small_sizes(out: str) -> Any:
    """Run `doctor --measure` with small messages and few repetitions; return its report."""
    cluster.LINK_BYTES = (8, 1 << 9, 1 << 13, 1 << 20)  # type: ignore[misc]
    cluster.COLLECTIVE_BYTES = (1 << 9, 1 << 13, 1 << 16)  # type: ignore[misc]
    cluster.COLLECTIVE_ROUNDS = cluster.LINK_TRIPS = cluster.REPEATS = 2  # type: ignore[misc]
    cluster.MIN_PRODUCT_S = 1e-4  # type: ignore[misc]
    cluster.CPU_PASS_BYTES = 1 << 20  # type: ignore[misc]
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["doctor", "--device", "cpu", "--json", "--measure", "--out", out]) == 0
    return json.loads(printed.getvalue()) if printed.getvalue() else None
