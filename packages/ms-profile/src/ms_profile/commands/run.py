"""`ms-profile run`: run a training script unchanged and record it."""

import argparse
import os
import signal
import sys
from typing import Final

import msgspec

from ms_profile.commands.printable import plain
from ms_profile.entry import folder_argument, path_argument
from ms_profile.log.manifest import RankManifest, TraceSchedule
from ms_profile.metrics import METRICS, parse_metrics
from ms_profile.recording.launch import LAUNCHED, RunOutcome, launch, run_here
from ms_profile.recording.plan import Plan, ProcessRank

HELP: Final = "run a training script unchanged, alone or under torchrun, and record it"
EXAMPLE: Final = (
    "ms-profile run --nproc-per-node 2 --train-script train.py --output-dir ./profile_results "
    "--metrics communication_time,compute_time -- --epochs 1\n"
    "example: torchrun --nproc-per-node 2 -m ms_profile run --train-script train.py"
    " --output-dir ./profile_results"
)
STEPS: Final = {
    "skip": "steps to skip before the first window",
    "warmup": "warmup steps of the tracer before each window",
    "active": "steps to trace per window",
    "windows": "number of windows; 0 for no limit",
    "every": "steps from the start of a window to the start of the next",
}
SAVED_STDOUT: Final[list[int]] = []
"""Duplicated descriptor of the original stdout while `--json` redirects stdout to stderr."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to the parser."""
    parser.add_argument("--train-script", type=path_argument, required=True, metavar="FILE")
    parser.add_argument("--output-dir", type=folder_argument, required=True, metavar="DIR")
    parser.add_argument(
        "--metrics",
        default="communication_time,compute_time",
        metavar="NAMES",
        help=f"comma-separated metrics, of {', '.join(METRICS)}; default: %(default)s",
    )
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="start N processes on this host with torchrun; default: run in this process",
    )
    for name, meaning in STEPS.items():
        default = getattr(TraceSchedule(), name)
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{meaning}; {default}"
        )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier run in DIR")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the recorded ranks as JSON; the script's stdout then goes to stderr",
    )
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="script arguments")


def execute(options: argparse.Namespace) -> int:
    """Run the script.

    Returns:
        The script's exit code; 1 if it succeeded but the recording is incomplete.
    """
    schedule = TraceSchedule(**{name: getattr(options, name) for name in STEPS})
    plan = Plan(
        script=options.train_script,
        arguments=tuple(options.arguments),
        output_dir=options.output_dir,
        metrics=parse_metrics(options.metrics),
        schedule=schedule,
    )
    if options.json:
        _save_stdout()
    if options.nproc_per_node is None:
        outcome = run_here(plan, overwrite=options.overwrite)
    else:
        outcome = launch(
            plan,
            processes=options.nproc_per_node,
            options=_worker_options(plan),
            overwrite=options.overwrite,
        )
    if ProcessRank.from_environment().rank == 0 and LAUNCHED not in os.environ:
        _print_outcome(plan, outcome, as_json=options.json)
    # Under a launcher a nonzero exit code stops all ranks; a lost recording does not justify that.
    return outcome.exit_code or (0 if outcome.complete or "RANK" in os.environ else 1)


def _save_stdout() -> None:
    """Save stdout for the JSON document and send the script's output to stderr."""
    sys.stdout.flush()
    SAVED_STDOUT.append(os.dup(1))
    os.dup2(2, 1)


def _worker_options(plan: Plan) -> list[str]:
    """Return the command-line options that recreate the plan in a worker process."""
    numbers = [word for name in STEPS for word in (f"--{name}", str(getattr(plan.schedule, name)))]
    paths = ["--train-script", str(plan.script), "--output-dir", str(plan.output_dir)]
    return [*paths, "--metrics", ",".join(plan.metrics), *numbers, "--", *plan.arguments]


def _print_outcome(plan: Plan, outcome: RunOutcome, *, as_json: bool) -> None:
    """Print the outcome to stderr, as stdout belongs to the script or to the JSON document."""
    if as_json:
        os.write(SAVED_STDOUT[0], msgspec.json.encode(outcome.ranks) + b"\n")
    for rank in outcome.ranks:
        if rank.status == "running":
            print(f"ms-profile: rank {rank.rank} {_describe_end(rank, outcome)}", file=sys.stderr)
        for warning in rank.warnings:
            print(f"ms-profile: rank {rank.rank}: {plain(warning)}", file=sys.stderr)
    if not outcome.ranks:
        print(f"ms-profile: {plan.output_dir} has no rank's record; was it removed while the "
              "script ran?", file=sys.stderr)  # fmt: skip
        return
    traced = max((sum(trace.steps for trace in rank.traces) for rank in outcome.ranks), default=0)
    steps = max((rank.steps for rank in outcome.ranks), default=0)
    if not traced:
        killed = any(rank.exit_code is None for rank in outcome.ranks)
        incomplete = any(not rank.complete for rank in outcome.ranks)
        reason = _no_window_saved(plan) if killed else _no_step_traced(plan.schedule, steps)
        print(f"ms-profile: {'no trace was saved' if incomplete else reason}", file=sys.stderr)
        return
    print(
        f"ms-profile: {traced} of {steps} steps traced; view them with: "
        f"ms-profile report {plan.output_dir}",
        file=sys.stderr,
    )


def _describe_end(rank: RankManifest, outcome: RunOutcome) -> str:
    """Describe how a rank that wrote no final report ended."""
    code = outcome.exit_codes.get(rank.rank)
    if code is None:
        return "was stopped without a report after another rank failed"
    if code < 0:
        signals = {number.value: number.name for number in signal.Signals}
        return f"left no report: killed by {signals.get(-code, f'signal {-code}')}"
    return f"exited with code {code} before it could report"


def _no_window_saved(plan: Plan) -> str:
    return (
        "no window of traced steps was saved before a rank ended; view the remaining records "
        f"with: ms-profile logs {plan.output_dir}, and ms-profile report "
        f"{plan.output_dir}/ring"
    )


def _no_step_traced(schedule: TraceSchedule, steps: int) -> str:
    if not steps:
        return "no step was traced: no torch optimizer stepped in this process"
    first = schedule.skip + schedule.warmup
    return (
        f"no step was traced: the script ended after {steps} steps and the first window starts "
        f"at step {first}; lower --skip"
    )
