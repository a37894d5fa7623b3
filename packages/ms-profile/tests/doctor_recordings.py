# ruff: noqa: E501 - tables as the tools print them
"""Recordings of sound clusters in the formats of the kernel and the vendors' tools, and faults.

Each cluster has two machines of two ranks. A fault is a function that changes files of a recording.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

GIB = 1 << 30
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max processes             1029382              1029382              processes
Max open files            1048576              1048576              files
Max locked memory         unlimited            unlimited            bytes
"""
MODULES = """nvidia_peermem 16384 0 - Live 0x0000000000000000 (OE)
nvidia 8933376 98 nvidia_uvm,nvidia_peermem, Live 0x0000000000000000 (POE)
mlx5_ib 397312 0 - Live 0x0000000000000000
"""
NVIDIA_FILE = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Tue Jul  1 16:12:07 UTC 2025
GCC version:  gcc version 12.3.0
"""
GPU = """GPU 00000000:{bus}:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    Product Architecture                  : Hopper
    GPU Link Info
        PCIe Generation
            Max                           : 5
            Current                       : 5
        Link Width
            Max                           : 16x
            Current                       : {lanes}
    FB Memory Usage
        Total                             : 81559 MiB
    Clocks Event Reasons
        Idle                              : Active
        HW Slowdown                       : {slowed}
            HW Thermal Slowdown           : Not Active
    Remapped Rows
        Correctable Error                 : 0
        Pending                           : {pending}
"""
NVIDIA_SMI = """
==============NVSMI LOG==============

Timestamp                                 : Mon Nov 24 12:00:00 2025
Driver Version                            : {driver}
CUDA Version                              : 13.0

Attached GPUs                             : 2
{gpus}
"""
IBSTAT = """CA '{adapter}'
	CA type: MT4129
	Number of ports: 1
	Firmware version: 28.39.1002
	Port 1:
		State: {state}
		Physical state: {physical}
		Rate: {rate}
		Base lid: 12
		SM lid: 1
		Link layer: InfiniBand
"""
DEVINFO = """hca_id:	{adapter}
	transport:			InfiniBand (0)
	fw_ver:				28.39.1002
	phys_port_cnt:			1
		port:	1
			state:			PORT_ACTIVE (4)
			max_mtu:		4096 (5)
			active_mtu:		4096 (5)
			sm_lid:			1
			link_layer:		InfiniBand

