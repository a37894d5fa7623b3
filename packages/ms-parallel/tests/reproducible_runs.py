"""Runs that must give the same bits under other layouts, for `run_processes`."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from runs import build, global_batch, local_rows
from torch import Tensor

from ms_parallel import checkpoint
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.split.part import gather_full_tensor

ROWS = 12
"""Rows of a batch: divisible by 1, 2, 3 and 4, and not a power of two."""


def _digests(state: dict[str, Tensor]) -> dict[str, str]:
    """Digest of each full tensor of this process's stages, by name."""
    digests = {}
    for name in sorted(state):
        full = gather_full_tensor(state[name].detach()).cpu().contiguous()
        data = full.flatten().view(torch.uint8).numpy().tobytes()
        digests[name] = f"{full.dtype} {tuple(full.shape)} {hashlib.sha256(data).hexdigest()}"
    return digests


def _train(engine: Engine, first: int, last: int) -> list[list[str]]:
    """Loss and norm of each update, as hexadecimal floats."""
    updates = []
    for step in range(first, last):
        batch = local_rows(global_batch(step, ROWS), engine.groups)
        update = engine.step(batch, NextTokenLoss(z_loss_coefficient=1e-3))
        updates.append([x.hex() for x in (update.loss, update.grad_norm, *update.mtp_losses)])
    return updates


def _engine(job: dict[str, Any], device: str | None) -> Engine:
    groups = connect(Layout.parse(job["layout"]), device=device, timeout_s=120)
    options = {"reproducible": True, "microbatch_size": None, **job.get("options", {})}
    return build(job.get("settings", {}), groups, **options)


def train_jobs(jobs: list[dict[str, Any]], device: str | None = "cpu") -> list[dict[str, Any]]:
    """Updates of each job, and digests of this process's final state."""
    torch.set_num_threads(1)
    results = []
    for job in jobs:
        engine = _engine(job, device)
        updates = _train(engine, 0, job.get("steps", 3))
        results.append({"updates": updates, "state": _digests(engine.state_dict())})
    return results


def resume_jobs(
    jobs: list[dict[str, Any]], folder: str, first: int, last: int, device: str | None = "cpu"
) -> list[dict[str, Any]]:
    """Resume each job from the checkpoint of step `first`, train up to `last`, and save.

    Jobs with the same `chain` continue from each other's checkpoints.
    """
    torch.set_num_threads(1)
    results = []
    for job in jobs:
        engine = _engine(job, device)
        if first:
            path = Path(folder, f"{job['chain']}-{first}")
            state = engine.state_dict()
            checkpoint.load(path, checkpoint.read_manifest(path), state)
            engine.load_state_dict(state)
        updates = _train(engine, first, last)
        state = engine.state_dict()
        path = Path(folder, f"{job['chain']}-{last}")
        checkpoint.save(path, state, step=last, facts={})
        results.append({"updates": updates, "state": _digests(state)})
    return results
