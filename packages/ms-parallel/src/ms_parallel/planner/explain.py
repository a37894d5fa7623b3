"""Explains a schedule that is named, read or searched for: verifies, simulates and draws it."""

from pathlib import Path

import msgspec
from attrs import frozen

from ms_parallel.errors import ConfigError
from ms_parallel.files.durable import write_file
from ms_parallel.pipeline.choice import SEARCH, is_file, read_schedule
from ms_parallel.pipeline.step_file import RecordedStep, is_recording, read_step
from ms_parallel.planner.cost_text import CostValues, costs_of, parse_costs
from ms_parallel.schedules.checks.verify import verify
from ms_parallel.schedules.drawing.page import draw_html
from ms_parallel.schedules.drawing.svg import draw_svg
from ms_parallel.schedules.generators.registry import named_schedule
from ms_parallel.schedules.solver.search import search
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.schedules.timeline.simulate import Timeline, simulate

MAX_FORWARDS = 1 << 20
"""Maximum forwards of a schedule, which is verified in seconds."""
RENDERERS = {".svg": draw_svg, ".html": draw_html}


class ScheduleSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of a schedule; times and memory are in the units of the costs."""

    name: str
    ranks: int
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    """Rank of each stage."""
    makespan: float
    bubble: float
    """Idle fraction of the time of all ranks."""
    idle: tuple[float, ...]
    """Idle fraction of each rank's time."""
    peak_memory: tuple[float, ...]
    """Peak activation memory of each rank."""
    messages: int
    """Messages between ranks per step."""
    overlapped_pairs: int = 0
    """Pairs of a forward and a backward that overlap in the schedule. The runtime and this
    simulation run them one after the other."""
    critical_path: tuple[str, ...]
    """Actions that determine the makespan, in order, as `rank:action`."""
    lower_bound: float | None = None
    """Lower bound on the makespan of any schedule; None unless a search found the schedule."""
    measured_makespan: float | None = None
    """Makespan of a recorded step, in milliseconds."""
    measured_bubble: float | None = None
    """Bubble of a recorded step."""


@frozen(kw_only=True)
class Explanation:
    """Result of `explain`."""

    summary: ScheduleSummary
    timeline: Timeline
    measured: Timeline | None = None
    """Timeline of a recorded step."""

    @property
    def lines(self) -> tuple[Timeline, ...]:
        """Timelines to draw in one picture."""
        return (self.timeline,) if self.measured is None else (self.timeline, self.measured)

    @property
    def titles(self) -> tuple[str, ...]:
        """Title of each timeline."""
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
    """Generate, read or search for a schedule, verify it, and simulate it.

    Args:
        choice: name of a schedule, a CSV file, `search`, or a recorded step (.json), which is
            simulated with its mean costs.
        ranks: pipeline ranks; not for files.
        microbatches: microbatches per step; not for files.
        costs: costs such as `forward=1,backward_input=1.3,latency=0.1`; `forward=1:1:1:1.4` has one
            value per stage.
        memory_cap: limit on the activation memory of a rank, for `search`.
        measured: recorded step (.json) for comparison. Its mean costs are the defaults of `costs`,
            divided evenly if the number of stages differs, and all times are in milliseconds.

    Raises:
        ConfigError: a size is missing, a memory cap is set without a search, or a cost or file
            cannot be read.
        ScheduleError: the name is unknown, the schedule is invalid, or it does not exist for these
            sizes.
    """
    if memory_cap is not None and choice != SEARCH:
        raise ConfigError(
            f"memory_cap needs schedule 'search', got {choice}; use search, or drop the cap"
        )
    values, recorded = parse_costs(costs), _recorded(choice, measured)
    schedule, bound = _schedule(choice, ranks, microbatches, values, memory_cap, recorded)
    report = verify(schedule)
    timeline = simulate(schedule, costs_of(values, schedule.stages, recorded))
    measured_timeline = recorded.timeline() if recorded else None
    summary = msgspec.structs.replace(
        _summary(timeline, schedule.name or choice, report.messages),
        overlapped_pairs=sum(bool(action.parts) for row in schedule.actions for action in row),
        lower_bound=bound,
    )
    if measured_timeline is not None:
        summary = msgspec.structs.replace(
            summary,
            measured_makespan=float(measured_timeline.makespan),
            measured_bubble=float(measured_timeline.bubble),
        )
    return Explanation(summary=summary, timeline=timeline, measured=measured_timeline)


