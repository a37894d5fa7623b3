"""Writes a report as lines of text."""

from collections.abc import Iterator

from ms_parallel.cluster.doctor.examine import DoctorReport
from ms_parallel.cluster.doctor.finding import Finding
from ms_parallel.cluster.doctor.recording.recording import Machine

GIB = 1 << 30
MOST_NAMED = 6
MOST_CLOCKS, MOST_PAIRS = 16, 28
"""Lines of what was measured: the clocks that are farthest apart, and the first pairs."""


def report_text(report: DoctorReport) -> str:
    """Write a report for people: the machine, what was measured, each finding, and the checks."""
    lines = [*_machine(report.machine), *_measured(report), ""]
    for one in report.findings:
        lines += [*_finding(one), ""]
    sound = [one.name for one in report.checks if not one.skipped and not one.findings]
    skipped = [one.name for one in report.checks if one.skipped]
    lines.append(f"sound        {', '.join(sound) or 'nothing'}")
    if skipped:
        lines.append(f"not here     {', '.join(skipped)}")
    lines.append(f"in all       {summary(report)}")
    return "\n".join(lines)


def summary(report: DoctorReport) -> str:
    """Say how many ranks, machines, failures and warnings there are."""
    failures = sum(one.severity == "failure" for one in report.findings)
    warnings = len(report.findings) - failures
    return (
        f"{_count(report.ranks, 'rank')} on {_count(len(report.hosts), 'machine')}:"
        f" {_count(failures, 'failure')}, {_count(warnings, 'warning')}"
    )


def place(one: Finding) -> str:
    """Name the ranks and machines of a finding."""
    ranks = _named([str(rank) for rank in one.ranks])
    hosts = _named([host for host in one.hosts if host])
    return f"rank{'s' * (len(one.ranks) > 1)} {ranks}" + (f" on {hosts}" if hosts else "")


def measured_lines(report: DoctorReport) -> Iterator[tuple[str, str]]:
    """List what was measured, as names and texts."""
    apart = sorted(report.measured.clocks[1:], key=lambda clock: -abs(clock.offset_s))
    for clock in sorted(apart[:MOST_CLOCKS], key=lambda clock: clock.rank):
        yield (
            f"clock {clock.rank}",
            f"{clock.offset_s * 1e3:+.3f} ms from rank 0, to within"
            f" {clock.uncertainty_s * 1e3:.3f} ms",
        )
    for pair in report.measured.pairs[:MOST_PAIRS]:
        yield (
            f"{pair.first} to {pair.second}",
            f"{pair.latency_us:.0f} us, {pair.bandwidth_gb_per_s:.2f} GB/s over"
            f" {report.measured.backend}",
        )
    for folder in report.measured.folders:
        if folder.write_mb_per_s is not None:
            yield "folder", f"{folder.path}: {folder.write_mb_per_s:.0f} MB/s written and synced"


def machine_lines(machine: Machine) -> Iterator[tuple[str, str]]:
    """List the facts of a machine, as names and texts."""
    yield "python", f"{machine.python or 'unknown'} on {machine.system or 'an unknown system'}"
    memory, disk = machine.memory_bytes / GIB, machine.free_disk_bytes / GIB
    if machine.cores:
        yield "processor", f"{machine.cores} cores, {memory:.1f} GiB memory"
    if machine.free_disk_bytes:
        yield "disk", f"{disk:.1f} GiB free here"
    for index, one in enumerate(machine.accelerators):
        yield f"{machine.device}:{index}", f"{one.name}, {one.memory_bytes / GIB:.0f} GiB"
    yield "a run takes", machine.device
    yield "backends", ", ".join(machine.backends) or "none"
    yield "torchrun", machine.torchrun or "not found"
    for name, version in machine.packages.items():
        yield name, version or "not installed"


def _machine(machine: Machine) -> Iterator[str]:
    for name, text in machine_lines(machine):
        yield f"{name:<12} {text}"


def _measured(report: DoctorReport) -> Iterator[str]:
    for name, text in measured_lines(report):
        yield f"{name:<12} {text}"


def _finding(one: Finding) -> Iterator[str]:
    yield f"{one.severity:<12} {one.where}, {place(one)} ({one.check})"
    yield f"  what       {one.what}"
    yield f"  why        {one.why}"
    yield f"  remedy     {one.remedy}"


def _named(words: list[str]) -> str:
    rest = len(words) - MOST_NAMED
    return ", ".join(words[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
