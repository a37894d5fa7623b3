"""Processes batches on a Ray cluster and yields results in request order.

This process reads the corpus and writes the output, so the output does not depend on the cluster.
The cluster's machines need ms-data and the libraries of the work installed.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeVar

from ms_data.errors import DataError, SettingError, printable

AHEAD = 2
"""Requests sent ahead per core of the cluster."""

T = TypeVar("T")


class ClusterError(DataError, RuntimeError):
    """A cluster that cannot be reached, or that lost its worker processes."""


def map_on_ray(
    work: str, setup: bytes, requests: Iterable[tuple[T, bytes]], *, address: str
) -> Generator[tuple[T, bytes], None, None]:
    """Process requests on the cluster; yield every request's tag with its result, in request order.

    Args:
        work: `module:function`; the function takes `setup` and returns the function that processes
            requests.
        setup: passed to `work` once in every process.
        requests: (tag, request) pairs; `AHEAD` per core of the cluster are read ahead.
        address: `ray` for the cluster that `ray.init()` finds or starts, or `ray://HOST:PORT`.

    Raises:
        SettingError: ray is not installed.
        ClusterError: the cluster cannot be reached, or its processes keep failing.
    """
    ray = _ray()
    connected_here = not ray.is_initialized()
    if connected_here:
        _connect(ray, address)
    pending: deque[tuple[T, Any]] = deque()
    try:
        prepared = ray.put(setup)  # stored once, and shared by all tasks
        task = ray.remote(max_retries=3)(_run_task)
        max_pending = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        for tag, request in requests:
            pending.append((tag, task.remote(work, prepared, request)))
            while len(pending) > max_pending:  # bounds the memory for requests and results
                first_tag, result = pending.popleft()
                yield first_tag, _get(ray, result)
        while pending:
            first_tag, result = pending.popleft()
            yield first_tag, _get(ray, result)
    finally:
        for _, result in pending:
            ray.cancel(result, force=True)
        if connected_here:
            ray.shutdown()


def check_ray() -> None:
    """Check that ray is installed.

    Raises:
        SettingError: ray is not installed.
    """
    _ray()


def _ray() -> Any:
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


def _run_task(work: str, setup: bytes, request: bytes) -> bytes:
    """Process one request in a process of the cluster."""
    return _prepare_work(work, setup)(request)


@lru_cache(maxsize=2)
def _prepare_work(work: str, setup: bytes) -> Callable[[bytes], bytes]:
    module, _, name = work.partition(":")
    prepared: Callable[[bytes], bytes] = getattr(import_module(module), name)(setup)
    return prepared
