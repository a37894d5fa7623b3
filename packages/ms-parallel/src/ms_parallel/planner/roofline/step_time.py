"""Time of a step on a cluster, by category. Pure functions that take milliseconds on a CPU.

The pipeline model is exact for 1F1B with a single slowest rank: that rank computes all
microbatches, and waits while one microbatch passes through the other ranks. With v stages per rank
the wait is v times shorter (Narayanan et al. 2021, section 2.2).
"""

from collections.abc import Sequence
from typing import Final

from attrs import fields, frozen

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError
from ms_parallel.planner.cluster import Cluster
from ms_parallel.planner.roofline.collectives import (
    RankGroup,
    gather_seconds,
    reduce_seconds,
    send_seconds,
)
from ms_parallel.planner.roofline.efficiency import Efficiency
from ms_parallel.planner.roofline.layer_time import Pass, Rank, head_seconds, layer_seconds
from ms_parallel.planner.roofline.settings import StepSettings
from ms_parallel.planner.roofline.shape import DecoderSizes

OPTIMIZER_BYTES: Final = 46
"""Bytes per weight of AdamW in float32. The gradient is read for its norm, and scaled; then the
gradient, two moments and the weight are read, all but the gradient are written, and so is the
half-precision weight."""


@frozen(kw_only=True)
class StepTime:
    """Seconds of a step; the categories add up to `total`."""

    compute: float
    """Matrix products, attention and elementwise operators of the slowest pipeline rank."""
    tensor: float
    """Exposed communication between tensor ranks."""
    context: float
    """Exposed communication between context ranks."""
    expert: float
    """Exposed communication between expert ranks."""
    bubble: float
    """Waiting for other pipeline ranks."""
    pipeline: float
    """Exposed messages between pipeline ranks."""
    data: float
    """Exposed gathers of weights and reductions of gradients."""
    optimizer: float
    """Optimizer, and fixed costs of a step."""
    waiting: float
    """Waiting for the slowest device."""

    @property
    def total(self) -> float:
        """Total time of the step."""
        return float(sum(getattr(self, category.name) for category in fields(StepTime)))


def step_time(
    sizes: DecoderSizes,
    layout: Layout,
    settings: StepSettings,
    cluster: Cluster,
    efficiency: Efficiency,
) -> StepTime:
    """Predict the time of one step.

    Args:
        sizes: sizes of the model.
        layout: layout; it may use fewer devices than the cluster has.
        settings: settings of the step.
        cluster: devices and links.
        efficiency: achieved fractions of peak rates and bandwidths.

    Raises:
        ConfigError: the cluster has too few devices, or `stage_layers` does not match the layout.
    """
    _check(sizes, layout, settings, cluster)
    rank = Rank(
        sizes=sizes, layout=layout, settings=settings, cluster=cluster, efficiency=efficiency
    )
    stages = _stages(sizes, layout, settings)
    mean = _mean_layer(rank)
    head = sum(head_seconds(rank))
    exposed = _exposed(rank, *mean)
    data_step, data_layer = _data_seconds(rank, mean)
    layer = exposed.compute + exposed.tensor + exposed.context + exposed.expert + data_layer
    # Seconds of one microbatch on each pipeline rank, forward and backward.
    busy = [count * layer + heads * head for count, heads in stages]
    slowest = max(range(len(busy)), key=busy.__getitem__)
    count, heads = stages[slowest]
    microbatches, message_s = settings.microbatches, _message_seconds(rank)
    wait = waiting_seconds(busy, settings.virtual_stages, settings.bubble_share)
    exposed_share = 1 - efficiency.hidden * settings.overlap.pipeline
    max_layers = max(layers for layers, _ in stages)
    time = StepTime(
        compute=microbatches * (count * exposed.compute + heads * head),
        tensor=microbatches * count * exposed.tensor,
        context=microbatches * count * exposed.context,
        expert=microbatches * count * exposed.expert,
        # Messages of the first microbatch pass all ranks one after the other.
        bubble=wait + message_s * (layout.pipeline - 1),
        pipeline=microbatches * message_s * settings.virtual_stages * exposed_share,
        data=microbatches * count * data_layer + data_step,
        optimizer=_optimizer_seconds(rank, max_layers) + efficiency.step_ms / 1e3,
        waiting=0.0,
    )
    return _with_waiting(time, rank)


