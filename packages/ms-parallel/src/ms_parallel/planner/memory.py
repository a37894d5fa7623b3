"""Predicts what each rank of a run holds at its peak, by category, before anything is allocated.

The engine of a rank is built without memory, in a cluster that is not there, and one microbatch
passes forwards through its stages as torch's fake tensors, which have a shape and a device alone.
So it is the run's own code that is counted: its layout, its operators, its dtypes.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ms_parallel.cluster.device import pick_device
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.gradients import messages
from ms_parallel.engine.loss import Loss, NextTokenLoss
from ms_parallel.engine.mtp import mtp_depths, mtp_losses_of
from ms_parallel.models.staged import StagedModel
from ms_parallel.planner.fake_cluster import fake_groups, fake_pipeline
from ms_parallel.planner.rank_memory import RankMemory
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.split.context.rows import ContextRowSplit
from ms_parallel.split.data_axis import ACTIVATIONS, MOMENTS
from ms_parallel.split.memory.block_costs import BlockCosts, storages, weights_of
from ms_parallel.split.memory.budget import choose_modes, peak_bytes, peak_microbatches
from ms_parallel.split.memory.gathered import (
    FLOAT32_BYTES,
    gathered_stage,
    gradient_bytes,
    peak_gathered_weights,
)
from ms_parallel.split.memory.recompute import RecomputedBlock, recomputed_blocks
from ms_parallel.split.memory.recompute_choice import RECOMPUTE_MODES, Recompute, budget_bytes
from ms_parallel.split.part import local_part
from ms_parallel.torch_private import FakeTensorMode

UNUSED = BlockCosts(kept_bytes=(0,) * len(RECOMPUTE_MODES), flops=(0,) * len(RECOMPUTE_MODES))
"""Costs of a block that no forward passes, such as a layer that predicts further without a loss."""
ENDLESS = 1 << 60
"""A budget that marks blocks to be measured."""


def predict_memory(
    model: Any,
    layout: Layout,
    *,
    rows: int,
    sequence_length: int,
    microbatches: int,
    documents: Tensor | None = None,
    loss: Loss | None = None,
    **options: Any,
) -> list[RankMemory]:
    """Predict what a process of each pipeline rank holds at its peak in an update.

    Tokens are assumed to choose experts evenly. The process must have met no others.

    Args:
        model: what an engine takes: an architecture, a configuration, a folder.
        layout: of any number of processes.
        rows: of a microbatch.
        sequence_length: tokens of a row.
        microbatches: of an update on a data rank.
        documents: (rows, sequence_length) int32, of a typical microbatch; one a row by default.
        loss: of next tokens by default.
        options: of the engine.

    Raises:
        ConfigError: a setting cannot be used, or the budget of `recompute` is below the least.
        LayoutError: the layout does not fit the model.
    """
    settings = {
        **options,
        "rows": rows,
        "sequence_length": sequence_length,
        "microbatches": microbatches,
        "documents": documents,
        "loss": loss or NextTokenLoss(),
    }
    return _predict(model, layout, **settings)


def _predict(
    model: Any,
    layout: Layout,
    *,
    rows: int,
    sequence_length: int,
    microbatches: int,
    documents: Tensor | None,
    loss: Loss,
    **options: Any,
) -> list[RankMemory]:
    device = pick_device(options.pop("device", None))
    recompute: Recompute = options.pop("recompute", "none")
    batch = _batch(rows, sequence_length, documents)
    known: dict[str, _StageCosts] = {}
    found = []
    with fake_pipeline(layout, options.get("sharding", "auto")) as ranks:
        for here in ranks:
            settings = {**options, "weights": "unset", "recompute": ENDLESS, "compile": False}
            engine = Engine(model, groups=here, **settings)
            found.append(_rank(engine, microbatches, batch, device, recompute, loss, known))
    return found


def _batch(rows: int, length: int, documents: Tensor | None) -> dict[str, Tensor]:
    whole = torch.zeros(rows, length, dtype=torch.int64)
    batch = {"tokens": whole, "targets": whole, "positions": torch.arange(length).repeat(rows, 1)}
    return batch if documents is None else {**batch, "documents": documents}


def _name(module: nn.Module) -> str:
    """Name a module by its parts and weights' shapes, alike for modules that keep the same."""
    parts = []
    for place, each in module.named_modules():
        place = ".".join("" if part.isdigit() else part for part in place.split("."))
        facts = [str(getattr(each, name, "")) for name in ("window", "rope", "layer_type")]
        weights = [
            f"{name} {tuple(local_part(weight).shape)}"
            for name, weight in each.named_parameters(recurse=False)
        ]
        parts.append(f"{place} {type(each).__name__} {facts} {weights}")
    return "; ".join(parts)


