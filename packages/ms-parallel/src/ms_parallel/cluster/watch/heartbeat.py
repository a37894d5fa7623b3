"""A thread in each rank that publishes its position, and reads all positions if a rank is missing.

Each rank writes its record to the launcher's store once a second; a rank that waits in vain reads
all records. Processes on the same machine are looked up in /proc, which distinguishes stopped and
killed ones at once. A rank on another machine counts as silent when its record stops changing.

The thread has its own connection, since a waiting collective blocks the process group's connection.
"""

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from ms_parallel.cluster.watch.findings import State, explain
from ms_parallel.cluster.watch.record import RankPosition, position
from ms_parallel.entry import FAILED
from ms_parallel.interruption import launcher_is_gone

RECORDS_PER_SECOND = 1000
"""Rate of records that the store can take."""
STORE_TIMEOUT = timedelta(seconds=5)
RESUMES = "rerun the same command to resume from the last complete checkpoint"
DYING_S = 0.2
"""Time in which a killed process closes its connections."""
LOST = (dist.DistError, OSError, RuntimeError, ValueError)


class Heartbeat:
    """Publishes this rank's position periodically, and reads all positions on demand.

    Args:
        rank: rank of this process.
        world: number of ranks.
        timeout_s: seconds after which a silent process counts as lost.
    """

    running: "Heartbeat | None" = None
    """Heartbeat of this process."""

    def __init__(self, rank: int, world: int, timeout_s: float) -> None:
        self.rank = rank
        self.world = world
        self.timeout_s = timeout_s
        # Less often with many ranks, so that the store can take all records.
        self.interval_s = max(min(1.0, timeout_s / 4), world / RECORDS_PER_SECOND)
        self.prefix = f"ms-parallel/attempt-{position.start}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ms-parallel watch", daemon=True)

    def start(self) -> None:
        """Start sending."""
        position.thread = threading.get_ident()
        Heartbeat.running = self
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread before the interpreter exits, as a thread inside torch can abort it."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=STORE_TIMEOUT.total_seconds() + 1)

    def explain_missing(self) -> str | None:
        """Explain in a sentence which rank is missing; None if the store is unreachable."""
        try:
            store = self._reconnect()
            self._send(store)
            return explain(*self._gather(store), self.world)
        except LOST:
            return None

    def claim_report(self, cause: str) -> bool:
        """Return whether this rank reports why the run ends: the first that asks, for all ranks.

        Without the store, one rank per machine reports.

        Args:
            cause: `mistake` or `loss`; a mistake explains the losses that follow from it.
        """
        try:
            store = self._reconnect()
            if store.check([f"{self.prefix}/reports-mistake"]):
                return False
            # `add` is atomic, so exactly one rank gets 1.
            return int(store.add(f"{self.prefix}/reports-{cause}", 1)) == 1
        except LOST:
            return os.environ.get("LOCAL_RANK", "0") == "0"

    def finish_report(self) -> None:
        """Let the other ranks exit; torchrun stops all when the first has exited."""
        with suppress(*LOST):
            self._reconnect().set(f"{self.prefix}/reported", "1")

    def wait_for_report(self) -> None:
        """Wait while another rank collects the positions and reports."""
        with suppress(*LOST):
            self._reconnect().wait([f"{self.prefix}/reported"], STORE_TIMEOUT + self._record_period)

    @property
    def _record_period(self) -> timedelta:
        """Time in which every living rank sends a record."""
        return timedelta(seconds=2 * self.interval_s + 0.5)

    def _connect(self) -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]  # missing in torch's stubs
            *_address(),
            is_master=False,
            timeout=STORE_TIMEOUT,
            wait_for_workers=False,
        )

    def _reconnect(self) -> Any:
        """Connect to a store that may be gone; torch alone would retry for ten seconds."""
        with socket.create_connection(_address(), STORE_TIMEOUT.total_seconds()) as connection:
            connection.settimeout(DYING_S)
            with suppress(TimeoutError):  # a store sends nothing before a request
                if not connection.recv(1):
                    raise ConnectionResetError("the store closed the connection")
        return self._connect()

    def _run(self) -> None:
        silence = _Silence()
        try:
            store = self._connect()
            self._send(store)
            while not self._ended.wait(self.interval_s):
                self._send(store)
                self._check_progress(store, silence)
                _end_if_orphaned()
        except LOST:
            # The ranks are exiting, or lost the store's machine, which they notice themselves.
            # Reconnecting here would keep the interpreter from exiting.
            lost_since = time.monotonic()
            while not self._ended.wait(self.interval_s):
                _end_if_orphaned()
                # Waiting for rank 0's action has no timeout.
                if not position.patient:
                    lost_since = time.monotonic()
                elif self.rank and time.monotonic() - lost_since > self.timeout_s:
                    self._end(lost_contact(self.rank))

    def _send(self, store: Any) -> None:
        store.set(self._key(self.rank), msgspec.json.encode(position.record(self.rank)))

    def _key(self, rank: int) -> str:
        return f"{self.prefix}/position-{rank}"

    def _check_progress(self, store: Any, silence: "_Silence") -> None:
        """Warn without progress for half of the limit; end if rank 0's action has stalled."""
        time_now = time.monotonic()
        if position.patient:
            (rank0_record,) = self._read(store, [0]).values() or (None,)
            if (
                self.rank
                and silence.lasts(time_now, rank0_record and rank0_record.beat) > self.timeout_s
            ):
                self._end(
                    f"rank 0 acts for all ranks but does not respond for {self.timeout_s:g} s"
                )
        elif not position.step:  # no limit before the first step
            return
        elif silence.lasts(time_now, position.progress) > self.timeout_s / 2 and not silence.warned:
            silence.warned = True
            # The first rank that notices prints for all.
            if store.add(f"{self.prefix}/slow-{position.step}", 1) == 1:
                explanation = explain(*self._gather(store), self.world)
                _print(f"warning: no progress for {self.timeout_s / 2:g} s: {explanation}")

    def _end(self, reason: str) -> None:
        if self.claim_report("loss"):
            missing = self.explain_missing()
            _print(f"{reason}: {missing}" if missing else f"{reason}; {RESUMES}")
            self.finish_report()
        else:
            self.wait_for_report()
        os._exit(FAILED)

    def _gather(self, store: Any) -> tuple[dict[int, RankPosition], dict[int, State]]:
        """Gather each rank's last record and the state of its process."""
        first_records = self._read(store, range(self.world))
        end = time.monotonic() + self._record_period.total_seconds()
        # A killed process closes its connections shortly before the kernel marks it dead.
        while time.monotonic() < end:
            states = {rank: _state(record) for rank, record in first_records.items()}
            if any(_is_absent(states[rank], first_records[rank]) for rank in first_records):
                time.sleep(self.interval_s)  # for the others to send their current positions
                break
            time.sleep(0.05)
        records = {**first_records, **self._read(store, first_records)}
        for rank, state in states.items():
            if state is None:
                has_moved = records[rank].beat > first_records[rank].beat
                states[rank] = State.ALIVE if has_moved or time.monotonic() < end else State.SILENT
        return records, {rank: state or State.SILENT for rank, state in states.items()}

    def _read(self, store: Any, ranks: Any) -> dict[int, RankPosition]:
        present = [rank for rank in ranks if store.check([self._key(rank)])]
        contents = store.multi_get([self._key(rank) for rank in present]) if present else []
        return {
            rank: msgspec.json.decode(content, type=RankPosition)
            for rank, content in zip(present, contents, strict=True)
        }


