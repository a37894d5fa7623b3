"""What a step takes on the device that is here: layers, what stands beside them, and messages.

The engine of a rank of the layout is built and takes whole steps, in a cluster that is not there:
its collectives return at once, so what is measured is the rank's own work, with the operators, the
shapes and the overheads of a run. Which collectives it asked for is counted, and what these take
comes from the cluster's links. Steps of one and of two microbatches tell what is done for each of
them from what is done once, and models of one layer and of a few what is done for each layer.
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
from ms_parallel.pipeline.recorder import Recorder
from ms_parallel.planner.fake_cluster import fake_groups
from ms_parallel.planner.layouts.candidate import Candidate, Split
from ms_parallel.planner.layouts.messages import Message, MessageLog, seconds
from ms_parallel.planner.layouts.passes import (
    ModelSeconds,
    OwnAndTravel,
    PassSeconds,
    SheetTimes,
    StepCosts,
)
from ms_parallel.planner.layouts.pipeline import splits_backward
from ms_parallel.planner.layouts.sizes import ModelSizes
from ms_parallel.planner.layouts.variants import PLAIN
from ms_parallel.schedules.table.action import Kind

LEAST_ROUNDS, MOST_ROUNDS, ENOUGH_S = 2, 5, 0.4
"""Steps that are timed, after one whose messages are counted: so many at most, and no more once all
of them took so long together. The fastest counts, as others disturb it least; short ones are
disturbed most."""
FEW, SEVERAL = 1, 4
"""Rows of the microbatches that are measured; what others take lies on a straight line."""
WEIGHT_SHARE = 0.5
"""Share of a backward that gradients of weights take, as their products are half of all."""
LEAST_LAYERS, MOST_LAYERS, LAYER_WEIGHTS = 3, 8, 1 << 24
"""Layers of the larger model that is measured: more than the least while all have no more weights
together. The smaller model has one."""
LEAST = 0.2
SPLIT = "zb-h1"
"""A schedule of one rank that puts off gradients of weights."""
MANY = 32
"""Ranks that share out weights beyond which their engines are not built: FSDP's setup grows."""
Batch = Mapping[str, Tensor]


@frozen(kw_only=True)
class _Key:
    """What decides how an engine works, its rows and layers apart."""

    layout: Layout
    """Without pipeline ranks."""
    sharding: str
    recompute: str = "none"
    schedule: str = PLAIN
    """Schedule of one rank, which decides whether gradients of weights are put off."""


@frozen(kw_only=True)
class _Measured:
    """Seconds of a model that is whole on one pipeline rank, for microbatches of so many rows."""

    passes: OwnAndTravel
    """Seconds of a microbatch."""
    forward: float
    """Share of a microbatch's own work that is its forward."""
    step: OwnAndTravel
    """Seconds that a step takes once."""


@frozen(kw_only=True)
class _Took:
    """Seconds of a step."""

    whole: float
    forward: float
    """Seconds of all forwards."""
    backward: float


@frozen(kw_only=True)
class _Parts:
    """Seconds that both models give: a layer's, and those of all else."""

    layer: float
    ends: float

    @classmethod
    def of(cls, few: float, several: float, layers: int) -> "_Parts":
        """Split what models of one layer and of several take; no part is negative."""
        layer = max(0.0, (several - few) / (layers - 1)) if layers > 1 else 0.0
        return cls(layer=layer, ends=max(0.0, few - layer))


@frozen
class _Microbatch:
    """Seconds of a part of a model for one microbatch."""

    forward: float
    backward: float
    travel: float

    def at_least(self, other: "_Microbatch") -> "_Microbatch":
        """Return the same, no part below another's: what is not so was disturbed."""
        return _Microbatch(*map(max, astuple(self), astuple(other)))

    def passes(self, plain: "_Microbatch") -> PassSeconds:
        """Share it out to passes, by what it takes where nothing is recomputed."""
        weights = plain.backward * WEIGHT_SHARE
        return PassSeconds(
            forward=self.forward + plain.travel / 2,
            backward_input=self.backward - weights + self.travel - plain.travel / 2,
            backward_weight=weights,
            travel=self.travel,
        )


