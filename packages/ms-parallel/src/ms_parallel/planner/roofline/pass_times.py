"""Roofline implementation of `TimeModel`: layers, optimizer, and achieved link bandwidths."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from attrs import evolve, frozen

from ms_parallel.planner.cluster import Cluster, ClusterLinks, Link
from ms_parallel.planner.layouts.candidate import Candidate, Split
from ms_parallel.planner.layouts.passes import ModelSeconds, PassSeconds
from ms_parallel.planner.roofline.efficiency import Efficiency
from ms_parallel.planner.roofline.layer_time import Pass, Rank, head_seconds, layer_seconds
from ms_parallel.planner.roofline.settings import RECOMPUTE, StepSettings
from ms_parallel.planner.roofline.shape import DecoderSizes
from ms_parallel.planner.roofline.step_time import OPTIMIZER_BYTES

EMBEDDING_BYTES: Final = (6, 8)
"""Bytes read and written by the embedding per element of the hidden state: in the forward (rows),
and in the backward (float32 sums)."""


@frozen(kw_only=True)
class RooflineTimes:
    """`TimeModel` of devices that are not available here, with constants from published runs."""

    sizes: DecoderSizes
    cluster: Cluster
    efficiency: Efficiency
    settings: StepSettings
    """Settings common to all candidates; rows and recomputation are set per candidate."""
    expert_layers: Sequence[int] = ()
    """Indices of the layers with experts."""

    def passes(self, split: Split, recompute: str) -> ModelSeconds:
        """Return the predicted times of one microbatch."""
        return _passes(self, split, recompute)

    def optimizer_seconds(self, weights: int) -> float:
        """Seconds of the optimizer for a number of weights on a rank."""
        bandwidth = self.cluster.memory_bandwidth_gb_per_s * 1e9 * self.efficiency.memory
        return OPTIMIZER_BYTES * weights / bandwidth + self.efficiency.step_ms / 1e3

    def copy_seconds(self, size_bytes: float) -> float:
        """Return 0: copies of gathered data overlap with computation on accelerators."""
        return 0.0

    def step_costs(self, candidate: Candidate) -> None:
        """Return None, as these times are predicted from sizes."""

    def __hash__(self) -> int:
        return id(self)  # `expert_layers` may be a list; one instance exists per plan


def at_achieved_bandwidth(cluster: Cluster, efficiency: Efficiency) -> Cluster:
    """Return the cluster with link bandwidths reduced to the achieved ones."""
    links, network = cluster.links, efficiency.network
    return evolve(
        cluster,
        links=ClusterLinks(
            group=_scaled(links.group, efficiency.node),
            node=_scaled(links.node, efficiency.node),
            network=_scaled(links.network, network),
        ),
    )


def _scaled(link: Link | None, fraction: float) -> Link | None:
    if link is None:
        return None
    return evolve(link, bandwidth_gb_per_s=link.bandwidth_gb_per_s * fraction)


@lru_cache(maxsize=1 << 14)
def _passes(times: RooflineTimes, split: Split, recompute: str) -> ModelSeconds:
    """Predict the seconds of all layers; a memory limit for `recompute` counts as `selective`."""
    repeated = RECOMPUTE.get(recompute, RECOMPUTE["selective"])
    rank = Rank(
        sizes=times.sizes,
        layout=split.layout,
        settings=evolve(times.settings, rows=split.rows, repeated=repeated),
        cluster=times.cluster,
        efficiency=times.efficiency,
    )
    dense = _pass_seconds(layer_seconds(rank))
    sparse = _pass_seconds(layer_seconds(rank, experts=True)) if times.expert_layers else dense
    expert_layers = frozenset(times.expert_layers)
    forward, backward = head_seconds(rank)
    embedding_forward, embedding_backward = (
        rank.memory_seconds(element_bytes * rank.tokens * times.sizes.hidden / split.layout.tensor)
        for element_bytes in EMBEDDING_BYTES
    )
    # The head's backward computes the gradients of inputs and weights, which take equally long.
    return ModelSeconds(
        layers=tuple(sparse if n in expert_layers else dense for n in range(times.sizes.layers)),
        first=PassSeconds(forward=embedding_forward, backward_weight=embedding_backward),
        last=PassSeconds(
            forward=forward, backward_input=backward / 2, backward_weight=backward / 2
        ),
    )


def _pass_seconds(passes: tuple[Pass, Pass]) -> PassSeconds:
    """Split the backward: weight gradients take as long as the forward's matrix products."""
    forward, backward = passes
    weights = forward.products
    return PassSeconds(
        forward=_total(forward),
        backward_input=_total(backward) - weights,
        backward_weight=weights,
    )


def _total(direction: Pass) -> float:
    return direction.compute + direction.tensor + direction.context + direction.expert