def waiting_seconds(busy: Sequence[float], virtual_stages: int, bubble_share: float) -> float:
    """Seconds that the busiest pipeline rank waits in a step.

    Args:
        busy: forward and backward seconds of one microbatch on each rank.
        virtual_stages: stages per rank.
        bubble_share: wait as a fraction of 1F1B's.
    """
    return (sum(busy) - max(busy)) / virtual_stages * bubble_share


def _check(sizes: DecoderSizes, layout: Layout, settings: StepSettings, cluster: Cluster) -> None:
    if layout.world_size > cluster.devices:
        raise ConfigError(
            f"{layout} needs {layout.world_size} devices, but the cluster has {cluster.devices};"
            " raise nodes"
        )
    counts = settings.stage_layers
    if counts is not None and (len(counts) != layout.pipeline or sum(counts) != sizes.layers):
        raise ConfigError(
            f"stage_layers must be {layout.pipeline} numbers that add up to {sizes.layers} layers,"
            f" got {counts}; use one number per pipeline rank"
        )


def _stages(
    sizes: DecoderSizes, layout: Layout, settings: StepSettings
) -> list[tuple[float, float]]:
    """Numbers of layers and heads of each pipeline rank; MTP layers are on the last one."""
    if settings.stage_layers is not None:
        layers = [float(count) for count in settings.stage_layers]
    else:
        base, remainder = divmod(sizes.layers, layout.pipeline)
        # As in `cut_layers`, the ranks in the middle get the remaining layers.
        layers = [float(base)] * layout.pipeline
        first = (layout.pipeline - remainder) // 2
        for index in range(first, first + remainder):
            layers[index] += 1
    layers[-1] += sizes.mtp_layers
    stages = [(count, 0.0) for count in layers[:-1]] + [(layers[-1], 1.0)]
    if not settings.mirrored:
        return stages
    # Each rank has half of its stage and half of the mirrored rank's.
    pairs = zip(stages, reversed(stages), strict=True)
    return [((a + b) / 2, (head_a + head_b) / 2) for (a, head_a), (b, head_b) in pairs]


def _mean_layer(rank: Rank) -> tuple[Pass, Pass]:
    """Average the forward and the backward over layers with and without experts."""
    sizes = rank.sizes
    if not sizes.expert_layers:
        return layer_seconds(rank)
    share = sizes.expert_layers / (sizes.expert_layers + sizes.dense_layers)
    sparse = layer_seconds(rank, experts=True)
    if share == 1:
        return sparse
    dense = layer_seconds(rank)
    forward = _weighted_mean(dense[0], sparse[0], share)
    return forward, _weighted_mean(dense[1], sparse[1], share)


def _weighted_mean(a: Pass, b: Pass, weight: float) -> Pass:
    names = [part.name for part in fields(Pass)]
    return Pass(
        **{name: (1 - weight) * getattr(a, name) + weight * getattr(b, name) for name in names}
    )


def _exposed(rank: Rank, forward: Pass, backward: Pass) -> Pass:
    """Add forward and backward of a layer, without hidden communication."""
    overlap, hidden = rank.settings.overlap, rank.efficiency.hidden
    return Pass(
        products=forward.products + backward.products,
        attention=forward.attention + backward.attention,
        elementwise=forward.elementwise + backward.elementwise,
        tensor=forward.tensor * (1 - hidden * overlap.tensor_forward)
        + backward.tensor * (1 - hidden * overlap.tensor_backward),
        context=(forward.context + backward.context) * (1 - hidden * overlap.context),
        expert=(forward.expert + backward.expert) * (1 - hidden * overlap.expert),
    )


def _message_seconds(rank: Rank) -> float:
    """Predict the seconds for sending activations to the next pipeline rank and gradients back."""
    layout = rank.layout
    if layout.pipeline == 1:
        return 0.0
    # (T, H) hidden states, of which each tensor rank sends its part.
    size = rank.tokens * rank.sizes.hidden * rank.width_bytes / layout.tensor
    distance = layout.world_size // layout.pipeline
    return 2 * send_seconds(size, distance, rank.cluster, rank.efficiency)


