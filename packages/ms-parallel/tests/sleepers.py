"""Stages that sleep for their costs, which a busy processor does not affect; for `run_processes`.

The runtime, the messages and the split backward passes are the real ones.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.pipeline.recorder import ComputationRecorder, gather_times
from ms_parallel.pipeline.runtime import Runtime
from ms_parallel.schedules import Schedule


class Weight(nn.Parameter):
    """Sleeps when a weight backward sets its gradient, and discards the gradient."""

    length_s = 0.0

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """None is ever kept."""
        return None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            time.sleep(self.length_s)


class Sleep(torch.autograd.Function):
    """Sleeps in the forward and backward pass, and changes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        """Sleep for `forward_s`."""
        ctx.length_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """Sleep for `backward_s`."""
        time.sleep(ctx.length_s)
        return gradient, None, None


class Sleeper(nn.Module):
    """A stage that sleeps for given seconds in the forward, input and weight backward passes."""

    def __init__(self, forward_s: float, input_s: float, weight_s: float) -> None:
        super().__init__()
        self.lengths_s = (forward_s, input_s)
        self.weight = Weight(torch.eye(8))
        self.weight.length_s = weight_s
        # A full backward pass reaches the weight through autograd.
        self.weight.register_post_accumulate_grad_hook(lambda _: time.sleep(weight_s))

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        """Tokens (B, S), or the output of the previous stage, to (B, S, 8)."""
        if x.dim() == 2:
            x = x[..., None].float().expand(*x.shape, 8).contiguous().requires_grad_()
        return F.linear(Sleep.apply(x, *self.lengths_s), self.weight)  # type: ignore[no-untyped-call]


def record_times(jobs: list[dict[str, Any]], tries: int) -> list[list[Any]]:
    """Recorded times of each job, which has a `table` and `costs_ms` (three per stage).

    Several recordings, as disturbances only ever make a sleep longer.
    """
    torch.set_num_threads(1)
    results = []
    for job in jobs:
        schedule = Schedule.from_csv(job["table"])
        groups = connect(Layout(pipeline=schedule.ranks), device="cpu", timeout_s=60)
        stages = {
            stage: Sleeper(*(length / 1000 for length in job["costs_ms"][stage]))
            for stage in schedule.stages_of(groups.place.pipeline)
        }
        runtime = Runtime(stages, groups)
        batch = [{"tokens": torch.zeros(1, 4)}] * schedule.microbatches
        runs = []
        for run in range(1 + tries):
            runtime.recorder = ComputationRecorder(groups.device) if run else None
            runtime.run(schedule, batch, lambda _, hidden: hidden.sum())
            if runtime.recorder:
                runs.append(gather_times(runtime.recorder, groups))
        results.append(runs)
    return results
