"""Examines machines: records every rank, takes joint measurements, and runs the checks."""

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from attrs import evolve

from ms_parallel.cluster.doctor.finding import Finding, failure, merge_findings
from ms_parallel.cluster.doctor.measured.clocks import measure_clocks
from ms_parallel.cluster.doctor.measured.exchange import gather_bytes
from ms_parallel.cluster.doctor.measured.folders import measure_folders
from ms_parallel.cluster.doctor.measured.library_log import library_log, relevant_lines
from ms_parallel.cluster.doctor.measured.pairs import measure_pairs
from ms_parallel.cluster.doctor.measured.patience import watchdog
from ms_parallel.cluster.doctor.recording.capture import capture
from ms_parallel.cluster.doctor.recording.recording import Examined, Machine, Measured, Recording
from ms_parallel.cluster.doctor.registry import all_checks

TIMEOUT_S, EXTRA_S = 90.0, 10.0
MAX_NAMED = 4


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a check."""

    name: str
    about: str
    skipped: bool
    """Whether the check did not apply."""
    findings: int


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an examination."""

    machine: Machine
    """The machine of rank 0."""
    ranks: int
    hosts: list[str]
    checks: list[CheckResult]
    findings: list[Finding]
    measured: Measured

    @property
    def sound(self) -> bool:
        """Whether there are no failures."""
        return not any(finding.severity == "failure" for finding in self.findings)


def examine(folder: Path | None = None) -> Examined | None:
    """Record this process, or all processes of the group; None on ranks other than 0.

    Args:
        folder: output folder to test; None to skip.
    """
    recording = capture()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        folders = [] if folder is None else measure_folders(folder)
        return Examined(ranks=[recording], measured=Measured(folders=folders))
    parts = gather_bytes(msgspec.json.encode(recording))
    clocks = measure_clocks()
    folders = [] if folder is None else measure_folders(folder)
    if dist.get_rank() > 0:
        return None
    return Examined(
        ranks=[msgspec.json.decode(part, type=Recording) for part in parts],
        measured=Measured(clocks=clocks, folders=folders),
    )


def measure_links(
    examined: Examined | None,
    device: torch.device,
    report: Callable[[DoctorReport], object],
    *,
    timeout_s: float = TIMEOUT_S,
) -> Examined | None:
    """Measure messages between all pairs of ranks. Collective; rank 0 gets the result.

    Args:
        examined: on rank 0, the results so far.
        device: device for this rank's messages.
        report: called on rank 0 with the results so far if messages do not arrive; the process
            then ends with exit code 1.
        timeout_s: seconds after which messages count as lost, plus one per rank.
    """
    world, current = dist.get_world_size(), list[tuple[int, int]]()
    backend = dist.get_default_backend_for_device(device)

    def begin(pairs: list[tuple[int, int]]) -> None:
        current[:] = pairs

    def report_if_first() -> None:
        if examined is not None:
            report(judge(examined, [_lost_messages(examined, current, backend, timeout_s + world)]))

    # Other ranks wait a little longer, as a launcher ends all when the first one ends.
    seconds = timeout_s + world + (0 if examined is not None else EXTRA_S)
    with library_log() as log, watchdog(seconds, report_if_first):
        pairs, simultaneous = measure_pairs(device, begin)
        log_text = relevant_lines(log)
    if examined is None:
        return None
    measured = msgspec.structs.replace(
        examined.measured, backend=backend, pairs=pairs, together=simultaneous, log=log_text
    )
    return evolve(examined, measured=measured)


def _lost_messages(
    examined: Examined, pairs: list[tuple[int, int]], backend: str, seconds: float
) -> Finding:
    shown = ", ".join(f"{first} and {second}" for first, second in pairs[:MAX_NAMED])
    finding = failure(
        examined.ranks[0],
        f"ranks {shown}",
        what=f"messages over {backend} did not arrive within {seconds:.0f} s",
        why="a run would hang in its first collective; further links were not measured",
        remedy="fix the other findings; then check firewalls between the machines and the MTU along"
        " the way" + ", and run with NCCL_DEBUG=INFO" * (backend == "nccl"),
    )
    return msgspec.structs.replace(finding, check="links")


def judge(examined: Examined, extra: Iterable[Finding] = ()) -> DoctorReport:
    """Run all checks.

    Args:
        examined: recordings and measurements.
        extra: findings from other sources.
    """
    findings, results = list(extra), []
    for name, check in all_checks().items():
        skipped = not check.needs(examined)
        new_findings = [] if skipped else [*check.look(examined)]
        findings += [msgspec.structs.replace(item, check=name) for item in new_findings]
        results.append(
            CheckResult(
                name=name,
                about=check.about,
                skipped=skipped,
                findings=len(merge_findings(new_findings)),
            )
        )
    return DoctorReport(
        machine=examined.ranks[0].machine,
        ranks=len(examined.ranks),
        hosts=[item.machine.host for item in examined.machines],
        checks=results,
        findings=merge_findings(findings),
        measured=examined.measured,
    )


def rendezvous_failure(recording: Recording, reason: str) -> Finding:
    """Finding for a rank that could not connect to the others."""
    return msgspec.structs.replace(
        failure(
            recording,
            "the start",
            what=f"the ranks did not connect: {reason}",
            why="no run can start, and only this rank was examined",
            remedy="fix the other findings, and check that all machines reach MASTER_ADDR at"
            " MASTER_PORT",
        ),
        check="start",
    )
