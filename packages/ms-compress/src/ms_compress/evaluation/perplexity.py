"""Perplexity of a text, in this process or in a runtime."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ms_compress.errors import DataError
from ms_compress.models.logits import check_tokens, model_logits
from ms_compress.targets.target import Runtime

IGNORED = -100
"""A target that does not count."""


def perplexity(
    model: nn.Module | Runtime,
    text: Tensor | Mapping[str, Tensor],
    *,
    batch_size: int = 4,
    progress: Callable[[int, int], object] | None = None,
) -> float:
    """Measure perplexity: exp of the mean loss of a token.

    Args:
        model: of transformers or ms-parallel, in evaluation mode; or whatever gives logits.
        text: rows of tokens (N, L) int64, the targets being the next ones; or `tokens` and
            `targets`, (N, S) int64, where targets of -100 do not count.
        batch_size: rows at once.
        progress: called with how many rows are done, and how many there are.

    Raises:
        DataError: the vocabulary does not hold the text's tokens, no target counts, or a loss is
            NaN.
    """
    if isinstance(text, Tensor):
        text = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    total, count = 0.0, 0
    for first in range(0, len(text["tokens"]), batch_size):
        part = slice(first, first + batch_size)
        tokens, targets = text["tokens"][part], text["targets"][part]
        if isinstance(model, nn.Module):
            check_tokens(model, tokens, "the text")
        logits, name = _logits(model, tokens)
        read = torch.cat([tokens.flatten(), targets[targets != IGNORED]])
        wrong = read[(read < 0) | (read >= logits.shape[-1])]
        if wrong.numel():
            raise DataError(
                f"the text has token {int(wrong[0])}, and the model in {name} a vocabulary of"
                f" {logits.shape[-1]}; use the model's own tokenizer"
            )
        total += float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
        if math.isnan(total):
            raise DataError(f"the model in {name} gives a loss that is NaN; look at its weights")
        count += int((targets >= 0).sum())
        if progress is not None:
            progress(first + len(tokens), len(text["tokens"]))
    if not count:
        raise DataError("no held-out token has a target; use longer sequences")
    return math.exp(min(total / count, 700.0))


def _logits(model: nn.Module | Runtime, tokens: Tensor) -> tuple[Tensor, str]:
    if isinstance(model, nn.Module):
        return model_logits(model, tokens), type(model).__name__
    return model.logits(tokens), model.name