def _rank_weights(rank: Rank, layers: float) -> tuple[float, float]:
    """Number of weights of a pipeline and tensor rank before data sharding: (experts, others)."""
    sizes, layout = rank.sizes, rank.layout
    total = sizes.layers + sizes.mtp_layers
    experts = layers * sizes.expert_layers / total * sizes.expert_weights / layout.expert
    # Without a pipeline, one rank has both the embedding and the head.
    ends = sizes.vocabulary * sizes.hidden * (1 if layout.pipeline > 1 or sizes.tied else 2)
    dense = layers * (
        sizes.attention_weights
        + sizes.dense_layers / total * sizes.dense_weights
        + sizes.expert_layers / total * sizes.shared_weights
    )
    return experts / layout.tensor, (dense + ends) / layout.tensor


def _data_seconds(rank: Rank, layer: tuple[Pass, Pass]) -> tuple[float, float]:
    """Predict the exposed seconds for communicating weights and gradients.

    Returns:
        Seconds per step, and seconds per layer and microbatch.
    """
    settings, layout, sizes = rank.settings, rank.layout, rank.sizes
    shard_group = RankGroup(count=layout.shards, stride=layout.tensor)
    if layout.token_ranks == 1:
        return 0.0, 0.0
    weights = sum(_rank_weights(rank, sizes.layers / layout.pipeline))
    links = rank.cluster, rank.efficiency
    exposed_share = 1 - rank.efficiency.hidden * settings.overlap.data
    replica_group = RankGroup(count=layout.replicate, stride=layout.tensor * layout.shards)
    shard_bytes = settings.gradient_bytes * weights / layout.shards
    replica_s = reduce_seconds(shard_bytes, replica_group, *links) * exposed_share
    if settings.sharding in ("replicate", "zero1"):
        if settings.sharding == "replicate":
            data_group = RankGroup(count=layout.token_ranks, stride=layout.tensor)
            step_s = reduce_seconds(settings.gradient_bytes * weights, data_group, *links)
            replica_s = 0.0
        else:  # reduce-scatter of gradients, all-gather of updated weights
            size = (settings.gradient_bytes + rank.width_bytes) * weights
            step_s = gather_seconds(size, shard_group, *links)
        return step_s * exposed_share + replica_s, 0.0
    # Embedding and head count as one layer each.
    layer_weights = weights * layout.pipeline / (sizes.layers + 2)
    gather = gather_seconds(rank.read_bytes * layer_weights, shard_group, *links)
    scatter = gather_seconds(settings.gradient_bytes * layer_weights, shard_group, *links)
    if settings.sharding == "zero2":
        step_s = gather * sizes.layers / layout.pipeline
        return step_s * exposed_share + replica_s, _exposed_seconds(scatter, layer[1], rank)
    # ZeRO-3 gathers in the forward, and gathers again and reduces in the backward.
    exposed = _exposed_seconds(gather, layer[0], rank)
    exposed += _exposed_seconds(gather + scatter, layer[1], rank)
    # The first gather and the last reduction of a step overlap with nothing.
    return gather + scatter + replica_s, exposed


def _exposed_seconds(seconds: float, concurrent: Pass, rank: Rank) -> float:
    """Seconds of communication that concurrent computation does not hide."""
    share = rank.efficiency.hidden * rank.settings.overlap.data
    return seconds - share * min(seconds, concurrent.compute)


def _optimizer_seconds(rank: Rank, layers: float) -> float:
    """Predict the optimizer's seconds for the weights of a rank."""
    settings, layout = rank.settings, rank.layout
    experts, others = _rank_weights(rank, layers)
    sharded = settings.sharding != "replicate"
    weights = others / (layout.shards if sharded else 1)
    weights += experts / (layout.expert_shards if sharded else 1)
    return rank.memory_seconds(OPTIMIZER_BYTES * weights)


def _with_waiting(time: StepTime, rank: Rank) -> StepTime:
    """Add the time that devices wait for the slowest one, which grows with log2 of the nodes."""
    nodes = -(-rank.layout.world_size // rank.cluster.devices_per_node)
    doublings = max(0, nodes - 1).bit_length()
    values = {category.name: getattr(time, category.name) for category in fields(StepTime)}
    values["waiting"] = time.total * rank.efficiency.waiting * doublings
    return StepTime(**values)
