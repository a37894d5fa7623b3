"""Runs of `test_half_precision.py`: float16 with planted overflows, and audits."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from runs import build, global_batch, local_rows
from torch import Tensor, nn

from ms_parallel import NextTokenLoss
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.split.part import gather_full_tensor, local_part

SCALE = {"initial": 4096.0, "growth_interval": 3}
PLANTED = (2, 3, 7)
"""Steps whose gradient overflows in one process."""


def plant(
    engine: Engine, module: Callable[[Any], nn.Module], change: Callable[[Tensor], Tensor]
) -> None:
    """Change the output of a module of this process's first stage."""
    stage = next(iter(engine.stages.values()))
    module(stage).register_forward_hook(lambda _, __, output: change(output))


def overflowing(engine: Engine, steps: tuple[int, ...]) -> None:
    """Make the gradient of a block's output overflow in float16 at some steps, in this process."""

    def amplified(output: Tensor) -> Tensor:
        if engine.step_count in steps and output.requires_grad:
            output.register_hook(lambda gradient: gradient * 1e30)
        return output

    plant(engine, lambda stage: next(iter(stage.model.layers.values())), amplified)


def courses(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Scale, skips, rates, losses and final weights of each job.

    A job has `layout`, model `settings`, the `rank` that overflows, and the number of `steps`.
    """
    torch.set_num_threads(1)
    results = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
        options = {"mixed_precision": "float16", "loss_scale": SCALE, **job.get("options", {})}
        engine = build(job["settings"], groups, **options)
        if dist.get_rank() == job["rank"]:
            overflowing(engine, PLANTED)
        course, losses, unchanged = [], [], []
        for step in range(job["steps"]):
            before = [local_part(tensor).clone() for tensor in engine.state_dict().values()]
            update = engine.step(local_rows(global_batch(step), groups), NextTokenLoss())
            after = [local_part(tensor) for tensor in engine.state_dict().values()]
            unchanged.append(_unchanged(engine, before, after))
            course.append([update.loss_scale, update.skipped, update.learning_rate])
            losses.append(update.loss)
        owners = {copy: owner for owner, copy in engine.plan.tied}
        weights = {
            owners.get(name, name): gather_full_tensor(parameter.detach()).double().norm().item()
            for name, parameter in engine.parameters.items()
        }
        results.append(
            {
                "course": course,
                "losses": losses,
                "unchanged": unchanged,
                "updates": engine.optimizer.update_count,
                "skipped": engine.scaler.skipped,
                "weights": weights,
            }
        )
    return results


def _unchanged(engine: Engine, before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether the state is unchanged, except for the step counter and the loss scale."""
    names = list(engine.state_dict())
    ignored = ("engine.step", "engine.loss_scale")
    pairs = zip(names, before, after, strict=True)
    return all(torch.equal(a, b) for name, a, b in pairs if name not in ignored)


def audits(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Audit of the second update of each job, and the loss of the same update in float32.

    A job may have a `factor` that a matrix is wrong by in process 0; with `whole`, in all tensor
    ranks of its data rank.
    """
    torch.set_num_threads(1)
    results = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
        precision = job.get("precision", "float16")
        engine = build(job["settings"], groups, mixed_precision=precision, audit_every=2)
        plain = build(job["settings"], groups)
        is_faulty = dist.get_rank() == 0 or (job.get("whole") and groups.place.data == 0)
        if "factor" in job and is_faulty:
            factor = job["factor"]
            plant(
                engine,
                lambda stage: next(iter(stage.model.layers.values())).mlp.down_proj,
                lambda output, factor=factor: output * factor,
            )
        first = engine.step(local_rows(global_batch(0), groups), NextTokenLoss())
        assert first.audit is None
        for name, parameter in plain.parameters.items():
            with torch.no_grad():
                local_part(parameter).copy_(local_part(engine.parameters[name]))
        audit = engine.step(local_rows(global_batch(1), groups), NextTokenLoss()).audit
        loss = plain.step(local_rows(global_batch(1), groups), NextTokenLoss()).loss
        assert audit is not None
        results.append(
            {
                "loss": loss,
                "loss_float32": audit.loss_float32,
                "difference": audit.loss_difference,
                "alarms": list(audit.alarms),
                "worst": audit.worst,
                "groups": {n: [g.error, g.gain, g.share] for n, g in audit.groups.items()},
            }
        )
    return results


def norms(jobs: list[dict[str, Any]]) -> list[list[float]]:
    """Gradient norms of three updates of each job, in bfloat16."""
    torch.set_num_threads(1)
    results = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
        options = {"mixed_precision": True, "microbatch_size": job["microbatch_size"]}
        engine = build({}, groups, **options, **job["options"])
        batches = (local_rows(global_batch(step, rows=8), groups) for step in range(3))
        results.append([engine.step(batch, NextTokenLoss()).grad_norm for batch in batches])
    return results
