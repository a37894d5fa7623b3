"""decode_attention: one row of attention, whatever pages it is kept in."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_kernels import ArgumentError, attention, decode_attention, use_backend
from ms_kernels.operators.decode_attention.contract import decode_attention as reference


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    page=st.integers(1, 9),
    window=st.sampled_from([None, 1, 5, 100]),
    seed=st.integers(0, 1000),
)
def test_it_is_the_last_row_of_attention(lengths, page, window, seed):
    """Pages in any order, tables with garbage past the end, NaN in what is not used."""
    generator = torch.Generator().manual_seed(seed)
    width = -(-max(lengths) // page) + 1
    order = torch.randperm(width * len(lengths), generator=generator).to(torch.int32)
    table = order.view(len(lengths), width)
    pages = torch.full((2, len(order), page, 2, 8), torch.nan)
    q = torch.randn(len(lengths), 4, 8, generator=generator)
    rows = []
    for b, length in enumerate(lengths):
        k, v = torch.randn(2, 1, length, 2, 8, generator=generator)
        for place in range(length):
            pages[:, table[b, place // page], place % page] = torch.stack((k, v))[:, 0, place]
        rows.append(attention(q[None, None, b], k, v, window=window)[0, 0])
        table[b, -(-length // page) :] = -7
        table[b, : max(length - (window or length), 0) // page] = -1  # left behind by the window
    got = decode_attention(q, *pages, table, torch.tensor(lengths).int(), window=window)
    # Sums of up to 40 terms in float32, in another order.
    torch.testing.assert_close(got, torch.stack(rows), rtol=1e-5, atol=1e-5)


def test_a_sequence_without_positions_gives_zeros():
    """An empty slot of a batch is no NaN."""
    q, pages = torch.randn(2, 4, 8), torch.full((3, 4, 2, 8), torch.nan)
    table = torch.full((2, 2), 99, dtype=torch.int32)
    got = decode_attention(q, pages, pages, table, torch.zeros(2).int())
    assert torch.equal(got, torch.zeros_like(q))


def drawn():
    """Return two sequences of 5 and 7 positions in pages of 4, and their table."""
    torch.manual_seed(0)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    lengths = torch.tensor([5, 7], dtype=torch.int32)
    return torch.randn(2, 4, 8), *torch.randn(2, 4, 4, 2, 8), table, lengths


WRONG = {
    "the page before the first": ("page_table", (1, 1), -1),
    "the page after the last": ("page_table", (0, 0), 4),
    "a length below 0": ("lengths", (1,), -1),
    "a length beyond the table": ("lengths", (0,), 9),
}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("case", WRONG)
def test_a_page_or_length_out_of_range_is_refused_on_the_cpu(case, backend):
    """A page of -1 is not the last one; the error names the argument and the number."""
    name, place, wrong = WRONG[case]
    *tensors, table, lengths = drawn()
    {"page_table": table, "lengths": lengths}[name][place] = wrong
    with use_backend(backend), pytest.raises(ArgumentError, match=f"{name} is {wrong} somewhere"):
        decode_attention(*tensors, table, lengths)


@pytest.mark.parametrize("case", WRONG)
def test_where_nothing_is_checked_a_wrong_index_makes_nan_and_reads_nothing(case):
    """As on an accelerator: the sequence at fault is NaN, the other one as it was."""
    name, place, wrong = WRONG[case]
    *tensors, table, lengths = drawn()
    right = reference(*tensors, table, lengths)
    {"page_table": table, "lengths": lengths}[name][place] = wrong
    got = reference(*tensors, table, lengths)
    assert got[place[0]].isnan().all()
    torch.testing.assert_close(got[1 - place[0]], right[1 - place[0]])
