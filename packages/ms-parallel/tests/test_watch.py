"""A missing rank is named, with the step, collective and line of every rank."""

import socket
import threading
import time
from pathlib import Path

import pytest
from faults import line_of_the_wait
from launching import (
    checkpoints,
    events,
    signal_process,
    train,
    training_in_new_interpreters,
    wait_for,
    workers,
    write_run,
)
from processes import ProcessesFailedError, run_processes

from ms_parallel.cluster.watch import Heartbeat, position
from ms_parallel.cluster.watch.findings import State, explain, ranks_text
from ms_parallel.cluster.watch.record import RankPosition

FAULTS = Path(__file__).parent / "faults.py"


def record(rank: int, **settings: object) -> RankPosition:
    """Position of a rank that waits in step 4, with overrides."""
    values = {
        "host": "n1",
        "pid": 100 + rank,
        "machine": "m",
        "born": 1,
        "beat": 9,
        "step": 4,
        "activity": "update",
        "waits_in": "all_reduce",
        "lost": False,
        "line": "engine.py:301 in update",
    }
    return RankPosition(rank=rank, **{**values, **settings})  # type: ignore[arg-type]


def message_for(*records: RankPosition, world: int = 4, **states: State) -> str:
    """Message about these records; `rN` sets the state of rank N, which is otherwise alive."""
    by_rank = {r.rank: r for r in records}
    return explain(by_rank, {rank: states.get(f"r{rank}", State.ALIVE) for rank in by_rank}, world)


def test_a_stopped_rank_is_named_before_waiting_ones() -> None:
    """Its last position comes first, then the groups of the others."""
    text = message_for(record(0), record(1), record(2, waits_in=""), record(3), r2=State.STOPPED)
    assert text == (
        "rank 2 (process 102 on n1) is stopped (by SIGSTOP or a debugger); last seen in step"
        " 4, update, at engine.py:301 in update; ranks 0-1, 3: step 4, update, waiting in"
        " all_reduce, at engine.py:301 in update"
    )


def test_a_rank_that_runs_elsewhere_is_named_as_running() -> None:
    """If all are alive, the rank outside a collective keeps the others waiting."""
    text = message_for(record(0), record(1, waits_in="", line="mine.py:3 in load"), world=2)
    assert text.startswith("rank 1 (process 101 on n1) is running but missing: it is in step 4")
    assert "mine.py:3 in load" in text


def test_a_rank_that_only_lost_another_is_not_the_cause() -> None:
    """It may have ended since; the first one to go is named."""
    text = message_for(record(0, lost=True), record(1), r0=State.GONE, r1=State.GONE, world=2)
    assert text.startswith("rank 1 (process 101 on n1) is gone")


def test_ranks_that_wait_in_different_steps_are_distinguished() -> None:
    """Ranks in an earlier step are named; if all wait in one step, the message says so."""
    assert message_for(record(0), record(1, step=3), world=2).startswith("rank 1 only reached step")
    assert message_for(record(0), record(1), world=2).startswith("the ranks wait for each other")
    assert message_for(record(0), world=2).startswith("rank 1 never started")


def test_messages_about_thousands_of_ranks_are_short() -> None:
    """Ranges of ranks and many groups are abbreviated."""
    assert ranks_text([0, 1, 2, 5]) == "ranks 0-2, 5"
    records = {rank: record(rank, step=rank % 50) for rank in range(4000)}
    states = dict.fromkeys(records, State.SILENT)
    assert len(explain(records, states, 4000)) < 2000


@pytest.mark.parametrize(
    ("behavior", "state"),
    [
        ("stopped", "is stopped (by SIGSTOP or a debugger)"),
        ("slow", "is running but missing"),
        ("killed", "is gone (killed"),
    ],
)
def test_a_missing_rank_is_named_by_another_rank(behavior: str, state: str) -> None:
    """With its process and step, and the others' collective and line."""
    results = run_processes(
        3, FAULTS, "wait_for_rank_2", check=False, timeout_s=60, behavior=behavior
    )
    first, second = results[:2]
    assert first[0] == second[0] == 1
    (line,) = [text for _, text in (first, second) if text]
    assert line.count("\n") == 1
    assert line.startswith("ms-parallel: rank 2 (process ")
    assert f") {state}" in line
    assert "step 7, update" in line
    assert "faults.py" in line.split(";")[1 if behavior != "slow" else 0]
    assert "ranks 0-1: step 7, update, waiting in all_reduce, at " in line
    assert f"faults.py:{line_of_the_wait()} in wait_for_rank_2" in line
    assert "the same command resumes from the last complete checkpoint" in line


