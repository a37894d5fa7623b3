"""The table, its CSV form, GPipe and 1F1B, and refusals of `verify`."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules import Schedule, gpipe, one_f_one_b, verify

sizes = st.tuples(st.integers(1, 6), st.integers(1, 12))


@settings(deadline=None, max_examples=40)
@given(sizes)
def test_gpipe_and_1f1b_are_valid_for_every_size(size):
    """Both verify with the known peaks, also with fewer microbatches than stages."""
    stages, microbatches = size
    assert verify(gpipe(stages, microbatches)).peak_activations == (microbatches,) * stages
    peaks = tuple(min(stages - stage, microbatches) for stage in range(stages))
    assert verify(one_f_one_b(stages, microbatches)).peak_activations == peaks


@settings(deadline=None, max_examples=20)
@given(sizes)
def test_csv_round_trips(size):
    """With and without communication."""
    schedule = one_f_one_b(*size)
    assert Schedule.from_csv(schedule.to_csv(), name="1F1B") == schedule
    bare = Schedule.from_csv(schedule.to_csv(communication=False), name="1F1B")
    assert bare == schedule


def test_a_small_table_is_the_expected_one():
    """1F1B with 2 stages and 2 microbatches in torch's cells, with receives posted early."""
    assert one_f_one_b(2, 2).to_csv() == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("0F0junk,0B0\n", "line 1, cell 1: '0F0junk' is not an action"),
        ("0F0,0B00\n", "cell 2: '0B00'"),
        ("0F,0B0\n", "F needs a microbatch"),
        ("0F0,0B0,0UNSHARD1\n", "UNSHARD takes no microbatch"),
        ("(0B0;0F0)OVERLAP_F_B\n", "does not pair a forward with a backward"),
        ("", "has no actions"),
        (",,\n", "has no actions"),
        ("0F0,0B0\n0F1,0B1\n", "stage 0 is already on line 1"),
        ("0F0,0B0\n\n1F0,1B0\n", "line 2 has no actions"),
        ("0F0,0B0\n999999999F0\n", "stage 1 has no action but stage 999999999 has"),
        ("0F0,0B" + "9" * 5000 + "\n", "line 1, cell 2"),
        ("0F0,0B0\n2F0,2B0\n", "stage 1 has no action"),
        ("0B0,0F0\n1F0,1B0\n", "rank 0 is at 0B0 and waits for 1B0"),
    ],
)
def test_junk_in_a_csv_is_refused(text, complaint):
    """Cells are parsed completely, and the message names the position."""
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_csv(text)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("0F0\n", "0B0 is missing on rank 0"),
        ("0F0,0F0,0B0\n", "0F0 occurs 2 times"),
        ("0B0,0F0\n", "0B0 (rank 0, action 0) comes before 0F0"),
        ("0F0,0I0,0W0,0B0\n", "has two backwards"),
        ("0F0,0W0,0I0\n", "0W0 (rank 0, action 1) comes before 0I0"),
        ("0F0,0SEND_F0,0B0\n", "0SEND_F0 on rank 0 is unused"),
        ("0F0,0REDUCE_GRAD,0B0\n", "0B0 (rank 0, action 2) adds to gradients that 0REDUCE_GRAD"),
        ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD\n", "reduces gradients a second time"),
        ("0F0,0UNSHARD,0B0\n", "0F0 (rank 0, action 0) uses weights that are not gathered"),
        ("0UNSHARD,0F0,0RESHARD,0B0\n", "0B0 (rank 0, action 3) uses weights that are not"),
        ("0UNSHARD,0F0,0UNSHARD,0B0\n", "gathers weights that are already gathered"),
        ("0F0,0B0,0RESHARD\n", "0F0 (rank 0, action 0) uses weights that are not gathered"),
        ("0RESHARD,0UNSHARD,0F0,0B0\n", "frees weights that are not gathered"),
        (
            "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0\n",
            "1F0 (rank 1, action 0) comes before 1RECV_F0",
        ),
        (
            "0F0,0F1,0SEND_F1,0SEND_F0,0RECV_B0,0RECV_B1,0B0,0B1\n"
            "1RECV_F0,1RECV_F1,1F0,1F1,1B0,1B1,1SEND_B0,1SEND_B1\n",
            "message 0 from rank 0 to rank 1 is sent by 0SEND_F1 but received by 1RECV_F0",
        ),
        (
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
            "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n",
            "deadlock: rank 0 is at 0SEND_F1 (action 3) and waits for rank 1 to reach 1RECV_F1; "
            "rank 1 is at 1SEND_B0 (action 3) and waits for rank 0 to reach 0RECV_B0",
        ),
    ],
)
def test_verify_names_the_problem(text, complaint):
    """The message names the first problem of each table."""
    with pytest.raises(ScheduleError) as caught:
        verify(Schedule.from_csv(text))
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize("size", [(0, 1), (2, 0), (2, -1)])
def test_sizes_below_one_are_refused(make, size):
    """Zero or fewer stages or microbatches."""
    with pytest.raises(ScheduleError):
        make(*size)


cells = st.sampled_from([
    "0F0", "0B0", "1F0", "1B0", "0I0", "0W0", "0SEND_F0", "1RECV_F0", "1SEND_B0", "0RECV_B0",
    "0F1", "0B1", "0UNSHARD", "0REDUCE_GRAD", "(0F1;0B0)OVERLAP_F_B", "", " ", "F", "0F-1", "x",
])  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(st.lists(st.lists(cells, max_size=6), max_size=3) | st.text(max_size=30))
def test_any_text_gives_a_schedule_or_a_one_line_error(table):
    """For any text, reading and verifying return a report or raise a one-line error."""
    text = table if isinstance(table, str) else "\n".join(map(",".join, table))
    try:
        verify(Schedule.from_csv(text))
    except ScheduleError as error:
        complaint = str(error)
    else:
        complaint = ""
    assert "\n" not in complaint
