"""Predicted seconds of a step, by category."""

from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from ms_parallel.memory.modes import ACTIVATIONS, MOMENTS, REDUCE_EACH_MICROBATCH
from ms_parallel.planner.cluster import Cluster
from ms_parallel.planner.layouts.candidate import Candidate, Split
from ms_parallel.planner.layouts.passes import PassSeconds, StepCosts, TimeModel
from ms_parallel.planner.layouts.pipeline import (
    MAX_RANKS,
    StageSeconds,
    bubble_share,
    makespan_s,
    stage_ranks,
)
from ms_parallel.planner.layouts.shared_cores import shared_makespan_s
from ms_parallel.planner.layouts.stages import RankWeights, Stages
from ms_parallel.planner.roofline.collectives import MICRO, collective_s

FLOAT32_BYTES = 4
HOST_BYTES_PER_S = 20e9
"""Bandwidth between a device and host memory, achieved with PCIe 4.0 x16."""


@frozen(kw_only=True)
class PredictedStep:
    """Time of a step in parts that add up to it."""

    compute: float
    """Passes of the busiest rank, including communication within layers."""
    bubble: float
    """Time that this rank waits for other pipeline ranks, or for a CPU core."""
    data: float
    """Exposed time for gathering weights and reducing gradients."""
    optimizer: float

    @property
    def all(self) -> float:
        """Total time of the step."""
        return self.compute + self.bubble + self.data + self.optimizer


@frozen(kw_only=True)
class _Work:
    """Work of a split under a schedule."""

    seconds: StageSeconds
    ranks: tuple[float, ...]
    """Seconds that each pipeline rank computes in a step."""
    communication: float
    """Communication time within these, averaged over ranks."""

    @property
    def last_backward(self) -> float:
        """Seconds of the longest backward of a stage."""
        both = zip(self.seconds.backward_input, self.seconds.backward_weight, strict=True)
        return max(map(sum, both))


