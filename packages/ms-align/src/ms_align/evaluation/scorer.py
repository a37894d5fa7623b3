"""What an evaluation asks of whatever computes a model: scores of continuations, and texts."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from attrs import frozen
from torch import Tensor

from ms_align.generation.sampling import Sampling


class ContinuationScore(NamedTuple):
    """A continuation's score, as lm-evaluation-harness wants it."""

    logprob: float
    """Sum of its tokens' log-probabilities, in nats."""
    greedy: bool
    """Whether each of its tokens is the likeliest one."""


@frozen(kw_only=True)
class Row:
    """Tokens, of which the last ones are scored."""

    tokens: tuple[int, ...]
    """At least one before the scored ones."""
    scored: int
    """How many of the last tokens are the continuation."""


class Scorer(Protocol):
    """A model that scores and writes."""

    @property
    def context(self) -> int | None:
        """Tokens that it takes at most; None where there is no limit."""

    def score(self, rows: Sequence[Row], /) -> list[ContinuationScore]:
        """Score each row's continuation, in order."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, /, *, seed: int
    ) -> list[list[int]]:
        """Generate the new tokens of each prompt, without those behind the first stop."""


@runtime_checkable
class ExportedModel(Protocol):
    """A model in the runtime that it was exported for, as `ms_compress` opens one.

    `ms_compress.targets.target.open_runtime(folder, "gguf")` gives one.
    """

    def logits(self, tokens: Tensor, /) -> Tensor:
        """Compute the logits (B, S, V) float32 of tokens (B, S) int64."""

    def generate(self, tokens: list[int], most: int, /) -> list[int]:
        """Generate the likeliest next tokens until one ends the text, `most` of them at most."""
