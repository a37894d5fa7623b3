"""A schedule told and drawn: made by name, read or searched for; proved and simulated."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
from attrs import frozen

from ms_parallel.durable import publish, write_synced
from ms_parallel.errors import ConfigError
from ms_parallel.schedules import (
    Costs,
    Schedule,
    Timeline,
    draw_html,
    draw_svg,
    named_schedule,
    search,
    simulate,
    verify,
)
from ms_parallel.settings import nearest
from ms_parallel.tables import is_file, read_schedule

__all__ = ["ScheduleFacts", "Told", "draw_to", "parse_costs", "tell"]

SEARCH = "search"
COSTS = ("forward", "backward_input", "backward_weight", "activation", "latency")
PICTURES = {".svg": draw_svg, ".html": draw_html}


class ScheduleFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule in numbers. Times and memory are in the units of the costs."""

    name: str
    ranks: int
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    """Rank of each stage."""
    makespan: float
    bubble: float
    """Share of all ranks' time in which they compute nothing."""
    idle: tuple[float, ...]
    """The same of each rank."""
    peak_memory: tuple[float, ...]
    """Most activation memory of each rank."""
    messages: int
    """That cross from one rank to another in a step."""
    critical_path: tuple[str, ...]
    """Actions that explain the makespan, as `rank:action`, in order."""
    lower_bound: float | None = None
    """Of a search: a makespan that no schedule can beat."""


@frozen(kw_only=True)
class Told:
    """What `tell` found."""

    facts: ScheduleFacts
    timeline: Timeline


def tell(
    choice: str,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    costs: str = "",
    memory_cap: float | None = None,
) -> Told:
    """Make, read or search for a schedule, prove it, and play it.

    Args:
        choice: a generator's name, a CSV file, or `search`.
        ranks: of the pipeline; a file has its own.
        microbatches: of one step; a file has its own.
        costs: such as `forward=1,backward_input=1.3,latency=0.1`; a value a stage as `1:1:1:1.4`.
        memory_cap: most activation memory of a rank, for `search`.

    Raises:
        ConfigError: a size is missing or a cost cannot be read.
        ScheduleError: no such name, a wrong table, or sizes that do not fit.
    """
    given, bound = parse_costs(costs), None
    if is_file(choice):
        schedule = _read(choice, ranks, microbatches)
    elif ranks is None or microbatches is None:
        raise ConfigError(f"{choice} needs sizes; give --stages and --microbatches")
    elif choice == SEARCH:
        stages = max([ranks, *map(len, given.values())])
        found = search(_costs(given, stages), memory_cap, microbatches=microbatches, ranks=ranks)
        schedule, bound = found.schedule, float(found.lower_bound)
    else:
        # What is generated from costs has one stage a rank; the rest does not look at them.
        fits = ranks > 0 and all(len(values) in (1, ranks) for values in given.values())
        own = _costs(given, ranks) if fits else None
        schedule = named_schedule(choice, ranks, microbatches, costs=own)
    report = verify(schedule)
    line = simulate(schedule, _costs(given, schedule.stages))
    facts = ScheduleFacts(
        name=schedule.name or choice,
        ranks=schedule.ranks,
        stages=schedule.stages,
        microbatches=schedule.microbatches,
        placement=schedule.placement,
        makespan=float(line.makespan),
        bubble=float(line.bubble),
        idle=tuple(float(1 - busy / line.makespan) if line.makespan else 0.0 for busy in line.busy),
        peak_memory=tuple(map(float, line.peak_memory)),
        messages=report.messages,
        critical_path=tuple(f"{rank}:{span.action}" for rank, span in line.critical_path),
        lower_bound=bound,
    )
    return Told(facts=facts, timeline=line)


def _read(path: str, ranks: int | None, microbatches: int | None) -> Schedule:
    schedule = read_schedule(path)
    for word, own, asked in (
        ("ranks", schedule.ranks, ranks),
        ("microbatches", schedule.microbatches, microbatches),
    ):
        if asked not in (None, own):
            raise ConfigError(f"{path} is of {own} {word}, not {asked}; leave the number out")
    return schedule


def parse_costs(text: str) -> dict[str, list[Fraction]]:
    """Costs by name from text such as `forward=1:1:1.4,latency=0.1`.

    Raises:
        ConfigError: a name is unknown or a value is no number.
    """
    found: dict[str, list[Fraction]] = {}
    for part in filter(None, text.split(",")):
        name, _, values = part.strip().partition("=")
        if name not in COSTS:
            raise ConfigError(f"cost {name!r} is not known; {nearest(name, COSTS)}")
        try:
            found[name] = [Fraction(value) for value in values.split(":")]
        except (ValueError, ZeroDivisionError):
            raise ConfigError(
                f"cost {part.strip()!r} is not a number; write {name}=1.3, or 1:1:1.4 a stage"
            ) from None
    return found


def _costs(given: dict[str, list[Fraction]], stages: int) -> Costs:
    """One value for all stages, or one for each; what is not given costs 1, a message nothing."""
    each: dict[str, Any] = {
        name: given.get(name, [Fraction(1)]) * (stages if len(given.get(name, [1])) == 1 else 1)
        for name in COSTS[:-1]
    }
    (latency, *more) = given.get("latency", [Fraction(0)])
    if more:
        raise ConfigError("latency takes one value; it is the same between all ranks")
    return Costs(**each, latency=latency)


def draw_to(path: str | Path, line: Timeline) -> None:
    """Write the timeline as .svg or .html, or its schedule as .csv; whole or not at all.

    Raises:
        ConfigError: the suffix is another, or the file cannot be written.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".csv":
        text = line.schedule.to_csv()
    elif suffix in PICTURES:
        text = PICTURES[suffix](line)
    else:
        raise ConfigError(f"{path}: {suffix!r} is no picture; end it in .svg, .html or .csv")
    aside = path.with_name(f"{path.name}.partial")
    try:
        aside.unlink(missing_ok=True)
        write_synced(aside, text.encode())
        publish(aside, path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
