"""Model output of the single-process engine, with logits, losses and heads computed on demand.

Shapes: B rows, S positions, V vocabulary, N counted positions.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ms_align.errors import ModelError
from ms_align.losses.protocol import IGNORED
from ms_align.losses.token_statistics import (
    Scratch,
    losses_and_entropies,
    projected_losses_and_entropies,
)
from ms_align.models.language_model import LanguageModel

EVERYWHERE = slice(None)


class LocalOutput:
    """Final hidden states, with lazily computed logits, losses, entropies and heads.

    The output projection is applied only at positions with a target. Losses and entropies of the
    same positions and temperature share one matmul.
    """

    def __init__(
        self,
        hidden: Tensor,
        model: LanguageModel,
        heads: Mapping[str, nn.Module],
        scratch: Scratch,
    ) -> None:
        self.hidden = hidden
        self._model = model
        self._heads = heads
        self._scratch = scratch
        self._cached: tuple[Tensor, float, Tensor] | None = None
        """Mask, temperature and entropies (N,) of the last `token_losses` call."""

    def logits(self, positions: slice = EVERYWHERE) -> Tensor:
        """Compute logits (B, S, V), of all positions or a slice."""
        return self._model.project(self.hidden[:, positions])

    def token_losses(self, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
        """Compute -log p(target), float32 (B, S), 0 where the target is -100."""
        counted = targets != IGNORED
        losses, entropies = self._statistics(counted, targets[counted], temperature)
        self._cached = counted, temperature, entropies
        return _scatter(losses, counted)

    def entropies(self, counted: Tensor, *, temperature: float = 1.0) -> Tensor:
        """Compute the entropy of p in nats, float32 (B, S), where counted; 0 elsewhere."""
        values = self._cached_entropies(counted, temperature)
        if values is None:
            # The entropy needs no targets; any valid token id will do.
            dummy = torch.zeros(int(counted.sum()), dtype=torch.int64, device=counted.device)
            values = self._statistics(counted, dummy, temperature)[1]
        return _scatter(values, counted)

    def head(self, name: str) -> Tensor:
        """Apply an extra head to the final hidden states, float32 (B, S, head width)."""
        if name not in self._heads:
            raise ModelError(
                f"the engine has no head {name!r}; build it with heads={{{name!r}: 1}}"
            )
        result: Tensor = self._heads[name](self.hidden.float())
        return result

    def _cached_entropies(self, counted: Tensor, temperature: float) -> Tensor | None:
        """Return the cached entropies if they match and are differentiable where required."""
        if self._cached is None or self._cached[1] != temperature:
            return None
        positions, _, entropies = self._cached
        # Computed without gradient, but a differentiable result is needed now.
        if torch.is_grad_enabled() and not entropies.requires_grad:
            return None
        return entropies if torch.equal(positions, counted) else None

    def _statistics(
        self, counted: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Compute losses and entropies, (N,) each, at the counted positions."""
        hidden, weight = self.hidden[counted], self._model.head_weight
        if weight is None:
            return losses_and_entropies(self._model.project(hidden), targets, temperature)
        return projected_losses_and_entropies(hidden, weight, targets, temperature, self._scratch)


def _scatter(values: Tensor, counted: Tensor) -> Tensor:
    """Write values (N,) to the counted positions of a zero tensor (B, S)."""
    result = torch.zeros(counted.shape, dtype=values.dtype, device=values.device)
    return result.masked_scatter(counted, values)
