"""Estimates what a run will be: parameters, memory of each rank, where each rank stands."""

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
from ms_parallel.split.data_axis import EACH
from ms_parallel.split.memory.recompute_choice import budget_bytes
from ms_parallel.split.stages import cut_layers
from ms_parallel.training.fitting import first_documents, fit_model, microbatch
from ms_parallel.training.options import Options

FLOAT32_BYTES, BFLOAT16_BYTES = 4, 2
STATE_FLOATS = 4
"""A weight, its gradient and its two moments."""
MOST_DRAWN = 512
"""Ranks in a picture."""
ACTIVATION_BYTES = 34
"""Bytes that a block keeps a position and hidden unit in bfloat16, attention scores apart:
Korthikanti et al., "Reducing Activation Recomputation", 2022, table 2."""


class RankInspection(msgspec.Struct, frozen=True, kw_only=True):
    """What one pipeline rank's stages put on each of its processes. All sizes are estimates."""

    pipeline: int
    layers: int
    parameters: int
    """Parameters of its stages, counted whole though the rank may hold a part of each."""
    state_bytes: int
    """Its share of weights, gradients and moments."""
    gathered_bytes: int
    """What it holds beside its share between the microbatches of an update: weights that stay
    gathered, and gradients that stay whole."""
    activation_bytes: int
    """Kept for the backward pass by the microbatches in flight."""


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
    most = verify(schedule).peak_activations
    ranks = [
        _rank(
            rank,
            [stages[stage] for stage in schedule.stages_of(rank)],
            shapes,
            options=options,
            layout=layout,
            config=config,
            positions=size * options.sequence_length * most[rank],
        )
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
    rank: int,
    stages: list[range],
    shapes: dict[str, torch.Size],
    *,
    options: Options,
    layout: Layout,
    config: Any,
    positions: int,
) -> RankInspection:
    """Describe the rank that has these stages and holds `positions` for the backward at most."""
    plan = model_plan(config)
    held = whole = own = 0
    for name, shape in shapes.items():
        if any(_stage_has(name, layers, config) for layers in stages):
            whole += shape.numel()
            split = layout.tensor if plan.split_dim(name) is not None else 1
            held += -(-shape.numel() // (split * layout.shards))
            if layout.expert > 1 and plan.style(name).startswith("expert"):
                split *= layout.expert
            own += -(-shape.numel() // split)
    width = BFLOAT16_BYTES if options.mixed_precision else FLOAT32_BYTES
    position_bytes = config.hidden_size * ACTIVATION_BYTES * width // BFLOAT16_BYTES
    if options.recompute == "full" or budget_bytes(options.recompute):
        position_bytes = config.hidden_size * width
    layers = sum(map(len, stages))
    return RankInspection(
        pipeline=rank,
        layers=layers,
        parameters=whole,
        state_bytes=held * STATE_FLOATS * FLOAT32_BYTES,
        gathered_bytes=_gathered(own, held, width, options, layout),
        activation_bytes=positions * position_bytes * layers // len(stages) // layout.row_parts,
    )


def _gathered(own: int, held: int, width: int, options: Options, layout: Layout) -> int:
    """Count the bytes beside a share of `held` parameters, where the shares of all are `own`."""
    if options.reproducible:  # sums of 1, 2, 4, ... rows, each as much as all weights
        rows = options.batch_size // layout.readers
        sums = own * FLOAT32_BYTES * rows.bit_length() - held * FLOAT32_BYTES
        sharded = layout.shards > 1 or options.mixed_precision
        return sums + (own * width if sharded and options.sharding != "zero3" else 0)
    if layout.shards == 1 and not options.mixed_precision:
        return 0
    weights = 0 if options.sharding == "zero3" else own * width
    gradients = 0 if options.sharding in EACH else (own - held) * FLOAT32_BYTES
    return weights + gradients


def _stage_has(name: str, layers: range, config: Any) -> bool:
    parts = name.split(".")
    if "layers" in parts:
        return int(parts[parts.index("layers") + 1]) in layers
    last = bool(layers.stop == config.num_hidden_layers)
    if "embed" not in name:
        return last
    return layers.start == 0 or bool(config.tie_word_embeddings and last)


def picture(layout: Layout) -> str:
    """Draw the ranks of a layout: a row a pipeline stage, a column a data rank.

    Ranks that share out the same rows stand in [], context ranks between bars.

    >>> print(picture(Layout(pipeline=2, data=2)))
                data 0  data 1
    pipeline 0  [0]     [1]
    pipeline 1  [2]     [3]
    >>> print(picture(Layout(data=2, context=2, tensor=2)))
                data 0       data 1
    pipeline 0  [0 1 | 2 3]  [4 5 | 6 7]
    """
    if layout.world_size > MOST_DRAWN:
        return f"{layout.world_size:,} ranks, too many to draw"
    cells: dict[tuple[int, int], list[str]] = {}
    for rank in range(layout.world_size):
        place = layout.place(rank)
        shown = f"| {rank}" if place.context > 0 and place.tensor == 0 else str(rank)
        cells.setdefault((place.pipeline, place.rank), []).append(shown)
    rows = [["", *(f"data {reader}" for reader in range(layout.readers))]]
    for stage in range(layout.pipeline):
        ranks = (" ".join(cells[stage, reader]) for reader in range(layout.readers))
        rows.append([f"pipeline {stage}", *(f"[{each}]" for each in ranks)])
    widths = [max(len(row[column]) for row in rows) for column in range(layout.readers + 1)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
