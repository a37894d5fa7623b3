"""A schedule with the number of layers of each stage."""

from pathlib import Path

from attrs import frozen

from ms_parallel.schedules.table.schedule import Schedule


@frozen(kw_only=True)
class StagedSchedule:
    """A schedule with the number of layers of each stage."""

    schedule: Schedule
    layers: tuple[int, ...]


ScheduleChoice = str | Path | Schedule | StagedSchedule
"""Generator name, CSV file, table, or table with a layer split."""
