"""Responses of a generator, and the protocols of generators.

Shapes: N responses, T longest response.
"""

from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Literal, Protocol

import torch
from attrs import field, fields, frozen
from torch import Tensor

from ms_align.generation.sampling import Sampling


@frozen(kw_only=True)
class Episode:
    """Record of an episode with tools or an environment."""

    prompt: Sequence[int] = field(converter=tuple)
    """Tokens before the first response, including an environment's first observation."""
    messages: Sequence[Mapping[str, Any]] = field(converter=tuple)
    """The conversation in OpenAI's format, from the prompt to the last response."""
    turns: int = 0
    """Number of responses."""
    calls: int = 0
    """Number of tool calls that were answered."""
    call_failures: int = 0
    """Calls that were malformed, raised an error or exceeded a limit."""
    rewritten: int = 0
    """Turns where rendering the entire conversation would have changed earlier text; the policy saw
    its own tokens instead."""
    forks: int = 0
    """Branches of an agent's conversation that are not trained on, from requests that changed
    earlier messages."""
    reward: float | None = None
    """Sum of the environment's rewards, or the agent's result; None if there is neither."""
    failure: str = ""
    """Reason why the episode cannot be used; "" for a valid episode."""


@frozen(kw_only=True)
class Responses:
    """Responses to prompts, on the CPU; responses to one prompt are adjacent.

    With tools or an environment, a response is everything after the prompt: the policy's tokens of
    all turns, and the results and observations between them.
    """

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
    tool_mask: Tensor | None = None
    """(N, T) bool, False at tokens that the policy did not sample, such as results of tools. None:
    all tokens were sampled."""
    routed_experts: Tensor | None = None
    """(N, P + T - 1, layers, k) int16, experts of each row's prompt and response except the last
    token; -1 after the end of a row. None: not recorded."""
    episodes: Sequence[Episode] | None = None
    """Record of each response's episode. None: responses of one turn."""

    @property
    def sampled_lengths(self) -> Tensor:
        """(N,) int64; number of tokens that the policy sampled."""
        if self.tool_mask is None:
            return self.lengths
        positions = torch.arange(self.tokens.shape[1])
        return (self.tool_mask & (positions < self.lengths[:, None])).sum(1)

    def select(self, rows: slice) -> "Responses":
        """Return some of the responses."""
        columns: dict[str, Any] = {}
        for name in (item.name for item in fields(Responses)):
            value = getattr(self, name)
            columns[name] = None if value is None else value[rows]
        return Responses(**columns)

    @property
    def columns(self) -> dict[str, Tensor]:
        """All tensors by name, from which `Responses.of` builds the same responses."""
        columns = {item.name: getattr(self, item.name) for item in fields(type(self))}
        return {name: column for name, column in columns.items() if isinstance(column, Tensor)}

    @classmethod
    def of(cls, columns: Mapping[str, Tensor]) -> "Responses":
        """Build responses from tensors by name; missing names become None."""
        values: dict[str, Any] = {item.name: columns.get(item.name) for item in fields(cls)}
        return cls(**values)

    def row(self, index: int) -> list[int]:
        """Return the token ids of one response."""
        return self.tokens[index, : int(self.lengths[index])].tolist()


@frozen(kw_only=True)
class Span:
    """Time interval of one part of a rollout or update, on the monotonic clock."""

    kind: Literal["generate", "reward", "learn", "update_weights"]
    """Event name of the span."""
    began_s: float
    ended_s: float
    generator: int | None = None
    """Index of the generator, for `generate`."""


@frozen(kw_only=True)
class TimedResponses:
    """Responses with the time of their generation."""

    responses: Responses
    began_s: float
    """Time of the monotonic clock at which generation began."""
    ended_s: float
    spans: Sequence[Span] = ()
    """Times of the generators, and of weight updates in the background."""

    @classmethod
    def measure(cls, generate: Callable[[], Responses]) -> "TimedResponses":
        """Generate responses and measure the time."""
        began_s = monotonic()
        responses = generate()
        ended_s = monotonic()
        span = Span(kind="generate", began_s=began_s, ended_s=ended_s, generator=0)
        return cls(responses=responses, began_s=began_s, ended_s=ended_s, spans=(span,))


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
        """Start `generate` with the current weights; the result waits for it. Collective.

        An engine that cannot generate in the background generates before this returns. Callers
        wait for responses in the order in which they were started.
        """

    def update_weights(self, version: int) -> None:
        """Use the policy's current weights from now on. Collective.

        Args:
            version: number of the policy's updates so far, which `Responses.versions` repeat.
        """

    def close(self) -> None:
        """Release processes and connections."""
