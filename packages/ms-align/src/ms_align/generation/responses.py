"""Responses of a generator, and the protocols of generators.

Shapes: N responses, T longest response.
"""

from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Protocol

from attrs import fields, frozen
from torch import Tensor

from ms_align.generation.sampling import Sampling


@frozen(kw_only=True)
class Responses:
    """Responses to prompts, on the CPU; responses to one prompt are adjacent."""

    tokens: Tensor
    """(N, T) int64; 0 after the end of a response."""
    lengths: Tensor
    """(N,) int64; number of tokens, including a stop token."""
    logprobs: Tensor | None
    """(N, T) float32, log-probabilities under the policy at the sampling temperature. None: the
    trainer computes them with a forward pass."""
    sampling_logprobs: Tensor | None
    """(N, T) float32, log-probabilities under the truncated distribution that was sampled from."""
    stopped: Tensor
    """(N,) bool: ended by a stop token or string rather than at the maximum length."""
    versions: Tensor | None = None
    """(N, T) int64, version of the weights that sampled each token. None: not recorded."""

    @property
    def columns(self) -> dict[str, Tensor]:
        """All tensors by name, from which `Responses.of` builds the same responses."""
        columns = {item.name: getattr(self, item.name) for item in fields(type(self))}
        return {name: column for name, column in columns.items() if column is not None}

    @classmethod
    def of(cls, columns: Mapping[str, Tensor]) -> "Responses":
        """Build responses from tensors by name; those that are missing are None."""
        values: dict[str, Any] = {item.name: columns.get(item.name) for item in fields(cls)}
        return cls(**values)

    def row(self, index: int) -> list[int]:
        """Return the token ids of one response."""
        return self.tokens[index, : int(self.lengths[index])].tolist()


@frozen(kw_only=True)
class TimedResponses:
    """Responses, and when they were generated."""

    responses: Responses
    began_s: float
    """Time of the monotonic clock at which generation began."""
    ended_s: float

    @classmethod
    def measure(cls, generate: Callable[[], Responses]) -> "TimedResponses":
        """Generate responses and measure the time."""
        began_s = monotonic()
        responses = generate()
        return cls(responses=responses, began_s=began_s, ended_s=monotonic())


class Generator(Protocol):
    """Generates responses to prompts."""

    def __call__(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, count: int, seed: int
    ) -> Responses:
        """Generate `count` responses per prompt; the same seed gives the same responses."""


class RolloutEngine(Protocol):
    """Generates the responses that a policy is trained on, with the policy's newest weights."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, count: int, seed: int
    ) -> Responses:
        """Generate `count` responses per prompt of this data rank. Collective.

        All data ranks have the same number of prompts; responses to a prompt are adjacent.
        """

    def start(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, count: int, seed: int
    ) -> Callable[[], TimedResponses]:
        """Start `generate` with the weights of now; the result waits for the responses. Collective.

        An engine that cannot generate in the background does so before it returns. Responses are
        requested in the order in which they were started.
        """

    def update_weights(self, version: int) -> None:
        """Use the policy's current weights from now on. Collective.

        Args:
            version: number of the policy's updates so far, which `Responses.versions` repeat.
        """

    def close(self) -> None:
        """Release processes and connections."""
