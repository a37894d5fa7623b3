"""Works on batches in several processes, and gives their answers in the order of asking."""

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
from ms_data.passes.ray_cluster import answers_on_ray, check_ray
from ms_data.passes.worker import ANSWER, PREFIX_BYTES

_WORKER = Path(__file__).with_name("worker.py")
AHEAD = 2
"""Requests that wait for a free process, so that none waits for the reader."""

Work = Callable[[bytes], bytes]
T = TypeVar("T")


class WorkerError(DataError, RuntimeError):
    """A process that works on batches ended before its work was done."""


class _Process:
    """One process, and the pipe to it."""

    def __init__(self, work: str, setup: bytes) -> None:
        # -I: nothing from the environment or the current folder is run before the paths are set.
        command = [sys.executable, "-I", str(_WORKER), work, json.dumps(sys.path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._send(setup)

    def ask(self, request: bytes) -> bytes:
        """Send a request and wait for its answer."""
        assert self._process.stdout is not None
        self._send(request)
        kind = self._process.stdout.read(1)
        size = int.from_bytes(self._process.stdout.read(PREFIX_BYTES), "little")
        content = self._process.stdout.read(size)
        if not kind or len(content) < size:
            status = self._process.wait()
            why = f"signal {-status}" if status < 0 else f"status {status}"
            raise WorkerError(
                f"a process that works on documents was ended by {why}, maybe for lack of memory; "
                "run the same again with fewer --workers"
            )
        if kind != ANSWER:
            raise RuntimeError(content.decode())
        return content

    def kill(self) -> None:
        """End the process, whoever waits for its answer."""
        self._process.kill()

    def close(self) -> None:
        """Close the pipes of a process that was killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _send(self, request: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is found out when there is no answer
            self._process.stdin.write(len(request).to_bytes(PREFIX_BYTES, "little"))
            self._process.stdin.write(request)
            self._process.stdin.flush()


def worker_count(workers: int | str | None) -> int | str:
    """Return the number of processes, or the address of a Ray cluster; None means one a core.

    Raises:
        SettingError: below 1, or no such cluster, or ray is not installed.
    """
    if isinstance(workers, str):
        if workers != "ray" and not workers.startswith("ray://"):
            raise SettingError(
                f"workers is {printable(workers)!r}; give a number, ray, or ray://HOST:PORT"
            )
        check_ray()
        return workers
    if workers is None:
        return len(os.sched_getaffinity(0))
    if workers < 1:
        raise SettingError(f"workers is {workers}; give 1 or more")
    return workers


def ordered_answers(
    work: str, setup: bytes, requests: Iterable[tuple[T, bytes]], *, workers: int | str
) -> Generator[tuple[T, bytes], None, None]:
    """Yield each request's companion with its answer, in the order of the requests.

    Args:
        work: `module:function`; it takes `setup` and returns the function that answers requests.
        setup: given to `work` once in each process.
        requests: read as far ahead as there are processes, and `AHEAD`.
        workers: processes, of which 1 works in this one; or a Ray cluster.

    Raises:
        WorkerError: a process was killed.
        ClusterError: the cluster cannot be reached, or lost a process for good.
    """
    if isinstance(workers, str):
        yield from answers_on_ray(work, setup, requests, address=workers)
        return
    if workers == 1:
        module, _, name = work.partition(":")
        function: Work = getattr(import_module(module), name)(setup)
        for companion, request in requests:
            yield companion, function(request)
        return
    free: SimpleQueue[_Process] = SimpleQueue()
    processes = [_Process(work, setup) for _ in range(workers)]
    for process in processes:
        free.put(process)

    def ask(request: bytes) -> bytes:
        process = free.get()
        try:
            return process.ask(request)
        finally:
            free.put(process)

    threads = ThreadPoolExecutor(workers)
    try:
        waiting: deque[tuple[T, Future[bytes]]] = deque()
        for companion, request in requests:
            waiting.append((companion, threads.submit(ask, request)))
            while len(waiting) > workers + AHEAD:
                first, answer = waiting.popleft()
                yield first, answer.result()
        for first, answer in waiting:
            yield first, answer.result()
    finally:
        for process in processes:
            process.kill()
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.close()
