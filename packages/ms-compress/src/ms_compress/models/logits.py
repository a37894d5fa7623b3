"""Logits of models from transformers or ms-parallel."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ms_compress.arguments import check_type
from ms_compress.errors import DataError

IGNORED = -100
"""Target that does not count in a loss."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation mode, and restore the mode of each module afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def next_token_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return logits (B, S, V) for tokens (B, S) int64, with gradients, in the current mode."""
    call: Callable[..., Any] = model
    out = call(tokens)
    logits: Tensor = out if isinstance(out, Tensor) else out.logits
    return logits


@torch.no_grad()
def model_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return logits (B, S, V) float32 on the CPU, computed in evaluation mode."""
    device = next(model.parameters()).device
    with evaluating(model):
        return next_token_logits(model, tokens.to(device)).float().cpu()


def as_columns(text: Tensor | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a text as `tokens` and `targets`; of rows of tokens, the targets are the next tokens.

    Args:
        text: (R, S + 1) int64, or the columns (R, S).

    Raises:
        DataError: it is neither.
    """
    if isinstance(text, Tensor):
        if text.ndim != 2 or text.is_floating_point():
            raise DataError(
                f"text must be rows of token ids (R, S), got {text.dtype} of shape "
                f"{tuple(text.shape)}; pass int64"
            )
        return {"tokens": text[:, :-1], "targets": text[:, 1:]}
    check_type("text", text, Mapping, "a tensor or a dict of tensors", error=DataError)
    for name in ("tokens", "targets"):
        check_type(f"text[{name!r}]", text.get(name), Tensor, "a tensor", error=DataError)
    return text


def check_tokens(model: nn.Module, tokens: Tensor, source: str) -> None:
    """Check that tokens are in a model's vocabulary, as its embedding would read out of bounds.

    Args:
        model: model whose configuration has the vocabulary size; without one nothing is checked.
        tokens: any shape; tokens on an accelerator are not checked, to avoid a synchronization.
        source: description of the tokens, for the message.

    Raises:
        DataError: tokens are not integers, or a token is negative or not below the vocabulary size.
    """
    if tokens.is_floating_point() or tokens.is_complex() or tokens.ndim == 0:
        raise DataError(
            f"{source}: tokens must be a tensor of integers with a dim, got {tokens.dtype} of shape"
            f" {tuple(tokens.shape)}"
        )
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if vocabulary is None or tokens.device.type != "cpu" or not tokens.numel():
        return
    smallest, largest = int(tokens.min()), int(tokens.max())
    if smallest < 0 or largest >= vocabulary:
        raise DataError(
            f"{source}: tokens must be 0 to {vocabulary - 1} for {type(model).__name__}, got"
            f" {smallest} to {largest}; use the model's own tokenizer"
        )


def vocabulary_of(model: nn.Module) -> int:
    """Return the vocabulary size in a model's configuration."""
    return int(model.config.vocab_size)  # type: ignore[union-attr,arg-type]
