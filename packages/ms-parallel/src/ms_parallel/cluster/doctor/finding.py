"""A finding: what is wrong, where, why it matters, and what to do about it."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from ms_parallel.cluster.doctor.recording.recording import Recording

Severity = Literal["failure", "warning"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is not as it should be."""

    check: str = ""
    """Name of the check that found it."""
    severity: Severity
    """A failure keeps a run from working or costs it much; a warning may be meant so."""
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    """Names of the machines of `ranks`."""
    where: str
    what: str
    why: str
    remedy: str


def failure(at: Recording, where: str, *, what: str, why: str, remedy: str) -> Finding:
    """Build the finding of what stops a run or costs it much, on the rank of a recording."""
    return _finding("failure", at, where, what, why, remedy)


def warning(at: Recording, where: str, *, what: str, why: str, remedy: str) -> Finding:
    """Build the finding of what may be intended, on the rank of a recording."""
    return _finding("warning", at, where, what, why, remedy)


def _finding(
    severity: Severity, at: Recording, where: str, what: str, why: str, remedy: str
) -> Finding:
    return Finding(
        severity=severity,
        ranks=(at.machine.rank,),
        hosts=(at.machine.host,),
        where=where,
        what=what,
        why=why,
        remedy=remedy,
    )


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that differ only in their ranks as one; failures first."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for one in findings:
        key = (one.check, one.severity, one.where, one.what, one.why, one.remedy)
        groups.setdefault(key, []).append(one)
    joined = [
        msgspec.structs.replace(
            group[0],
            ranks=tuple(sorted({rank for one in group for rank in one.ranks})),
            hosts=tuple(dict.fromkeys(host for one in group for host in one.hosts)),
        )
        for group in groups.values()
    ]
    return sorted(joined, key=lambda one: one.severity != "failure")
