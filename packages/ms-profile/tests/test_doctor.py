"""The doctor finds every planted fault with its remedy, and nothing on sound machines."""

import json
import math
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import doctor_recordings as recorded
import pytest
from doctor_recordings import (
    CLUSTERS,
    added,
    both,
    machine,
    measured,
    removed,
    replaced,
    variables,
)
from ms_rig import run_command_on_rig
from processes import run_command, run_processes

pytest.importorskip("torch")

from ms_profile.cli import main
from ms_profile.doctor import capture
from ms_profile.doctor.checks import all_checks
from ms_profile.doctor.clocks import estimate
from ms_profile.doctor.examine import nccl_log, pair_rounds, relevant_lines, set_rendezvous
from ms_profile.doctor.recording import NO_ANSWER
from ms_profile.doctor.recording_folder import read_recording, write_recording
from ms_profile.doctor.report import draw_page, judge
from ms_profile.doctor.versions import release, tables, version
from ms_profile.errors import FormatError, RecordError

TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
IMPORTS = ("ms_profile.doctor.report", "ms_profile.doctor.examine")
RUNS = Path(__file__).with_name("doctor_runs.py")
SYS = "rank-2/files/sys/class/infiniband"
PORT = f"{SYS}/mlx5_1/ports/1"
LIMITS = "rank-1/files/proc/self/limits"
SMI = "rank-0/commands/nvidia-smi -q.txt"
TOOL = "rank-2/commands/hccn_tool -i 1"
NPU_SMI = "rank-0/commands/npu-smi info.txt"
INSTALL = "rank-0/files/usr/local/Ascend/ascend-toolkit/latest/ascend_toolkit_install.info"