def _drop_repeated(
    stage: nn.Module, blocks: Sequence[RecomputedBlock], names: Sequence[str]
) -> dict[str, RecomputedBlock]:
    """Return the first block of each kind, by name; take all others out of our own models."""
    kept = dict(zip(reversed(names), reversed(blocks), strict=True))
    if not isinstance(stage, StagedModel):
        return kept
    left = {id(block.block) for block in kept.values()}
    layers = cast(nn.ModuleDict, stage.model.layers)
    for number, block in list(layers.items()):
        if id(block) not in left:
            del layers[number]
    return kept


@frozen(kw_only=True)
class RowBytes:
    """What one row keeps on a rank that has a whole model, and what its optimizer keeps."""

    blocks: tuple[tuple[int, ...], ...]
    """Bytes of each block, by kind of recomputation."""
    beside: int
    """Bytes of embedding, head and loss."""
    moments: float
    """Bytes of the optimizer for each weight."""


def row_bytes(
    model: Any,
    layout: Layout,
    *,
    sequence_length: int,
    documents: Tensor | None = None,
    loss: Loss | None = None,
    **options: Any,
) -> RowBytes:
    """Count what a microbatch of one row keeps for its backward, as `predict_memory` does.

    Args:
        model: as there.
        layout: without a pipeline.
        sequence_length: tokens of the row.
        documents: (1, sequence_length) int32.
        loss: of next tokens by default.
        options: of the engine.
    """
    device = pick_device(options.pop("device", None))
    batch = _batch(1, sequence_length, documents)
    with fake_groups(layout) as groups:
        settings = {**options, "weights": "unset", "recompute": ENDLESS, "compile": False}
        engine = Engine(model, groups=groups, **settings)
        (number,) = _stages(engine)
        weights = sum(local_part(each).numel() for each in engine.parameters.values())
        every = [*engine.optimizer.moments.values(), *engine.optimizer.unsharded.values()]
        moments = sum(each.nbytes for moment in every for each in moment.values())
        costs = _stage_costs(engine, number, batch, device, loss or NextTokenLoss())
    return RowBytes(
        blocks=tuple(tuple(block.kept_bytes) for block in costs.blocks),
        beside=costs.beside + costs.shared,
        moments=moments / weights,
    )


@frozen(kw_only=True)
class _StageCosts:
    """What a stage keeps of one microbatch."""

    blocks: Sequence[BlockCosts]
    beside: int
    """Bytes that its blocks do not keep: those of embedding, head and loss."""
    shared: int
    """Bytes that its blocks share, such as angles and documents, where any is computed again."""


