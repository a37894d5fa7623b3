"""Runs that are to come to the same bits under other layouts; `run_processes` calls them."""

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
"""Rows of a batch: 1, 2, 3 and 4 divide it, and it is no power of two."""


def _digests(state: dict[str, Tensor]) -> dict[str, str]:
    """Digest of each whole tensor of this process's stages, by name."""
    found = {}
    for name in sorted(state):
        whole = gather_full_tensor(state[name].detach()).cpu().contiguous()
        data = whole.flatten().view(torch.uint8).numpy().tobytes()
        found[name] = f"{whole.dtype} {tuple(whole.shape)} {hashlib.sha256(data).hexdigest()}"
    return found


def _train(engine: Engine, first: int, last: int) -> list[list[str]]:
    """Each update's loss and norm, to the bit."""
    told = []
    for step in range(first, last):
        batch = local_rows(global_batch(step, ROWS), engine.groups)
        update = engine.step(batch, NextTokenLoss(z_loss_coefficient=1e-3))
        told.append([each.hex() for each in (update.loss, update.grad_norm, *update.mtp_losses)])
    return told


def _engine(job: dict[str, Any], device: str | None) -> Engine:
    groups = connect(Layout.parse(job["layout"]), device=device, timeout_s=120)
    options = {"reproducible": True, "microbatch_size": None, **job.get("options", {})}
    return build(job.get("settings", {}), groups, **options)


def repeated(jobs: list[dict[str, Any]], device: str | None = "cpu") -> list[dict[str, Any]]:
    """What the updates of each job told, and digests of what this process then holds."""
    torch.set_num_threads(1)
    found = []
    for job in jobs:
        engine = _engine(job, device)
        told = _train(engine, 0, job.get("steps", 3))
        found.append({"told": told, "state": _digests(engine.state_dict())})
    return found


def resumed(
    jobs: list[dict[str, Any]], folder: str, first: int, last: int, device: str | None = "cpu"
) -> list[dict[str, Any]]:
    """Each job goes on from the checkpoint of update `first`, to `last`, and saves that.

    Jobs go on one from the other's checkpoint where they have the same `chain`.
    """
    torch.set_num_threads(1)
    found = []
    for job in jobs:
        engine = _engine(job, device)
        if first:
            path = Path(folder, f"{job['chain']}-{first}")
            state = engine.state_dict()
            checkpoint.load(path, checkpoint.read_manifest(path), state)
            engine.load_state_dict(state)
        told = _train(engine, first, last)
        state = engine.state_dict()
        path = Path(folder, f"{job['chain']}-{last}")
        checkpoint.save(path, state, step=last, facts={})
        found.append({"told": told, "state": _digests(state)})
    return found
