"""decode_attention: one row of attention, whatever pages it is kept in."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_kernels import attention, decode_attention


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
    got = decode_attention(q, *pages, table, torch.tensor(lengths).int(), window=window)
    # Sums of up to 40 terms in float32, in another order.
    torch.testing.assert_close(got, torch.stack(rows), rtol=1e-5, atol=1e-5)


def test_a_sequence_without_positions_gives_zeros():
    """An empty slot of a batch is no NaN."""
    q, pages = torch.randn(2, 4, 8), torch.full((3, 4, 2, 8), torch.nan)
    table = torch.full((2, 2), 99, dtype=torch.int32)
    got = decode_attention(q, pages, pages, table, torch.zeros(2).int())
    assert torch.equal(got, torch.zeros_like(q))
