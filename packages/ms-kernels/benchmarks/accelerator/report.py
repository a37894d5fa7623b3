"""The result table, written incrementally, with the errors of methods that did not run."""

import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from attrs import field, mutable

from ms_kernels.tuning.measure import time_interleaved

__all__ = ["Report", "reason_of"]

ENDS_S = 560.0
"""Sections that would start later than this are skipped and reported as such."""


def reason_of(error: BaseException) -> str:
    """Return an error's type and first line, as a table cell."""
    line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}".replace("|", "/")[:200]


@mutable(kw_only=True)
class Report:
    """The results of all checks and measurements."""

    device: torch.device
    small: bool
    """Use tiny sizes on the CPU, with Triton's kernels interpreted."""
    out: Path | None
    start: float = field(factory=time.monotonic)
    passed: bool = True
    """Whether all checks passed and nothing of ours failed."""
    lines: list[str] = field(factory=list)

    def add(self, *lines: str) -> None:
        """Print lines and append them to the file."""
        self.lines += lines
        print("\n".join(lines), flush=True)
        if self.out:
            self.out.write_text("\n".join(self.lines) + "\n")

    def table(self, *columns: str) -> None:
        """Start a table."""
        self.add("", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}")

    def row(self, *cells: object) -> None:
        """Add a row of a table."""
        self.add(f"| {' | '.join(str(cell) for cell in cells)} |")

    def section(self, name: str, body: Callable[["Report"], object]) -> object:
        """Run a section; an error is reported and ends only that section."""
        self.add("", f"## {name}")
        if time.monotonic() - self.start > ENDS_S:
            self.passed = False
            self.add("", "skipped: out of time")
            return None
        section_start, result = time.monotonic(), None
        try:
            result = body(self)
        except Exception as error:  # the other sections still run
            self.passed = False
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self.add("", f"**failed** at {frame.name}: {reason_of(error)}")
        finally:
            if not self.small:
                torch.accelerator.synchronize()
                torch.accelerator.empty_cache()
        self.add("", f"({time.monotonic() - section_start:.0f} s)")
        return result

    def times(
        self,
        methods: Mapping[str, Callable[[], object]],
        *,
        spend_s: float = 0.2,
        rounds: int = 5,
        may_fail: Callable[[str], bool] = lambda name: False,
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Return the seconds of every method that runs, and the reason for every one that does not.

        Args:
            methods: functions to time, by name.
            spend_s: seconds to spend on each method.
            rounds: number of alternating rounds.
            may_fail: whether a method is a peer's, whose failure is only reported.
        """
        steps, failed = {}, {}
        for name, method in methods.items():
            try:
                method()
                steps[name] = method
            except Exception as error:  # a method that this chip or build does not support
                failed[name] = reason_of(error)
                self.passed &= may_fail(name)
        if self.small:
            spend_s, rounds = 0.0, 1
        return time_interleaved(steps, self.device, spend_s=spend_s, rounds=rounds), failed

    def extra_mib(self, step: Callable[[], object]) -> float:
        """Return the peak memory of one pass above the usage before it; NaN on the CPU."""
        if self.small:
            return float("nan")
        step()
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        baseline = torch.accelerator.memory_allocated()
        step()
        return (torch.accelerator.max_memory_allocated() - baseline) / 2**20
