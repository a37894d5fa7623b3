"""Runs work in several processes, since a compiler holds one core and Python's lock."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _die_by_interrupt() -> None:
    """Let Ctrl-C, which a terminal sends to every process, end this one without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def _ignored_interrupt() -> Iterator[None]:
    """Ignore Ctrl-C for the moment in which processes are started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def each_done(
    work: Callable[[_Item], _Made], items: Sequence[_Item], *, jobs: int, least: int
) -> Iterator[_Made]:
    """Yield ``work(item)`` of each item in order, made in up to `jobs` processes.

    Args:
        work: a function of a module, or a partial of one: it goes to other processes.
        items: sent to these processes, one for each call.
        jobs: processes at most; 1 works in this one.
        least: items for which a process is worth starting: it imports torch and Triton anew.
    """
    jobs = min(jobs, len(items) // least)
    if jobs <= 1:
        yield from map(work, items)
        return
    # A fork of a process in which torch has threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_die_by_interrupt) as pool:
        try:
            with _ignored_interrupt():  # which a new process inherits until it dies by it
                results = pool.map(work, items)
            yield from results
        finally:  # stopped or failed: what has not begun never does
            pool.shutdown(cancel_futures=True)
