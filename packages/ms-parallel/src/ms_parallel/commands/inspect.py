"""`ms-parallel inspect`: summarize a run before it starts."""

import logging
from argparse import ArgumentParser, Namespace
from pathlib import Path

from msgspec.structs import asdict

from ms_parallel.command_line import GIB, add_json, print_json
from ms_parallel.settings.run_file import add_run_file

logger = logging.getLogger(__name__)

CATEGORIES = ("weights", "gradients", "moments", "activations", "buffers")
HELP = "summarize a run before it starts: parameters, memory per rank, layout"
EXAMPLE = "ms-parallel inspect RUN.toml layout.pipeline=4"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run_file(parser)
    parser.set_defaults(has_run_file=True)
    add_json(parser)


def _exists(dataset: str) -> bool:
    return dataset == "stdlib" or Path(dataset).exists()


def run(options: Namespace) -> int:
    """Print a summary of a run without starting it."""
    from ms_parallel.run_file import read_run_file

    run = read_run_file(options.run_file, options.set)  # before torch is imported
    from ms_parallel.training.engine_setup import layout_of
    from ms_parallel.training.inspection import format_groups, inspect
    from ms_parallel.training.memory import run_memory
    from ms_parallel.training.microbatch_size import predict_microbatch_size

    out = run.options.output_dir
    candidates = (Path(run.dataset), out / "shards", out / "dataset")
    shards = next((folder for folder in candidates if (folder / "index.json").is_file()), None)
    layout = layout_of(run.options)
    settings = predict_microbatch_size(
        run.options, layout, lambda rows: run_memory(run.options, layout, shards, rows)
    )
    if shards is None and not _exists(run.dataset):
        logger.warning(
            "dataset %r does not exist; train needs a folder of shards, raw text, or 'stdlib'",
            run.dataset,
        )
    facts = inspect(settings, layout, shards)
    memory = run_memory(settings, layout, shards)
    if options.json:
        return print_json({**asdict(facts), "memory": memory})
    print(f"model        {facts.architecture}, {facts.parameters:,} parameters")
    print(f"layout       {facts.layout}: {facts.processes} processes")
    print(
        f"per step     {facts.tokens_per_step:,} tokens, {facts.microbatches} microbatches per"
        " data rank"
    )
    print(f"\n{facts.picture}\n")
    if facts.context is not None:
        print(
            f"attention over context ranks: {facts.context.attention}; the slowest rank costs"
            f" {facts.context.imbalance:.3f} times the mean, with zig-zag"
            f" {facts.context.zig_zag_imbalance:.3f}\n"
        )
    if facts.experts is not None:
        print(
            f"experts per layer: {facts.experts.experts}, {facts.experts.each} per rank, each"
            f" sharded over {facts.experts.shards}\n"
            f"expert groups (ranks): {format_groups(facts.experts.groups)}\n"
        )
    print("predicted peak memory per rank, GiB")
    print(f"  {'':11}  {'  '.join(f'{name:>11}' for name in CATEGORIES)}  {'all':>11}  layers")
    for rank, memory_rank in zip(facts.ranks, memory, strict=True):
        sizes = [*(getattr(memory_rank, name) for name in CATEGORIES), memory_rank.total]
        columns = "  ".join(f"{size / GIB:11.3f}" for size in sizes)
        print(f"  pipeline {rank.pipeline:<2}  {columns}  {rank.layers}")
    return 0
