"""`ms-profile compare A B`: exit 1 when B is significantly slower."""

import argparse
import sys
from typing import Any, Final

import msgspec
from attrs import asdict
from rich.console import Console
from rich.table import Table

from ms_profile.analysis.comparison import (
    LEAST_CHANGE,
    LEAST_STEPS,
    Change,
    Comparison,
    RecordedSteps,
    compare,
    recorded_steps,
)
from ms_profile.analysis.whole_run import analyse
from ms_profile.commands.printable import cell, plain
from ms_profile.entry import path_argument
from ms_profile.errors import TraceError

HELP: Final = "compare two runs; exit code 1 when the second is significantly slower"
EXAMPLE: Final = "ms-profile compare ./before ./after --before ./before2 --after ./after2"
MOST_OPERATORS = 12
MOST_WAIT = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("before", type=path_argument, help="run A: folder or trace")
    parser.add_argument("after", type=path_argument, help="run B")
    more = "with three runs or more their scatter decides, on a busy host too; record in turns"
    parser.add_argument("--before", type=path_argument, action="append", default=[], metavar="RUN",
                        dest="more_before", help=f"another run of A; {more}")  # fmt: skip
    parser.add_argument("--after", type=path_argument, action="append", default=[], metavar="RUN",
                        dest="more_after", help="another run of B")  # fmt: skip
    parser.add_argument("--least-change", type=float, default=LEAST_CHANGE, metavar="SHARE",
                        help="smallest change that counts; 0.03")  # fmt: skip
    parser.add_argument("--most-wait", type=float, default=MOST_WAIT, metavar="SHARE",
                        help="of the time waiting for a CPU; refuse busier runs; 0.1")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")


def execute(options: argparse.Namespace) -> int:
    """Compare and print; 1 for a regression, 2 where a busy host hides whether it is one."""
    if not 0 <= options.least_change < 1:
        raise TraceError(f"--least-change is {options.least_change}; give a share, 0 to 1")
    if not options.most_wait >= 0:
        raise TraceError(f"--most-wait is {options.most_wait}; give a share, 0 to 1")
    recorded = _recorded(options)
    found = compare(
        analyse(options.before),
        analyse(options.after),
        least_change=options.least_change,
        recorded=recorded,
    )
    if options.json:
        print(msgspec.json.encode(_plain(found)).decode())
    else:
        _show(found, options.least_change)
    return 1 if found.regression else 0


def _tell(problem: str) -> None:
    print(f"ms-profile: {plain(problem)}", file=sys.stderr)


def _recorded(
    options: argparse.Namespace,
) -> tuple[list[RecordedSteps], list[RecordedSteps]] | None:
    """Return the logged steps of all runs; None for two runs of which one has none.

    Raises:
        TraceError: of two runs one was hindered too much, or of several one has no log.
    """
    folders = [[options.before, *options.more_before], [options.after, *options.more_after]]
    several = len(options.more_before) + len(options.more_after) > 0
    kinds: tuple[list[RecordedSteps], list[RecordedSteps]] = ([], [])
    for own, kind in zip(folders, kinds, strict=True):
        for folder in own:
            one = recorded_steps(folder, on_problem=_tell)
            if one is None and several:
                raise TraceError(
                    f"{folder} is no run with a log of {LEAST_STEPS} steps or more; several runs "
                    "are compared by their logs: record them with ms-profile run"
                )
            if one is None:
                return None
            if not several and (one.cpu_wait_share or 0) > options.most_wait:
                raise TraceError(
                    f"not measurable: {folder} waited for a CPU {one.cpu_wait_share:.0%} of the "
                    "time, its host was busy; compare several runs of each (--before, --after), "
                    "runs of a quiet host, or raise --most-wait"
                )
            kind.append(one)
    return kinds


def _plain(found: Comparison) -> dict[str, Any]:
    """Return the comparison for JSON, each change with its share."""

    def plain(one: Change) -> dict[str, Any]:
        return {**asdict(one), "share": one.share}

    series = {name: [*map(plain, getattr(found, name))] for name in ("phases", "operators")}
    return {**asdict(found), "step": plain(found.step), **series}


def _show(found: Comparison, least_change: float) -> None:
    table = Table(title="per step")
    for column in ("what", "before ms", "after ms", "change"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for one in (found.step, *found.phases, *found.operators[:MOST_OPERATORS]):
        change = "new" if one.share is None else f"{one.share:+.1%}"
        table.add_row(
            cell(one.name), f"{one.before_ns / 1e6:.3f}", f"{one.after_ns / 1e6:.3f}", change
        )
    Console().print(table)
    if found.not_measurable:
        print(f"not measurable in one run or both: {', '.join(found.not_measurable)}")
    share = found.step.share
    verdict = "no significant difference"
    if found.regression:
        verdict = "significant regression"
    elif found.improvement:
        verdict = "significant improvement"
    elif share is not None and abs(share) >= least_change:
        verdict = "inconclusive (not significant: too few steps, or too much scatter)"
    change = "" if share is None else f"{share:+.1%} a step, "
    way = "get faster" if share is not None and share < 0 else "get slower"
    print(f"{verdict}: {change}equal runs {way} by as much in {found.p_value:.1%} of cases")
    power = "with so few of them, or so unlike, no slow-down is found surely; record more"
    if found.detectable is not None:
        power = f"a slow-down of {found.detectable:.0%} is found in 9 of 10 such pairs of runs"
    runs = f" of {found.runs[0]} and {found.runs[1]} runs" if sum(found.runs) > 2 else ""
    print(f"{found.steps[0]} and {found.steps[1]} steps{runs} compared: {power}")
