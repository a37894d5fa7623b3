"""Parallel compilation in worker processes, because a compiler holds Python's GIL."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def cores() -> int:
    """Return the number of cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _die_by_interrupt() -> None:
    """Let Ctrl-C, which a terminal sends to all processes, end this worker without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def _ignored_interrupt() -> Iterator[None]:
    """Ignore Ctrl-C while worker processes are started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def map_in_processes(
    work: Callable[[_Item], _Result], items: Sequence[_Item], *, jobs: int, min_items: int
) -> Iterator[_Result]:
    """Yield ``work(item)`` for all items in order, computed in up to `jobs` processes.

    Args:
        work: module-level function, or a partial of one, so that it can be pickled.
        items: items, one per call of `work`.
        jobs: maximum number of processes; 1 runs in this process.
        min_items: minimum items per process: a new process must import torch and Triton first.
    """
    jobs = min(jobs, len(items) // min_items)
    if jobs <= 1:
        yield from map(work, items)
        return
    # Forking a process with torch threads may deadlock.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_die_by_interrupt) as pool:
        try:
            with _ignored_interrupt():  # workers inherit it until their initializer runs
                results = pool.map(work, items)
            yield from results
        finally:  # on interruption or failure, cancel pending items
            pool.shutdown(cancel_futures=True)
