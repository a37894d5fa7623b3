"""Distinguishes the ranks of the current start from earlier ones, in a store that outlives them.

torchrun keeps one store over restarts, so keys of dead ranks (addresses, positions, error messages)
must not be mistaken for current ones. torchrun's restart count does not help: each agent counts its
own restarts, and an agent that joins later starts at 0. So rank 0 draws a random name for the start
and sends it to every rank that asks; all keys of the start then have this prefix.

No rank of an earlier start is alive by then: agents end their ranks before the next rendezvous, and
ranks exit with their agent.
"""

import time
from datetime import timedelta
from typing import Any
from uuid import uuid4

KEY_PREFIX = "ms-parallel/starts"
PAUSE_S = 0.01


def agree_on_start(store: Any, rank: int, world: int, timeout_s: float) -> str:
    """Agree on the name of this start, the same on all of its ranks and different for every start.

    Args:
        store: store of the launcher.
        rank: rank of this process.
        world: number of ranks.
        timeout_s: seconds within which all ranks must connect.

    Raises:
        RuntimeError: a rank did not connect in time.
    """
    if rank > 0:
        question = uuid4().hex  # rank 0 may first see a question left by an earlier start
        store.set(f"{KEY_PREFIX}/asks-{rank}", question)
        store.wait([f"{KEY_PREFIX}/answer-{question}"], timedelta(seconds=timeout_s))
        name: str = store.get(f"{KEY_PREFIX}/answer-{question}").decode()
        store.set(f"{KEY_PREFIX}/{name}/has-{rank}", "1")
        return name
    name, deadline = uuid4().hex, time.monotonic() + timeout_s
    # Answer until every rank confirms: a stale question may be answered before the current one.
    answered, missing = dict.fromkeys(range(1, world), b""), set(range(1, world))
    while missing:
        for peer in sorted(missing):
            if store.check([f"{KEY_PREFIX}/asks-{peer}"]):
                question = store.get(f"{KEY_PREFIX}/asks-{peer}")
                if question != answered[peer]:
                    store.set(f"{KEY_PREFIX}/answer-{question.decode()}", name)
                    answered[peer] = question
            if store.check([f"{KEY_PREFIX}/{name}/has-{peer}"]):
                missing.discard(peer)
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"rank {min(missing)} did not connect")
        time.sleep(PAUSE_S if missing else 0)
    return name
