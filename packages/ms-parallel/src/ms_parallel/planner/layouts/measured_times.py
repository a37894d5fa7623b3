"""Measures step times on this machine's device, by running a rank's engine in a fake world.

The engine of one rank is built and takes real steps while its collectives return immediately, so
the measured time is the rank's own compute and overhead. The collectives are counted, and their
time is computed from the cluster's links. Timing steps of one and of two microbatches separates
work per microbatch from work per step; timing models of one and of several layers separates work
per layer from the rest (the embedding, head and loss, called the ends).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter, process_time, process_time_ns
from typing import Any

import torch
from attrs import astuple, evolve, frozen
from torch import Tensor

from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.errors import ConfigError
from ms_parallel.models.registry import model_plan
from ms_parallel.pipeline.recorder import ComputationRecorder
from ms_parallel.planner.fake_cluster import fake_groups
from ms_parallel.planner.layouts.candidate import Candidate, Split
from ms_parallel.planner.layouts.messages import Message, MessageLog, seconds
from ms_parallel.planner.layouts.passes import (
    DatasheetTimes,
    ModelSeconds,
    PassSeconds,
    RankSeconds,
    StepCosts,
)
from ms_parallel.planner.layouts.pipeline import splits_backward
from ms_parallel.planner.layouts.sizes import ModelSizes
from ms_parallel.planner.layouts.variants import PLAIN
from ms_parallel.schedules.table.action import Kind

MIN_ROUNDS, MAX_ROUNDS, ENOUGH_S = 2, 5, 0.4
"""Timed rounds, after one untimed: at least 2, at most 5, and none more after 0.4 s in all. The
fastest round counts, as it was disturbed least by other processes."""
FEW_ROWS, MANY_ROWS = 1, 4
"""Rows of the measured microbatches; times for other sizes are interpolated linearly."""
WEIGHT_SHARE = 0.5
"""Share of the backward pass spent on weight gradients, which are half of its matrix products."""
MIN_LAYERS, MAX_LAYERS, LAYER_WEIGHTS = 3, 8, 1 << 24
"""Layers of the larger measured model: about LAYER_WEIGHTS weights, within the limits.
The smaller model has one layer."""
MIN_SHARE = 0.2
"""Lower bound of an interpolated time, as a share of the time for FEW_ROWS."""
SPLIT = "zb-h1"
"""Schedule that delays weight gradients, run on one rank."""
MAX_SHARDS = 32
"""Ranks in a sharding group above which no engine is built, since FSDP's setup time grows."""
Batch = Mapping[str, Tensor]


@frozen(kw_only=True)
class _Key:
    """Settings that determine an engine's times, other than rows and layers."""

    layout: Layout
    """Layout with pipeline=1."""
    sharding: str
    recompute: str = "none"
    schedule: str = PLAIN
    """Schedule, run on one rank; it determines whether weight gradients are delayed."""


@frozen(kw_only=True)
class _Measured:
    """Times of a model without pipeline stages, for one microbatch size."""

    passes: RankSeconds
    """Seconds per microbatch."""
    forward: float
    """Forward share of a microbatch's compute time."""
    step: RankSeconds
    """Seconds per step in addition to the microbatches."""


@frozen(kw_only=True)
class _MeasuredStep:
    """Times of one step, in seconds."""

    total: float
    forward: float
    """Total of all forward passes."""
    backward: float
    """Total of all backward passes."""


@frozen(kw_only=True)
class _LayerAndEnds:
    """Seconds per layer, and for embedding, head and loss (the ends)."""

    layer: float
    ends: float

    @classmethod
    def of(cls, single: float, many: float, layers: int) -> "_LayerAndEnds":
        """Solve for both, given the times of a one-layer and a deeper model; never negative."""
        # single = layer + ends and many = layers * layer + ends.
        layer = max(0.0, (many - single) / (layers - 1)) if layers > 1 else 0.0
        return cls(layer=layer, ends=max(0.0, single - layer))


