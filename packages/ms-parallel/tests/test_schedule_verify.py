"""`verify` rejects invalid mutants of schedules and accepts valid ones, like a slow reference."""

import random
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from attrs import evolve

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules import (
    Action,
    Kind,
    dualpipe_v,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    verify,
    zb_h1,
    zb_h2,
    zb_v,
)

BASES = {
    "gpipe": gpipe(2, 3),
    "1f1b": one_f_one_b(3, 4),
    "interleaved": interleaved_one_f_one_b(2, 3),
    "zb-h1": zb_h1(3, 4),
    "zb-h2": zb_h2(3, 5),
    "zb-v": zb_v(2, 4),
    "dualpipe-v": dualpipe_v(2, 4),
}
MEETS = {Kind.SEND_FORWARD: (Kind.RECV_FORWARD, 1), Kind.SEND_BACKWARD: (Kind.RECV_BACKWARD, -1)}
BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def flat(row):
    """A row with overlaps replaced by their parts."""
    return [part for action in row for part in action.parts or (action,)]


def is_valid(base, rows):
    """Slow reference: the actions of a valid schedule in an order that can be sorted topologically.

    A node is an action; a send and its receive form one node, as neither ends without the other.
    Edges are each rank's program order and all data dependencies.
    """
    actions = [part for row in rows for part in flat(row)]
    if Counter(actions) != Counter(part for row in base.actions for part in flat(row)):
        return False
    home = base.placement
    node = {action: action for action in actions}
    for action in actions:
        if action.kind in MEETS:
            kind, step = MEETS[action.kind]
            node[Action(kind, action.stage + step, action.microbatch)] = action
    graph = TopologicalSorter()
    for rank, row in enumerate(rows):
        if any(home[part.stage] != rank for part in flat(row)):
            return False
        for before, after in pairwise(row):
            for first in before.parts or (before,):
                for second in after.parts or (after,):
                    graph.add(node[second], node[first])
    backward = {(a.stage, a.microbatch): a for a in actions if a.kind in BACKWARDS}
    overlapped = {p: a.parts for row in rows for a in row for p in a.parts}
    for action in actions:
        stage, microbatch = action.stage, action.microbatch
        needs = []
        if action.kind is Kind.FORWARD and stage > 0:
            needs = [
                node.get(Action(Kind.RECV_FORWARD, stage, microbatch))
                or Action(Kind.FORWARD, stage - 1, microbatch)
            ]
        elif action.kind in BACKWARDS:
            needs = [Action(Kind.FORWARD, stage, microbatch)]
            if stage + 1 < len(home):
                needs.append(
                    node.get(Action(Kind.RECV_BACKWARD, stage, microbatch))
                    or backward[stage + 1, microbatch]
                )
        elif action.kind is Kind.BACKWARD_WEIGHT:
            needs = [Action(Kind.BACKWARD_INPUT, stage, microbatch)]
        elif action.kind is Kind.SEND_FORWARD:
            needs = [Action(Kind.FORWARD, stage, microbatch)]
        elif action.kind is Kind.SEND_BACKWARD:
            needs = [backward[stage, microbatch]]
        for need in needs:
            if need in overlapped.get(action, ()):
                return False
            # An overlap waits for the dependencies of all its parts.
            for part in overlapped.get(action, (action,)):
                graph.add(node[part], need)
    try:
        graph.prepare()
    except CycleError:
        return False
    return True


def mutants(schedule, generator):
    """Every drop, duplicate, neighbor swap and wrong index, and a sample of longer moves."""
    for rank, row in enumerate(schedule.actions):

        def with_row(new, rank=rank):
            rows = list(schedule.actions)
            rows[rank] = tuple(new)
            return rows

        for i, action in enumerate(row):
            yield "drop", with_row(row[:i] + row[i + 1 :])
            yield "duplicate", with_row((*row[: i + 1], action, *row[i + 1 :]))
            yield "duplicate late", with_row((*row, action))
            if i + 1 < len(row):
                yield "swap neighbors", with_row((*row[:i], row[i + 1], action, *row[i + 2 :]))
            j = generator.randrange(len(row))
            low, high = min(i, j), max(i, j)
            if low < high:
                swapped = [*row]
                swapped[low], swapped[high] = row[high], row[low]
                yield "swap", with_row(swapped)
            moved = [*row[:i], *row[i + 1 :]]
            moved.insert(j, action)
            yield "move", with_row(moved)
            if action.parts:
                yield "break overlap", with_row((*row[:i], action.parts[0], *row[i + 1 :]))
                yield "serial overlap", with_row((*row[:i], *action.parts, *row[i + 1 :]))
                continue
            yield (
                "other microbatch",
                with_row(
                    (
                        *row[:i],
                        action._replace(microbatch=(action.microbatch + 1) % schedule.microbatches),
                        *row[i + 1 :],
                    )
                ),
            )
            yield (
                "microbatch past the end",
                with_row(
                    (*row[:i], action._replace(microbatch=schedule.microbatches), *row[i + 1 :])
                ),
            )
            yield (
                "other stage",
                with_row(
                    (
                        *row[:i],
                        action._replace(stage=(action.stage + 1) % schedule.stages),
                        *row[i + 1 :],
                    )
                ),
            )
            yield (
                "other kind",
                with_row(
                    (
                        *row[:i],
                        action._replace(kind=generator.choice(list(Kind)[:8])),
                        *row[i + 1 :],
                    )
                ),
            )
    for microbatch in range(schedule.microbatches):
        yield (
            "never back-propagated",
            [
                tuple(
                    a
                    for a in row
                    if a.parts
                    or a.microbatch != microbatch
                    or a.kind in (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD)
                )
                for row in schedule.actions
            ],
        )


def complaint(schedule):
    """Error message of `verify`, or an empty string."""
    try:
        verify(schedule)
    except ScheduleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", BASES)
def test_verify_rejects_invalid_mutants_and_accepts_valid_ones(name):
    """`verify` agrees with a topological sort on over a hundred mutants of each schedule."""
    base = BASES[name]
    assert is_valid(base, base.actions)
    assert complaint(base) == ""
    verdicts = Counter()
    for mutation, rows in mutants(base, random.Random(0)):
        valid = is_valid(base, rows)
        message = complaint(evolve(base, actions=rows))
        assert (message == "") == valid, (mutation, rows)
        assert "\n" not in message
        verdicts[valid] += 1
    assert verdicts[False] > 100


def test_the_report_counts_messages_and_activations():
    """With 3 stages a microbatch crosses two boundaries in each direction."""
    report = verify(one_f_one_b(3, 4))
    assert report.messages == 4 * 2 * 2
    assert verify(dualpipe_v(2, 4)).peak_activations == (5, 5)
