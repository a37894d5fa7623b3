"""Whether processes start more threads than there are cores for them."""

from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.readings.cores import busy_cores, cores_of, sleeps, threads_of
from ms_parallel.cluster.doctor.recording.recording import Examined, Recording
from ms_parallel.cluster.doctor.registry import check

SPARE = 0.5
"""Cores of which others may keep so much busy: something always runs."""
SPINS = (
    "threads of OpenMP that wait for one another spin, on cores that those they wait for have yet"
    " to get: steps take many times as long"
)
TAKE_TURNS = "threads take turns on cores, and those that are done wait for the others"


@check(
    "threads",
    "there is a core for each thread that a process computes with",
    needs=lambda examined: any(threads_of(one) for one in examined.ranks),
)
def threads(examined: Examined) -> Iterator[Finding]:
    """Count the threads of all ranks of each machine beside its cores and its load."""
    for machine in examined.machines:
        ranks = [one for one in examined.ranks if examined.machine_of(one.machine.rank) is machine]
        many = [one for one in ranks if threads_of(one) > 1]  # one thread waits for no other
        if many:
            yield from _of_machine(machine, ranks, many)


def _of_machine(
    machine: Recording, ranks: list[Recording], many: list[Recording]
) -> Iterator[Finding]:
    cores, wanted = cores_of(machine, ranks), sum(map(threads_of, ranks))
    busy = busy_cores(machine, cores, len(ranks))
    share = max(1, int(cores / len(ranks)))
    if not cores:  # a recording that does not say
        return
    if wanted > cores:
        for one in many:
            say = warning if one.machine.device != "cpu" or sleeps(one) else failure
            yield say(
                one,
                "OMP_NUM_THREADS",
                what=f"{_each(ranks)}, {wanted} together, and have {cores:g} cores",
                why=TAKE_TURNS if sleeps(one) else SPINS,
                remedy=f"OMP_NUM_THREADS={share} before the start: torchrun sets it to 1 where"
                " nobody does, and srun and python do not",
            )
    elif wanted + busy > cores + SPARE:
        left = max(1, int((cores - busy) / len(ranks)))
        for one in (one for one in many if not sleeps(one)):
            yield warning(
                one,
                "OMP_NUM_THREADS",
                what=f"{_each(ranks)} on {cores:g} cores, {busy:.1f} of which others keep busy",
                why=SPINS,
                remedy=f"OMP_NUM_THREADS={left} before the start, or OMP_WAIT_POLICY=passive, with"
                " which threads that wait sleep; or end what else runs on the machine",
            )


def _each(ranks: list[Recording]) -> str:
    """Say in words how many threads the ranks compute with."""
    numbers = sorted({threads_of(one) for one in ranks})
    each = "-".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))
    processes = "1 process computes" if len(ranks) == 1 else f"{len(ranks)} processes compute"
    return f"{processes} with {each} threads" + " each" * (len(ranks) > 1)
