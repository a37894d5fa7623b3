"""Which schedule an engine performs: to train, and to run forwards alone."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Literal

from ms_parallel.errors import ConfigError
from ms_parallel.schedules import Action, Kind, Schedule, gpipe, one_f_one_b, verify

__all__ = ["Tables"]

GENERATORS: Mapping[str, Callable[[int, int], Schedule]] = {"1f1b": one_f_one_b, "gpipe": gpipe}


class Tables:
    """The tables of one choice of schedule, each made once.

    Args:
        choice: a generator's name, or a table of its own number of microbatches.
        ranks: pipeline ranks of the layout.

    Raises:
        ConfigError: the name is not known, or the table is for another number of ranks.
        ScheduleError: the table is not right.
    """

    def __init__(self, choice: Literal["1f1b", "gpipe"] | Schedule, ranks: int) -> None:
        self.choice = choice
        self.placement = tuple(range(ranks))
        """Pipeline rank of each stage."""
        if isinstance(choice, Schedule):
            if choice.ranks != ranks:
                raise ConfigError(
                    f"the schedule is for {choice.ranks} ranks but pipeline={ranks}; "
                    "choose one of as many"
                )
            verify(choice)
            self.placement = choice.placement
        elif choice not in GENERATORS:
            known = ", ".join(GENERATORS)
            raise ConfigError(f"schedule {choice!r} is not known; choose {known} or a Schedule")

    def training(self, microbatches: int) -> Schedule:
        """Forwards and backwards of an update.

        Raises:
            ConfigError: the table that was chosen is for another number of microbatches.
        """
        if not isinstance(self.choice, Schedule):
            return _generated(self.choice, len(self.placement), microbatches)
        if self.choice.microbatches != microbatches:
            raise ConfigError(
                f"the schedule is of {self.choice.microbatches} microbatches but the batch "
                f"has {microbatches}; change microbatch_size or the schedule"
            )
        return self.choice

    def forwards(self, microbatches: int) -> Schedule:
        """Forwards alone, to evaluate or generate."""
        return _forwards(self.placement, microbatches)


@cache
def _generated(name: str, ranks: int, microbatches: int) -> Schedule:
    return GENERATORS[name](ranks, microbatches)


@cache
def _forwards(placement: tuple[int, ...], microbatches: int) -> Schedule:
    rows = [
        [
            Action(Kind.FORWARD, stage, microbatch)
            for microbatch in range(microbatches)
            for stage, home in enumerate(placement)
            if home == rank
        ]
        for rank in range(max(placement) + 1)
    ]
    return Schedule.from_computations(rows, placement, microbatches, "forwards")
