"""The report of `verify_device.py`: results of all parts, versions, and instructions to send it."""

import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("torch", "torch_npu", "triton", "triton-ascend", "numpy", "transformers"),
    *("ms-data", "ms-kernels", "ms-parallel", "ms-align", "ms-compress", "ms-profile"),
)
SHOWN, SHOWN_OF_FAILED = 3000, 12000
"""Number of trailing output characters that the page shows for a passed and for a failed part."""
SUMMARY_LINES = 60
"""Number of trailing lines of figures.md in the summary."""


class Outcome(NamedTuple):
    """Result of one part."""

    name: str
    shows: str
    """Claim that is proved if the part passed."""
    held: bool
    """Passed; the name is a key of report.json."""
    seconds: float
    code: int | None
    """Exit code; None after a timeout."""
    output: str
    note: str


class Report:
    """Outcomes so far, rewritten to report.md and report.json after every part.

    Args:
        out: output folder.
        facts: versions and device name.
        planned: names of all parts, in order.
        excluded: parts that will not run, with the reason for each.
        command: command line of this run.
        started: start time in UTC.
    """

    def __init__(
        self,
        out: Path,
        facts: Mapping[str, str | None],
        *,
        planned: Sequence[str],
        excluded: Sequence[str],
        command: str,
        started: datetime,
    ) -> None:
        self.out, self.facts, self.planned = out, facts, planned
        self.excluded, self.command, self.started = excluded, command, started
        self.outcomes: list[Outcome] = []
        self._write()

    def add(self, outcome: Outcome) -> None:
        """Add an outcome and write the files, so that a crash loses nothing."""
        self.outcomes.append(outcome)
        self._write()

    def all_passed(self) -> bool:
        """Whether all parts ran and passed."""
        return len(self.outcomes) == len(self.planned) and not self._failed()

    def verdict(self) -> str:
        """One-line summary."""
        passed = len(self.outcomes) - len(self._failed())
        pending = len(self.planned) - len(self.outcomes)
        suffix = f"; {pending} not run" if pending else ""
        return f"{passed} of {len(self.planned)} parts passed{suffix}"

    def summary(self) -> str:
        """A short table of all parts, the last figures of measurements, and the verdict."""
        lines = []
        for outcome in self.outcomes:
            state = "passed" if outcome.held else "FAILED"
            lines.append(f"{outcome.name:32} {state} {outcome.seconds:6.0f} s  {outcome.note}")
        figures = self.out / "figures.md"
        if figures.exists():
            lines += ["", *figures.read_text(errors="replace").splitlines()[-SUMMARY_LINES:], ""]
        return "\n".join([*lines, self.verdict()])

    def _pending(self) -> list[str]:
        done = {outcome.name for outcome in self.outcomes}
        return [name for name in self.planned if name not in done]

    def _failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.held]

    def _write(self) -> None:
        record = {
            "facts": self.facts,
            "command": self.command,
            "began": self.started.isoformat(timespec="seconds"),
            "left_out": list(self.excluded),
            "not_run": self._pending(),
            "outcomes": [outcome._asdict() for outcome in self.outcomes],
        }
        (self.out / "report.json").write_text(json.dumps(record, indent=1))
        (self.out / "report.md").write_text("\n".join(self._lines()) + "\n")

    def _lines(self) -> Iterator[str]:
        seconds = sum(outcome.seconds for outcome in self.outcomes)
        yield from (f"# {self.facts['device']}: {self.verdict()}", "")
        yield (
            f"`{self.command}`, started {self.started:%Y-%m-%d %H:%M} UTC, {seconds:.0f} s total."
        )
        yield from self._list("Failed", [f"{e.name}: {e.note}" for e in self._failed()])
        yield from self._list("Not run", self._pending())
        yield from self._list("Excluded", self.excluded)
        yield from ("", "## What to send", "")
        yield (
            "Send this page and `report.json`, to the person who asked for them or as an issue of"
            " the project. They contain versions, the device's name and the output of the parts,"
            " with paths of this machine; read them first. `work/` is not needed."
        )
        yield from ("", "## Versions", "", "| component | version |", "|---|---|")
        yield from (f"| {name} | {value} |" for name, value in self.facts.items() if value)
        yield from ("", "## Parts", "")
        yield from ("| part | shows | passed | seconds | note |", "|---|---|---|---|---|")
        for outcome in self.outcomes:
            passed = "yes" if outcome.held else "NO"
            yield (
                f"| {outcome.name} | {outcome.shows} | {passed} | {outcome.seconds:.0f}"
                f" | {outcome.note} |"
            )
        for outcome in sorted(self.outcomes, key=lambda outcome: outcome.held):
            tail = outcome.output[-(SHOWN if outcome.held else SHOWN_OF_FAILED) :].strip()
            state = "" if outcome.held else " (failed)"
            yield from ("", f"## {outcome.name}{state}", "", "````text", tail, "````")

    def _list(self, title: str, lines: Sequence[str]) -> Iterator[str]:
        if lines:
            yield from ("", f"{title}:", "", *(f"- {line}" for line in lines))


def facts(device: str, processes: int) -> dict[str, str | None]:
    """Collect versions and the device's name."""
    import torch

    module = getattr(torch, device, None)
    get_name = getattr(module, "get_device_name", None)
    name = get_name() if get_name and device != "cpu" else device.replace("cpu", "CPU")
    info: dict[str, str | None] = {"device": f"{processes} x {name}", "commit": commit()}
    info |= {"python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            info[package] = version(package)
        except PackageNotFoundError:
            info[package] = None
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    info["CANN"] = cann_version(Path(home)) if home else None
    built_for = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    return info | {f"{name} of torch": release for name, release in built_for.items()}


def commit() -> str | None:
    """Commit of this clone, marked if files have changed; None without git."""
    try:
        commands = [("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "-uno")]
        head, changed = (
            subprocess.run(
                ("git", "-C", str(ROOT), *words), capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}, with changes" if changed else head


def cann_version(home: Path) -> str | None:
    """CANN version from the toolkit's `.info` file."""
    for path in sorted(home.glob("*toolkit*.info")) + sorted(home.glob("version.info")):
        for line in path.read_text(errors="replace").splitlines():
            if line.lower().startswith("version="):
                return line.partition("=")[2].strip()
    return None
