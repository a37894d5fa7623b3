"""Coordination of all processes: run on rank 0, sum over ranks, agree to stop."""

import pickle
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from time import monotonic, sleep
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ms_parallel.cluster.watch import position
from ms_parallel.errors import ParallelError
from ms_parallel.interruption import StopSignal, started_by_torchrun

T = TypeVar("T")
WAIT_S, PAUSE_S = 5.0, 0.01
"""Maximum wait for the launcher's signal, and polling interval."""
LONG_TIMEOUT = timedelta(days=30)
"""Effectively no limit for rank 0's action; if rank 0 dies, the others stop waiting at once."""


def run_on_rank_zero(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 while the others wait; return its result, or raise its error, on all.

    Args:
        action: function whose result is broadcast.

    Raises:
        ParallelError: on the other ranks, with the message of rank 0's error.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return action()
    group = _long_timeout_group(dist.group.WORLD)
    position.patient = True
    try:
        return _run_and_broadcast(action, group)
    finally:
        position.patient = False


@lru_cache(maxsize=1)
def _long_timeout_group(world: dist.ProcessGroup) -> Any:
    """Create a second group of all processes with a long timeout."""
    # With the default backends: a gloo-only group lacks the accelerator that `world` is bound to.
    return dist.new_group(timeout=LONG_TIMEOUT)


def _run_and_broadcast(action: Callable[[], T], group: Any) -> T:
    outcome: list[Any] = [None, None]
    raised: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
            # Fails here and not in the broadcast, where the other ranks would wait for it.
            pickle.dumps(outcome[0])
        except Exception as error:  # broadcast, then raised again below
            raised, outcome = error, [None, str(error) or type(error).__name__]
    dist.broadcast_object_list(outcome, src=0, group=group)
    if raised is not None:
        raise raised
    if outcome[1] is not None:
        raise ParallelError(outcome[1])
    result: T = outcome[0]
    return result


def sums(*values: float) -> list[float]:
    """Sum each value over all processes, in float64."""
    total = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.tolist()


class StopRequest(StopSignal):
    """Request to stop the run: SIGTERM, or Ctrl-C once.

    Processes receive a signal at different times; `agreed` gives the same answer on every rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.signalled = False
        """Whether this process received a signal."""

    def agreed(self) -> bool:
        """Return whether any process was asked to stop. Collective, at the same step.

        Afterwards all know the signal: Ctrl-C has priority over SIGTERM, which may follow it.
        """
        stop_requests, interrupts = sums(
            bool(self.signal_name), self.signal_name == signal.SIGINT.name
        )
        if stop_requests:
            self.signal_name = (signal.SIGINT if interrupts else signal.SIGTERM).name
        return stop_requests > 0

    def wait_for_launcher(self) -> None:
        """Wait a few seconds for torchrun's signal, which other machines may receive earlier.

        Agents notice changes of the membership one after the other. If the ranks of an agent exit
        before that, the agent assumes that the run has finished, and leaves.
        """
        deadline = monotonic() + WAIT_S
        while started_by_torchrun() and not self.signalled and monotonic() < deadline:
            sleep(PAUSE_S)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signalled:
            super()._on_signal(number, frame)
        self.signalled = True
        self.signal_name = self.signal_name or signal.Signals(number).name
