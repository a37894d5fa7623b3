"""Predicts the peak memory of each rank by category, without allocating any.

The engine of a rank is built on meta tensors in a fake process group, and the forward of one
microbatch runs through its stages with torch's fake tensors. The prediction therefore comes from
the code of the run itself, with its layout, operators and dtypes.
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
from ms_parallel.engine.gradients import bucket_ranges
from ms_parallel.engine.loss import Loss, NextTokenLoss
from ms_parallel.engine.mtp import mtp_depths, mtp_losses_of
from ms_parallel.memory.block_costs import BlockCosts, storages, weights_of
from ms_parallel.memory.budget import choose_modes, peak_bytes, peak_microbatches
from ms_parallel.memory.gathered import (
    FLOAT32_BYTES,
    gathered_stage,
    gradient_bytes,
    peak_gathered_weights,
)
from ms_parallel.memory.modes import ACTIVATIONS, MOMENTS, RECOMPUTE_MODES, Recompute, budget_bytes
from ms_parallel.memory.recompute import RecomputedBlock, recomputed_blocks
from ms_parallel.models.staged import StagedModel
from ms_parallel.planner.fake_cluster import fake_groups, fake_pipeline
from ms_parallel.planner.rank_memory import RankMemory
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.split.context.rows import ContextRowSplit
from ms_parallel.split.part import local_part
from ms_parallel.torch_private import FakeTensorMode

UNUSED = BlockCosts(kept_bytes=(0,) * len(RECOMPUTE_MODES), flops=(0,) * len(RECOMPUTE_MODES))
"""Costs of a block that the forward does not run, such as an MTP layer without an MTP loss."""
UNLIMITED = 1 << 60
"""Memory limit for `recompute` that wraps all blocks, so that their costs can be measured."""
PREDICTED: dict[str, Any] = {
    "weights": "unset",  # weights stay on the meta device
    "recompute": UNLIMITED,  # every block is wrapped and measures its costs in all modes
    "compile": False,  # a compiled block would hide its operators
    "ops": None,  # fused kernels for a GPU do not run on fake tensors of the CPU
}
"""Options of the engine whose memory is predicted."""
CPU = torch.device("cpu")
"""Device of the fake tensors, whatever the run's device: FSDP gathers weights on the device of the
process groups, and only on the CPU do documents have values, without which attention saves a mask.
"""


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
    """Predict the peak memory of a process of each pipeline rank during a step.

    Tokens are assumed to be routed evenly to experts. The process must not be in a process group.

    Args:
        model: model as for an engine: architecture name, configuration or folder.
        layout: layout for any number of processes.
        rows: microbatch size in rows.
        sequence_length: tokens per row.
        microbatches: microbatches per step on a data rank.
        documents: (rows, sequence_length) int32, document of each token in a typical microbatch;
            by default every row is one document.
        loss: loss; next-token loss by default.
        options: options of the engine.

    Raises:
        ConfigError: a setting is invalid, or the memory limit of `recompute` is too low.
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
    cache: dict[str, _StageCosts] = {}
    result = []
    with fake_pipeline(layout, options.get("sharding", "auto")) as ranks:
        for groups in ranks:
            settings = {**options, **PREDICTED}
            engine = Engine(model, groups=groups, **settings)
            result.append(_rank(engine, microbatches, batch, device, recompute, loss, cache))
    return result


def _batch(rows: int, length: int, documents: Tensor | None) -> dict[str, Tensor]:
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    positions = torch.arange(length).repeat(rows, 1)  # (rows, length)
    batch = {"tokens": tokens, "targets": tokens, "positions": positions}
    return batch if documents is None else {**batch, "documents": documents}


def _signature(module: nn.Module) -> str:
    """Signature of a module; modules with the same signature save the same activations.

    It consists of the submodules with their class, attention settings and parameter shapes. Layer
    indices are left out.
    """
    parts = []
    for path, submodule in module.named_modules():
        path = ".".join("" if part.isdigit() else part for part in path.split("."))
        settings = [str(getattr(submodule, name, "")) for name in ("window", "rope", "layer_type")]
        weights = [
            f"{name} {tuple(local_part(weight).shape)}"
            for name, weight in submodule.named_parameters(recurse=False)
        ]
        parts.append(f"{path} {type(submodule).__name__} {settings} {weights}")
    return "; ".join(parts)


