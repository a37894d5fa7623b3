"""Generates with an engine that spreads its model over processes."""

from collections.abc import Sequence
from typing import Protocol

import torch

from ms_align.errors import ConfigError
from ms_align.generation.responses import Responses
from ms_align.sampling import Sampling

__all__ = ["EngineGenerator", "GeneratingEngine"]


class GeneratingEngine(Protocol):
    """An engine that continues prompts itself, as `ms_parallel.Engine` does."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = ...,
        top_k: int | None = ...,
        seed: int = ...,
        stop_token: int | None = ...,
    ) -> list[list[int]]:
        """The new tokens of each of this data rank's prompts."""


class EngineGenerator:
    """Generates with the engine's own loop, under any layout.

    It keeps no log-probabilities: the trainer asks the engine's forward for them. The same seed
    draws the same under every layout.

    Args:
        engine: what generates.
    """

    def __init__(self, engine: GeneratingEngine) -> None:
        self.engine = engine

    def __call__(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, count: int = 1, seed: int = 0
    ) -> Responses:
        """`count` responses to each prompt; those to one prompt are neighbours.

        Raises:
            ConfigError: the sampling needs what the engine's loop has not.
        """
        if sampling.top_p < 1 or sampling.min_p > 0 or sampling.stop_strings:
            raise ConfigError(
                "this engine generates with temperature, top_k and one stop token alone; leave out "
                "top_p, min_p and stop_strings, or give a generator of your own"
            )
        if len(sampling.stop_tokens) > 1:
            raise ConfigError("this engine stops at one token; give one of stop_tokens")
        stop = sampling.stop_tokens[0] if sampling.stop_tokens else None
        rows = self.engine.generate(
            [prompt for prompt in prompts for _ in range(count)],
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            seed=seed,
            stop_token=stop,
        )
        lengths = torch.tensor([len(row) for row in rows])
        tokens = torch.zeros(len(rows), sampling.max_new_tokens, dtype=torch.int64)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = torch.tensor(row)
        stopped = torch.tensor([bool(row) and row[-1] == stop for row in rows])
        return Responses(
            tokens=tokens, lengths=lengths, logprobs=None, sampling_logprobs=None, stopped=stopped
        )
