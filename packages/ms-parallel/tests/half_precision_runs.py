"""Runs in float16 with overflows that are planted in one process; `run_processes` calls them."""

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
"""Steps of which the gradient overflows in one process."""


def plant(
    engine: Engine, module: Callable[[Any], nn.Module], what: Callable[[Tensor], Tensor]
) -> None:
    """Change what a module of this process's first stage gives."""
    stage = next(iter(engine.stages.values()))
    module(stage).register_forward_hook(lambda _, __, output: what(output))


def overflowing(engine: Engine, steps: tuple[int, ...]) -> None:
    """Let the gradient of a block's output overflow in float16 at some steps, here alone."""

    def grown(output: Tensor) -> Tensor:
        if engine.step_count in steps and output.requires_grad:
            output.register_hook(lambda gradient: gradient * 1e30)
        return output

    plant(engine, lambda stage: next(iter(stage.model.layers.values())), grown)


def courses(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each step of each job came to, and the last weights, gathered.

    A job gives `layout`, model `settings`, the `rank` that overflows, and the `steps` to make.
    """
    torch.set_num_threads(1)
    found = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
        options = {"mixed_precision": "float16", "loss_scale": SCALE, **job.get("options", {})}
        engine = build(job["settings"], groups, **options)
        if dist.get_rank() == job["rank"]:
            overflowing(engine, PLANTED)
        course, losses, kept = [], [], []
        for step in range(job["steps"]):
            before = [local_part(each).clone() for each in engine.state_dict().values()]
            update = engine.step(local_rows(global_batch(step), groups), NextTokenLoss())
            after = [local_part(each) for each in engine.state_dict().values()]
            kept.append(_unchanged(engine, before, after))
            course.append([update.loss_scale, update.skipped, update.learning_rate])
            losses.append(update.loss)
        owners = {copy: owner for owner, copy in engine.plan.tied}
        weights = {
            owners.get(name, name): gather_full_tensor(parameter.detach()).double().norm().item()
            for name, parameter in engine.parameters.items()
        }
        found.append(
            {
                "course": course,
                "losses": losses,
                "kept": kept,
                "taken": engine.optimizer.update_count,
                "skipped": engine.scaler.skipped,
                "weights": weights,
            }
        )
    return found


def _unchanged(engine: Engine, before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether weights, moments and counts are as before; the step and the scale may differ."""
    names = list(engine.state_dict())
    moved = ("engine.step", "engine.loss_scale")
    pairs = zip(names, before, after, strict=True)
    return all(torch.equal(a, b) for name, a, b in pairs if name not in moved)


def audits(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the audit of the second update found, and the loss of the same update in float32.

    A job may give a `factor`, by which a matrix is wrong in process 0; `whole` in all tensor ranks
    of its data rank.
    """
    torch.set_num_threads(1)
    found = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
        precision = job.get("precision", "float16")
        engine = build(job["settings"], groups, mixed_precision=precision, audit_every=2)
        plain = build(job["settings"], groups)
        alone = dist.get_rank() == 0 or (job.get("whole") and groups.place.data == 0)
        if "factor" in job and alone:
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
        found.append(
            {
                "loss": loss,
                "loss_float32": audit.loss_float32,
                "difference": audit.loss_difference,
                "alarms": list(audit.alarms),
                "worst": audit.worst,
                "groups": {n: [g.error, g.gain, g.share] for n, g in audit.groups.items()},
            }
        )
    return found


def norms(jobs: list[dict[str, Any]]) -> list[list[float]]:
    """The gradients' norms of three updates of each job, in bfloat16."""
    torch.set_num_threads(1)
    found = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
        options = {"mixed_precision": True, "microbatch_size": job["microbatch_size"]}
        engine = build({}, groups, **options, **job["options"])
        batches = (local_rows(global_batch(step, rows=8), groups) for step in range(3))
        found.append([engine.step(each, NextTokenLoss()).grad_norm for each in batches])
    return found
