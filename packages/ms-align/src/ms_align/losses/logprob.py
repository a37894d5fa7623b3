"""Log-probabilities and entropies of tokens from logits, in float32 whatever the logits are in.

Shapes: B rows, S positions, V vocabulary.
"""

import torch
from torch import Tensor

__all__ = ["entropies", "token_logprobs"]

IGNORED = -100


def token_logprobs(logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log p(target) with p = softmax(logits / temperature), differentiable.

    Args:
        logits: (..., V), any float dtype.
        targets: (...) int64; -100 gives 0.
        temperature: above 0.

    Returns:
        (...) float32.
    """
    flat = logits.reshape(-1, logits.shape[-1]).float()
    if temperature != 1.0:
        flat = flat / temperature
    losses = torch.nn.functional.cross_entropy(
        flat, targets.reshape(-1), ignore_index=IGNORED, reduction="none"
    )
    return -losses.view(targets.shape)


def entropies(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy -Σ p·log p in nats of p = softmax(logits / temperature), differentiable.

    Args:
        logits: (..., V), any float dtype.
        temperature: above 0.

    Returns:
        (...) float32.
    """
    logprobs = (logits.float() / temperature).log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)
