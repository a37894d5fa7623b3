"""Runs with experts under every layout: loads, balance gradients, checkpoints and exchanges."""

from pathlib import Path
from typing import Any

import torch
from runs import OPTIMIZER, global_batch, local_rows, tiny
from torch import Tensor

from ms_parallel import checkpoint
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss, Output
from ms_parallel.models import TransformersModel
from ms_parallel.models.batch import Batch
from ms_parallel.models.experts.replay import is_recomputing
from ms_parallel.models.experts.router import Router
from ms_parallel.split import expert_parallel
from ms_parallel.split.part import gather_full_tensor

ROWS, MANY = 4, 8


class ZeroLoss(NextTokenLoss):
    """A loss of 0, so that only the balance loss has gradients."""

    def __call__(self, output: Output, batch: Batch) -> Tensor:
        """Zero with zero gradients."""
        return super().__call__(output, batch) * 0


def engine_of(job: dict[str, Any]) -> Engine:
    """Engine of a tiny model with experts."""
    groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
    options = {"optimizer": OPTIMIZER, "microbatch_size": 2, **job.get("options", {})}
    model: Any = Path(job["folder"]) if "folder" in job else tiny(**job["settings"])
    model = TransformersModel(model) if job.get("foreign") else model
    return Engine(model, groups=groups, **options)


def biases(engine: Engine) -> dict[str, list[float]]:
    """Biases of this process's routers by name."""
    state = engine.balancer.state
    return {name: bias.tolist() for name, bias in state.items() if name.endswith("bias")}


