"""Stages that sleep for their costs, so that a busy processor does not matter; for `run_processes`.

The runtime, the messages and the split of backwards are the real ones.
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
    """Sleeps where a weight backward sets its gradient, and forgets it."""

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
    """Sleeps forwards and backwards, and changes nothing."""

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
    """A stage of so many seconds forwards, backwards of inputs and backwards of weights."""

    def __init__(self, forward_s: float, input_s: float, weight_s: float) -> None:
        super().__init__()
        self.lengths_s = (forward_s, input_s)
        self.weight = Weight(torch.eye(8))
        self.weight.length_s = weight_s
        # A backward that is not split reaches the weight through autograd itself.
        self.weight.register_post_accumulate_grad_hook(lambda _: time.sleep(weight_s))

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        """Tokens (B, S), or what a stage before has made, to (B, S, 8)."""
        if x.dim() == 2:
            x = x[..., None].float().expand(*x.shape, 8).contiguous().requires_grad_()
        return F.linear(Sleep.apply(x, *self.lengths_s), self.weight)  # type: ignore[no-untyped-call]


def recorded(jobs: list[dict[str, Any]], tries: int) -> list[list[Any]]:
    """For each job, `table` and `costs_ms` (three a stage), some recordings of its times.

    More than one, as whoever disturbs a sleeper only ever makes it later.
    """
    torch.set_num_threads(1)
    found = []
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
        for turn in range(1 + tries):
            runtime.recorder = ComputationRecorder(groups.device) if turn else None
            runtime.run(schedule, batch, lambda _, hidden: hidden.sum())
            if runtime.recorder:
                runs.append(gather_times(runtime.recorder, groups))
        found.append(runs)
    return found
