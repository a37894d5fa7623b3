"""Logits of models, whether they are of transformers or of ms-parallel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode; afterwards each module has its mode back."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True


def next_token_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return logits (B, S, V) of tokens (B, S) int64, with gradients, in the model's own mode."""
    call: Callable[..., Any] = model
    out = call(tokens)
    logits: Tensor = out if isinstance(out, Tensor) else out.logits
    return logits


@torch.no_grad()
def model_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return logits (B, S, V) float32 on the CPU, in evaluation mode."""
    device = next(model.parameters()).device
    with evaluating(model):
        return next_token_logits(model, tokens.to(device)).float().cpu()


def vocabulary_of(model: nn.Module) -> int:
    """Return how many tokens a model knows, as its configuration says."""
    return int(model.config.vocab_size)  # type: ignore[union-attr,arg-type]
