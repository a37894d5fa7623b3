"""Sparsity patterns: unstructured, or N of every M adjacent weights in a row.

Shapes: N rows, K features.
"""

import re
from typing import TYPE_CHECKING, Protocol

from attrs import field, frozen

from ms_compress.arguments import shown
from ms_compress.errors import ConfigError, LayerError
from ms_compress.settings import number

if TYPE_CHECKING:
    from torch import Tensor


class Pattern(Protocol):
    """A sparsity pattern, which selects the weights to keep by their scores."""

    @property
    def sparsity(self) -> float:
        """Fraction of weights that are pruned."""
        ...

    def keep(self, scores: "Tensor", sparsity: float | None = None) -> "Tensor":
        """Return the weights to keep: (N, K) bool.

        Args:
            scores: (N, K), importance of each weight.
            sparsity: a smaller sparsity than the pattern's, for gradual pruning.
        """
        ...

    def check(self, name: str, features: int) -> None:
        """Check that the pattern divides rows of `features` weights."""
        ...


@frozen
class Unstructured:
    """Prune the weights with the lowest scores of each row, or of the whole matrix."""

    sparsity: float = field(validator=number(below=1.0))
    """Fraction of weights that are pruned, at least 0 and below 1."""
    by_row: bool = False

    def keep(self, scores: "Tensor", sparsity: float | None = None) -> "Tensor":
        """Keep all but the round(sparsity · count) weights with the lowest scores, (N, K) bool."""
        fraction = self.sparsity if sparsity is None else sparsity
        rows = scores if self.by_row else scores.reshape(1, -1)  # one row: the whole matrix
        count = round(fraction * rows.shape[1])
        mask = rows.new_ones(rows.shape).bool()
        if count:
            mask.scatter_(1, rows.topk(count, dim=1, largest=False).indices, False)
        return mask.view(scores.shape)

    def check(self, name: str, features: int) -> None:
        """Accept any row."""


@frozen
class NOfM:
    """Keep the N highest scores of every M adjacent weights in a row, such as 2:4."""

    n: int
    m: int

    def __attrs_post_init__(self) -> None:
        if not 0 < self.n < self.m:
            raise ConfigError(
                f"a pattern N:M needs 0 < N < M, got {self.n}:{self.m}; 2:4 prunes half"
            )

    @property
    def sparsity(self) -> float:
        """1 - N / M."""
        return 1 - self.n / self.m

    def keep(self, scores: "Tensor", sparsity: float | None = None) -> "Tensor":
        """Keep N per group, (N, K) bool; a smaller sparsity prunes the groups of least loss."""
        groups = scores.reshape(-1, self.m)  # (N · K / M, M)
        pruned = groups.topk(self.m - self.n, dim=1, largest=False).indices
        mask = groups.new_ones(groups.shape).bool().scatter_(1, pruned, False)
        if sparsity is not None and sparsity < self.sparsity:
            count = round(len(groups) * sparsity / self.sparsity)
            loss = groups.masked_fill(mask, 0).sum(1)  # score that pruning each group would lose
            unpruned = loss.argsort()[count:]
            mask[unpruned] = True
        return mask.view(scores.shape)

    def check(self, name: str, features: int) -> None:
        """Check that M divides the rows.

        Raises:
            LayerError: it does not; the message names the layer.
        """
        if features % self.m:
            divisors = [size for size in (2, 4, 8, 16, 32) if features % size == 0]
            raise LayerError(
                f"{name}: {self.n}:{self.m} needs rows whose length is a multiple of {self.m},"
                f" got {features};"
                f" {'use M from ' + str(divisors) if divisors else 'prune unstructured'}, or name"
                " the layer as an exception"
            )


def parse_pattern(text: str | float | Pattern) -> Pattern:
    """Parse a pattern such as `"2:4"`, or a sparsity such as 0.5.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(text, str):
        if match := re.fullmatch(r"(\d+):(\d+)", text.strip()):
            return NOfM(int(match[1]), int(match[2]))
        try:
            text = float(text)
        except ValueError as error:
            raise ConfigError(
                f"a pattern must be N:M or a sparsity, got {shown(text)}; use '2:4' or 0.5"
            ) from error
    if isinstance(text, bool) or not (isinstance(text, int | float) or hasattr(text, "keep")):
        raise ConfigError(
            f"a pattern must be N:M or a sparsity, got {shown(text)}; use '2:4' or 0.5"
        )
    return Unstructured(float(text)) if isinstance(text, int | float) else text
