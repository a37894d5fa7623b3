"""Interfaces between evaluation and models: scoring of continuations, and generation."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from attrs import frozen
from torch import Tensor

from ms_align.generation.sampling import Sampling


class ContinuationScore(NamedTuple):
    """Score of a continuation, as lm-evaluation-harness expects it."""

    logprob: float
    """Sum of the token log-probabilities, in nats."""
    greedy: bool
    """True if every token is the most likely one."""


@frozen(kw_only=True)
class Row:
    """Context and continuation as one sequence of tokens."""

    tokens: tuple[int, ...]
    """Token ids; at least one precedes the continuation."""
    scored: int
    """Length of the continuation at the end."""


class Scorer(Protocol):
    """Model that scores continuations and generates."""

    @property
    def context(self) -> int | None:
        """Maximum number of tokens; None: no limit."""

    def score(self, rows: Sequence[Row], /) -> list[ContinuationScore]:
        """Score each row's continuation, in the order of the rows."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, /, *, seed: int
    ) -> list[list[int]]:
        """Generate new tokens for each prompt; generation ends with the first stop, included."""


@runtime_checkable
class ExportedModel(Protocol):
    """Exported model in its runtime.

    `ms_compress.open_runtime(folder, "gguf")` returns one.
    """

    def logits(self, tokens: Tensor, /) -> Tensor:
        """Return the logits (B, S, V) float32 for tokens (B, S) int64."""

    def generate(self, tokens: list[int], max_tokens: int, /) -> list[int]:
        """Generate greedily until an end-of-text token, at most `max_tokens` tokens."""
