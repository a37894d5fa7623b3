"""The table, written as it grows, and the ways that did not run, with their errors."""

import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from attrs import field, mutable

from ms_kernels.tuning.measure import in_turn

__all__ = ["Report", "reason_of"]

ENDS_S = 560.0
"""Sections that would begin later than this after the start are left out, and told."""


def reason_of(error: BaseException) -> str:
    """Return an error's kind and first line, as a cell of a table."""
    line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}".replace("|", "/")[:200]


@mutable(kw_only=True)
class Report:
    """What was proved and measured."""

    device: torch.device
    small: bool
    """Whether all is tiny and on the CPU, Triton's kernels interpreted."""
    out: Path | None
    started: float = field(factory=time.monotonic)
    held: bool = True
    """Whether every proof held and nothing of ours failed."""
    lines: list[str] = field(factory=list)

    def add(self, *lines: str) -> None:
        """Print lines and append them to the file."""
        self.lines += lines
        print("\n".join(lines), flush=True)
        if self.out:
            self.out.write_text("\n".join(self.lines) + "\n")

    def table(self, *columns: str) -> None:
        """Begin a table."""
        self.add("", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}")

    def row(self, *cells: object) -> None:
        """Add a row of a table."""
        self.add(f"| {' | '.join(str(each) for each in cells)} |")

    def section(self, name: str, body: Callable[["Report"], object]) -> object:
        """Run a section; what goes wrong in it is told and ends it alone."""
        self.add("", f"## {name}")
        if time.monotonic() - self.started > ENDS_S:
            self.held = False
            self.add("", "left out: the time was up")
            return None
        began, found = time.monotonic(), None
        try:
            found = body(self)
        except Exception as error:  # whatever it is, the other sections still run
            self.held = False
            told = traceback.extract_tb(error.__traceback__)[-1]
            self.add("", f"**failed** at {told.name}: {reason_of(error)}")
        finally:
            if not self.small:
                torch.accelerator.synchronize()
                torch.accelerator.empty_cache()
        self.add("", f"({time.monotonic() - began:.0f} s)")
        return found

    def times(
        self,
        ways: Mapping[str, Callable[[], object]],
        *,
        spend_s: float = 0.2,
        rounds: int = 5,
        may_fail: Callable[[str], bool] = lambda name: False,
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Return the seconds of each way that runs, and why each other one does not.

        Args:
            ways: what to time, by name.
            spend_s: seconds for each way.
            rounds: how often each has its turn.
            may_fail: whether a way is a peer's, whose failure is told and nothing more.
        """
        steps, failed = {}, {}
        for name, way in ways.items():
            try:
                way()
                steps[name] = way
            except Exception as error:  # a way that this chip or build lacks
                failed[name] = reason_of(error)
                self.held &= may_fail(name)
        if self.small:
            spend_s, rounds = 0.0, 1
        return in_turn(steps, self.device, spend_s=spend_s, rounds=rounds), failed

    def extra_mib(self, step: Callable[[], object]) -> float:
        """Return the peak memory of one pass beyond what was there before; NaN on the CPU."""
        if self.small:
            return float("nan")
        step()
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        step()
        return (torch.accelerator.max_memory_allocated() - before) / 2**20
