"""`ms-profile compare A B`: exit with 1 if B is significantly slower."""

import argparse
import sys
from typing import Any, Final

import msgspec
from attrs import asdict
from rich.console import Console
from rich.table import Table

from ms_profile.analysis.comparison import (
    LEAST_CHANGE,
    MIN_STEPS,
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
MAX_OPERATORS = 12
MAX_WAIT = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to the parser."""
    parser.add_argument("before", type=path_argument, help="run A: folder or trace")
    parser.add_argument("after", type=path_argument, help="run B")
    several_help = (
        "with 3 or more runs the variance between runs decides; alternate A and B while recording"
    )
    parser.add_argument("--before", type=path_argument, action="append", default=[], metavar="RUN",
                        dest="more_before", help=f"another run of A; {several_help}")  # fmt: skip
    parser.add_argument("--after", type=path_argument, action="append", default=[], metavar="RUN",
                        dest="more_after", help="another run of B")  # fmt: skip
    parser.add_argument("--min-change", type=float, default=LEAST_CHANGE, metavar="SHARE",
                        help="smallest relative change that counts; default: 0.03")  # fmt: skip
    parser.add_argument("--max-wait", type=float, default=MAX_WAIT, metavar="SHARE",
                        help="largest share of time waiting for a CPU; busier runs are refused; "
                        "default: 0.1")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")


def execute(options: argparse.Namespace) -> int:
    """Compare two runs and print the result.

    Returns:
        1 for a significant regression, 0 otherwise.
    """
    if not 0 <= options.min_change < 1:
        raise TraceError(
            f"--min-change must be at least 0 and below 1, got {options.min_change}; 0.03 is 3%"
        )
    if not options.max_wait >= 0:
        raise TraceError(f"--max-wait must be at least 0, got {options.max_wait}; 0.1 is 10%")
    recorded = _recorded(options)
    comparison = compare(
        analyse(options.before),
        analyse(options.after),
        min_change=options.min_change,
        recorded=recorded,
    )
    if options.json:
        print(msgspec.json.encode(_to_json(comparison)).decode())
    else:
        _print_comparison(comparison, options.min_change)
    return 1 if comparison.regression else 0


def _warn(problem: str) -> None:
    print(f"ms-profile: {plain(problem)}", file=sys.stderr)


def _recorded(
    options: argparse.Namespace,
) -> tuple[list[RecordedSteps], list[RecordedSteps]] | None:
    """Return the logged steps of the A runs and the B runs; None for two runs without a log.

    Raises:
        TraceError: a run among several has no log, or a run of a pair waited too long for a CPU.
    """
    folders = [[options.before, *options.more_before], [options.after, *options.more_after]]
    has_several = len(options.more_before) + len(options.more_after) > 0
    steps: tuple[list[RecordedSteps], list[RecordedSteps]] = ([], [])
    for run_folders, side in zip(folders, steps, strict=True):
        for folder in run_folders:
            recorded = recorded_steps(folder, on_problem=_warn)
            if recorded is None and has_several:
                raise TraceError(
                    f"{folder} must be a run with a log of at least {MIN_STEPS} steps; several "
                    "runs are compared by their logs: record them with ms-profile run"
                )
            if recorded is None:
                return None
            if not has_several and (recorded.cpu_wait_share or 0) > options.max_wait:
                raise TraceError(
                    f"not measurable: {folder} waited for a CPU {recorded.cpu_wait_share:.0%} of "
                    "the time because its host was busy; compare several runs of each (--before, "
                    "--after), record on a quiet host, or raise --max-wait"
                )
            side.append(recorded)
    return steps


def _to_json(comparison: Comparison) -> dict[str, Any]:
    """Convert a comparison to JSON types, with the relative change of each row."""

    def with_share(change: Change) -> dict[str, Any]:
        return {**asdict(change), "share": change.share}

    series = {
        name: [*map(with_share, getattr(comparison, name))] for name in ("phases", "operators")
    }
    return {**asdict(comparison), "step": with_share(comparison.step), **series}


def _print_comparison(comparison: Comparison, min_change: float) -> None:
    table = Table(title="per step")
    for column in ("", "before ms", "after ms", "change"):
        table.add_column(column, justify="right" if column else "left")
    for row in (comparison.step, *comparison.phases, *comparison.operators[:MAX_OPERATORS]):
        change = "new" if row.share is None else f"{row.share:+.1%}"
        table.add_row(
            cell(row.name), f"{row.before_ns / 1e6:.3f}", f"{row.after_ns / 1e6:.3f}", change
        )
    Console().print(table)
    if comparison.not_measurable:
        print(f"not measurable in one run or both: {', '.join(comparison.not_measurable)}")
    share = comparison.step.share
    verdict = "no significant difference"
    if comparison.regression:
        verdict = "significant regression"
    elif comparison.improvement:
        verdict = "significant improvement"
    elif share is not None and abs(share) >= min_change:
        verdict = "inconclusive (not significant: too few steps, or too much variance)"
    change = "" if share is None else f"{share:+.1%} per step, "
    direction = "get faster" if share is not None and share < 0 else "get slower"
    print(
        f"{verdict}: {change}runs of equal speed {direction} by at least this much in "
        f"{comparison.p_value:.1%} of cases"
    )
    power = "too few steps or too much variance to detect any slowdown reliably; record more"
    if comparison.detectable is not None:
        power = (
            f"a slowdown of {comparison.detectable:.0%} is detected in 9 of 10 such pairs of runs"
        )
    runs = (
        f" of {comparison.runs[0]} and {comparison.runs[1]} runs"
        if sum(comparison.runs) > 2
        else ""
    )
    print(f"{comparison.steps[0]} and {comparison.steps[1]} steps{runs} compared: {power}")
