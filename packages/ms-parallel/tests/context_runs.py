"""Runs with rows split over the context axis, for `run_processes`."""

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
    """Rows of random documents with weights and some ignored targets.

    Args:
        length: length of a row.
        seed: random seed.
        lengths: lengths of the first row's documents; random for other rows.
    """
    generator = torch.Generator().manual_seed(seed)

    def random_size(limit: int) -> int:
        return int(torch.randint(1, limit + 1, (), generator=generator))

    documents = torch.zeros(ROWS, length, dtype=torch.int32)
    positions = torch.zeros(ROWS, length, dtype=torch.int64)
    for row in range(ROWS):
        at, fixed = 0, list(lengths or []) if row == 0 else []
        while at < length:
            size = min(fixed.pop(0) if fixed else random_size(max(1, length // 2)), length - at)
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
    """Engine of a tiny model in float64."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
    options = {"microbatch_size": 2, **job.get("options", {})}
    engine = Engine(tiny(**job["settings"]), groups=groups, **options)
    if job.get("first_experts"):
        send_to_first(engine)
    return engine


def send_to_first(engine: Engine) -> None:
    """Set router biases so that all tokens go to the first experts."""
    for router in engine.balancer.names.values():
        bias = router.e_score_correction_bias
        bias.copy_(torch.arange(len(bias), 0, -1) * 10.0)


def batch_of(job: dict[str, Any]) -> dict[str, Tensor]:
    """Global batch of a job."""
    return packed_batch(job["length"], job["seed"], job.get("lengths"))


def references(jobs: list[dict[str, Any]], folder: str) -> None:
    """Save the loss and gradients of one process for each job."""
    for index, job in enumerate(jobs):
        loss, gradients = full_gradients(engine_of(job), batch_of(job))
        torch.save({"loss": loss, **gradients}, Path(folder, str(index)))


def differences(jobs: list[dict[str, Any]], folder: str) -> list[dict[str, float]]:
    """Relative differences of each job's loss and gradients from the references, by name.

    A gradient is missing if this process has no part of its weight.
    """
    results = []
    for job in jobs:
        expected = torch.load(Path(folder, str(job["reference"])))
        loss, gradients = full_gradients(engine_of(job), batch_of(job))
        errors = {"loss": abs(loss / expected["loss"] - 1)}
        for name, gradient in gradients.items():
            largest = float(expected[name].abs().max())
            assert largest > 0, name
            errors[name] = float((gradient - expected[name]).abs().max()) / largest
        results.append(errors)
    return results


def _logits(engine: Engine, batch: dict[str, Tensor]) -> Tensor:
    return engine.evaluate(batch, lambda output, _: output.logits())


def leaks(jobs: list[dict[str, Any]]) -> list[list[str]]:
    """Logits that change but must not when a token of a document changes, for each job."""
    results = []
    for job in jobs:
        engine, batch = engine_of(job), batch_of(job)
        before, problems = _logits(engine, batch), []
        documents = batch["documents"]
        for document_id in documents[0].unique().tolist():
            mask = documents == document_id
            at = int(mask[0].nonzero()[:, 0].median())
            changed = {**batch, "tokens": batch["tokens"].clone()}
            changed["tokens"][0, at] = (changed["tokens"][0, at] + 1) % VOCABULARY
            moved = (_logits(engine, changed) != before).any(-1)
            mask[1:] = False
            if bool(moved[~mask].any()):
                problems.append(f"document {document_id} changes another")
            if bool(moved[0, :at].any()):
                problems.append(f"token {at} changes an earlier one")
            if not bool(moved[0, at]):
                problems.append(f"token {at} does not change its own")
        results.append(problems)
    return results
