"""Logits of models, whether they are of transformers or of ms-parallel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ms_compress.errors import DataError


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


def check_tokens(model: nn.Module, tokens: Tensor, what: str) -> None:
    """Refuse what is no token of a model, which its embedding would follow out of its weight.

    Args:
        model: whose configuration says how many tokens there are; else nothing is looked at.
        tokens: any shape; those of an accelerator are not looked at, as that would wait for it.
        what: holds them, for the message.

    Raises:
        DataError: one is below 0, or not below the model's vocabulary.
    """
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if vocabulary is None or tokens.device.type != "cpu" or not tokens.numel():
        return
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= vocabulary:
        raise DataError(
            f"{what}: its tokens are {least} to {most}, and {type(model).__name__} has a"
            f" vocabulary of {vocabulary}; use the model's own tokenizer"
        )


def vocabulary_of(model: nn.Module) -> int:
    """Return how many tokens a model knows, as its configuration says."""
    return int(model.config.vocab_size)  # type: ignore[union-attr,arg-type]
