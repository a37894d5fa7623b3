"""Facts of a run before it starts: parameters, layers of each stage, ranks of the layout.

Memory is predicted in `ms_parallel.training.memory`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.assembly import sharded_layout
from ms_parallel.models.registry import model_plan, parameter_shapes
from ms_parallel.pipeline.choice import SEARCH, ScheduleTables
from ms_parallel.pipeline.layer_split import ScheduleChoice
from ms_parallel.planner.searched_schedule import FILE, read_searched_schedule
from ms_parallel.schedules.checks.verify import verify
from ms_parallel.split.context.assignment import document_starts
from ms_parallel.split.context.kinds import HeadSizes, resolve_context_mode, ulysses_size
from ms_parallel.split.context.splitter import ContextLoad, assign_positions, windows_of
from ms_parallel.split.stages import cut_layers
from ms_parallel.training.engine_setup import first_documents, fit_model, microbatch
from ms_parallel.training.options import Options

FLOAT32_BYTES, BFLOAT16_BYTES = 4, 2
MAX_LISTED_RANKS = 512
"""Maximum number of ranks whose expert groups are listed."""
MAX_WIDTH = 110
"""Maximum width of a picture in characters."""
MAX_COLUMNS, MAX_ROWS = 16, 16
"""Maximum data ranks and pipeline stages in a picture; the former also limits ranks per cell."""


class RankInspection(msgspec.Struct, frozen=True, kw_only=True):
    """Layers and parameters of one pipeline rank's stages."""

    pipeline: int
    layers: int
    parameters: int
    """Parameters of its stages, without dividing by tensor or data sharding."""


