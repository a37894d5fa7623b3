"""The roofline's answers to what a plan asks: passes of layers, the optimizer, links as reached."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from attrs import evolve, frozen

from ms_parallel.planner.cluster import Cluster, Link, Links
from ms_parallel.planner.layouts.candidate import Candidate, Split
from ms_parallel.planner.layouts.passes import ModelSeconds, PassSeconds
from ms_parallel.planner.roofline.efficiency import Efficiency
from ms_parallel.planner.roofline.layer_time import Pass, Rank, head_seconds, layer_seconds
from ms_parallel.planner.roofline.settings import RECOMPUTE, StepSettings
from ms_parallel.planner.roofline.shape import DecoderSizes
from ms_parallel.planner.roofline.step_time import OPTIMIZER_BYTES

EMBEDDING_BYTES: Final = (6, 8)
"""Read and written for a number of the hidden state: rows forwards, their float32 sums back."""


@frozen(kw_only=True)
class RooflineTimes:
    """`PassTimes` of devices that are not here, with the constants of published runs."""

    sizes: DecoderSizes
    cluster: Cluster
    efficiency: Efficiency
    settings: StepSettings
    """Settings of any microbatch: what is asked about sets its rows and its recomputation."""
    expert_layers: Sequence[int] = ()
    """Numbers of those that have experts."""

    def passes(self, split: Split, recompute: str) -> ModelSeconds:
        """Return the seconds of one microbatch."""
        return _passes(self, split, recompute)

    def update(self, weights: int) -> float:
        """Return the seconds in which the optimizer changes so many weights of a rank."""
        bandwidth = self.cluster.memory_bandwidth_gb_per_s * 1e9 * self.efficiency.memory
        return OPTIMIZER_BYTES * weights / bandwidth + self.efficiency.step_ms / 1e3

    def copies(self, size_bytes: float) -> float:
        """Return the seconds to put what is gathered in its place: none, as it is hidden."""
        return 0.0

    def costs(self, candidate: Candidate) -> None:
        """Return None: the costs follow from sizes."""

    def __hash__(self) -> int:
        return id(self)


def reached(cluster: Cluster, efficiency: Efficiency) -> Cluster:
    """Return a cluster with the bandwidths that collectives reach on its links."""
    links, network = cluster.links, efficiency.network
    return evolve(
        cluster,
        links=Links(
            group=_slower(links.group, efficiency.node),
            node=_slower(links.node, efficiency.node),
            network=_slower(links.network, network),
        ),
    )


def _slower(link: Link | None, share: float) -> Link | None:
    if link is None:
        return None
    return evolve(link, bandwidth_gb_per_s=link.bandwidth_gb_per_s * share)


@lru_cache(maxsize=1 << 14)
def _passes(times: RooflineTimes, split: Split, recompute: str) -> ModelSeconds:
    """Predict the seconds of all layers; a budget of memory, no kind, counts as `selective`."""
    repeated = RECOMPUTE.get(recompute, RECOMPUTE["selective"])
    rank = Rank(
        sizes=times.sizes,
        layout=split.layout,
        settings=evolve(times.settings, rows=split.rows, repeated=repeated),
        cluster=times.cluster,
        efficiency=times.efficiency,
    )
    dense = _seconds(layer_seconds(rank))
    mixed = _seconds(layer_seconds(rank, experts=True)) if times.expert_layers else dense
    held = frozenset(times.expert_layers)
    forward, backward = head_seconds(rank)
    read, sums = (
        rank.moved(each * rank.tokens * times.sizes.hidden / split.layout.tensor)
        for each in EMBEDDING_BYTES
    )
    return ModelSeconds(
        layers=tuple(mixed if n in held else dense for n in range(times.sizes.layers)),
        first=PassSeconds(forward=read, backward_weight=sums),
        last=PassSeconds(
            forward=forward, backward_input=backward / 2, backward_weight=backward / 2
        ),
    )


def _seconds(passes: tuple[Pass, Pass]) -> PassSeconds:
    """Give the weights half of what products take backwards, repeated ones apart."""
    forward, backward = passes
    weights = forward.products
    return PassSeconds(
        forward=_whole(forward),
        backward_input=_whole(backward) - weights,
        backward_weight=weights,
    )


def _whole(one: Pass) -> float:
    return one.compute + one.tensor + one.context + one.expert
