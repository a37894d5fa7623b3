"""Draws timelines as lines for a terminal."""

from collections.abc import Sequence

from ms_parallel.schedules.drawing.legend import is_later_stage, number, summary
from ms_parallel.schedules.table.action import Kind
from ms_parallel.schedules.timeline.timeline import Timeline

__all__ = ["draw_text"]

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
    *lines: Timeline, titles: Sequence[str] = (), width: int = 100, colour: bool = False
) -> str:
    """Lines for a terminal: a letter a slice of time, small for a rank's later stages.

    Args:
        lines: What to draw, on one scale of time.
        titles: What each one is.
        width: Of a line, in characters; at least 40.
        colour: Mark kinds by ANSI colours.
    """
    columns = max(width, 40) - 36
    longest = max(float(line.makespan) for line in lines)
    text = []
    for index, line in enumerate(lines):
        text.append(summary(line, titles, index))
        slices = max(1, round(columns * float(line.makespan) / longest)) if longest else 1
        for rank in range(line.schedule.ranks):
            idle = 100 * float(1 - line.busy[rank] / line.makespan) if line.makespan else 0.0
            cells = _cells(line, rank, slices, colour) + " " * (columns - slices)
            peak = number(line.peak_memory[rank])
            text.append(f"rank {rank:<4}|{cells}| idle {idle:4.1f}%, peak {peak}")
    return "\n".join(text) + "\n"


def _cells(line: Timeline, rank: int, slices: int, colour: bool) -> str:
    cells, row, at = [], line.spans[rank], 0
    for column in range(slices):
        # The middle of the slice, in halves of ticks over slices, so that nothing is rounded.
        now = (2 * column + 1) * line.end
        while at < len(row) and row[at].end * 2 * slices <= now:
            at += 1
        if at == len(row) or row[at].start * 2 * slices > now:
            cells.append("·")
            continue
        kind = row[at].action.kind
        letter = _LETTERS[kind]
        letter = letter.lower() if is_later_stage(line, rank, row[at]) else letter
        cells.append(f"\x1b[{_ANSI[kind]}m{letter}\x1b[0m" if colour else letter)
    return "".join(cells)
