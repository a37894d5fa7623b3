"""Arguments of calls in a subprocess, with the run's settings as a record of plain values."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from attrs import asdict, fields, has

from ms_parallel.cluster.layout import Layout
from ms_parallel.cluster.mixed.devices import Devices
from ms_parallel.cluster.partial_layout import DATA, REST, PartialLayout
from ms_parallel.planner.cluster import Cluster
from ms_parallel.planner.rank_memory import RankMemory
from ms_parallel.planner.record.history import History
from ms_parallel.planner.record.plan_file import Objective, Plan
from ms_parallel.planner.subprocess_call import call_in_subprocess
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.settings.run_file import NOT_IN_FILES
from ms_parallel.training.options import Options

MEMORY = "ms_parallel.training.memory:run_memory_in_subprocess"
PLAN = "ms_parallel.training.planning.plan:plan_in_subprocess"
Plain = None | bool | int | float | str | list[Any] | dict[str, Any]


class ScheduleRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="schedule.v1"
):
    """A schedule that has neither a name nor a file."""

    csv: str
    name: str


class RunRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="run.v1"
):
    """Options of a run in serializable form, without the event callback."""

    settings: dict[str, Plain]
    """Settings by name, as in a run file; `Options` validates them."""
    schedule: ScheduleRecord | None = None
    """Replaces the setting `schedule`."""
    schedule_file: str | None = None
    """Replaces the setting `schedule` if it is a Path, with any suffix."""

    @classmethod
    def of(cls, options: Options) -> "RunRecord":
        """Convert the options of a run."""
        values = {option.name: getattr(options, option.name) for option in fields(Options)}
        schedule, record, file = values["schedule"], None, None
        if isinstance(schedule, Schedule):
            record = ScheduleRecord(csv=schedule.to_csv(), name=schedule.name)
        elif isinstance(schedule, os.PathLike):
            file = os.fspath(schedule)
        omitted = NOT_IN_FILES | {"schedule"} if record or file else NOT_IN_FILES
        settings = {name: _plain(value) for name, value in values.items() if name not in omitted}
        return cls(settings=settings, schedule=record, schedule_file=file)

    @property
    def options(self) -> Options:
        """Rebuild the options.

        Raises:
            ConfigError: a value has the wrong type or is out of range.
        """
        settings: dict[str, Any] = dict(self.settings)
        if self.schedule is not None:
            record = self.schedule
            settings["schedule"] = Schedule.from_csv(record.csv, name=record.name)
        if self.schedule_file is not None:
            settings["schedule"] = Path(self.schedule_file)
        return Options(**settings)


class MemoryArguments(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="memory.v1"
):
    """Arguments of `run_memory`."""

    run: RunRecord
    layout: Layout
    shards: str | None
    rows: int | None


class PlanArguments(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="plan.v1"
):
    """Arguments of `plan`."""

    run: RunRecord
    cluster: Cluster
    objective: Objective = "fastest"
    best: int = 5
    every: bool = False
    shards: str | None = None
    history: History | None = None


def ask_memory(
    options: Options, layout: Layout, shards: Path | None, rows: int | None
) -> list[RankMemory]:
    """Run `run_memory` in a subprocess, which leaves no state in this process.

    Args:
        options: options of the run.
        layout: layout of the run, for any number of processes.
        shards: dataset, if it exists already.
        rows: microbatch size. None: from the options.

    Raises:
        ParallelError: as for `run_memory`, or the subprocess died.
    """
    arguments = MemoryArguments(
        run=RunRecord.of(options), layout=layout, shards=encode_path(shards), rows=rows
    )
    ranks: list[RankMemory] = call_in_subprocess(MEMORY, arguments, list[RankMemory])
    return ranks


def ask_plan(arguments: PlanArguments) -> Plan:
    """Run `plan` in a subprocess.

    Raises:
        ParallelError: as for `plan`, or the subprocess died.
    """
    plan: Plan = call_in_subprocess(PLAN, arguments, Plan)
    return plan


def encode_path(path: Path | None) -> str | None:
    """Convert a path for a record."""
    return None if path is None else os.fspath(path)


def decode_path(path: str | None) -> Path | None:
    """Convert a record's path back."""
    return None if path is None else Path(path)


def _plain(value: Any) -> Any:
    """Convert a setting to its form in a run file; other types are left to fail in the encoder."""
    if isinstance(value, Layout):
        return asdict(value)
    if isinstance(value, PartialLayout):
        return {**{name: _plain(item) for name, item in value.axes.items()}, DATA[0]: REST}
    if isinstance(value, Devices):
        return {
            name: [rank for rank, item in enumerate(value.names) if item == name]
            for name in dict.fromkeys(value.names)
        }
    if has(type(value)):
        return _plain(asdict(value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value
