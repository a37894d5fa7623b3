"""Recorded decisions of a forward pass, replayed when activation checkpointing recomputes it.

A router that ran again could select other experts: its bias may have changed since, and ties may
resolve either way. Within `record_and_replay` decisions are recorded and replayed in order.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import local

from torch import Tensor


class _ReplayState(local):
    """Thread-local state, since autograd recomputes in its own threads."""

    decisions: "deque[Tensor] | None" = None
    replaying: bool = False


_state = _ReplayState()


def replayed(decision: Callable[[], Tensor]) -> Tensor:
    """Return the result of `decision`; during recomputation, the recorded one.

    Args:
        decision: called once per forward pass, so it may update counters.
    """
    if _state.decisions is None:
        return decision()
    if _state.replaying:
        result = _state.decisions.popleft()
        _state.decisions.append(result)  # the graph may be recomputed again
        return result
    result = decision()
    _state.decisions.append(result)
    return result


def is_recomputing() -> bool:
    """Whether this is a recomputation, so that statistics are already recorded."""
    return _state.replaying


def record_and_replay(
    decisions: "deque[Tensor] | None" = None,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return context managers for a forward pass and its recomputation.

    Args:
        decisions: queue of recorded results; a new one by default.
    """
    decisions = deque() if decisions is None else decisions
    return _recording(decisions, False), _recording(decisions, True)


@contextmanager
def _recording(decisions: "deque[Tensor]", replaying: bool) -> Iterator[None]:
    # Nested forward passes restore the outer state.
    previous = _state.decisions, _state.replaying
    _state.decisions, _state.replaying = decisions, replaying
    try:
        yield
    finally:
        _state.decisions, _state.replaying = previous
