"""Check the limits on open files, locked memory and processes (ulimit)."""

from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure
from ms_parallel.cluster.doctor.readings.limits import COMMAND, FILE, limit
from ms_parallel.cluster.doctor.readings.ports import ACTIVE, ports
from ms_parallel.cluster.doctor.recording.recording import Examined, Recording
from ms_parallel.cluster.doctor.registry import check

GIB = 1 << 30
MIN_FILES, MIN_PROCESSES, MIN_LOCKED = 4096, 4096, 16 * GIB


@check(
    "limits",
    "a process may open, lock and start enough (ulimit)",
    needs=lambda examined: any(
        FILE in recording.files or COMMAND in recording.commands for recording in examined.ranks
    ),
)
def limits(examined: Examined) -> Iterator[Finding]:
    """Check the limits of each rank."""
    for recording in examined.ranks:
        yield from _files_and_processes(recording)
        locked = limit(recording, "locked_bytes")
        machine = examined.machine_of(recording.machine.rank)
        has_rdma = any(port.state == ACTIVE for port in ports(machine))
        if has_rdma and locked is not None and locked < MIN_LOCKED:
            yield failure(
                recording,
                "ulimit -l",
                what=f"a process may lock {locked / GIB:.3g} GiB of memory",
                why="RDMA locks every buffer it sends from; without that NCCL fails with"
                " ibv_reg_mr or falls back to sockets",
                remedy="set memlock to unlimited: in /etc/security/limits.d, as LimitMEMLOCK="
                "infinity of the service, or with docker run --ulimit memlock=-1",
            )


def _files_and_processes(recording: Recording) -> Iterator[Finding]:
    files, processes = limit(recording, "open_files"), limit(recording, "processes")
    if files is not None and files < MIN_FILES:
        yield failure(
            recording,
            "ulimit -n",
            what=f"a process may open {files:.0f} files",
            why="sockets to other ranks, shards and memory of data workers count as files; a run"
            " fails with 'Too many open files' after hours",
            remedy="run ulimit -n 65536 before the start, or set nofile in /etc/security/limits.d,"
            " or docker run --ulimit nofile=65536",
        )
    if processes is not None and processes < MIN_PROCESSES:
        yield failure(
            recording,
            "ulimit -u",
            what=f"the user may have {processes:.0f} processes and threads",
            why="each rank starts about a hundred threads, and data workers add theirs",
            remedy="run ulimit -u 65536 before the start, or set nproc in /etc/security/limits.d",
        )
