"""`ms-parallel prove`: hold a model under many layouts against one process."""

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from ms_parallel.command_line import add_json, print_json
from ms_parallel.entry import file_argument

if TYPE_CHECKING:
    from ms_parallel.proof.records import Outcome, Proof

HELP = "hold a model's gradients under drawn layouts against one process, and look for leaks"
EXAMPLE = "ms-parallel prove qwen3 --processes 4 --html proof.html"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a family, a folder, a class or model_type of transformers, or module:function",
    )
    parser.add_argument("--processes", type=int, default=4, help="most of a layout (default 4)")
    parser.add_argument("--cases", type=int, default=16, help="ways of running it (default 16)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batch and draw")
    parser.add_argument("--html", type=file_argument, metavar="FILE", help="write a page")
    add_json(parser)


def run(options: Namespace) -> int:
    """Prove a model; print the proof or the smallest counterexample; return 1 unless it holds."""
    from ms_parallel.errors import ConfigError
    from ms_parallel.files.model_name import missing_model

    if (problem := missing_model(options.model)) is not None:
        raise ConfigError(f"MODEL must be an architecture or a local folder: {problem}")
    from ms_parallel.files.durable import write_file
    from ms_parallel.proof.page import draw_page
    from ms_parallel.proof.prove import prove

    for name, most in (("processes", 16), ("cases", 1000)):
        if not 1 <= getattr(options, name) <= most:
            raise ConfigError(f"--{name} is {getattr(options, name)}; give 1 to {most}")
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
    held = [each for each in proof.outcomes if not each.refused and not each.found]
    if proof.smallest is not None:
        case, found = proof.smallest
        where = "" if found.layer is None else f" (layer {found.layer})"
        lines += [f"counterexample  {case.text}: {found.what}{where}"]
        failed = sum(1 for each in proof.outcomes if each.found)
        lines += [f"                {failed} of {len(proof.outcomes)} cases do not hold"]
    compared = max((each.compared for each in held), default=0)
    apart = max((each.apart for each in held), default=0.0)
    checks = sorted({check for each in held for check in each.checks})
    lines += [
        f"held            {len(held)} cases, {compared} gradients each, at most {apart:.1e} apart",
        f"checked         {', '.join(checks) or 'nothing'}",
    ]
    for each in proof.outcomes:
        if each.refused:
            lines.append(f"refused         {each.case.text}: {each.refused}")
    lines.append(
        f"took            {proof.seconds:.0f} s, seed {proof.seed}, tolerance {proof.tolerance:g}"
    )
    return "\n".join(lines)
