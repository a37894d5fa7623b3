"""How experts are loaded under every layout; called by `run_processes`."""

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


class Nothing(NextTokenLoss):
    """A loss of 0, so that a gradient is of the balance loss alone."""

    def __call__(self, output: Output, batch: Batch) -> Tensor:
        """No gradient but zeros."""
        return super().__call__(output, batch) * 0


def engine_of(job: dict[str, Any]) -> Engine:
    """An engine of a tiny model with experts."""
    groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
    options = {"optimizer": OPTIMIZER, "microbatch_size": 2, **job.get("options", {})}
    model: Any = Path(job["folder"]) if "folder" in job else tiny(**job["settings"])
    model = TransformersModel(model) if job.get("foreign") else model
    return Engine(model, groups=groups, **options)


def biases(engine: Engine) -> dict[str, list[float]]:
    """Biases of the routers of this process, by name."""
    state = engine.balancer.state
    return {name: bias.tolist() for name, bias in state.items() if name.endswith("bias")}


def loads(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Losses, counts of each update, and the bias at the end, of each job."""
    torch.set_num_threads(1)
    found = []
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
        found.append(
            {"losses": losses, "counts": counts, "balance": balance, "bias": biases(engine)}
        )
    return found


def balance_gradients(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The balance loss's gradient for the logits of each layer and row of the global batch."""
    torch.set_num_threads(1)
    found = []
    for job in jobs:
        engine = engine_of(job)
        rows: dict[str, Any] = {}
        first = engine.groups.place.rank * ROWS // engine.groups.layout.data
        for name, router in engine.balancer.names.items():
            _watch(name, router, rows, first)
        counts = engine.balancer.counts
        counts.copy_(torch.arange(counts.numel()).view(counts.shape) % 7 + 1)
        engine.step(local_rows(global_batch(0, rows=ROWS), engine.groups), Nothing())
        found.append(rows)
    return found


def _watch(name: str, router: Router, rows: dict[str, Any], first: int) -> None:
    """Note the gradient of the logits of each forward's rows, which come in order."""
    weights, seen = router._weights, [first]

    def watched(logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        if logits.requires_grad and not is_recomputing():
            begin, seen[0] = seen[0], seen[0] + len(logits)

            def keep(gradient: Tensor) -> None:
                for row, values in enumerate(gradient.tolist(), begin):
                    rows[f"{name} {row}"] = values

            logits.register_hook(keep)
        return weights(logits, scores, experts)

    router._weights = watched  # type: ignore[method-assign]


def everything(jobs: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """The loads of the jobs that are called so, and the gradients of the others, in one start."""
    functions = {name: loads if name == "loads" else balance_gradients for name in jobs}
    return {name: function(jobs[name]) for name, function in functions.items()}


def interrupted(jobs: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Updates after a checkpoint, by who goes on and by who loads it under another layout."""
    torch.set_num_threads(1)
    found = []
    for number, job in enumerate(jobs):
        engine = engine_of(job)
        _more(engine, 0)
        path = Path(folder, str(number))
        checkpoint.save(path, engine.state_dict(), step=1, facts={})
        engine.save(Path(folder, f"{number} model"))
        read = engine_of({**job, "options": {**job["options"], "weights": "unset"}})
        state = read.state_dict()
        checkpoint.load(path, checkpoint.read_manifest(path), state)
        read.load_state_dict(state)
        other = engine_of({**job, "layout": job["other"]})
        state = other.state_dict()
        checkpoint.load(path, checkpoint.read_manifest(path), state)
        other.load_state_dict(state)
        found.append({"on": _more(engine, 1), "again": _more(read, 1), "other": _more(other, 1)})
    return found


def _more(engine: Engine, step: int, rows: int = ROWS) -> dict[str, Any]:
    update = engine.step(local_rows(global_batch(step, rows=rows), engine.groups), NextTokenLoss())
    assert update.experts is not None
    return {
        "loss": update.loss,
        "balance": update.experts.balance_loss,
        "counts": update.experts.counts.tolist(),
        "bias": biases(engine),
    }


def saved(jobs: dict[str, dict[str, Any]], folder: str) -> dict[str, Any]:
    """Two updates of each job, a checkpoint and a folder after them, and a third update."""
    torch.set_num_threads(1)
    found = {}
    for number, job in jobs.items():
        engine = engine_of(job)
        for step in range(2):
            _more(engine, step, MANY)
        place = engine.groups.place
        state = {
            name: gather_full_tensor(tensor).clone() for name, tensor in engine.state_dict().items()
        }
        if place.tensor == 0 and engine.groups.token_rank == 0:
            torch.save(state, Path(folder, f"{number} whole {place.pipeline}"))
        path = Path(folder, number)
        checkpoint.save(path, engine.state_dict(), step=2, facts={})
        engine.save(Path(folder, f"{number} model"))
        found[number] = _more(engine, 2, MANY)
    return found


def loaded(jobs: dict[str, dict[str, Any]], folder: str) -> dict[str, Any]:
    """What differs by a bit from what was `saved`, in the checkpoint and the folder; and go on."""
    torch.set_num_threads(1)
    found = {}
    for number, job in jobs.items():
        engine = engine_of({**job, "options": {**job.get("options", {}), "seed": 7}})
        state, path = engine.state_dict(), Path(folder, number)
        checkpoint.load(path, checkpoint.read_manifest(path), state)
        engine.load_state_dict(state)
        right: dict[str, Tensor] = {}
        for part in Path(folder).glob(f"{number} whole *"):
            right |= torch.load(part)
        read = Engine(Path(folder, f"{number} model"), groups=engine.groups)
        owners = {copy: owner for owner, copy in read.plan.tied}
        wrong = [
            name
            for name, tensor in [*engine.state_dict().items(), *read.parameters.items()]
            if not torch.equal(gather_full_tensor(tensor.detach()), right[owners.get(name, name)])
        ]
        found[number] = {
            "wrong": wrong,
            "compared": len(engine.state_dict()),
            **_more(engine, 2, MANY),
        }
    return found


def exchanges(job: dict[str, Any]) -> dict[str, int]:
    """How often an update counts and routes, and how often rows travel in its forward."""
    torch.set_num_threads(1)
    engine, calls = engine_of(job), {"counted": 0, "travelled": 0}
    counts, exchange = expert_parallel._counts, expert_parallel._Route._exchange

    def counted(*given: Any) -> Tensor:
        calls["counted"] += 1
        return counts(*given)

    def travelled(*given: Any) -> Tensor:
        calls["travelled"] += 1
        return exchange(*given)

    expert_parallel._counts = counted
    expert_parallel._Route._exchange = travelled  # type: ignore[method-assign]
    try:
        _more(engine, 0)
    finally:
        expert_parallel._counts = counts
        expert_parallel._Route._exchange = exchange  # type: ignore[method-assign]
    return calls
