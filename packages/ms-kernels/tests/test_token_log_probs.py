"""token_log_probs: log-softmax over all logits, entropies, and summation precision."""

import pytest
import torch

from ms_kernels import linear_cross_entropy, token_log_probs
from ms_kernels.operators.token_log_probs.contract import token_log_probs as chunked


@pytest.mark.parametrize("chunk_rows", [1, 7, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_equals_log_softmax_in_chunks(chunk_rows, temperature):
    """Log-probabilities, entropies and their joint gradients match plain torch."""
    torch.manual_seed(0)
    hidden = torch.randn(40, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(30, 8, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(30, (40,))
    result = chunked(hidden, weight, tokens, temperature, -100, True, chunk_rows=chunk_rows)
    log_probs = (hidden @ weight.T / temperature).log_softmax(-1)
    expected = log_probs.gather(-1, tokens[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)
    grad_outputs = torch.randn(40).double(), torch.randn(40).double()
    torch.testing.assert_close(result, expected)
    grads = torch.autograd.grad(result, (hidden, weight), grad_outputs)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (hidden, weight), grad_outputs))


def test_it_equals_the_negative_loss_per_token():
    """A policy's log-probability is the negative of the loss; ignored rows are 0 in both."""
    hidden, weight = torch.randn(3, 5, 16), torch.randn(50, 16)
    tokens = torch.randint(50, (3, 5))
    tokens[1, 2:] = -100
    losses = linear_cross_entropy(hidden, weight, tokens, reduction="none")
    log_probs, entropies = token_log_probs(hidden, weight, tokens, entropy=True)
    torch.testing.assert_close(log_probs, -losses)
    assert bool((entropies[tokens == -100] == 0).all())
    assert bool((entropies[tokens != -100] > 0).all())


def test_unused_entropies_do_not_change_the_gradient():
    """Gradients of the log-probabilities alone match a call without entropies."""
    hidden = torch.randn(9, 4, requires_grad=True)
    weight, tokens = torch.randn(12, 4, requires_grad=True), torch.randint(12, (9,))
    without_entropy = torch.autograd.grad(
        token_log_probs(hidden, weight, tokens).sum(), (hidden, weight)
    )
    with_entropy = token_log_probs(hidden, weight, tokens, entropy=True)
    assert torch.allclose(
        torch.autograd.grad(with_entropy[0].sum(), hidden)[0], without_entropy[0], atol=1e-6
    )


def test_the_weight_gradient_is_summed_in_float32():
    """Sum 4,096 equal terms; a bfloat16 sum would lose all but a few hundred."""
    hidden = torch.ones(4096, 4, dtype=torch.bfloat16)
    weight = torch.zeros(8, 4, dtype=torch.bfloat16, requires_grad=True)
    chunked(hidden, weight, torch.zeros(4096).long(), chunk_rows=16).sum().backward()
    expected = torch.full((8, 4), -4096 / 8)
    expected[0] = 4096 * (1 - 1 / 8)
    # One rounding to bfloat16 at the end.
    torch.testing.assert_close(weight.grad.float(), expected, rtol=2**-8, atol=0)
