"""Runs with each sharding over the data axis, for `run_processes`."""

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
"""No clipping: the float32 sum of the norm depends on the shards."""


def engine_of(job: dict[str, Any], device: str | None = "cpu") -> Engine:
    """An engine of a tiny model; its processes may already be connected."""
    groups = connect(Layout.parse(job["layout"]), device=device, timeout_s=120)
    return build(job.get("settings", {}), groups, **{"optimizer": UNCLIPPED, **job["options"]})


def digest(state: dict[str, Tensor]) -> str:
    """Digest of the full tensors of this process's stages, by name."""
    sha256 = hashlib.sha256()
    for name in sorted(state):
        full = gather_full_tensor(state[name].detach()).cpu().contiguous()
        sha256.update(f"{name} {full.dtype} {tuple(full.shape)}".encode())
        sha256.update(full.flatten().view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def train_jobs(jobs: list[dict[str, Any]], device: str | None = "cpu") -> list[dict[str, Any]]:
    """Losses, norms, state digest and moments' devices after three updates of each job."""
    torch.set_num_threads(1)
    results = []
    for job in jobs:
        engine = engine_of(job, device)
        losses, norms = train(engine, 3)
        moments = [m for moment in engine.optimizer.moments.values() for m in moment.values()]
        results.append(
            {
                "losses": losses,
                "norms": norms,
                "state": digest(engine.state_dict()),
                "moments": sorted({moment.device.type for moment in moments}),
            }
        )
    return results


def resume_jobs(
    jobs: list[dict[str, Any]], folder: str, device: str | None = "cpu"
) -> list[list[str]]:
    """Digests of the state that a job saves and its `other` job loads, and the next losses."""
    torch.set_num_threads(1)
    results = []
    for index, job in enumerate(jobs):
        engine = engine_of(job, device)
        train(engine, 2)
        path = Path(folder, str(index))
        checkpoint.save(path, engine.state_dict(), step=2, facts={})
        other = engine_of({**job, **job["other"]}, device)
        state = other.state_dict()
        checkpoint.load(path, checkpoint.read_manifest(path), state)
        other.load_state_dict(state)
        digests = [digest(e.state_dict()) for e in (engine, other)]
        after = [round(train(e, 1)[0][0], 5) for e in (engine, other)]
        results.append([*digests, *map(str, after)])
    return results


def allocated_bytes(jobs: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Bytes of all tensors before an update and between two microbatches.

    The minimum of three updates, as a collective's thread may hold a sent tensor for a moment.
    """
    torch.set_num_threads(1)
    results = []
    for job in jobs:
        engine = engine_of(job)
        train(engine, 2)
        counts, between = {"before": _bytes()}, []
        perform, calls = engine.runner.runtime._perform, [0]

        def measured(*args: Any, perform: Any = perform, calls: Any = calls) -> None:
            perform(*args)
            calls[0] += 1
            if calls[0] == 2:  # one forward and one backward pass
                between.append(_bytes())  # noqa: B023 - called before the next job

        engine.runner.runtime._perform = measured  # type: ignore[method-assign]
        for step in range(3, 6):
            calls[0] = 0
            engine.step(local_rows(global_batch(step), engine.groups), NextTokenLoss())
        counts["between"] = min(between)
        del engine, perform, measured
        results.append(counts)
    return results


def _bytes() -> int:
    """Bytes of the storages of all living tensors, without duplicates."""
    gc.collect()
    tensors = [obj for obj in gc.get_objects() if type(obj) in (Tensor, torch.nn.Parameter)]
    # A gradient has a Python object only once it is accessed.
    tensors += [t.grad for t in tensors if t.is_leaf and type(t.grad) is Tensor]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())
