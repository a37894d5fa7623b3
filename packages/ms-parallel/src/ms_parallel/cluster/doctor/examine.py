"""Examines: records every rank, measures what ranks measure together, and judges it all."""

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from attrs import evolve

from ms_parallel.cluster.doctor.finding import Finding, failure, merged
from ms_parallel.cluster.doctor.measured.clocks import measure_clocks
from ms_parallel.cluster.doctor.measured.exchange import gather_bytes
from ms_parallel.cluster.doctor.measured.folders import measure_folders
from ms_parallel.cluster.doctor.measured.library_log import kept_lines, library_log
from ms_parallel.cluster.doctor.measured.pairs import measure_pairs
from ms_parallel.cluster.doctor.measured.patience import patience
from ms_parallel.cluster.doctor.recording.capture import capture
from ms_parallel.cluster.doctor.recording.recording import Examined, Machine, Measured, Recording
from ms_parallel.cluster.doctor.registry import all_checks

PATIENCE_S, LONGER_S = 90.0, 10.0
MOST_NAMED = 4


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one check."""

    name: str
    about: str
    skipped: bool
    """Whether there was nothing to look at."""
    findings: int


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was examined, and what was found."""

    machine: Machine
    """The machine of rank 0."""
    ranks: int
    hosts: list[str]
    checks: list[Checked]
    findings: list[Finding]
    measured: Measured

    @property
    def sound(self) -> bool:
        """Whether nothing was found that fails."""
        return not any(one.severity == "failure" for one in self.findings)


def examine(folder: Path | None = None) -> Examined | None:
    """Record this process, or all that have met; rank 0 gets the result, the others None.

    Args:
        folder: of the run, which is tried; None tries none.
    """
    own = capture()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        folders = [] if folder is None else measure_folders(folder)
        return Examined(ranks=[own], measured=Measured(folders=folders))
    parts = gather_bytes(msgspec.json.encode(own))
    clocks = measure_clocks()
    folders = [] if folder is None else measure_folders(folder)
    if dist.get_rank() > 0:
        return None
    return Examined(
        ranks=[msgspec.json.decode(part, type=Recording) for part in parts],
        measured=Measured(clocks=clocks, folders=folders),
    )


def with_links(
    examined: Examined | None,
    device: torch.device,
    speak: Callable[[DoctorReport], object],
    *,
    patience_s: float = PATIENCE_S,
) -> Examined | None:
    """Measure messages between all pairs of ranks too; all call this, rank 0 gets the result.

    Args:
        examined: on rank 0, what is known so far.
        device: where this rank's messages lie.
        speak: called on rank 0 with what is known, before the process is ended with exit code 1,
            where messages do not arrive.
        patience_s: seconds after which they count as lost, beside one for each rank.
    """
    world, now = dist.get_world_size(), list[tuple[int, int]]()
    backend = dist.get_default_backend_for_device(device)

    def begin(pairs: list[tuple[int, int]]) -> None:
        now[:] = pairs

    def report_if_first() -> None:
        if examined is not None:
            speak(judge(examined, [_not_arrived(examined, now, backend, patience_s + world)]))

    # The others wait a little longer: a launcher ends all when the first one ends.
    seconds = patience_s + world + (0 if examined is not None else LONGER_S)
    with library_log() as log, patience(seconds, report_if_first):
        pairs, together = measure_pairs(device, begin)
        said = kept_lines(log)
    if examined is None:
        return None
    measured = msgspec.structs.replace(
        examined.measured, backend=backend, pairs=pairs, together=together, log=said
    )
    return evolve(examined, measured=measured)


def _not_arrived(
    examined: Examined, pairs: list[tuple[int, int]], backend: str, seconds: float
) -> Finding:
    shown = ", ".join(f"{first} and {second}" for first, second in pairs[:MOST_NAMED])
    found = failure(
        examined.ranks[0],
        f"ranks {shown}",
        what=f"messages over {backend} did not arrive within {seconds:.0f} s",
        why="a run hangs in its first collective, and its other links are not measured here",
        remedy="mend what else is found here; then look at firewalls between the machines and at"
        " the MTU along the way" + " and run with NCCL_DEBUG=INFO" * (backend == "nccl"),
    )
    return msgspec.structs.replace(found, check="links")


def judge(examined: Examined, further: Iterable[Finding] = ()) -> DoctorReport:
    """Run every check.

    Args:
        examined: what was recorded.
        further: findings from elsewhere.
    """
    findings, checked = list(further), []
    for name, check in all_checks().items():
        skipped = not check.needs(examined)
        found = [] if skipped else [*check.look(examined)]
        findings += [msgspec.structs.replace(one, check=name) for one in found]
        checked.append(
            Checked(name=name, about=check.about, skipped=skipped, findings=len(merged(found)))
        )
    return DoctorReport(
        machine=examined.ranks[0].machine,
        ranks=len(examined.ranks),
        hosts=[one.machine.host for one in examined.machines],
        checks=checked,
        findings=merged(findings),
        measured=examined.measured,
    )


def not_met(own: Recording, reason: str) -> Finding:
    """Build the finding that the ranks did not meet, as the rank of a recording saw it."""
    return msgspec.structs.replace(
        failure(
            own,
            "the start",
            what=f"the ranks did not meet: {reason}",
            why="no run can begin, and only this rank is examined",
            remedy="mend what else is found here, and look whether all machines reach MASTER_ADDR"
            " at MASTER_PORT",
        ),
        check="start",
    )
