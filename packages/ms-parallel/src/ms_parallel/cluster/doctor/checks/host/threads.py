"""Check that processes do not start more threads than they have cores."""

from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.readings.cores import busy_cores, cores_of, sleeps, threads_of
from ms_parallel.cluster.doctor.recording.recording import Examined, Recording
from ms_parallel.cluster.doctor.registry import check

SPARE_CORES = 0.5
"""Cores that other processes may use without a warning."""
SPINS = (
    "waiting OpenMP threads spin on cores that the threads they wait for need: steps take many"
    " times as long"
)
TAKE_TURNS = "threads take turns on cores, and finished ones wait for the others"


@check(
    "threads",
    "each computing thread of a process has a core",
    needs=lambda examined: any(threads_of(recording) for recording in examined.ranks),
)
def threads(examined: Examined) -> Iterator[Finding]:
    """Compare the threads of all ranks of each machine with its cores and load."""
    for machine in examined.machines:
        ranks = [
            recording
            for recording in examined.ranks
            if examined.machine_of(recording.machine.rank) is machine
        ]
        threaded = [
            recording for recording in ranks if threads_of(recording) > 1
        ]  # others: no wait
        if threaded:
            yield from _check_machine(machine, ranks, threaded)


def _check_machine(
    machine: Recording, ranks: list[Recording], threaded: list[Recording]
) -> Iterator[Finding]:
    cores, total = cores_of(machine, ranks), sum(map(threads_of, ranks))
    busy_elsewhere = busy_cores(machine, cores, len(ranks))
    per_rank = max(1, int(cores / len(ranks)))
    if not cores:  # not recorded
        return
    if total > cores:
        for recording in threaded:
            report = warning if recording.machine.device != "cpu" or sleeps(recording) else failure
            yield report(
                recording,
                "OMP_NUM_THREADS",
                what=f"{_thread_counts(ranks)}, {total} in total, on {cores:g} cores",
                why=TAKE_TURNS if sleeps(recording) else SPINS,
                remedy=f"set OMP_NUM_THREADS={per_rank} before the start: torchrun sets it to 1 if"
                " unset, but srun and python do not",
            )
    elif total + busy_elsewhere > cores + SPARE_CORES:
        free_per_rank = max(1, int((cores - busy_elsewhere) / len(ranks)))
        for recording in (recording for recording in threaded if not sleeps(recording)):
            yield warning(
                recording,
                "OMP_NUM_THREADS",
                what=f"{_thread_counts(ranks)} on {cores:g} cores, {busy_elsewhere:.1f} of them"
                " busy with other processes",
                why=SPINS,
                remedy=f"set OMP_NUM_THREADS={free_per_rank} before the start, or"
                " OMP_WAIT_POLICY=passive, which lets waiting threads sleep; or stop other"
                " processes on the machine",
            )


def _thread_counts(ranks: list[Recording]) -> str:
    """Format the number of threads of the ranks."""
    numbers = sorted({threads_of(recording) for recording in ranks})
    counts = "-".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))
    processes = "1 process computes" if len(ranks) == 1 else f"{len(ranks)} processes compute"
    return f"{processes} with {counts} threads" + " each" * (len(ranks) > 1)
