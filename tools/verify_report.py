"""What `verify_device.py` writes: what held and what did not, on which versions, what to send."""

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
"""Characters of what a part printed last that the page shows."""


class Outcome(NamedTuple):
    """What came of a part."""

    name: str
    shows: str
    """What is proved where it held."""
    held: bool
    seconds: float
    code: int | None
    """Its exit code; None where its time was up."""
    output: str
    note: str


class Report:
    """Outcomes as they come in, on a page for people and as facts for programs.

    Args:
        out: the folder to write into.
        facts: versions and the device.
        planned: names of all parts, in order.
        left_out: what is not run, each with why.
        command: what was typed.
        began: when, in UTC.
    """

    def __init__(
        self,
        out: Path,
        facts: Mapping[str, str | None],
        *,
        planned: Sequence[str],
        left_out: Sequence[str],
        command: str,
        began: datetime,
    ) -> None:
        self.out, self.facts, self.planned = out, facts, planned
        self.left_out, self.command, self.began = left_out, command, began
        self.outcomes: list[Outcome] = []
        self._write()

    def add(self, outcome: Outcome) -> None:
        """Take one more; what is on disk then holds it, so that nothing is lost."""
        self.outcomes.append(outcome)
        self._write()

    def holds(self) -> bool:
        """Whether all parts have run and held."""
        return len(self.outcomes) == len(self.planned) and not self._failed()

    def verdict(self) -> str:
        """One line on the whole."""
        held = len(self.outcomes) - len(self._failed())
        waiting = len(self.planned) - len(self.outcomes)
        more = f"; {waiting} not run" if waiting else ""
        return f"{held} of {len(self.planned)} parts held{more}"

    def _waiting(self) -> list[str]:
        done = {each.name for each in self.outcomes}
        return [name for name in self.planned if name not in done]

    def _failed(self) -> list[Outcome]:
        return [each for each in self.outcomes if not each.held]

    def _write(self) -> None:
        record = {
            "facts": self.facts,
            "command": self.command,
            "began": self.began.isoformat(timespec="seconds"),
            "left_out": list(self.left_out),
            "not_run": self._waiting(),
            "outcomes": [each._asdict() for each in self.outcomes],
        }
        (self.out / "report.json").write_text(json.dumps(record, indent=1))
        (self.out / "report.md").write_text("\n".join(self._lines()) + "\n")

    def _lines(self) -> Iterator[str]:
        seconds = sum(each.seconds for each in self.outcomes)
        yield from (f"# {self.facts['device']}: {self.verdict()}", "")
        yield f"`{self.command}`, begun {self.began:%Y-%m-%d %H:%M} UTC, {seconds:.0f} s of work."
        yield from self._list("Did not hold", [f"{e.name}: {e.note}" for e in self._failed()])
        yield from self._list("Not run", self._waiting())
        yield from self._list("Left out", self.left_out)
        yield from ("", "## What to send", "")
        yield (
            "This page and `report.json` beside it, to whoever asked for them or as an issue of the"
            " project. They hold versions, the device's name and what the parts printed, with"
            " folders of this machine; read them first. `work/` need not be sent."
        )
        yield from ("", "## Versions", "", "| what | version |", "|---|---|")
        yield from (f"| {name} | {value} |" for name, value in self.facts.items() if value)
        yield from ("", "## Parts", "")
        yield from ("| part | what it shows | held | seconds | note |", "|---|---|---|---|---|")
        for each in self.outcomes:
            held = "yes" if each.held else "NO"
            yield f"| {each.name} | {each.shows} | {held} | {each.seconds:.0f} | {each.note} |"
        for each in sorted(self.outcomes, key=lambda each: each.held):
            shown = each.output[-(SHOWN if each.held else SHOWN_OF_FAILED) :].strip()
            state = "" if each.held else ", which did not hold"
            yield from ("", f"## {each.name}{state}", "", "````text", shown, "````")

    def _list(self, title: str, lines: Sequence[str]) -> Iterator[str]:
        if lines:
            yield from ("", f"{title}:", "", *(f"- {line}" for line in lines))


def facts(device: str, processes: int) -> dict[str, str | None]:
    """Versions and the device's name."""
    import torch

    module = getattr(torch, device, None)
    named = getattr(module, "get_device_name", None)
    name = named() if named and device != "cpu" else device.replace("cpu", "CPU")
    found: dict[str, str | None] = {"device": f"{processes} x {name}", "commit": commit()}
    found |= {"python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    found["CANN"] = cann_version(Path(home)) if home else None
    built_for = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    return found | {f"{name} of torch": release for name, release in built_for.items()}


def commit() -> str | None:
    """Which state of the repository this is; None where git does not know."""
    try:
        asked = [("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "-uno")]
        head, changed = (
            subprocess.run(
                ("git", "-C", str(ROOT), *words), capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in asked
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}, with changes" if changed else head


def cann_version(home: Path) -> str | None:
    """The version that CANN's toolkit states in its `.info` file."""
    for path in sorted(home.glob("*toolkit*.info")) + sorted(home.glob("version.info")):
        for line in path.read_text(errors="replace").splitlines():
            if line.lower().startswith("version="):
                return line.partition("=")[2].strip()
    return None