def test_ranks_in_different_collectives_are_distinguished() -> None:
    """The odd one by its process, or both of two; messages between stages are not collectives."""
    text = message_for(
        record(0), record(1), record(2, waits_in="broadcast", line="a.py:3 in f"), world=3
    )
    assert text == (
        "the ranks wait in different collectives because some rank has skipped one; rank 2 (process"
        " 102 on n1) differs from the others; ranks 0-1: step 4, update, waiting in"
        " all_reduce, at engine.py:301 in update; rank 2: step 4, update, waiting in"
        " broadcast, at a.py:3 in f"
    )
    pair = message_for(record(0), record(1, waits_in="barrier"), world=2)
    assert pair.startswith("the ranks wait in different collectives")
    assert "differs from" not in pair
    stages = message_for(record(0), record(1, waits_in="recv of the gradient of stage 2"), world=2)
    assert stages.startswith("the ranks wait for each other")


def test_a_rank_in_another_collective_is_named_with_both_lines() -> None:
    """The line where it waits, and the line where the others do."""
    results = run_processes(
        3, FAULTS, "wait_for_rank_2", check=False, timeout_s=60, behavior="another"
    )
    (line,) = [result[1] for result in results if isinstance(result, list) and result[1]]
    assert "the ranks wait in different collectives" in line
    assert "rank 2 (process " in line.split(";")[1]
    wait = line_of_the_wait()
    assert f"all_reduce, at faults.py:{wait} in wait_for_rank_2" in line
    assert f"all_gather, at faults.py:{wait - 1} in wait_for_rank_2" in line


def test_an_unlimited_wait_ends_if_rank_0_does_not_respond() -> None:
    """Others wait while rank 0 acts, but not for a stopped rank 0."""
    with pytest.raises(ProcessesFailedError) as failed:
        run_processes(2, FAULTS, "rank_0_stops_while_it_acts", timeout_s=60)
    message = str(failed.value)
    assert "rank 0 acts for all ranks but does not respond for 2 s: rank 0 (process " in message
    assert "is stopped (by SIGSTOP" in message


@pytest.mark.parametrize("local_rank", ["0", "1"])
@pytest.mark.parametrize("dying_s", [0.0, 0.1])
def test_a_rank_without_a_store_does_not_wait_for_answers(
    monkeypatch: pytest.MonkeyPatch, dying_s: float, local_rank: str
) -> None:
    """The store ended with rank 0 or its machine, which may still be closing sockets."""
    with socket.create_server(("127.0.0.1", 0)) as store:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(store.getsockname()[1]))
        closing = threading.Timer(dying_s, store.close)
        closing.start()
        if not dying_s:
            closing.join()
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        heartbeat, start = Heartbeat(1, 2, 10.0), time.monotonic()
        # Ranks cannot agree without the store, so one rank per machine reports.
        assert heartbeat.claim_report("loss") is (local_rank == "0")
        assert heartbeat.explain_missing() is None
        heartbeat.wait_for_report()
        assert time.monotonic() - start < 2.0


@pytest.mark.slow
def test_recording_a_position_takes_less_than_two_milliseconds() -> None:
    """Records are written once per second; position updates are assignments of about 30 ns."""
    seconds = []
    for _ in range(5):
        start = time.thread_time()
        for _ in range(20):
            position.record(0)
        seconds.append((time.thread_time() - start) / 20)
    assert min(seconds) < 0.002


def runs(process: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        facts = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return facts.rsplit(")", 1)[1].split()[0] not in "ZX"


def test_ranks_end_with_a_launcher_that_is_killed(corpus: Path, tmp_path: Path) -> None:
    """After SIGKILL of torchrun all ranks end within 4 s, and the same command resumes."""
    run = write_run(tmp_path / "run.toml", corpus, steps=40, checkpoint_every=5)
    with training_in_new_interpreters(run, 2) as started:
        wait_for(lambda: checkpoints(run), started)
        ranks = workers(started.pid)
        assert len(ranks) == 2
        signal_process(started.pid, 9)
        deadline = time.monotonic() + 4.0  # a busy machine takes a while to free their memory
        while any(runs(rank) for rank in ranks):
            assert time.monotonic() < deadline, "ranks continue without their launcher"
            time.sleep(0.01)
    result = train(run, 2)
    assert result.returncode == 0, result.stderr
    assert events(run, "resume")
