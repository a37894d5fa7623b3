"""What pictures say of a timeline in words: names of kinds, its facts, its critical path."""

from collections.abc import Sequence
from fractions import Fraction

from ms_parallel.schedules.table.action import Kind
from ms_parallel.schedules.timeline.timeline import Span, Timeline

__all__ = ["NAMES", "is_later_stage", "number", "path_text", "summary"]

NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "full backward",
    Kind.BACKWARD_INPUT: "backward of inputs",
    Kind.BACKWARD_WEIGHT: "backward of weights",
    Kind.OVERLAP: "pair, one after the other",
}


def number(value: Fraction | float) -> str:
    """Four digits."""
    return f"{float(value):.4g}"


def summary(line: Timeline, titles: Sequence[str], index: int) -> str:
    """A line of facts about the timeline of this index, behind its title if it has one."""
    title = titles[index] if index < len(titles) else ""
    name = line.schedule.name or "schedule"
    return (
        f"{title + ': ' if title else ''}{name}, {line.schedule.ranks} ranks, "
        f"{line.schedule.stages} stages, {line.schedule.microbatches} microbatches: makespan "
        f"{number(line.makespan)}, bubble {100 * float(line.bubble):.2f}%"
    )


def is_later_stage(line: Timeline, rank: int, span: Span) -> bool:
    """Whether a span is of a stage of the rank other than its first."""
    return span.action.computations[0].stage != line.schedule.stages_of(rank)[0]


def path_text(line: Timeline) -> str:
    """The critical path, its unbroken stretches on one rank shortened to first and last."""
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