class HereTimes:
    """Measures engines on a device of this machine, each once.

    Args:
        configs: what `measurable` gives.
        sheet: what collectives take, and what cannot be measured.
        batch: rows as those of a run: tokens, targets, positions and, if packed, documents, each
            (rows, S); repeated to as many rows as a microbatch has.
        device: that computes.
        options: of the engine, such as mixed_precision.
    """

    def __init__(
        self,
        configs: Sequence[Any],
        sheet: SheetTimes,
        batch: Batch,
        device: torch.device,
        options: Mapping[str, Any],
    ) -> None:
        self.configs, self.sheet, self.batch = tuple(configs), sheet, batch
        self.device, self.options = device, dict(options)
        self.layers = configs[-1].num_hidden_layers
        self.known: dict[tuple[_Key, int], tuple[_Measured, _Measured]] = {}

    def passes(self, split: Split, recompute: str) -> ModelSeconds:
        """Return a microbatch's seconds: measured, with its collectives by the cluster's links."""
        layout = split.layout
        if not self._is_measured(layout):
            return self.sheet.passes(split, recompute)
        key = _plain(layout)
        layer, ends = plain, _ = self._found(key, split.rows)
        if recompute != "none":
            again, _ = self._found(evolve(key, recompute=recompute), split.rows)
            layer = again.at_least(plain)
        # The embedding and the head are measured together, and the head has nearly all of it.
        return ModelSeconds(
            layers=(layer.passes(plain),) * len(self.sheet.sizes.layers),
            first=PassSeconds(),
            last=ends.passes(ends),
        )

    def costs(self, candidate: Candidate) -> StepCosts | None:
        """Return what a step takes beside its passes; None where it is not measured."""
        layout, sharding = candidate.layout, candidate.sharding
        if not self._is_measured(layout) or layout.token_ranks > MANY:
            return None
        if layout.pipeline > 1 and sharding == "auto":
            sharding = "zero1"
        plain = self._both(_plain(layout), FEW)
        sharded = plain
        if layout.token_ranks > 1:
            sharded = self._both(_Key(layout=evolve(layout, pipeline=1), sharding=sharding), FEW)
        beyond = _beyond(sharded, plain)
        if layout.pipeline > 1 and splits_backward(candidate.schedule):
            whole = evolve(_plain(layout), recompute=candidate.recompute)
            split = evolve(whole, schedule=SPLIT)
            both = zip(beyond, _beyond(self._both(split, FEW), self._both(whole, FEW)), strict=True)
            beyond = [OwnAndTravel(own=x.own + y.own, travel=x.travel) for x, y in both]
        return StepCosts(
            **_named("pass", self.layers, beyond),
            **_named("step", self.layers, [each.step for each in sharded]),
        )

    def update(self, weights: int) -> float:
        """Return the seconds of the optimizer, where a step's costs are not measured."""
        return self.sheet.update(weights)

    def copies(self, size_bytes: float) -> float:
        """Return the seconds in which what is gathered or summed is put in its place."""
        return self.sheet.copies(size_bytes)

    def _is_measured(self, layout: Layout) -> bool:
        """Return whether an engine can be timed: not where experts are chosen over collectives."""
        return not (self.sheet.sizes.experts and layout.tensor * layout.expert > 1)

    def _found(self, key: _Key, rows: int) -> tuple[_Microbatch, _Microbatch]:
        """Return what a layer of a microbatch of so many rows takes, and the ends."""
        parts = [self._line(key, rows, of) for of in (_forward, _backward, _travel)]
        layer = _Microbatch(*(each.layer for each in parts))
        return layer, _Microbatch(*(each.ends for each in parts))

    def _line(self, key: _Key, rows: int, of: Callable[[_Measured], float]) -> _Parts:
        """Put the parts of a microbatch of any rows on a line, at `LEAST` of the first or above."""
        share = (rows - FEW) / (SEVERAL - FEW)
        few, several = (self._parts(key, count, of) for count in (FEW, SEVERAL))
        layer, ends = (
            max(one + (other - one) * share, LEAST * one)
            for one, other in ((few.layer, several.layer), (few.ends, several.ends))
        )
        return _Parts(layer=layer, ends=ends)

    def _parts(self, key: _Key, rows: int, of: Callable[[_Measured], float]) -> _Parts:
        """Split what a microbatch takes into the parts of a layer and of the ends."""
        one, other = self._both(key, rows)
        return _Parts.of(of(one), of(other), self.layers)

    def _both(self, key: _Key, rows: int) -> tuple[_Measured, _Measured]:
        """Return the measured times of the smaller and of the larger model."""
        if (key, rows) not in self.known:
            one, other = (self._measure(config, key, rows) for config in self.configs)
            self.known[key, rows] = one, other
        return self.known[key, rows]

    def _measure(self, config: Any, key: _Key, rows: int) -> _Measured:
        options = {**self.options, "recompute": key.recompute, "sharding": key.sharding}
        options |= {"offload": "none", "microbatch_size": rows, "schedule": key.schedule}
        with fake_groups(key.layout, self.device) as groups:
            return self._steps(Engine(config, groups=groups, **options), rows)

    def _steps(self, engine: Engine, rows: int) -> _Measured:
        """Time steps of one and of two microbatches."""
        batches = [_rows(self.batch, rows * count) for count in (1, 2)]
        once, twice = (_messages(engine, batch) for batch in batches)  # which warms up, too
        # In turns, so that what comes and goes on the machine meets both.
        times: list[list[_Took]] = []
        began = perf_counter()
        while len(times) < LEAST_ROUNDS or (
            len(times) < MOST_ROUNDS and perf_counter() - began < ENOUGH_S
        ):
            times.append([_step(engine, batch) for batch in batches])
        own = [min(each[count].whole for each in times) for count in (0, 1)]
        forward = min(each[1].forward for each in times)
        backward = min(each[1].backward for each in times)
        passes = min(own[0], max(0.0, own[1] - own[0]))
        sent = (twice - once) & once
        cluster = self.sheet.cluster
        return _Measured(
            passes=OwnAndTravel(own=passes, travel=seconds(sent, cluster)),
            forward=forward / (forward + backward),
            step=OwnAndTravel(own=own[0] - passes, travel=seconds(once - sent, cluster)),
        )


