"""Time of a whole step on a cluster, by category; pure, in milliseconds of one core.

The pipeline follows 1F1B's exact makespan where one rank is the slowest: that rank is busy with all
microbatches, and waits for one microbatch's way through the others; `v` stages a rank make that
wait `v` times shorter (Narayanan et al. 2021, section 2.2).
"""

from collections.abc import Sequence
from typing import Final

from attrs import fields, frozen

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError
from ms_parallel.planner.cluster import Cluster
from ms_parallel.planner.roofline.collectives import (
    Members,
    gather_seconds,
    reduce_seconds,
    send_seconds,
)
from ms_parallel.planner.roofline.efficiency import Efficiency
from ms_parallel.planner.roofline.layer_time import Pass, Rank, head_seconds, layer_seconds
from ms_parallel.planner.roofline.settings import StepSettings
from ms_parallel.planner.roofline.shape import DecoderSizes

OPTIMIZER_BYTES: Final = 46
"""AdamW in float32, for each weight: gradient, two moments and weight read, the latter three
written, the half precision weight written; and the gradient's norm and scaling before."""


@frozen(kw_only=True)
class StepTime:
    """Seconds of a step; the categories add up to `total`."""

    compute: float
    """Products, attention and element-wise steps of the slowest pipeline rank."""
    tensor: float
    """Exposed communication of tensor ranks, and so on."""
    context: float
    expert: float
    bubble: float
    """Waiting for the other ranks of the pipeline."""
    pipeline: float
    """Exposed messages between them."""
    data: float
    """Exposed gathers of weights and reductions of gradients."""
    optimizer: float
    """The update, and what a step does once."""
    waiting: float
    """For the slowest of all devices."""

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return float(sum(getattr(self, each.name) for each in fields(StepTime)))


def step_time(
    sizes: DecoderSizes,
    layout: Layout,
    settings: StepSettings,
    cluster: Cluster,
    efficiency: Efficiency,
) -> StepTime:
    """Predict the time of one step.

    Args:
        sizes: of the model.
        layout: of the ranks; all of the cluster's devices need not be used.
        settings: of the step.
        cluster: the devices, and the links between them.
        efficiency: which shares of their rates are reached.

    Raises:
        ConfigError: the cluster has too few devices, or layers and stages do not fit together.
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
    busy = [count * layer + heads * head for count, heads in stages]
    slowest = max(range(len(busy)), key=busy.__getitem__)
    count, heads = stages[slowest]
    times, messages = settings.microbatches, _message_seconds(rank)
    others = waiting_seconds(busy, settings.virtual_stages, settings.bubble_share)
    shown = 1 - efficiency.hidden * settings.overlap.pipeline
    spent = StepTime(
        compute=times * (count * exposed.compute + heads * head),
        tensor=times * count * exposed.tensor,
        context=times * count * exposed.context,
        expert=times * count * exposed.expert,
        bubble=others + messages * (layout.pipeline - 1),
        pipeline=times * messages * settings.virtual_stages * shown,
        data=times * count * data_layer + data_step,
        optimizer=_optimizer_seconds(rank, max(most for most, _ in stages))
        + efficiency.step_ms / 1e3,
        waiting=0.0,
    )
    return _with_waiting(spent, rank)


def waiting_seconds(busy: Sequence[float], virtual_stages: int, bubble_share: float) -> float:
    """Return how long the busiest rank of a pipeline waits in a step.

    Args:
        busy: seconds that each rank is with one microbatch, forwards and backwards.
        virtual_stages: stages of a rank.
        bubble_share: of 1F1B's wait that the schedule leaves.
    """
    return (sum(busy) - max(busy)) / virtual_stages * bubble_share


def _check(sizes: DecoderSizes, layout: Layout, settings: StepSettings, cluster: Cluster) -> None:
    if layout.world_size > cluster.devices:
        raise ConfigError(
            f"{layout} needs {layout.world_size} devices of {cluster.devices}; raise nodes"
        )
    given = settings.stage_layers
    if given is not None and (len(given) != layout.pipeline or sum(given) != sizes.layers):
        raise ConfigError(
            f"stage_layers={given} are not {sizes.layers} layers of {layout.pipeline} ranks;"
            " give one number for each"
        )


def _stages(
    sizes: DecoderSizes, layout: Layout, settings: StepSettings
) -> list[tuple[float, float]]:
    """List layers and heads of each pipeline rank; layers that predict further are on the last."""
    if settings.stage_layers is not None:
        layers = [float(count) for count in settings.stage_layers]
    else:
        least, more = divmod(sizes.layers, layout.pipeline)
        # As the runtime cuts them: those in the middle have one more, the ends one fewer.
        layers = [float(least)] * layout.pipeline
        first = (layout.pipeline - more) // 2
        for place in range(first, first + more):
            layers[place] += 1
    layers[-1] += sizes.mtp_layers
    stages = [(count, 0.0) for count in layers[:-1]] + [(layers[-1], 1.0)]
    if not settings.mirrored:
        return stages
    pairs = zip(stages, reversed(stages), strict=True)
    return [((one + other) / 2, (head + tail) / 2) for (one, head), (other, tail) in pairs]


def _mean_layer(rank: Rank) -> tuple[Pass, Pass]:
    """Average a layer's forward and backward over dense ones and those with experts."""
    sizes = rank.sizes
    if not sizes.expert_layers:
        return layer_seconds(rank)
    share = sizes.expert_layers / (sizes.expert_layers + sizes.dense_layers)
    mixed = layer_seconds(rank, experts=True)
    if share == 1:
        return mixed
    dense = layer_seconds(rank)
    return _mixed(dense[0], mixed[0], share), _mixed(dense[1], mixed[1], share)


