"""A finding: what is wrong, where, why it matters, and how to fix it."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from ms_parallel.cluster.doctor.recording.recording import Recording

Severity = Literal["failure", "warning"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A problem found by a check."""

    check: str = ""
    """Name of the check."""
    severity: Severity
    """A failure breaks a run or slows it down much; a warning may be intended."""
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    """Machine names of `ranks`."""
    where: str
    what: str
    why: str
    remedy: str


def failure(recording: Recording, where: str, *, what: str, why: str, remedy: str) -> Finding:
    """Report a problem on a rank that breaks a run or slows it down much."""
    return _finding("failure", recording, where, what, why, remedy)


def warning(recording: Recording, where: str, *, what: str, why: str, remedy: str) -> Finding:
    """Report a problem on a rank that may be intended."""
    return _finding("warning", recording, where, what, why, remedy)


def _finding(
    severity: Severity, recording: Recording, where: str, what: str, why: str, remedy: str
) -> Finding:
    return Finding(
        severity=severity,
        ranks=(recording.machine.rank,),
        hosts=(recording.machine.host,),
        where=where,
        what=what,
        why=why,
        remedy=remedy,
    )


def merge_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Merge findings that differ only in their ranks; failures come first."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        key = (
            finding.check,
            finding.severity,
            finding.where,
            finding.what,
            finding.why,
            finding.remedy,
        )
        groups.setdefault(key, []).append(finding)
    merged = [
        msgspec.structs.replace(
            group[0],
            ranks=tuple(sorted({rank for finding in group for rank in finding.ranks})),
            hosts=tuple(dict.fromkeys(host for finding in group for host in finding.hosts)),
        )
        for group in groups.values()
    ]
    return sorted(merged, key=lambda finding: finding.severity != "failure")