class _Silence:
    """Measures how long a value has stayed the same."""

    def __init__(self) -> None:
        self.warned = False
        self.started = False
        self._last: object = None
        self._since = 0.0

    def lasts(self, time_now: float, value: object) -> float:
        """Seconds since `value` last changed."""
        if value != self._last or not self.started:
            self._last, self._since, self.warned, self.started = value, time_now, False, True
        return time_now - self._since


def lost_contact(rank: int) -> str:
    """Describe the loss of the launcher's store on rank 0's machine."""
    host, port = _address()
    return f"rank {rank} lost contact with rank 0's machine ({host}:{port})"


def _address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _end_if_orphaned() -> None:
    if launcher_is_gone():
        os._exit(FAILED)


def _is_absent(state: State | None, record: RankPosition) -> bool:
    return state in (State.STOPPED, State.GONE) and not record.lost


def _state(record: RankPosition) -> State | None:
    """State of a process on this machine from /proc; None for other machines."""
    if record.machine != position.machine:
        return None
    try:
        stat = Path(f"/proc/{record.pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return State.GONE
    letter, *fields = stat[stat.rindex(")") + 2 :].split()
    # fields[18] is the start time (field 22); the PID may belong to another process by now.
    if letter in "ZX" or int(fields[18]) != record.born:
        return State.GONE
    return State.STOPPED if letter in "tT" else State.ALIVE


def _print(line: str) -> None:
    print(f"ms-parallel: {line}", file=sys.stderr, flush=True)  # noqa: T201 - the process exits next
