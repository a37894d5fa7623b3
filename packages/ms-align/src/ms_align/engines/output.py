"""What a loss may ask of a model in one process, computed only where it is asked for.

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
    """Final hidden states, from which logits, losses and extra heads follow as they are asked for.

    Only positions with a target are ever multiplied with the head; losses and entropies of the same
    positions at the same temperature are of one product.
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
        self._known: tuple[Tensor, float, Tensor] | None = None
        """Which positions were last asked for, at which temperature, and their entropies."""

    def logits(self, positions: slice = EVERYWHERE) -> Tensor:
        """Compute the logits (B, S, V), or those of some positions."""
        return self._model.project(self.hidden[:, positions])

    def token_losses(self, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
        """Compute -log p(target), float32 (B, S), 0 where the target is -100."""
        counted = targets != IGNORED
        losses, entropies = self._statistics(counted, targets[counted], temperature)
        self._known = counted, temperature, entropies
        return _spread(losses, counted)

    def entropies(self, counted: Tensor, *, temperature: float = 1.0) -> Tensor:
        """Compute the entropy of p in nats, float32 (B, S), where counted."""
        found = self._recall(counted, temperature)
        if found is None:
            anything = torch.zeros(int(counted.sum()), dtype=torch.int64, device=counted.device)
            found = self._statistics(counted, anything, temperature)[1]
        return _spread(found, counted)

    def head(self, name: str) -> Tensor:
        """Apply an extra head to the hidden states, float32 (B, S, its width)."""
        if name not in self._heads:
            raise ModelError(
                f"the engine has no head {name!r}; build it with heads={{{name!r}: 1}}"
            )
        made: Tensor = self._heads[name](self.hidden.float())
        return made

    def _recall(self, counted: Tensor, temperature: float) -> Tensor | None:
        """Return the last losses' entropies if they fit these positions and are differentiable."""
        if self._known is None or self._known[1] != temperature:
            return None
        positions, _, entropies = self._known
        if torch.is_grad_enabled() and not entropies.requires_grad:
            return None
        return entropies if torch.equal(positions, counted) else None

    def _statistics(
        self, counted: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Compute losses and entropies (N,) of the counted positions."""
        hidden, weight = self.hidden[counted], self._model.head_weight
        if weight is None:
            return losses_and_entropies(self._model.project(hidden), targets, temperature)
        return projected_losses_and_entropies(hidden, weight, targets, temperature, self._scratch)


def _spread(values: Tensor, counted: Tensor) -> Tensor:
    """Put values (N,) at the counted places of zeros (B, S)."""
    spread = torch.zeros(counted.shape, dtype=values.dtype, device=values.device)
    return spread.masked_scatter(counted, values)