def _drop_repeated(
    stage: nn.Module, blocks: Sequence[RecomputedBlock], signatures: Sequence[str]
) -> dict[str, RecomputedBlock]:
    """Return the first block for each signature; remove the others from the stage if it is ours."""
    # Reversed, so that the first block of several with the same signature wins.
    unique = dict(zip(reversed(signatures), reversed(blocks), strict=True))
    if not isinstance(stage, StagedModel):
        return unique
    unique_ids = {id(block.block) for block in unique.values()}
    layers = cast(nn.ModuleDict, stage.model.layers)
    for number, block in list(layers.items()):
        if id(block) not in unique_ids:
            del layers[number]
    return unique


@frozen(kw_only=True)
class RowBytes:
    """Bytes saved for one row on a rank with the full model, and its optimizer state."""

    blocks: tuple[tuple[int, ...], ...]
    """Bytes saved by each block, for each kind of recomputation."""
    ends: int
    """Bytes saved by embedding, head and loss."""
    moments: float
    """Bytes of optimizer state per weight."""


def row_bytes(
    model: Any,
    layout: Layout,
    *,
    sequence_length: int,
    documents: Tensor | None = None,
    loss: Loss | None = None,
    **options: Any,
) -> RowBytes:
    """Count the bytes saved for the backward of a microbatch of one row, as in `predict_memory`.

    Args:
        model: model as for an engine.
        layout: layout without pipeline stages.
        sequence_length: tokens per row.
        documents: (1, sequence_length) int32, document of each token.
        loss: loss; next-token loss by default.
        options: options of the engine.
    """
    options.pop("device", None)
    batch = _batch(1, sequence_length, documents)
    with fake_groups(layout) as groups:
        settings = {**options, **PREDICTED}
        engine = Engine(model, groups=groups, **settings)
        (number,) = _stages(engine)
        weights = sum(local_part(param).numel() for param in engine.parameters.values())
        states = [*engine.optimizer.moments.values(), *engine.optimizer.unsharded.values()]
        moments = sum(moment.nbytes for state in states for moment in state.values())
        costs = _stage_costs(engine, number, batch, loss or NextTokenLoss())
    return RowBytes(
        blocks=tuple(tuple(block.kept_bytes) for block in costs.blocks),
        ends=costs.ends + costs.shared,
        moments=moments / weights,
    )


@frozen(kw_only=True)
class _StageCosts:
    """Bytes that a stage saves for the backward of one microbatch."""

    blocks: Sequence[BlockCosts]
    ends: int
    """Bytes saved outside of blocks, by embedding, head and loss."""
    shared: int
    """Bytes that all recomputed blocks share, such as rotary angles and documents."""


