"""Permute, grouped matmul, unpermute: a mixture of experts against a per-token computation."""

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
def test_a_mixture_equals_each_token_through_its_experts(tokens, choices, count, seed):
    """Results and all gradients of the three operators match the plain sum over choices."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
        return tensor.requires_grad_()

    x, matrices, router_weights = draw(tokens, 4), draw(count, 4, 3), draw(tokens, choices)
    experts = torch.randint(count, (tokens, choices), generator=generator)
    rows, counts, places = permute_tokens(x, experts, count=count)
    result = unpermute_tokens(grouped_matmul(rows, matrices, counts), places, router_weights)
    plain = torch.einsum("tk,tckn,tc->tn", x, matrices[experts], router_weights)
    torch.testing.assert_close(result, plain)
    grad_out = torch.randn(tokens, 3, generator=generator, dtype=torch.float64)
    grads = torch.autograd.grad(result, (x, matrices, router_weights), grad_out)
    torch.testing.assert_close(
        grads, torch.autograd.grad(plain, (x, matrices, router_weights), grad_out)
    )


def test_rows_of_an_expert_keep_the_token_order():
    """The sort is stable, so runs are reproducible."""
    x = torch.arange(6.0)[:, None]
    experts = torch.tensor([[1], [0], [1], [0], [1], [0]])
    rows, counts, places = permute_tokens(x, experts, count=3)
    assert rows[:, 0].tolist() == [1, 3, 5, 0, 2, 4]
    assert counts.tolist() == [3, 3, 0]
    assert places[:, 0].tolist() == [3, 0, 4, 1, 5, 2]
    assert torch.equal(unpermute_tokens(rows, places), x)
