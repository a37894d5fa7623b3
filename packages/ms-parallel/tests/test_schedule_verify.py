"""`verify` against a slow truth: every mutant that is wrong dies, every one that is right lives."""

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
    """A row with the parts of its overlaps."""
    return [part for action in row for part in action.parts or (action,)]


def is_right(base, rows):
    """The slow truth: the same actions as a right schedule, in an order that a graph can sort.

    A node is an action; a send and its receive are one node, since neither ends without the
    other. Edges are each rank's program and every dependency of the mathematics.
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
        stage, number = action.stage, action.microbatch
        needs = []
        if action.kind is Kind.FORWARD and stage > 0:
            needs = [
                node.get(Action(Kind.RECV_FORWARD, stage, number))
                or Action(Kind.FORWARD, stage - 1, number)
            ]
        elif action.kind in BACKWARDS:
            needs = [Action(Kind.FORWARD, stage, number)]
            if stage + 1 < len(home):
                needs.append(
                    node.get(Action(Kind.RECV_BACKWARD, stage, number))
                    or backward[stage + 1, number]
                )
        elif action.kind is Kind.BACKWARD_WEIGHT:
            needs = [Action(Kind.BACKWARD_INPUT, stage, number)]
        elif action.kind is Kind.SEND_FORWARD:
            needs = [Action(Kind.FORWARD, stage, number)]
        elif action.kind is Kind.SEND_BACKWARD:
            needs = [backward[stage, number]]
        for need in needs:
            if need in overlapped.get(action, ()):
                return False
            # What an overlapped part needs, the whole overlap waits for.
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

        def put(new, rank=rank):
            rows = list(schedule.actions)
            rows[rank] = tuple(new)
            return rows

        for i, action in enumerate(row):
            yield "drop", put(row[:i] + row[i + 1 :])
            yield "duplicate", put((*row[: i + 1], action, *row[i + 1 :]))
            yield "duplicate late", put((*row, action))
            if i + 1 < len(row):
                yield "swap neighbors", put((*row[:i], row[i + 1], action, *row[i + 2 :]))
            j = generator.randrange(len(row))
            low, high = min(i, j), max(i, j)
            if low < high:
                swapped = [*row]
                swapped[low], swapped[high] = row[high], row[low]
                yield "swap", put(swapped)
            moved = [*row[:i], *row[i + 1 :]]
            moved.insert(j, action)
            yield "move", put(moved)
            if action.parts:
                yield "break overlap", put((*row[:i], action.parts[0], *row[i + 1 :]))
                yield "serial overlap", put((*row[:i], *action.parts, *row[i + 1 :]))
                continue
            yield (
                "other microbatch",
                put(
                    (
                        *row[:i],
                        action._replace(microbatch=(action.microbatch + 1) % schedule.microbatches),
                        *row[i + 1 :],
                    )
                ),
            )
            yield (
                "microbatch past the end",
                put((*row[:i], action._replace(microbatch=schedule.microbatches), *row[i + 1 :])),
            )
            yield (
                "other stage",
                put(
                    (
                        *row[:i],
                        action._replace(stage=(action.stage + 1) % schedule.stages),
                        *row[i + 1 :],
                    )
                ),
            )
            yield (
                "other kind",
                put(
                    (
                        *row[:i],
                        action._replace(kind=generator.choice(list(Kind)[:8])),
                        *row[i + 1 :],
                    )
                ),
            )
    for number in range(schedule.microbatches):
        yield (
            "never back-propagated",
            [
                tuple(
                    a
                    for a in row
                    if a.parts
                    or a.microbatch != number
                    or a.kind in (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD)
                )
                for row in schedule.actions
            ],
        )


def complaint(schedule):
    """What `verify` says against a schedule, or nothing."""
    try:
        verify(schedule)
    except ScheduleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", BASES)
def test_every_wrong_mutant_dies_and_every_right_one_lives(name):
    """`verify` agrees with a topological sort on some hundred mutants of each schedule."""
    base = BASES[name]
    assert is_right(base, base.actions)
    assert complaint(base) == ""
    verdicts = Counter()
    for what, rows in mutants(base, random.Random(0)):
        right = is_right(base, rows)
        words = complaint(evolve(base, actions=rows))
        assert (words == "") == right, (what, rows)
        assert "\n" not in words
        verdicts[right] += 1
    assert verdicts[False] > 100


def test_the_report_counts_messages_and_activations():
    """On 3 stages a microbatch crosses two boundaries each way; the overlap holds both ends."""
    report = verify(one_f_one_b(3, 4))
    assert report.messages == 4 * 2 * 2
    assert verify(dualpipe_v(2, 4)).peak_activations == (5, 5)