@frozen
class _Microbatch:
    """Seconds that a part of a model takes per microbatch."""

    forward: float
    backward: float
    communication: float

    def at_least(self, other: "_Microbatch") -> "_Microbatch":
        """Return the element-wise maximum, as a lower time is measurement noise."""
        return _Microbatch(*map(max, astuple(self), astuple(other)))

    def passes(self, plain: "_Microbatch") -> PassSeconds:
        """Distribute the time over the passes; `plain` is the time without recomputation."""
        # Half of the communication without recomputation belongs to the forward. The rest, and all
        # that recomputation adds, belongs to the input backward.
        weights = plain.backward * WEIGHT_SHARE
        return PassSeconds(
            forward=self.forward + plain.communication / 2,
            backward_input=self.backward - weights + self.communication - plain.communication / 2,
            backward_weight=weights,
            communication=self.communication,
        )


class MeasuredTimes:
    """Step times measured on this machine's device; each engine is measured once.

    Args:
        configs: result of `measurable`.
        datasheet: roofline model, for collectives and for everything that cannot be measured.
        batch: rows of the dataset: tokens, targets, positions and, if packed, documents, each
            (rows, S). They are repeated to fill a microbatch.
        device: device to measure on.
        options: engine options, such as mixed_precision.
    """

    def __init__(
        self,
        configs: Sequence[Any],
        datasheet: DatasheetTimes,
        batch: Batch,
        device: torch.device,
        options: Mapping[str, Any],
    ) -> None:
        self.configs, self.datasheet, self.batch = tuple(configs), datasheet, batch
        self.device, self.options = device, dict(options)
        self.layers = configs[-1].num_hidden_layers
        # Times of the smaller and the larger model, by settings and rows.
        self.measured: dict[tuple[_Key, int], tuple[_Measured, _Measured]] = {}

    def passes(self, split: Split, recompute: str) -> ModelSeconds:
        """Return seconds per microbatch: measured compute plus computed collective times."""
        layout = split.layout
        if not self._is_measured(layout):
            return self.datasheet.passes(split, recompute)
        key = _plain(layout)
        # `plain` is the layer without recomputation.
        layer, ends = plain, _ = self._microbatch(key, split.rows)
        if recompute != "none":
            recomputed, _ = self._microbatch(evolve(key, recompute=recompute), split.rows)
            layer = recomputed.at_least(plain)
        # Embedding and head are measured together; nearly all of the time is the head's.
        return ModelSeconds(
            layers=(layer.passes(plain),) * len(self.datasheet.sizes.layers),
            first=PassSeconds(),
            last=ends.passes(ends),
        )

    def step_costs(self, candidate: Candidate) -> StepCosts | None:
        """Return a step's time outside its passes; None if it is not measured."""
        layout, sharding = candidate.layout, candidate.sharding
        if not self._is_measured(layout) or layout.token_ranks > MAX_SHARDS:
            return None
        # In a pipeline `auto` means ZeRO-1, but the engine that is measured has pipeline=1.
        if layout.pipeline > 1 and sharding == "auto":
            sharding = "zero1"
        plain = self._both(_plain(layout), FEW_ROWS)
        sharded = plain
        if layout.token_ranks > 1:
            sharded = self._both(
                _Key(layout=evolve(layout, pipeline=1), sharding=sharding), FEW_ROWS
            )
        # Sharding costs are those beyond an engine that does not shard.
        extra = _excess(sharded, plain)
        # Overhead of deferring weight gradients: zb-h1 against 1F1B, both on one rank.
        if layout.pipeline > 1 and splits_backward(candidate.schedule):
            joined = evolve(_plain(layout), recompute=candidate.recompute)
            split = evolve(joined, schedule=SPLIT)
            delayed = _excess(self._both(split, FEW_ROWS), self._both(joined, FEW_ROWS))
            extra = [
                RankSeconds(compute=a.compute + b.compute, communication=a.communication)
                for a, b in zip(extra, delayed, strict=True)
            ]
        return StepCosts(
            **_by_part("pass", self.layers, extra),
            **_by_part("step", self.layers, [measured.step for measured in sharded]),
        )

    def optimizer_seconds(self, weights: int) -> float:
        """Return the seconds of the optimizer, used if step costs are not measured."""
        return self.datasheet.optimizer_seconds(weights)

    def copy_seconds(self, size_bytes: float) -> float:
        """Return the seconds to copy gathered or reduced data to its destination."""
        return self.datasheet.copy_seconds(size_bytes)

    def _is_measured(self, layout: Layout) -> bool:
        """Return whether an engine can be timed; expert routing needs real collectives."""
        return not (self.datasheet.sizes.experts and layout.tensor * layout.expert > 1)

    def _microbatch(self, key: _Key, rows: int) -> tuple[_Microbatch, _Microbatch]:
        """Return the times of one layer and of the ends for a microbatch of `rows` rows."""
        parts = [
            self._interpolate(key, rows, time) for time in (_forward, _backward, _communication)
        ]
        layer = _Microbatch(*(part.layer for part in parts))
        return layer, _Microbatch(*(part.ends for part in parts))

    def _interpolate(
        self, key: _Key, rows: int, time: Callable[[_Measured], float]
    ) -> _LayerAndEnds:
        """Interpolate a time linearly in the rows, bounded below by `MIN_SHARE`."""
        weight = (rows - FEW_ROWS) / (MANY_ROWS - FEW_ROWS)
        few, many = (self._parts(key, count, time) for count in (FEW_ROWS, MANY_ROWS))
        layer, ends = (
            max(at_few + (at_many - at_few) * weight, MIN_SHARE * at_few)
            for at_few, at_many in ((few.layer, many.layer), (few.ends, many.ends))
        )
        return _LayerAndEnds(layer=layer, ends=ends)

    def _parts(self, key: _Key, rows: int, time: Callable[[_Measured], float]) -> _LayerAndEnds:
        """Separate a measured time into one layer and the ends."""
        small, large = self._both(key, rows)
        return _LayerAndEnds.of(time(small), time(large), self.layers)

    def _both(self, key: _Key, rows: int) -> tuple[_Measured, _Measured]:
        """Return the times of the smaller and of the larger model, measured on first use."""
        if (key, rows) not in self.measured:
            small, large = (self._measure(config, key, rows) for config in self.configs)
            self.measured[key, rows] = small, large
        return self.measured[key, rows]

    def _measure(self, config: Any, key: _Key, rows: int) -> _Measured:
        options = {**self.options, "recompute": key.recompute, "sharding": key.sharding}
        options |= {"offload": "none", "microbatch_size": rows, "schedule": key.schedule}
        with fake_groups(key.layout, self.device) as groups:
            return self._steps(Engine(config, groups=groups, **options), rows)

    def _steps(self, engine: Engine, rows: int) -> _Measured:
        """Time steps of one and of two microbatches."""
        batches = [_rows(self.batch, rows * count) for count in (1, 2)]
        # Counting the collectives also warms up.
        one_messages, two_messages = (_messages(engine, batch) for batch in batches)
        # Alternate, so that other load on the machine affects both.
        rounds: list[list[_MeasuredStep]] = []
        start = perf_counter()
        while len(rounds) < MIN_ROUNDS or (
            len(rounds) < MAX_ROUNDS and perf_counter() - start < ENOUGH_S
        ):
            rounds.append([_step(engine, batch) for batch in batches])
        one_s, two_s = (min(times[index].total for times in rounds) for index in (0, 1))
        forward = min(times[1].forward for times in rounds)
        backward = min(times[1].backward for times in rounds)
        # Noise can make the difference negative or larger than the step of one microbatch.
        microbatch_s = min(one_s, max(0.0, two_s - one_s))
        # Multiset difference: collectives that the second microbatch repeats.
        per_microbatch = (two_messages - one_messages) & one_messages
        cluster = self.datasheet.cluster
        return _Measured(
            passes=RankSeconds(
                compute=microbatch_s, communication=seconds(per_microbatch, cluster)
            ),
            forward=forward / (forward + backward),
            step=RankSeconds(
                compute=one_s - microbatch_s,
                communication=seconds(one_messages - per_microbatch, cluster),
            ),
        )


