"""Models shared out over the data axis in each way; functions that `run_processes` calls."""

import gc
import hashlib
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from runs import OPTIMIZER, build, global_batch, local_rows, train
from torch import Tensor

from ms_parallel import checkpoint
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.split.part import gather_full_tensor

UNCLIPPED = evolve(OPTIMIZER, max_grad_norm=None)
"""Without the norm, whose float32 sum has another order where shards are others."""


def engine_of(job: dict[str, Any], device: str | None = "cpu") -> Engine:
    """An engine of a tiny model, whose processes may have met before."""
    groups = connect(Layout.parse(job["layout"]), device=device, timeout_s=120)
    return build(job.get("settings", {}), groups, **{"optimizer": UNCLIPPED, **job["options"]})


def digest(state: dict[str, Tensor]) -> str:
    """Digest of each whole tensor of this process's stages, by name."""
    found = hashlib.sha256()
    for name in sorted(state):
        whole = gather_full_tensor(state[name].detach()).cpu().contiguous()
        found.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
        found.update(whole.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def trained(jobs: list[dict[str, Any]], device: str | None = "cpu") -> list[dict[str, Any]]:
    """Weights and moments after three updates of each job, and what the updates told."""
    torch.set_num_threads(1)
    found = []
    for job in jobs:
        engine = engine_of(job, device)
        losses, norms = train(engine, 3)
        moments = [m for each in engine.optimizer.moments.values() for m in each.values()]
        found.append(
            {
                "losses": losses,
                "norms": norms,
                "state": digest(engine.state_dict()),
                "moments": sorted({moment.device.type for moment in moments}),
            }
        )
    return found


def resumed(jobs: list[dict[str, Any]], folder: str, device: str | None = "cpu") -> list[list[str]]:
    """Digests of what each job saves, and of what its `other` way of sharing out reads of it."""
    torch.set_num_threads(1)
    found = []
    for number, job in enumerate(jobs):
        engine = engine_of(job, device)
        train(engine, 2)
        path = Path(folder, str(number))
        checkpoint.save(path, engine.state_dict(), step=2, facts={})
        other = engine_of({**job, **job["other"]}, device)
        state = other.state_dict()
        checkpoint.load(path, checkpoint.read_manifest(path), state)
        other.load_state_dict(state)
        loads = [digest(each.state_dict()) for each in (engine, other)]
        after = [round(train(each, 1)[0][0], 5) for each in (engine, other)]
        found.append([*loads, *map(str, after)])
    return found


def allocated_bytes(jobs: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Bytes of all tensors between two microbatches, and before any.

    The least of three updates: a collective's thread may hold what it sent a moment longer.
    """
    torch.set_num_threads(1)
    found = []
    for job in jobs:
        engine = engine_of(job)
        train(engine, 2)
        counts, between = {"before": _bytes()}, []
        perform, calls = engine.runner.runtime._perform, [0]

        def watched(*given: Any, perform: Any = perform, calls: Any = calls) -> None:
            perform(*given)
            calls[0] += 1
            if calls[0] == 2:  # a forward and a backward
                between.append(_bytes())  # noqa: B023 - called before the next job

        engine.runner.runtime._perform = watched  # type: ignore[method-assign]
        for step in range(3, 6):
            calls[0] = 0
            engine.step(local_rows(global_batch(step), engine.groups), NextTokenLoss())
        counts["between"] = min(between)
        del engine, perform, watched
        found.append(counts)
    return found


def _bytes() -> int:
    """Bytes of the memory that all living tensors have, each counted once."""
    gc.collect()
    known = [each for each in gc.get_objects() if type(each) in (Tensor, torch.nn.Parameter)]
    # Python knows of a gradient once it is asked for.
    known += [each.grad for each in known if each.is_leaf and type(each.grad) is Tensor]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in known}
    return sum(storage.nbytes() for storage in storages.values())
