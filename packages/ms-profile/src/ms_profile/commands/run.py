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
    "skip": "steps left alone at the start",
    "warmup": "steps before each window on which the tracer warms up",
    "active": "steps recorded in a window",
    "windows": "how many windows; 0 means without end",
    "every": "steps from the start of one window to the next",
}
SAVED_STDOUT: Final[list[int]] = []
"""The descriptor of stdout, where it is kept for JSON."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("--train-script", type=path_argument, required=True, metavar="FILE")
    parser.add_argument("--output-dir", type=folder_argument, required=True, metavar="DIR")
    parser.add_argument(
        "--metrics",
        default="communication_time,compute_time",
        metavar="NAMES",
        help=f"comma-separated, of {', '.join(METRICS)}; default: %(default)s",
    )
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="start N processes on this host by torchrun; without it, this process runs the script",
    )
    for name, meaning in STEPS.items():
        default = getattr(TraceSchedule(), name)
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{meaning}; {default}"
        )
    parser.add_argument("--overwrite", action="store_true", help="replace the run that DIR holds")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print what was recorded as JSON; what the script prints goes to stderr then",
    )
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="of the script")


def execute(options: argparse.Namespace) -> int:
    """Run the script; the exit code is its own, or 1 if not all could be recorded."""
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
            options=_options_of(plan),
            overwrite=options.overwrite,
        )
    if ProcessRank.from_environment().rank == 0 and LAUNCHED not in os.environ:
        _print_outcome(plan, outcome, as_json=options.json)
    # Under a launcher a rank that fails takes the others with it: a loss is not worth that.
    return outcome.exit_code or (0 if outcome.complete or "RANK" in os.environ else 1)


def _save_stdout() -> None:
    """Keep stdout for the one JSON document; what the script prints goes to stderr."""
    sys.stdout.flush()
    SAVED_STDOUT.append(os.dup(1))
    os.dup2(2, 1)


def _options_of(plan: Plan) -> list[str]:
    """Return the options that make the same plan in each of the processes."""
    numbers = [word for name in STEPS for word in (f"--{name}", str(getattr(plan.schedule, name)))]
    named = ["--train-script", str(plan.script), "--output-dir", str(plan.output_dir)]
    return [*named, "--metrics", ",".join(plan.metrics), *numbers, "--", *plan.arguments]


def _print_outcome(plan: Plan, outcome: RunOutcome, *, as_json: bool) -> None:
    """Print what was recorded; words go to stderr, as stdout is the script's or JSON's."""
    if as_json:
        os.write(SAVED_STDOUT[0], msgspec.json.encode(outcome.ranks) + b"\n")
    for rank in outcome.ranks:
        if rank.status == "running":
            print(f"ms-profile: rank {rank.rank} {_end_of(rank, outcome)}", file=sys.stderr)
        for warning in rank.warnings:
            print(f"ms-profile: rank {rank.rank}: {plain(warning)}", file=sys.stderr)
    if not outcome.ranks:
        print(f"ms-profile: {plan.output_dir} holds no rank's record; was it removed while the "
              "script ran?", file=sys.stderr)  # fmt: skip
        return
    traced = max((sum(trace.steps for trace in rank.traces) for rank in outcome.ranks), default=0)
    steps = max((rank.steps for rank in outcome.ranks), default=0)
    if not traced:
        unsaid = any(rank.exit_code is None for rank in outcome.ranks)
        lost = any(not rank.complete for rank in outcome.ranks)
        reason = _cut_short(plan) if unsaid else _why_nothing(plan.schedule, steps)
        print(f"ms-profile: {'no trace was saved' if lost else reason}", file=sys.stderr)
        return
    print(
        f"ms-profile: {traced} of {steps} steps traced; see them with: "
        f"ms-profile report {plan.output_dir}",
        file=sys.stderr,
    )


def _end_of(rank: RankManifest, outcome: RunOutcome) -> str:
    """Tell how a rank that could not report ended."""
    code = outcome.exit_codes.get(rank.rank)
    if code is None:
        return "ended without a word after another rank had failed"
    if code < 0:
        named = {number.value: number.name for number in signal.Signals}
        return f"ended without a word: killed by {named.get(-code, f'signal {-code}')}"
    return f"ended itself with exit code {code} before it could report"


def _cut_short(plan: Plan) -> str:
    return (
        "no window of traced steps was saved before a rank ended; what is left of the steps is "
        f"seen with: ms-profile logs {plan.output_dir}, and ms-profile report "
        f"{plan.output_dir}/ring"
    )


def _why_nothing(schedule: TraceSchedule, steps: int) -> str:
    if not steps:
        return "no step was traced: no torch optimizer stepped in this process"
    first = schedule.skip + schedule.warmup
    return (
        f"no step was traced: the script ended after {steps} steps and the first window starts "
        f"at step {first}; lower --skip"
    )