Plant = Callable[[Path], None]
FAULTS: list[tuple[str, str, Plant, int, str, str]] = [
    # cluster, check, fault, rank, part of the problem's text, part of the remedy's text
    ("infiniband", "port-state", replaced(f"{PORT}/state", "4: ACTIVE", "1: DOWN"), 2,
     "the port is down", "cable"),
    ("infiniband", "port-state", replaced(f"{PORT}/state", "4: ACTIVE", "2: INIT"), 2,
     "the port is init", "subnet manager"),
    ("infiniband", "port-state", variables(0, NCCL_IB_HCA="mlx4"), 0,
     "matches no port", "from ibstat"),
    ("infiniband", "port-rate", replaced(f"{PORT}/rate", "400 Gb/sec (4X NDR)",
     "100 Gb/sec (1X NDR)"), 2, "runs at 100 Gb/s, and others of its type (MT4129) at 400",
     "cable"),
    ("infiniband", "port-rate", replaced(f"{SYS}/mlx5_0/device/current_link_width", "16", "8"), 2,
     "PCIe runs with 8 lanes", "reseat the adapter"),
    ("infiniband", "variables", variables(3, NCCL_IB_DISABLE="1"), 3,
     "NCCL_IB_DISABLE=1 (of the environment), turned on", "unset it"),
    ("infiniband", "variables", added("rank-0/files/etc/nccl.conf", "# site\nNCCL_NET=Socket\n"), 0,
     "NCCL_NET=Socket (of /etc/nccl.conf)", "IB"),
    ("infiniband", "variables", variables(1, NCCL_P2P_DISABLE="1"), 1, "NCCL_P2P_DISABLE=1",
     "unset it"),
    ("infiniband", "variables", variables(1, NCCL_NET_GDR_LEVEL="LOC"), 1,
     "lets no adapter access", "unset it"),
    ("infiniband", "variables", variables(2, NCCL_SOCKET_IFNAME="ens9"), 2,
     "matches no interface of this machine (eth0)", "use an interface"),
    ("infiniband", "variables", variables(2, NCCL_SOCKET_IFNAME="lo"), 2,
     "matches no interface", "use an interface"),
    ("infiniband", "cuda-driver", replaced(SMI, "580.95.05", "535.161.08"), 0,
     "NVIDIA driver 535.161.08 is older than 580.65.06, which torch's CUDA 13.0 needs",
     "install driver 580.65.06"),
    ("infiniband", "cuda-driver", machine(1, torch_cuda=None), 1, "built without CUDA",
     "install torch with CUDA"),
    ("infiniband", "cuda-driver", machine(1, accelerators=[]), 1, "finds none",
     "CUDA_VISIBLE_DEVICES"),
    ("infiniband", "collectives", machine(1, backends=["gloo"]), 1, "torch has no nccl", "NCCL"),
    ("infiniband", "collectives", machine(3, libraries={"ibverbs": None}), 3,
     "libibverbs.so.1 does not load", "libibverbs1"),
    ("infiniband", "peer-memory", replaced("rank-0/files/proc/modules", "nvidia_peermem 16384",
     "some_module 16384"), 0, "neither nvidia_peermem nor", "modprobe nvidia_peermem"),
    ("infiniband", "devices", replaced(SMI, "Current                       : 16x",
     "Current                       : 8x"), 0, "its PCIe link has 8 of 16 lanes", "seat"),
    ("infiniband", "devices", replaced(SMI, "HW Slowdown                       : Not Active",
     "HW Slowdown                       : Active"), 0, "throttles its clock", "temperature"),
    ("infiniband", "devices", replaced(SMI, "Pending                           : No",
     "Pending                           : Yes"), 0, "waiting to be remapped", "reset"),
    ("infiniband", "tools", added("rank-0/commands/npu-smi info.txt", NO_ANSWER), 0,
     "it did not respond", "dmesg"),
    ("infiniband", "limits", replaced(LIMITS, "Max locked memory         unlimited",
     "Max locked memory         65536    "), 1, "lock 6.1e-05 GiB", "memlock"),
    ("infiniband", "links", measured("pairs", 1, bandwidth_gb_per_s=4.0), 0,
     "they reach 4.00 GB/s on a link of 50.0 GB/s", "NCCL_DEBUG=INFO"),
    ("infiniband", "same-versions", machine(3, packages={"torch": "2.12.1+cu130"}), 3,
     "torch is 2.12.1+cu130 here and 2.13.0+cu130 on most", "install torch 2.13.0+cu130"),
    ("infiniband", "same-versions", machine(3, libraries={"nccl": "2.27.3"}), 3,
     "NCCL is 2.27.3 here", "install NCCL 2.28.9"),
    ("infiniband", "same-variables", variables(2, NCCL_PROTO="LL128"), 2,
     "NCCL_PROTO is LL128 here and not set on most", "unset NCCL_PROTO"),
    ("infiniband", "packet-size", replaced("rank-2/commands/ibv_devinfo.txt",
     "active_mtu:\t\t4096 (5)", "active_mtu:\t\t1024 (3)"), 2,
     "its MTU is 1024 bytes, and 4096 on other ports of InfiniBand", "partitions.conf"),
    ("infiniband", "collectives", removed("rank-2/files/dev/infiniband"), 2,
     "no device files for them", "--device=/dev/infiniband"),
    ("ascend", "port-state", replaced(f"{TOOL} -link -g.txt", "UP", "DOWN"), 2,
     "the link of its RoCE port is down", "optical module"),
    ("ascend", "port-state", replaced(f"{TOOL} -net_health -g.txt", "Success", "Receive timeout"),
     2, "'receive timeout'", "gateway"),
    ("ascend", "port-rate", replaced(f"{TOOL} -speed -g.txt", "200000", "100000"), 2,
     "runs at 100 Gb/s", "switch"),
    ("ascend", "packet-size", replaced(f"{TOOL} -mtu -g.txt", "8192", "1500"), 2,
     "its MTU is 1500 bytes, and 8192 on other ports", "hccn_tool -i 1 -mtu -s size 8192"),
    ("ascend", "torch-npu", replaced(NPU_SMI, "Version: 25.5.0", "Version: 24.1.0"), 0,
     "Ascend driver 24.1.0 is older than 25.0", "install Ascend HDK 25.0"),
    ("ascend", "torch-npu", machine(1, packages={"torch-npu": "2.12.0"}), 1,
     "torch_npu 2.12.0 is for torch 2.12.0, but torch is 2.13.0+cpu", "pip install torch==2.12.0"),
    ("ascend", "torch-npu", machine(1, packages={"torch-npu": None}), 1,
     "torch_npu is not installed", "pip install torch-npu==2.13.0"),
    ("ascend", "torch-npu", removed(INSTALL), 0, "CANN is not found", "ASCEND_HOME_PATH"),
    ("ascend", "collectives", machine(1, backends=["gloo"]), 1, "torch has no hccl", "HCCL"),
    ("ascend", "hccl-variables", variables(1, HCCL_INTRA_ROCE_ENABLE="1",
     HCCL_INTRA_PCIE_ENABLE="1"), 1, "does not support together", "unset both"),
    ("ascend", "hccl-variables", variables(1, HCCL_WHITELIST_DISABLE="0"), 1,
     "HCCL_WHITELIST_FILE is not set", "HCCL_WHITELIST_DISABLE=1"),
    ("ascend", "variables", variables(1, HCCL_SOCKET_IFNAME="ens9"), 1, "matches no interface",
     "use an interface"),
    ("ascend", "devices", replaced(NPU_SMI, "| OK ", "| Alarm "), 0, "its health is Alarm",
     "npu-smi info -t health -i 0"),
    ("ascend", "links", measured("pairs", 1, bandwidth_gb_per_s=1.0), 0,
     "on a link of 25.0 GB/s", "congestion"),
    ("processors", "variables", variables(1, GLOO_SOCKET_IFNAME="ens9"), 1, "matches no interface",
     "use an interface"),
    ("processors", "packet-size", replaced("rank-2/files/sys/class/net/eth0/mtu", "1500", "9000"),
     2, "its MTU is 9000 bytes", "ip link set dev eth0 mtu 1500"),
    ("processors", "packages", machine(2, backends=[]), 2, "no backend", "pip install torch"),
    ("processors", "threads", machine(3, threads=96), 3,
     "2 processes compute with 48-96 threads each, 144 in total, on 96 cores",
     "OMP_NUM_THREADS=48"),
    ("processors", "threads", machine(0, affinity=list(range(40))), 0, "on 40 cores",
     "OMP_NUM_THREADS=20"),
    ("processors", "threads", both(
        added("rank-0/files/proc/self/cgroup", "0::/job/step\n"),
        added("rank-0/files/sys/fs/cgroup/job/cpu.max", "400000 100000\n"),
    ), 1, "96 in total, on 4 cores", "OMP_NUM_THREADS=2"),
    ("processors", "threads", machine(2, threads=0, environment={"OMP_NUM_THREADS": "80"}), 2,
     "128 in total", "torchrun sets it to 1 if unset"),
    *[
        (cluster, *fault)
        for cluster in CLUSTERS
        for fault in (
            ("clocks", measured("clocks", 3, offset_s=-1.0), 3, "it is 1 s behind rank 0's",
             "chronyd"),
            ("shared-memory", machine(0, shared_memory_bytes=64 << 20), 0, "its size is 64 MiB",
             "--shm-size"),
            ("limits", replaced(LIMITS, "Max open files            1048576",
             "Max open files            1024   "), 1, "may open 1024 files", "ulimit -n 65536"),
            ("limits", replaced(LIMITS, "Max processes             1029382",
             "Max processes             1024   "), 1, "may have 1024 processes", "ulimit -u"),
            ("output-folder", measured("folders", 2, shared=False), 2, "does not see the file",
             "mount the same network folder"),
            ("output-folder", measured("folders", 1, problem="Permission denied"), 1,
             "cannot be written: Permission denied", "--output-dir"),
            ("output-folder", measured("folders", 0, write_mb_per_s=12.0), 0, "writes 12 MB/s",
             "parallel file system"),
            ("same-versions", machine(3, packages={"ms-parallel": "0.0.9"}), 3,
             "ms-parallel is 0.0.9 here", "install ms-parallel 0.1.0"),
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_sound_machines_have_no_findings(cluster: str, tmp_path: Path) -> None:
    """Neither failures nor warnings, and most checks apply."""
    report = judge(read_recording(CLUSTERS[cluster](tmp_path)))
    assert report.findings == []
    assert report.sound
    assert sum(not check.skipped for check in report.checks) >= 9


@pytest.mark.parametrize(
    ("cluster", "check", "plant", "rank", "what", "remedy"),
    FAULTS,
    ids=[f"{index}-{fault[0]}-{fault[1]}" for index, fault in enumerate(FAULTS)],
)
def test_a_planted_fault_is_found_with_its_remedy(
    cluster: str, check: str, plant: Plant, rank: int, what: str, remedy: str, tmp_path: Path
) -> None:
    """The intended check reports it for the faulty rank, and no other check fails."""
    folder = CLUSTERS[cluster](tmp_path)
    plant(folder)
    report = judge(read_recording(folder))
    assert not report.sound
    failures = [finding for finding in report.findings if finding.severity == "failure"]
    finding = next(item for item in failures if item.check == check and what in item.what)
    assert rank in finding.ranks
    assert remedy in finding.remedy
    assert finding.why
    differs = {"same-versions"} if check in ("cuda-driver", "torch-npu") else set()
    assert {finding.check for finding in failures} <= {check} | differs


def test_every_check_fails_on_some_recording() -> None:
    """A check that no planted fault reaches is not tested."""
    only_warn = {"memory", "transport"}  # tested below
    assert {fault[1] for fault in FAULTS} | only_warn == set(all_checks())


WARNINGS: list[tuple[str, str, list[Plant], str]] = [
    ("infiniband", "port-rate", [
        replaced(f"rank-{rank}/files/sys/class/infiniband/mlx5_{n}/ports/1/rate",
                 "400 Gb/sec (4X NDR)", "200 Gb/sec (4X HDR)") for rank in (0, 2) for n in (0, 1)
    ], "adapters of its type (MT4129) support 400 Gb/s"),
    ("infiniband", "variables", [variables(0, NCCL_IB_HCA="mlx5_0")],
     "selects 1 of 2 ports that are up"),
    ("infiniband", "cuda-driver", [
        machine(rank, torch_cuda="12.9") for rank in range(4)
    ] + [
        replaced(f"rank-{rank}/commands/nvidia-smi -q.txt", "580.95.05", "570.86.15")
        for rank in (0, 2)
    ], "older than 575.51.03, released with CUDA 12.9"),
    ("infiniband", "clocks", [measured("clocks", 1, offset_s=0.2)], "0.2 s ahead of"),
    ("infiniband", "memory", [
        added("rank-0/files/sys/fs/cgroup/memory.max", f"{64 << 30}\n"),
        added("rank-0/files/sys/fs/cgroup/memory.current", f"{1 << 30}\n"),
    ], "its limit is 64 GiB, with 160 GiB of device memory"),
    ("processors", "memory", [
        added("rank-0/files/proc/self/cgroup", "0::/job/step\n"),
        added("rank-0/files/sys/fs/cgroup/job/memory.max", f"{64 << 30}\n"),
        added("rank-0/files/sys/fs/cgroup/job/memory.current", f"{60 << 30}\n"),
    ], "60.0 GiB of 64.0 GiB are in use"),
    ("ascend", "torch-npu", [
        replaced(f"rank-{rank}{INSTALL[6:]}", "9.2.0", "8.5.0") for rank in (0, 2)
    ], "CANN is 8.5.0, but torch_npu 2.13.0 was released with 9.2.0"),
    ("ascend", "hccl-variables", [variables(0, HCCL_INTRA_ROCE_ENABLE="1")], "go over RoCE"),
    ("infiniband", "threads", [machine(1, threads=96)], "144 in total, on 96 cores"),
    ("processors", "threads", [machine(rank, threads=96, environment={"OMP_WAIT_POLICY": "PASSIVE"})
                               for rank in range(4)], "192 in total, on 96 cores"),
    ("processors", "threads", [added("rank-2/files/proc/loadavg", "42.00 1.1 0.5 1/9 9\n")],
     "96 cores, 40.0 cores busy with other processes"),
    ("processors", "links", [measured("pairs", 1, bandwidth_gb_per_s=0.1)],
     "they reach 0.10 GB/s, and similar pairs 1.10 GB/s"),
    ("processors", "links", [measured("pairs", n, latency_us=200_546.0) for n in range(6)],
     "the smallest message takes 200.5 ms one way"),
    ("processors", "links", [measured("pairs", 3, latency_us=9_000.0)],
     "the smallest message takes 9.0 ms one way"),
    ("infiniband", "links", [measured("pairs", 3, latency_us=50_000.0)],
     "the smallest message takes 50.0 ms one way"),
    ("processors", "links", [
        measured("pairs", number, bandwidth_gb_per_s=0.01) for number in range(6)
    ], "they reach 0.01 GB/s, less than half of 1 Gb/s Ethernet"),
    ("processors", "packages", [machine(rank, packages={"ms-data": None}) for rank in range(4)],
     "ms-data is not installed"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("cluster", "check", "plants", "what"),
    WARNINGS,
    ids=[f"{index}-{fault[1]}" for index, fault in enumerate(WARNINGS)],
)
def test_a_possibly_intended_setting_is_a_warning(
    cluster: str, check: str, plants: list[Plant], what: str, tmp_path: Path
) -> None:
    """It is reported with a remedy, and the exit code stays 0."""
    folder = CLUSTERS[cluster](tmp_path)
    for plant in plants:
        plant(folder)
    report = judge(read_recording(folder))
    assert report.sound
    (finding,) = {item.check: item for item in report.findings}.values()
    assert (finding.check, finding.severity) == (check, "warning")
    assert what in finding.what
    assert finding.remedy


def test_types_of_devices_may_have_different_builds_of_torch(tmp_path: Path) -> None:
    """CPU machines next to NVIDIA machines: one release of torch in two builds is sound."""
    folder = recorded.infiniband(tmp_path)
    for rank in (2, 3):
        packages = {"torch": "2.13.0+cpu"}
        machine(rank, device="cpu", packages=packages, accelerators=[], backends=["gloo"])(folder)
        machine(rank, torch_cuda=None, libraries={"nccl": None, "ibverbs": None})(folder)
    removed("rank-2/commands/nvidia-smi -q.txt")(folder)
    removed("rank-2/files/proc/driver")(folder)
    report = judge(read_recording(folder))
    assert {item.check for item in report.findings} == {
        "devices"
    }  # a warning, as the devices differ
    assert report.sound
    machine(3, packages={"torch": "2.12.0+cpu"})(folder)
    findings = judge(read_recording(folder)).findings
    differing = [item for item in findings if item.check == "same-versions"]
    assert {item.ranks for item in differing} >= {(3,)}


@pytest.mark.parametrize(
    "plants",
    [
        [machine(rank, threads=1, cores=1) for rank in range(4)],  # a single thread never waits
        [machine(rank, threads=48, affinity=[*range(48 * (rank % 2), 48 * (rank % 2) + 48)])
         for rank in range(4)],
        [machine(rank, threads=0) for rank in range(4)],
        [machine(rank, cores=0) for rank in range(4)],
        [added("rank-0/files/proc/loadavg", "42.00 1.1 0.5 1/9 9\n"),
         *[machine(rank, environment={"GOMP_SPINCOUNT": "0"}) for rank in range(4)]],
        [added("rank-0/files/proc/loadavg", text) for text in ("", "many 1.0", "inf", "nan 0 0")],
        [added("rank-0/files/proc/self/cgroup", "0::/job\n"),
         added("rank-0/files/sys/fs/cgroup/job/cpu.max", "max 100000\n")],
    ],
)  # fmt: skip
def test_threads_that_have_their_cores_are_sound(plants: list[Plant], tmp_path: Path) -> None:
    """One thread per process, bound cores, unknown counts, or waiting threads that sleep."""
    folder = recorded.processors(tmp_path)
    for plant in plants:
        plant(folder)
    assert judge(read_recording(folder)).findings == []


def test_variables_of_unused_libraries_are_ignored(tmp_path: Path) -> None:
    """CPU processes use gloo, whatever is set for NCCL and HCCL."""
    folder = recorded.processors(tmp_path)
    variables(0, NCCL_P2P_DISABLE="1", HCCL_P2P_DISABLE="1")(folder)
    assert judge(read_recording(folder)).findings == []


def test_a_standard_mtu_over_roce_is_reported(tmp_path: Path) -> None:
    """An MTU of 1,500 bytes is a warning if all ports have it, and a failure if only some do."""
    folder = recorded.infiniband(tmp_path)
    for rank in (0, 2):
        for index in range(2):
            adapter = folder / f"rank-{rank}" / recorded.ADAPTER.format(index)
            (adapter / "ports/1/link_layer").write_text("Ethernet\n")
            name = f"ens{index}"
            net = folder / f"rank-{rank}/files/sys/class/net/{name}"
            for place in (net, adapter / f"device/net/{name}"):
                place.mkdir(parents=True)
                (place / "mtu").write_text("1500\n")
            (net / "operstate").write_text("up\n")
    report = judge(read_recording(folder))
    assert {(item.check, item.severity) for item in report.findings} == {("packet-size", "warning")}
    assert "mtu 9000" in report.findings[0].remedy
    (folder / "rank-0/files/sys/class/net/ens1/mtu").write_text("9000\n")
    report = judge(read_recording(folder))
    failure = report.findings[0]
    assert (failure.severity, failure.where, failure.ranks) == ("failure", "ens1", (0,))


def test_sockets_in_the_log_of_nccl_are_a_failure_if_there_are_ports(tmp_path: Path) -> None:
    """The transport that NCCL reports counts, not the one that it could use."""
    folder = recorded.infiniband(tmp_path)
    path = folder / "measured.json"
    for line, sound in (
        ("node0:1:1 [0] NCCL INFO Using network Socket\n", False),
        ("node0:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB\n", True),
    ):
        path.write_text(json.dumps({**json.loads(path.read_text()), "log": line}))
        report = judge(read_recording(folder))
        assert report.sound == sound
    assert {item.check for item in report.findings} == set()


def test_ports_are_read_from_ibstat_if_sysfs_lists_none(tmp_path: Path) -> None:
    """A container often shows only one of the two."""
    folder = recorded.infiniband(tmp_path)
    for rank in (0, 2):
        removed(f"rank-{rank}/files/sys/class/infiniband")(folder)
        states = [("Active", "LinkUp", 400), ("Active", "LinkUp", 400)]
        if rank == 2:
            states[1] = ("Down", "Polling", 40)
        text = "".join(
            recorded.IBSTAT.format(adapter=f"mlx5_{n}", state=s, physical=p, rate=r)
            for n, (s, p, r) in enumerate(states)
        )
        added(f"rank-{rank}/commands/ibstat.txt", text)(folder)
    (finding,) = judge(read_recording(folder)).findings
    assert (finding.where, finding.ranks) == ("mlx5_1 port 1", (2,))
    assert "down (physically polling)" in finding.what


def test_limits_are_read_from_the_output_of_ulimit(tmp_path: Path) -> None:
    """A folder gathered by hand may hold a single rank without machine.json."""
    text = (
        "open files                          (-n) 1024\n"
        "max locked memory       (kbytes, -l) unlimited\n"
        "max user processes                  (-u) 127000\n"
    )
    added("commands/ulimit -a.txt", text)(tmp_path)
    (finding,) = judge(read_recording(tmp_path)).findings
    assert "may open 1024 files" in finding.what


def test_an_excluded_port_may_be_down(tmp_path: Path) -> None:
    """NCCL_IB_HCA selects the ports for training."""
    folder = recorded.infiniband(tmp_path)
    replaced(f"{PORT}/state", "4: ACTIVE", "1: DOWN")(folder)
    for rank in range(4):
        variables(rank, NCCL_IB_HCA="^mlx5_1")(folder)
    assert judge(read_recording(folder)).sound


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Every file, output, fact and measurement."""
    first = read_recording(recorded.infiniband(tmp_path / "a"))
    write_recording(tmp_path / "b", first)
    assert read_recording(tmp_path / "b") == first
    with pytest.raises(RecordError, match="exists; remove it"):
        write_recording(tmp_path / "b", first)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (removed("rank-1"), "lacks ranks: it has 0, 2, 3"),
        (added("rank-1/machine.json", "{"), "machine.json"),
        (added("measured.json", '{"type": "other"}'), "measured.json"),
        (measured("clocks", 0, rank=9), "measurements of rank 9 but there are 4"),
        (added("rank-0/files/big", "x" * ((1 << 20) + 1)), "larger than the limit of 1 MiB"),
        (lambda root: (root / "rank-0/files/link").symlink_to("/etc/hostname"), "links out"),
    ],
)
def test_a_damaged_recording_is_rejected_in_one_line(
    plant: Plant, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 2."""
    folder = recorded.infiniband(tmp_path / "recording")
    plant(folder)
    with pytest.raises(FormatError, match=message):
        read_recording(folder)
    assert main(["doctor", "--from", str(folder)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_a_folder_without_a_recording_is_rejected(name: str, tmp_path: Path) -> None:
    """A missing folder and an empty one."""
    (tmp_path / "empty").mkdir()
    assert main(["doctor", "--from", str(tmp_path / name)]) == 2


def test_the_command_judges_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text, JSON and HTML agree; the exit code is 1 if a check fails."""
    folder = recorded.infiniband(tmp_path / "recording")
    page = tmp_path / "page.html"
    assert main(["doctor", "--from", str(folder)]) == 0
    assert "4 ranks on 2 machines: 0 failures, 0 warnings" in capsys.readouterr().out
    variables(1, NCCL_IB_DISABLE="1", NCCL_NET="<b>")(folder)
    variables(3, NCCL_IB_DISABLE="1")(folder)
    assert main(["doctor", "--from", str(folder), "--html", str(page)]) == 1
    text = capsys.readouterr().out
    assert "ranks 1, 3 on node0, node1 (variables)" in text
    assert "  remedy     unset it, or set it to 0" in text
    assert main(["doctor", "--from", str(folder), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    (finding,) = facts["findings"]
    assert finding["ranks"] == [1, 3]
    html = page.read_text()
    assert "<h1>Failures found</h1>" in html
    assert finding["remedy"] in html
    for foreign in ("<script", "http:", "https:", "<link", "<img"):
        assert foreign not in html
    assert "prefers-color-scheme: dark" in html
    assert main(["doctor", "--from", str(folder), "--record", str(tmp_path / "x")]) == 2


def test_text_of_a_recording_is_escaped_on_the_page(tmp_path: Path) -> None:
    """Recordings may come from strangers."""
    folder = recorded.processors(tmp_path)
    variables(0, GLOO_SOCKET_IFNAME="<img src=x>")(folder)
    assert "<img" not in draw_page(judge(read_recording(folder)))


def test_this_machine_is_recorded_and_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A single process; its recording gives the same findings."""
    folder = tmp_path / "recording"
    words = ["doctor", "--json", "--device", "cpu"]
    code = main([*words, "--record", str(folder), "--output-dir", str(tmp_path / "run")])
    here = json.loads(capsys.readouterr().out)
    assert here["machine"]["cores"] >= 1
    assert here["measured"]["folders"][0]["write_mb_per_s"] > 0
    assert not (tmp_path / "run").exists()
    assert main(["doctor", "--json", "--from", str(folder)]) == code
    assert json.loads(capsys.readouterr().out)["findings"] == here["findings"]


def test_two_processes_are_examined_together(tmp_path: Path) -> None:
    """Real messages, clocks and a shared folder; only rank 0 prints."""
    words = [*TORCHRUN, "--nproc-per-node", "2", "-m", "ms_profile", "doctor", "--device", "cpu"]
    output = tmp_path / "run"
    words += ["--json", "--output-dir", str(output), "--record", str(tmp_path / "recording")]
    run = run_command(words, environment=ENVIRONMENT, imports=IMPORTS)
    report = json.loads(run.stdout)
    assert report["ranks"] == 2
    (pair,) = report["measured"]["pairs"]
    assert (pair["first"], pair["second"]) == (0, 1)
    assert pair["bandwidth_gb_per_s"] > 0
    assert pair["latency_us"] > 0
    assert report["measured"]["backend"] == "gloo"
    clock = report["measured"]["clocks"][1]
    assert abs(clock["offset_s"]) <= clock["uncertainty_s"] + 0.05  # both ranks read the same clock
    assert [result["shared"] for result in report["measured"]["folders"]] == [True, True]
    assert not output.exists()
    assert read_recording(tmp_path / "recording").measured.pairs


def test_a_clock_offset_and_separate_folders_are_measured(tmp_path: Path) -> None:
    """Rank 1's clock is a second ahead, and it has another folder than rank 0."""
    first, _ = run_processes(2, RUNS, "separate_clocks_and_folders", root=str(tmp_path))
    offset, uncertainty = first["offset_s"], first["uncertainty_s"]
    assert math.isclose(offset, 1.0, abs_tol=uncertainty + 0.05)
    assert first["shared"] == [True, False]
    assert {finding["check"] for finding in first["findings"]} == {"clocks", "output-folder"}
    assert all(finding["ranks"] == [1] for finding in first["findings"])
    assert sorted(path.name for path in tmp_path.iterdir()) == []


def test_lost_messages_are_reported_before_the_process_ends(tmp_path: Path) -> None:
    """If rank 1 does not answer, rank 0 names the pair, reports the other results and exits."""
    path = tmp_path / "report.json"
    first, _ = run_processes(2, RUNS, "silent_rank", report=str(path), check=False)
    assert first["code"] == 1
    (finding,) = json.loads(path.read_text())["findings"]
    assert (finding["check"], finding["where"]) == ("links", "ranks 0 and 1")
    assert "messages over gloo did not arrive within 3 s" in finding["what"]


def test_two_nodes_are_recorded_and_measured_as_two(tmp_path: Path) -> None:
    """Each node is recorded, and the link between them has the level `network`."""
    out = tmp_path / "cluster.toml"
    first, _ = run_processes(2, RUNS, "two_nodes", out=str(out))
    assert first == {"machines": 2, "recorded": [True, True]}
    cluster = tomllib.loads(out.read_text())
    assert (cluster["nodes"], cluster["devices_per_node"]) == (2, 1)
    assert list(cluster["links"]) == ["network"]


def test_an_accelerator_is_examined_over_its_backend(tmp_path: Path) -> None:
    """Messages are on the device; all other exchanges use the CPU."""
    page = tmp_path / "page.html"
    words = [*TORCHRUN, "--nproc-per-node", "2", "-m", "ms_profile", "doctor", "--json"]
    words += ["--html", str(page)]
    run = run_command_on_rig(words, variables=ENVIRONMENT, imports=IMPORTS)
    report = json.loads(run.stdout)
    assert report["machine"]["device"] == "rig", run.stderr
    assert report["measured"]["backend"] == "rigccl"
    assert len(report["measured"]["pairs"]) == 1
    assert page.exists()


def test_the_tools_of_a_machine_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs on PATH print recorded output, and one hangs."""
    folder = recorded.ascend(tmp_path / "recording") / "rank-0"
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    for path in (folder / "commands").iterdir():
        (outputs / path.stem.replace(" ", "_")).write_text(path.read_text())
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("npu-smi", "hccn_tool"):
        line = f'cat "{outputs}/$(echo {name} "$@" | tr " " _)"'
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
    (tools / "ibstat").write_text("#!/bin/sh\nexec sleep 60\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setattr(capture, "TIMEOUT_S", 0.5)
    recording = capture.capture(folder / "files", with_machine=True)
    expected = read_recording(tmp_path / "recording").ranks[0]
    assert recording.commands == {**expected.commands, "ibstat": NO_ANSWER}
    assert recording.files.items() >= expected.files.items()


def test_variables_with_secrets_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only variables of the collective libraries are recorded, and no tokens or keys."""
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5")
    monkeypatch.setenv("NCCL_SITE_TOKEN", "hunter2")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    environment = capture.capture(with_machine=False).machine.environment
    assert environment["NCCL_IB_HCA"] == "mlx5"
    assert "hunter2" not in environment.values()


def test_relevant_lines_of_the_log_of_nccl_are_recorded(tmp_path: Path) -> None:
    """Lines about the network; environment variables are restored afterwards."""
    before = dict(os.environ)
    with nccl_log() as path:
        assert os.environ["NCCL_DEBUG_FILE"] == str(path)
        line = "n:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB\n"
        path.write_text(f"n:1:1 [0] NCCL INFO cudaDriverVersion 13000\n{line}{line}")
        assert relevant_lines(path) == line
    assert dict(os.environ) == before
    assert relevant_lines(tmp_path / "nothing") == ""


def test_every_pair_is_measured_once() -> None:
    """No rank has two partners in a round; up to eight ranks measure one pair at a time."""
    assert sum(3 in pair for pairs in pair_rounds(500) for pair in pairs) == 64  # of 499
    for world in (2, 3, 8, 9, 16, 31):
        table = pair_rounds(world)
        pairs = [pair for round_pairs in table for pair in round_pairs]
        assert sorted(pairs) == [(a, b) for a in range(world) for b in range(a + 1, world)]
        assert all(
            len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in table
        )
        assert (max(map(len, table)) == 1) == (world <= 8)


def test_the_shortest_round_trip_gives_the_offset() -> None:
    """A slow reply has a large uncertainty; the fastest bounds the offset."""
    offset, uncertainty = estimate([(10.0, 9.9, 10.8), (20.0, 19.05, 20.1)])
    assert math.isclose(offset, 1.0)
    assert math.isclose(uncertainty, 0.05)


def test_versions_are_ordered_as_released() -> None:
    """Prereleases come before releases, patches after."""
    order = ["8.0.RC2", "8.0.0", "8.1.RC1", "8.3.RC1", "8.5.0", "9.2.0"]
    assert sorted(order, key=version) == order
    order = ["450.80.02", "525.60.13", "570.26", "570.86.15", "580.65.06"]
    assert sorted(order, key=version) == order
    assert version("2.9.0.post9") > version("2.9.0.post2") > version("2.9.0")
    assert release("2.13.0.post3+cpu") == "2.13.0"


def test_the_reference_tables_are_consistent_and_have_sources() -> None:
    """Each table has a source, and rows are comparable."""
    reference = tables()
    named = set(reference.__struct_fields__) - {"sources"}
    assert set(reference.sources) == named
    assert all(release(row.torch_npu) == row.torch for row in reference.torch_npu)
    drivers = [version(row.driver) for row in reference.cuda_drivers]
    assert drivers == sorted(drivers)


def test_a_recording_is_judged_without_torch(tmp_path: Path) -> None:
    """`--from` does not import torch, so recordings can be judged where it is not installed."""
    folder = recorded.infiniband(tmp_path / "recording")
    script = (
        "import sys; from ms_profile.cli import main; code = main(sys.argv[1:]);"
        " sys.exit(code or 3 * ('torch' in sys.modules))"
    )
    command = [sys.executable, "-c", script, "doctor", "--from", str(folder)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "0 failures" in process.stdout


def test_a_missing_torch_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Examining a machine needs torch; the error line says which extra to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["doctor"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'ms-profile[torch]'" in line


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "start them with torchrun or srun"),
        ({"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}, "torchrun or srun"),
    ],
)
def test_ranks_without_an_address_are_rejected(
    variables: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Such a rank would wait for the others forever."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"LOCAL_RANK": "0"} | variables).items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--device", "cpu"]) == 2
    assert words in capsys.readouterr().err


def test_a_step_of_slurm_provides_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's host is the first of the node list, and the port differs between steps."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    ports = set()
    for step in ("0", "1"):
        monkeypatch.setenv("SLURM_STEP_NODELIST", "gpu[007-009,012],big1")
        monkeypatch.setenv("SLURM_STEP_ID", step)
        monkeypatch.setenv("SLURM_JOB_ID", "42")
        set_rendezvous(4)
        assert os.environ["MASTER_ADDR"] == "gpu007"
        ports.add(int(os.environ.pop("MASTER_PORT")))
    assert len(ports) == 2


@pytest.mark.parametrize("name", ["nonsense", "cuda:999", "meta"])
def test_a_device_that_the_machine_lacks_is_rejected(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and exit code 2."""
    assert main(["doctor", "--device", name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--device" in line
