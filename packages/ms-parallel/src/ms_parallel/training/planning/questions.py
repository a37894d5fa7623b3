"""What another process is asked about a run: its settings as a record of plain values."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from attrs import asdict, fields, has

from ms_parallel.cluster.layout import Layout
from ms_parallel.cluster.mixed.devices import Devices
from ms_parallel.cluster.rest import DATA, REST, RestOnData
from ms_parallel.planner.apart import call_apart
from ms_parallel.planner.cluster import Cluster
from ms_parallel.planner.rank_memory import RankMemory
from ms_parallel.planner.record.history import History
from ms_parallel.planner.record.plan_file import Objective, Plan
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.settings.run_file import NOT_IN_FILES
from ms_parallel.training.options import Options

MEMORY = "ms_parallel.training.memory:answer"
PLAN = "ms_parallel.training.planning.plan:answer"
Plain = None | bool | int | float | str | list[Any] | dict[str, Any]


class ToldSchedule(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="schedule.v1"
):
    """A schedule that no name stands for and no file holds."""

    csv: str
    name: str


class ToldRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="run.v1"):
    """The options of a run, all but what is called with its events."""

    settings: dict[str, Plain]
    """By name, as a run file has them; `Options` checks them as it does a file's."""
    schedule: ToldSchedule | None = None
    """In place of the setting."""
    schedule_file: str | None = None
    """In place of the setting, where that is a Path, whatever its name ends with."""

    @classmethod
    def of(cls, options: Options) -> "ToldRun":
        """Collect what another process is told of a run."""
        given = {each.name: getattr(options, each.name) for each in fields(Options)}
        schedule, told, file = given["schedule"], None, None
        if isinstance(schedule, Schedule):
            told = ToldSchedule(csv=schedule.to_csv(), name=schedule.name)
        elif isinstance(schedule, os.PathLike):
            file = os.fspath(schedule)
        left_out = NOT_IN_FILES | {"schedule"} if told or file else NOT_IN_FILES
        settings = {name: _plain(each) for name, each in given.items() if name not in left_out}
        return cls(settings=settings, schedule=told, schedule_file=file)

    @property
    def options(self) -> Options:
        """The options again.

        Raises:
            ConfigError: a value is of the wrong kind or out of range.
        """
        settings: dict[str, Any] = dict(self.settings)
        if self.schedule is not None:
            told = self.schedule
            settings["schedule"] = Schedule.from_csv(told.csv, name=told.name)
        if self.schedule_file is not None:
            settings["schedule"] = Path(self.schedule_file)
        return Options(**settings)


class MemoryQuestion(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="memory.v1"
):
    """What `run_memory` is asked."""

    run: ToldRun
    layout: Layout
    shards: str | None
    rows: int | None


class PlanQuestion(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="plan.v1"
):
    """What `plan` is asked."""

    run: ToldRun
    cluster: Cluster
    objective: Objective = "fastest"
    best: int = 5
    every: bool = False
    shards: str | None = None
    history: History | None = None


def ask_memory(
    options: Options, layout: Layout, shards: Path | None, rows: int | None
) -> list[RankMemory]:
    """Ask another process what `run_memory` says; leave nothing behind in this one.

    Args:
        options: the run's.
        layout: how it is split, over any number of processes.
        shards: the dataset, if it is there already.
        rows: of a microbatch; None for what the options say.

    Raises:
        ParallelError: as of `run_memory`, or the process has ended.
    """
    question = MemoryQuestion(
        run=ToldRun.of(options), layout=layout, shards=told_path(shards), rows=rows
    )
    found: list[RankMemory] = call_apart(MEMORY, question, list[RankMemory])
    return found


def ask_plan(question: PlanQuestion) -> Plan:
    """Ask another process what `plan` says.

    Raises:
        ParallelError: as of `plan`, or the process has ended.
    """
    found: Plan = call_apart(PLAN, question, Plan)
    return found


def told_path(path: Path | None) -> str | None:
    """Return a path as a record holds it."""
    return None if path is None else os.fspath(path)


def path_told(path: str | None) -> Path | None:
    """Return the path of a record; None where it has none."""
    return None if path is None else Path(path)


def _plain(value: Any) -> Any:
    """Write a setting as a run file has it; leave what none can have for the encoder to refuse."""
    if isinstance(value, Layout):
        return asdict(value)
    if isinstance(value, RestOnData):
        return {**{name: _plain(each) for name, each in value.given.items()}, DATA[0]: REST}
    if isinstance(value, Devices):
        return {
            name: [rank for rank, each in enumerate(value.names) if each == name]
            for name in dict.fromkeys(value.names)
        }
    if has(type(value)):
        return _plain(asdict(value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(each) for each in value]
    return value
