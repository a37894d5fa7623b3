"""token_log_probs: log-softmax of all logits, entropies, and what is held."""

import pytest
import torch

from ms_kernels import linear_cross_entropy, token_log_probs
from ms_kernels.operators.token_log_probs.contract import token_log_probs as chunked


@pytest.mark.parametrize("chunk_rows", [1, 7, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_is_log_softmax_in_chunks(chunk_rows, temperature):
    """Results and gradients of both, pulled together, are those of plain torch."""
    torch.manual_seed(0)
    hidden = torch.randn(40, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(30, 8, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(30, (40,))
    got = chunked(hidden, weight, tokens, temperature, -100, True, chunk_rows=chunk_rows)
    logs = (hidden @ weight.T / temperature).log_softmax(-1)
    truth = logs.gather(-1, tokens[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    pulls = torch.randn(40).double(), torch.randn(40).double()
    torch.testing.assert_close(got, truth)
    slopes = torch.autograd.grad(got, (hidden, weight), pulls)
    torch.testing.assert_close(slopes, torch.autograd.grad(truth, (hidden, weight), pulls))


def test_it_is_the_negative_loss_of_each_token():
    """A policy's log-probability and a model's loss are one number, ignored rows 0 in both."""
    hidden, weight = torch.randn(3, 5, 16), torch.randn(50, 16)
    tokens = torch.randint(50, (3, 5))
    tokens[1, 2:] = -100
    losses = linear_cross_entropy(hidden, weight, tokens, reduction="none")
    got, spread = token_log_probs(hidden, weight, tokens, entropy=True)
    torch.testing.assert_close(got, -losses)
    assert bool((spread[tokens == -100] == 0).all())
    assert bool((spread[tokens != -100] > 0).all())


def test_a_pull_on_the_results_alone_leaves_entropies_out():
    """With entropies asked for but not pulled, gradients are those without."""
    hidden = torch.randn(9, 4, requires_grad=True)
    weight, tokens = torch.randn(12, 4, requires_grad=True), torch.randint(12, (9,))
    one = torch.autograd.grad(token_log_probs(hidden, weight, tokens).sum(), (hidden, weight))
    pair = token_log_probs(hidden, weight, tokens, entropy=True)
    assert torch.allclose(torch.autograd.grad(pair[0].sum(), hidden)[0], one[0], atol=1e-6)


def test_the_weight_gradient_is_summed_in_float32():
    """4,096 equal terms, of which a bfloat16 sum would lose all but a few hundred."""
    hidden = torch.ones(4096, 4, dtype=torch.bfloat16)
    weight = torch.zeros(8, 4, dtype=torch.bfloat16, requires_grad=True)
    chunked(hidden, weight, torch.zeros(4096).long(), chunk_rows=16).sum().backward()
    truth = torch.full((8, 4), -4096 / 8)
    truth[0] = 4096 * (1 - 1 / 8)
    # One rounding to bfloat16 at the end.
    torch.testing.assert_close(weight.grad.float(), truth, rtol=2**-8, atol=0)
