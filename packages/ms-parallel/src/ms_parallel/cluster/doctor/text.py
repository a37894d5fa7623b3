"""Formats a report as text."""

from collections.abc import Iterator

from ms_parallel.cluster.doctor.examine import DoctorReport
from ms_parallel.cluster.doctor.finding import Finding
from ms_parallel.cluster.doctor.recording.recording import Machine

GIB = 1 << 30
MAX_NAMED = 6
MAX_CLOCKS, MAX_PAIRS = 16, 28
"""Maximum number of clocks (those with the largest offsets) and of pairs that are listed."""


def report_text(report: DoctorReport) -> str:
    """Format a report: machine, measurements, findings and checks."""
    lines = [*_machine(report.machine), *_measured(report), ""]
    for item in report.findings:
        lines += [*_finding(item), ""]
    sound = [item.name for item in report.checks if not item.skipped and not item.findings]
    skipped = [item.name for item in report.checks if item.skipped]
    lines.append(f"ok           {', '.join(sound) or 'nothing'}")
    if skipped:
        lines.append(f"skipped      {', '.join(skipped)}")
    lines.append(f"total        {summary(report)}")
    return "\n".join(lines)


def summary(report: DoctorReport) -> str:
    """Summarize the number of ranks, machines, failures and warnings."""
    failures = sum(finding.severity == "failure" for finding in report.findings)
    warnings = len(report.findings) - failures
    return (
        f"{_count(report.ranks, 'rank')} on {_count(len(report.hosts), 'machine')}:"
        f" {_count(failures, 'failure')}, {_count(warnings, 'warning')}"
    )


def location(finding: Finding) -> str:
    """Format the ranks and machines of a finding."""
    ranks = _named([str(rank) for rank in finding.ranks])
    hosts = _named([host for host in finding.hosts if host])
    return f"rank{'s' * (len(finding.ranks) > 1)} {ranks}" + (f" on {hosts}" if hosts else "")


def measured_lines(report: DoctorReport) -> Iterator[tuple[str, str]]:
    """Measurements as (name, text)."""
    by_offset = sorted(report.measured.clocks[1:], key=lambda clock: -abs(clock.offset_s))
    for clock in sorted(by_offset[:MAX_CLOCKS], key=lambda clock: clock.rank):
        yield (
            f"clock {clock.rank}",
            f"{clock.offset_s * 1e3:+.3f} ms from rank 0, to within"
            f" {clock.uncertainty_s * 1e3:.3f} ms",
        )
    for pair in report.measured.pairs[:MAX_PAIRS]:
        yield (
            f"{pair.first} to {pair.second}",
            f"{pair.latency_us:.0f} us, {pair.bandwidth_gb_per_s:.2f} GB/s over"
            f" {report.measured.backend}",
        )
    for folder in report.measured.folders:
        if folder.write_mb_per_s is not None:
            yield "folder", f"{folder.path}: {folder.write_mb_per_s:.0f} MB/s written and synced"


def machine_lines(machine: Machine) -> Iterator[tuple[str, str]]:
    """Facts of a machine as (name, text)."""
    yield "python", f"{machine.python or 'unknown'} on {machine.system or 'an unknown system'}"
    memory, disk = machine.memory_bytes / GIB, machine.free_disk_bytes / GIB
    if machine.cores:
        yield "processor", f"{machine.cores} cores, {memory:.1f} GiB memory"
    if machine.free_disk_bytes:
        yield "disk", f"{disk:.1f} GiB free here"
    for index, finding in enumerate(machine.accelerators):
        yield f"{machine.device}:{index}", f"{finding.name}, {finding.memory_bytes / GIB:.0f} GiB"
    yield "run device", machine.device
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


def _finding(finding: Finding) -> Iterator[str]:
    yield f"{finding.severity:<12} {finding.where}, {location(finding)} ({finding.check})"
    yield f"  what       {finding.what}"
    yield f"  why        {finding.why}"
    yield f"  remedy     {finding.remedy}"


def _named(words: list[str]) -> str:
    hidden = len(words) - MAX_NAMED
    return ", ".join(words[:MAX_NAMED]) + (f" and {hidden} more" if hidden > 0 else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
