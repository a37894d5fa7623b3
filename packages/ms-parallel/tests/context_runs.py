"""Rows shared out over the context axis; functions that `run_processes` calls."""

from pathlib import Path
from typing import Any

import torch
from runs import tiny
from torch import Tensor

from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.proof.gradients import full_gradients

ROWS, VOCABULARY = 4, 48


def packed_batch(length: int, seed: int, lengths: list[int] | None = None) -> dict[str, Tensor]:
    """Rows of documents of drawn lengths, from one token on; weights, and some targets left out.

    Args:
        length: of a row.
        seed: of the draw.
        lengths: of the documents of the first row; drawn for the others.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(most: int) -> int:
        return int(torch.randint(1, most + 1, (), generator=generator))

    documents = torch.zeros(ROWS, length, dtype=torch.int32)
    positions = torch.zeros(ROWS, length, dtype=torch.int64)
    for row in range(ROWS):
        at, given = 0, list(lengths or []) if row == 0 else []
        while at < length:
            size = min(given.pop(0) if given else drawn(max(1, length // 2)), length - at)
            documents[row, at : at + size] = int(documents[row].max()) + 1
            positions[row, at : at + size] = torch.arange(size)
            at += size
    text = torch.randint(0, VOCABULARY, (ROWS, length + 1), generator=generator)
    targets = text[:, 1:].clone()
    targets[:, :-1][documents[:, 1:] != documents[:, :-1]] = -100
    targets[torch.rand(targets.shape, generator=generator) < 0.1] = -100
    return {
        "tokens": text[:, :-1].contiguous(),
        "targets": targets,
        "positions": positions,
        "documents": documents,
        "weights": torch.rand(ROWS, length, generator=generator) + 0.5,
    }


def engine_of(job: dict[str, Any]) -> Engine:
    """An engine of a tiny model in float64."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
    options = {"microbatch_size": 2, **job.get("options", {})}
    engine = Engine(tiny(**job["settings"]), groups=groups, **options)
    if job.get("first_experts"):
        send_to_first(engine)
    return engine


def send_to_first(engine: Engine) -> None:
    """Let the bias of each router choose the first experts for every token."""
    for router in engine.balancer.names.values():
        bias = router.e_score_correction_bias
        bias.copy_(torch.arange(len(bias), 0, -1) * 10.0)


def batch_of(job: dict[str, Any]) -> dict[str, Tensor]:
    """The global batch of a job."""
    return packed_batch(job["length"], job["seed"], job.get("lengths"))


def references(jobs: list[dict[str, Any]], folder: str) -> None:
    """Keep the loss and gradients of one process for each job."""
    for number, job in enumerate(jobs):
        loss, gradients = full_gradients(engine_of(job), batch_of(job))
        torch.save({"loss": loss, **gradients}, Path(folder, str(number)))


def differences(jobs: list[dict[str, Any]], folder: str) -> list[dict[str, float]]:
    """How far each job's loss and gradients are from those kept, by name, as shares of the largest.

    The gradient of a weight that this process has nothing of is missing.
    """
    found = []
    for job in jobs:
        expected = torch.load(Path(folder, str(job["reference"])))
        loss, gradients = full_gradients(engine_of(job), batch_of(job))
        apart = {"loss": abs(loss / expected["loss"] - 1)}
        for name, gradient in gradients.items():
            largest = float(expected[name].abs().max())
            assert largest > 0, name
            apart[name] = float((gradient - expected[name]).abs().max()) / largest
        found.append(apart)
    return found


def _logits(engine: Engine, batch: dict[str, Tensor]) -> Tensor:
    return engine.evaluate(batch, lambda output, _: output.logits())


def leaks(jobs: list[dict[str, Any]]) -> list[list[str]]:
    """What moves by a bit that must not, when one token of a document is changed, for each job."""
    found = []
    for job in jobs:
        engine, batch = engine_of(job), batch_of(job)
        before, wrong = _logits(engine, batch), []
        documents = batch["documents"]
        for number in documents[0].unique().tolist():
            own = documents == number
            at = int(own[0].nonzero()[:, 0].median())
            changed = {**batch, "tokens": batch["tokens"].clone()}
            changed["tokens"][0, at] = (changed["tokens"][0, at] + 1) % VOCABULARY
            moved = (_logits(engine, changed) != before).any(-1)
            own[1:] = False
            if bool(moved[~own].any()):
                wrong.append(f"document {number} moves another")
            if bool(moved[0, :at].any()):
                wrong.append(f"token {at} moves one before it")
            if not bool(moved[0, at]):
                wrong.append(f"token {at} does not move itself")
        found.append(wrong)
    return found
