"""Seconds of a step, by what they go to."""

from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from ms_parallel.planner.cluster import Cluster
from ms_parallel.planner.layouts.candidate import Candidate, Split
from ms_parallel.planner.layouts.passes import PassSeconds, PassTimes, StepCosts
from ms_parallel.planner.layouts.pipeline import (
    FEW,
    StageSeconds,
    bubble_share,
    makespan_s,
    stage_ranks,
)
from ms_parallel.planner.layouts.shared_cores import shared_makespan_s
from ms_parallel.planner.layouts.stages import RankWeights, Stages
from ms_parallel.planner.roofline.collectives import MICRO, collective_s
from ms_parallel.split.data_axis import ACTIVATIONS, MOMENTS, REDUCE_EACH_MICROBATCH

FLOAT32_BYTES = 4
HOST_BYTES_PER_S = 20e9
"""Between a device and its machine's memory: what PCIe of the fourth generation reaches."""


@frozen(kw_only=True)
class StepSeconds:
    """A step's time in parts that add up to it."""

    compute: float
    """In which the rank that works most passes microbatches, with the collectives in between."""
    bubble: float
    """In which that rank waits for the others of its pipeline, or for a core."""
    data: float
    """In which weights are gathered and gradients summed, and nothing else is done."""
    optimizer: float

    @property
    def all(self) -> float:
        """The whole step."""
        return self.compute + self.bubble + self.data + self.optimizer


@frozen(kw_only=True)
class _Work:
    """What a split does under a schedule."""

    seconds: StageSeconds
    ranks: tuple[float, ...]
    """Seconds that each pipeline rank computes in a step."""
    travel: float
    """Seconds of these that an average rank's collectives take."""

    @property
    def last_backward(self) -> float:
        """Seconds of the stage that takes longest for its backward."""
        both = zip(self.seconds.backward_input, self.seconds.backward_weight, strict=True)
        return max(map(sum, both))