def _rank(
    engine: Engine,
    microbatches: int,
    batch: Mapping[str, Tensor],
    device: torch.device,
    recompute: Recompute,
    loss: Loss,
    known: dict[str, _StageCosts],
) -> RankMemory:
    """Predict the memory of an engine's rank, whose stages are taken apart.

    Args:
        engine: built without memory.
        microbatches: of an update.
        batch: one microbatch.
        device: on which it would compute.
        recompute: what blocks run again.
        loss: of the last stage.
        known: costs of stages by what they are; those of new ones are added.
    """
    weights = [local_part(each) for each in engine.parameters.values()]
    every = [*engine.optimizer.moments.values(), *engine.optimizer.unsharded.values()]
    moments = sum(each.nbytes for moment in every for each in moment.values())
    row = engine.tables.training(microbatches).actions[engine.groups.place.pipeline]
    held = peak_microbatches(row)
    gathered = _gathered(engine, microbatches, row)
    wrapped = engine.groups.layout.shards > 1 or engine.options.mixed_precision
    unsplit = 0 if wrapped else _unsplit(engine)  # FSDP keeps a rank's part
    costs: dict[int, _StageCosts] = {}
    for number, stage in _stages(engine).items():
        name = f"{number > 0} {number + 1 == len(engine.placement)} {_name(stage)}"
        if name not in known:
            known[name] = _stage_costs(engine, number, batch, device, loss)
        costs[number] = known[name]
    blocks = {number: each.blocks for number, each in costs.items()}
    kinds = _kinds(recompute, blocks, held)
    beside = {
        number: each.beside + (each.shared if any(kinds[number]) else 0)
        for number, each in costs.items()
    }
    away = engine.options.offload in ACTIVATIONS and device.type != "cpu"
    again = [
        block.kept_bytes[0] - block.kept_bytes[kind]
        for stage, mine in blocks.items()
        for block, kind in zip(mine, kinds[stage], strict=True)
    ]
    activations = 0 if away else peak_bytes(blocks, kinds, held, beside)
    return RankMemory(
        pipeline=engine.groups.place.pipeline,
        weights=sum(each.nbytes for each in weights),
        gradients=(sum(each.numel() for each in weights) + unsplit) * FLOAT32_BYTES,
        moments=0 if engine.options.offload in MOMENTS else moments,
        activations=activations,
        # Gradients are summed over copies where activations were.
        buffers=max(gathered + max(again, default=0), _summed(engine) - activations),
    )


def _stage_costs(
    engine: Engine, number: int, batch: Mapping[str, Tensor], device: torch.device, loss: Loss
) -> _StageCosts:
    """Run a stage, of whose blocks that are alike all but one are dropped."""
    stage, row_split = _stages(engine)[number], engine.splitter.split(batch)
    marked = recomputed_blocks(stage)
    names = [_name(block.block) for block in marked]
    kept = _drop_repeated(stage, marked, names)
    for block in kept.values():
        block.measures = True
    # Entered late, as FSDP and DTensor find a process's place in numbers while they are set up.
    with FakeTensorMode(allow_non_fake_inputs=True):
        stage.to_empty(device=device)
        if isinstance(row_split, ContextRowSplit) and row_split.documents is not None:
            row_split.documents = batch["documents"].to(device)  # the fake groups' have no place
        saved = _saved(engine, number, batch, device, row_split, loss)
    costs = {name: block.costs or UNUSED for name, block in kept.items()}
    ran = kept if isinstance(stage, StagedModel) else names
    inputs = sum(costs[name].kept_bytes[-1] for name in ran)
    shared = max((block.shared_bytes for block in marked), default=0)
    if engine.options.mixed_precision:
        shared += (len(marked) - 1) * max((block.cast_bytes for block in marked), default=0)
    found = [costs[name] for name in names]
    return _StageCosts(blocks=found, beside=saved - inputs, shared=shared)


def _stages(engine: Engine) -> Mapping[int, nn.Module]:
    return cast(Mapping[int, nn.Module], engine.stages)


