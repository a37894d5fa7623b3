"""Checks that messages are received in the order sent, and that no ranks wait in a cycle."""

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.action import RECEIVES, SENDS, Action, Kind
from ms_parallel.schedules.table.schedule import Schedule


def _partner(schedule: Schedule, action: Action) -> tuple[int, Action]:
    """Return the rank and action at the other end of a message."""
    partner_kind, step = {
        Kind.SEND_FORWARD: (Kind.RECV_FORWARD, 1),
        Kind.RECV_FORWARD: (Kind.SEND_FORWARD, -1),
        Kind.SEND_BACKWARD: (Kind.RECV_BACKWARD, -1),
        Kind.RECV_BACKWARD: (Kind.SEND_BACKWARD, 1),
    }[action.kind]
    stage = action.stage + step
    return schedule.placement[stage], Action(partner_kind, stage, action.microbatch)


def check_pairing(schedule: Schedule) -> None:
    """Check that messages between two ranks are received in the order in which they are sent.

    Raises:
        ScheduleError: names the first send and receive that do not match.
    """
    sent: dict[tuple[int, int], list[tuple[Action, Action]]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.kind in SENDS:
                peer, match = _partner(schedule, action)
                sent.setdefault((rank, peer), []).append((action, match))
            elif action.kind in RECEIVES:
                peer, _ = _partner(schedule, action)
                received.setdefault((peer, rank), []).append(action)
    for (source, target), messages in sorted(sent.items()):
        for number, ((send, match), receive) in enumerate(
            zip(messages, received[source, target], strict=True)
        ):
            if match != receive:
                raise ScheduleError(
                    f"message {number} from rank {source} to rank {target} is sent by {send} but "
                    f"received by {receive}; use the same order for sends and receives"
                )


def check_progress(schedule: Schedule) -> None:
    """Check that all ranks finish if every send blocks until it is received.

    Raises:
        ScheduleError: describes the shortest cycle of ranks that wait for each other.
    """
    rows = [[a for a in row if a.kind in SENDS or a.kind in RECEIVES] for row in schedule.actions]
    # Both ends pass a message together. The result does not depend on the order in which ranks
    # advance, so a worklist suffices.
    cursor = [0] * len(rows)
    pending = list(range(len(rows)))
    while pending:
        rank = pending.pop()
        while cursor[rank] < len(rows[rank]):
            peer, match = _partner(schedule, rows[rank][cursor[rank]])
            if cursor[peer] == len(rows[peer]) or rows[peer][cursor[peer]] != match:
                break
            cursor[rank] += 1
            cursor[peer] += 1
            # The peer may have been blocked at this message.
            pending.append(peer)
    stuck = [rank for rank, row in enumerate(rows) if cursor[rank] < len(row)]
    if stuck:
        raise ScheduleError(_describe_deadlock(schedule, rows, cursor, stuck))


def _describe_deadlock(
    schedule: Schedule, rows: list[list[Action]], cursor: list[int], stuck: list[int]
) -> str:
    """Describe the shortest cycle; each stuck rank waits for one peer, so there is a cycle."""
    peer_of = {rank: _partner(schedule, rows[rank][cursor[rank]])[0] for rank in stuck}
    cycles = []
    for start in stuck:
        path = [start]
        while (next_rank := peer_of[path[-1]]) not in path:
            path.append(next_rank)
        cycles.append(path[path.index(next_rank) :])
    cycle = min(cycles, key=lambda ranks: (len(ranks), ranks))
    parts = []
    for rank in cycle:
        action = rows[rank][cursor[rank]]
        peer, match = _partner(schedule, action)
        parts.append(
            f"rank {rank} is at {action} (action {schedule.actions[rank].index(action)}) and "
            f"waits for rank {peer} to reach {match}"
        )
    return f"deadlock: {'; '.join(parts)}; move one of these actions after the action it waits for"
