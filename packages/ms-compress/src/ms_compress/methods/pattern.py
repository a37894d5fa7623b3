"""Sparsity patterns: which weights a mask keeps, unstructured or N of each M neighbours of a row.

Shapes: N rows, K features.
"""

import re
from typing import TYPE_CHECKING, Protocol

from attrs import field, frozen

from ms_compress.errors import ConfigError, LayerError
from ms_compress.settings import number

if TYPE_CHECKING:
    from torch import Tensor


class Pattern(Protocol):
    """A sparsity pattern, which chooses weights to keep by their scores."""

    @property
    def sparsity(self) -> float:
        """Share of weights that are pruned."""
        ...

    def keep(self, scores: "Tensor", sparsity: float | None = None) -> "Tensor":
        """Choose the weights to keep: (N, K) bool, True where one is kept.

        Args:
            scores: (N, K), what is lost by pruning each.
            sparsity: a lesser share on the way to the pattern's own.
        """
        ...

    def check(self, name: str, features: int) -> None:
        """Refuse rows that the pattern does not divide."""
        ...


@frozen
class Unstructured:
    """The pattern that prunes the lowest scores of each row, or of the whole matrix."""

    sparsity: float = field(validator=number(below=1.0))
    """Share of weights that are pruned, at least 0, below 1."""
    by_row: bool = False

    def keep(self, scores: "Tensor", sparsity: float | None = None) -> "Tensor":
        """Keep all but the exactly round(share · count) weights that score least, (N, K) bool."""
        share = self.sparsity if sparsity is None else sparsity
        rows = scores if self.by_row else scores.reshape(1, -1)
        count = round(share * rows.shape[1])
        kept = rows.new_ones(rows.shape).bool()
        if count:
            kept.scatter_(1, rows.topk(count, dim=1, largest=False).indices, False)
        return kept.view(scores.shape)

    def check(self, name: str, features: int) -> None:
        """Take any row."""


@frozen
class NOfM:
    """The pattern that keeps the N highest scores of each M neighbours of a row, such as 2:4."""

    kept: int
    of: int

    def __attrs_post_init__(self) -> None:
        if not 0 < self.kept < self.of:
            raise ConfigError(f"{self.kept}:{self.of} is no pattern; give N:M with 0 < N < M")

    @property
    def sparsity(self) -> float:
        """1 - N / M."""
        return 1 - self.kept / self.of

    def keep(self, scores: "Tensor", sparsity: float | None = None) -> "Tensor":
        """Keep by group, (N, K) bool; at a lesser share, prune first the groups that lose least."""
        groups = scores.reshape(-1, self.of)
        gone = groups.topk(self.of - self.kept, dim=1, largest=False).indices
        kept = groups.new_ones(groups.shape).bool().scatter_(1, gone, False)
        if sparsity is not None and sparsity < self.sparsity:
            count = round(len(groups) * sparsity / self.sparsity)
            loss = groups.masked_fill(kept, 0).sum(1)
            later = loss.argsort()[count:]
            kept[later] = True
        return kept.view(scores.shape)

    def check(self, name: str, features: int) -> None:
        """Refuse rows that M does not divide.

        Raises:
            LayerError: names the layer.
        """
        if features % self.of:
            fits = [m for m in (2, 4, 8, 16, 32) if features % m == 0]
            raise LayerError(
                f"{name}: {self.kept}:{self.of} needs rows of a multiple of {self.of}, and these"
                f" are of {features}; {'M may be ' + str(fits) if fits else 'prune unstructured'},"
                " or name the layer as an exception"
            )


def pattern(text: str | float | Pattern) -> Pattern:
    """Return the pattern of `"2:4"`, or of a share such as 0.5.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(text, str):
        if match := re.fullmatch(r"(\d+):(\d+)", text.strip()):
            return NOfM(int(match[1]), int(match[2]))
        try:
            text = float(text)
        except ValueError as error:
            raise ConfigError(f"{text!r} is no pattern; give '2:4' or a share as 0.5") from error
    if isinstance(text, bool) or not (isinstance(text, int | float) or hasattr(text, "keep")):
        raise ConfigError(f"{text!r} is no pattern; give '2:4' or a share as 0.5")
    return Unstructured(float(text)) if isinstance(text, int | float) else text