def _saved(
    engine: Engine,
    number: int,
    batch: Mapping[str, Tensor],
    device: torch.device,
    row_split: Any,
    loss: Loss,
) -> int:
    """Count the bytes that a stage keeps of a microbatch whose blocks keep inputs; they measure."""
    stage, runner = _stages(engine)[number], engine.runner
    here = {name: each.to(device) for name, each in batch.items()}
    entering = here["tokens"]
    if number > 0:
        rows, length = entering.shape
        length //= runner.sequence_parts * engine.groups.layout.context
        dtype = {True: torch.bfloat16, "float16": torch.float16}.get(engine.options.mixed_precision)
        width = engine.config.hidden_size
        entering = torch.empty(rows, length, width, dtype=dtype, device=device, requires_grad=True)
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved.update(storages([tensor]))
        return tensor.detach()

    more = {} if row_split is None else {"row_split": row_split}
    context = {"documents": here.get("documents"), "cache": None, **more}
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        made = runner.runtime.calls[number](entering, positions=here["positions"], **context)
        if number + 1 == len(engine.placement):
            made = _loss(engine, made, here, row_split, loss)
    for place in weights_of(stage):
        saved.pop(place, None)
    del made
    return sum(saved.values())


def _loss(
    engine: Engine, hidden: Tensor, batch: Mapping[str, Tensor], row_split: Any, loss: Loss
) -> Any:
    """Compute the loss of the last stage's hidden states, with layers that predict further."""
    output = partial(engine.runner.output, row_split=row_split)
    found = loss(output(hidden), batch)
    total: Any = found
    if isinstance(total, tuple):
        total = total[0]
    depths = mtp_depths(engine.config, loss)
    if depths:
        last = engine.stages[len(engine.placement) - 1]
        total = total + mtp_losses_of(last, hidden, batch, [1.0] * depths, output, row_split).sum()
    return total


def _kinds(
    recompute: Recompute,
    blocks: Mapping[int, Sequence[BlockCosts]],
    held: Sequence[Mapping[int, int]],
) -> dict[int, list[int]]:
    budget = budget_bytes(recompute)
    if budget is None:
        kind = RECOMPUTE_MODES.index(str(recompute))
        return {stage: [kind] * len(mine) for stage, mine in blocks.items()}
    return choose_modes(blocks, held, budget)


def _unsplit(engine: Engine) -> int:
    """Count the numbers that embeddings' gradients have beyond their part of the vocabulary.

    DTensor gives each tensor rank the gradient of all of it.
    """
    tensor = engine.groups.layout.tensor
    modules = (each for stage in _stages(engine).values() for each in stage.modules())
    whole = sum(each.weight.numel() for each in modules if isinstance(each, nn.Embedding))
    return whole - whole // tensor


def _summed(engine: Engine) -> int:
    """Count the bytes of the largest message in which gradients are summed over copies."""
    if engine.groups.replicas is None:
        return 0
    sizes = [local_part(each).numel() * FLOAT32_BYTES for each in engine.parameters.values()]
    return max(sum(sizes[place] for place in some) for some in messages(sizes))


def _gathered(engine: Engine, microbatches: int, row: Sequence[Action]) -> int:
    """Count the bytes of weights and gradients held whole beside a rank's share, at their most.

    Weights pass through buffers in the first forwards, before there are gradients.
    """
    groups, options = engine.groups, engine.options
    if groups.layout.shards == 1 and not options.mixed_precision:
        return 0
    width = 2 if options.mixed_precision else FLOAT32_BYTES
    stages = {
        number: gathered_stage(stage, split_head=groups.layout.tensor > 1)
        for number, stage in _stages(engine).items()
    }
    once = microbatches == 1
    split = any(a.kind is Kind.BACKWARD_INPUT for each in row for a in each.computations)
    weights = peak_gathered_weights(
        stages,
        options.sharding,
        pipelined=groups.layout.pipeline > 1,
        one_microbatch=once,
        split_backward=split,
    )
    sums = gradient_bytes(
        stages,
        options.sharding,
        one_microbatch=once,
        split_backward=split,
        element_bytes=width,
    )
    if sums:  # a rank's share of them counts as gradients
        held = sum(local_part(each).numel() for each in engine.parameters.values())
        sums = max(0, sums + (_unsplit(engine) - held) * FLOAT32_BYTES)
    whole = sum(stage.count for stage in stages.values())
    return max(weights * width, min(weights, whole) * width + sums)