def loads(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Losses, expert counts and balance losses of each update, and the final bias, of each job."""
    torch.set_num_threads(1)
    results = []
    for job in jobs:
        engine = engine_of(job)
        losses, counts, balance = [], [], []
        for step in range(job["steps"]):
            batch = local_rows(global_batch(step, rows=ROWS), engine.groups)
            update = engine.step(batch, NextTokenLoss())
            assert update.experts is not None
            losses.append(update.loss)
            counts.append(update.experts.counts.tolist())
            balance.append(update.experts.balance_loss)
        results.append(
            {"losses": losses, "counts": counts, "balance": balance, "bias": biases(engine)}
        )
    return results


def balance_gradients(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Gradients of the balance loss by layer and row of the global batch, at the router logits."""
    torch.set_num_threads(1)
    results = []
    for job in jobs:
        engine = engine_of(job)
        rows: dict[str, Any] = {}
        first = engine.groups.place.rank * ROWS // engine.groups.layout.data
        for name, router in engine.balancer.names.items():
            _watch(name, router, rows, first)
        counts = engine.balancer.counts
        counts.copy_(torch.arange(counts.numel()).view(counts.shape) % 7 + 1)
        engine.step(local_rows(global_batch(0, rows=ROWS), engine.groups), ZeroLoss())
        results.append(rows)
    return results


def _watch(name: str, router: Router, rows: dict[str, Any], first: int) -> None:
    """Record the gradients of the logits of each forward's rows, which come in order."""
    weights, next_row = router._weights, [first]

    def watched(logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        if logits.requires_grad and not is_recomputing():
            start, next_row[0] = next_row[0], next_row[0] + len(logits)

            def record(gradient: Tensor) -> None:
                for row, values in enumerate(gradient.tolist(), start):
                    rows[f"{name} {row}"] = values

            logits.register_hook(record)
        return weights(logits, scores, experts)

    router._weights = watched  # type: ignore[method-assign]


def loads_and_gradients(jobs: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Loads of the jobs named "loads", and balance gradients of all others."""
    functions = {name: loads if name == "loads" else balance_gradients for name in jobs}
    return {name: function(jobs[name]) for name, function in functions.items()}


def resume_jobs(jobs: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Result of an update after a checkpoint: uninterrupted, resumed, and under another layout."""
    torch.set_num_threads(1)
    results = []
    for index, job in enumerate(jobs):
        engine = engine_of(job)
        _step(engine, 0)
        path = Path(folder, str(index))
        checkpoint.save(path, engine.state_dict(), step=1, facts={})
        engine.save(Path(folder, f"{index} model"))
        resumed = engine_of({**job, "options": {**job["options"], "weights": "unset"}})
        state = resumed.state_dict()
        checkpoint.load(path, checkpoint.read_manifest(path), state)
        resumed.load_state_dict(state)
        other = engine_of({**job, "layout": job["other"]})
        state = other.state_dict()
        checkpoint.load(path, checkpoint.read_manifest(path), state)
        other.load_state_dict(state)
        results.append(
            {
                "uninterrupted": _step(engine, 1),
                "resumed": _step(resumed, 1),
                "other": _step(other, 1),
            }
        )
    return results


def _step(engine: Engine, step: int, rows: int = ROWS) -> dict[str, Any]:
    update = engine.step(local_rows(global_batch(step, rows=rows), engine.groups), NextTokenLoss())
    assert update.experts is not None
    return {
        "loss": update.loss,
        "balance": update.experts.balance_loss,
        "counts": update.experts.counts.tolist(),
        "bias": biases(engine),
    }


def save_jobs(jobs: dict[str, dict[str, Any]], folder: str) -> dict[str, Any]:
    """Take two updates of each job, save a checkpoint and a folder, and take a third."""
    torch.set_num_threads(1)
    results = {}
    for name, job in jobs.items():
        engine = engine_of(job)
        for step in range(2):
            _step(engine, step, MANY)
        place = engine.groups.place
        state = {
            name: gather_full_tensor(tensor).clone() for name, tensor in engine.state_dict().items()
        }
        if place.tensor == 0 and engine.groups.token_rank == 0:
            torch.save(state, Path(folder, f"{name} whole {place.pipeline}"))
        path = Path(folder, name)
        checkpoint.save(path, engine.state_dict(), step=2, facts={})
        engine.save(Path(folder, f"{name} model"))
        results[name] = _step(engine, 2, MANY)
    return results


def load_jobs(jobs: dict[str, dict[str, Any]], folder: str) -> dict[str, Any]:
    """Names that differ by a bit from the `saved` state, and the result of the next update."""
    torch.set_num_threads(1)
    results = {}
    for number, job in jobs.items():
        engine = engine_of({**job, "options": {**job.get("options", {}), "seed": 7}})
        state, path = engine.state_dict(), Path(folder, number)
        checkpoint.load(path, checkpoint.read_manifest(path), state)
        engine.load_state_dict(state)
        expected: dict[str, Tensor] = {}
        for part in Path(folder).glob(f"{number} whole *"):
            expected |= torch.load(part)
        reloaded = Engine(Path(folder, f"{number} model"), groups=engine.groups)
        owners = {copy: owner for owner, copy in reloaded.plan.tied}
        differing = [
            name
            for name, tensor in [*engine.state_dict().items(), *reloaded.parameters.items()]
            if not torch.equal(
                gather_full_tensor(tensor.detach()), expected[owners.get(name, name)]
            )
        ]
        results[number] = {
            "differing": differing,
            "compared": len(engine.state_dict()),
            **_step(engine, 2, MANY),
        }
    return results


def exchanges(job: dict[str, Any]) -> dict[str, int]:
    """Number of counting exchanges and of row exchanges in an update's forward."""
    torch.set_num_threads(1)
    engine, calls = engine_of(job), {"counted": 0, "exchanged": 0}
    counts, exchange = expert_parallel._counts, expert_parallel._Route._exchange

    def count_calls(*args: Any) -> Tensor:
        calls["counted"] += 1
        return counts(*args)

    def count_exchanges(*args: Any) -> Tensor:
        calls["exchanged"] += 1
        return exchange(*args)

    expert_parallel._counts = count_calls
    expert_parallel._Route._exchange = count_exchanges  # type: ignore[method-assign]
    try:
        _step(engine, 0)
    finally:
        expert_parallel._counts = counts
        expert_parallel._Route._exchange = exchange  # type: ignore[method-assign]
    return calls
