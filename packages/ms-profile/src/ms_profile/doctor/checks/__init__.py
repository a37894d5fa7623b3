"""Checks: functions that yield findings, registered by the files of this package."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Final, Literal, TypeVar

import msgspec
from attrs import frozen

from ms_profile.doctor.recording import Examined, MachineRecording

Severity = Literal["failure", "warning"]
S = TypeVar("S")
T = TypeVar("T")


class DoctorFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A problem: where it is, why it matters, and how to fix it."""

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


def failure(
    recording: MachineRecording, where: str, *, what: str, why: str, remedy: str
) -> DoctorFinding:
    """Report a problem on a rank that breaks a run or slows it down much."""
    return DoctorFinding(
        severity="failure",
        ranks=(recording.machine.rank,),
        hosts=(recording.machine.host,),
        where=where,
        what=what,
        why=why,
        remedy=remedy,
    )


def warning(
    recording: MachineRecording, where: str, *, what: str, why: str, remedy: str
) -> DoctorFinding:
    """Report a problem on a rank that may be intended."""
    finding = failure(recording, where, what=what, why=why, remedy=remedy)
    return msgspec.structs.replace(finding, severity="warning")


def merge_findings(findings: Iterable[DoctorFinding]) -> list[DoctorFinding]:
    """Merge findings that differ only in their ranks; failures come first."""
    groups: dict[DoctorFinding, list[DoctorFinding]] = {}
    for finding in findings:
        # A finding without its ranks is the key: the same problem on many ranks is one finding.
        key = msgspec.structs.replace(finding, ranks=(), hosts=())
        groups.setdefault(key, []).append(finding)
    merged = [
        msgspec.structs.replace(
            key,
            ranks=tuple(sorted({rank for finding in group for rank in finding.ranks})),
            hosts=tuple(dict.fromkeys(host for finding in group for host in finding.hosts)),
        )
        for key, group in groups.items()
    ]
    return sorted(merged, key=lambda finding: finding.severity != "failure")


FindProblems = Callable[[Examined], Iterable[DoctorFinding]]


@frozen(kw_only=True)
class Check:
    """A check."""

    name: str
    about: str
    """Statement that is true if the check finds nothing."""
    find: FindProblems
    needs: Callable[[Examined], bool]
    """Returns whether the check applies."""


_checks: Final[dict[str, Check]] = {}


def check(
    name: str, about: str, *, needs: Callable[[Examined], bool] = lambda examined: True
) -> Callable[[FindProblems], FindProblems]:
    """Register the decorated function as a check.

    Args:
        name: name in findings, a word or two with dashes.
        about: statement that is true if the check finds nothing, in one sentence.
        needs: returns whether the check applies; if not, it is skipped.
    """

    def register(find: FindProblems) -> FindProblems:
        assert name not in _checks, f"two checks are named {name}"
        _checks[name] = Check(name=name, about=about, find=find, needs=needs)
        return find

    return register


def all_checks() -> Mapping[str, Check]:
    """Import all files of checks and return the checks sorted by name."""
    for file in iter_modules(__path__):
        import_module(f"{__name__}.{file.name}")
    return MappingProxyType(dict(sorted(_checks.items())))


def minority(items: Sequence[S], values: Sequence[T]) -> Iterator[tuple[S, T, T]]:
    """Yield the items whose value differs from the most common one, with both values."""
    counts = Counter(values).most_common()
    for item, value in zip(items, values, strict=True):
        if value != counts[0][0]:
            yield item, value, counts[0][0]
