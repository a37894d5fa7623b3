"""Inserts sends and receives into rows of computations so that no transport can deadlock.

The computations are played once with nominal durations. Everything is then put into one global
order by the time at which it ends: a computation at its end, a message at the end of the
computation that produces it, where the send enters the one row and the receive the other. Any
order of rows that is cut out of one global order can be performed one action at a time with
sends that block until they are received; asynchronous transports can only do better. A receive
thus stands before the computation during which its message arrives, so that it is posted early.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.costs import Costs, Ticks

__all__ = ["Result", "duration", "results", "sources", "with_communication"]

Result = tuple[bool, int, int]
"""(is a gradient, stage whose output or input gradient it is, microbatch)."""


def sources(action: Action, stages: int) -> tuple[Result, ...]:
    """What a computation needs from other computations, as (is gradient, stage, microbatch)."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return ((False, stage - 1, microbatch),) if stage > 0 else ()
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and stage < stages - 1:
        return ((True, stage + 1, microbatch),)
    return ()


def results(action: Action) -> list[Result]:
    """What a computation, or each of a pair, makes for others, as (is gradient, stage, number)."""
    return [
        (part.kind is not Kind.FORWARD, part.stage, part.microbatch)
        for part in action.computations
        if part.kind is not Kind.BACKWARD_WEIGHT
    ]


def duration(action: Action, ticks: Ticks) -> int:
    """Ticks that an action computes; the two of a pair run one after the other."""
    length = 0
    for part in action.computations:
        if part.kind is Kind.FORWARD:
            length += ticks.forward[part.stage]
        if part.kind is Kind.BACKWARD_INPUT or part.kind is Kind.BACKWARD:
            length += ticks.backward_input[part.stage]
        if part.kind is Kind.BACKWARD_WEIGHT or part.kind is Kind.BACKWARD:
            length += ticks.backward_weight[part.stage]
    return length


def with_communication(
    rows: Sequence[Sequence[Action]], placement: Sequence[int], ticks: Ticks | None = None
) -> tuple[tuple[Action, ...], ...]:
    """The rows with a SEND and a RECV for every result that another rank needs.

    Args:
        rows: For each rank its computations, in order.
        placement: Rank of each stage.
        ticks: Durations to play with; by default a backward takes twice a forward. They decide
            only how early a receive stands in its row.

    Raises:
        ScheduleError: the rows wait for one another for ever, or an action's stage is not placed
            on its row.
    """
    _check_places(rows, placement)
    weaver = _Weaver(rows, placement, ticks or Costs.uniform(len(placement)).ticks())
    for rank in range(len(rows)):
        weaver.begin(rank)
    while weaver.running:
        weaver.finish()
    _check_finished(rows, weaver.cursor, len(placement), weaver.ready)
    return tuple(map(tuple, weaver.output))


class _Weaver:
    """Plays the rows; `running` holds (end, start, rank) of each rank's current computation."""

    def __init__(
        self, rows: Sequence[Sequence[Action]], placement: Sequence[int], ticks: Ticks
    ) -> None:
        self.rows, self.placement, self.ticks = rows, placement, ticks
        self.cursor, self.clock = [0] * len(rows), [0] * len(rows)
        self.ready: dict[Result, int] = {}
        self.waiting: dict[Result, int] = {}
        self.output: list[list[Action]] = [[] for _ in rows]
        self.running: list[tuple[int, int, int]] = []

    def begin(self, rank: int) -> None:
        """Start the rank's next computation if all that it needs is known to come."""
        if self.cursor[rank] == len(self.rows[rank]):
            return
        action = self.rows[rank][self.cursor[rank]]
        start = self.clock[rank]
        for part in action.computations:
            for source in sources(part, len(self.placement)):
                if source not in self.ready:
                    self.waiting[source] = rank
                    return
                start = max(start, self.ready[source])
        heappush(self.running, (start + duration(action, self.ticks), start, rank))

    def finish(self) -> None:
        """End the computation that ends next; its messages enter both rows at this moment."""
        end, _, rank = heappop(self.running)
        action = self.rows[rank][self.cursor[rank]]
        self.output[rank].append(action)
        self.cursor[rank] += 1
        self.clock[rank] = end
        woken = []
        for result in results(action):
            crosses = _exchange(result, self.placement, self.output)
            self.ready[result] = end + (self.ticks.latency if crosses else 0)
            if (sleeper := self.waiting.pop(result, None)) is not None:
                woken.append(sleeper)
        for sleeper in [rank, *woken]:
            self.begin(sleeper)


def _exchange(result: Result, placement: Sequence[int], output: list[list[Action]]) -> bool:
    """Insert the message that carries a result, and say whether there is one."""
    is_gradient, stage, microbatch = result
    consumer = stage - 1 if is_gradient else stage + 1
    if not 0 <= consumer < len(placement) or placement[consumer] == placement[stage]:
        return False
    send, receive = (
        (Kind.SEND_BACKWARD, Kind.RECV_BACKWARD)
        if is_gradient
        else (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
    )
    output[placement[stage]].append(Action(send, stage, microbatch))
    output[placement[consumer]].append(Action(receive, consumer, microbatch))
    return True


def _check_places(rows: Sequence[Sequence[Action]], placement: Sequence[int]) -> None:
    for rank, row in enumerate(rows):
        for action in row:
            for part in action.flat:
                if not 0 <= part.stage < len(placement):
                    raise ScheduleError(
                        f"{part} on rank {rank}: there is no stage {part.stage}; "
                        f"the placement has {len(placement)}"
                    )
                if placement[part.stage] != rank:
                    raise ScheduleError(
                        f"{part} is on rank {rank} but stage {part.stage} is placed on rank "
                        f"{placement[part.stage]}; move the action or the stage"
                    )


def _check_finished(
    rows: Sequence[Sequence[Action]],
    cursor: Sequence[int],
    stages: int,
    ready: dict[Result, int],
) -> None:
    stuck = [rank for rank, row in enumerate(rows) if cursor[rank] < len(row)]
    if not stuck:
        return
    reasons = []
    for rank in stuck[:4]:
        action = rows[rank][cursor[rank]]
        for part in action.computations:
            missing = [s for s in sources(part, stages) if s not in ready]
            if missing:
                is_gradient, stage, microbatch = missing[0]
                what = f"{stage}{'B' if is_gradient else 'F'}{microbatch}"
                reasons.append(f"rank {rank} stands at {action} and waits for {what}")
                break
    raise ScheduleError(f"the rows deadlock: {'; '.join(reasons)}; reorder them")
