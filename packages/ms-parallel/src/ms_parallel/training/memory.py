"""Predicts the peak memory of a run from its settings."""

from pathlib import Path

from ms_parallel.cluster.layout import Layout
from ms_parallel.planner.fake_cluster import in_process_group
from ms_parallel.planner.memory import predict_memory
from ms_parallel.planner.rank_memory import RankMemory
from ms_parallel.training.engine_setup import memory_arguments
from ms_parallel.training.options import Options
from ms_parallel.training.planning.subprocesses import MemoryArguments, ask_memory, decode_path


def run_memory(
    options: Options, layout: Layout, shards: Path | None = None, rows: int | None = None
) -> list[RankMemory]:
    """Predict the peak memory of a process of each pipeline rank.

    A process that has joined a process group does this in a subprocess.

    Args:
        options: options of the run.
        layout: layout of the run, for any number of processes.
        shards: dataset, if it exists already; its first rows give the document boundaries.
        rows: microbatch size. None: from the options.

    Raises:
        ConfigError: sizes do not fit together.
        LayoutError: the layout does not fit the model.
    """
    if in_process_group():
        return ask_memory(options, layout, shards, rows)
    return predict_memory(**memory_arguments(options, layout, shards, rows))


def run_memory_in_subprocess(arguments: MemoryArguments) -> list[RankMemory]:
    """Call `run_memory` with the arguments from `ask_memory`; runs in the subprocess."""
    shards = decode_path(arguments.shards)
    return run_memory(arguments.run.options, arguments.layout, shards, arguments.rows)
