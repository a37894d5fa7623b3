"""Gradients under every schedule, for `run_processes`."""

from typing import Any

import torch
from runs import build, global_batch, local_rows
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.optim.optimizers.adamw import AdamWConfig
from ms_parallel.schedules import Schedule

PLAIN = AdamWConfig(learning_rate=1e-3, max_grad_norm=None)


def random_experts(engine: Engine, tokens: Tensor) -> Tensor:
    """Distinct random experts of each token and layer, (B, S, L, k)."""
    mixture = engine.config.mixture
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(
        *tokens.shape, len(mixture.layers), mixture.choice.num_experts, generator=generator
    )
    return scores.topk(mixture.choice.num_experts_per_tok, -1).indices


def full_gradients(engine: Engine, rows: int, replay: bool = False) -> dict[str, list[float]]:
    """Gathered gradients of one update on `rows` rows, of the parameters of this rank's stages.

    With `replay`, tokens are routed to random experts.
    """
    grads: dict[str, Tensor] = {}

    def record(gradients: dict[str, Tensor] | None, norm: float, rate: float) -> None:
        assert gradients is not None
        for name, gradient in gradients.items():
            parameter = engine.parameters[name]
            full = gradient
            if isinstance(parameter, DTensor):
                full = DTensor.from_local(
                    gradient,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                ).full_tensor()
            grads[name] = full.clone()

    engine.trained.apply = record  # type: ignore[method-assign,assignment]
    batch = global_batch(0, rows=rows)
    if replay:
        batch["routed_experts"] = random_experts(engine, batch["tokens"])
    engine.step(local_rows(batch, engine.groups), NextTokenLoss())
    assert grads.keys() == engine.parameters.keys()  # otherwise nothing would be compared
    return {name: gradient.flatten().tolist() for name, gradient in grads.items()}


def gradients(jobs: list[dict[str, Any]], digits: str) -> list[dict[str, list[float]]]:
    """Gradients of each job: `layout`, model `settings`, `rows`, `options`, `table`, `replay`."""
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, digits))
    results = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=60)
        options = {"microbatch_size": 1, "optimizer": PLAIN, **job.get("options", {})}
        if "table" in job:
            options["schedule"] = Schedule.from_csv(job["table"])
        engine = build(job["settings"], groups, **options)
        results.append(full_gradients(engine, job["rows"], job.get("replay", False)))
    return results


class Operators(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the name and run the operator."""
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def collectives(settings: dict[str, Any], table: str, rows: int) -> dict[str, Any]:
    """Gradients under a table, and the effects of each of its actions in a second update.

    Returns:
        `gradients`, and `seen`: for each action, by index and text, whether it gathers, sums,
        leaves the stage sharded or leaves its message pending.
    """
    torch.set_num_threads(1)
    groups = connect(Layout.parse("data=2,pipeline=2"), device="cpu", timeout_s=60)
    engine = build(
        settings, groups, microbatch_size=1, optimizer=PLAIN, schedule=Schedule.from_csv(table)
    )
    gradients = full_gradients(engine, rows)
    runtime, seen = engine.runner.runtime, {}
    perform = runtime._perform

    def watched(action: Any, step: Any, schedule: Schedule) -> None:
        with Operators() as operators:
            perform(action, step, schedule)
        stage = engine.stages[action.stage]
        facts = {
            "gathers": any("allgather" in name for name in operators.names),
            "sums": any("reduce_scatter" in name for name in operators.names),
            "sharded": all(isinstance(weight, DTensor) for weight in stage.parameters()),
            "pending": any(sent[0] == action.microbatch for sent, *_ in _sent(runtime)),
        }
        seen[f"{len(seen)} {action}"] = [name for name, holds in facts.items() if holds]

    runtime._perform = watched  # type: ignore[method-assign]
    engine.step(local_rows(global_batch(0, rows=rows), groups), NextTokenLoss())
    return {"gradients": gradients, "seen": seen}


def _sent(runtime: Any) -> Any:
    return [(name[1:], tensor) for name, tensor, _ in runtime.mailbox.sent]