"""
NPU = """| {number}     910B2               | {health:<13} | 86.9        42                0    / 0             |
| 0                         | 0000:C{number}:00.0  | 0           0    / 0          3532 / 65536         |
+===========================+===============+====================================================+
"""
NPU_SMI = """+------------------------------------------------------------------------------------------------+
| npu-smi {driver:<16} Version: {driver:<46}|
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
"""
CANN = """package_name=Ascend-cann-toolkit
version={version}
arch=aarch64
os=linux
"""
PACKAGES = {"ms-parallel": "0.1.0", "ms-data": "0.1.0", "triton": "3.6.0", "torch-npu": None}
ADAPTER = "files/sys/class/infiniband/mlx5_{}"


def _write(root: Path, texts: dict[str, str]) -> None:
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def _machine(root: Path, rank: int, **changes: Any) -> None:
    facts = {
        "host": f"node{rank // 2}",
        "node": rank // 2,
        "local_rank": rank % 2,
        "python": "3.11.9",
        "system": "Linux 5.15.0 x86_64",
        "cores": 96,
        "threads": 48,
        "memory_bytes": 1024 * GIB,
        "shared_memory_bytes": 512 * GIB,
        "torchrun": "/usr/bin/torchrun",
        **changes,
    }
    texts = {"machine.json": json.dumps(facts)}
    if rank % 2 == 0:
        texts["files/proc/loadavg"] = "2.04 1.10 0.52 3/1890 40521\n"
        texts["files/sys/devices/system/cpu/online"] = "0-95\n"
    _write(root / f"rank-{rank}", texts)


def _interface(name: str, mtu: int) -> dict[str, str]:
    folder = f"files/sys/class/net/{name}"
    return {f"{folder}/operstate": "up\n", f"{folder}/mtu": f"{mtu}\n"}


def _measured(root: Path, backend: str, near: float, far: float) -> None:
    pairs = [
        {
            "first": first,
            "second": second,
            "latency_us": 8.0,
            "bandwidth_gb_per_s": near if first // 2 == second // 2 else far,
        }
        for first in range(4)
        for second in range(first + 1, 4)
    ]
    clocks = [{"rank": rank, "offset_s": 2e-4, "uncertainty_s": 5e-5} for rank in range(4)]
    folders = [{"rank": rank, "path": "/data/run", "shared": True} for rank in range(4)]
    folders[0]["write_mb_per_s"] = 2400.0
    content = {"backend": backend, "clocks": clocks, "pairs": pairs, "folders": folders}
    _write(root, {"measured.json": json.dumps({"type": "doctor-measured-1", **content})})


def infiniband(root: Path) -> Path:
    """Machines with two H100 and two ConnectX-7 adapters on InfiniBand."""
    packages = {**PACKAGES, "torch": "2.13.0+cu130"}
    accelerators = [{"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 * GIB}] * 2
    for rank in range(4):
        _machine(
            root,
            rank,
            device="cuda",
            accelerators=accelerators,
            backends=["gloo", "nccl"],
            packages=packages,
            torch_cuda="13.0",
            libraries={"nccl": "2.28.9", "ibverbs": "1"},
        )
        _write(root / f"rank-{rank}", {"files/proc/self/limits": LIMITS})
    for rank in (0, 2):
        gpus = "".join(
            GPU.format(bus=bus, lanes="16x", slowed="Not Active", pending="No") for bus in (18, 29)
        )
        texts = {
            "files/proc/modules": MODULES,
            "files/proc/driver/nvidia/version": NVIDIA_FILE.format(driver="580.95.05"),
            "commands/nvidia-smi -q.txt": NVIDIA_SMI.format(driver="580.95.05", gpus=gpus),
            **_interface("eth0", 1500),
            "commands/ibv_devinfo.txt": "".join(
                DEVINFO.format(adapter=f"mlx5_{index}") for index in range(2)
            ),
            "files/dev/infiniband/uverbs0": "",
        }
        for index in range(2):
            adapter = ADAPTER.format(index)
            texts |= {
                f"{adapter}/hca_type": "MT4129\n",
                f"{adapter}/device/current_link_speed": "32.0 GT/s PCIe\n",
                f"{adapter}/device/max_link_speed": "32.0 GT/s PCIe\n",
                f"{adapter}/device/current_link_width": "16\n",
                f"{adapter}/device/max_link_width": "16\n",
                f"{adapter}/ports/1/state": "4: ACTIVE\n",
                f"{adapter}/ports/1/phys_state": "5: LinkUp\n",
                f"{adapter}/ports/1/rate": "400 Gb/sec (4X NDR)\n",
                f"{adapter}/ports/1/link_layer": "InfiniBand\n",
            }
        _write(root / f"rank-{rank}", texts)
    _measured(root, "nccl", 180.0, 42.0)
    return root


def ascend(root: Path) -> Path:
    """Machines with Ascend 910B, whose devices have RoCE ports."""
    packages = {**PACKAGES, "torch": "2.13.0+cpu", "torch-npu": "2.13.0"}
    for rank in range(4):
        _machine(
            root,
            rank,
            device="npu",
            accelerators=[{"name": "Ascend910B2", "memory_bytes": 64 * GIB}] * 2,
            backends=["gloo", "hccl"],
            packages=packages,
            libraries={"nccl": None, "ibverbs": "1"},
        )
        _write(root / f"rank-{rank}", {"files/proc/self/limits": LIMITS})
    for rank in (0, 2):
        install = "files/usr/local/Ascend/ascend-toolkit/latest/ascend_toolkit_install.info"
        table = NPU_SMI.format(driver="25.5.0")
        table += "".join(NPU.format(number=number, health="OK") for number in range(2))
        texts = {
            install: CANN.format(version="9.2.0"),
            "commands/npu-smi info.txt": table,
            **_interface("eth0", 1500),
        }
        for number in range(2):
            tool = f"commands/hccn_tool -i {number}"
            texts |= {
                f"{tool} -link -g.txt": "link status: UP\n",
                f"{tool} -speed -g.txt": "Speed: 200000 Mb/s\n",
                f"{tool} -mtu -g.txt": "mtu:8192\n",
                f"{tool} -net_health -g.txt": "net health status: Success\n",
            }
        _write(root / f"rank-{rank}", texts)
    _measured(root, "hccl", 90.0, 20.0)
    return root


def processors(root: Path) -> Path:
    """Machines without accelerators, on Ethernet."""
    for rank in range(4):
        _machine(
            root,
            rank,
            backends=["gloo"],
            packages={**PACKAGES, "torch": "2.13.0+cpu"},
            libraries={"nccl": None, "ibverbs": None},
        )
        texts = {"files/proc/self/limits": LIMITS.replace("unlimited ", "8388608   ")}
        _write(root / f"rank-{rank}", {**texts, **_interface("eth0", 1500)})
    _measured(root, "gloo", 3.0, 1.1)
    return root


CLUSTERS: dict[str, Callable[[Path], Path]] = {
    "infiniband": infiniband,
    "ascend": ascend,
    "processors": processors,
}


def replaced(path: str, old: str, new: str) -> Callable[[Path], None]:
    """Fault: replace a text in a file."""

    def plant(root: Path) -> None:
        text = (root / path).read_text()
        assert old in text, f"{path} has no {old!r}"
        (root / path).write_text(text.replace(old, new, 1))

    return plant


def machine(rank: int, **facts: Any) -> Callable[[Path], None]:
    """Fault: set facts of a rank; mappings are updated."""

    def plant(root: Path) -> None:
        path = root / f"rank-{rank}" / "machine.json"
        content = json.loads(path.read_text())
        for name, value in facts.items():
            content[name] = {**content.get(name, {}), **value} if isinstance(value, dict) else value
        path.write_text(json.dumps(content))

    return plant


def variables(rank: int, **values: str) -> Callable[[Path], None]:
    """Fault: set environment variables of a rank."""
    return machine(rank, environment=values)


def measured(kind: str, index: int, **facts: Any) -> Callable[[Path], None]:
    """Fault: change a measurement."""

    def plant(root: Path) -> None:
        path = root / "measured.json"
        content = json.loads(path.read_text())
        content[kind][index].update(facts)
        path.write_text(json.dumps(content))

    return plant


def removed(path: str) -> Callable[[Path], None]:
    """Fault: remove a file or folder."""

    def plant(root: Path) -> None:
        if (root / path).is_dir():
            shutil.rmtree(root / path)
        else:
            (root / path).unlink()

    return plant


def added(path: str, text: str) -> Callable[[Path], None]:
    """Fault: add a file."""
    return lambda root: _write(root, {path: text})


def both(*plants: Callable[[Path], None]) -> Callable[[Path], None]:
    """Combine several faults."""

    def plant(root: Path) -> None:
        for part in plants:
            part(root)

    return plant
