"""What a microbatch takes in each layer, measured on the device that is here.

The engine of a rank of the layout is built and computes, in a cluster that is not there: its
collectives return at once, so what is measured is the rank's own work, with the operators, the
shapes and the overheads of a run. What collectives take comes from the cluster's links.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.errors import ConfigError
from ms_parallel.models.registry import model_plan
from ms_parallel.pipeline.layer_split import Staged
from ms_parallel.pipeline.recorder import Recorder
from ms_parallel.planner.fake_cluster import fake_groups
from ms_parallel.planner.layouts.candidate import Split
from ms_parallel.planner.layouts.passes import ModelSeconds, PassSeconds, SheetTimes
from ms_parallel.planner.layouts.sizes import ModelSizes
from ms_parallel.planner.probes import segment_layers
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.schedule import Schedule

MICROBATCHES = 2
STEPS = 2
"""Steps that are timed, after one that is not; the fastest counts, as others disturb it least."""
FEW, SEVERAL = 1, 3
"""Rows of the microbatches that are measured; what others take lies on a straight line."""
WEIGHT_SHARE = 0.5
"""Share of a backward that gradients of weights take, as their products are half of all."""
LAYERS = 3
"""The first, which has the embedding, one of those between, and the last, which has the head."""
LEAST = 0.2
Batch = Mapping[str, Tensor]
Seconds = tuple[float, ...]
"""Seconds of each layer."""


@frozen(kw_only=True)
class _Measured:
    """Measured times of a model that is whole on one pipeline rank."""

    forward: tuple[float, ...]
    """Seconds of each segment, from one place where the model can be cut to the next."""
    backward: tuple[float, ...]
    between: float
    """Seconds of a step that no microbatch takes: sums, norms, and the optimizer's."""


class HereTimes:
    """Measures layers on a device of this machine, each shape once.

    Args:
        config: what `measurable` gives.
        sheet: what collectives take, and what cannot be measured.
        batch: rows as those of a run: tokens, targets, positions and, if packed, documents, each
            (rows, S); repeated to as many rows as a microbatch has.
        device: that computes.
        options: of the engine, such as mixed_precision.
    """

    def __init__(
        self,
        config: Any,
        sheet: SheetTimes,
        batch: Batch,
        device: torch.device,
        options: Mapping[str, Any],
    ) -> None:
        self.config, self.sheet, self.batch = config, sheet, batch
        self.device, self.options = device, dict(options)
        self.segments = segment_layers(config)
        self.known: dict[tuple[int, int, int, str], _Measured] = {}
        self.weights = ModelSizes.of(config).parameters

    def passes(self, split: Split, recompute: str) -> ModelSeconds:
        """Seconds of one microbatch: measured, and the collectives of the cluster added."""
        layout = split.layout
        if self.sheet.sizes.experts and layout.tensor * layout.expert > 1:
            # Which experts are chosen travels with the collectives, which are not there.
            return self.sheet.passes(split, recompute)
        forward, backward = self._times(layout.tensor, layout.context, split.rows)
        if recompute != "none":
            ratios = self._ratios(recompute)
            backward = tuple(time * ratio for time, ratio in zip(backward, ratios, strict=True))
        travel = self.sheet.travel(split)
        each = [
            PassSeconds(
                forward=ahead + travel,
                backward_input=back * (1 - WEIGHT_SHARE) + travel,
                backward_weight=back * WEIGHT_SHARE,
            )
            for ahead, back in zip(forward, backward, strict=True)
        ]
        middle = len(self.sheet.sizes.layers) - len(each)
        layers = (*each[:1], *each[1:2] * middle, *each[1:])
        # Embedding and head are measured with the first and the last layer.
        return ModelSeconds(layers=layers, first=PassSeconds(), last=PassSeconds())

    def _times(self, tensor: int, context: int, rows: int) -> tuple[Seconds, Seconds]:
        """Forwards and backwards of each layer, for any number of rows."""
        few, several = (self._found(tensor, context, count, "none") for count in (FEW, SEVERAL))
        share = (rows - FEW) / (SEVERAL - FEW)
        return (
            _line(few.forward, several.forward, share),
            _line(few.backward, several.backward, share),
        )

    def _ratios(self, recompute: str) -> Seconds:
        """How many times longer backwards take that compute again."""
        plain, again = (self._found(1, 1, SEVERAL, kind).backward for kind in ("none", recompute))
        return tuple(max(1.0, b / a) for a, b in zip(plain, again, strict=True))

    def _found(self, tensor: int, context: int, rows: int, recompute: str) -> _Measured:
        key = (tensor, context, rows, recompute)
        if key not in self.known:
            self.known[key] = self._measure(*key)
        return self.known[key]

    def update(self, weights: int) -> float:
        """Seconds of the optimizer, by those of all weights in one process."""
        return self._found(1, 1, SEVERAL, "none").between * weights / self.weights

    def copies(self, size_bytes: float) -> float:
        """Seconds in which what is gathered or summed is put in its place."""
        return self.sheet.copies(size_bytes)

    def _measure(self, tensor: int, context: int, rows: int, recompute: str) -> _Measured:
        layout = Layout(tensor=tensor, context=context)
        schedule = _whole_schedule(len(self.segments))
        options = {
            **self.options,
            "recompute": recompute,
            "sharding": "replicate",
            "offload": "none",
            "schedule": Staged(schedule=schedule, layers=self.segments),
            "microbatch_size": rows,
        }
        layout = evolve(layout, replicate=context)
        with fake_groups(layout, self.device) as groups:
            engine = Engine(self.config, groups=groups, **options)
            batch = _rows(self.batch, rows * MICROBATCHES)
            steps = [_step(engine, batch, schedule) for _ in range(1 + STEPS)][1:]
        forward, backward, between = zip(*steps, strict=True)
        return _Measured(
            forward=tuple(map(min, zip(*forward, strict=True))),
            backward=tuple(map(min, zip(*backward, strict=True))),
            between=median(between),
        )