@define(kw_only=True)
class StepTimes:
    """Times of steps of one model on one cluster."""

    stages: Stages
    times: PassTimes
    cluster: Cluster
    message_bytes: float
    """Bytes of the hidden state of one row."""
    width: int
    """Bytes of a number that is computed with."""
    keep: Callable[[Candidate], Sequence[int]] | None = None
    """Counts what a block keeps of a row, by kind of recomputation: what is copied where
    activations are offloaded."""
    known: dict[tuple[Split, str, str, str], _Work] = field(factory=dict)

    def least(self, candidate: Candidate) -> float:
        """Return the least seconds of a step: an equal share of all work, without waiting."""
        passes = self.times.passes(candidate.split, candidate.recompute)
        return candidate.split.microbatches * passes.all / candidate.layout.pipeline

    def of(self, candidate: Candidate, *, played: bool = False) -> StepSeconds:
        """Predict the seconds of a step.

        Args:
            candidate: whose schedule there is.
            played: simulate the schedule with these very times; otherwise a pipeline waits the
                share of its time that it waits where all stages take as long.

        Raises:
            LayoutError: there are more stages than places to cut.
        """
        split, layout, cluster = candidate.split, candidate.layout, self.cluster
        work = self._work(candidate)
        busiest = makespan = max(work.ranks)
        copied = self._offloaded(candidate)
        if layout.pipeline > 1 and played:
            makespan = makespan_s(
                candidate.schedule, layout.pipeline, split.microbatches, work.seconds
            )
        elif layout.pipeline > 1:
            share = bubble_share(candidate.schedule, layout.pipeline, split.microbatches)
            makespan = busiest + share * sum(work.ranks) / len(work.ranks)
        makespan = max(makespan, self._shared(work, candidate))
        data, optimizer = self._once(candidate, work)
        return StepSeconds(
            compute=busiest + copied,
            bubble=makespan - busiest,
            data=data,
            optimizer=optimizer
            * cluster.slowdown(min(layout.world_size, cluster.devices_per_node)),
        )

    def _once(self, candidate: Candidate, work: _Work) -> tuple[float, float]:
        """Return the seconds that travel and work take once a step, or beside what computes."""
        weights = max(self.stages.weights(candidate), key=lambda rank: rank.own)
        costs = self.times.costs(candidate)
        if costs is None:
            return self._data(candidate, weights, work), self._optimizer(candidate, weights)
        ranks = self.stages.of(candidate.schedule, candidate.layout.pipeline)
        layers = max(sum(len(held) for _, held in stages) for stages in ranks)
        once = costs.step_layer.of(costs.step_ends, layers)
        return once.travel, once.own + self._visits(candidate, weights)

    def _offloaded(self, candidate: Candidate) -> float:
        """Return the seconds in which a rank's activations go to the machine's memory and back.

        Copies run in order with the device's own work. What is not kept whole leaves its blocks'
        inputs, or what stays on the device.
        """
        if candidate.offload not in ACTIVATIONS or self.keep is None:
            return 0.0
        block = self.keep(candidate)[0 if candidate.recompute == "none" else -1]
        ranks = self.stages.of(candidate.schedule, candidate.layout.pipeline)
        layers = max(sum(len(held) for _, held in stages) for stages in ranks)
        rows = candidate.split.rows * candidate.split.microbatches
        return 2 * block * layers * rows / HOST_BYTES_PER_S

    def _work(self, candidate: Candidate) -> _Work:
        key = (candidate.split, candidate.schedule, candidate.recompute, candidate.sharding)
        if key not in self.known:
            self.known[key] = self._worked(candidate)
        return self.known[key]

    def _worked(self, candidate: Candidate) -> _Work:
        split, layout = candidate.split, candidate.layout
        ranks = self.stages.of(candidate.schedule, layout.pipeline)
        passes = self.times.passes(split, candidate.recompute)
        costs = self.times.costs(candidate)
        last, homes = len(passes.layers), stage_ranks(candidate.schedule, layout.pipeline)
        each: dict[int, list[PassSeconds]] = {}
        for stages in ranks:
            for stage, layers in stages:
                each[stage] = [passes.layers[n] for n in layers]
                each[stage] += [passes.first] if layers.start == 0 else []
                each[stage] += [passes.last] if layers.stop == last else []
                each[stage] += [] if costs is None else [_beside(costs, len(layers))]
                each[stage].append(_at_borders(self.cluster, stage, homes))
        order = [each[stage] for stage in sorted(each)]
        stride = layout.world_size // layout.pipeline
        message = split.rows * self.message_bytes / layout.row_parts
        seconds = StageSeconds(
            forward=tuple(sum(one.forward for one in stage) for stage in order),
            backward_input=tuple(sum(one.backward_input for one in stage) for stage in order),
            backward_weight=tuple(sum(one.backward_weight for one in stage) for stage in order),
            message=collective_s(self.cluster, "send", message, layout.pipeline, stride),
        )
        return _Work(
            seconds=seconds,
            ranks=tuple(
                split.microbatches * seconds.work([number for number, _ in stages])
                for stages in ranks
            ),
            travel=split.microbatches
            * sum(one.travel for stage in order for one in stage)
            / len(ranks),
        )

    def _shared(self, work: _Work, candidate: Candidate) -> float:
        """Return the seconds of a node's cores for the work of its processes, where they share."""
        cores, layout = self.cluster.cores_per_node, candidate.layout
        if cores is None:
            return 0.0
        here = min(layout.world_size, self.cluster.devices_per_node)
        mean = sum(work.ranks) / len(work.ranks)
        # What travels was measured while all processes of a node sent.
        own = mean - work.travel
        alone = layout.pipeline == 1 or layout.pipeline > FEW
        if alone or here < layout.world_size or here <= cores:
            return own * here / cores + work.travel
        times = work.seconds.scaled(own / mean)
        count, copies = candidate.split.microbatches, here // layout.pipeline
        played = shared_makespan_s(candidate.schedule, layout.pipeline, count, times, copies, cores)
        return played + work.travel

    def _data(self, candidate: Candidate, weights: RankWeights, work: _Work) -> float:
        """Return the seconds that weights and gradients travel, beyond what computing hides."""
        layout, sharding = candidate.layout, candidate.sharding
        if layout.token_ranks == 1:
            return 0.0
        stride, count = layout.tensor, candidate.split.microbatches
        hides = self.cluster.cores_per_node is None
        if sharding == "replicate" or layout.shards == 1:
            size = weights.own * FLOAT32_BYTES
            summed = collective_s(self.cluster, "all_reduce", size, layout.token_ranks, stride)
            return max(0.0, summed - (work.last_backward if hides else 0.0))
        gather, scatter = self._travel(candidate, weights)
        freed = sharding == "zero3" or (sharding == "auto" and layout.pipeline == 1)
        gather *= 2 * count if freed else 1
        several = sharding in REDUCE_EACH_MICROBATCH
        scatter *= count if several else 1
        if not hides:
            return gather + scatter
        busy = max(work.ranks)
        over_gather = max(0.0, gather - (busy if freed else 0.0))
        return over_gather + max(0.0, scatter - (busy if several else work.last_backward))

    def _travel(self, candidate: Candidate, weights: RankWeights) -> tuple[float, float]:
        """Return the seconds to gather a rank's weights once, and to sum its gradients once."""
        layout, stride, own = candidate.layout, candidate.layout.tensor, weights.own
        size = own * FLOAT32_BYTES
        gather = collective_s(self.cluster, "all_gather", own * self.width, layout.shards, stride)
        scatter = collective_s(self.cluster, "reduce_scatter", size, layout.shards, stride)
        far = stride * layout.shards
        part = size / layout.shards
        gather += self.times.copies(own * self.width)
        scatter += self.times.copies(size)
        return gather, scatter + collective_s(
            self.cluster, "all_reduce", part, layout.replicate, far
        )

    def _optimizer(self, candidate: Candidate, weights: RankWeights) -> float:
        return self.times.update(weights.held) + self._visits(candidate, weights)

    def _visits(self, candidate: Candidate, weights: RankWeights) -> float:
        """Return the seconds in which moments in the machine's memory visit the device."""
        if candidate.offload not in MOMENTS:
            return 0.0
        return 2 * 2 * FLOAT32_BYTES * weights.held / HOST_BYTES_PER_S


def _beside(costs: StepCosts, layers: int) -> PassSeconds:
    """Return what a stage of so many layers takes for each microbatch beside its passes.

    Half of it is forwards: weights are gathered for both, and gradients summed behind one.
    """
    one = costs.pass_layer.of(costs.pass_ends, layers)
    half = (one.own + one.travel) / 2
    return PassSeconds(forward=half, backward_input=half, travel=one.travel)


def _at_borders(cluster: Cluster, stage: int, homes: Sequence[int]) -> PassSeconds:
    """Return what a stage's messages with other ranks ask of its own for each microbatch."""
    beside = [homes[near] for near in (stage - 1, stage + 1) if 0 <= near < len(homes)]
    half = (cluster.message_us or 0.0) * MICRO / 2 * sum(home != homes[stage] for home in beside)
    return PassSeconds(forward=half, backward_input=half)
