"""Logits of a model of transformers or ms-parallel, which give them in two ways."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["model_logits", "next_token_logits"]


def next_token_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits (B, S, V) of tokens (B, S) int64, with gradients, as the model is."""
    call: Callable[..., Any] = model
    out = call(tokens)
    logits: Tensor = out if isinstance(out, Tensor) else out.logits
    return logits


@torch.no_grad()
def model_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits (B, S, V) float32 on the CPU, in evaluation mode; the mode is then as it was."""
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    logits = next_token_logits(model, tokens.to(device))
    model.train(training)
    return logits.float().cpu()