def _summary(timeline: Timeline, name: str, messages: int) -> ScheduleSummary:
    schedule, makespan = timeline.schedule, timeline.makespan
    return ScheduleSummary(
        name=name,
        ranks=schedule.ranks,
        stages=schedule.stages,
        microbatches=schedule.microbatches,
        placement=schedule.placement,
        makespan=float(makespan),
        bubble=float(timeline.bubble),
        idle=tuple(float(1 - busy / makespan) if makespan else 0.0 for busy in timeline.busy),
        peak_memory=tuple(map(float, timeline.peak_memory)),
        messages=messages,
        critical_path=tuple(f"{rank}:{span.action}" for rank, span in timeline.critical_path),
    )


def _recorded(choice: str, measured: str | None) -> RecordedStep | None:
    if not is_recording(choice):
        return None if measured is None else read_step(measured)
    if measured is not None:
        raise ConfigError(f"{choice} is itself a recorded step; drop --measured")
    return read_step(choice)


def _schedule(
    choice: str,
    ranks: int | None,
    microbatches: int | None,
    values: CostValues,
    memory_cap: float | None,
    recorded: RecordedStep | None,
) -> tuple[Schedule, float | None]:
    """Return the schedule, and from a search also the lower bound of its makespan."""
    if recorded is not None and is_recording(choice):
        return recorded.schedule, None
    if is_file(choice):
        return _read(choice, ranks, microbatches), None
    if ranks is not None and microbatches is not None and ranks * microbatches > MAX_FORWARDS:
        raise ConfigError(
            f"stages times microbatches must be at most {MAX_FORWARDS}, got {ranks} x"
            f" {microbatches}; use fewer"
        )
    if ranks is None or microbatches is None:
        raise ConfigError(f"{choice} needs sizes; add --stages and --microbatches")
    if choice == SEARCH:
        # Costs per stage determine the number of stages; the default is one stage per rank.
        stages = max([ranks, *map(len, values.values())])
        costs = costs_of(values, stages, recorded)
        result = search(costs, memory_cap, microbatches=microbatches, ranks=ranks)
        return result.schedule, float(result.lower_bound)
    # Generators that use costs have one stage per rank; the others ignore them.
    fits = ranks > 0 and all(len(by_stage) in (1, ranks) for by_stage in values.values())
    generator_costs = costs_of(values, ranks) if fits else None
    return named_schedule(choice, ranks, microbatches, costs=generator_costs), None


def _read(path: str, ranks: int | None, microbatches: int | None) -> Schedule:
    schedule = read_schedule(path)
    for name, size, expected in (
        ("ranks", schedule.ranks, ranks),
        ("microbatches", schedule.microbatches, microbatches),
    ):
        if expected not in (None, size):
            raise ConfigError(f"{path} has {size} {name}, not {expected}; drop the number")
    return schedule


def draw_to(path: str | Path, explanation: Explanation) -> None:
    """Write a picture (.svg, .html) or the schedule (.csv), atomically.

    Raises:
        ConfigError: the suffix is not supported.
        WriteError: the file cannot be written.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".csv":
        text = explanation.timeline.schedule.to_csv()
    elif suffix in RENDERERS:
        unit = "" if explanation.measured is None else "ms"
        text = RENDERERS[suffix](*explanation.lines, titles=explanation.titles, unit=unit)
    else:
        raise ConfigError(f"{path}: unsupported suffix {suffix!r}; use .svg, .html or .csv")
    write_file(path, text.encode())