def _line(few: Seconds, several: Seconds, share: float) -> Seconds:
    """Between two measurements, and beyond them in a straight line; never less than a part."""
    both = zip(few, several, strict=True)
    return tuple(max(one + (other - one) * share, LEAST * one) for one, other in both)


def measurable(config: Any) -> Any:
    """A model of few layers that stand for those of this one.

    None where a layer is not like the others, or cannot be measured by itself.
    """
    layers = config.num_hidden_layers
    if len(model_plan(config).cuts) != layers or len({*ModelSizes.of(config).layers}) > 1:
        return None
    try:
        return config if layers <= LAYERS else evolve(config, num_hidden_layers=LAYERS)
    except ConfigError:
        return None


def _whole_schedule(segments: int) -> Schedule:
    """All forwards, then all backwards, each segment a stage of the one rank."""
    numbers = range(MICROBATCHES)
    row = [Action(Kind.FORWARD, stage, number) for number in numbers for stage in range(segments)]
    row += [
        Action(Kind.BACKWARD, stage, number)
        for number in numbers
        for stage in reversed(range(segments))
    ]
    return Schedule.from_computations([row], [0] * segments, MICROBATCHES, "measurement")


def _rows(batch: Batch, count: int) -> dict[str, Tensor]:
    """So many rows, the same ones again and again."""
    found = {}
    for name, whole in batch.items():
        times = -(-count // len(whole))
        found[name] = whole.repeat(times, *[1] * (whole.ndim - 1))[:count]
    return found


def _step(
    engine: Engine, batch: Batch, schedule: Schedule
) -> tuple[Sequence[float], Sequence[float], float]:
    """Seconds of each segment's forward and backward, and of all else."""
    recorder = engine.passes.runtime.recorder = Recorder(engine.device)
    loss = NextTokenLoss()
    began = perf_counter()
    microbatches = engine.passes.microbatches(batch)
    weight = float(sum(loss.weight(each) for each in microbatches))
    losses = engine.passes.backward(microbatches, loss, weight)
    gradients = engine.trained.gradients(None)
    engine.trained.global_sums([each[None] for each in losses], 1, gradients)
    engine.trained.step(gradients, 1.0, 0.0)
    if engine.device.type != "cpu":
        torch.accelerator.synchronize()
    whole = perf_counter() - began
    engine.passes.runtime.recorder = None
    times: dict[tuple[Kind, int], list[float]] = {}
    row = schedule.computations()[0]
    for action, (begin, end) in zip(row, recorder.times_ns(), strict=True):
        times.setdefault((action.kind, action.stage), []).append((end - begin) / 1e9)
    stages = range(schedule.stages)
    forward = [min(times[Kind.FORWARD, stage]) for stage in stages]
    backward = [min(times[Kind.BACKWARD, stage]) for stage in stages]
    passing = sum(map(sum, times.values()))
    return forward, backward, max(0.0, whole - passing)
