"""Probes for leaks between tokens and documents, packing and generation."""

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ms_parallel.engine.engine import Engine
from ms_parallel.errors import ModelError
from ms_parallel.proof.batches import DocumentSpan, local_rows, spans_of
from ms_parallel.proof.records import Check, Counterexample
from ms_parallel.split.part import drop_gathered

Batch = Mapping[str, Tensor]
_PROMPT, _NEW_TOKENS = 5, 4


def probe_changes(engine: Engine, batch: Batch, tolerance: float) -> Iterator[Counterexample]:
    """Change the middle token of documents and check which logits change.

    Logits of other documents and of earlier tokens must not change; those of the token must
    change, or else the probe shows nothing. With experts, other matmul sizes may change last bits.
    """
    before = full_logits(engine, batch)
    scale = float(before.abs().max())
    spans = spans_of(dict(batch))
    for index in range(len([span for span in spans if span.row == 0])):
        changed = {name: value.clone() for name, value in batch.items()}
        changes: list[tuple[DocumentSpan, int]] = []
        for span in _nth_documents(spans, index):
            middle = (span.start + span.end) // 2
            token = changed["tokens"][span.row, middle]
            changed["tokens"][span.row, middle] = (token + 1) % int(batch["tokens"].max() + 1)
            changes.append((span, middle))
        # (B, S): largest change of a position's logits, relative to the largest logit.
        differences = (full_logits(engine, changed) - before).abs().amax(-1) / scale
        yield from _judge(differences, changes, spans, tolerance)


def _nth_documents(spans: list[DocumentSpan], index: int) -> list[DocumentSpan]:
    rows: dict[int, list[DocumentSpan]] = {}
    for span in spans:
        rows.setdefault(span.row, []).append(span)
    return [row_spans[index] for row_spans in rows.values() if index < len(row_spans)]


def _judge(
    differences: Tensor,
    changes: list[tuple[DocumentSpan, int]],
    spans: list[DocumentSpan],
    tolerance: float,
) -> Iterator[Counterexample]:
    changed_spans = {(span.row, span.start) for span, _ in changes}
    for span, middle in changes:
        row_differences = differences[span.row]
        if not float(row_differences[middle]) > 0.0:
            yield _counterexample(
                "leak", f"{_name(span)} does not depend on its own token {middle}", 0.0
            )
        if float(row_differences[span.start : middle].sum()) > tolerance:
            difference = float(row_differences[span.start : middle].max())
            text = f"token {middle} of {_name(span)} changes earlier logits"
            yield _counterexample("causality", text, difference)
    for span in spans:
        if (span.row, span.start) not in changed_spans:
            difference = float(differences[span.slices].max())
            if not difference <= tolerance:
                text = f"{_name(span)} changes with a token of another document"
                yield _counterexample("leak", text, difference)


def probe_packing(engine: Engine, batch: Batch, tolerance: float) -> Iterator[Counterexample]:
    """Check that each document has the same logits in a packed row and alone in a row."""
    packed = full_logits(engine, batch)
    for span in spans_of(dict(batch)):
        row, columns = span.slices
        tokens = batch["tokens"][row : row + 1, columns]
        unpacked = {
            "tokens": tokens,
            "positions": torch.arange(tokens.shape[1])[None],
            "documents": torch.zeros_like(tokens, dtype=torch.int32),
        }
        difference = float((full_logits(engine, unpacked)[0] - packed[row, columns]).abs().max())
        difference /= float(packed.abs().max())
        if not difference <= tolerance:
            text = f"{_name(span)} has different logits when it is not packed"
            yield _counterexample("packing", text, difference)


def probe_generation(engine: Engine, batch: Batch) -> tuple[Check, ...] | Counterexample:
    """Compare greedy tokens generated with a cache with the argmax of one full forward pass.

    Returns () for a model that cannot generate. With pipeline parallelism some stages may find that
    out only after others have started, so test a single process first.
    """
    prompts = [row[:_PROMPT].tolist() for row in local_rows(batch, engine.groups)["tokens"]]
    try:
        generated = engine.generate(
            prompts, max_new_tokens=_NEW_TOKENS, stop_token=None, temperature=0.0
        )
    except ModelError:
        return ()
    texts = torch.tensor(
        [prompt + tokens for prompt, tokens in zip(prompts, generated, strict=True)]
    )
    inputs = texts[:, :-1]
    # Causality makes the padding irrelevant to the positions that are compared.
    padded = F.pad(inputs, (0, -inputs.shape[1] % engine.groups.layout.row_parts))
    logits = _local_logits(engine, {"tokens": padded})[:, _PROMPT - 1 : inputs.shape[1]]
    for tokens, expected_tokens in zip(
        texts[:, _PROMPT:].tolist(), logits.argmax(-1).tolist(), strict=True
    ):
        for count, (token, expected) in enumerate(zip(tokens, expected_tokens, strict=True), 1):
            if token != expected:
                text = f"token {count} generated with a cache is {token}, without {expected}"
                return _counterexample("generation", text, 0.0)
    return ("generation",)


def full_logits(engine: Engine, batch: Batch) -> Tensor:
    """Compute the logits of the global batch (B, S, V) on every process."""
    # A single row cannot be split over data ranks, so each computes all of it.
    if len(batch["tokens"]) % engine.data_ranks:
        return _local_logits(engine, batch)
    return engine.gather(_local_logits(engine, local_rows(batch, engine.groups)))


def _local_logits(engine: Engine, batch: Batch) -> Tensor:
    # Not with `evaluate`, which rejects rows that differ between ranks: a fault to report here.
    runner = engine.runner
    with torch.no_grad():
        results = runner.forward(runner.microbatches(batch), lambda output, _: output.logits())
    for stage in engine.stages.values():
        drop_gathered(stage)
    return runner.broadcast_from_last_stage(torch.cat(results) if results else None)


def _counterexample(check: Check, text: str, difference: float) -> Counterexample:
    return Counterexample(check=check, what=text, apart=difference)


def _name(span: DocumentSpan) -> str:
    return f"the document at {span.start} to {span.end - 1} of row {span.row}"
