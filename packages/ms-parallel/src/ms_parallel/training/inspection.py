"""Facts of a run before it starts: parameters, layers of each stage, ranks of the layout.

Memory is predicted in `ms_parallel.training.memory` alone.
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
from ms_parallel.pipeline.layer_split import Choice
from ms_parallel.planner.found_schedule import FILE, read_found
from ms_parallel.schedules.checks.verify import verify
from ms_parallel.split.context.assignment import document_starts
from ms_parallel.split.context.kinds import HeadSizes, choose, traders
from ms_parallel.split.context.splitter import ContextLoad, share_out, windows_of
from ms_parallel.split.stages import cut_layers
from ms_parallel.training.fitting import first_documents, fit_model, microbatch
from ms_parallel.training.options import Options

FLOAT32_BYTES, BFLOAT16_BYTES = 4, 2
MOST_DRAWN = 512
"""Ranks of expert groups that are listed."""
LINE = 110
"""Longest line of a picture."""
MOST_COLUMNS, MOST_ROWS = 16, 16
"""Data ranks and pipeline stages of a picture, and ranks of a cell."""


class RankInspection(msgspec.Struct, frozen=True, kw_only=True):
    """Layers and parameters of one pipeline rank's stages."""

    pipeline: int
    layers: int
    parameters: int
    """Parameters of its stages, counted in full although a process may hold a shard of each."""


class ExpertInspection(msgspec.Struct, frozen=True, kw_only=True):
    """How the experts of a layer are shared out."""

    experts: int
    """Experts of a layer."""
    each: int
    """How many of them a rank of the expert axis has, whose tokens come from all of its group."""
    shards: int
    """Over how many processes that have the same ones they are sharded further."""
    groups: list[list[int]]
    """Ranks of the first pipeline stage that share out the experts among them, in their order."""


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """A run in a few numbers."""

    architecture: str
    parameters: int
    """Parameters of the whole model; tied weights count once."""
    layout: str
    processes: int
    tokens_per_step: int
    microbatches: int
    """Microbatches that pass through a data rank in one step."""
    ranks: list[RankInspection]
    picture: str
    context: ContextLoad | None
    """How evenly context ranks share out attention in the first batch of the dataset, or where
    there is none yet, in rows of one document; None without the axis."""
    experts: ExpertInspection | None
    """How experts are shared out; None without the axis."""


def inspect(options: Options, layout: Layout, shards: Path | None = None) -> Inspection:
    """Say what a run will be, without starting it.

    Args:
        options: the run's.
        layout: how it is split.
        shards: the dataset, if it is there already; its vocabulary is the model's.

    Raises:
        ConfigError: sizes do not fit one another.
        LayoutError: the layout does not fit the model.
    """
    layout = sharded_layout(layout, options.sharding)
    config = fit_model(options, layout, shards)
    shapes = parameter_shapes(config)
    rows = options.batch_size // layout.readers
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
    """Predict the load that an engine would find in the first rows of a data rank."""
    if layout.context == 1:
        return None
    rows, length = options.batch_size // layout.readers, options.sequence_length
    rows = microbatch(options, layout) or rows
    documents = first_documents(options, rows, shards)
    sizes = HeadSizes.of(config, layout.tensor)
    width = BFLOAT16_BYTES if options.mixed_precision else FLOAT32_BYTES
    kind = choose(options.context_attention, layout.context, sizes, rows * length, width)
    nodes = layout.context // traders(kind, layout.context, sizes)
    starts = document_starts(documents, rows, length)
    return share_out(starts, windows_of(config), nodes, kind, options.context_balance)[1]


def _expert_facts(layout: Layout, config: Any) -> ExpertInspection:
    experts = config.mixture.choice.num_experts
    groups: dict[tuple[int, int], list[int]] = {}
    for rank in range(min(layout.world_size // layout.pipeline, MOST_DRAWN)):
        token_rank, tensor = divmod(rank, layout.tensor)
        groups.setdefault((token_rank // layout.expert, tensor), []).append(rank)
    return ExpertInspection(
        experts=experts,
        each=experts // layout.expert,
        shards=layout.expert_shards,
        groups=list(groups.values()),
    )


def _schedule_of(options: Options, layout: Layout, microbatches: int) -> Choice:
    """Return the run's schedule; if it is yet to be found, 1F1B, whose memory it may take."""
    if options.schedule != SEARCH:
        return options.schedule
    found = read_found(options.output_dir / FILE)
    if found is None:
        return "1f1b"
    table = found.staged.schedule
    fits = (table.ranks, table.microbatches) == (layout.pipeline, microbatches)
    return found.staged if fits else "1f1b"


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
    last = bool(layers.stop == config.num_hidden_layers)
    if "embed" not in name:
        return last
    return layers.start == 0 or bool(config.tie_word_embeddings and last)


def picture(layout: Layout) -> str:
    """Draw the ranks of a layout: a row per pipeline stage, a column per data rank.

    Ranks that share the same rows are in brackets, context ranks between bars. Of layouts wider
    than a line only the first and last data ranks are drawn.

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
    stages = _ends(range(layout.pipeline), MOST_ROWS)
    table: list[str] = []
    for columns, ranks in ((MOST_COLUMNS, MOST_COLUMNS), (3, MOST_COLUMNS), (3, 1)):
        table = _table(layout, _ends(range(layout.readers), columns), stages, ranks)
        if max(map(len, table)) <= LINE:
            break
    return "\n".join(table)


def _table(
    layout: Layout, readers: Sequence[int | None], stages: Sequence[int | None], most: int
) -> list[str]:
    """Lines of a table of the ranks; None is drawn as dots, cells of over `most` as ranges."""
    size = layout.world_size // layout.pipeline // layout.readers  # ranks that share rows
    rows = [["", *("..." if reader is None else f"data {reader}" for reader in readers)]]
    for stage in stages:
        if stage is None:
            rows.append(["...", *("" for _ in readers)])
            continue
        first = stage * layout.readers
        cells = (
            "..."
            if reader is None
            else f"[{_cell((first + reader) * size, size, layout.tensor, most)}]"
            for reader in readers
        )
        rows.append([f"pipeline {stage}", *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(readers) + 1)]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]


def _cell(first: int, size: int, tensor: int, most: int) -> str:
    """Ranks from `first`, context ranks between bars; a range if there are more than `most`."""
    if size > most:
        return f"{first} to {first + size - 1}"
    ranks = range(first, first + size)
    parts = (ranks[start : start + tensor] for start in range(0, size, tensor))
    return " | ".join(" ".join(map(str, part)) for part in parts)


def _ends(values: Sequence[int], most: int) -> list[int | None]:
    """All values, or the first and the last of them around None."""
    if len(values) <= most:
        return [*values]
    return [*values[: most - 1], None, values[-1]]


def listed(groups: Sequence[Sequence[int]]) -> str:
    """Groups of ranks in one line, with dots where there are many.

    >>> listed([[0, 1], [2, 3]])
    '0 1 | 2 3'
    >>> listed([range(64), range(64, 128)])
    '0 1 ... 63 | 64 65 ... 127'
    """

    def line(ranks: Sequence[int]) -> str:
        shown = _ends(ranks, len(ranks) if len(ranks) <= 8 else 3)
        return " ".join("..." if rank is None else str(rank) for rank in shown)

    shown = _ends(range(len(groups)), 4)
    return " | ".join("..." if number is None else line(groups[number]) for number in shown)
