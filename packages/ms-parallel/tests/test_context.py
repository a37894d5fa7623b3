"""Rows split over the context axis train like full rows."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import RUNS, check, job
from processes import run_processes
from runs import FAMILIES
from torch import nn

from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.errors import ConfigError, LayoutError
from ms_parallel.proof.draw import CONTEXT_KINDS
from ms_parallel.split.context.assignment import assign, document_starts, query_ranges, token_costs

PLAIN: dict[str, Any] = {"num_key_value_heads": 4}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "tie_word_embeddings": True}
WINDOW: dict[str, Any] = {"model_type": "mistral", "sliding_window": 5}
EVERYTHING: dict[str, Any] = {**FAMILIES["deepseek_v3"], "num_nextn_predict_layers": 2}
"""Latent attention with a different value width, experts, and MTP layers."""
SEQUENCE: dict[str, Any] = {"balance": "sequence", "balance_coefficient": 0.1}
MODELS: tuple[dict[str, Any], ...] = (
    PLAIN,
    GROUPED,
    WINDOW,
    EVERYTHING,
    FAMILIES["gpt_oss"],
    FAMILIES["mixtral"],
    {"model_type": "gemma2", "sliding_window": 5, "num_key_value_heads": 2},
)


def context_options(name: str, **options: Any) -> dict[str, Any]:
    """Engine options for a kind of context attention."""
    return {"context_attention": name, "microbatch_size": 3, **options}


def test_gradients_with_context_parallelism_equal_one_process(tmp_path: Path) -> None:
    """Documents that span ranks, grouped heads, windows, recomputation, experts, every kind."""
    check(
        [
            job("context=2", PLAIN, options={"microbatch_size": 2}),
            job("context=2", GROUPED, options=context_options("all_gather", recompute="full")),
            job("context=2", WINDOW, options=context_options("ring", context_balance="zig-zag")),
            job("context=2", GROUPED, options=context_options("ring", recompute="full")),
            job("context=2", GROUPED, length=10, seed=1, options=context_options("ulysses")),
            job("context=2", EVERYTHING, options=context_options("all_gather", **SEQUENCE)),
        ],
        tmp_path,
    )


@pytest.mark.slow
def test_gradients_with_context_and_other_axes_equal_one_process(tmp_path: Path) -> None:
    """Random layouts, kinds, families, schedules, recomputation, lengths and documents."""
    rng = random.Random(0)
    layouts = ("context=2", "data=2,context=2", "tensor=2,context=2", "pipeline=2,context=2")
    larger_layouts = ("context=4", "data=2,tensor=2,context=2", "pipeline=2,context=4")
    jobs = []
    for index in range(60):
        layout = rng.choice(layouts + larger_layouts)
        parts = Layout.parse(layout).row_parts
        ring = ("ulysses_ring",) if "context=4" in layout else ()
        options = context_options(
            rng.choice((*CONTEXT_KINDS, "auto", *ring)),
            recompute=rng.choice(("none", "full")),
            context_balance=rng.choice(("balanced", "zig-zag")),
            microbatch_size=1 if "pipeline" in layout else rng.choice((1, 2, 4)),
        )
        if "pipeline" in layout:
            options["schedule"] = rng.choice(("1f1b", "zb-h1"))
        length = parts * rng.choice((3, 4, 6))
        jobs.append(
            job(
                layout,
                rng.choice(MODELS),
                options=options,
                length=length,
                seed=index % 3,
                lengths=[rng.randint(1, length) for _ in range(3)],
            )
        )
    check(jobs, tmp_path)


def test_logits_of_other_documents_are_bit_identical() -> None:
    """Neither do logits before a changed token in its own document, for any kind."""
    jobs = [job("context=2", GROUPED, options=context_options(name)) for name in CONTEXT_KINDS]
    for results in run_processes(2, RUNS, "leaks", jobs=jobs):
        assert results == [[]] * len(jobs)


@pytest.mark.parametrize(
    ("model", "context_attention", "context", "reason"),
    [
        ("transformer-xl", "auto", 2, "cannot split the rows of transformer-xl: a segment attends"),
        ("llama", "ulysses", 3, "must divide the 8 attention heads per tensor rank for ulysses"),
        ("llama", "ulysses_ring", 2, "to have a proper divisor above 1"),
        ("llama", "rings", 2, "context_attention is 'rings'"),
    ],
)
def test_unsupported_context_parallelism_is_refused_with_the_reason(
    model: str, context_attention: str, context: int, reason: str
) -> None:
    """Before the processes are needed."""
    with pytest.raises((LayoutError, ConfigError), match=reason) as caught:
        Engine(model, Layout(context=context), context_attention=context_attention)
    assert "\n" not in str(caught.value)


def test_context_parallelism_of_a_custom_module_is_refused() -> None:
    """Its attention would see only a part of each row."""
    with pytest.raises(LayoutError, match="whose own attention would see only a part"):
        Engine(nn.Linear(2, 2), Layout(context=2))


def random_documents(rows: int, length: int, seed: int) -> torch.Tensor:
    """Packed rows like those of a corpus: many short documents and a few long ones."""
    generator = torch.Generator().manual_seed(seed)
    documents = torch.zeros(rows, length, dtype=torch.int32)
    for row in documents:
        at, document_id = 0, 0
        while at < length:
            sampled = torch.empty(()).log_normal_(5.5, 1.3, generator=generator)
            size = max(1, int(sampled))
            row[at : at + size] = document_id
            at, document_id = at + size, document_id + 1
    return documents


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_cost_of_context_ranks_is_balanced(count: int, window: int | None) -> None:
    """In visible keys, on random packed batches; zig-zag is often much worse."""
    worst = zig_zag = 1.0
    for seed in range(12):
        documents = random_documents(1 + seed % 3, 4096, seed)
        starts = document_starts(documents, *documents.shape)
        costs = token_costs(starts, {window: 1})
        assigned = assign(costs, count)
        positions = assigned.order.sort(1).values
        assert torch.equal(positions, torch.arange(4096).expand_as(positions))
        worst = max(worst, assigned.imbalance)
        zig_zag = max(zig_zag, assign(costs, count, "zig-zag").imbalance)
        ranges = [len(query_ranges(part, starts)) for part in assigned.order.chunk(count, 1)]
        assert max(ranges) <= 400
    assert worst <= 1.1 <= zig_zag


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(0, 3), st.booleans())
def test_query_ranges_cover_each_position_once_and_start_keys_at_documents(
    lengths: list[int], cut: int, recurring: bool
) -> None:
    """Also if a document id recurs later in its row."""
    ids = [index % 2 if recurring else index for index in range(len(lengths))]
    row = [n for n, size in zip(ids, lengths, strict=True) for _ in range(size)]
    row += [-1] * (-len(row) % 8)
    documents = torch.tensor([row])
    starts = document_starts(documents, 1, len(row))
    assert starts[0].tolist() == [row.index(number) for number in row]
    part = assign(token_costs(starts, {None: 1}), 4).order.chunk(4, 1)[cut]
    pieces = query_ranges(part, starts)
    covered = [position for piece in pieces for position in range(piece.start, piece.stop)]
    assert covered == part[0].tolist()
    for piece in pieces:
        piece_ids = set(row[piece.start : piece.stop])
        assert piece.first_key == min(row.index(document_id) for document_id in piece_ids)
        assert piece.mixed == (set(row[piece.first_key : piece.stop]) != {row[piece.first_key]})
