"""Finds the schedule and the split of the layers that measured costs make shortest."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from ms_parallel.cluster.agreement import first_does
from ms_parallel.cluster.groups import Groups
from ms_parallel.errors import ConfigError, LayoutError, ScheduleError
from ms_parallel.models import ModelConfig, model_plan
from ms_parallel.planner.found_schedule import FoundSchedule
from ms_parallel.planner.measurement import PER_SECOND, measure_layers
from ms_parallel.schedules.generators.one_stage.one_f_one_b import one_f_one_b
from ms_parallel.schedules.solver.balance import Balanced, LayerCosts, balance
from ms_parallel.schedules.table.placements import looped, one_a_rank, vee
from ms_parallel.schedules.timeline.simulate import Timeline, simulate
from ms_parallel.split.stages import cut_layers

__all__ = ["asked_of", "find", "search_schedule"]

PER_MS = PER_SECOND // 1000
EFFORT = 0.5


def search_schedule(
    config: ModelConfig,
    groups: Groups,
    *,
    rows: int,
    sequence_length: int,
    microbatch_size: int | None = None,
    memory_cap_bytes: int | None = None,
    measure: Callable[..., LayerCosts] = measure_layers,
    **options: Any,
) -> FoundSchedule:
    """Measure this model on these processes, and search; the same result on every process.

    All processes call this before they build their engine with `schedule=found.staged`. Stages one
    a rank, in a V and in a loop of two are tried, each with the layers shared out to suit it.

    Args:
        config: the model.
        groups: the layout's processes.
        rows: that a data rank passes to one update.
        sequence_length: tokens of a row.
        microbatch_size: rows that pass at once; None for all of them.
        memory_cap_bytes: most activation memory of a rank; None for as much as 1F1B takes.
        measure: what gives the costs of the layers.
        options: of the engine that will perform it, such as `recompute` and `mixed_precision`.

    Raises:
        ConfigError: the rows do not divide into microbatches; only those of one size are searched.
        LayoutError: the model has fewer layers than the pipeline has ranks.
        ScheduleError: the cap is below the least that works, which is named.
    """
    size = microbatch_size or rows
    if rows % size:
        raise ConfigError(
            f"{rows} rows of a data rank do not divide into microbatches of {size}; a schedule is"
            " searched for microbatches of one size, so choose a divisor"
        )
    asked = asked_of(config, groups, rows, sequence_length, size, memory_cap_bytes, options)
    units, ranks = len(model_plan(config).cuts), groups.layout.pipeline
    if units < ranks:
        raise LayoutError(f"{units} layers for pipeline={ranks}; use at most {units} ranks")
    costs = measure(config, groups, rows=size, sequence_length=sequence_length, **options)
    # What is computed again would be kept from I to W, more than recomputation spares.
    whole = asked["recompute"] == "full"
    found = first_does(
        partial(
            _encoded, costs, ranks, rows // size, memory_cap_bytes, asked=asked, split=not whole
        )
    )
    return msgspec.json.decode(found, type=FoundSchedule)


def asked_of(
    config: ModelConfig,
    groups: Groups,
    rows: int,
    sequence_length: int,
    microbatch_size: int,
    memory_cap_bytes: int | None,
    options: dict[str, Any],
) -> dict[str, int | str | None]:
    """What a found schedule is for, as it stands in its file."""
    return {
        "layout": str(groups.layout),
        "architecture": config.model_type,
        "layers": config.num_hidden_layers,
        "rows": rows,
        "microbatch_size": microbatch_size,
        "sequence_length": sequence_length,
        "memory_cap_bytes": memory_cap_bytes,
        "recompute": str(options.get("recompute", "none")),
        "mixed_precision": int(options.get("mixed_precision", False)),
    }


def _encoded(*arguments: Any, **named: Any) -> bytes:
    return msgspec.json.encode(find(*arguments, **named))


def find(
    costs: LayerCosts,
    ranks: int,
    microbatches: int,
    memory_cap_bytes: int | None,
    *,
    asked: dict[str, int | str | None],
    split: bool = True,
    effort: float = EFFORT,
) -> FoundSchedule:
    """The shortest of the schedules on all placements; pure, and the same for the same costs.

    Raises:
        ScheduleError: the cap is below the least that works.
    """
    plain = _plain(costs, ranks, microbatches)
    cap = memory_cap_bytes or int(max(plain.peak_memory))
    placements = [one_a_rank(ranks), vee(ranks), looped(ranks, 2)][: 3 if ranks > 1 else 1]
    tried: list[Balanced] = []
    refusals: list[Exception] = []
    for placement in placements:
        if len(placement) > costs.layers:
            continue
        try:
            tried.append(
                balance(
                    costs,
                    cap,
                    placement=placement,
                    microbatches=microbatches,
                    split=split,
                    effort=effort / len(placements),
                )
            )
        except ScheduleError as refusal:
            refusals.append(refusal)
    if not tried:
        raise refusals[0]
    best = min(tried, key=lambda each: each.found.makespan)
    return FoundSchedule(
        asked=asked,
        table=best.found.schedule.to_csv(),
        layers=best.split,
        makespan_ms=float(best.found.makespan) / PER_MS,
        lower_bound_ms=float(best.found.lower_bound) / PER_MS,
        one_f_one_b_ms=float(plain.makespan) / PER_MS,
        peak_bytes=tuple(map(int, best.found.peak_memory)),
        memory_cap_bytes=cap,
        costs=_told(costs),
    )


def _plain(costs: LayerCosts, ranks: int, microbatches: int) -> Timeline:
    """1F1B with layers shared out as an engine does unasked."""
    even = cut_layers(costs.layers, ranks, range(costs.layers))
    return simulate(one_f_one_b(ranks, microbatches), costs.stages([len(each) for each in even]))


def _told(costs: LayerCosts) -> dict[str, tuple[float, ...]]:
    times = {
        "forward_ms": costs.forward,
        "backward_input_ms": costs.backward_input,
        "backward_weight_ms": costs.backward_weight,
        "latency_ms": [costs.latency],
        "transfer_ms": [costs.transfer],
    }
    sizes = {"activation_bytes": costs.activation, "retained_bytes": costs.retained}
    return {
        **{name: tuple(float(each) / PER_MS for each in values) for name, values in times.items()},
        **{name: tuple(map(float, values)) for name, values in sizes.items()},
    }
