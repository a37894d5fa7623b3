"""Perplexity of a text under a model in this process or in a runtime."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ms_compress.arguments import check_callable, check_integer, shown
from ms_compress.errors import ConfigError, DataError
from ms_compress.models.logits import IGNORED, as_columns, check_tokens, model_logits
from ms_compress.targets.target import Runtime


def perplexity(
    model: nn.Module | Runtime,
    text: Tensor | Mapping[str, Tensor],
    *,
    batch_size: int = 4,
    progress: Callable[[int, int], object] | None = None,
) -> float:
    """Return the perplexity: exp of the mean loss per token.

    Args:
        model: model from transformers or ms-parallel, in evaluation mode, or a runtime.
        text: tokens (N, L) int64, whose targets are the next tokens; or `tokens` and `targets`,
            (N, S) int64, where targets of -100 are ignored.
        batch_size: rows per batch.
        progress: called with the number of finished rows and the total.

    Raises:
        DataError: a token is outside the vocabulary, all targets are ignored, or a loss is NaN.
    """
    if not (isinstance(model, nn.Module) or hasattr(model, "logits")):
        raise ConfigError(f"model must be a torch.nn.Module or a runtime, got {shown(model)}")
    check_integer("batch_size", batch_size, minimum=1, error=ConfigError)
    check_callable("progress", progress, error=ConfigError, optional=True)
    text = as_columns(text)
    total, count = 0.0, 0
    for first in range(0, len(text["tokens"]), batch_size):
        batch = slice(first, first + batch_size)
        tokens, targets = text["tokens"][batch], text["targets"][batch]
        if isinstance(model, nn.Module):
            check_tokens(model, tokens, "the text")
        logits, name = _logits(model, tokens)
        # The targets too, as the last target of a row is not among its tokens.
        used_tokens = torch.cat([tokens.flatten(), targets[targets != IGNORED]])
        out_of_range = used_tokens[(used_tokens < 0) | (used_tokens >= logits.shape[-1])]
        if out_of_range.numel():
            raise DataError(
                f"the text: tokens must be 0 to {logits.shape[-1] - 1} for {name}, got"
                f" {int(out_of_range[0])}; use the model's own tokenizer"
            )
        # Summed, as batches may have different numbers of targets.
        total += float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
        if math.isnan(total):
            raise DataError(f"the model in {name} gives a loss of NaN; check its weights")
        count += int((targets >= 0).sum())
        if progress is not None:
            progress(first + len(tokens), len(text["tokens"]))
    if not count:
        raise DataError("no held-out token has a target; increase sequence_length")
    return math.exp(min(total / count, 700.0))  # exp of more than 709 overflows


def _logits(model: nn.Module | Runtime, tokens: Tensor) -> tuple[Tensor, str]:
    if isinstance(model, nn.Module):
        return model_logits(model, tokens), type(model).__name__
    return model.logits(tokens), model.name