def _messages(engine: Engine, batch: Batch) -> Counter[Message]:
    """Count the collectives of a step."""
    log = MessageLog()
    with log:
        _step(engine, batch)
    return log.messages


def _plain(layout: Layout) -> _Key:
    """Return the key of an engine in which nothing is sharded; it decides a layer's passes."""
    alone = Layout(tensor=layout.tensor, context=layout.context, replicate=layout.context)
    return _Key(layout=alone, sharding="replicate" if layout.context > 1 else "auto")


def _beyond(ones: Sequence[_Measured], others: Sequence[_Measured]) -> list[OwnAndTravel]:
    """Return what microbatches take beyond those of other engines, for both model sizes."""
    return [
        OwnAndTravel(
            own=max(0.0, one.passes.own - other.passes.own),
            travel=max(0.0, one.passes.travel - other.passes.travel),
        )
        for one, other in zip(ones, others, strict=True)
    ]


def _forward(one: _Measured) -> float:
    return one.passes.own * one.forward


def _backward(one: _Measured) -> float:
    return one.passes.own * (1 - one.forward)


def _travel(one: _Measured) -> float:
    return one.passes.travel


def _named(name: str, layers: int, both: Sequence[OwnAndTravel]) -> dict[str, OwnAndTravel]:
    """Name the parts of a layer and of the ends as `StepCosts` does."""
    few, several = both
    own = _Parts.of(few.own, several.own, layers)
    travel = _Parts.of(few.travel, several.travel, layers)
    return {
        f"{name}_layer": OwnAndTravel(own=own.layer, travel=travel.layer),
        f"{name}_ends": OwnAndTravel(own=own.ends, travel=travel.ends),
    }


def measurable(config: Any) -> list[Any] | None:
    """Return models of one layer and of few that stand for those of this one.

    None where a layer is not like the others, or cannot be measured by itself.
    """
    layers = config.num_hidden_layers
    sizes, *others = {*ModelSizes.of(config).layers}
    if len(model_plan(config).cuts) != layers or others:
        return None
    most = max(LEAST_LAYERS, min(MOST_LAYERS, LAYER_WEIGHTS // (sizes.split + sizes.whole)))
    try:
        return [evolve(config, num_hidden_layers=count) for count in (1, min(layers, most))]
    except ConfigError:
        return None


def _rows(batch: Batch, count: int) -> dict[str, Tensor]:
    """Repeat a batch's rows until there are so many."""
    found = {}
    for name, whole in batch.items():
        times = -(-count // len(whole))
        found[name] = whole.repeat(times, *[1] * (whole.ndim - 1))[:count]
    return found


class _OwnRecorder(Recorder):
    """Records by the clock of this process's own work: what others take of a CPU is none of it."""

    def _mark(self) -> None:
        self.marks_ns.append(process_time_ns())


def _counts_own_work(device: torch.device) -> bool:
    """Return whether the CPU time of a process says how long it computes: with one thread only."""
    return device.type == "cpu" and torch.get_num_threads() == 1


def _step(engine: Engine, batch: Batch) -> _Took:
    """Take a step that changes no weight, and time it."""
    own = _counts_own_work(engine.device)
    recorder = _OwnRecorder(engine.device) if own else Recorder(engine.device)
    loss, clock = NextTokenLoss(), process_time if own else perf_counter
    engine.runner.runtime.recorder = recorder
    began = clock()
    microbatches = engine.runner.microbatches(batch)
    weight = engine.reduction.count(microbatches, loss).weight
    results = engine.runner.forward_backward(microbatches, loss, max(1.0, weight), engine.reduction)
    gradients = engine.reduction.gradients()
    engine.reduction.totals(results, 0, 0, gradients, engine.row_check.terms())
    # Whatever stands where sums were not received: the update is made, at a rate of nothing.
    engine.trained.apply(gradients, 1.0, 0.0)
    engine.trained.zero_grad()
    if engine.device.type != "cpu":
        torch.accelerator.synchronize()
    whole = clock() - began
    engine.runner.runtime.recorder = None
    assert recorder.schedule is not None
    (row,) = recorder.schedule.computations()
    forward = backward = 0
    for action, (begin, end) in zip(row, recorder.times_ns(), strict=True):
        if action.kind is Kind.FORWARD:
            forward += end - begin
        else:
            backward += end - begin
    return _Took(whole=whole, forward=forward / 1e9, backward=backward / 1e9)
