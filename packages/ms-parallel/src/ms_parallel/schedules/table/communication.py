"""Inserts sends and receives into rows of computations so that no transport can deadlock.

The computations are simulated once with nominal durations, and everything is put into one global
order by end time: a computation at its end, and a message at the end of the computation that
produces it, where the send is inserted into one row and the receive into the other. Rows cut out of
one global order can be run one action at a time with blocking sends; asynchronous transports can
only do better. A receive is therefore placed before the computation during which its message
arrives, so that it is posted early.
"""

from collections.abc import Iterable, Sequence
from numbers import Integral

from attrs import evolve

from ms_parallel.arguments import check_items, check_type
from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.costs import Costs, Ticks
from ms_parallel.schedules.table.event_simulation import EventSimulation, Result, results


def with_communication(
    rows: Sequence[Sequence[Action]], placement: Sequence[int], ticks: Ticks | None = None
) -> tuple[tuple[Action, ...], ...]:
    """Insert a SEND and a RECV for every result that another rank needs.

    Args:
        rows: computations of each rank, in order.
        placement: rank of each stage.
        ticks: simulated durations; by default a backward takes twice as long as a forward. They
            only affect how early receives are placed.

    Raises:
        ScheduleError: the rows deadlock, or an action is not on the rank of its stage.
    """
    _check_placement(rows, placement)
    ticks = ticks or Costs.uniform(len(placement)).ticks()
    output: list[list[Action]] = [[] for _ in rows]

    def insert(rank: int, action: Action) -> None:
        output[rank].append(action)
        for result in results(action):
            _exchange(result, placement, output)

    # Transfer times are left out: a send is placed at the end of its computation, not of its
    # transfer.
    simulation = EventSimulation(
        rows, placement, evolve(ticks, transfer=(0,) * ticks.stages), insert
    )
    if stuck := simulation.run():
        reasons = []
        for rank in stuck[:4]:
            is_gradient, stage, microbatch = simulation.missing(rank)
            action = rows[rank][len(simulation.spans[rank])]
            needed = f"{stage}{'B' if is_gradient else 'F'}{microbatch}"
            reasons.append(f"rank {rank} is at {action} and waits for {needed}")
        raise ScheduleError(f"the rows deadlock: {'; '.join(reasons)}; reorder them")
    return tuple(map(tuple, output))


def _exchange(result: Result, placement: Sequence[int], output: list[list[Action]]) -> None:
    """Insert the message for a result if another rank needs it."""
    is_gradient, stage, microbatch = result
    # Activations go to the next stage, gradients to the previous one.
    consumer = stage - 1 if is_gradient else stage + 1
    # No message at the ends of the model, or between stages on one rank.
    if not 0 <= consumer < len(placement) or placement[consumer] == placement[stage]:
        return
    send, receive = (
        (Kind.SEND_BACKWARD, Kind.RECV_BACKWARD)
        if is_gradient
        else (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
    )
    # Both ends are appended at the same point of the global order.
    output[placement[stage]].append(Action(send, stage, microbatch))
    output[placement[consumer]].append(Action(receive, consumer, microbatch))


def _check_placement(rows: Sequence[Sequence[Action]], placement: Sequence[int]) -> None:
    check_items("placement", placement, Integral, "ranks of stages", error=ScheduleError)
    check_type("rows", rows, Iterable, "rows of actions", error=ScheduleError)
    for rank, row in enumerate(rows):
        check_items(f"row {rank}", row, Action, "actions", error=ScheduleError)
        for action in row:
            for part in action.flat:
                if not 0 <= part.stage < len(placement):
                    raise ScheduleError(
                        f"{part} on rank {rank}: stage {part.stage} does not exist; the placement"
                        f" has {len(placement)} stages"
                    )
                if placement[part.stage] != rank:
                    raise ScheduleError(
                        f"{part} is on rank {rank} but stage {part.stage} is placed on rank "
                        f"{placement[part.stage]}; move the action or the stage"
                    )
