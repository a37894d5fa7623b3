"""Decisions of a forward that its recomputation takes over instead of deciding again.

A router that chose anew in the backward could choose otherwise: its bias may have moved in between,
and two equal scores fall either way. What is decided under `keeping` is kept outside of what is
recomputed, in the order of the decisions.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import local

from torch import Tensor


class _Now(local):
    """What surrounds the code that runs; a thread's own, as autograd recomputes in its threads."""

    memory: "deque[Tensor] | None" = None
    again: bool = False


_now = _Now()


def decide(decision: Callable[[], Tensor]) -> Tensor:
    """Return what a decision gives; in a recomputation what it gave before, without deciding.

    Args:
        decision: called once for each forward, so that it may count.
    """
    if _now.memory is None:
        return decision()
    if _now.again:
        made = _now.memory.popleft()
        _now.memory.append(made)  # a graph may be walked again
        return made
    made = decision()
    _now.memory.append(made)
    return made


def recomputes() -> bool:
    """Return whether what runs is a recomputation, whose facts were noted before."""
    return _now.again


def keeping(
    memory: "deque[Tensor] | None" = None,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Make a context for a forward, which keeps its decisions, and one for its recomputation.

    Args:
        memory: takes the decisions; a new one by default.
    """
    memory = deque() if memory is None else memory
    return _within(memory, False), _within(memory, True)


@contextmanager
def _within(memory: "deque[Tensor]", again: bool) -> Iterator[None]:
    before = _now.memory, _now.again
    _now.memory, _now.again = memory, again
    try:
        yield
    finally:
        _now.memory, _now.again = before
