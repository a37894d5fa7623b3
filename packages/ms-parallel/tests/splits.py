"""Gradients under every schedule; called by `run_processes`."""

from typing import Any

import torch
from runs import build, global_batch, my_rows
from torch import Tensor
from torch.distributed.tensor import DTensor

from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.engine.optimizer import AdamWConfig
from ms_parallel.schedules import Schedule

PLAIN = AdamWConfig(learning_rate=1e-3, max_grad_norm=None)


def whole_gradients(engine: Engine, rows: int) -> dict[str, list[float]]:
    """The gradient of one update on `rows` rows, of each weight that this rank's stages have."""
    found: dict[str, Tensor] = {}

    def keep(gradients: dict[str, Tensor], norm: float, rate: float) -> None:
        for name, gradient in gradients.items():
            parameter = engine.parameters[name]
            whole = gradient
            if isinstance(parameter, DTensor):
                whole = DTensor.from_local(
                    gradient,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                ).full_tensor()
            found[name] = whole.clone()

    engine._apply = keep  # type: ignore[method-assign,assignment]
    engine.update(my_rows(global_batch(0, rows=rows), engine.groups), NextTokenLoss())
    return {name: gradient.flatten().tolist() for name, gradient in found.items()}


def gradients(jobs: list[dict[str, Any]], digits: str) -> list[dict[str, list[float]]]:
    """Of each job: `layout`, `settings` of the model, `rows`, `options` of the engine, `table`."""
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, digits))
    found = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=60)
        options = {"microbatch_size": 1, "optimizer": PLAIN, **job.get("options", {})}
        if "table" in job:
            options["schedule"] = Schedule.from_csv(job["table"])
        found.append(whole_gradients(build(job["settings"], groups, **options), job["rows"]))
    return found
