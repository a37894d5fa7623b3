"""Tables are exchanged with torch.distributed.pipelining without loss."""

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as peer

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules import GENERATORS, Costs, Schedule, named_schedule, simulate, verify

PEERS = {
    "interleaved": (peer.ScheduleInterleaved1F1B, False),
    "breadth-first": (peer.ScheduleLoopedBFS, False),
    "interleaved zero bubble": (peer.ScheduleInterleavedZeroBubble, False),
    "zb-v": (peer.ScheduleZBVZeroBubble, True),
    "dualpipe-v": (peer.ScheduleDualPipeV, True),
}


def plan(schedule_class, ranks, microbatches):
    """The peer's plan, built by its classes from stand-in stages with the needed numbers."""
    stages = [
        SimpleNamespace(
            num_stages=2 * ranks, group_size=ranks, group_rank=0, group=None,
            stage_index=index, submod=None, is_last=False, is_first=False,
        )
        for index in range(2)
    ]  # fmt: skip
    return schedule_class(stages, microbatches)


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_the_peers_tables_round_trip(name, ranks, microbatches):
    """Both forms: computations only, and with messages, unshards and reductions."""
    schedule_class, is_vee = PEERS[name]
    planned = plan(schedule_class, ranks, microbatches)
    for table in (planned.pipeline_order, planned.pipeline_order_with_comms):
        rows = [[str(action) for action in table[rank] if action] for rank in range(ranks)]
        text = "".join(",".join(row) + "\n" for row in rows)
        schedule = Schedule.from_csv(text)
        verify(schedule)
        assert schedule.placement[-1] == (0 if is_vee else ranks - 1)
        messages = any("SEND" in cell for cell in rows[0])
        assert schedule.to_csv(communication=messages) == text


@pytest.mark.parametrize("name", GENERATORS)
def test_the_peer_parses_all_our_cells(name):
    """The peer's parser reads the stage, kind and microbatch that we wrote."""
    schedule = named_schedule(name, 2, 4)
    for row in schedule.actions:
        for action in row:
            parsed = peer._Action.from_str(str(action))
            assert str(parsed) == str(action)
            if not action.parts:
                assert (parsed.stage_index, parsed.microbatch_index) == action[1:3]
                assert parsed.computation_type.value == action.kind.value


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("0F0,0F0,0B0\n1F0,1B0\n", "0F0 occurs 2 times"),
        ("0F0,0B0\n1F0,1B0,1B0\n", "1B0 occurs 2 times"),
        ("2F0,0F0,2B0,0B0\n1F0,3F0,3B0,1B0\n", "rank 0 is at 2F0 and waits for 1F0"),
    ],
)
def test_verify_catches_what_the_peer_accepts(text, complaint):
    """Its check accepts duplicated forwards and ranks that wait for each other; ours does not."""
    rows = [line.split(",") for line in text.splitlines()]
    order = {rank: [peer._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    peer._validate_schedule(order, 2, 4 if "2F0" in text else 2, 1)
    with pytest.raises(ScheduleError, match=complaint):
        verify(Schedule.from_csv(text))


def test_an_unknown_schedule_name_suggests_the_nearest():
    """Costs that do not match the ranks are refused before a table is built."""
    with pytest.raises(ScheduleError, match="did you mean 'zb1p'"):
        named_schedule("zb1", 2, 4)
    with pytest.raises(ScheduleError, match="costs of 3 stages for 2 ranks"):
        named_schedule("zb1p", 2, 4, costs=Costs.uniform(3))


def test_schedules_are_no_longer_than_the_peers():
    """Interleaved 1F1B and ZB-V take the peer's time for equal costs."""
    for name, schedule_class in (
        ("interleaved-1f1b", peer.ScheduleInterleaved1F1B),
        ("zb-v", peer.ScheduleZBVZeroBubble),
    ):
        order = plan(schedule_class, 4, 8).pipeline_order
        text = "\n".join(",".join(str(a) for a in order[rank] if a) for rank in range(4))
        costs = Costs.uniform(8)
        peer_makespan = simulate(Schedule.from_csv(text), costs).makespan
        assert simulate(named_schedule(name, 4, 8), costs).makespan <= peer_makespan


WAITING = (
    "0F0,0SEND_F0,0WAIT_SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0\n"
)


def test_waits_of_newer_tables_are_kept():
    """PyTorch has them from version 2.15 on."""
    schedule = Schedule.from_csv(WAITING)
    verify(schedule)
    assert schedule.to_csv() == WAITING
    computations = "0F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n1F0,1B0\n"
    assert schedule.to_csv(communication=False) == computations


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("0SEND_F0,0WAIT_SEND_F0", "0WAIT_SEND_F0,0SEND_F0", "0WAIT_SEND_F0 (rank 0, action 1)"),
        ("1WAIT_SEND_B0", "1WAIT_SEND_B0,1WAIT_SEND_B0", "waits a second time"),
        ("0REDUCE_GRAD,0WAIT", "0WAIT", "waits for 0REDUCE_GRAD"),
        ("1WAIT_SEND_B0", "1WAIT_SEND_F0", "waits for 1SEND_F0"),
    ],
)
def test_a_misplaced_wait_is_refused(right, wrong, complaint):
    """Before its message, twice, or without one."""
    with pytest.raises(ScheduleError) as error:
        verify(Schedule.from_csv(WAITING.replace(right, wrong)))
    assert complaint in str(error.value)
