"""What a run will hold in memory at its peak, predicted from its settings."""

from pathlib import Path

from ms_parallel.cluster.layout import Layout
from ms_parallel.planner.memory import predict_memory
from ms_parallel.planner.rank_memory import RankMemory
from ms_parallel.training.fitting import memory_question
from ms_parallel.training.options import Options


def run_memory(
    options: Options, layout: Layout, shards: Path | None = None, rows: int | None = None
) -> list[RankMemory]:
    """Predict what a process of each pipeline rank holds at its peak, before it allocates anything.

    Args:
        options: the run's.
        layout: how it is split, over any number of processes.
        shards: the dataset, if it is there already; rows are packed as its first ones are.
        rows: of a microbatch; as the options say by default.

    Raises:
        ConfigError: sizes do not fit one another.
        LayoutError: the layout does not fit the model.
    """
    return predict_memory(**memory_question(options, layout, shards, rows))
