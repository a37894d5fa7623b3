"""Quality of a quantized model: perplexity, and divergence from the float model."""

import math
from statistics import fmean
from typing import Self

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F

from ms_compress.deployment.verification import probe
from ms_compress.errors import ConfigError, DataError
from ms_compress.evaluation.divergence import compare_logits
from ms_compress.figures import figure
from ms_compress.models.logits import check_tokens, model_logits, vocabulary_of
from ms_compress.options import QuantizeRun
from ms_compress.run.dataset import quality_rows

SAMPLE_ROWS = 16
LOGITS = 2**27
"""Maximum number of float logits in memory: 512 MiB."""


@frozen(kw_only=True)
class Quality:
    """Comparison of a quantized model with its float model, on the same tokens."""

    kl: float
    """KL(float || quantized) of the next token, in nats."""
    agreement: float
    """Fraction of positions where both models have the same most likely token."""
    float_perplexity: float | None
    """None if the tokens are not text."""
    perplexity: float | None
    tokens: int
    source: str
    """Source of the tokens."""

    def __str__(self) -> str:
        perplexities = ""
        if self.perplexity is not None and self.float_perplexity is not None:
            perplexities = (
                f"perplexity {figure(self.perplexity, 4)} (float"
                f" {figure(self.float_perplexity, 4)}), "
            )
        return (
            f"{perplexities}KL {figure(self.kl)} nats per token to the float model, the same most"
            f" likely token at {self.agreement:.1%} of positions ({self.tokens} tokens of"
            f" {self.source})"
        )


@frozen(kw_only=True, eq=False)
class QualityTest:
    """Tokens with the float model's logits, as the reference for a quantized model."""

    tokens: Tensor
    """(R, S) int64."""
    source: str
    is_text: bool
    float_logits: tuple[Tensor, ...]
    """One tensor (1, S, V) per row."""

    @classmethod
    def of(cls, model: nn.Module, options: QuantizeRun) -> Self:
        """Compute a float model's logits on the run's dataset, or on a probe without a dataset.

        Raises:
            ConfigError, DataError: the dataset is invalid and the method needs it.
        """
        length, vocabulary = options.tuning.sequence_length + 1, vocabulary_of(model)
        rows = max(1, min(SAMPLE_ROWS, LOGITS // (length * vocabulary)))
        try:
            tokens, source = quality_rows(options, rows)
            check_tokens(model, tokens, str(options.dataset))
            is_text = True
        except (ConfigError, DataError):
            # Rounding to nearest needs no data.
            if options.method != "rtn" or options.needs_dataset:
                raise
            tokens, source = probe(vocabulary), "a probe; set dataset to measure on your text"
            is_text = False
        logits = tuple(model_logits(model, row) for row in torch.split(tokens, 1))
        return cls(tokens=tokens, source=source, is_text=is_text, float_logits=logits)

    @torch.no_grad()
    def measure(self, model: nn.Module) -> Quality:
        """Compare a quantized model with the float model."""
        rows = torch.split(self.tokens, 1)
        losses, divergences = [], []
        for row, float_logits in zip(rows, self.float_logits, strict=True):
            logits = model_logits(model, row)
            divergences.append(compare_logits(float_logits, logits))
            losses.append([_loss(item, row) for item in (float_logits, logits)])
        perplexities = [
            math.exp(min(fmean(column), 700.0)) if self.is_text else None
            for column in zip(*losses, strict=True)
        ]
        return Quality(
            kl=fmean(item.kl for item in divergences),
            agreement=fmean(item.agreement for item in divergences),
            float_perplexity=perplexities[0],
            perplexity=perplexities[1],
            tokens=self.tokens.numel(),
            source=self.source,
        )


def _loss(logits: Tensor, tokens: Tensor) -> float:
    """Return the mean loss per token of logits (1, S, V)."""
    return float(F.cross_entropy(logits[0, :-1], tokens[0, 1:])) if tokens.shape[1] > 1 else 0.0
