"""Logits of a model of transformers or ms-parallel, which give them in two ways."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["evaluating", "model_logits", "next_token_logits"]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A model in evaluation mode; afterwards each module is in the mode that it was in."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True


def next_token_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits (B, S, V) of tokens (B, S) int64, with gradients, as the model is."""
    call: Callable[..., Any] = model
    out = call(tokens)
    logits: Tensor = out if isinstance(out, Tensor) else out.logits
    return logits


@torch.no_grad()
def model_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits (B, S, V) float32 on the CPU, in evaluation mode."""
    device = next(model.parameters()).device
    with evaluating(model):
        return next_token_logits(model, tokens.to(device)).float().cpu()
