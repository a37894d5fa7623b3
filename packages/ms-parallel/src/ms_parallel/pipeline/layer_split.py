"""A schedule together with the number of layers of each of its stages."""

from pathlib import Path

from attrs import frozen

from ms_parallel.schedules.table.schedule import Schedule


@frozen(kw_only=True)
class Staged:
    """A schedule, and how many layers each of its stages has."""

    schedule: Schedule
    layers: tuple[int, ...]


Choice = str | Path | Schedule | Staged
"""A generator's name, a CSV file, a table, or a table with its split of the layers."""
