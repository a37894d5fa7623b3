"""decode_attention: the last row of attention over any page layout."""

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
def test_it_equals_the_last_row_of_attention(lengths, page, window, seed):
    """Pages in any order, tables with garbage past the end, NaN in unused positions."""
    generator = torch.Generator().manual_seed(seed)
    width = -(-max(lengths) // page) + 1
    order = torch.randperm(width * len(lengths), generator=generator).to(torch.int32)
    table = order.view(len(lengths), width)
    pages = torch.full((2, len(order), page, 2, 8), torch.nan)
    q = torch.randn(len(lengths), 4, 8, generator=generator)
    rows = []
    for b, length in enumerate(lengths):
        k, v = torch.randn(2, 1, length, 2, 8, generator=generator)
        for position in range(length):
            pages[:, table[b, position // page], position % page] = torch.stack((k, v))[
                :, 0, position
            ]
        rows.append(attention(q[None, None, b], k, v, window=window)[0, 0])
        table[b, -(-length // page) :] = -7
        table[b, : max(length - (window or length), 0) // page] = -1  # pages before the window
    result = decode_attention(q, *pages, table, torch.tensor(lengths).int(), window=window)
    # Sums of up to 40 terms in float32, in another order.
    torch.testing.assert_close(result, torch.stack(rows), rtol=1e-5, atol=1e-5)


def test_a_sequence_without_positions_gives_zeros():
    """An empty batch slot does not give NaN."""
    q, pages = torch.randn(2, 4, 8), torch.full((3, 4, 2, 8), torch.nan)
    table = torch.full((2, 2), 99, dtype=torch.int32)
    result = decode_attention(q, pages, pages, table, torch.zeros(2).int())
    assert torch.equal(result, torch.zeros_like(q))


def two_sequences():
    """Return two sequences of 5 and 7 positions in pages of 4, and their page table."""
    torch.manual_seed(0)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    lengths = torch.tensor([5, 7], dtype=torch.int32)
    return torch.randn(2, 4, 8), *torch.randn(2, 4, 4, 2, 8), table, lengths


OUT_OF_RANGE = {
    "the page before the first": ("page_table", (1, 1), -1),
    "the page after the last": ("page_table", (0, 0), 4),
    "a length below 0": ("lengths", (1,), -1),
    "a length beyond the table": ("lengths", (0,), 9),
}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("case", OUT_OF_RANGE)
def test_a_page_or_length_out_of_range_is_refused_on_the_cpu(case, backend):
    """A page of -1 does not mean the last page; the error names the argument and the value."""
    name, index, value = OUT_OF_RANGE[case]
    *tensors, table, lengths = two_sequences()
    {"page_table": table, "lengths": lengths}[name][index] = value
    with (
        use_backend(backend),
        pytest.raises(ArgumentError, match=rf"{name} is out of range \({value}\)"),
    ):
        decode_attention(*tensors, table, lengths)


@pytest.mark.parametrize("case", OUT_OF_RANGE)
def test_unchecked_out_of_range_values_give_nan_without_a_read(case):
    """As on an accelerator: the faulty sequence is NaN, the other is unchanged."""
    name, index, value = OUT_OF_RANGE[case]
    *tensors, table, lengths = two_sequences()
    expected = reference(*tensors, table, lengths)
    {"page_table": table, "lengths": lengths}[name][index] = value
    result = reference(*tensors, table, lengths)
    assert result[index[0]].isnan().all()
    torch.testing.assert_close(result[1 - index[0]], expected[1 - index[0]])
