"""What a generator gives back, and the Protocol of whatever generates.

Shapes: N responses, T their longest.
"""

from collections.abc import Sequence
from typing import Protocol

from attrs import frozen
from torch import Tensor

from ms_align.generation.sampling import Sampling


@frozen(kw_only=True)
class Responses:
    """Responses to prompts; those to one prompt are neighbours. All on the CPU."""

    tokens: Tensor
    """(N, T) int64; 0 behind a response's end."""
    lengths: Tensor
    """(N,) int64; tokens of each response, a stop token included."""
    logprobs: Tensor | None
    """(N, T) float32, of the policy at the sampling's temperature; None where the generator keeps
    none, and a forward must compute them."""
    sampling_logprobs: Tensor | None
    """(N, T) float32, of the distribution that the tokens were drawn from."""
    stopped: Tensor
    """(N,) bool: ended by a stop token or string, not by length."""

    def row(self, index: int) -> list[int]:
        """Return the tokens of one response."""
        return self.tokens[index, : int(self.lengths[index])].tolist()


class Generator(Protocol):
    """Continues prompts."""

    def __call__(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, count: int, seed: int
    ) -> Responses:
        """Write `count` responses to each prompt; the same seed draws the same."""
