"""A thread in each rank that shares where it stands, and asks when another does not come.

Each rank sets its record in the launcher's store once a second; who waits in vain reads all of
them. Processes of this machine are looked up in /proc, so that a stopped one and a killed one are
told apart at once. A rank of another machine counts as silent when its record no longer changes.

The thread has a connection of its own: the process group's is held by whoever waits at it.
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
from ms_parallel.cluster.watch.record import Record, position
from ms_parallel.entry import FAILED
from ms_parallel.interruption import launcher_is_gone

RANKS_A_SECOND = 1000
"""Records that the store has to take in a second."""
STORE_TIMEOUT = timedelta(seconds=5)
RESUMES = "rerun the same command to resume from the last complete checkpoint"
DYING_S = 0.2
"""Time in which a process that was killed closes all that it had open, one after the other."""
LOST = (dist.DistError, OSError, RuntimeError, ValueError)


class Heartbeat:
    """Sends this rank's position once in a while, and reads all ranks' when they are wanted.

    Args:
        rank: of this process.
        world: number of ranks.
        timeout_s: seconds after which a silent process counts as lost.
    """

    running: "Heartbeat | None" = None
    """This process's."""

    def __init__(self, rank: int, world: int, timeout_s: float) -> None:
        self.rank = rank
        self.world = world
        self.timeout_s = timeout_s
        self.interval_s = max(min(1.0, timeout_s / 4), world / RANKS_A_SECOND)
        self.prefix = f"ms-parallel/attempt-{position.start}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ms-parallel watch", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        position.thread = threading.get_ident()
        Heartbeat.running = self
        self._thread.start()

    def stop(self) -> None:
        """End the thread before the interpreter ends, which a thread inside of torch can abort."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=STORE_TIMEOUT.total_seconds() + 1)

    def who_is_missing(self) -> str | None:
        """Explain in a sentence which rank did not come; return None if the store has gone too."""
        try:
            store = self._connect_again()
            self._send(store)
            return explain(*self._gather(store), self.world)
        except LOST:
            return None

    def speaks_first(self, what: str) -> bool:
        """Return whether this rank is to say why the run ends: the first that asks, for all.

        Without the store nobody can agree, so one rank of each machine does.

        Args:
            what: `mistake` or `loss`; a mistake explains the losses that follow from it.
        """
        try:
            store = self._connect_again()
            if store.check([f"{self.prefix}/said-mistake"]):
                return False
            return int(store.add(f"{self.prefix}/said-{what}", 1)) == 1
        except LOST:
            return os.environ.get("LOCAL_RANK", "0") == "0"

    def has_spoken(self) -> None:
        """Let the other ranks end: torchrun stops all when the first has ended."""
        with suppress(*LOST):
            self._connect_again().set(f"{self.prefix}/spoken", "1")

    def wait_until_spoken(self) -> None:
        """Give the one that speaks the time to ask all ranks."""
        with suppress(*LOST):
            self._connect_again().wait([f"{self.prefix}/spoken"], STORE_TIMEOUT + self._patience)

    @property
    def _patience(self) -> timedelta:
        """Time in which every living rank sends a record."""
        return timedelta(seconds=2 * self.interval_s + 0.5)

    def _connect(self) -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]  # torch does not list it
            *_place(),
            is_master=False,
            timeout=STORE_TIMEOUT,
            wait_for_workers=False,
        )

    def _connect_again(self) -> Any:
        """Connect to a store that may have gone; torch alone would ask for it for ten seconds."""
        with socket.create_connection(_place(), STORE_TIMEOUT.total_seconds()) as found:
            found.settimeout(DYING_S)
            with suppress(TimeoutError):  # a store says nothing before it is asked
                if not found.recv(1):
                    raise ConnectionResetError("the store has gone")
        return self._connect()

    def _run(self) -> None:
        silence = _Silence()
        try:
            store = self._connect()
            self._send(store)
            while not self._ended.wait(self.interval_s):
                self._send(store)
                self._look(store, silence)
                _end_if_orphaned()
        except LOST:
            # The ranks are ending, or lost the store's machine, which they find by themselves. To
            # connect again here would keep the interpreter from ending.
            lost = time.monotonic()
            while not self._ended.wait(self.interval_s):
                _end_if_orphaned()
                # Whoever waits for rank 0 to act has no timeout of its own.
                if not position.patient:
                    lost = time.monotonic()
                elif self.rank and time.monotonic() - lost > self.timeout_s:
                    self._end(lost_contact(self.rank))

    def _send(self, store: Any) -> None:
        store.set(self._key(self.rank), msgspec.json.encode(position.record(self.rank)))

    def _key(self, rank: int) -> str:
        return f"{self.prefix}/position-{rank}"

    def _look(self, store: Any, silence: "_Silence") -> None:
        """Warn when no progress is made for half of the limit; end when rank 0 acts no more."""
        now = time.monotonic()
        if position.patient:
            (first,) = self._read(store, [0]).values() or (None,)
            if self.rank and silence.lasts(now, first and first.beat) > self.timeout_s:
                self._end(f"rank 0 acts for all ranks and gives no sign for {self.timeout_s:g} s")
        elif not position.step:  # to begin takes as long as it takes
            return
        elif silence.lasts(now, position.progress) > self.timeout_s / 2 and not silence.warned:
            silence.warned = True
            if store.add(f"{self.prefix}/slow-{position.step}", 1) == 1:
                found = explain(*self._gather(store), self.world)
                _say(f"warning: nothing has moved for {self.timeout_s / 2:g} s: {found}")

    def _end(self, reason: str) -> None:
        if self.speaks_first("loss"):
            missing = self.who_is_missing()
            _say(f"{reason}: {missing}" if missing else f"{reason}; {RESUMES}")
            self.has_spoken()
        else:
            self.wait_until_spoken()
        os._exit(FAILED)

    def _gather(self, store: Any) -> tuple[dict[int, Record], dict[int, State]]:
        """Gather each rank's last record, and what its process is doing."""
        before = self._read(store, range(self.world))
        end = time.monotonic() + self._patience.total_seconds()
        # A killed process closes its connections a moment before the kernel calls it gone.
        while time.monotonic() < end:
            states = {rank: _state(record) for rank, record in before.items()}
            if any(_is_absent(states[rank], before[rank]) for rank in before):
                time.sleep(self.interval_s)  # in which the others send where they stand by now
                break
            time.sleep(0.05)
        records = {**before, **self._read(store, before)}
        for rank, state in states.items():
            if state is None:
                moved = records[rank].beat > before[rank].beat
                states[rank] = State.ALIVE if moved or time.monotonic() < end else State.SILENT
        return records, {rank: state or State.SILENT for rank, state in states.items()}

    def _read(self, store: Any, ranks: Any) -> dict[int, Record]:
        there = [rank for rank in ranks if store.check([self._key(rank)])]
        found = store.multi_get([self._key(rank) for rank in there]) if there else []
        return {
            rank: msgspec.json.decode(content, type=Record)
            for rank, content in zip(there, found, strict=True)
        }


