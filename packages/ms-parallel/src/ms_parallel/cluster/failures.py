"""A stage that raises during a step: every rank stops and names that stage.

The failing rank leaves a message in the store and raises. When its process exits, its connections
close; waiting ranks then raise as well, and find the message.
"""

import re
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.watch import position
from ms_parallel.errors import StageError
from ms_parallel.schedules.table.action import Action

LOST = re.compile(
    r"connection (closed|reset|was closed)|broken pipe|recv.* failed|connection refused"
    r"|timed out waiting|remote error|store.*(closed|failed)|socket",
    re.IGNORECASE,
)
"""Torch's messages for a lost connection to another process."""

ORIGINAL = re.compile(r", microbatch \S+: (\w+): ")
"""Class of the original error in the failing rank's message."""


def explain(error: Exception, action: Action, groups: Groups) -> Exception:
    """Name the stage that failed first; publish the failure if it was this rank's.

    No further step is possible, as other ranks are in the middle of this one.

    Args:
        error: error raised here, by this rank's stage or because another rank has gone.
        action: action that this rank was running.
        groups: process groups of the layout.

    Returns:
        The error to raise: a `StageError` that names the first failed stage and keeps the class of
        an error of this package, the same on all ranks; or `error` itself without a pipeline, or
        if a process has gone without a message.
    """
    if groups.layout.pipeline == 1 or isinstance(error, StageError):
        return error
    first = _first_failure()
    # Another process died without a message; the heartbeat explains which.
    if first is None and isinstance(error, RuntimeError) and LOST.search(str(error)):
        return error
    if first is None:
        first = (
            f"stage {action.stage} on rank {dist.get_rank()} failed at {action}, microbatch "
            f"{action.microbatch}: {type(error).__name__}: {' '.join(str(error).split())}"
        )
        _publish(first)
    name = ORIGINAL.search(first)
    return StageError.of(name[1] if name else "", first)


def _key() -> str:
    # torchrun keeps one store over restarts, so the key includes the start.
    return f"ms-parallel/stage-failed-{position.start}"


def _first_failure() -> str | None:
    """Return the message of the stage that failed first; None if no stage has failed."""
    store = _get_default_store()
    try:
        return store.get(_key()).decode() if store.check([_key()]) else None
    except (dist.DistError, RuntimeError):  # the store ended with its process
        return None


def _publish(text: str) -> None:
    store = _get_default_store()
    try:
        store.set_timeout(timedelta(seconds=5))
        store.set(_key(), text)
    except (dist.DistError, RuntimeError):
        return
