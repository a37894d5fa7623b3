"""Explains a schedule: made by name, read or searched for; proved, simulated and drawn."""

from pathlib import Path

import msgspec
from attrs import frozen

from ms_parallel.errors import ConfigError
from ms_parallel.files.durable import write_file
from ms_parallel.pipeline.choice import SEARCH, is_file, read_schedule
from ms_parallel.pipeline.step_file import RecordedStep, is_recording, read_step
from ms_parallel.planner.cost_text import Given, costs_of, parse_costs
from ms_parallel.schedules.checks.verify import verify
from ms_parallel.schedules.drawing.page import draw_html
from ms_parallel.schedules.drawing.svg import draw_svg
from ms_parallel.schedules.generators.registry import named_schedule
from ms_parallel.schedules.solver.search import search
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.schedules.timeline.simulate import Timeline, simulate

MOST_CELLS = 1 << 20
"""Forwards of a schedule that is still proved in seconds."""
PICTURES = {".svg": draw_svg, ".html": draw_html}


class ScheduleSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule in numbers; times and memory are in the units of the costs."""

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
    """Share of each rank's time in which it computes nothing."""
    peak_memory: tuple[float, ...]
    """Most activation memory of each rank."""
    messages: int
    """Messages from one rank to another in a step."""
    overlapped_pairs: int = 0
    """Pairs of a forward and a backward that the table overlaps; they are performed, and timed
    here, one after the other."""
    critical_path: tuple[str, ...]
    """Actions that explain the makespan, as `rank:action`, in order."""
    lower_bound: float | None = None
    """A makespan that no schedule can beat; from a search."""
    measured_makespan: float | None = None
    """Makespan of a recorded step, in milliseconds."""
    measured_bubble: float | None = None


@frozen(kw_only=True)
class Explanation:
    """What `explain` found."""

    facts: ScheduleSummary
    timeline: Timeline
    measured: Timeline | None = None
    """Timeline of a recorded step."""

    @property
    def lines(self) -> tuple[Timeline, ...]:
        """All that is to be drawn, in one picture."""
        return (self.timeline,) if self.measured is None else (self.timeline, self.measured)

    @property
    def titles(self) -> tuple[str, ...]:
        """What each of `lines` is."""
        return () if self.measured is None else ("simulated", "measured")


def explain(
    choice: str,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    costs: str = "",
    memory_cap: float | None = None,
    measured: str | None = None,
) -> Explanation:
    """Make, read or search for a schedule, prove it, and play it.

    Args:
        choice: a generator's name, a CSV file, `search`, or a recorded step (.json), which is
            played with its own mean costs.
        ranks: of the pipeline; a file has its own.
        microbatches: of one step; a file has its own.
        costs: such as `forward=1,backward_input=1.3,latency=0.1`; a value a stage as `1:1:1:1.4`.
        memory_cap: most activation memory of a rank, for `search`.
        measured: a recorded step to set beside it; costs that are not given are its mean ones,
            shared out evenly where it has another number of stages. All times are in milliseconds.

    Raises:
        ConfigError: a size is missing, a cap is given without a search, or a cost or file cannot
            be read.
        ScheduleError: no such name, a wrong table, or sizes that do not fit.
    """
    if memory_cap is not None and choice != SEARCH:
        raise ConfigError(f"a memory cap bounds a search; name search in place of {choice}")
    given, recorded = parse_costs(costs), _recorded(choice, measured)
    schedule, bound = _made(choice, ranks, microbatches, given, memory_cap, recorded)
    report = verify(schedule)
    line = simulate(schedule, costs_of(given, schedule.stages, recorded))
    real = recorded.timeline() if recorded else None
    facts = msgspec.structs.replace(
        _facts(line, schedule.name or choice, report.messages),
        overlapped_pairs=sum(bool(action.parts) for row in schedule.actions for action in row),
        lower_bound=bound,
    )
    if real is not None:
        facts = msgspec.structs.replace(
            facts, measured_makespan=float(real.makespan), measured_bubble=float(real.bubble)
        )
    return Explanation(facts=facts, timeline=line, measured=real)


def _facts(line: Timeline, name: str, messages: int) -> ScheduleSummary:
    schedule, makespan = line.schedule, line.makespan
    return ScheduleSummary(
        name=name,
        ranks=schedule.ranks,
        stages=schedule.stages,
        microbatches=schedule.microbatches,
        placement=schedule.placement,
        makespan=float(makespan),
        bubble=float(line.bubble),
        idle=tuple(float(1 - busy / makespan) if makespan else 0.0 for busy in line.busy),
        peak_memory=tuple(map(float, line.peak_memory)),
        messages=messages,
        critical_path=tuple(f"{rank}:{span.action}" for rank, span in line.critical_path),
    )


def _recorded(choice: str, measured: str | None) -> RecordedStep | None:
    if not is_recording(choice):
        return None if measured is None else read_step(measured)
    if measured is not None:
        raise ConfigError(f"{choice} is a recorded step itself; leave --measured out")
    return read_step(choice)


def _made(
    choice: str,
    ranks: int | None,
    microbatches: int | None,
    given: Given,
    memory_cap: float | None,
    recorded: RecordedStep | None,
) -> tuple[Schedule, float | None]:
    """Return the chosen schedule, and its lower bound if it was searched for."""
    if recorded is not None and is_recording(choice):
        return recorded.schedule, None
    if is_file(choice):
        return _read(choice, ranks, microbatches), None
    if ranks is not None and microbatches is not None and ranks * microbatches > MOST_CELLS:
        raise ConfigError(
            f"{ranks} stages times {microbatches} microbatches are above {MOST_CELLS}; give fewer"
        )
    if ranks is None or microbatches is None:
        raise ConfigError(f"{choice} needs sizes; give --stages and --microbatches")
    if choice == SEARCH:
        stages = max([ranks, *map(len, given.values())])
        costs = costs_of(given, stages, recorded)
        found = search(costs, memory_cap, microbatches=microbatches, ranks=ranks)
        return found.schedule, float(found.lower_bound)
    # What is generated from costs has one stage a rank; the rest does not look at them.
    fits = ranks > 0 and all(len(values) in (1, ranks) for values in given.values())
    own = costs_of(given, ranks) if fits else None
    return named_schedule(choice, ranks, microbatches, costs=own), None


def _read(path: str, ranks: int | None, microbatches: int | None) -> Schedule:
    schedule = read_schedule(path)
    for word, own, asked in (
        ("ranks", schedule.ranks, ranks),
        ("microbatches", schedule.microbatches, microbatches),
    ):
        if asked not in (None, own):
            raise ConfigError(f"{path} is of {own} {word}, not {asked}; leave the number out")
    return schedule


def draw_to(path: str | Path, explained: Explanation) -> None:
    """Write an explanation as .svg or .html, or the schedule as .csv; whole or not at all.

    Raises:
        ConfigError: the suffix is another.
        WriteError: the file cannot be written.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".csv":
        text = explained.timeline.schedule.to_csv()
    elif suffix in PICTURES:
        unit = "" if explained.measured is None else "ms"
        text = PICTURES[suffix](*explained.lines, titles=explained.titles, unit=unit)
    else:
        raise ConfigError(f"{path}: {suffix!r} is no picture; end it in .svg, .html or .csv")
    write_file(path, text.encode())
