"""Works on batches on a Ray cluster, and gives their answers in the order of asking.

The corpus is read and the answers are written here; only the work on batches is elsewhere, so the
bytes do not depend on the cluster. Its machines need ms-data and what the work needs installed.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeVar

from ms_data.errors import DataError, SettingError, printable

AHEAD = 2
"""Batches that are asked for ahead, for each core of the cluster."""

T = TypeVar("T")


class ClusterError(DataError, RuntimeError):
    """A cluster that cannot be reached, or that lost the processes that do the work."""


def answers_on_ray(
    work: str, setup: bytes, requests: Iterable[tuple[T, bytes]], *, address: str
) -> Generator[tuple[T, bytes], None, None]:
    """Yield each request's companion with its answer, in the order of the requests.

    Args:
        work: `module:function`; it takes `setup` and returns the function that answers requests.
        setup: given to `work` once in each process.
        requests: read ahead, `AHEAD` for each core of the cluster.
        address: `ray`, which is what `ray.init()` finds or starts, or `ray://HOST:PORT`.

    Raises:
        SettingError: ray is not installed.
        ClusterError: the cluster cannot be reached, or its processes end again and again.
    """
    ray = _ray()
    ours = not ray.is_initialized()
    if ours:
        _connect(ray, address)
    waiting: deque[tuple[T, Any]] = deque()
    try:
        prepared = ray.put(setup)
        task = ray.remote(max_retries=3)(_answer)
        most = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        for companion, request in requests:
            waiting.append((companion, task.remote(work, prepared, request)))
            while len(waiting) > most:
                first, answer = waiting.popleft()
                yield first, _get(ray, answer)
        while waiting:
            first, answer = waiting.popleft()
            yield first, _get(ray, answer)
    finally:
        for _, answer in waiting:
            ray.cancel(answer, force=True)
        if ours:
            ray.shutdown()


def check_ray() -> None:
    """Find out early whether ray is there.

    Raises:
        SettingError: it is not installed.
    """
    _ray()


def _ray() -> Any:
    try:
        return import_module("ray")
    except ImportError as error:
        raise SettingError("a cluster needs ray; pip install 'ms-data[ray]'") from error


def _connect(ray: Any, address: str) -> None:
    try:
        ray.init(None if address == "ray" else address, log_to_driver=False, logging_level="error")
    except Exception as error:  # ray raises no narrower one where a node starts too slowly
        raise ClusterError(
            f"no Ray cluster at {printable(address)} ({printable(error)}); start one with "
            "`ray start --head`, or leave --workers out"
        ) from error


def _get(ray: Any, answer: Any) -> bytes:
    try:
        content: bytes = ray.get(answer)
    except ray.exceptions.RayTaskError as error:
        # What the work raised itself is what a process here would have raised.
        raise error.cause if isinstance(error.cause, Exception) else error from error
    except ray.exceptions.RayError as error:
        raise ClusterError(
            f"the cluster lost a process that works on documents ({printable(error)}), maybe for "
            "lack of memory; run the same again, which goes on from what is done"
        ) from error
    return content


def _answer(work: str, setup: bytes, request: bytes) -> bytes:
    """Run in a process of the cluster."""
    return _prepared(work, setup)(request)


@lru_cache(maxsize=2)
def _prepared(work: str, setup: bytes) -> Callable[[bytes], bytes]:
    module, _, name = work.partition(":")
    prepared: Callable[[bytes], bytes] = getattr(import_module(module), name)(setup)
    return prepared
