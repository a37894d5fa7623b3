"""Tells the processes of one start from those of earlier ones, in a store that outlives them all.

torchrun keeps one store over its restarts. What the dead have left there must not be read as news:
their addresses, their places, their last words. Its count of restarts does not tell them apart, as
each agent counts for itself, and one that joins later begins at 0. So rank 0 draws a name for the
start, and gives it to whoever asks; all keys of the start then begin with it.

Nobody of an earlier start is left by then: agents end their ranks before they meet again, and ranks
end with their agent.
"""

import time
from datetime import timedelta
from typing import Any
from uuid import uuid4

ROOM = "ms-parallel/starts"
PAUSE_S = 0.01


def agree_on_start(store: Any, rank: int, world: int, timeout_s: float) -> str:
    """Agree on the name of this start, the same on all of its ranks and on those of no other.

    Args:
        store: of the launcher.
        rank: of this process.
        world: number of ranks.
        timeout_s: seconds within which all must have come.

    Raises:
        RuntimeError: they have not.
    """
    if rank > 0:
        question = uuid4().hex  # rank 0 may find that of an earlier rank of this number first
        store.set(f"{ROOM}/asks-{rank}", question)
        store.wait([f"{ROOM}/answer-{question}"], timedelta(seconds=timeout_s))
        name: str = store.get(f"{ROOM}/answer-{question}").decode()
        store.set(f"{ROOM}/{name}/has-{rank}", "1")
        return name
    name, deadline = uuid4().hex, time.monotonic() + timeout_s
    asked, missing = dict.fromkeys(range(1, world), b""), set(range(1, world))
    while missing:
        for other in sorted(missing):
            if store.check([f"{ROOM}/asks-{other}"]):
                question = store.get(f"{ROOM}/asks-{other}")
                if question != asked[other]:
                    store.set(f"{ROOM}/answer-{question.decode()}", name)
                    asked[other] = question
            if store.check([f"{ROOM}/{name}/has-{other}"]):
                missing.discard(other)
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"rank {min(missing)} did not come")
        time.sleep(PAUSE_S if missing else 0)
    return name
