"""Runs in which data ranks take unequal shares of a batch, and some are slow; called in processes.

A rank is made slow by waiting a while for each row that passes: so it is as slow as planted
whatever else the machine does, and other ranks are not.
"""

import itertools
import os
import time
from pathlib import Path
from typing import Any

import torch
from launching import MODEL, RUN
from runs import OPTIMIZER, global_batch, tiny
from torch import Tensor, nn

from ms_parallel import DistributedTrainer, Engine, Layout, NextTokenLoss
from ms_parallel.cluster.connection import connect
from ms_parallel.models.staged import StagedModel
from ms_parallel.split.part import local_part


def plant(seconds_a_row: float) -> None:
    """Make every forward of a stage in this process wait for each of its rows."""

    def wait(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, StagedModel) and torch.is_grad_enabled():
            time.sleep(seconds_a_row * inputs[0].shape[0])

    nn.modules.module.register_module_forward_pre_hook(wait)


def rows_of(batch: dict[str, Tensor], shares: list[int], rank: int) -> dict[str, Tensor]:
    """The rows of a global batch that a data rank takes."""
    first = sum(shares[:rank])
    return {name: value[first : first + shares[rank]] for name, value in batch.items()}


def engines(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two engines a job, which take the same batches in other shares: how far they end apart.

    A job gives `layout`, `shares`, two lists of a step's shares each, and `options`.
    """
    torch.set_num_threads(1)
    found = []
    for job in jobs:
        torch.set_default_dtype(getattr(torch, job.get("dtype", "float32")))
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
        options = {"optimizer": OPTIMIZER, "microbatch_size": 2, **job.get("options", {})}
        losses, weights = [], []
        for course in job["shares"]:
            engine = Engine(tiny(num_key_value_heads=4), groups=groups, **options)
            updates = [
                engine.step(
                    rows_of(global_batch(step, sum(shares)), shares, groups.place.rank),
                    NextTokenLoss(),
                )
                for step, shares in enumerate(course)
            ]
            losses.append([update.loss for update in updates])
            parts = [local_part(each).detach().flatten() for each in engine.parameters.values()]
            weights.append(torch.cat(parts))
        apart = (weights[0] - weights[1]).abs().max().item()
        found.append({"losses": losses, "apart": apart})
    return found


def trained(
    corpus: str, output: str, slow: dict[str, float], steps: int, **settings: Any
) -> dict[str, Any]:
    """A run of the trainer in which a rank waits so many seconds for each of its rows."""
    torch.set_num_threads(1)
    plant(slow.get(os.environ["RANK"], 0.0))
    told: list[tuple[str, dict[str, Any]]] = []
    times: list[float] = []

    def listen(kind: str, fields: Any) -> None:
        told.append((kind, dict(fields)))
        times.append(time.monotonic())

    trainer = DistributedTrainer(
        **{name: RUN[name] for name in RUN if name not in ("steps", *settings)},
        model_config=MODEL,
        output_dir=Path(output),
        progress=False,
        on_event=listen,
        **settings,
    )
    result = trainer.train(corpus, steps=steps)
    steps_at = [at for at, (kind, _) in zip(times, told, strict=True) if kind == "step"]
    return {
        "step seconds": [after - before for before, after in itertools.pairwise(steps_at)],
        "losses": [fields["loss"] for kind, fields in told if kind == "step"],
        "changes": [fields for kind, fields in told if kind == "shares"],
        "shares": list(result.shares),
        "slow": list(result.slow_ranks),
        "seconds": result.seconds,
    }
