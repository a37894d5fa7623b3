"""Registers generators by the names of commands and run files, and makes schedules by name.

A generator is a function with the decorator `generator`, in a file anywhere in this room; nothing
else names it.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import TypeVar

from attrs import frozen

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.costs import Costs
from ms_parallel.schedules.table.placements import looped
from ms_parallel.schedules.table.schedule import Schedule

_Make = TypeVar("_Make", bound=Callable[..., Schedule])


@frozen(kw_only=True)
class Generator:
    """A generator, and what the search and `named_schedule` need to know of it."""

    make: Callable[..., Schedule]
    """Function of (ranks, microbatches); with `from_costs`, of (costs, microbatches)."""
    placement: Callable[..., tuple[int, ...]]
    """Rank of each stage as a function of ranks; `looped` also takes the stages a rank, which
    `make` then takes as its third argument."""
    from_costs: bool
    begins_search: bool

    def __call__(self, ranks: int, microbatches: int, costs: Costs) -> Schedule:
        """Make the schedule; `costs` are those of one stage a rank."""
        return self.make(costs if self.from_costs else ranks, microbatches)

    def start(self, placement: tuple[int, ...], microbatches: int) -> Schedule | None:
        """Make the schedule from which a search on this placement may begin, if there is one."""
        ranks = max(placement) + 1
        rounds = (len(placement) // ranks,) if self.placement is looped else ()
        if not self.begins_search or rounds == (1,) or self.placement(ranks, *rounds) != placement:
            return None
        return self.make(ranks, microbatches, *rounds)


_generators: dict[str, Generator] = {}
GENERATORS: Mapping[str, Generator] = MappingProxyType(_generators)
"""Every generator by name: a function of (ranks, microbatches, costs of one stage a rank)."""


def generator(
    name: str,
    *,
    placement: Callable[..., tuple[int, ...]],
    from_costs: bool = False,
    begins_search: bool = False,
) -> Callable[[_Make], _Make]:
    """Register the decorated function as a generator.

    Args:
        name: In commands and run files.
        placement: Where its stages live; see `Generator`.
        from_costs: Whether it takes costs in place of the number of ranks.
        begins_search: Whether a search also begins from its order.
    """

    def register(make: _Make) -> _Make:
        assert name not in _generators, f"two generators are named {name}"
        _generators[name] = Generator(
            make=make, placement=placement, from_costs=from_costs, begins_search=begins_search
        )
        return make

    return register


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
        known = ", ".join(sorted(GENERATORS))
        hint = f"did you mean {near[0]!r}?" if near else f"known are {known}"
        raise ScheduleError(f"there is no schedule {name!r}; {hint}")
    if costs is None:
        costs = Costs.uniform(max(ranks, 1))
    if ranks < 1 or costs.stages != ranks:
        raise ScheduleError(
            f"costs of {costs.stages} stages for {ranks} ranks; give at least 1 rank and one "
            "cost for each"
        )
    return GENERATORS[name](ranks, microbatches, costs)
