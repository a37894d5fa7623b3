"""Timelines as text: summary, critical path, and a chart for a terminal."""

from collections.abc import Sequence
from fractions import Fraction

from ms_parallel.arguments import check_items, check_number, check_type
from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.action import Kind
from ms_parallel.schedules.table.event_simulation import Span
from ms_parallel.schedules.timeline.simulate import Timeline

_ANSI = {
    Kind.FORWARD: 34,
    Kind.BACKWARD: 32,
    Kind.BACKWARD_INPUT: 36,
    Kind.BACKWARD_WEIGHT: 35,
    Kind.OVERLAP: 33,
}
_LETTERS = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "I",
    Kind.BACKWARD_WEIGHT: "W",
    Kind.OVERLAP: "O",
}


def draw_text(
    *lines: Timeline, titles: Sequence[str] = (), width: int = 100, color: bool = False
) -> str:
    """Draw timelines for a terminal: one letter per slice of time, small for later stages.

    Args:
        lines: timelines to draw, on one time scale.
        titles: title of each timeline.
        width: line width in characters, at least 40.
        color: mark kinds with ANSI colors.
    """
    check_lines(lines, titles)
    check_number("width", width, minimum=1, error=ScheduleError)
    # 36 characters for the rank, its idle time and its peak memory.
    columns = max(width, 40) - 36
    longest = max(float(line.makespan) for line in lines)
    text = []
    for index, line in enumerate(lines):
        text.append(summary(line, titles, index))
        slices = max(1, round(columns * float(line.makespan) / longest)) if longest else 1
        for rank in range(line.schedule.ranks):
            idle = 100 * float(1 - line.busy[rank] / line.makespan) if line.makespan else 0.0
            cells = _cells(line, rank, slices, color) + " " * (columns - slices)
            peak = number(line.peak_memory[rank])
            text.append(f"rank {rank:<4}|{cells}| idle {idle:4.1f}%, peak {peak}")
    return "\n".join(text) + "\n"


def check_lines(lines: Sequence[Timeline], titles: Sequence[str]) -> None:
    """Check the timelines to draw, and their titles.

    Raises:
        ScheduleError: there is none, or one has the wrong type.
    """
    if not lines:
        raise ScheduleError("a drawing needs at least one Timeline, as simulate returns; pass it")
    check_items("lines", lines, Timeline, "Timelines", error=ScheduleError)
    check_type("titles", titles, Sequence, "a list of titles", error=ScheduleError)
    check_items("titles", titles, str, "titles", error=ScheduleError)


def _cells(line: Timeline, rank: int, slices: int, color: bool) -> str:
    cells, row, index = [], line.spans[rank], 0
    for column in range(slices):
        # Compare the middle of the slice in units of tick / (2 * slices), to avoid rounding.
        middle = (2 * column + 1) * line.end
        while index < len(row) and row[index].end * 2 * slices <= middle:
            index += 1
        if index == len(row) or row[index].start * 2 * slices > middle:
            cells.append("·")
            continue
        action_kind = row[index].action.kind
        letter = _LETTERS[action_kind]
        letter = letter.lower() if is_later_stage(line, rank, row[index]) else letter
        cells.append(f"\x1b[{_ANSI[action_kind]}m{letter}\x1b[0m" if color else letter)
    return "".join(cells)


def number(value: Fraction | float) -> str:
    """Format a number with four significant digits."""
    return f"{float(value):.4g}"


def summary(line: Timeline, titles: Sequence[str], index: int) -> str:
    """Summarize a timeline in one line, with its title."""
    title = titles[index] if index < len(titles) else ""
    name = line.schedule.name or "schedule"
    return (
        f"{title + ': ' if title else ''}{name}, {line.schedule.ranks} ranks, "
        f"{line.schedule.stages} stages, {line.schedule.microbatches} microbatches: makespan "
        f"{number(line.makespan)}, bubble {100 * float(line.bubble):.2f}%"
    )


def is_later_stage(line: Timeline, rank: int, span: Span) -> bool:
    """Return whether a span belongs to a stage of the rank other than its first."""
    return span.action.computations[0].stage != line.schedule.stages_of(rank)[0]


def path_text(line: Timeline) -> str:
    """Format the critical path; runs on one rank are shortened to the first and last action."""
    check_type("line", line, Timeline, "a Timeline, as simulate returns", error=ScheduleError)
    runs: list[tuple[int, list[Span]]] = []
    for rank, span in line.critical_path:
        if not runs or runs[-1][0] != rank:
            runs.append((rank, []))
        runs[-1][1].append(span)
    return " → ".join(
        f"rank {rank}: {spans[0].action}"
        + (f" … {spans[-1].action} ({len(spans)} actions)" if len(spans) > 1 else "")
        for rank, spans in runs
    )
