"""Registry of schedule generators by name, as used in commands and run files.

A generator is a function with the decorator `generator`, in any file of this package.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from numbers import Integral
from types import MappingProxyType
from typing import Any, TypeVar, cast

from attrs import frozen

from ms_parallel.arguments import check_integer, check_type
from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.costs import Costs
from ms_parallel.schedules.table.placements import looped
from ms_parallel.schedules.table.schedule import Schedule

_Make = TypeVar("_Make", bound=Callable[..., Schedule])


@frozen(kw_only=True)
class Generator:
    """A schedule generator and its properties."""

    make: Callable[..., Schedule]
    """Function of (ranks, microbatches); with `from_costs`, of (costs, microbatches)."""
    placement: Callable[..., tuple[int, ...]]
    """Rank of each stage as a function of ranks; `looped` also takes the stages per rank, which
    `make` then takes as its third argument."""
    from_costs: bool
    seeds_search: bool
    """Whether a search also starts from this schedule's order."""

    def __call__(self, ranks: int, microbatches: int, costs: Costs) -> Schedule:
        """Generate the schedule; `costs` are for one stage per rank."""
        return self.make(costs if self.from_costs else ranks, microbatches)

    def start(self, placement: tuple[int, ...], microbatches: int) -> Schedule | None:
        """Generate the initial schedule of a search on this placement; None if not applicable."""
        ranks = max(placement) + 1
        # Looped placements with one stage per rank are covered by the one-stage schedules.
        rounds = (len(placement) // ranks,) if self.placement is looped else ()
        if not self.seeds_search or rounds == (1,) or self.placement(ranks, *rounds) != placement:
            return None
        return self.make(ranks, microbatches, *rounds)


_generators: dict[str, Generator] = {}
GENERATORS: Mapping[str, Generator] = MappingProxyType(_generators)
"""Generators by name, as functions of (ranks, microbatches, costs of one stage per rank)."""


def generator(
    name: str,
    *,
    placement: Callable[..., tuple[int, ...]],
    from_costs: bool = False,
    seeds_search: bool = False,
) -> Callable[[_Make], _Make]:
    """Register the decorated function as a generator.

    Args:
        name: name in commands and run files.
        placement: placement of the stages; see `Generator`.
        from_costs: the function takes costs instead of the number of ranks.
        seeds_search: a search also starts from its order.
    """

    def register(make: _Make) -> _Make:
        assert name not in _generators, f"two generators are named {name}"

        @wraps(make)
        def checked(*sizes: Any, **named_sizes: Any) -> Schedule:
            parameters = signature(make).parameters
            for size, value in (*zip(parameters, sizes, strict=False), *named_sizes.items()):
                if size != "costs":
                    check_type(size, value, Integral, "an integer", error=ScheduleError)
            return make(*sizes, **named_sizes)

        _generators[name] = Generator(
            make=checked, placement=placement, from_costs=from_costs, seeds_search=seeds_search
        )
        return cast(_Make, checked)

    return register


def named_schedule(
    name: str, ranks: int, microbatches: int, *, costs: Costs | None = None
) -> Schedule:
    """Generate a schedule by name.

    Args:
        name: key of `GENERATORS`.
        ranks: pipeline ranks; some schedules have two stages per rank.
        microbatches: microbatches per step.
        costs: costs of one stage per rank, for `zb1p` and `zb2p`; equal costs by default.

    Raises:
        ScheduleError: the name is unknown (the nearest one is suggested), or sizes do not fit.
    """
    check_type("name", name, str, "the name of a schedule", error=ScheduleError)
    check_integer("ranks", ranks, minimum=1, error=ScheduleError)
    check_type("costs", costs, Costs, "Costs", error=ScheduleError, optional=True)
    if name not in GENERATORS:
        close_matches = get_close_matches(name, GENERATORS, n=1)
        names = ", ".join(sorted(GENERATORS))
        hint = f"did you mean {close_matches[0]!r}?" if close_matches else f"use one of {names}"
        raise ScheduleError(f"unknown schedule {name!r}; {hint}")
    if costs is None:
        costs = Costs.uniform(max(ranks, 1))
    if ranks < 1 or costs.stages != ranks:
        raise ScheduleError(
            f"costs of {costs.stages} stages for {ranks} ranks; use at least 1 rank and one cost "
            "per rank"
        )
    return GENERATORS[name](ranks, microbatches, costs)