def _messages(engine: Engine, batch: Batch) -> Counter[Message]:
    """Count the collectives of a step."""
    log = MessageLog()
    with log:
        _step(engine, batch)
    return log.messages


def _plain(layout: Layout) -> _Key:
    """Key of an engine without sharding, which is measured for the times of passes."""
    # Context ranks would shard the weights; `replicate` leaves one shard.
    unsharded = Layout(tensor=layout.tensor, context=layout.context, replicate=layout.context)
    return _Key(layout=unsharded, sharding="replicate" if layout.context > 1 else "auto")


def _excess(measured: Sequence[_Measured], baseline: Sequence[_Measured]) -> list[RankSeconds]:
    """Return the time per microbatch in excess of a baseline engine, for both model sizes."""
    return [
        RankSeconds(
            compute=max(0.0, a.passes.compute - b.passes.compute),
            communication=max(0.0, a.passes.communication - b.passes.communication),
        )
        for a, b in zip(measured, baseline, strict=True)
    ]


def _forward(measured: _Measured) -> float:
    return measured.passes.compute * measured.forward


def _backward(measured: _Measured) -> float:
    return measured.passes.compute * (1 - measured.forward)


def _communication(measured: _Measured) -> float:
    return measured.passes.communication


def _by_part(name: str, layers: int, both: Sequence[RankSeconds]) -> dict[str, RankSeconds]:
    """Separate times into one layer and the ends, as keyword arguments of `StepCosts`."""
    small, large = both
    compute = _LayerAndEnds.of(small.compute, large.compute, layers)
    communication = _LayerAndEnds.of(small.communication, large.communication, layers)
    return {
        f"{name}_layer": RankSeconds(compute=compute.layer, communication=communication.layer),
        f"{name}_ends": RankSeconds(compute=compute.ends, communication=communication.ends),
    }


