"""What a run will hold in memory at its peak, predicted from its settings."""

from pathlib import Path

from ms_parallel.cluster.layout import Layout
from ms_parallel.planner.fake_cluster import has_met_others
from ms_parallel.planner.memory import predict_memory
from ms_parallel.planner.rank_memory import RankMemory
from ms_parallel.training.fitting import memory_question
from ms_parallel.training.options import Options
from ms_parallel.training.planning.questions import MemoryQuestion, ask_memory, path_told


def run_memory(
    options: Options, layout: Layout, shards: Path | None = None, rows: int | None = None
) -> list[RankMemory]:
    """Predict what a process of each pipeline rank holds at its peak, before it allocates anything.

    A process that has met others asks another one.

    Args:
        options: the run's.
        layout: how it is split, over any number of processes.
        shards: the dataset, if it is there already; rows are packed as its first ones are.
        rows: of a microbatch; as the options say by default.

    Raises:
        ConfigError: sizes do not fit one another.
        LayoutError: the layout does not fit the model.
    """
    if has_met_others():
        return ask_memory(options, layout, shards, rows)
    return predict_memory(**memory_question(options, layout, shards, rows))


def answer(question: MemoryQuestion) -> list[RankMemory]:
    """Answer a question of `ask_memory`, in the other process."""
    shards = path_told(question.shards)
    return run_memory(question.run.options, question.layout, shards, question.rows)
