"""Runs the workers of a run on a Ray cluster.

This process reads the corpus and writes the output, so the output does not depend on the cluster.
The cluster's machines need ms-data and the libraries of the work installed.
"""

import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from importlib import import_module
from typing import Any

from ms_data.errors import DataError, SettingError, printable

AHEAD = 2
"""Requests sent ahead per core of the cluster."""
_WATCH = """
import sys
if not sys.stdin.buffer.read(1):
    print(sys.argv[1], file=sys.stderr)
"""
_ENDED = (
    "error: this process was ended by a signal, or by Ray because the head or the node process of"
    " its cluster ended; finished work is kept, run the same command again to resume"
)


class ClusterError(DataError, RuntimeError):
    """A cluster that cannot be reached, or that lost its worker processes."""


@contextmanager
def ray_pool(
    function: str, setup: bytes, *, address: str
) -> Iterator[tuple[Callable[[bytes], Callable[[], bytes]], int]]:
    """Yield the function that sends a request to a cluster, and the number to send ahead.

    Results must be awaited in the order of the requests.

    Args:
        function: see `Work`.
        setup: passed to `function` once in every process.
        address: `ray` for the cluster that `ray.init()` finds or starts, or `ray://HOST:PORT`.

    Raises:
        SettingError: ray is not installed.
        ClusterError: the cluster cannot be reached, or its processes keep failing.
    """
    ray = check_ray()
    connected_here = not ray.is_initialized()
    pending: deque[Any] = deque()
    with ExitStack() as stack:
        stack.enter_context(explained_exit())
        if connected_here:
            _connect(ray, address)
            stack.callback(ray.shutdown)
        stack.callback(_cancel, ray, pending)
        stored_setup = ray.put(setup)  # stored once, and shared by all tasks
        task = ray.remote(max_retries=3)(_run_task)

        def send(request: bytes) -> Callable[[], bytes]:
            pending.append(task.remote(function, stored_setup, request))
            return lambda: _get(ray, pending.popleft())

        yield send, AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))


@contextmanager
def explained_exit() -> Iterator[None]:
    """Have a second process print one line if this one ends within the block.

    Ray ends its driver by `_exit`, without an exception or a message, when the head or the node
    process that it is connected to ends.
    """
    command = [sys.executable, "-I", "-S", "-c", _WATCH, _ENDED]
    # A session of its own, so that Ctrl-C does not reach it.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as watcher:
        assert watcher.stdin is not None
        try:
            yield
        finally:
            with suppress(BrokenPipeError):
                watcher.stdin.write(b".")
                watcher.stdin.flush()


def _cancel(ray: Any, pending: deque[Any]) -> None:
    for result in pending:
        ray.cancel(result, force=True)


def check_ray() -> Any:
    """Return the module `ray`.

    Raises:
        SettingError: ray is not installed.
    """
    try:
        return import_module("ray")
    except ImportError as error:
        raise SettingError("using a cluster needs ray; pip install 'ms-data[ray]'") from error


def _connect(ray: Any, address: str) -> None:
    try:
        ray.init(None if address == "ray" else address, log_to_driver=False, logging_level="error")
    except Exception as error:  # ray raises a plain Exception if a node starts too slowly
        raise ClusterError(
            f"no Ray cluster at {printable(address)} ({printable(error)}); start one with "
            "`ray start --head`, or drop --workers"
        ) from error


def _get(ray: Any, result: Any) -> bytes:
    try:
        content: bytes = ray.get(result)
    except ray.exceptions.RayTaskError as error:
        # Raise the error of the work itself, as a local process would.
        raise error.cause if isinstance(error.cause, Exception) else error from error
    except ray.exceptions.RayError as error:
        raise ClusterError(
            f"the cluster lost a worker process ({printable(error)}), possibly for lack of memory; "
            "run the same command again to resume"
        ) from error
    return content


def _run_task(function: str, setup: bytes, request: bytes) -> bytes:
    """Process one request in a process of the cluster."""
    return _prepare_work(function, setup)(request)


@lru_cache(maxsize=2)
def _prepare_work(function: str, setup: bytes) -> Callable[[bytes], bytes]:
    module, _, name = function.partition(":")
    prepared: Callable[[bytes], bytes] = getattr(import_module(module), name)(setup)
    return prepared
