"""Pipelines with a slow rank, for `run_processes`.

A rank is slowed down by a sleep per block and row, as in `share_runs`.
"""

import os
import time
from statistics import median
from typing import Any

import torch
from runs import global_batch, tiny
from torch import nn

from ms_parallel import Engine, Layout, NextTokenLoss
from ms_parallel.cluster.connection import connect
from ms_parallel.models.parts.block import Block
from ms_parallel.planner.tuning import search_schedule

ROWS, LAYERS = 6, 8


def plant(seconds: float) -> None:
    """Make each block of this process sleep for `seconds` per row in the forward pass."""

    def wait(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, Block):
            time.sleep(seconds * inputs[0].shape[0])

    nn.modules.module.register_module_forward_pre_hook(wait)


def compare_stages(slow: dict[str, float], steps: int) -> dict[str, Any]:
    """Step time and losses with equal layers and with searched ones."""
    torch.set_num_threads(1)
    plant(slow[os.environ["RANK"]])
    groups = connect(Layout(pipeline=len(slow)), device="cpu", timeout_s=120)
    config = tiny(num_hidden_layers=LAYERS)
    searched = search_schedule(config, groups, rows=ROWS, sequence_length=16, microbatch_size=1)
    results: dict[str, Any] = {
        "slowness": searched.costs["rank_slowness"],
        "layers": searched.layers,
    }
    results["ranks"] = searched.staged.schedule.placement
    for name, schedule in (("equal", "1f1b"), ("searched", searched.staged)):
        engine = Engine(config, groups=groups, schedule=schedule, microbatch_size=1)
        losses, seconds = [], []
        for step in range(steps):
            start = time.monotonic()
            losses.append(engine.step(global_batch(step, ROWS), NextTokenLoss()).loss)
            seconds.append(time.monotonic() - start)
        results[name] = {"losses": losses, "seconds": median(seconds[1:])}
    return results
