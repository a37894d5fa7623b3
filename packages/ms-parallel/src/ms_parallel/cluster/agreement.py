"""Lets all processes act as one: one acts for all, or all agree on a number."""

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
PATIENCE = timedelta(days=30)
"""The first process may take as long as it needs; if it dies, waiting ends at once."""


def run_on_rank_zero(action: Callable[[], T]) -> T:
    """Act on rank 0 while the others wait as long as it takes; give all its result or its error.

    Args:
        action: its result is sent to the other ranks.

    Raises:
        ParallelError: on the other ranks, with the text of what rank 0 raised.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return action()
    group = _patient_group(dist.group.WORLD)
    position.patient = True
    try:
        return _act_and_send(action, group)
    finally:
        position.patient = False


@lru_cache(maxsize=1)
def _patient_group(world: dist.ProcessGroup) -> Any:
    """Make a second group of all processes, for the sake of its long timeout."""
    # Of the same backends: one of gloo alone lacks the accelerator that `world` may be bound to.
    return dist.new_group(timeout=PATIENCE)


def _act_and_send(action: Callable[[], T], group: Any) -> T:
    outcome: list[Any] = [None, None]
    raised: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
            pickle.dumps(outcome[0])
        except Exception as error:  # sent to the others, then raised again here
            raised, outcome = error, [None, str(error) or type(error).__name__]
    dist.broadcast_object_list(outcome, src=0, group=group)
    if raised is not None:
        raise raised
    if outcome[1] is not None:
        raise ParallelError(outcome[1])
    result: T = outcome[0]
    return result


def sums(*values: float) -> list[float]:
    """Add up each value over all processes, in float64."""
    total = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.tolist()


class StopRequest(StopSignal):
    """Whether somebody has asked the run to stop: SIGTERM, or Ctrl-C once.

    The processes get a signal at different moments; `agreed` is the same on all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.signalled = False
        """Whether this very process was asked."""

    def agreed(self) -> bool:
        """Return whether any process was asked; all of them must call this at the same step.

        All know by which signal afterwards: Ctrl-C counts before SIGTERM, which may follow it.
        """
        asked, by_hand = sums(bool(self.signal_name), self.signal_name == signal.SIGINT.name)
        if asked:
            self.signal_name = (signal.SIGINT if by_hand else signal.SIGTERM).name
        return asked > 0

    def wait_for_launcher(self) -> None:
        """Wait some seconds to be asked too, where torchrun has asked ranks of other machines.

        Its agents notice one by one that machines come or go. One whose ranks end of themselves
        before takes the run to be done, and leaves.
        """
        until = monotonic() + WAIT_S
        while started_by_torchrun() and not self.signalled and monotonic() < until:
            sleep(PAUSE_S)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.signalled:
            super()._take(number, frame)
        self.signalled = True
        self.signal_name = self.signal_name or signal.Signals(number).name
