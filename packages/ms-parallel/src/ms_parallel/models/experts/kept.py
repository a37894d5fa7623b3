"""Decisions of a forward pass that its recomputation reuses.

A router that chose again during recomputation could choose differently: its bias may have changed
since, and ties may resolve either way. Decisions under `keeping` are recorded and replayed in
order.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import local

from torch import Tensor


class _Now(local):
    """Thread-local recording state: autograd recomputes in its own threads."""

    memory: "deque[Tensor] | None" = None
    again: bool = False


_now = _Now()


def decide(decision: Callable[[], Tensor]) -> Tensor:
    """Return the result of a decision; a recomputation returns the recorded result.

    Args:
        decision: called once per forward pass, so it may update counters.
    """
    if _now.memory is None:
        return decision()
    if _now.again:
        result = _now.memory.popleft()
        _now.memory.append(result)  # the graph may be recomputed again
        return result
    result = decision()
    _now.memory.append(result)
    return result


def recomputes() -> bool:
    """Whether the current code runs in a recomputation, whose statistics are already recorded."""
    return _now.again


def keeping(
    memory: "deque[Tensor] | None" = None,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return context managers for a forward pass and its recomputation.

    Args:
        memory: queue of decisions; a new one by default.
    """
    memory = deque() if memory is None else memory
    return _within(memory, False), _within(memory, True)


@contextmanager
def _within(memory: "deque[Tensor]", again: bool) -> Iterator[None]:
    previous = _now.memory, _now.again
    _now.memory, _now.again = memory, again
    try:
        yield
    finally:
        _now.memory, _now.again = previous