class _Silence:
    """How long something has stayed the same."""

    def __init__(self) -> None:
        self.warned = False
        self.began = False
        self._last: object = None
        self._since = 0.0

    def lasts(self, now: float, value: object) -> float:
        """Return the seconds since `value` was another."""
        if value != self._last or not self.began:
            self._last, self._since, self.warned, self.began = value, now, False, True
        return now - self._since


def lost_contact(rank: int) -> str:
    """Describe the loss of the launcher's store, which is on rank 0's machine."""
    host, port = _place()
    return f"rank {rank} lost contact with rank 0's machine ({host}:{port})"


def _place() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _end_if_orphaned() -> None:
    if launcher_is_gone():
        os._exit(FAILED)


def _is_absent(state: State | None, record: Record) -> bool:
    return state in (State.STOPPED, State.GONE) and not record.lost


def _state(record: Record) -> State | None:
    """Return what the kernel says of a process on this machine; None for another machine's."""
    if record.machine != position.machine:
        return None
    try:
        stat = Path(f"/proc/{record.pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return State.GONE
    letter, *rest = stat[stat.rindex(")") + 2 :].split()
    if letter in "ZX" or int(rest[18]) != record.born:
        return State.GONE
    return State.STOPPED if letter in "tT" else State.ALIVE


def _say(line: str) -> None:
    print(f"ms-parallel: {line}", file=sys.stderr, flush=True)  # noqa: T201 - nobody else can
