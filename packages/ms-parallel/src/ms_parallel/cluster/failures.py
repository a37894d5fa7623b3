"""A stage that raises in mid-step: every rank stops, and says which stage it was.

The failing rank leaves a message in the store and raises. When its process ends, its connections
close; who waited for it raises in turn, and finds the message.
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
"""What torch says when another process is gone."""

ORIGINAL = re.compile(r", microbatch \S+: (\w+): ")
"""The class of the original error in the message that the failing rank leaves."""


def explain(error: Exception, action: Action, groups: Groups) -> Exception:
    """Say which stage failed first, and leave it for the other ranks if it was this one's.

    No step can be made afterwards: the others stand in the midst of one.

    Args:
        error: what was raised here, by this rank's own stage or for want of another rank.
        action: what this rank was doing.
        groups: the layout's processes.

    Returns:
        What to raise: a `StageError` that names the stage which failed first and keeps the class of
        an error of this package, the same on all ranks; or `error` itself where there are no
        stages, or a process was lost and left no message.
    """
    if groups.layout.pipeline == 1 or isinstance(error, StageError):
        return error
    first = _first_failure()
    if first is None and isinstance(error, RuntimeError) and LOST.search(str(error)):
        return error
    if first is None:
        first = (
            f"stage {action.stage} on rank {dist.get_rank()} failed at {action}, microbatch "
            f"{action.microbatch}: {type(error).__name__}: {' '.join(str(error).split())}"
        )
        _leave(first)
    name = ORIGINAL.search(first)
    return StageError.of(name[1] if name else "", first)


def _key() -> str:
    # torchrun keeps one store over its restarts; a start must not read the last one's word.
    return f"ms-parallel/stage-failed-{position.start}"


def _first_failure() -> str | None:
    """Return what the stage that failed first has left for the others; None if none has."""
    store = _get_default_store()
    try:
        return store.get(_key()).decode() if store.check([_key()]) else None
    except (dist.DistError, RuntimeError):  # the store went with the process that kept it
        return None


def _leave(text: str) -> None:
    store = _get_default_store()
    try:
        store.set_timeout(timedelta(seconds=5))
        store.set(_key(), text)
    except (dist.DistError, RuntimeError):
        return
