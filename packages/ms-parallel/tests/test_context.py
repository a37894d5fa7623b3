"""Rows shared out over the context axis train as whole rows do."""

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
"""Latent attention with values of another width, experts, and layers that predict further."""
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


def kind(name: str, **options: Any) -> dict[str, Any]:
    """Options of an engine."""
    return {"context_attention": name, "microbatch_size": 3, **options}


def test_gradients_under_context_are_those_of_one_process(tmp_path: Path) -> None:
    """Documents that straddle ranks, grouped heads, windows, recomputation, experts, every kind."""
    check(
        [
            job("context=2", PLAIN, options={"microbatch_size": 2}),
            job("context=2", GROUPED, options=kind("all_gather", recompute="full")),
            job("context=2", WINDOW, options=kind("ring", context_balance="zig-zag")),
            job("context=2", GROUPED, options=kind("ring", recompute="full")),
            job("context=2", GROUPED, length=10, seed=1, options=kind("ulysses")),
            job("context=2", EVERYTHING, options=kind("all_gather", **SEQUENCE)),
        ],
        tmp_path,
    )


@pytest.mark.slow
def test_gradients_under_context_and_other_axes_are_those_of_one_process(tmp_path: Path) -> None:
    """Drawn layouts, kinds, families, schedules, recomputation, lengths and documents."""
    chance = random.Random(0)
    layouts = ("context=2", "data=2,context=2", "tensor=2,context=2", "pipeline=2,context=2")
    more = ("context=4", "data=2,tensor=2,context=2", "pipeline=2,context=4")
    jobs = []
    for number in range(60):
        layout = chance.choice(layouts + more)
        parts = Layout.parse(layout).row_parts
        ring = ("ulysses_ring",) if "context=4" in layout else ()
        options = kind(
            chance.choice((*CONTEXT_KINDS, "auto", *ring)),
            recompute=chance.choice(("none", "full")),
            context_balance=chance.choice(("balanced", "zig-zag")),
            microbatch_size=1 if "pipeline" in layout else chance.choice((1, 2, 4)),
        )
        if "pipeline" in layout:
            options["schedule"] = chance.choice(("1f1b", "zb-h1"))
        length = parts * chance.choice((3, 4, 6))
        jobs.append(
            job(
                layout,
                chance.choice(MODELS),
                options=options,
                length=length,
                seed=number % 3,
                lengths=[chance.randint(1, length) for _ in range(3)],
            )
        )
    check(jobs, tmp_path)


def test_no_logit_of_another_document_moves_by_a_bit() -> None:
    """Nor does any before a changed token in its own document, whatever the kind."""
    jobs = [job("context=2", GROUPED, options=kind(name)) for name in CONTEXT_KINDS]
    for found in run_processes(2, RUNS, "leaks", jobs=jobs):
        assert found == [[]] * len(jobs)


@pytest.mark.parametrize(
    ("model", "kind_of", "context", "why"),
    [
        ("transformer-xl", "auto", 2, "cannot split the rows of transformer-xl: a segment attends"),
        ("llama", "ulysses", 3, "must divide the 8 attention heads per tensor rank for ulysses"),
        ("llama", "ulysses_ring", 2, "to have a proper divisor above 1"),
        ("llama", "rings", 2, "context_attention is 'rings'"),
    ],
)
def test_what_cannot_share_out_rows_is_refused_with_the_reason(
    model: str, kind_of: str, context: int, why: str
) -> None:
    """Before a process is asked for."""
    with pytest.raises((LayoutError, ConfigError), match=why) as caught:
        Engine(model, Layout(context=context), context_attention=kind_of)
    assert "\n" not in str(caught.value)


def test_a_module_of_ones_own_is_refused_rows_in_parts() -> None:
    """Its attention would see a part of each."""
    with pytest.raises(LayoutError, match="whose own attention would see only a part"):
        Engine(nn.Linear(2, 2), Layout(context=2))


def drawn_documents(rows: int, length: int, seed: int) -> torch.Tensor:
    """Packed rows as corpora have them: many short documents and a few long ones."""
    generator = torch.Generator().manual_seed(seed)
    documents = torch.zeros(rows, length, dtype=torch.int32)
    for row in documents:
        at, number = 0, 0
        while at < length:
            drawn = torch.empty(()).log_normal_(5.5, 1.3, generator=generator)
            size = max(1, int(drawn))
            row[at : at + size] = number
            at, number = at + size, number + 1
    return documents


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_slowest_rank_pays_little_more_than_the_mean(count: int, window: int | None) -> None:
    """Counted in keys seen, on drawn packed batches; zig-zag is often far from it."""
    worst = zig_zag = 1.0
    for seed in range(12):
        documents = drawn_documents(1 + seed % 3, 4096, seed)
        starts = document_starts(documents, *documents.shape)
        costs = token_costs(starts, {window: 1})
        found = assign(costs, count)
        every = found.order.sort(1).values
        assert torch.equal(every, torch.arange(4096).expand_as(every))
        worst = max(worst, found.imbalance)
        zig_zag = max(zig_zag, assign(costs, count, "zig-zag").imbalance)
        seen = [len(query_ranges(part, starts)) for part in found.order.chunk(count, 1)]
        assert max(seen) <= 400
    assert worst <= 1.1 <= zig_zag


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(0, 3), st.booleans())
def test_pieces_cover_each_position_once_and_begin_their_keys_where_their_documents_begin(
    lengths: list[int], cut: int, comes_back: bool
) -> None:
    """Also where a document's number comes back later in its row."""
    numbers = [number % 2 if comes_back else number for number in range(len(lengths))]
    row = [n for n, size in zip(numbers, lengths, strict=True) for _ in range(size)]
    row += [-1] * (-len(row) % 8)
    documents = torch.tensor([row])
    starts = document_starts(documents, 1, len(row))
    assert starts[0].tolist() == [row.index(number) for number in row]
    part = assign(token_costs(starts, {None: 1}), 4).order.chunk(4, 1)[cut]
    pieces = query_ranges(part, starts)
    covered = [place for piece in pieces for place in range(piece.start, piece.stop)]
    assert covered == part[0].tolist()
    for piece in pieces:
        own = set(row[piece.start : piece.stop])
        assert piece.first_key == min(row.index(number) for number in own)
        assert piece.mixed == (set(row[piece.first_key : piece.stop]) != {row[piece.first_key]})
