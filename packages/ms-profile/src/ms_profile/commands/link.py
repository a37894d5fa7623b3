"""`ms-profile link`: measure latency and bandwidth between every pair of ranks."""

import argparse
import os
import subprocess
import sys
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from ms_profile.commands.printable import cell
from ms_profile.entry import file_argument
from ms_profile.errors import LinkError, number_in_environment
from ms_profile.links.matrix import LinkMatrix
from ms_profile.links.measure import measure_links
from ms_profile.log.manifest import encode, write_atomically

HELP: Final = "measure latency and bandwidth between every pair of ranks by ping-pong"
EXAMPLE: Final = (
    "ms-profile link --nproc-per-node 4\n"
    "example: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint"
    " HOST:29500 -m ms_profile link --backend nccl --out links.json"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to the parser."""
    parser.add_argument("--nproc-per-node", type=int, metavar="N", help="start N local processes")
    parser.add_argument("--backend", default="gloo", help="gloo, nccl, hccl; default: gloo")
    parser.add_argument("--repeats", type=int, default=10, help="round trips per message size; 10")
    parser.add_argument(
        "--out", type=file_argument, metavar="FILE", help="write the matrix as JSON"
    )
    parser.add_argument("--json", action="store_true", help="print the matrix as JSON")


def execute(options: argparse.Namespace) -> int:
    """Measure the links between the ranks, starting them with torchrun for --nproc-per-node."""
    if options.repeats < 1:
        raise LinkError(f"--repeats must be at least 1, got {options.repeats}; the default is 10")
    if options.nproc_per_node is not None:
        return _start(options)
    if "RANK" not in os.environ:
        raise LinkError("link needs several ranks; pass --nproc-per-node N, or run under torchrun")
    import torch
    import torch.distributed as dist

    if options.backend != "gloo":
        torch.accelerator.set_device_index(number_in_environment("LOCAL_RANK", 0))
    dist.init_process_group(options.backend)
    try:
        matrix = measure_links(repeats=options.repeats)
        if dist.get_rank() == 0:
            _report(matrix, options)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


def _start(options: argparse.Namespace) -> int:
    if options.nproc_per_node < 2:
        raise LinkError(
            f"--nproc-per-node must be at least 2 to measure a link, got {options.nproc_per_node}; "
            "use 2 or more"
        )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    arguments = ["-m", "ms_profile", "link", "--backend", options.backend]
    arguments += ["--repeats", str(options.repeats)]
    arguments += ["--out", str(options.out)] if options.out else []
    arguments += ["--json"] if options.json else []
    return subprocess.call([sys.executable, *launcher, str(options.nproc_per_node), *arguments])


def _report(matrix: LinkMatrix, options: argparse.Namespace) -> None:
    if options.out is not None:
        write_atomically(options.out, encode(matrix))
    if options.json:
        print(msgspec.json.encode(matrix).decode(), flush=True)
        return
    table = Table(title=f"links over {matrix.backend}, {matrix.world_size} ranks")
    for column in ("ranks", "hosts", "latency µs", "bandwidth MB/s", "misfit"):
        table.add_column(column, justify="left" if column == "hosts" else "right")
    for pair in matrix.pairs:
        bandwidth = pair.fit.bandwidth_bytes_per_s
        table.add_row(
            f"{pair.first} - {pair.second}",
            cell(f"{matrix.hosts[pair.first]} - {matrix.hosts[pair.second]}"),
            f"{pair.fit.latency_s * 1e6:.1f}",
            "not measurable" if bandwidth is None else f"{bandwidth / 1e6:.0f}",
            f"{pair.fit.residual:.0%}",
        )
    Console().print(table)
