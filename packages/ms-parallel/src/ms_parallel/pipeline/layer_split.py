"""A schedule together with the number of layers of each of its stages."""

from attrs import frozen

from ms_parallel.schedules.table.schedule import Schedule

__all__ = ["Staged"]


@frozen(kw_only=True)
class Staged:
    """A schedule, and how many layers each of its stages has."""

    schedule: Schedule
    layers: tuple[int, ...]
