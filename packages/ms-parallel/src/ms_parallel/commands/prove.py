"""`ms-parallel prove`: compare a model under many layouts with a single process."""

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from ms_parallel.command_line import add_json, print_json
from ms_parallel.entry import file_argument

if TYPE_CHECKING:
    from ms_parallel.proof.records import Outcome, Proof

HELP = "compare a model's gradients under random layouts with one process, and look for leaks"
EXAMPLE = "ms-parallel prove qwen3 --processes 4 --html proof.html"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a family, a folder, a class or model_type of transformers, or module:function",
    )
    parser.add_argument(
        "--processes", type=int, default=4, help="maximum processes of a layout (default 4)"
    )
    parser.add_argument(
        "--cases", type=int, default=16, help="number of layouts to try (default 16)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batch and layouts")
    parser.add_argument("--html", type=file_argument, metavar="FILE", help="write an HTML report")
    add_json(parser)


def run(options: Namespace) -> int:
    """Print the proof or the smallest counterexample; return 1 unless the proof holds."""
    from ms_parallel.errors import ConfigError
    from ms_parallel.files.model_name import missing_model

    if (problem := missing_model(options.model)) is not None:
        raise ConfigError(f"MODEL must be an architecture or a local folder: {problem}")
    from ms_parallel.files.durable import write_file
    from ms_parallel.proof.page import draw_page
    from ms_parallel.proof.prove import prove

    for name, limit in (("processes", 16), ("cases", 1000)):
        if not 1 <= getattr(options, name) <= limit:
            raise ConfigError(
                f"--{name} must be between 1 and {limit}, got {getattr(options, name)}"
            )
    proof = prove(
        options.model,
        processes=options.processes,
        cases=options.cases,
        seed=options.seed,
        done=_show,
    )
    if options.html is not None:
        write_file(options.html, draw_page(proof).encode())
    if options.json:
        print_json(proof)
    else:
        print(_text(proof))
    return 0 if proof.holds else 1


def _show(outcome: "Outcome") -> None:
    state = "refused" if outcome.refused else "does not hold" if outcome.found else "holds"
    print(f"  {outcome.case.text}: {state}", file=sys.stderr, flush=True)


def _text(proof: "Proof") -> str:
    lines = [f"model           {proof.model}: {proof.shrunk}"]
    passed = [outcome for outcome in proof.outcomes if not outcome.refused and not outcome.found]
    if proof.smallest is not None:
        case, failure = proof.smallest
        location = "" if failure.layer is None else f" (layer {failure.layer})"
        lines += [f"counterexample  {case.text}: {failure.what}{location}"]
        failed = sum(1 for outcome in proof.outcomes if outcome.found)
        lines += [f"                {failed} of {len(proof.outcomes)} cases failed"]
    compared = max((outcome.compared for outcome in passed), default=0)
    max_difference = max((outcome.apart for outcome in passed), default=0.0)
    checks = sorted({check for outcome in passed for check in outcome.checks})
    lines += [
        f"passed          {len(passed)} cases, {compared} gradients each, differences up to"
        f" {max_difference:.1e}",
        f"checked         {', '.join(checks) or 'nothing'}",
    ]
    for outcome in proof.outcomes:
        if outcome.refused:
            lines.append(f"refused         {outcome.case.text}: {outcome.refused}")
    lines.append(
        f"took            {proof.seconds:.0f} s, seed {proof.seed}, tolerance {proof.tolerance:g}"
    )
    return "\n".join(lines)
