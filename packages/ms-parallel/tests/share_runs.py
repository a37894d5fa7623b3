"""Runs in which data ranks have different numbers of rows, and some are slow.

A rank is slowed down by a sleep per row, which does not depend on the load of the machine and does
not affect other ranks.
"""

import itertools
import os
import time
from pathlib import Path
from typing import Any

import torch
from launching import MODEL, run_of
from runs import OPTIMIZER, global_batch, tiny
from torch import Tensor, nn

from ms_parallel import DistributedTrainer, Engine, Layout, NextTokenLoss
from ms_parallel.cluster.connection import connect
from ms_parallel.models.staged import StagedModel
from ms_parallel.split.part import local_part


def plant(seconds_per_row: float) -> None:
    """Make every training forward of a stage in this process sleep for each of its rows."""

    def wait(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, StagedModel) and torch.is_grad_enabled():
            time.sleep(seconds_per_row * inputs[0].shape[0])

    nn.modules.module.register_module_forward_pre_hook(wait)


def rows_of(batch: dict[str, Tensor], shares: list[int], rank: int) -> dict[str, Tensor]:
    """Rows of a global batch that a data rank takes."""
    first = sum(shares[:rank])
    return {name: value[first : first + shares[rank]] for name, value in batch.items()}


def engines(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two engines per job that get the same batches with different shares: losses and differences.

    A job has `layout`, `shares` (two lists of the shares in each step) and `options`.
    """
    torch.set_num_threads(1)
    results = []
    for job in jobs:
        torch.set_default_dtype(getattr(torch, job.get("dtype", "float32")))
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
        options = {"optimizer": OPTIMIZER, "microbatch_size": 2, **job.get("options", {})}
        losses, weights = [], []
        for step_shares in job["shares"]:
            engine = Engine(tiny(num_key_value_heads=4), groups=groups, **options)
            updates = [
                engine.step(
                    rows_of(global_batch(step, sum(shares)), shares, groups.place.rank),
                    NextTokenLoss(),
                )
                for step, shares in enumerate(step_shares)
            ]
            losses.append([update.loss for update in updates])
            parts = [local_part(param).detach().flatten() for param in engine.parameters.values()]
            weights.append(torch.cat(parts))
        max_difference = (weights[0] - weights[1]).abs().max().item()
        results.append({"losses": losses, "max_difference": max_difference})
    return results


def train_with_shares(
    corpus: str, output: str, slow: dict[str, float], steps: int, **settings: Any
) -> dict[str, Any]:
    """Train with the trainer; `slow` maps ranks to seconds of sleep per row."""
    torch.set_num_threads(1)
    plant(slow.get(os.environ["RANK"], 0.0))
    recorded: list[tuple[str, dict[str, Any]]] = []
    times: list[float] = []

    def on_event(event: str, fields: Any) -> None:
        recorded.append((event, dict(fields)))
        times.append(time.monotonic())

    trainer = DistributedTrainer(
        **{k: v for k, v in run_of(Path(corpus)).items() if k not in ("steps", *settings)},
        model_config=MODEL,
        output_dir=Path(output),
        progress=False,
        on_event=on_event,
        **settings,
    )
    result = trainer.train(corpus, steps=steps)
    steps_at = [at for at, (event, _) in zip(times, recorded, strict=True) if event == "step"]
    return {
        "step seconds": [after - before for before, after in itertools.pairwise(steps_at)],
        "losses": [fields["loss"] for event, fields in recorded if event == "step"],
        "changes": [fields for event, fields in recorded if event == "shares"],
        "shares": list(result.shares),
        "slow": list(result.slow_ranks),
        "seconds": result.seconds,
    }
