"""What a rank holds, estimated from sizes and from what one block was counted to keep."""

from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.assembly import sharded_layout
from ms_parallel.engine.gradients import BUCKET_BYTES
from ms_parallel.planner.layouts.candidate import Candidate, KeptBytes
from ms_parallel.planner.layouts.pipeline import held
from ms_parallel.planner.layouts.sizes import ModelSizes
from ms_parallel.planner.layouts.stages import RankWeights, Stage, Stages
from ms_parallel.planner.rank_memory import RankMemory
from ms_parallel.split.data_axis import ACTIVATIONS, MOMENTS, REDUCE_EACH_MICROBATCH
from ms_parallel.split.memory.recompute_choice import RECOMPUTE_MODES

FLOAT32_BYTES = 4


def least_bytes(layout: Layout, sizes: ModelSizes) -> int:
    """Return the least that a rank's weights and gradients take, where moments are offloaded."""
    layers = sum(layer.held(layout.tensor, layout.expert) for layer in sizes.layers)
    return layers // (layout.pipeline * layout.shards) * 2 * FLOAT32_BYTES


def rank_bytes(
    candidate: Candidate, model: Stages, kept: KeptBytes, *, moment_bytes: int, width: int
) -> list[RankMemory]:
    """Estimate what a process of each pipeline rank holds at its peak.

    Args:
        candidate: whose schedule there is.
        model: its stages.
        kept: of a row.
        moment_bytes: of the optimizer for each weight.
        width: bytes of a number that is computed with.
    """
    ranks = candidate.layout.pipeline
    counts = held(candidate.schedule, ranks, candidate.split.microbatches)
    weights = model.weights(candidate)
    found = []
    for number, stages in enumerate(model.of(candidate.schedule, ranks)):
        own = weights[number]
        whole = _whole_embedding(stages, model.sizes, candidate)
        moments = 0 if candidate.offload in MOMENTS else own.held * moment_bytes
        activations = _activations(stages, dict(counts[number]), candidate, model, kept)
        buffers = _gathered(candidate, model.sizes, own, width) + _again(candidate, kept)
        found.append(
            RankMemory(
                pipeline=number,
                weights=own.held * FLOAT32_BYTES,
                gradients=(own.held + whole) * FLOAT32_BYTES,
                moments=moments,
                activations=activations,
                buffers=max(buffers, _summed(candidate, own) - activations),
            )
        )
    return found


def _again(candidate: Candidate, kept: KeptBytes) -> int:
    """Count the bytes of the block that is computed again."""
    kind = RECOMPUTE_MODES.index(candidate.recompute)
    return max(0, kept.block[0] - kept.block[kind]) * candidate.split.rows


def _summed(candidate: Candidate, rank: RankWeights) -> int:
    """Count the bytes of a message in which gradients are summed over copies."""
    copies = sharded_layout(candidate.layout, candidate.sharding).replicate
    return min(rank.held * FLOAT32_BYTES, BUCKET_BYTES) if copies > 1 else 0


def _activations(
    stages: list[Stage],
    counts: dict[int, float],
    candidate: Candidate,
    model: Stages,
    kept: KeptBytes,
) -> int:
    if candidate.offload in ACTIVATIONS:
        return 0
    block, total = kept.block[RECOMPUTE_MODES.index(candidate.recompute)], 0.0
    for stage, layers in stages:
        own = len(layers) * block
        own += kept.ends if layers.stop == len(model.sizes.layers) else 0
        total += counts.get(stage, 0.0) * own * candidate.split.rows
    return int(total)


def _whole_embedding(stages: list[Stage], sizes: ModelSizes, candidate: Candidate) -> int:
    """Count what DTensor gives of the embedding's gradient beyond a rank's part, in numbers."""
    layout = candidate.layout
    if layout.shards > 1 or not any(layers.start == 0 for _, layers in stages):
        return 0
    return sizes.first.split - sizes.first.split // layout.tensor


def _gathered(candidate: Candidate, sizes: ModelSizes, rank: RankWeights, width: int) -> int:
    layout, sharding = candidate.layout, candidate.sharding
    if (layout.shards == 1 or sharding == "replicate") and width == FLOAT32_BYTES:
        return 0
    once = candidate.split.microbatches == 1 and layout.pipeline == 1
    weights = rank.own
    if sharding == "zero3" or (sharding == "auto" and once):
        largest = max(layer.held(layout.tensor, layout.expert) for layer in sizes.layers)
        ends = max(sizes.first.held(layout.tensor, 1), sizes.last.held(layout.tensor, 1))
        weights = min(rank.own, ends + 2 * largest)
    gradients = 0 if sharding in REDUCE_EACH_MICROBATCH else rank.own - rank.held
    return weights * width + gradients * FLOAT32_BYTES