@define(kw_only=True)
class StepTimePredictor:
    """Step times of a model on a cluster."""

    stages: Stages
    times: TimeModel
    cluster: Cluster
    message_bytes: float
    """Bytes of the hidden states of one row."""
    width: int
    """Bytes of a number in the compute dtype."""
    saved_bytes: Callable[[Candidate], Sequence[int]] | None = None
    """Counts the bytes that a block saves per row, by kind of recomputation; copied with activation
    offloading."""
    work_cache: dict[tuple[Split, str, str, str], _Work] = field(factory=dict)

    def lower_bound(self, candidate: Candidate) -> float:
        """Lower bound on the seconds of a step: an equal share of all work, without waiting."""
        passes = self.times.passes(candidate.split, candidate.recompute)
        return candidate.split.microbatches * passes.all / candidate.layout.pipeline

    def of(self, candidate: Candidate, *, simulate: bool = False) -> PredictedStep:
        """Predict the seconds of a step.

        Args:
            candidate: candidate whose schedule exists.
            simulate: simulate the schedule with these times; otherwise use the bubble fraction of
                equal stages.

        Raises:
            LayoutError: there are more stages than cut points.
        """
        split, layout, cluster = candidate.split, candidate.layout, self.cluster
        work = self._work(candidate)
        # Without a pipeline, the makespan is the work of the only rank.
        busiest = makespan = max(work.ranks)
        offload_s = self._offloaded(candidate)
        if layout.pipeline > 1 and simulate:
            makespan = makespan_s(
                candidate.schedule, layout.pipeline, split.microbatches, work.seconds
            )
        elif layout.pipeline > 1:
            bubble = bubble_share(candidate.schedule, layout.pipeline, split.microbatches)
            # The bubble of equal stages, for the mean work of a rank.
            makespan = busiest + bubble * sum(work.ranks) / len(work.ranks)
        makespan = max(makespan, self._shared_cores_s(work, candidate))
        data, optimizer = self._step_costs(candidate, work)
        return PredictedStep(
            compute=busiest + offload_s,
            bubble=makespan - busiest,
            data=data,
            # The optimizers of a node run at the same time and share its cores.
            optimizer=optimizer
            * cluster.slowdown(min(layout.world_size, cluster.devices_per_node)),
        )

    def _step_costs(self, candidate: Candidate, work: _Work) -> tuple[float, float]:
        """Seconds of communication and of computation outside of passes, per step."""
        weights = max(self.stages.weights(candidate), key=lambda rank: rank.unsharded)
        costs = self.times.step_costs(candidate)
        if costs is None:
            return self._data(candidate, weights, work), self._optimizer(candidate, weights)
        ranks = self.stages.of(candidate.schedule, candidate.layout.pipeline)
        layers = max(sum(len(layer_range) for _, layer_range in stages) for stages in ranks)
        step_costs = costs.step_layer.of(costs.step_ends, layers)
        return step_costs.communication, step_costs.compute + self._moment_copies(
            candidate, weights
        )

    def _offloaded(self, candidate: Candidate) -> float:
        """Seconds for copying a rank's activations to host memory and back.

        Copies are ordered with the device's computation. With recomputation only the blocks' inputs
        are copied.
        """
        if candidate.offload not in ACTIVATIONS or self.saved_bytes is None:
            return 0.0
        block = self.saved_bytes(candidate)[0 if candidate.recompute == "none" else -1]
        ranks = self.stages.of(candidate.schedule, candidate.layout.pipeline)
        layers = max(sum(len(layer_range) for _, layer_range in stages) for stages in ranks)
        rows = candidate.split.rows * candidate.split.microbatches
        return 2 * block * layers * rows / HOST_BYTES_PER_S  # to the host and back

    def _work(self, candidate: Candidate) -> _Work:
        key = (candidate.split, candidate.schedule, candidate.recompute, candidate.sharding)
        if key not in self.work_cache:
            self.work_cache[key] = self._compute_work(candidate)
        return self.work_cache[key]

    def _compute_work(self, candidate: Candidate) -> _Work:
        split, layout = candidate.split, candidate.layout
        ranks = self.stages.of(candidate.schedule, layout.pipeline)
        passes = self.times.passes(split, candidate.recompute)
        costs = self.times.step_costs(candidate)
        layer_count, ranks_by_stage = (
            len(passes.layers),
            stage_ranks(candidate.schedule, layout.pipeline),
        )
        # A stage's times: layers, the ends if it has them, measured overhead, and messages.
        by_stage: dict[int, list[PassSeconds]] = {}
        for stages in ranks:
            for stage, layers in stages:
                by_stage[stage] = [passes.layers[n] for n in layers]
                by_stage[stage] += [passes.first] if layers.start == 0 else []
                by_stage[stage] += [passes.last] if layers.stop == layer_count else []
                by_stage[stage] += [] if costs is None else [_pass_costs(costs, len(layers))]
                by_stage[stage].append(_message_costs(self.cluster, stage, ranks_by_stage))
        stages_in_order = [by_stage[stage] for stage in sorted(by_stage)]
        # The pipeline is the outermost axis, so neighbors are this many devices apart.
        stride = layout.world_size // layout.pipeline
        message = split.rows * self.message_bytes / layout.row_parts
        seconds = StageSeconds(
            forward=tuple(sum(item.forward for item in stage) for stage in stages_in_order),
            backward_input=tuple(
                sum(item.backward_input for item in stage) for stage in stages_in_order
            ),
            backward_weight=tuple(
                sum(item.backward_weight for item in stage) for stage in stages_in_order
            ),
            message=collective_s(self.cluster, "send", message, layout.pipeline, stride),
        )
        return _Work(
            seconds=seconds,
            ranks=tuple(
                split.microbatches * seconds.work([number for number, _ in stages])
                for stages in ranks
            ),
            communication=split.microbatches
            * sum(item.communication for stage in stages_in_order for item in stage)
            / len(ranks),
        )

    def _shared_cores_s(self, work: _Work, candidate: Candidate) -> float:
        """Seconds of a node's cores for its processes, if these share cores; else 0."""
        cores, layout = self.cluster.cores_per_node, candidate.layout
        if cores is None:
            return 0.0
        local_processes = min(layout.world_size, self.cluster.devices_per_node)
        mean = sum(work.ranks) / len(work.ranks)
        # Communication was measured while all processes of a node were sending.
        compute = mean - work.communication
        # Without a simulation, assume that no core is ever idle.
        unsimulated = layout.pipeline == 1 or layout.pipeline > MAX_RANKS
        if unsimulated or local_processes < layout.world_size or local_processes <= cores:
            return compute * local_processes / cores + work.communication
        times = work.seconds.scaled(compute / mean)  # without communication
        count, copies = candidate.split.microbatches, local_processes // layout.pipeline
        simulated = shared_makespan_s(
            candidate.schedule, layout.pipeline, count, times, copies, cores
        )
        return simulated + work.communication

    def _data(self, candidate: Candidate, weights: RankWeights, work: _Work) -> float:
        """Exposed seconds for gathering weights and reducing gradients."""
        layout, sharding = candidate.layout, candidate.sharding
        if layout.token_ranks == 1:
            return 0.0
        # Tensor ranks are neighbors, so ranks with different tokens are `tensor` devices apart.
        stride, count = layout.tensor, candidate.split.microbatches
        overlaps = self.cluster.cores_per_node is None
        if sharding == "replicate" or layout.shards == 1:
            size = weights.unsharded * FLOAT32_BYTES
            reduce_s = collective_s(self.cluster, "all_reduce", size, layout.token_ranks, stride)
            return max(0.0, reduce_s - (work.last_backward if overlaps else 0.0))
        gather, scatter = self._reshard_seconds(candidate, weights)
        regathers = sharding == "zero3" or (sharding == "auto" and layout.pipeline == 1)
        gather *= 2 * count if regathers else 1  # forward and backward of every microbatch
        reduces_each = sharding in REDUCE_EACH_MICROBATCH
        scatter *= count if reduces_each else 1
        if not overlaps:  # processes on CPU cores compute and communicate in turn
            return gather + scatter
        # Regathering overlaps with all passes; a single reduction only with the last backward.
        busy = max(work.ranks)
        exposed_gather = max(0.0, gather - (busy if regathers else 0.0))
        return exposed_gather + max(0.0, scatter - (busy if reduces_each else work.last_backward))

    def _reshard_seconds(self, candidate: Candidate, weights: RankWeights) -> tuple[float, float]:
        """Seconds to gather a rank's weights once, and to reduce its gradients once."""
        layout, stride, unsharded = candidate.layout, candidate.layout.tensor, weights.unsharded
        # Weights are gathered in the compute dtype; gradients are reduced in float32, first within
        # a shard group and then as shards over the replicas.
        size = unsharded * FLOAT32_BYTES
        gather = collective_s(
            self.cluster, "all_gather", unsharded * self.width, layout.shards, stride
        )
        scatter = collective_s(self.cluster, "reduce_scatter", size, layout.shards, stride)
        copy_stride = stride * layout.shards
        shard_bytes = size / layout.shards
        gather += self.times.copy_seconds(unsharded * self.width)
        scatter += self.times.copy_seconds(size)
        return gather, scatter + collective_s(
            self.cluster, "all_reduce", shard_bytes, layout.replicate, copy_stride
        )

    def _optimizer(self, candidate: Candidate, weights: RankWeights) -> float:
        return self.times.optimizer_seconds(weights.sharded) + self._moment_copies(
            candidate, weights
        )

    def _moment_copies(self, candidate: Candidate, weights: RankWeights) -> float:
        """Seconds for copying offloaded optimizer state to the device and back."""
        if candidate.offload not in MOMENTS:
            return 0.0
        # Two moments, to the device and back.
        return 2 * 2 * FLOAT32_BYTES * weights.sharded / HOST_BYTES_PER_S


def _pass_costs(costs: StepCosts, layers: int) -> PassSeconds:
    """Measured costs of a stage per microbatch besides its passes.

    Half counts as forward: weights are gathered in both, and gradients are reduced in one.
    """
    costs_of_stage = costs.pass_layer.of(costs.pass_ends, layers)
    half = (costs_of_stage.compute + costs_of_stage.communication) / 2
    return PassSeconds(
        forward=half, backward_input=half, communication=costs_of_stage.communication
    )


def _message_costs(cluster: Cluster, stage: int, ranks_by_stage: Sequence[int]) -> PassSeconds:
    """CPU time of a stage for messages with other ranks, per microbatch."""
    neighbor_ranks = [
        ranks_by_stage[neighbor]
        for neighbor in (stage - 1, stage + 1)
        if 0 <= neighbor < len(ranks_by_stage)
    ]
    half = (
        (cluster.message_us or 0.0)
        * MICRO
        / 2
        * sum(rank != ranks_by_stage[stage] for rank in neighbor_ranks)
    )
    return PassSeconds(forward=half, backward_input=half)