def measurable(config: Any) -> list[Any] | None:
    """Return the configurations of the one-layer and the several-layer model to measure.

    None if the layers differ or cannot be separated into pipeline stages.
    """
    layers = config.num_hidden_layers
    sizes, *other_sizes = {*ModelSizes.of(config).layers}
    if len(model_plan(config).cuts) != layers or other_sizes:
        return None
    limit = max(MIN_LAYERS, min(MAX_LAYERS, LAYER_WEIGHTS // (sizes.split + sizes.replicated)))
    try:
        return [evolve(config, num_hidden_layers=count) for count in (1, min(layers, limit))]
    except ConfigError:
        return None


def _rows(batch: Batch, count: int) -> dict[str, Tensor]:
    """Repeat a batch's rows to get `count` rows."""
    rows = {}
    for name, tensor in batch.items():
        repeats = -(-count // len(tensor))
        rows[name] = tensor.repeat(repeats, *[1] * (tensor.ndim - 1))[:count]
    return rows


class _CpuTimeRecorder(ComputationRecorder):
    """Records this process's CPU time, which excludes time used by other processes."""

    def _mark(self) -> None:
        self.marks_ns.append(process_time_ns())


def _counts_own_work(device: torch.device) -> bool:
    """Return whether CPU time equals compute time, which requires a single thread."""
    return device.type == "cpu" and torch.get_num_threads() == 1


def _step(engine: Engine, batch: Batch) -> _MeasuredStep:
    """Time a step that changes no weight."""
    cpu_time = _counts_own_work(engine.device)
    recorder = _CpuTimeRecorder(engine.device) if cpu_time else ComputationRecorder(engine.device)
    loss, clock = NextTokenLoss(), process_time if cpu_time else perf_counter
    engine.runner.runtime.recorder = recorder
    start = clock()
    microbatches = engine.runner.microbatches(batch)
    weight = engine.reduction.count(microbatches, loss).weight
    results = engine.runner.forward_backward(microbatches, loss, max(1.0, weight), engine.reduction)
    gradients = engine.reduction.gradients()
    engine.reduction.totals(results, 0, 0, gradients, engine.row_check.terms())
    # Gradients hold garbage, as nothing was received, so the update has a learning rate of 0.
    engine.trained.apply(gradients, 1.0, 0.0)
    engine.trained.zero_grad()
    # Kernels run asynchronously, and the clock must not stop before they end.
    if engine.device.type != "cpu":
        torch.accelerator.synchronize()
    total = clock() - start
    engine.runner.runtime.recorder = None
    assert recorder.schedule is not None
    (row,) = recorder.schedule.computations()
    forward = backward = 0
    for action, (begin, end) in zip(row, recorder.times_ns(), strict=True):
        if action.kind is Kind.FORWARD:
            forward += end - begin
        else:
            backward += end - begin
    return _MeasuredStep(total=total, forward=forward / 1e9, backward=backward / 1e9)
