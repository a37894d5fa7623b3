"""A report: all checks run on a recording, as text and as an HTML page."""

from collections.abc import Iterable, Iterator
from html import escape
from typing import Final

import msgspec

from ms_profile.doctor.checks import DoctorFinding, all_checks, merge_findings
from ms_profile.doctor.recording import Examined, Machine, Measured

GIB: Final = 1 << 30
MAX_NAMED: Final = 6
MAX_CLOCKS, MAX_PAIRS = 16, 28
"""Maximum number of clocks (those with the largest offsets) and of pairs that are listed."""
STYLE: Final = """<style>
body { font-family: sans-serif; color: #202124; background: #fff; margin: 16px; max-width: 960px }
h1, h2, p, td:last-child { overflow-wrap: anywhere }
td { padding: 4px 12px 4px 0; vertical-align: top; white-space: nowrap }
td:last-child { white-space: normal }
article { border-left: 4px solid; padding: 0 0 0 12px; margin: 16px 0 }
article p { color: #202124; margin: 4px 0 } h2 { font-size: 16px; margin: 0 }
body > h2 { margin: 20px 0 4px }
.failure { color: #c5221f } .warning { color: #9a6700 } .sound { color: #137333 }
.skipped { color: #5f6368 }
@media (prefers-color-scheme: dark) {
  body { color: #e8eaed; background: #202124 } article p { color: #e8eaed }
  .failure { color: #f28b82 } .warning { color: #fdd663 } .sound { color: #81c995 }
  .skipped { color: #9aa0a6 }
}
</style>"""


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
    findings: list[DoctorFinding]
    measured: Measured

    @property
    def sound(self) -> bool:
        """Whether no check failed."""
        return not any(finding.severity == "failure" for finding in self.findings)


def judge(examined: Examined, extra: Iterable[DoctorFinding] = ()) -> DoctorReport:
    """Run all checks.

    Args:
        examined: recordings and measurements.
        extra: findings from other sources.
    """
    findings, results = list(extra), []
    for name, check in all_checks().items():
        skipped = not check.needs(examined)
        new_findings = [] if skipped else merge_findings(check.find(examined))
        findings += [msgspec.structs.replace(finding, check=name) for finding in new_findings]
        results.append(
            CheckResult(name=name, about=check.about, skipped=skipped, findings=len(new_findings))
        )
    return DoctorReport(
        machine=examined.ranks[0].machine,
        ranks=len(examined.ranks),
        hosts=[item.machine.host for item in examined.machines],
        checks=results,
        findings=merge_findings(findings),
        measured=examined.measured,
    )


def report_text(report: DoctorReport) -> str:
    """Format a report: machine, measurements, findings and checks."""
    facts = [*machine_lines(report.machine), *measured_lines(report)]
    lines = [*(f"{name:<12} {text}" for name, text in facts), ""]
    for finding in report.findings:
        lines += [
            f"{finding.severity:<12} {finding.where}, {location(finding)} ({finding.check})",
            f"  what       {finding.what}",
            f"  why        {finding.why}",
            f"  remedy     {finding.remedy}",
            "",
        ]
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


def location(finding: DoctorFinding) -> str:
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
    for index, device in enumerate(machine.accelerators):
        yield f"{machine.device}:{index}", f"{device.name}, {device.memory_bytes / GIB:.0f} GiB"
    yield "run device", machine.device
    yield "backends", ", ".join(machine.backends) or "none"
    yield "torchrun", machine.torchrun or "not found"
    for name, version in machine.packages.items():
        yield name, version or "not installed"


def _named(words: list[str]) -> str:
    hidden = len(words) - MAX_NAMED
    return ", ".join(words[:MAX_NAMED]) + (f" and {hidden} more" if hidden > 0 else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def draw_page(report: DoctorReport) -> str:
    """Render a report as HTML without scripts or links."""
    title = "No failures found" if report.sound else "Failures found"
    facts = [*machine_lines(report.machine), *measured_lines(report)]
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>\n" for name, text in facts
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>\n{STYLE}</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"<p>{escape(summary(report))}</p>\n{''.join(map(_article, report.findings))}"
        f"<h2>Checks</h2>\n<table>{_checks(report)}</table>\n"
        f"<h2>Rank 0</h2>\n<table>\n{rows}</table>\n</body></html>\n"
    )


def _article(finding: DoctorFinding) -> str:
    head = f"{finding.severity.capitalize()}: {finding.where}, {location(finding)}"
    problem, why = escape(_sentence(finding.what)), escape(_sentence(finding.why))
    return (
        f'<article class="{finding.severity}"><h2>{escape(head)}</h2>\n'
        f"<p>{problem}</p>\n<p>{why}</p>\n"
        f"<p><b>Remedy:</b> {escape(finding.remedy)}.</p></article>\n"
    )


def _sentence(text: str) -> str:
    """Capitalize a text, unless it starts with a name, and end it with a period."""
    first = text.split(maxsplit=1)[0]
    return f"{text[0].upper()}{text[1:]}." if first.isalpha() and first.islower() else f"{text}."


def _checks(report: DoctorReport) -> str:
    rows = []
    for result in report.checks:
        css_class = "skipped" if result.skipped else "failure" if result.findings else "sound"
        word = "n/a" if result.skipped else f"{result.findings} found" if result.findings else "ok"
        rows.append(
            f'<tr><td>{escape(result.name)}</td><td class="{css_class}">{word}</td>'
            f"<td>{escape(result.about)}</td></tr>\n"
        )
    return "".join(rows)
