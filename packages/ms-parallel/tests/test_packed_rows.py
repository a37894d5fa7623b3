"""Attention over packed documents on a GPU: block masks, spans and the choice between them."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ms_parallel import operators
from ms_parallel.operators import packed_rows
from ms_parallel.operators.packed_rows import (
    BLOCK,
    PackedRows,
    attend_in_blocks,
    attend_in_spans,
    block_mask,
    packed_lengths,
)
from ms_parallel.torch_private import FakeTensorMode, varlen_attention


def random_documents(rows: int, length: int, chance: float, *, repeat: bool = False) -> Tensor:
    """Documents (rows, length) int32 that end after each position with a given probability."""
    documents = (torch.rand(rows, length) < chance).int().cumsum(1).int()
    return documents % 3 if repeat else documents


def visible_pairs(documents: Tensor, window: int | None) -> Tensor:
    """Pairs (B, S, S) that are visible under a causal mask, documents and a window."""
    position = torch.arange(documents.shape[1])
    distance = position[:, None] - position
    visible = (distance >= 0) & (documents[:, :, None] == documents[:, None])
    return visible if window is None else visible & (distance < window)


def block_types(mask: BlockMask, length: int) -> Tensor:
    """Types (B, blocks, blocks) of a mask's blocks: 0 empty, 1 partial, 2 full."""
    blocks = -(-length // BLOCK)
    types = torch.zeros(mask.kv_num_blocks.shape[0], blocks, blocks, dtype=torch.int64)
    lists = (
        (1, mask.kv_num_blocks, mask.kv_indices),
        (2, mask.full_kv_num_blocks, mask.full_kv_indices),
    )
    for block_type, counts, indices in lists:
        assert counts is not None
        assert indices is not None
        for row, block in torch.cartesian_prod(*map(torch.arange, types.shape[:2])).tolist():
            listed = indices[row, 0, block, : counts[row, 0, block]].long()
            assert not types[row, block, listed].any()
            types[row, block, listed] = block_type
    return types


@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 300])
@pytest.mark.parametrize("length", [128, 300, 640])
def test_each_block_is_empty_partial_or_full(length: int, window: int | None) -> None:
    """Checked for all pairs of a block, with rare, frequent and recurring documents."""
    torch.manual_seed(length)
    full_blocks = 0
    for chance, repeat in ((0.0, False), (0.002, False), (0.02, False), (0.01, True)):
        documents = random_documents(3, length, chance, repeat=repeat)
        types = block_types(block_mask(documents, window), length)
        pairs = visible_pairs(documents, window)
        for row, query, key in torch.cartesian_prod(*map(torch.arange, types.shape)).tolist():
            block = pairs[row, query * BLOCK :, key * BLOCK :][:BLOCK, :BLOCK]
            block_type = types[row, query, key]
            if block_type == 0:
                assert not block.any()
            if block_type == 2:
                assert block.all()
                full_blocks += 1
    if length > 2 * BLOCK and window in (None, 300):
        assert full_blocks > 0


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 70])
def test_attention_in_blocks_equals_attention_with_a_mask(
    window: int | None, softcap: float | None
) -> None:
    """Grouped heads in float64, with lengths that are not a multiple of the block size."""
    torch.manual_seed(0)
    documents = random_documents(2, 300, 0.02)
    q, k, v = (torch.randn(2, 300, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # uncompiled, it materializes all scores
        out = attend_in_blocks(q, k, v, block_mask(documents, window), scale=0.3, softcap=softcap)
    scores = torch.einsum("bqhgd,bkhd->bhgqk", q.unflatten(2, (2, 2)), k) * 0.3
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    hidden = ~visible_pairs(documents, window)[:, None, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    expected = torch.einsum("bhgqk,bkhd->bqhgd", weights, v).flatten(2, 3)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)


def test_lengths_of_packed_documents() -> None:
    """Each row starts new documents; recurring ids in a row have no spans."""
    documents = torch.tensor([[4, 4, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert packed_lengths(documents) == (2, 3, 5)
    assert packed_lengths(torch.tensor([[0, 1, 0]])) is None


def attend_by_spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    boundaries: Tensor,
    longest: int,
    *,
    causal: bool,
    window: int | None,
    scale: float,
) -> Tensor:
    """Attention within each span of tokens, instead of the GPU kernel."""
    lengths = boundaries.diff().tolist()
    assert longest == max(lengths)
    settings: dict[str, Any] = {"causal": causal, "window": window, "scale": scale}
    return attend_in_spans(operators.attention, q[None], k[None], v[None], lengths, **settings)[0]


@pytest.mark.parametrize("window", [None, 5])
def test_attention_by_spans_equals_attention_with_a_mask(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gets the tokens of all rows, the boundaries and the maximum length."""
    monkeypatch.setattr(packed_rows, "varlen_attention", attend_by_spans)
    torch.manual_seed(0)
    documents = random_documents(3, 50, 0.1)
    q, k, v = (torch.randn(3, 50, heads, 8) for heads in (4, 2, 2))
    lengths = packed_lengths(documents)
    assert lengths is not None
    rows = PackedRows(lengths, torch.device("cpu"))
    out = rows.attend(q, k, v, causal=True, window=window, scale=0.2)
    expected = operators.attention(q, k, v, documents=documents, window=window, scale=0.2)
    torch.testing.assert_close(out, expected)


def test_torchs_kernel_accepts_our_call() -> None:
    """The arguments match this version of torch, also for grouped heads; no GPU is needed."""
    with FakeTensorMode():
        q, k = (torch.empty(64, heads, 16, dtype=torch.bfloat16) for heads in (4, 2))
        boundaries = torch.empty(3, dtype=torch.int32)
        out = varlen_attention(q, k, k, boundaries, 40, causal=True, window=8, scale=0.25)
    assert out.shape == q.shape


def test_boundaries_are_cached_until_documents_change() -> None:
    """For several batches; an in-place change is noticed, and freed tensors are dropped."""
    first, second = torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 1, 1, 1]])
    for documents in (first, second):
        packed_rows.remember_boundaries(documents, documents.clone())
    rows = packed_rows.boundaries_of(first)
    assert rows is not None
    assert rows.lengths == (2, 2)
    assert packed_rows.boundaries_of(first) is rows
    assert packed_rows.boundaries_of(second) is packed_rows.boundaries_of(second)
    first[0, 1] = 1
    changed = packed_rows.boundaries_of(first)
    assert changed is not None
    assert changed.lengths == (1, 3)
    del first, documents
    assert len(packed_rows._boundaries) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("softcap", "z_loss"), [(None, 0.0), (3.0, 0.0), (None, 0.01), (3.0, 0.01)]
)
def test_summed_losses_compute_gradients_in_the_forward_pass(
    dtype: torch.dtype, softcap: float | None, z_loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weighted and chunked with ignored targets, against float64 losses of full logits."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(70, 16, dtype=dtype), torch.randn(50, 16, dtype=dtype)
    targets, weights = torch.randint(50, (70,)), torch.rand(70)
    targets[::7] = -100

    def total_and_gradients(dtype: torch.dtype, chunk_bytes: int, *, summed: bool) -> list[Tensor]:
        monkeypatch.setattr(operators.losses, "_CHUNK_BYTES", chunk_bytes)
        x, w = (t.to(dtype, copy=True).requires_grad_() for t in (hidden, weight))
        settings: dict[str, Any] = {"softcap": softcap, "z_loss": z_loss}
        if summed:
            total = operators.linear_cross_entropy(
                x, w, targets, weights=weights, reduction="sum", **settings
            )
            assert total.grad_fn is not None
            assert "SummedLoss" in type(total.grad_fn).__name__
        else:
            losses = operators.linear_cross_entropy(x, w, targets, reduction="none", **settings)
            total = (losses * weights.to(dtype)).sum()
        return [total.detach(), *torch.autograd.grad(3 * total, (x, w))]

    actual = total_and_gradients(dtype, 4 * 50 * 20, summed=True)
    reference = total_and_gradients(torch.float64, 1 << 28, summed=False)
    rounding = 16 * torch.finfo(dtype).eps  # sums of 70 rows
    for ours, exact in zip(actual, reference, strict=True):
        assert (ours.double() - exact).abs().max() <= rounding * exact.abs().max()
