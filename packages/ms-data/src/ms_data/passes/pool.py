"""Processes batches in several worker processes and yields results in request order."""

import contextlib
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from ms_data.errors import DataError, SettingError, printable
from ms_data.passes.ray_cluster import check_ray, map_on_ray
from ms_data.passes.worker import PREFIX_BYTES, RESULT

_WORKER = Path(__file__).with_name("worker.py")
AHEAD = 2
"""Requests queued beyond the number of processes, so that no process waits for the reader."""

Work = Callable[[bytes], bytes]
T = TypeVar("T")


class WorkerError(DataError, RuntimeError):
    """A worker process ended before its work was done."""


class _Process:
    """A worker process and the pipes to it."""

    def __init__(self, work: str, setup: bytes) -> None:
        # -I: run no code from the environment or the current folder before sys.path is set.
        command = [sys.executable, "-I", str(_WORKER), work, json.dumps(sys.path)]
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
        SettingError: the number is below 1, the address is invalid, or ray is not installed.
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
    if workers < 1:
        raise SettingError(f"workers must be at least 1, got {workers}")
    return workers


def map_ordered(
    work: str, setup: bytes, requests: Iterable[tuple[T, bytes]], *, workers: int | str
) -> Generator[tuple[T, bytes], None, None]:
    """Process requests in parallel; yield every request's tag with its result, in request order.

    Args:
        work: `module:function`; the function takes `setup` and returns the function that processes
            requests.
        setup: passed to `work` once in every process.
        requests: (tag, request) pairs; as many are read ahead as there are processes, plus `AHEAD`.
        workers: number of processes (1: this process), or the address of a Ray cluster.

    Raises:
        WorkerError: a process was killed.
        ClusterError: the cluster cannot be reached, or lost a process permanently.
    """
    if isinstance(workers, str):
        yield from map_on_ray(work, setup, requests, address=workers)
        return
    if workers == 1:
        module, _, name = work.partition(":")
        function: Work = getattr(import_module(module), name)(setup)
        for tag, request in requests:
            yield tag, function(request)
        return
    idle: SimpleQueue[_Process] = SimpleQueue()
    processes = [_Process(work, setup) for _ in range(workers)]
    for process in processes:
        idle.put(process)

    def process_request(request: bytes) -> bytes:
        # As many threads as processes: a thread always gets an idle process.
        process = idle.get()
        try:
            return process.call(request)
        finally:
            idle.put(process)

    threads = ThreadPoolExecutor(workers)
    try:
        pending: deque[tuple[T, Future[bytes]]] = deque()
        for tag, request in requests:
            pending.append((tag, threads.submit(process_request, request)))
            while len(pending) > workers + AHEAD:  # bounds the memory for finished results
                first_tag, result = pending.popleft()
                yield first_tag, result.result()
        for first_tag, result in pending:
            yield first_tag, result.result()
    finally:
        for process in processes:
            process.kill()
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.close()
