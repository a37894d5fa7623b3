"""Difference between a quantized model's predictions and the float model's."""

import torch
from attrs import frozen
from torch import Tensor


@frozen(kw_only=True)
class Divergence:
    """Means over positions."""

    kl: float
    """KL(float || quantized) of the next token, in nats."""
    agreement: float
    """Share of positions with the same most likely token."""


@torch.no_grad()
def compare_logits(float_logits: Tensor, quantized_logits: Tensor) -> Divergence:
    """Compare logits (B, S, V) of the same tokens."""
    kl, same = 0.0, 0.0
    # Row by row: each logarithm of probabilities is as large as the logits.
    for row, other in zip(float_logits, quantized_logits, strict=True):
        log_p, log_q = row.float().log_softmax(-1), other.float().log_softmax(-1)
        kl += float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
        same += float((row.argmax(-1) == other.argmax(-1)).float().mean())
    count = len(float_logits)
    return Divergence(kl=kl / count, agreement=same / count)
