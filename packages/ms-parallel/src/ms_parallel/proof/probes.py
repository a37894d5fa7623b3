"""Probes a model: a changed token moves nothing that must not see it, and documents stand alone."""

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ms_parallel.engine.engine import Engine
from ms_parallel.errors import ModelError
from ms_parallel.proof.batches import DocumentSpan, my_rows, spans_of
from ms_parallel.proof.records import Check, Counterexample
from ms_parallel.split.part import drop_gathered

Batch = Mapping[str, Tensor]
_PROMPT, _NEW_TOKENS = 5, 4


def probe_changes(engine: Engine, batch: Batch, tolerance: float) -> Iterator[Counterexample]:
    """Change the middle token of a document; no other document's logits may move.

    Nor may those before it in its own document; and its own must move, else nothing is shown. A
    model that routes tokens to experts multiplies other sizes then, so that last bits may differ.
    """
    before = whole_logits(engine, batch)
    scale = float(before.abs().max())
    spans = spans_of(dict(batch))
    for index in range(len([span for span in spans if span.row == 0])):
        changed = {name: value.clone() for name, value in batch.items()}
        hit: list[tuple[DocumentSpan, int]] = []
        for span in _nth_of_each_row(spans, index):
            middle = (span.start + span.end) // 2
            token = changed["tokens"][span.row, middle]
            changed["tokens"][span.row, middle] = (token + 1) % int(batch["tokens"].max() + 1)
            hit.append((span, middle))
        moved = (whole_logits(engine, changed) - before).abs().amax(-1) / scale
        yield from _judge(moved, hit, spans, tolerance)


def _nth_of_each_row(spans: list[DocumentSpan], index: int) -> list[DocumentSpan]:
    rows: dict[int, list[DocumentSpan]] = {}
    for span in spans:
        rows.setdefault(span.row, []).append(span)
    return [of_row[index] for of_row in rows.values() if index < len(of_row)]


def _judge(
    moved: Tensor, hit: list[tuple[DocumentSpan, int]], spans: list[DocumentSpan], tolerance: float
) -> Iterator[Counterexample]:
    own = {(span.row, span.start) for span, _ in hit}
    for span, middle in hit:
        at = moved[span.row]
        if not float(at[middle]) > 0.0:
            yield _wrong("leak", f"{_name(span)} does not depend on its own token {middle}", 0.0)
        if float(at[span.start : middle].sum()) > tolerance:
            apart = float(at[span.start : middle].max())
            yield _wrong("causality", f"token {middle} of {_name(span)} moves earlier ones", apart)
    for other in spans:
        if (other.row, other.start) not in own:
            apart = float(moved[other.slices].max())
            if not apart <= tolerance:
                what = f"{_name(other)} moves when another document's token is changed"
                yield _wrong("leak", what, apart)


def probe_packing(engine: Engine, batch: Batch, tolerance: float) -> Iterator[Counterexample]:
    """Check that each document alone in a row has the logits that it has in a packed row."""
    packed = whole_logits(engine, batch)
    for span in spans_of(dict(batch)):
        row, between = span.slices
        tokens = batch["tokens"][row : row + 1, between]
        alone = {
            "tokens": tokens,
            "positions": torch.arange(tokens.shape[1])[None],
            "documents": torch.zeros_like(tokens, dtype=torch.int32),
        }
        apart = float((whole_logits(engine, alone)[0] - packed[row, between]).abs().max())
        apart /= float(packed.abs().max())
        if not apart <= tolerance:
            yield _wrong("packing", f"{_name(span)} alone has other logits than packed", apart)


def probe_generation(engine: Engine, batch: Batch) -> tuple[Check, ...] | Counterexample:
    """Check greedy tokens generated with a cache against one forward of the whole rows.

    Returns () for a model that cannot generate. In a pipeline that is known before the first
    stage runs only for a forward without `cache`, so ask one process first.
    """
    prompts = [row[:_PROMPT].tolist() for row in my_rows(batch, engine.groups)["tokens"]]
    try:
        made = engine.generate(
            prompts, max_new_tokens=_NEW_TOKENS, stop_token=None, temperature=0.0
        )
    except ModelError:
        return ()
    texts = torch.tensor([prompt + new for prompt, new in zip(prompts, made, strict=True)])
    read = texts[:, :-1]
    padded = F.pad(read, (0, -read.shape[1] % engine.groups.layout.row_parts))
    logits = _local_logits(engine, {"tokens": padded})[:, _PROMPT - 1 : read.shape[1]]
    for new, right in zip(texts[:, _PROMPT:].tolist(), logits.argmax(-1).tolist(), strict=True):
        for count, (token, expected) in enumerate(zip(new, right, strict=True), 1):
            if token != expected:
                what = f"token {count} generated with a cache is {token}, without {expected}"
                return _wrong("generation", what, 0.0)
    return ("generation",)


def whole_logits(engine: Engine, batch: Batch) -> Tensor:
    """Compute the logits of the whole batch on every process, (B, S, V)."""
    if len(batch["tokens"]) % engine.data_ranks:
        return _local_logits(engine, batch)
    return engine.gather(_local_logits(engine, my_rows(batch, engine.groups)))


def _local_logits(engine: Engine, batch: Batch) -> Tensor:
    # Not by `evaluate`, which refuses rows that differ between ranks: a fault to be reported here.
    runner = engine.runner
    with torch.no_grad():
        results = runner.forward(runner.microbatches(batch), lambda output, _: output.logits())
    for stage in engine.stages.values():
        drop_gathered(stage)
    return runner.share(torch.cat(results) if results else None)


def _wrong(check: Check, what: str, apart: float) -> Counterexample:
    return Counterexample(check=check, what=what, apart=apart)


def _name(span: DocumentSpan) -> str:
    return f"the document at {span.start} to {span.end - 1} of row {span.row}"