def _rank(
    engine: Engine,
    microbatches: int,
    batch: Mapping[str, Tensor],
    device: torch.device,
    recompute: Recompute,
    loss: Loss,
    cache: dict[str, _StageCosts],
) -> RankMemory:
    """Predict the memory of an engine's rank; modifies the engine's stages.

    Args:
        engine: engine on meta tensors.
        microbatches: microbatches per step.
        batch: one microbatch.
        device: device of the run.
        recompute: recomputation setting.
        loss: loss of the last stage.
        cache: costs of stages by signature; new ones are added.
    """
    weights = [local_part(param) for param in engine.parameters.values()]
    states = [*engine.optimizer.moments.values(), *engine.optimizer.unsharded.values()]
    moments = sum(moment.nbytes for state in states for moment in state.values())
    row = engine.tables.training(microbatches).actions[engine.groups.place.pipeline]
    live = peak_microbatches(row)  # live microbatches by stage, at each candidate peak
    gathered = _gathered(engine, microbatches, row)
    # FSDP wraps the stage if it shards weights or casts them.
    wrapped = engine.groups.layout.shards > 1 or engine.options.mixed_precision
    excess = 0 if wrapped else _embedding_excess(engine)  # FSDP keeps only the local shard
    costs: dict[int, _StageCosts] = {}
    for number, stage in _stages(engine).items():
        signature = f"{number > 0} {number + 1 == len(engine.placement)} {_signature(stage)}"
        if signature not in cache:
            cache[signature] = _stage_costs(engine, number, batch, loss)
        costs[number] = cache[signature]
    blocks = {number: stage_costs.blocks for number, stage_costs in costs.items()}
    kinds = _kinds(recompute, blocks, live)
    # Every kind but 0 ("none") also saves the tensors that recomputed blocks share.
    ends = {
        number: stage_costs.ends + (stage_costs.shared if any(kinds[number]) else 0)
        for number, stage_costs in costs.items()
    }
    offloaded = engine.options.offload in ACTIVATIONS and device.type != "cpu"
    # The backward recomputes one block at a time, whose dropped activations then exist again.
    recomputed = [
        block.kept_bytes[0] - block.kept_bytes[kind]
        for stage, stage_blocks in blocks.items()
        for block, kind in zip(stage_blocks, kinds[stage], strict=True)
    ]
    activations = 0 if offloaded else peak_bytes(blocks, kinds, live, ends)
    return RankMemory(
        pipeline=engine.groups.place.pipeline,
        weights=sum(weight.nbytes for weight in weights),
        gradients=(sum(weight.numel() for weight in weights) + excess) * FLOAT32_BYTES,
        moments=0 if engine.options.offload in MOMENTS else moments,
        activations=activations,
        # Gradients are reduced over replicas after the backward, when activations are free.
        buffers=max(gathered + max(recomputed, default=0), _bucket_bytes(engine) - activations),
    )


def _stage_costs(
    engine: Engine, number: int, batch: Mapping[str, Tensor], loss: Loss
) -> _StageCosts:
    """Run the forward of a stage with one block per signature, and count the bytes it saves."""
    stage, row_split = _stages(engine)[number], engine.splitter.split(batch)
    wrapped = recomputed_blocks(stage)
    signatures = [_signature(block.block) for block in wrapped]
    unique = _drop_repeated(stage, wrapped, signatures)
    for block in unique.values():
        block.measures = True
    # Only now: while FSDP and DTensor are set up, they compute ranks with real tensors.
    with FakeTensorMode(allow_non_fake_inputs=True):
        stage.to_empty(device=CPU)
        if isinstance(row_split, ContextRowSplit) and row_split.documents is not None:
            # Documents that were split in fake groups have no storage.
            row_split.documents = batch["documents"]
        saved = _saved(engine, number, batch, row_split, loss)
    costs = {signature: block.costs or UNUSED for signature, block in unique.items()}
    # Of our models only one block per signature ran; a user-defined module ran in full.
    ran = unique if isinstance(stage, StagedModel) else signatures
    # The last kind is full recomputation, which saves only the inputs of blocks.
    inputs = sum(costs[signature].kept_bytes[-1] for signature in ran)
    shared = max((block.shared_bytes for block in wrapped), default=0)
    # FSDP casts the shared inputs again for each block; `shared_bytes` already has one copy.
    if engine.options.mixed_precision:
        shared += (len(wrapped) - 1) * max((block.cast_bytes for block in wrapped), default=0)
    block_costs = [costs[signature] for signature in signatures]
    return _StageCosts(blocks=block_costs, ends=saved - inputs, shared=shared)


def _stages(engine: Engine) -> Mapping[int, nn.Module]:
    return cast(Mapping[int, nn.Module], engine.stages)


