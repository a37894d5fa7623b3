"""Audits of a run: events, a JSON-lines file, and an HTML page at the end."""

from pathlib import Path
from typing import Any

import msgspec

from ms_parallel.engine.audit import AlarmLevels, AuditResult, GroupComparison
from ms_parallel.events import OnEvent
from ms_parallel.files.durable import write_file, writing
from ms_parallel.progress import RunDisplay
from ms_parallel.training.audit_page import draw_audits

FILE, PAGE = "audits.jsonl", "audits.html"


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One audit, as a line of the file."""

    step: int
    loss: float | None
    loss_float32: float | None
    levels: tuple[float, float, float]
    groups: dict[str, tuple[float | None, float | None, float | None]]


class AuditLog:
    """Logs audits and stores them for the page; used on rank 0 only.

    Args:
        folder: output folder of the run.
        emit: called with events.
        display: prints notes.
    """

    def __init__(self, folder: Path, emit: OnEvent, display: RunDisplay) -> None:
        self.folder, self.emit, self.display = folder, emit, display

    def log(self, step: int, audit: AuditResult) -> None:
        """Emit the event `audit`, print a warning on an alarm, and append the audit to the file."""
        worst = audit.worst
        fields: dict[str, int | float | str] = {
            "step": step,
            "loss": audit.loss,
            "loss_float32": audit.loss_float32,
            "loss_difference": audit.loss_difference,
            "alarm": int(bool(audit.alarms)),
            "alarms": " ".join(audit.alarms),
            "worst": worst,
        }
        for name, group in audit.groups.items():
            fields |= {f"error.{name}": group.error, f"gain.{name}": group.gain}
        self.emit("audit", fields)
        if audit.alarms:
            worst_group = audit.groups.get(worst)
            group_text = (
                f"; {worst}: error {worst_group.error:.2%}, gain {worst_group.gain:+.2%}"
                if worst_group
                else ""
            )
            self.display.note(
                f"warning: step {step}: audit: {len(audit.alarms)} values differ from float32; loss"
                f" by {audit.loss_difference:.1e}{group_text}"
            )
        self._append(step, audit)

    def _append(self, step: int, audit: AuditResult) -> None:
        levels = audit.levels
        record = AuditRecord(
            step=step,
            loss=audit.loss,
            loss_float32=audit.loss_float32,
            levels=(levels.loss, levels.error, levels.gain),
            groups={name: (g.error, g.gain, g.share) for name, g in audit.groups.items()},
        )
        path = self.folder / FILE
        with writing(path), path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")

    def draw(self) -> Path | None:
        """Write the page of all audits over all launches; None without audits."""
        path = self.folder / FILE
        if not path.is_file():
            return None
        audits: dict[int, AuditResult] = {}
        for line in path.read_bytes().splitlines():
            record = _read(line)
            if record is not None:  # else a line cut short by a crash
                audits[record.step] = _audit(record)
        page = self.folder / PAGE
        write_file(page, draw_audits(dict(sorted(audits.items()))).encode())
        return page


def _read(line: bytes) -> AuditRecord | None:
    try:
        return msgspec.json.decode(line, type=AuditRecord)
    except msgspec.MsgspecError:
        return None


def _audit(record: AuditRecord) -> AuditResult:
    loss, error, gain = record.levels
    return AuditResult(
        loss=_number(record.loss),
        loss_float32=_number(record.loss_float32),
        levels=AlarmLevels(loss=loss, error=error, gain=gain),
        groups={
            name: GroupComparison(error=_number(e), gain=_number(g), share=_number(s))
            for name, (e, g, s) in record.groups.items()
        },
    )


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)