def _mixed(one: Pass, other: Pass, share: float) -> Pass:
    return Pass(
        **{
            each.name: (1 - share) * getattr(one, each.name) + share * getattr(other, each.name)
            for each in fields(Pass)
        }
    )


def _exposed(rank: Rank, forward: Pass, backward: Pass) -> Pass:
    """Add up both directions of a layer, without the communication that they hide."""
    beside, share = rank.settings.overlap, rank.efficiency.hidden
    return Pass(
        products=forward.products + backward.products,
        attention=forward.attention + backward.attention,
        elementwise=forward.elementwise + backward.elementwise,
        tensor=forward.tensor * (1 - share * beside.tensor_forward)
        + backward.tensor * (1 - share * beside.tensor_backward),
        context=(forward.context + backward.context) * (1 - share * beside.context),
        expert=(forward.expert + backward.expert) * (1 - share * beside.expert),
    )


def _message_seconds(rank: Rank) -> float:
    """Predict the seconds of activations to the next pipeline rank, and of gradients back."""
    layout = rank.layout
    if layout.pipeline == 1:
        return 0.0
    size = rank.tokens * rank.sizes.hidden * rank.width_bytes / layout.tensor
    distance = layout.world_size // layout.pipeline
    return 2 * send_seconds(size, distance, rank.cluster, rank.efficiency)


def _rank_weights(rank: Rank, layers: float) -> tuple[float, float]:
    """Count the weights of a rank's pipeline and tensor place: of experts, and of all the rest."""
    sizes, layout = rank.sizes, rank.layout
    total = sizes.layers + sizes.mtp_layers
    experts = layers * sizes.expert_layers / total * sizes.expert_weights / layout.expert
    ends = sizes.vocabulary * sizes.hidden * (1 if layout.pipeline > 1 or sizes.tied else 2)
    dense = layers * (
        sizes.attention_weights
        + sizes.dense_layers / total * sizes.dense_weights
        + sizes.expert_layers / total * sizes.shared_weights
    )
    return experts / layout.tensor, (dense + ends) / layout.tensor


def _data_seconds(rank: Rank, layer: tuple[Pass, Pass]) -> tuple[float, float]:
    """Predict exposed traffic of weights and gradients: once a step, and with a layer's pass."""
    settings, layout, sizes = rank.settings, rank.layout, rank.sizes
    members = Members(count=layout.shards, stride=layout.tensor)
    if layout.token_ranks == 1:
        return 0.0, 0.0
    whole = sum(_rank_weights(rank, sizes.layers / layout.pipeline))
    near = rank.cluster, rank.efficiency
    shown = 1 - rank.efficiency.hidden * settings.overlap.data
    copies = Members(count=layout.replicate, stride=layout.tensor * layout.shards)
    kept = settings.gradient_bytes * whole / layout.shards
    between = reduce_seconds(kept, copies, *near) * shown
    if settings.sharding in ("replicate", "zero1"):
        if settings.sharding == "replicate":
            everyone = Members(count=layout.token_ranks, stride=layout.tensor)
            once = reduce_seconds(settings.gradient_bytes * whole, everyone, *near)
            between = 0.0
        else:
            size = (settings.gradient_bytes + rank.width_bytes) * whole
            once = gather_seconds(size, members, *near)
        return once * shown + between, 0.0
    each = whole * layout.pipeline / (sizes.layers + 2)
    gather = gather_seconds(rank.read_bytes * each, members, *near)
    scatter = gather_seconds(settings.gradient_bytes * each, members, *near)
    if settings.sharding == "zero2":
        once = gather * sizes.layers / layout.pipeline
        return once * shown + between, _beyond(scatter, layer[1], rank)
    exposed = _beyond(gather, layer[0], rank) + _beyond(gather + scatter, layer[1], rank)
    return gather + scatter + between, exposed


def _beyond(seconds: float, beside: Pass, rank: Rank) -> float:
    """Return the seconds of communication that the computation beside it does not hide."""
    share = rank.efficiency.hidden * rank.settings.overlap.data
    return seconds - share * min(seconds, beside.compute)


def _optimizer_seconds(rank: Rank, layers: float) -> float:
    """Predict how long the optimizer takes to update what a rank keeps."""
    settings, layout = rank.settings, rank.layout
    experts, rest = _rank_weights(rank, layers)
    sharded = settings.sharding != "replicate"
    kept = rest / (layout.shards if sharded else 1)
    kept += experts / (layout.expert_shards if sharded else 1)
    return rank.moved(OPTIMIZER_BYTES * kept)


def _with_waiting(spent: StepTime, rank: Rank) -> StepTime:
    """Return a step's times with the time in which devices wait for the slowest."""
    nodes = -(-rank.layout.world_size // rank.cluster.devices_per_node)
    doublings = max(0, nodes - 1).bit_length()
    values = {each.name: getattr(spent, each.name) for each in fields(StepTime)}
    values["waiting"] = spent.total * rank.efficiency.waiting * doublings
    return StepTime(**values)
