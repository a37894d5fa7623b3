"""`ms-parallel schedule`: prove a pipeline schedule and draw its timeline."""

import shutil
import sys
from argparse import ArgumentParser, Namespace

from ms_parallel.command_line import add_json, print_json
from ms_parallel.entry import file_argument, path_argument

HELP = "prove a pipeline schedule and draw its timeline"
EXAMPLE = (
    "ms-parallel schedule zb-v --stages 4 --microbatches 8"
    " --costs backward_input=1.3,latency=0.1 --out zb-v.svg"
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "schedule",
        type=path_argument,
        metavar="NAME|FILE",
        help="a generator, a table (.csv), `search`, or a recorded step (.json)",
    )
    parser.add_argument(
        "--stages",
        type=int,
        metavar="P",
        help="number of pipeline ranks (V schedules have two stages per rank)",
    )
    parser.add_argument("--microbatches", type=int, metavar="M", help="microbatches per step")
    parser.add_argument(
        "--costs",
        default="",
        metavar="COSTS",
        help="costs of forward, backward_input, backward_weight, activation (each 1) and latency"
        " (0), as forward=1:1:1:1.4,latency=0.1",
    )
    parser.add_argument(
        "--memory-cap", type=float, metavar="N", help="memory limit per rank for `search`"
    )
    parser.add_argument(
        "--measured",
        type=path_argument,
        metavar="FILE.json",
        help="a recorded step, drawn next to the simulated one",
    )
    parser.add_argument(
        "--out", type=file_argument, metavar="FILE", help="write .svg, .html or .csv"
    )
    add_json(parser)


def run(options: Namespace) -> int:
    """Print the summary and the timeline of a schedule."""
    from ms_parallel.planner.explain import draw_to, explain
    from ms_parallel.schedules.drawing.text import draw_text, path_text

    explanation = explain(
        str(options.schedule),
        ranks=options.stages,
        microbatches=options.microbatches,
        costs=options.costs,
        memory_cap=options.memory_cap,
        measured=options.measured,
    )
    if options.out is not None:
        draw_to(options.out, explanation)
    if options.json:
        return print_json(explanation.summary)
    width = shutil.get_terminal_size((100, 24)).columns
    color = sys.stdout.isatty()
    print(
        draw_text(*explanation.lines, titles=explanation.titles, width=width, color=color), end=""
    )
    print(f"critical path: {path_text(explanation.timeline)}")
    if pairs := explanation.summary.overlapped_pairs:
        print(f"{pairs} overlapped pairs are timed and run one after the other")
    if explanation.summary.lower_bound is not None:
        print(f"no schedule is shorter than {explanation.summary.lower_bound:.4g}")
    return 0
