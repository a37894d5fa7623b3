"""Whether a process may open, lock and start as much as a run does."""

from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure
from ms_parallel.cluster.doctor.readings.limits import COMMAND, FILE, limit
from ms_parallel.cluster.doctor.readings.ports import ACTIVE, ports
from ms_parallel.cluster.doctor.recording.recording import Examined, Recording
from ms_parallel.cluster.doctor.registry import check

GIB = 1 << 30
LEAST_FILES, LEAST_PROCESSES, LEAST_LOCKED = 4096, 4096, 16 * GIB


@check(
    "limits",
    "a process may open, lock and start enough (ulimit)",
    needs=lambda examined: any(
        FILE in one.files or COMMAND in one.commands for one in examined.ranks
    ),
)
def limits(examined: Examined) -> Iterator[Finding]:
    """Look at the limits of each rank."""
    for one in examined.ranks:
        yield from _files_and_processes(one)
        locked = limit(one, "locked_bytes")
        machine = examined.machine_of(one.machine.rank)
        reaches = any(port.state == ACTIVE for port in ports(machine))
        if reaches and locked is not None and locked < LEAST_LOCKED:
            yield failure(
                one,
                "ulimit -l",
                what=f"a process may lock {locked / GIB:.3g} GiB of memory",
                why="RDMA locks every buffer that it sends from; where it may not, NCCL fails with"
                " ibv_reg_mr, or sends over sockets",
                remedy="set memlock to unlimited: in /etc/security/limits.d, as LimitMEMLOCK="
                "infinity of the service, or with docker run --ulimit memlock=-1",
            )


def _files_and_processes(one: Recording) -> Iterator[Finding]:
    files, processes = limit(one, "open_files"), limit(one, "processes")
    if files is not None and files < LEAST_FILES:
        yield failure(
            one,
            "ulimit -n",
            what=f"a process may open {files:.0f} files",
            why="sockets to the other ranks, shards and what data workers share count as files; a"
            " run ends with 'Too many open files' after hours",
            remedy="ulimit -n 65536 before the start, or nofile in /etc/security/limits.d, or"
            " docker run --ulimit nofile=65536",
        )
    if processes is not None and processes < LEAST_PROCESSES:
        yield failure(
            one,
            "ulimit -u",
            what=f"the user may have {processes:.0f} processes and threads",
            why="each rank starts about a hundred threads, and data workers theirs",
            remedy="ulimit -u 65536 before the start, or nproc in /etc/security/limits.d",
        )
