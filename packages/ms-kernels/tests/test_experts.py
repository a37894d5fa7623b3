"""Permute, multiply, lead back: a mixture of experts against one token at a time."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_kernels import grouped_matmul, permute_tokens, unpermute_tokens


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 12),
    choices=st.integers(1, 3),
    count=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_a_mixture_is_each_token_through_its_experts(tokens, choices, count, seed):
    """The three operators together: results and all gradients of the plain sum over choices."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.requires_grad_()

    x, matrices, shares = draw(tokens, 4), draw(count, 4, 3), draw(tokens, choices)
    experts = torch.randint(count, (tokens, choices), generator=generator)
    rows, counts, places = permute_tokens(x, experts, count=count)
    result = unpermute_tokens(grouped_matmul(rows, matrices, counts), places, shares)
    plain = torch.einsum("tk,tckn,tc->tn", x, matrices[experts], shares)
    torch.testing.assert_close(result, plain)
    pull = torch.randn(tokens, 3, generator=generator, dtype=torch.float64)
    got = torch.autograd.grad(result, (x, matrices, shares), pull)
    torch.testing.assert_close(got, torch.autograd.grad(plain, (x, matrices, shares), pull))


def test_rows_keep_the_order_of_their_tokens():
    """The sort is stable, so that a run is the same again."""
    x = torch.arange(6.0)[:, None]
    experts = torch.tensor([[1], [0], [1], [0], [1], [0]])
    rows, counts, places = permute_tokens(x, experts, count=3)
    assert rows[:, 0].tolist() == [1, 3, 5, 0, 2, 4]
    assert counts.tolist() == [3, 3, 0]
    assert places[:, 0].tolist() == [3, 0, 4, 1, 5, 2]
    assert torch.equal(unpermute_tokens(rows, places), x)
