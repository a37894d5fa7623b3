"""Pipelines of which one rank is slow; `run_processes` calls them.

A rank is made slow by waiting in each block for each row, as in `share_runs`.
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
    """Make each block of this process take so much longer forwards, for each of its rows."""

    def wait(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, Block):
            time.sleep(seconds * inputs[0].shape[0])

    nn.modules.module.register_module_forward_pre_hook(wait)


def compared(slow: dict[str, float], steps: int) -> dict[str, Any]:
    """Seconds of a step, and losses, with layers shared out equally and as a search finds."""
    torch.set_num_threads(1)
    plant(slow[os.environ["RANK"]])
    groups = connect(Layout(pipeline=len(slow)), device="cpu", timeout_s=120)
    config = tiny(num_hidden_layers=LAYERS)
    found = search_schedule(config, groups, rows=ROWS, sequence_length=16, microbatch_size=1)
    told: dict[str, Any] = {"slowness": found.costs["rank_slowness"], "layers": found.layers}
    told["ranks"] = found.staged.schedule.placement
    for name, schedule in (("equal", "1f1b"), ("found", found.staged)):
        engine = Engine(config, groups=groups, schedule=schedule, microbatch_size=1)
        losses, seconds = [], []
        for step in range(steps):
            began = time.monotonic()
            losses.append(engine.step(global_batch(step, ROWS), NextTokenLoss()).loss)
            seconds.append(time.monotonic() - began)
        told[name] = {"losses": losses, "seconds": median(seconds[1:])}
    return told