def _saved(
    engine: Engine,
    number: int,
    batch: Mapping[str, Tensor],
    row_split: Any,
    loss: Loss,
) -> int:
    """Count the bytes that a stage saves for a microbatch with full recomputation of its blocks.

    The blocks record their costs meanwhile.
    """
    stage, runner = _stages(engine)[number], engine.runner
    stage_input = batch["tokens"]
    if number > 0:
        rows, length = stage_input.shape  # later stages get hidden states (rows, local tokens, H)
        length //= runner.sequence_parts * engine.groups.layout.context
        dtype = {True: torch.bfloat16, "float16": torch.float16}.get(engine.options.mixed_precision)
        width = engine.config.hidden_size
        stage_input = torch.empty(rows, length, width, dtype=dtype, device=CPU, requires_grad=True)
    saved: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        saved.update(storages([tensor]))
        return tensor.detach()  # an undetached output would keep its graph alive

    split_argument = {} if row_split is None else {"row_split": row_split}
    context = {"documents": batch.get("documents"), "cache": None, **split_argument}
    # `saved` is keyed by storage, so tensors that share one count once; weights do not count.
    with saved_tensors_hooks(record, lambda tensor: tensor):
        output = runner.runtime.calls[number](stage_input, positions=batch["positions"], **context)
        if number + 1 == len(engine.placement):
            output = _loss(engine, output, batch, row_split, loss)
    for storage in weights_of(stage):
        saved.pop(storage, None)
    del output
    return sum(saved.values())


def _loss(
    engine: Engine, hidden: Tensor, batch: Mapping[str, Tensor], row_split: Any, loss: Loss
) -> Any:
    """Compute the loss from the hidden states of the last stage, including MTP losses."""
    output = partial(engine.runner.output, row_split=row_split)
    total: Any = loss(output(hidden), batch)
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
    live: Sequence[Mapping[int, int]],
) -> dict[int, list[int]]:
    """Kind of recomputation of each block by stage, as an index into `RECOMPUTE_MODES`."""
    budget = budget_bytes(recompute)
    if budget is None:
        kind = RECOMPUTE_MODES.index(str(recompute))
        return {stage: [kind] * len(stage_blocks) for stage, stage_blocks in blocks.items()}
    return choose_modes(blocks, live, budget)


def _embedding_excess(engine: Engine) -> int:
    """Elements of embedding gradients beyond a rank's shard of the vocabulary.

    With DTensor, every tensor rank gets the gradient of the full embedding.
    """
    tensor = engine.groups.layout.tensor
    modules = (module for stage in _stages(engine).values() for module in stage.modules())
    full = sum(module.weight.numel() for module in modules if isinstance(module, nn.Embedding))
    return full - full // tensor


def _bucket_bytes(engine: Engine) -> int:
    """Bytes of the largest bucket in which gradients are reduced over replicas."""
    if engine.groups.replicas is None:
        return 0
    sizes = [local_part(param).numel() * FLOAT32_BYTES for param in engine.parameters.values()]
    return max(sum(sizes[index] for index in bucket) for bucket in bucket_ranges(sizes))


def _gathered(engine: Engine, microbatches: int, row: Sequence[Action]) -> int:
    """Peak bytes of unsharded weights and gradients in addition to a rank's shards.

    There are two peaks: gathering weights in the first forwards, before any gradients
    exist, and gathered weights together with unsharded gradients in the backward.
    """
    groups, options = engine.groups, engine.options
    if groups.layout.shards == 1 and not options.mixed_precision:
        return 0
    width = 2 if options.mixed_precision else FLOAT32_BYTES  # bytes of a gathered weight
    stages = {
        number: gathered_stage(stage, split_head=groups.layout.tensor > 1)
        for number, stage in _stages(engine).items()
    }
    one_microbatch = microbatches == 1
    split_backward = any(
        computation.kind is Kind.BACKWARD_INPUT
        for action in row
        for computation in action.computations
    )
    weights = peak_gathered_weights(
        stages,
        options.sharding,
        pipelined=groups.layout.pipeline > 1,
        one_microbatch=one_microbatch,
        split_backward=split_backward,
    )
    gradients = gradient_bytes(
        stages,
        options.sharding,
        one_microbatch=one_microbatch,
        split_backward=split_backward,
        element_bytes=width,
    )
    if gradients:  # the rank's shard is already counted in `RankMemory.gradients`
        local = sum(local_part(param).numel() for param in engine.parameters.values())
        gradients = max(0, gradients + (_embedding_excess(engine) - local) * FLOAT32_BYTES)
    total_weights = sum(stage.count for stage in stages.values())
    # Forward: gathered weights with buffers. Backward: weights without buffers, and gradients.
    return max(weights * width, min(weights, total_weights) * width + gradients)
