"""Estimates the memory of a rank from sizes and the counted saved bytes of one block."""

from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.assembly import sharded_layout
from ms_parallel.engine.gradients import BUCKET_BYTES
from ms_parallel.memory.modes import ACTIVATIONS, MOMENTS, RECOMPUTE_MODES, REDUCE_EACH_MICROBATCH
from ms_parallel.planner.layouts.candidate import Candidate, SavedBytes
from ms_parallel.planner.layouts.pipeline import live_microbatches
from ms_parallel.planner.layouts.sizes import ModelSizes
from ms_parallel.planner.layouts.stages import RankWeights, Stage, Stages
from ms_parallel.planner.rank_memory import RankMemory

FLOAT32_BYTES = 4


def min_bytes(layout: Layout, sizes: ModelSizes) -> int:
    """Lower bound on a rank's weights and gradients, with offloaded optimizer state."""
    # Only layers count: the embedding and the head may be on other pipeline ranks.
    layers = sum(layer.rank_parameters(layout.tensor, layout.expert) for layer in sizes.layers)
    return layers // (layout.pipeline * layout.shards) * 2 * FLOAT32_BYTES


def rank_bytes(
    candidate: Candidate, model: Stages, saved: SavedBytes, *, moment_bytes: int, width: int
) -> list[RankMemory]:
    """Estimate the peak memory of a process of each pipeline rank.

    Args:
        candidate: candidate whose schedule exists.
        model: stages of the model.
        saved: saved bytes per row.
        moment_bytes: bytes of optimizer state per weight.
        width: bytes of a number in the compute dtype.
    """
    ranks = candidate.layout.pipeline
    counts = live_microbatches(candidate.schedule, ranks, candidate.split.microbatches)
    weights = model.weights(candidate)
    result = []
    for number, stages in enumerate(model.of(candidate.schedule, ranks)):
        rank_weights = weights[number]
        excess = _embedding_excess(stages, model.sizes, candidate)
        moments = 0 if candidate.offload in MOMENTS else rank_weights.sharded * moment_bytes
        activations = _activations(stages, dict(counts[number]), candidate, model, saved)
        buffers = _gathered(candidate, model.sizes, rank_weights, width) + _recomputed_bytes(
            candidate, saved
        )
        result.append(
            RankMemory(
                pipeline=number,
                weights=rank_weights.sharded * FLOAT32_BYTES,
                gradients=(rank_weights.sharded + excess) * FLOAT32_BYTES,
                moments=moments,
                activations=activations,
                buffers=max(buffers, _bucket_bytes(candidate, rank_weights) - activations),
            )
        )
    return result


def _recomputed_bytes(candidate: Candidate, saved: SavedBytes) -> int:
    """Bytes of the block that is being recomputed."""
    recompute_index = RECOMPUTE_MODES.index(candidate.recompute)
    return max(0, saved.block[0] - saved.block[recompute_index]) * candidate.split.rows


def _bucket_bytes(candidate: Candidate, rank: RankWeights) -> int:
    """Bytes of a bucket in which gradients are reduced over copies."""
    copies = sharded_layout(candidate.layout, candidate.sharding).replicate
    return min(rank.sharded * FLOAT32_BYTES, BUCKET_BYTES) if copies > 1 else 0


def _activations(
    stages: list[Stage],
    counts: dict[int, float],
    candidate: Candidate,
    model: Stages,
    saved: SavedBytes,
) -> int:
    if candidate.offload in ACTIVATIONS:
        return 0
    block, total = saved.block[RECOMPUTE_MODES.index(candidate.recompute)], 0.0
    for stage, layers in stages:
        stage_bytes = len(layers) * block
        stage_bytes += saved.ends if layers.stop == len(model.sizes.layers) else 0
        # Live microbatches times bytes per row times rows.
        total += counts.get(stage, 0.0) * stage_bytes * candidate.split.rows
    return int(total)


def _embedding_excess(stages: list[Stage], sizes: ModelSizes, candidate: Candidate) -> int:
    """Elements of the embedding's gradient in DTensor beyond a rank's shard."""
    layout = candidate.layout
    if layout.shards > 1 or not any(layers.start == 0 for _, layers in stages):
        return 0
    # DTensor computes the gradient of the full vocabulary on every tensor rank.
    return sizes.first.split - sizes.first.split // layout.tensor


def _gathered(candidate: Candidate, sizes: ModelSizes, rank: RankWeights, width: int) -> int:
    layout, sharding = candidate.layout, candidate.sharding
    if (layout.shards == 1 or sharding == "replicate") and width == FLOAT32_BYTES:
        return 0
    # ZeRO-3 holds the current layer and the buffer of the prefetched one, and frees them; other
    # shardings keep all gathered weights.
    single_pass = candidate.split.microbatches == 1 and layout.pipeline == 1
    weights = rank.unsharded
    if sharding == "zero3" or (sharding == "auto" and single_pass):
        largest = max(layer.rank_parameters(layout.tensor, layout.expert) for layer in sizes.layers)
        ends = max(
            sizes.first.rank_parameters(layout.tensor, 1),
            sizes.last.rank_parameters(layout.tensor, 1),
        )
        weights = min(rank.unsharded, ends + 2 * largest)
    gradients = 0 if sharding in REDUCE_EACH_MICROBATCH else rank.unsharded - rank.sharded
    return weights * width + gradients * FLOAT32_BYTES
