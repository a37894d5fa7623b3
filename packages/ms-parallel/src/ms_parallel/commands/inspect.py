"""`ms-parallel inspect`: say what a run will be."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ms_parallel.command_line import GIB, add_json, print_json
from ms_parallel.settings.run_file import add_run_file

HELP = "say what a run will be: parameters, memory of each rank, layout"
EXAMPLE = "ms-parallel inspect RUN.toml --set layout.pipeline=4"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes."""
    add_run_file(parser)
    parser.set_defaults(has_run_file=True)
    add_json(parser)


def run(options: Namespace) -> int:
    """Print the facts of a run without starting it."""
    from ms_parallel.run_file import read_run_file
    from ms_parallel.training.fitting import layout_of
    from ms_parallel.training.inspection import inspect

    run = read_run_file(options.run_file, options.set)
    candidates = (Path(run.dataset), run.options.output_dir / "shards")
    shards = next((folder for folder in candidates if (folder / "index.json").is_file()), None)
    facts = inspect(run.options, layout_of(run.options), shards)
    if options.json:
        return print_json(facts)
    print(f"model        {facts.architecture}, {facts.parameters:,} parameters")
    print(f"layout       {facts.layout}: {facts.processes} processes")
    print(
        f"a step       {facts.tokens_per_step:,} tokens, {facts.microbatches} microbatches a"
        " data rank"
    )
    print(f"\n{facts.picture}\n")
    if facts.context is not None:
        print(
            f"attention over context ranks: {facts.context.attention}; the slowest has"
            f" {facts.context.imbalance:.3f} times the mean cost, by zig-zag"
            f" {facts.context.zig_zag_imbalance:.3f}\n"
        )
    if facts.experts is not None:
        groups = " | ".join(" ".join(map(str, ranks)) for ranks in facts.experts.groups)
        print(
            f"experts of a layer: {facts.experts.experts}, {facts.experts.each} a rank, each"
            f" sharded over {facts.experts.shards}; shared out by ranks {groups}\n"
        )
    print("memory of a rank, estimated")
    for rank in facts.ranks:
        print(
            f"  pipeline {rank.pipeline}: {rank.layers} layers, {rank.parameters:,} parameters;"
            f" weights, gradients, moments {rank.state_bytes / GIB:.3f} GiB, and"
            f" {rank.gathered_bytes / GIB:.3f} GiB whole between microbatches;"
            f" activations {rank.activation_bytes / GIB:.3f} GiB"
        )
    return 0
