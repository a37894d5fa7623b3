"""Processes batches in threads, in processes or on a Ray cluster; yields results in batch order."""

import contextlib
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Generic, TypeVar

from attrs import frozen

from ms_data.arguments import shown
from ms_data.engine.batches import BATCH_CHARACTERS, DocumentBatch, ReadBatch
from ms_data.engine.ray_cluster import check_ray, ray_pool
from ms_data.engine.worker import PREFIX_BYTES, RESULT
from ms_data.errors import DataError, SettingError, printable
from ms_data.settings.arguments import is_integer

_WORKER = Path(__file__).with_name("worker.py")
MAX_WORKERS = 1024
"""Limit for processes of one machine; a larger number is a typo that would exhaust its memory."""
AHEAD = 2
"""Requests queued beyond the number of processes, so that no process waits for the reader."""

R = TypeVar("R")
Results = Generator[tuple[ReadBatch, R], None, None]


class WorkerError(DataError, RuntimeError):
    """A worker process ended before its work was done."""


@frozen(kw_only=True)
class Work(Generic[R]):
    """Processing of a batch in a worker, which receives and returns bytes."""

    function: str
    """`module:function`; the function takes a setup and returns the function from request to
    result."""
    request: Callable[[DocumentBatch], bytes]
    """Encodes the inputs that determine the result of a batch."""
    dump: Callable[[DocumentBatch, R], bytes]
    """Encodes a result as the worker does."""
    load: Callable[[bytes], R]
    """Decodes a result."""
    empty: R
    """Result of a batch without documents."""


def map_threads(
    function: Callable[[DocumentBatch], R], batches: Iterable[ReadBatch], *, threads: int
) -> Results[R]:
    """Process batches in threads of this process, for functions that release the GIL."""
    executor = ThreadPoolExecutor(threads)
    try:
        yield from _map_ordered(
            lambda batch: executor.submit(function, batch).result, batches, ahead=threads
        )
    finally:
        executor.shutdown(cancel_futures=True)


def map_workers(
    work: Work[R], setup: bytes, batches: Iterable[ReadBatch], *, workers: int | str
) -> Results[R]:
    """Process batches in worker processes.

    Args:
        work: the work.
        setup: passed to the work's function once in every process.
        batches: read ahead, as many as there are processes and a few more.
        workers: number of processes (1: this process), or the address of a Ray cluster.

    Raises:
        WorkerError: a process was killed.
        ClusterError: the cluster cannot be reached, or lost a process permanently.
    """
    if isinstance(workers, str):
        pool = ray_pool(work.function, setup, address=workers)
    elif workers == 1:
        pool = _same_process(work.function, setup)
    else:
        pool = _process_pool(work.function, setup, workers)
    with pool as (send, ahead):

        def submit(batch: DocumentBatch) -> Callable[[], R]:
            result = send(work.request(batch))
            return lambda: work.load(result())

        yield from _map_ordered(submit, batches, ahead=ahead)


def _map_ordered(
    submit: Callable[[DocumentBatch], Callable[[], R]], batches: Iterable[ReadBatch], *, ahead: int
) -> Results[R]:
    """Submit batches ahead of the one whose result is awaited, and yield results in order."""
    pending: deque[tuple[ReadBatch, Callable[[], R]]] = deque()
    for read in batches:
        pending.append((read, submit(read.batch)))
        # Bounds the memory for finished results. A batch may also be one long document that takes
        # more memory than all others together.
        while len(pending) > ahead or (
            len(pending) > 1
            and sum(queued.characters for queued, _ in pending) > (ahead + 2) * BATCH_CHARACTERS
        ):
            first, result = pending.popleft()
            yield first, result()
    for first, result in pending:
        yield first, result()


Send = Callable[[bytes], Callable[[], bytes]]
"""Sends a request to a pool; returns the function that waits for its result."""


@contextlib.contextmanager
def _same_process(function: str, setup: bytes) -> Iterator[tuple[Send, int]]:
    module, _, name = function.partition(":")
    work: Callable[[bytes], bytes] = getattr(import_module(module), name)(setup)

    def send(request: bytes) -> Callable[[], bytes]:
        result = work(request)
        return lambda: result

    yield send, 0


@contextlib.contextmanager
def _process_pool(function: str, setup: bytes, workers: int) -> Iterator[tuple[Send, int]]:
    idle: SimpleQueue[_Process] = SimpleQueue()
    processes = [_Process(function, setup) for _ in range(workers)]
    for process in processes:
        idle.put(process)

    def call(request: bytes) -> bytes:
        # As many threads as processes: a thread always gets an idle process.
        process = idle.get()
        try:
            return process.call(request)
        finally:
            idle.put(process)

    threads = ThreadPoolExecutor(workers)
    try:
        yield lambda request: threads.submit(call, request).result, workers + AHEAD
    finally:
        for process in processes:
            process.kill()
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.close()


class _Process:
    """A worker process and the pipes to it."""

    def __init__(self, function: str, setup: bytes) -> None:
        # -I: run no code from the environment or the current folder before sys.path is set.
        command = [sys.executable, "-I", str(_WORKER), function, json.dumps(sys.path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._send(setup)

    def call(self, request: bytes) -> bytes:
        """Send a request and wait for the result."""
        assert self._process.stdout is not None
        self._send(request)
        status_byte = self._process.stdout.read(1)
        size = int.from_bytes(self._process.stdout.read(PREFIX_BYTES), "little")
        content = self._process.stdout.read(size)
        if not status_byte or len(content) < size:
            status = self._process.wait()
            cause = f"signal {-status}" if status < 0 else f"status {status}"
            raise WorkerError(
                f"a worker process was ended by {cause}, possibly for lack of memory; "
                "run the same command again with fewer --workers"
            )
        if status_byte != RESULT:
            raise RuntimeError(content.decode())
        return content

    def kill(self) -> None:
        """Kill the process, even if a thread waits for its result."""
        self._process.kill()

    def close(self) -> None:
        """Close the pipes of a killed process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _send(self, request: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # reading the result reports the failure
            self._process.stdin.write(len(request).to_bytes(PREFIX_BYTES, "little"))
            self._process.stdin.write(request)
            self._process.stdin.flush()


def worker_count(workers: int | str | None) -> int | str:
    """Return the number of processes or the address of a Ray cluster; None: one process per core.

    Raises:
        SettingError: the number is not from 1 to `MAX_WORKERS`, the address is invalid, or ray is
            not installed.
    """
    if isinstance(workers, str):
        if workers != "ray" and not workers.startswith("ray://"):
            raise SettingError(
                f"workers must be a number, ray or ray://HOST:PORT, got {printable(workers)!r}"
            )
        check_ray()
        return workers
    if workers is None:
        return len(os.sched_getaffinity(0))
    if not is_integer(workers) or not 1 <= workers <= MAX_WORKERS:
        raise SettingError(f"workers must be from 1 to {MAX_WORKERS}, got {shown(workers)}")
    return workers
