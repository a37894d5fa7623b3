"""Every generator under the name that commands and run files use."""

from collections.abc import Callable
from difflib import get_close_matches
from types import MappingProxyType

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.generators.looped.breadth_first import breadth_first
from ms_parallel.schedules.generators.looped.interleaved import interleaved_one_f_one_b
from ms_parallel.schedules.generators.one_stage.gpipe import gpipe
from ms_parallel.schedules.generators.one_stage.one_f_one_b import one_f_one_b
from ms_parallel.schedules.generators.one_stage.zb1p import zb1p
from ms_parallel.schedules.generators.one_stage.zb2p import zb2p
from ms_parallel.schedules.generators.one_stage.zb_h1 import zb_h1
from ms_parallel.schedules.generators.one_stage.zb_h2 import zb_h2
from ms_parallel.schedules.generators.vee.dualpipe_v import dualpipe_v
from ms_parallel.schedules.generators.vee.v_half import v_half
from ms_parallel.schedules.generators.vee.v_min import v_min
from ms_parallel.schedules.generators.vee.zb_v import zb_v
from ms_parallel.schedules.table.costs import Costs
from ms_parallel.schedules.table.schedule import Schedule

__all__ = ["GENERATORS", "named_schedule"]

_Maker = Callable[[int, int, Costs], Schedule]


def _by_size(make: Callable[[int, int], Schedule]) -> _Maker:
    return lambda ranks, microbatches, _: make(ranks, microbatches)


def _by_costs(make: Callable[[Costs, int], Schedule]) -> _Maker:
    return lambda _, microbatches, costs: make(costs, microbatches)


GENERATORS: MappingProxyType[str, _Maker] = MappingProxyType(
    {
        "1f1b": _by_size(one_f_one_b),
        "breadth-first": _by_size(breadth_first),
        "dualpipe-v": _by_size(dualpipe_v),
        "gpipe": _by_size(gpipe),
        "interleaved-1f1b": _by_size(interleaved_one_f_one_b),
        "v-half": _by_size(v_half),
        "v-min": _by_size(v_min),
        "zb-h1": _by_size(zb_h1),
        "zb-h2": _by_size(zb_h2),
        "zb-v": _by_size(zb_v),
        "zb1p": _by_costs(zb1p),
        "zb2p": _by_costs(zb2p),
    }
)
"""Name → function of (ranks, microbatches, costs of one stage a rank)."""


def named_schedule(
    name: str, ranks: int, microbatches: int, *, costs: Costs | None = None
) -> Schedule:
    """Make a schedule by name.

    Args:
        name: One of `GENERATORS`.
        ranks: Ranks of the pipeline; some schedules give each two stages.
        microbatches: Of one step.
        costs: Of one stage a rank, for `zb1p` and `zb2p`; default equal ones.

    Raises:
        ScheduleError: no such name (the nearest one is given), or sizes that do not fit.
    """
    if name not in GENERATORS:
        near = get_close_matches(name, GENERATORS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(GENERATORS)}"
        raise ScheduleError(f"there is no schedule {name!r}; {hint}")
    if costs is None:
        costs = Costs.uniform(max(ranks, 1))
    if ranks < 1 or costs.stages != ranks:
        raise ScheduleError(
            f"costs of {costs.stages} stages for {ranks} ranks; give at least 1 rank and one "
            "cost for each"
        )
    return GENERATORS[name](ranks, microbatches, costs)