class ExpertInspection(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of the experts of a layer."""

    experts: int
    """Experts of a layer."""
    each: int
    """Experts per rank of the expert axis."""
    shards: int
    """Number of processes over which the weights of an expert are sharded."""
    groups: list[list[int]]
    """Expert groups of the first pipeline stage: ranks in the order of the expert axis."""


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a run."""

    architecture: str
    parameters: int
    """Parameters of the model; tied weights count once."""
    layout: str
    processes: int
    tokens_per_step: int
    microbatches: int
    """Microbatches per step on a data rank."""
    ranks: list[RankInspection]
    picture: str
    context: ContextLoad | None
    """Balance of attention over context ranks in the first batch of the dataset, or for one
    document per row without a dataset; None without the context axis."""
    experts: ExpertInspection | None
    """Distribution of the experts; None without the expert axis."""


def inspect(options: Options, layout: Layout, shards: Path | None = None) -> Inspection:
    """Describe a run without starting it.

    Args:
        options: options of the run.
        layout: layout of the run.
        shards: dataset, if it exists already; sets the model's vocabulary.

    Raises:
        ConfigError: sizes do not fit together.
        LayoutError: the layout does not fit the model.
    """
    layout = sharded_layout(layout, options.sharding)
    config = fit_model(options, layout, shards)
    shapes = parameter_shapes(config)
    rows = options.batch_size // layout.data_ranks
    size = microbatch(options, layout) or rows
    plan = model_plan(config)
    count = -(-rows // size)
    tables = ScheduleTables(_schedule_of(options, layout, count), layout.pipeline)
    schedule = tables.training(count)
    stages = cut_layers(config.num_hidden_layers, schedule.stages, plan.cuts, tables.layers)
    verify(schedule)
    ranks = [
        _rank(rank, [stages[stage] for stage in schedule.stages_of(rank)], shapes, config)
        for rank in range(layout.pipeline)
    ]
    return Inspection(
        architecture=config.model_type,
        parameters=sum(shape.numel() for shape in shapes.values()),
        layout=str(layout),
        processes=layout.world_size,
        tokens_per_step=options.batch_size * options.sequence_length,
        microbatches=count,
        ranks=ranks,
        picture=picture(layout),
        context=_context_load(options, layout, config, shards),
        experts=None if layout.expert == 1 else _expert_facts(layout, config),
    )


def _context_load(
    options: Options, layout: Layout, config: Any, shards: Path | None
) -> ContextLoad | None:
    """Predict the load on context ranks for the first rows of a data rank, as an engine would."""
    if layout.context == 1:
        return None
    rows, length = options.batch_size // layout.data_ranks, options.sequence_length
    rows = microbatch(options, layout) or rows
    documents = first_documents(options, rows, shards)
    sizes = HeadSizes.of(config, layout.tensor)
    dtype_bytes = BFLOAT16_BYTES if options.mixed_precision else FLOAT32_BYTES
    kind = resolve_context_mode(
        options.context_attention, layout.context, sizes, rows * length, dtype_bytes
    )
    nodes = layout.context // ulysses_size(kind, layout.context, sizes)
    starts = document_starts(documents, rows, length)
    return assign_positions(starts, windows_of(config), nodes, kind, options.context_balance)[1]


def _expert_facts(layout: Layout, config: Any) -> ExpertInspection:
    experts = config.mixture.choice.num_experts
    groups: dict[tuple[int, int], list[int]] = {}
    for rank in range(min(layout.world_size // layout.pipeline, MAX_LISTED_RANKS)):
        # Tensor ranks are adjacent, token ranks follow.
        token_rank, tensor = divmod(rank, layout.tensor)
        groups.setdefault((token_rank // layout.expert, tensor), []).append(rank)
    return ExpertInspection(
        experts=experts,
        each=experts // layout.expert,
        shards=layout.expert_shards,
        groups=list(groups.values()),
    )


def _schedule_of(options: Options, layout: Layout, microbatches: int) -> ScheduleChoice:
    """Schedule of the run; 1F1B if it is not searched yet, as a search may use the same memory."""
    if options.schedule != SEARCH:
        return options.schedule
    searched = read_searched_schedule(options.output_dir / FILE)
    if searched is None:
        return "1f1b"
    table = searched.staged.schedule
    fits = (table.ranks, table.microbatches) == (layout.pipeline, microbatches)
    return searched.staged if fits else "1f1b"


def _rank(
    rank: int, stages: list[range], shapes: dict[str, torch.Size], config: Any
) -> RankInspection:
    """Count the layers and parameters of a rank's stages."""
    parameters = sum(
        shape.numel()
        for name, shape in shapes.items()
        if any(_stage_has(name, layers, config) for layers in stages)
    )
    return RankInspection(pipeline=rank, layers=sum(map(len, stages)), parameters=parameters)


def _stage_has(name: str, layers: range, config: Any) -> bool:
    parts = name.split(".")
    if "layers" in parts:
        return int(parts[parts.index("layers") + 1]) in layers
    is_last = bool(layers.stop == config.num_hidden_layers)
    if "embed" not in name:
        return is_last
    # A tied embedding is also on the last stage, as its head.
    return layers.start == 0 or bool(config.tie_word_embeddings and is_last)


def picture(layout: Layout) -> str:
    """Draw the ranks of a layout: a row per pipeline stage, a column per data rank.

    Ranks that read the same rows are in brackets, with bars between context ranks. Layouts that
    are too wide show only the first and last data ranks.
    >>> print(picture(Layout(pipeline=2, data=2)))
                data 0  data 1
    pipeline 0  [0]     [1]
    pipeline 1  [2]     [3]
    >>> print(picture(Layout(data=2, context=2, tensor=2)))
                data 0       data 1
    pipeline 0  [0 1 | 2 3]  [4 5 | 6 7]
    >>> print(picture(Layout(pipeline=2, data=64, tensor=2)))
                data 0     data 1     ...  data 63
    pipeline 0  [0 1]      [2 3]      ...  [126 127]
    pipeline 1  [128 129]  [130 131]  ...  [254 255]
    """
    stages = _ends(range(layout.pipeline), MAX_ROWS)
    table: list[str] = []
    # Narrower and narrower: fewer columns, then ranges instead of lists of ranks.
    for columns, ranks in ((MAX_COLUMNS, MAX_COLUMNS), (3, MAX_COLUMNS), (3, 1)):
        table = _table(layout, _ends(range(layout.data_ranks), columns), stages, ranks)
        if max(map(len, table)) <= MAX_WIDTH:
            break
    return "\n".join(table)


def _table(
    layout: Layout, data_ranks: Sequence[int | None], stages: Sequence[int | None], limit: int
) -> list[str]:
    """Lines of a table of ranks; None is drawn as "...", cells of over `limit` ranks as ranges."""
    size = layout.world_size // layout.pipeline // layout.data_ranks  # ranks that share rows
    rows = [["", *("..." if reader is None else f"data {reader}" for reader in data_ranks)]]
    for stage in stages:
        if stage is None:
            rows.append(["...", *("" for _ in data_ranks)])
            continue
        first = stage * layout.data_ranks
        cells = (
            "..."
            if reader is None
            else f"[{_cell((first + reader) * size, size, layout.tensor, limit)}]"
            for reader in data_ranks
        )
        rows.append([f"pipeline {stage}", *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(data_ranks) + 1)]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]


def _cell(first: int, size: int, tensor: int, limit: int) -> str:
    """Format ranks from `first`, with bars between context ranks; a range if over `limit`."""
    if size > limit:
        return f"{first} to {first + size - 1}"
    ranks = range(first, first + size)
    parts = (ranks[start : start + tensor] for start in range(0, size, tensor))
    return " | ".join(" ".join(map(str, part)) for part in parts)


def _ends(values: Sequence[int], limit: int) -> list[int | None]:
    """All values, or the first ones, None and the last."""
    if len(values) <= limit:
        return [*values]
    return [*values[: limit - 1], None, values[-1]]


def format_groups(groups: Sequence[Sequence[int]]) -> str:
    """Format groups of ranks on one line, abbreviated with dots.

    >>> format_groups([[0, 1], [2, 3]])
    '0 1 | 2 3'
    >>> format_groups([range(64), range(64, 128)])
    '0 1 ... 63 | 64 65 ... 127'
    """

    def line(ranks: Sequence[int]) -> str:
        elements = _ends(ranks, len(ranks) if len(ranks) <= 8 else 3)
        return " ".join("..." if rank is None else str(rank) for rank in elements)

    elements = _ends(range(len(groups)), 4)
    return " | ".join("..." if number is None else line(groups[number]) for number in elements)
